"""What a reader thread does at a time: a piece of a file, through a small buffer, into its place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from river_offload.store.files import BLOCK_BYTES, SourceFile
from river_offload.store.pinned import page_aligned

PIECE_BYTES = 1 << 20
"""What a thread reads at once, unless the largest tensor is smaller."""
_SERIAL_ELEMENTS = 32_000
"""Torch converts this many elements in the calling thread. For more it wakes its own threads, which compute."""


def piece_bytes_for(largest_bytes: int) -> int:
    """The size of pieces when no range is larger than `largest_bytes`."""
    return min(PIECE_BYTES, -(-largest_bytes // BLOCK_BYTES) * BLOCK_BYTES)


def buffer_bytes_for(piece_bytes: int) -> int:
    """Room for a piece that starts and ends anywhere in a block of the disk; none when no file is read."""
    return piece_bytes + 2 * BLOCK_BYTES if piece_bytes else 0


class Work(Protocol):
    """What a reader thread does at a time."""

    @property
    def nbytes(self) -> int: ...
    @property
    def if_lost(self) -> str:
        """The message when a thread dies over it."""

    def bring(self, buffer: Buffer) -> None:
        """Do it, with the thread's own buffer. Raises LinkError."""


class Whole(Protocol):
    """What is brought in piece by piece."""

    @property
    def nbytes(self) -> int: ...
    def pieces(self, piece_bytes: int) -> Iterator[Work]:
        """Work that adds up to `nbytes`, of `piece_bytes` at a time where a file is read."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file and the tensor that it fills: flat, contiguous, on the CPU.

    `target` may have another dtype than the file (`stored`): the values are converted on the way.
    """

    file: SourceFile
    offset: int
    nbytes: int
    target: torch.Tensor
    stored: torch.dtype

    def pieces(self, piece_bytes: int) -> Iterator[Piece]:
        """Cut at whole pieces of the file, so that neighbours share no block of the disk."""
        item, start = self.stored.itemsize, 0
        while start < self.nbytes:
            edge = ((self.offset + start) // piece_bytes + 1) * piece_bytes - self.offset
            stop = min(max(edge // item * item, start + item), self.nbytes)
            yield Piece(self, start, stop)
            start = stop


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a span."""

    span: Span
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def if_lost(self) -> str:
        return f"{self.span.file.path}: a reader thread died at byte {self.span.offset + self.start}; try again"

    def bring(self, buffer: Buffer) -> None:
        """Read the piece through `buffer` into its place. Raises LinkError."""
        span = self.span
        skip = span.file.read(buffer.memory, span.offset + self.start, self.nbytes)
        if span.stored == span.target.dtype:
            ctypes.memmove(span.target.data_ptr() + self.start, buffer.address + skip, self.nbytes)
            return
        item = span.stored.itemsize
        values = buffer.tensor[skip : skip + self.nbytes]
        if skip % item:
            values = values.clone()
        first, values = self.start // item, values.view(span.stored)
        for at in range(0, len(values), _SERIAL_ELEMENTS):
            part = values[at : at + _SERIAL_ELEMENTS]
            span.target[first + at : first + at + len(part)].copy_(part)


class Buffer:
    """Page-aligned memory that one thread reads into."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = page_aligned(nbytes)
        self.memory = self.tensor.numpy().data
        self.address = self.tensor.data_ptr()
