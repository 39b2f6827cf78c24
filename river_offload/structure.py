"""What a transformers model is made of: its decoder layers, the linears inside them, and everything else.

One code path for every dense decoder-only architecture: nothing here knows a model family by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from river_offload.errors import UnsupportedError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Structure:
    """A model without weights: parameters on the meta device, buffers (rotary tables) computed.

    Names are the model's own parameter names; a name inside a layer is relative to that layer.
    """

    model: PreTrainedModel
    decoder: PreTrainedModel
    """The model below the LM head: embedding, layers, final norm."""
    layers: nn.ModuleList
    layers_name: str
    """Where the layers hang in `model`: "model.layers"."""
    tied: Mapping[str, str]
    """Name of a parameter -> name of the one whose tensor it shares, as {"lm_head.weight": "model.embed_tokens.weight"}
    in most small models."""

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Structure:
        """Build the model that `config` names, on the meta device (accelerate), and find its parts.

        Raises UnsupportedError for anything but a dense decoder-only model.
        """
        _refuse_by_config(config)
        try:
            with init_empty_weights(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about initializing tensors on meta
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        except ValueError as error:
            reason, _, _ = str(error).partition("\n")  # transformers goes on with all the models it knows
            raise UnsupportedError(f"model type {config.model_type!r} makes no language model: {reason}") from error
        model.eval()
        model.tie_weights()
        decoder = model.get_decoder()
        name, layers = _layer_list(decoder, config)
        prefix = next(n for n, module in model.named_modules() if module is decoder)
        _refuse_by_layers(layers, type(model).__name__)
        return cls(model, decoder, layers, ".".join(filter(None, (prefix, name))), _tied(model))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def linears(self, layer: int) -> dict[str, nn.Linear]:
        """The matrices of a layer, by name inside the layer: what is quantized, and what is streamed."""
        return linears_of(self.layers[layer])

    def weight_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the linears' weights and biases, by name inside the layer, in the order they are laid out."""
        return {
            f"{name}.{leaf}": tuple(parameter.shape)
            for name, linear in self.linears(layer).items()
            for leaf, parameter in linear.named_parameters()
        }

    def norm_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Everything of a layer that a checkpoint holds and that is no linear: norms, mostly."""
        weights = self.weight_shapes(layer)
        return {name: tuple(t.shape) for name, t in persistent(self.layers[layer]) if name not in weights}

    def outside(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a checkpoint holds outside the layers, by full name: embedding, final norm, head."""
        inside = self.layers_name + "."
        return {name: tuple(t.shape) for name, t in persistent(self.model) if not name.startswith(inside)}

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that a checkpoint must hold, by full name."""
        return {name: tuple(tensor.shape) for name, tensor in persistent(self.model)}

    def full_name(self, layer: int, name: str) -> str:
        """Name in the model of the tensor `name` of a layer."""
        return f"{self.layers_name}.{layer}.{name}"

    @property
    def embedding_name(self) -> str:
        """Full name of the input embedding's weight."""
        embedding = self.model.get_input_embeddings()
        return next(f"{name}.weight" for name, module in self.model.named_modules() if module is embedding)

    @property
    def head(self) -> nn.Linear:
        """The LM head."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear), f"{type(self.model).__name__} has no linear LM head"
        return head

    @property
    def head_name(self) -> str:
        """Full name of the LM head's weight."""
        return next(f"{name}.weight" for name, module in self.model.named_modules() if module is self.head)

    def kinds(self) -> list[tuple[Any, ...]]:
        """One hashable per layer; layers of one kind have the same shapes and the same attention pattern."""
        types = getattr(self.decoder.config, "layer_types", None) or [None] * self.num_layers
        return [
            (types[i], tuple(self.weight_shapes(i).items()), tuple(self.norm_shapes(i).items()))
            for i in range(self.num_layers)
        ]


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """The nn.Linear modules inside a decoder layer by their names."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint stores of a module: parameters and persistent buffers, shared ones under every name."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield ".".join(filter(None, (prefix, name))), buffer


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model inside a multimodal one, or the config itself."""
    return config.get_text_config(decoder=True)


def attended_tokens(config: PretrainedConfig) -> int | None:
    """The longest text that a model attends to, stretched as far as its rotary tables are; None when nothing says."""
    limit = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    stretched = [
        int(rope["original_max_position_embeddings"] * rope["factor"])
        for rope in (ropes, *ropes.values())
        if isinstance(rope, Mapping) and rope.get("original_max_position_embeddings") and rope.get("factor")
    ]
    return max([limit, *stretched]) if limit else None


def _layer_list(decoder: PreTrainedModel, config: PretrainedConfig) -> tuple[str, nn.ModuleList]:
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return name, module
    raise UnsupportedError(
        f"{type(decoder).__name__} has no list of {config.num_hidden_layers} decoder layers: "
        "only models built as one list of layers can be loaded"
    )


def _refuse_by_config(config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedError(f"model type {config.model_type!r} is an encoder-decoder: only decoder-only models load")
    for name in _EXPERT_COUNTS:
        if (getattr(config, name, None) or 0) > 1:
            raise UnsupportedError(
                f"model type {config.model_type!r} has {getattr(config, name)} experts: mixture-of-experts layers are "
                "not supported yet; use a dense model"
            )


def _refuse_by_layers(layers: nn.ModuleList, model_name: str) -> None:
    for index, layer in enumerate(layers):
        if not linears_of(layer):
            raise UnsupportedError(f"layer {index} of {model_name} has no nn.Linear: there is nothing to quantize")
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 2:
                raise UnsupportedError(
                    f"layer {index} of {model_name}: {name} has shape {list(parameter.shape)}, as fused experts or "
                    "convolutions have; mixture-of-experts and hybrid layers are not supported yet"
                )


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Tied names, found by accelerate; the embedding is the one that counts, the head the one that follows."""
    embedding = model.get_input_embeddings()
    own = {f"{name}.weight" for name, module in model.named_modules() if module is embedding}
    tied = {}
    for group in find_tied_parameters(model):
        first = next((name for name in group if name in own), group[0])
        tied.update({name: first for name in group if name != first})
    return tied
