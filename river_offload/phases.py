"""Where a model is in its forward pass, in the words of `memory.categories.TRANSIENT`, and a meter that counts by them.

The dry run and a real run are watched by the very same code, so that a plan and a measurement use names alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from river_offload.kv.cache import cache_tensors
from river_offload.memory.storages import StorageMeter
from river_offload.quant.linear import RiverLinear

OUTSIDE = "sampler"
"""What is born outside a forward pass: token ids, probabilities, what generate keeps."""


@contextlib.contextmanager
def metered(model: PreTrainedModel, cache: Cache | None, *, outside: str = OUTSIDE) -> Iterator[StorageMeter]:
    """Count what the passages inside the block allocate, by phase; what ends in `cache` is counted as `kv`.

    Args:
        outside: the name for what is born outside of the model's decoder and its head.
    """
    phases = _Phases(model, outside)
    with phases, StorageMeter(phases.now, model.device) as meter:
        phases.watch(meter, cache)
        yield meter


class _Phases:
    """The phase in force, followed by hooks on every module that is called. They are there only while it is entered."""

    def __init__(self, model: PreTrainedModel, outside: str) -> None:
        decoder = model.get_decoder()
        lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
        self._layers = {id(layer) for layers in lists for layer in layers}
        self._decoder = decoder
        # In the decoder itself, outside of its modules and before its first layer, masks are made.
        self._names = {id(model): "logits", id(decoder): "mask"}
        self._names |= dict.fromkeys(self._layers, "activations")
        self._names |= {id(child): "activations" for child in decoder.children() if child not in lists}
        self._linears = {id(module) for module in model.modules() if isinstance(module, RiverLinear)}
        self._names |= dict.fromkeys(self._linears, "dequantization")
        self._stack: list[tuple[int, str]] = [(0, outside)]
        self._meter: StorageMeter | None = None
        self._cache: Cache | None = None
        self._hooks = contextlib.ExitStack()

    def now(self) -> str:
        return self._stack[-1][1]

    def watch(self, meter: StorageMeter, cache: Cache | None) -> None:
        self._meter, self._cache = meter, cache

    def __enter__(self) -> _Phases:
        self._hooks.callback(register_module_forward_pre_hook(self._enters).remove)
        self._hooks.callback(register_module_forward_hook(self._leaves, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _enters(self, module: nn.Module, _: object) -> None:
        if (name := self._names.get(id(module))) is not None:
            self._stack.append((id(module), name))

    def _leaves(self, module: nn.Module, _: object, output: Any) -> None:
        if self._stack[-1][0] != id(module):
            return
        self._stack.pop()
        if id(module) in self._layers:
            self._stack[-1] = (self._stack[-1][0], "activations")
        if self._meter is None:
            return
        if id(module) in self._linears:  # what it hands on is no workspace of its own
            self._meter.claim((t for t in tree_iter(output) if isinstance(t, torch.Tensor)), self.now())
        if module is self._decoder and self._cache is not None:
            self._meter.claim(cache_tensors(self._cache), "kv")
