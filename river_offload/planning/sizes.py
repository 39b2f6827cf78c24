"""What every part of a model weighs, as `policies.placement` wants to know it."""

from __future__ import annotations

import torch

from policies.types import EmbedTier, ModelSizes
from river_offload.planning.dry_run import Needs
from river_offload.quant.hqq import HQQ_BYTES_PER_COLUMN
from river_offload.quant.precision import Precision
from river_offload.store.layout import Layout
from river_offload.store.reader import reader_bytes
from river_offload.structure import Structure


def model_sizes(
    structure: Structure,
    needs: Needs,
    precision: Precision,
    *,
    stored_dtype_bytes: int | None,
    largest_stored_bytes: int,
) -> ModelSizes:
    """Sizes of all parts, from the shapes of `structure` and what the dry run measured.

    Args:
        stored_dtype_bytes: bytes per element of the checkpoint's tensors where that is not the dtype they compute in.
        largest_stored_bytes: of the matrices of a layer as they are on disk: what a streamed one is read through.
    """
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
        transient_bytes=needs.transient_bytes,
        embed_away_tier=_away_tier(structure, device_type),
        load_bytes=max(_load_bytes(structure, precision, i, stored_dtype_bytes) for i in layers),
        staging_bytes=reader_bytes(largest_stored_bytes) if device_type == "cpu" else 0,
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
