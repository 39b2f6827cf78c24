"""What a model needs while it runs, measured by running it on fake tensors: no weights, no device, no time.

The layers run through the same `assemble`, cache and forward code as on the machine; only one layer of each kind is
run, since all of a kind allocate alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, TopKLogitsWarper, TopPLogitsWarper

from policies.exit import ExitRule
from policies.link_order import worth_ahead
from policies.types import Mode, Placement
from river_offload.assemble import assemble
from river_offload.chunks import Spans, spans_of
from river_offload.kv.cache import (
    Mark,
    SharedCache,
    WindowLayer,
    cache_argument,
    device_tensors,
    host_tensors,
    mark_tensors,
)
from river_offload.kv.kind import PLAIN, KvKind
from river_offload.kv.resting import RestingLayer
from river_offload.memory.categories import TRANSIENT
from river_offload.memory.storages import StorageMeter, storage_bytes
from river_offload.passage import Flow
from river_offload.phases import metered
from river_offload.quant.precision import Precision
from river_offload.store.slots import Slots
from river_offload.structure import Structure
from river_offload.trace import Trace

_NUMBERS_PER_TOKEN = 3
"""64-bit numbers that generate keeps for each token of a conversation: id, mask, mask extended."""
_COUNTERS_PER_ROW = 16
"""64-bit numbers that generate keeps for each row beside its mask and its positions: is it finished, how long is it."""


@dataclass(frozen=True)
class Needs:
    """Device bytes a running model needs beside its weights."""

    kv_bytes: int
    """What the whole KV cache holds on the device at the highest moment, what a passage under way has replaced with
    it."""
    transient_bytes: int
    """The most that any passage allocates beside it: activations, masks, logits, dequantization, sampling."""
    transient: Mapping[str, int] = field(default_factory=dict)
    """Those bytes by what allocated them (`memory.categories.TRANSIENT`), at the moment when they were the most."""
    second_turn: bool = False
    """That moment came when a conversation went on, not in a prompt that fills the context nor after it."""
    kv_host_bytes: int = 0
    """What the cache holds on the host: main memory of a GPU, disk of a CPU."""
    states_host_bytes: int = 0
    """The same of a prompt's states, where they rest there."""
    kv_room_bytes: int = 0
    """What a second room of its workspace takes, for what is brought in ahead; 0 where that has no effect."""


def dry_run(
    whole: Structure,
    precision: Precision,
    *,
    context: int,
    batch: int,
    modes: tuple[Mode, ...],
    prefill_chunk: int | None = None,
    kv_kind: KvKind = PLAIN,
    give_back: int = 0,
    rest_states: bool = False,
    trust_remote_code: bool = False,
) -> Needs:
    """Run prompts and single tokens that fill the context down each path that `modes` can take.

    Args:
        whole: the model, all of its layers.
        context, batch: tokens per row, rows.
        prefill_chunk: tokens of a prompt that a layer reads at once; None for all of them.
        kv_kind: of the cache.
        give_back: the most drafted tokens that a mode checks at once and takes off the cache again; 0 without such a
            mode.
        rest_states: the states of a prompt in chunks rest on the host between the layers.
    """
    kinds = whole.kinds()
    # The shortest run of layers from the front that has one of each kind. Layer 0 does not count where another is of
    # its kind: what enters it are the embedded tokens, which the model keeps, so every later layer rises higher.
    firsts = {kind: kinds.index(kind, 1) if kind in kinds[1:] else 0 for kind in kinds}
    count = max(firsts.values()) + 1
    short = _first_layers(whole.model.config, count)
    worst, like, chunked = Needs(0, -1), [kinds.index(kind) for kind in kinds], prefill_chunk is not None
    for rule in _paths(modes, count):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.no_grad():
            structure = Structure.of(short, precision.dtype, trust_remote_code=trust_remote_code)
            flow = _assemble_fake(structure, rule, _FakeParts(structure, precision), prefill_chunk)
            states = _HostStates(batch * context * short.hidden_size, precision.dtype) if rest_states else None
            flow.states_memory = None if states is None else states.memory
            cache = SharedCache(short, context, kv_kind, give_back=give_back)
            if prefill_chunk is not None:
                flow.spans = _first_and_last(prefill_chunk, cache)
            _step(structure.model, cache, batch, 1)
            cache.reset()  # all but the windows is allocated now and is no part of what follows
            growing = kv_kind.bits < 16 or any(isinstance(layer, WindowLayer) for layer in cache.layers)
            for cached_tokens, new_tokens in _steps(context, prefill_chunk, growing=growing, resting=rest_states):
                if cache.get_seq_length() != cached_tokens:
                    cache.reset()
                    for depth in range(count):
                        cache.skip(depth, cached_tokens)
                worst = _larger(worst, _rise(structure.model, cache, like, batch, new_tokens, chunked=chunked))
            if give_back and context > 1 and rule.mode.kind != "quantized":
                checked = min(give_back, context - 1)
                cache.crop(-checked)
                rise = _rise(structure.model, cache, like, batch, checked, kept_logits=checked, chunked=chunked)
                worst = _larger(worst, rise)
    hidden_bytes = batch * (context - 1) * short.hidden_size * precision.dtype.itemsize
    return replace(worst, states_host_bytes=hidden_bytes) if rest_states else worst


