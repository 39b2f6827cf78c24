"""The ledger: what a loaded model holds on its device, under the names that a plan uses.

Counted from the real tensors' storages; each storage is counted once, by the first name that claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from river_offload.layer import RiverLayer
from river_offload.memory.categories import CATEGORIES
from river_offload.quant.linear import RiverLinear
from river_offload.quant.river import add_part
from river_offload.structure import Structure


def held_by_category(
    structure: Structure, slots: Iterable[torch.Tensor], staging_bytes: int, device: torch.device
) -> dict[str, int]:
    """Bytes on `device` by category, those of working memory and caches 0.

    Args:
        structure: of the assembled model.
        slots: the buffers that streamed layers come through.
        staging_bytes: what files are read through.
    """
    total = dict.fromkeys(CATEGORIES, 0)
    total["staging"] = staging_bytes
    seen: set[int] = set()
    for name, tensor in (*(("slots", buffer) for buffer in slots), *_named(structure)):
        storage = tensor.untyped_storage()
        if tensor.device != device or storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        if name in total:
            total[name] += storage.nbytes()
        else:
            add_part(total, name, storage.nbytes())
    return total


def _named(structure: Structure) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model with its category, or, of a quantized matrix, with the name of its part."""
    model = structure.model
    for layer in structure.layers:
        assert isinstance(layer, RiverLayer)
        yield from _of_layer(layer)
    embedding = model.get_input_embeddings()
    # Off the device it is no child of the model, and its parameters are none of ours.
    yield from (("embedding", tensor) for tensor in embedding.parameters())
    head = model.get_output_embeddings()
    yield from (("head", tensor) for tensor in (*head.parameters(), *head.buffers()))
    yield from (("other", tensor) for tensor in (*model.parameters(), *model.buffers()))


def _of_layer(layer: RiverLayer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, copy in (("backbone", layer.backbone), ("river_full_precision", layer.river)):
        if copy is None:
            continue
        matrices = [module for module in copy.modules() if isinstance(module, (nn.Linear, RiverLinear))]
        for matrix in matrices:
            yield from ((part, tensor) for part, tensor in matrix.named_buffers(recurse=False))
            yield from ((name, tensor) for tensor in matrix.parameters(recurse=False))
        inside = {id(parameter) for matrix in matrices for parameter in matrix.parameters(recurse=False)}
        yield from (("norms", tensor) for tensor in copy.parameters() if id(tensor) not in inside)
