"""How the streamed tensors of one decoder layer lie in one flat buffer.

A slot, a pinned host copy and a read from disk all use the same layout, so a layer moves as one run of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 64
"""Every tensor starts on a cache line: a streamed layer then computes with the very alignment of a resident one,
without which float32 results of a BLAS may differ in the last bit."""


@dataclass(frozen=True)
class Entry:
    """One tensor inside a layout; `offset` and `nbytes` count bytes from the start of the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a layer by their names inside the layer, in the order of their offsets."""

    entries: tuple[Entry, ...]
    nbytes: int
    """Bytes of a buffer that holds the layer, alignment included."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Layout:
        """Lay out tensors of `shapes` (name inside the layer -> shape), all of `dtype`."""
        entries, offset = [], 0
        for name, shape in shapes.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            entries.append(Entry(name, dtype, tuple(shape), offset, nbytes))
            offset = _round_up(offset + nbytes)
        return cls(tuple(entries), offset)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The layer's tensors as views of `buffer`, a uint8 tensor of at least `nbytes` bytes."""
        return {e.name: buffer[e.offset : e.offset + e.nbytes].view(e.dtype).view(e.shape) for e in self.entries}


def aligned_empty(nbytes: int, device: torch.device | str, alignment: int = ALIGNMENT_BYTES) -> torch.Tensor:
    """An uninitialized uint8 tensor of `nbytes` that starts at a multiple of `alignment` bytes.

    Torch aligns its own storages to 64 bytes on CPU and 512 on CUDA; only a stricter wish over-allocates.
    """
    if alignment <= ALIGNMENT_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    raw = torch.empty(nbytes + alignment, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % alignment
    return raw[start : start + nbytes]


def _round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
