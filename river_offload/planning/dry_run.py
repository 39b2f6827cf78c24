"""What a model needs while it runs, measured by running it on fake tensors: no weights, no device, no time.

The layers run through the same `assemble`, cache and forward code as on the machine; only one layer of each kind is
run, since all of a kind allocate alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from policies.exit import ExitRule
from policies.types import Mode, Placement
from river_offload.assemble import assemble
from river_offload.kv.cache import SharedCache, cache_argument
from river_offload.memory.storages import StorageMeter, storage_bytes
from river_offload.quant.precision import Precision
from river_offload.store.slots import Slots
from river_offload.structure import Structure
from river_offload.trace import Trace

_COUNTERS_PER_ROW = 16
"""64-bit numbers that generate keeps for each row beside its mask and its positions: is it finished, how long is it."""


@dataclass(frozen=True)
class Needs:
    """Device bytes a running model needs beside its weights."""

    kv_bytes: int
    """The whole KV cache, full."""
    transient_bytes: int
    """The most that any passage allocates beside it: activations, masks, logits, dequantization, sampling."""


def dry_run(
    config: PretrainedConfig,
    precision: Precision,
    *,
    context: int,
    batch: int,
    modes: tuple[Mode, ...],
    give_back: int = 0,
    trust_remote_code: bool = False,
) -> Needs:
    """Run prompts and single tokens that fill the context down each path that `modes` can take.

    Args:
        config: the text config of the model.
        context, batch: tokens per row, rows.
        give_back: the most drafted tokens that a mode checks at once and takes off the cache again; 0 without such a
            mode.
    """
    whole = Structure.of(config, precision.dtype, trust_remote_code=trust_remote_code)
    kinds = whole.kinds()
    # The shortest run of layers from the front that has one of each kind. Layer 0 does not count where another is of
    # its kind: what enters it are the embedded tokens, which the model keeps, so every later layer rises higher.
    firsts = {kind: kinds.index(kind, 1) if kind in kinds[1:] else 0 for kind in kinds}
    count = max(firsts.values()) + 1
    short = _first_layers(config, count)
    transient_bytes, layer_kv_bytes = 0, [0] * count
    for rule in _paths(modes, count):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.no_grad():
            structure = Structure.of(short, precision.dtype, trust_remote_code=trust_remote_code)
            _assemble_fake(structure, rule, _FakeParts(structure, precision))
            cache = SharedCache(short, context, give_back=give_back)
            _step(structure.model, cache, batch, 1, short.vocab_size)
            cache.reset()  # all but the windows is allocated now and is no part of what follows
            for cached_tokens, new_tokens in _steps(context):
                if not cached_tokens:
                    cache.reset()
                with StorageMeter() as meter:
                    _step(structure.model, cache, batch, new_tokens, short.vocab_size)
                transient_bytes = max(transient_bytes, meter.peak_bytes)
            if give_back and context > 1 and rule.mode.kind != "quantized":
                checked = min(give_back, context - 1)
                cache.crop(-checked)
                with StorageMeter() as meter:
                    _step(structure.model, cache, batch, checked, short.vocab_size, kept_logits=checked)
                transient_bytes = max(transient_bytes, meter.peak_bytes)
            layer_kv_bytes = [storage_bytes((layer.keys, layer.values)) for layer in cache.layers]
    return Needs(sum(layer_kv_bytes[kinds.index(kind)] for kind in kinds), transient_bytes)


def _steps(context: int) -> list[tuple[int, int]]:
    """(cached, new) tokens: a second turn as long as the first, a prompt that fills the context, a token after it."""
    if context == 1:
        return [(0, 1)]
    half = context // 2
    return [(0, half), (half, context - half), (0, context - 1), (context - 1, 1)]


def _paths(modes: tuple[Mode, ...], count: int) -> list[ExitRule]:
    """The backbone path when any mode takes it, with signals if one of them looks at them; the river path likewise."""
    rules = []
    if any(mode.kind != "quantized" for mode in modes):
        backbone = Mode("exit" if any(mode.kind == "exit" for mode in modes) else "backbone")
        rules.append(ExitRule(backbone, tau=2.0, min_exit=1, num_layers=count))
    if any(mode.kind != "backbone" for mode in modes):
        rules.append(ExitRule(Mode("quantized"), tau=2.0, min_exit=1, num_layers=count))
    return rules


def _first_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    short = copy.deepcopy(config)
    short.num_hidden_layers = count
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:count]
    return short


def _assemble_fake(structure: Structure, rule: ExitRule, parts: _FakeParts) -> None:
    layers = tuple(range(structure.num_layers))
    on_backbone = rule.mode.kind != "quantized"
    placement = Placement(
        mode=rule.mode,
        min_exit=1,
        resident_layers=layers if on_backbone else (),
        streamed_layers=(),
        river_layers=() if on_backbone else layers,
        slots=0,
        slot_bytes=0,
        embed_tier="device",
        budget_bytes=0,
    )
    device = torch.device("cpu")
    assemble(
        structure,
        placement,
        parts,
        rule=rule,
        trace=Trace(structure.num_layers),
        device=device,
        slots=Slots(0, [None] * structure.num_layers, device),
        link=None,
        streamed_bytes={},
        prefetcher=None,
    )


class _FakeParts:
    """Tensors of the right shapes and nothing in them."""

    def __init__(self, structure: Structure, precision: Precision) -> None:
        self._structure = structure
        self._precision = precision

    def outside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._precision.dtype)

    def away_embedding(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.outside(name, shape)

    def quantized_head(self, head: nn.Linear) -> nn.Module | None:
        return None if self._precision.head_bits == 16 else self._precision.empty_head(head)

    def norms(self, layer: int) -> Mapping[str, torch.Tensor]:
        return {name: self.outside(name, shape) for name, shape in self._structure.norm_shapes(layer).items()}

    def linears(self, layer: int, *, resident: bool, river: nn.Module | None) -> Mapping[str, torch.Tensor]:
        if river is not None:
            self._precision.install_empty(river)
        if not resident:
            return {}
        return {name: self.outside(name, shape) for name, shape in self._structure.weight_shapes(layer).items()}


def _step(
    model: Any, cache: SharedCache, batch: int, new_tokens: int, vocab_size: int, *, kept_logits: int = 1
) -> None:
    """One forward pass, with the tensors that generate holds on to, and what sampling does with its logits."""
    ids = torch.zeros((batch, new_tokens), dtype=torch.long)
    kept_by_generate = torch.ones((batch, 2 * new_tokens + _COUNTERS_PER_ROW), dtype=torch.long)
    mask = None
    if (
        batch > 1 and new_tokens > 1 and not cache.get_seq_length()
    ):  # rows of different length: padding makes transformers build a dense mask
        mask = torch.ones((batch, 1, new_tokens, new_tokens), dtype=torch.bool)
    kept = {cache_argument(model): cache}
    logits = model(ids, use_cache=True, logits_to_keep=kept_logits, attention_mask=mask, **kept).logits
    scores = logits[:, -1].to(copy=True, dtype=torch.float32)
    probabilities = torch.softmax(scores, dim=-1)
    torch.cumsum(torch.sort(probabilities, descending=True).values, dim=-1)
    del kept_by_generate
