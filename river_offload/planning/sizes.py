"""What every part of a model weighs, as `policies.placement` wants to know it, and by category for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from policies.placement import place
from policies.prefill import place_with_chunk
from policies.types import EmbedTier, Mode, ModelSizes, Placement, Refusal
from river_offload.attention import why_whole
from river_offload.config import RiverConfig
from river_offload.kv.kind import KvKind
from river_offload.memory.categories import CATEGORIES
from river_offload.planning.dry_run import Needs, dry_run
from river_offload.quant.hqq import HQQ_BYTES_PER_COLUMN
from river_offload.quant.precision import Precision
from river_offload.store.layout import Layout
from river_offload.store.reader import reader_bytes
from river_offload.structure import Structure


@dataclass(frozen=True)
class Stored:
    """The matrices of a model's layers as they are on disk."""

    largest_bytes: int
    """What a streamed one is read through."""
    other_dtype_bytes: int | None = None
    """Bytes per element where that is not the dtype they compute in."""

    @classmethod
    def in_dtype(cls, structure: Structure, stored: torch.dtype, computed: torch.dtype) -> Stored:
        """A checkpoint whose tensors all have one dtype."""
        shapes = (shape for i in range(structure.num_layers) for shape in structure.weight_shapes(i).values())
        largest_bytes = max((_nbytes(shape, stored) for shape in shapes), default=0)
        return cls(largest_bytes, None if stored == computed else stored.itemsize)


@dataclass(frozen=True)
class Weighed:
    """A model's parts and needs: all that a placement is decided by, and what its terms consist of."""

    sizes: ModelSizes
    needs: Needs
    river_parts: tuple[Mapping[str, int], ...]
    """One entry per layer: bytes of its quantized linears by category."""
    prefill_chunk: int | None
    """Tokens of a prompt that a layer reads at once in what was weighed; None for all of them."""
    rest_states: bool = False
    """Whether the states of a prompt rested on the host between the layers."""

    def place(self, config: RiverConfig, modes: tuple[Mode, ...], budget_bytes: int) -> Placement | Refusal:
        """Decide for the options of `config`; `modes` are its mode and its also_modes."""
        return place(
            self.sizes,
            mode=modes[0],
            also_modes=modes[1:],
            min_exit=config.min_exit,
            budget_bytes=budget_bytes,
            slots=config.slots,
            prefill_chunk=self.prefill_chunk,
        )

    def categories(self, placement: Placement) -> dict[str, int]:
        """The terms of a placement, those that stand for several things taken apart. The sum stays the same."""
        terms = dict(placement.terms)
        river_bytes, transient_bytes = terms.pop("river"), terms.pop("transient")
        parts = _summed(self.river_parts[layer] for layer in placement.river_layers)
        assert sum(parts.values()) == river_bytes and sum(self.needs.transient.values()) == transient_bytes
        found = {**terms, **parts, **self.needs.transient}
        return {name: found.get(name, 0) for name in (*CATEGORIES, *(found.keys() - set(CATEGORIES)))}


def weigh(
    structure: Structure,
    precision: Precision,
    config: RiverConfig,
    modes: tuple[Mode, ...],
    stored: Stored,
    needs: Needs | None = None,
    *,
    rest_states: bool = False,
) -> Weighed:
    """Run the model dry, unless its `needs` are known, and weigh its parts. Takes no weights.

    Prompts are read in chunks of `config.prefill_chunk`, whole where that is None.

    Args:
        rest_states: the states of a prompt in chunks rest on the host between the layers.
    """
    chunk = config.prefill_chunk if config.prefill_chunk is not None and config.prefill_chunk < config.context else None
    needs = needs or dry_run(
        structure,
        precision,
        context=config.context,
        batch=config.batch,
        modes=modes,
        prefill_chunk=chunk,
        kv_kind=KvKind.of(config),
        give_back=config.give_back,
        rest_states=rest_states,
        trust_remote_code=config.trust_remote_code,
    )
    parts = tuple(precision.river_parts(layer) for layer in structure.layers)
    return Weighed(model_sizes(structure, needs, precision, stored), needs, parts, chunk, rest_states)