class _HostStates:
    """Host memory for the states of a prompt, there before anything is counted: it is no memory of the device."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._held = torch.empty(elements, dtype=dtype)

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._held[: math.prod(shape)].view(shape)


def _rise(
    model: Any,
    cache: SharedCache,
    like: list[int],
    batch: int,
    new_tokens: int,
    *,
    kept_logits: int = 1,
    chunked: bool = False,
) -> Needs:
    """What one step needs: how high it rises, what that consists of, and what the whole model's cache, whose layers are
    like those of `cache` that `like` names, holds meanwhile."""
    cached_tokens, before = cache.get_seq_length(), cache.mark()
    with metered(model, cache) as meter:
        _step(model, cache, batch, new_tokens, meter, kept_logits=kept_logits, chunked=chunked)
    split = meter.peak_by_tag()
    split.pop("kv", None)  # windows that this step replaced: counted with the cache
    second_turn = cached_tokens > 0 and new_tokens > 1 and kept_logits == 1
    kv_bytes, kv_host_bytes = _kv_bytes(cache, before, like)
    transient = {name: split.get(name, 0) for name in TRANSIENT}
    return Needs(
        kv_bytes,
        sum(split.values()),
        transient,
        second_turn,
        kv_host_bytes=kv_host_bytes,
        kv_room_bytes=_room_bytes(cache, like),
    )


def _larger(one: Needs, other: Needs) -> Needs:
    """The one that holds more at once: windows of a cache are there twice in some steps, and small in others."""
    pair = (needs.kv_bytes + needs.transient_bytes for needs in (one, other))
    return other if next(pair) < next(pair) else one


def _kv_bytes(cache: SharedCache, before: Mark, like: list[int]) -> tuple[int, int]:
    """Bytes on the device and on the host of a cache whose layers are like those of `cache` that `like` names.

    `before` is the mark of the last passage: until one is over, the cache could go back to it.
    """
    layers = list(zip(cache.layers, before, strict=True))
    device = [_layer_kv_bytes(layer, old) for layer, old in layers]
    host = [storage_bytes(host_tensors(layer)) for layer in cache.layers]
    workspace_bytes = storage_bytes(cache.workspace.tensors())
    return workspace_bytes + sum(device[place] for place in like), sum(host[place] for place in like)


def _room_bytes(cache: SharedCache, like: list[int]) -> int:
    """A second room is as large as the first. It takes the host tier, a layer that rests behind another, and layers
    that are worth the trouble when they are full."""
    room_bytes = storage_bytes(cache.workspace.tensors())
    resting = sum(isinstance(cache.layers[place], RestingLayer) for place in like)
    return room_bytes if cache.kind.tier == "host" and resting > 1 and worth_ahead(room_bytes) else 0


def _layer_kv_bytes(layer: Any, before: dict[str, Any]) -> int:
    """On the device, old and new: what a layer has replaced in a pass is there until the pass is over."""
    if isinstance(layer, RestingLayer):
        return storage_bytes(layer.rest_tensors()) + layer.most_recent_bytes(before)
    return storage_bytes([*device_tensors(layer), *mark_tensors(before)])


def _steps(context: int, prefill_chunk: int | None, *, growing: bool, resting: bool = False) -> list[tuple[int, int]]:
    """(cached, new) tokens: a second turn as long as the first, a prompt that fills the context, a token after it; and
    the longest prompt that is a single chunk.

    Of several chunks, the last of the longest prompt meets all keys beside the states of all tokens: no shorter prompt
    holds as much, and none is tried. Unless the cache is `growing`: windows and recent tokens replace those that a
    turn before has left, so that a second turn may hold more. Or unless the states are `resting`: those of a single
    chunk are on the device.
    """
    if context == 1:
        return [(0, 1)]
    half = context // 2
    second_turn, longest = (half, context - half), [(0, context - 1), (context - 1, 1)]
    if prefill_chunk is None or prefill_chunk >= context:
        return [second_turn, *longest]
    if prefill_chunk > half:
        return [(0, prefill_chunk), second_turn, *longest]
    return [*([(0, prefill_chunk)] if resting else []), *([second_turn] if growing else []), *longest]


def _first_and_last(chunk_tokens: int, cache: SharedCache) -> Spans:
    """Of many chunks the first and the last two: those in between have fewer keys and allocate no more."""
    every = spans_of(chunk_tokens)

    def spans(depth: int | None, tokens: int) -> Iterator[slice]:
        first, *between = every(depth, tokens)
        yield first
        if len(between) > 2 and depth is not None:
            cache.skip(depth, between[-2].start - first.stop)
        yield from between[-2:]

    return spans


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


def _assemble_fake(structure: Structure, rule: ExitRule, parts: _FakeParts, prefill_chunk: int | None) -> Flow:
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
        prefill_chunk=prefill_chunk,
    )
    device = torch.device("cpu")
    return assemble(
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
    model: Any,
    cache: SharedCache,
    batch: int,
    new_tokens: int,
    meter: StorageMeter | None = None,
    *,
    kept_logits: int = 1,
    chunked: bool = False,
) -> None:
    """One forward pass, with the tensors that generate holds on to, and what sampling does with its logits."""
    ids, places = (torch.zeros((batch, new_tokens), dtype=torch.long) for _ in range(2))
    whole_tokens = cache.get_seq_length() + new_tokens
    kept_by_generate = torch.ones((batch, _NUMBERS_PER_TOKEN * whole_tokens + _COUNTERS_PER_ROW), dtype=torch.long)
    mask = None
    if batch > 1 and new_tokens > 1 and (chunked or whole_tokens == new_tokens):  # rows of different length: padding
        # In chunks it stays two-dimensional. Else transformers builds a dense mask of it, and would read it for that.
        dense = (batch, 1, new_tokens, new_tokens)
        mask = torch.ones((batch, whole_tokens) if chunked else dense, dtype=torch.bool)
        if meter is not None and not chunked:
            meter.claim([mask], "mask")
    kept: dict[str, Any] = {cache_argument(model): cache}
    kept["logits_to_keep"] = kept_logits
    logits = model(ids, position_ids=places, use_cache=True, attention_mask=mask, **kept).logits
    before = _sampled(ids, logits)  # what the token before was drawn from is still there
    _sampled(ids, logits)
    del kept_by_generate, before


def _sampled(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and probabilities of the next token, as generate makes them with top-k and top-p."""
    likeliest = logits[:, -1].to(copy=True, dtype=torch.float32)
    scores = TopPLogitsWarper(0.9)(ids, TopKLogitsWarper(50)(ids, likeliest))
    probabilities = torch.softmax(scores, dim=-1)
    torch.multinomial(probabilities, num_samples=1)
    return scores, probabilities
