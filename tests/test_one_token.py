"""One token through a river layer in one native call: what it computes, for which layers, and when it stands back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import logits_of_steps, tokens
from torch import nn

from river_offload import QuantConfig
from river_offload.config import default_cache_dir
from river_offload.errors import ContextError
from river_offload.layer import RiverLayer
from river_offload.one_token import OneToken
from river_offload.quant.kernels import MatrixSpec
from river_offload.quant.kernels.native_cpu import NativeInt4

SERVED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "ministral3")
TEXT = 75
"""Tokens of the longest text: more keys than are scored at once."""


def layers(model: Any) -> list[RiverLayer]:
    return list(model.model.layers)


@pytest.fixture
def opened(open_river: Callable[..., Any]) -> Callable[..., Any]:
    """`opened("llama")`: on the river alone, with a context that no window of its kind is shorter than."""

    def made(family: str = "llama", **options: Any) -> Any:
        return open_river(family, **{"mode": "quantized", "context": TEXT + 1} | options)

    return made


@pytest.fixture
def full_attention(checkpoint: Callable[..., Any]) -> Callable[[str], Any]:
    """The checkpoint of a family whose layers all see the whole text."""
    return lambda family: checkpoint(family, sliding_window=None) if family == "mistral" else checkpoint(family)


class Places:
    """Random states of a text, their places, and a cache to put them through a layer one after the other."""

    def __init__(self, model: Any, seed: int = 3) -> None:
        config, dtype = model.config, model.dtype
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(1, TEXT, config.hidden_size, generator=generator).to(dtype)
        self.embeddings = model.model.rotary_emb(self.states, torch.arange(TEXT)[None])
        self.cache = model.river.new_cache(TEXT)

    def call(self, first: int, last: int) -> tuple[torch.Tensor, dict[str, Any]]:
        embeddings = tuple(part[:, first:last] for part in self.embeddings)
        return self.states[:, first:last], {
            "position_embeddings": embeddings,
            "position_ids": torch.arange(first, last)[None],
            "attention_mask": None,
            "cache": self.cache,
        }


@torch.no_grad()
def compared(model: Any, layer: RiverLayer, prompt: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """After a prompt, what the call and the layer itself make of the same tokens: states, keys, values."""
    one_token = layer.one_token
    assert isinstance(one_token, OneToken) and layer.river is not None
    found, expected = Places(model), Places(model)
    states: list[list[torch.Tensor]] = [[], []]
    for places in (found, expected):
        entering, kwargs = places.call(0, prompt)
        layer.river(entering, **kwargs)
    for at in range(prompt, TEXT):
        entering, kwargs = found.call(at, at + 1)
        state = one_token.run(entering, (), kwargs)
        assert state is not None
        states[0].append(state)
        entering, kwargs = expected.call(at, at + 1)
        states[1].append(layer.river(entering, **kwargs))
    caches = [places.cache.layers[layer.depth] for places in (found, expected)]
    return [
        (torch.cat(states[0], 1), torch.cat(states[1], 1)),
        (caches[0].keys, caches[1].keys),
        (caches[0].values, caches[1].values),
    ]


@pytest.mark.parametrize("bits", [4, 3, 8])
@pytest.mark.parametrize("family", SERVED)
def test_it_computes_what_the_layer_does(
    family: str, bits: int, opened: Callable[..., Any], full_attention: Callable[[str], Any]
) -> None:
    model = opened(full_attention(family), quant=QuantConfig(bits=bits, group_size=32))
    for layer in layers(model):
        for found, expected in compared(model, layer):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def agree_in_bfloat16(model: Any) -> None:
    for layer in layers(model):
        (state, its_state), *cached = compared(model, layer)
        for found, expected in cached:  # made of the same states, by the same roundings
            assert (found == expected).float().mean() > 0.95
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)
        scale = float(its_state.float().abs().max())
        assert float((state.float() - its_state.float()).abs().max()) < 2**-6 * scale


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("family", SERVED)
def test_in_bfloat16_it_rounds_where_the_layer_does(
    family: str, group: int, opened: Callable[..., Any], full_attention: Callable[[str], Any]
) -> None:
    agree_in_bfloat16(opened(full_attention(family), quant=QuantConfig(bits=8, group_size=group), dtype="bfloat16"))


@pytest.mark.parametrize("hidden", [64, 288, 512])
def test_four_bits_in_bfloat16(hidden: int, checkpoint: Callable[..., Any], opened: Callable[..., Any]) -> None:
    """What most rivers are, where the processor lets the native kernel multiply them: few groups a row and many."""
    model = opened(checkpoint("llama", hidden_size=hidden, intermediate_size=hidden + 32), dtype="bfloat16")
    if NativeInt4(default_cache_dir()).declines(MatrixSpec(64, 64, 4, 32, torch.bfloat16, "cpu")):
        assert {layer.one_token for layer in layers(model)} == {
            "its matrices are not all multiplied by the native kernel"
        }
    else:
        agree_in_bfloat16(model)


def test_rows_that_are_no_multiple_of_four(checkpoint: Callable[..., Any], opened: Callable[..., Any]) -> None:
    model = opened(checkpoint("qwen3", head_dim=6, num_attention_heads=16, num_key_value_heads=1))
    for found, expected in compared(model, layers(model)[0]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_not_one_bit(dtype: str, opened: Callable[..., Any]) -> None:
    model = opened("qwen3", dtype=dtype, quant=QuantConfig(bits=8, group_size=32))
    texts = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            texts.append([pair[0] for pair in compared(model, layers(model)[1])])
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(one, three) for one, three in zip(*texts, strict=True))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, list[bool]]]:
    """`watched(model, rows)`: a text, and for each layer of each of its tokens whether the call took it."""
    run = OneToken.run

    def generated(model: Any, rows: int = 1) -> tuple[torch.Tensor, list[bool]]:
        taken = []

        def noted(one_token: OneToken, *inputs: Any) -> Any:
            state = run(one_token, *inputs)
            taken.append(state is not None)
            return state

        monkeypatch.setattr(OneToken, "run", noted)
        return model.generate(tokens(9, rows=rows), max_new_tokens=12, do_sample=False), taken

    return generated


def test_a_generation_uses_it_and_gives_the_same_text(
    opened: Callable[..., Any], watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened()
    found, taken = watched(model)
    assert taken.count(True) == 11 * 5  # the first token is the prompt's
    assert model.river.report()["one_token"] == {"layers": 5, "declined": []}
    monkeypatch.setattr(OneToken, "run", lambda *_: None)
    assert torch.equal(found, model.generate(tokens(9), max_new_tokens=12, do_sample=False))


def stands_back(model: Any, **changes: Any) -> bool:
    """Does the call leave the token to the layer, and the cache as it is?"""
    layer, places = layers(model)[0], Places(model)
    assert isinstance(layer.one_token, OneToken) and layer.river is not None
    entering, kwargs = places.call(0, 5)
    layer.river(entering, **kwargs)
    entering, kwargs = places.call(5, 6)
    entering = changes.pop("states", entering)
    with torch.no_grad():
        state = layer.one_token.run(entering, changes.pop("args", ()), kwargs | changes)
    assert places.cache.layers[0].get_seq_length() == 5 + (state is not None)
    return state is None


def test_it_stands_back_from_all_but_one_token_of_one_row(opened: Callable[..., Any]) -> None:
    model = opened()
    places = Places(model)
    assert not stands_back(model)
    assert not stands_back(model, use_cache=True, position_ids=torch.tensor([[5]]), attention_mask=None)
    assert stands_back(model, states=places.states[:, 5:7])
    assert stands_back(model, states=places.states[:, 5:6].repeat(2, 1, 1))
    assert stands_back(model, states=places.states[:, 5:6].double())
    assert stands_back(model, states=places.states[:, 5:6].clone().requires_grad_())
    assert stands_back(model, attention_mask=torch.zeros(1, 1, 1, 6))
    assert stands_back(model, args=(None,))
    assert stands_back(model, output_attentions=True)
    assert stands_back(model, cache=None)
    layers(model)[0].river.train()
    assert stands_back(model)
    assert stands_back(opened("ministral3"), position_ids=None)


def test_it_stands_back_from_other_dtypes(opened: Callable[..., Any]) -> None:
    model = opened()
    cos, sin = Places(model).call(5, 6)[1]["position_embeddings"]
    assert not stands_back(model, position_embeddings=(cos, sin))
    assert stands_back(model, position_embeddings=(cos.double(), sin.double()))
    assert stands_back(model, position_embeddings=(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stands_back(model)
    layer, places = layers(model)[0], Places(model)
    assert isinstance(layer.one_token, OneToken)
    keys = torch.zeros(1, 2, 5, 32)
    places.cache.update(keys, keys.bfloat16(), 0)
    assert layer.one_token.run(*places.call(5, 6)[:1], (), places.call(5, 6)[1]) is None
    assert places.cache.layers[0].get_seq_length() == 5


def test_it_stands_back_from_a_norm_that_was_replaced(opened: Callable[..., Any]) -> None:
    model = opened()
    norm = layers(model)[0].get_submodule("river.input_layernorm")
    norm.weight.data.mul_(3)
    assert not stands_back(model)
    for found, expected in compared(model, layers(model)[0]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    norm.weight.data = norm.weight.data * 3
    assert stands_back(model)
    model = opened("qwen2")
    layers(model)[0].get_submodule("river.self_attn.q_proj").bias = nn.Parameter(torch.zeros(128), requires_grad=False)
    assert stands_back(model)


def test_whoever_watches_a_part_sees_it_run(opened: Callable[..., Any]) -> None:
    model = opened()
    seen: list[Any] = []
    river = layers(model)[0].river
    assert river is not None
    handle = river.get_submodule("mlp").register_forward_hook(lambda *_: seen.append(1))
    model.generate(tokens(9), max_new_tokens=6, do_sample=False)
    assert len(seen) == 6
    handle.remove()
    assert not stands_back(model)
    model.set_attn_implementation("eager")
    assert stands_back(model)


def test_batches_and_windows_are_for_the_layer(opened: Callable[..., Any], watched: Callable[..., Any]) -> None:
    for model, rows in ((opened(batch=2), 2), (opened("mistral"), 1)):  # a window of 8
        assert set(watched(model, rows)[1]) == {False}


@pytest.mark.parametrize("kind", [{"kv_bits": 8}, {"kv_tier": "host"}, {"kv_bits": 4, "kv_tier": "host"}])
def test_caches_of_other_kinds(
    kind: dict[str, Any], opened: Callable[..., Any], watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough that tokens come to rest on the way."""
    model, ids = opened(context=200, **kind), tokens(180)
    assert watched(model)[1].count(True) == 11 * 5
    found = logits_of_steps(model, ids, 60, model.river.new_cache())
    monkeypatch.setattr(OneToken, "run", lambda *_: None)
    expected = logits_of_steps(model, ids, 60, model.river.new_cache())
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-2 if "kv_bits" in kind else 1e-4)


@pytest.mark.parametrize("what", ["keys", "values"])
def test_a_cache_with_a_nan_shows(what: str, opened: Callable[..., Any]) -> None:
    model = opened()
    layer, places = layers(model)[0], Places(model)
    assert isinstance(layer.one_token, OneToken) and layer.river is not None
    entering, kwargs = places.call(0, 70)
    with torch.no_grad():
        layer.river(entering, **kwargs)
    getattr(places.cache.layers[0], what)[:, :, 3] = torch.nan
    entering, kwargs = places.call(70, 71)
    with torch.no_grad():
        state = layer.one_token.run(entering, (), kwargs)
    assert state is not None and state.isnan().all()


def test_a_full_cache_is_an_error(opened: Callable[..., Any]) -> None:
    model = opened()
    layer, places = layers(model)[0], Places(model)
    assert isinstance(layer.one_token, OneToken) and layer.river is not None
    entering, kwargs = places.call(0, TEXT)
    layer.river(entering, **kwargs)
    with pytest.raises(ContextError, match="76 tokens in a KV cache made for 75"):
        layer.one_token.run(entering[:, -1:], (), places.call(TEXT - 1, TEXT)[1])