def weigh_within(
    budget_bytes: int,
    structure: Structure,
    precision: Precision,
    config: RiverConfig,
    modes: tuple[Mode, ...],
    stored: Stored,
) -> Weighed:
    """Weigh a model for what serves best within the budget: a chunk, if `config` names none, and where states rest."""
    tried: list[tuple[Weighed, Placement | Refusal]] = []

    def place_chunk(chunk: int | None, rest_states: bool) -> Placement | Refusal:
        chunked = replace(config, prefill_chunk=chunk)
        weighed = weigh(structure, precision, chunked, modes, stored, rest_states=rest_states)
        tried.append((weighed, weighed.place(config, modes, budget_bytes)))
        return tried[-1][1]

    if why_whole(structure.decoder):
        return weigh(structure, precision, config, modes, stored)
    states_bytes = config.batch * config.context * structure.model.config.hidden_size * precision.dtype.itemsize
    best = place_with_chunk(place_chunk, config.context, states_bytes, config.prefill_chunk)
    return next(weighed for weighed, placed in tried if placed is best)


def model_sizes(
    structure: Structure,
    needs: Needs,
    precision: Precision,
    stored: Stored,
) -> ModelSizes:
    """Sizes of all parts, from the shapes of `structure` and what the dry run measured."""
    layers, dtype, device_type = range(structure.num_layers), precision.dtype, precision.device_type
    outside = {name: _nbytes(shape, dtype) for name, shape in structure.outside().items() if name not in structure.tied}
    embed_bytes = outside.pop(structure.embedding_name)
    head = [name for name in outside if name.rpartition(".")[0] == structure.head_name.rpartition(".")[0]]
    for name in head:
        del outside[name]
    return ModelSizes(
        backbone_bytes=tuple(Layout.of(structure.weight_shapes(i), dtype).nbytes for i in layers),
        river_bytes=tuple(precision.river_bytes(structure.layers[i]) for i in layers),
        norm_bytes=tuple(sum(_nbytes(shape, dtype) for shape in structure.norm_shapes(i).values()) for i in layers),
        embed_bytes=embed_bytes,
        head_bytes=precision.head_bytes(structure.head) if head else 0,
        head_can_shrink=bool(head) and precision.head_can_shrink(structure.head),
        other_bytes=sum(outside.values()) + _buffer_bytes(structure),
        kv_bytes=needs.kv_bytes,
        kv_host_bytes=needs.kv_host_bytes,
        states_host_bytes=needs.states_host_bytes,
        kv_room_bytes=needs.kv_room_bytes,
        transient_bytes=needs.transient_bytes,
        embed_away_tier=_away_tier(structure, device_type),
        load_bytes=max(_load_bytes(structure, precision, i, stored.other_dtype_bytes) for i in layers),
        staging_bytes=reader_bytes(stored.largest_bytes) if device_type == "cpu" else 0,
    )


def _load_bytes(structure: Structure, precision: Precision, layer: int, stored_dtype_bytes: int | None) -> int:
    """What building a river layer holds for a while: the layer as stored, its quantized state, HQQ's temporaries.

    On a GPU nothing: layers are quantized in main memory.
    """
    if precision.device_type != "cpu":
        return 0
    shapes = structure.weight_shapes(layer).values()
    stored_bytes = sum(torch.Size(shape).numel() for shape in shapes) * (stored_dtype_bytes or precision.dtype.itemsize)
    block_bytes = torch.get_num_threads() * HQQ_BYTES_PER_COLUMN * max(shape[-1] for shape in shapes)
    return stored_bytes + precision.river_bytes(structure.layers[layer]) + block_bytes


def _away_tier(structure: Structure, device_type: str) -> EmbedTier | None:
    """An embedding that the head shares must stay; another can be looked up on the next tier down."""
    if structure.embedding_name in structure.tied.values():
        return None
    return "disk" if device_type == "cpu" else "host"


def _buffer_bytes(structure: Structure) -> int:
    stored = structure.expected()
    return sum(buffer.nbytes for name, buffer in structure.model.named_buffers() if name not in stored)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, nbytes in part.items():
            total[name] = total.get(name, 0) + nbytes
    return total
