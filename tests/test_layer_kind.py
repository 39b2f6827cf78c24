"""Which layers take a token in one native call: those whose parts, code and results are of Llama's kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from river_offload.layer import RiverLayer
from river_offload.one_token import OneToken


@pytest.fixture
def opened(open_river: Callable[..., Any]) -> Callable[..., Any]:
    """`opened("llama")`: on the river alone."""
    return lambda family="llama", **options: open_river(family, **{"mode": "quantized"} | options)


def layer_of(model: Any) -> RiverLayer:
    layer: RiverLayer = model.model.layers[0]
    return layer


def test_layers_of_another_kind_are_left_alone(opened: Callable[..., Any]) -> None:
    model = opened("gemma3")
    for layer in model.model.layers:
        assert "post_feedforward_layernorm" in str(layer.one_token)
    report = model.river.report()["one_token"]
    assert report == {"layers": 0, "declined": [layer_of(model).one_token]}


@pytest.mark.parametrize("window", [2, 8])
def test_windows_of_any_length_load(window: int, checkpoint: Callable[..., Any], opened: Callable[..., Any]) -> None:
    model = opened(checkpoint("mistral", sliding_window=window))
    reason = "its attention slides within the context"
    assert model.river.report()["one_token"] == {"layers": 0, "declined": [reason]}


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "mish"])
def test_another_activation_is_told_however_small_its_gates(
    activation: str, checkpoint: Callable[..., Any], opened: Callable[..., Any]
) -> None:
    model = opened(checkpoint("llama", hidden_act=activation, initializer_range=0.002), dtype="bfloat16")
    assert "its activation is" in str(layer_of(model).one_token)


def test_a_layer_that_adds_nothing_is_served(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    river = layer_of(opened()).river
    assert river is not None
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        for part in ("scale", "offset"):
            getattr(river.get_submodule(name), part).zero_()
    assert isinstance(OneToken.of(river), OneToken)


def test_a_load_under_autocast_is_left_alone(opened: Callable[..., Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer_of(opened()).one_token == "it could not be tried here"


def test_code_that_names_something_else_is_not_trusted(opened: Callable[..., Any]) -> None:
    class Scaled(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.config.residual_multiplier

    river = copy.copy(layer_of(opened()).river)
    assert river is not None
    assert isinstance(OneToken.of(river), OneToken)
    mlp = river.get_submodule("mlp")
    mlp.__class__ = Scaled
    assert "residual_multiplier" in str(OneToken.of(river))
    mlp.__class__ = modeling_llama.LlamaMLP
    mlp.forward = lambda x: x
    assert OneToken.of(river) == "mlp was given a forward of its own"


class Older(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
    """As layers once were: the state in a tuple."""

    def forward(self, hidden_states: Any, position_embeddings: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        entering = hidden_states
        hidden_states, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, cache=cache, **kwargs
        )
        hidden_states = entering + hidden_states
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


class OtherwiseCalled(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
    def forward(self, hidden_states: Any, rotary: Any, past: Any) -> Any:
        return self.self_attn(self.input_layernorm(hidden_states), rotary, past)


def test_layers_of_older_code_load(opened: Callable[..., Any]) -> None:
    """Whatever a layer is like, to try it fails no load."""
    river = layer_of(opened()).river
    assert river is not None
    river.__class__ = Older
    assert OneToken.of(river) == "it could not be tried here"
    river.__class__ = OtherwiseCalled
    assert OneToken.of(river) == "it is not called as Llama's layers are"
    river.__class__ = modeling_llama.LlamaDecoderLayer
    attention = river.get_submodule("self_attn")
    scaling = attention.__dict__.pop("scaling")
    assert OneToken.of(river) == "self_attn has no scaling"
    attention.scaling = scaling
    assert isinstance(OneToken.of(river), OneToken)


def turned_in_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def test_results_that_differ_are_not_trusted(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names, another formula: rotary pairs that are neighbours, another activation."""
    river = layer_of(opened()).river
    assert river is not None
    with monkeypatch.context() as patch:
        patch.setattr(
            modeling_llama, "rotate_half", lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        )
        assert "its results are not those" in str(OneToken.of(river))
    assert isinstance(OneToken.of(river), OneToken)
