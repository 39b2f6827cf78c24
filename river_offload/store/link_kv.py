"""The link's other load: keys and values that rest on the host, brought to where attention reads them.

Siblings of the links of weights, on the same reader threads and on the same copy stream, and not the links themselves:
those know layers with one place at rest and slots to lend, and a decision about what a slot is worth. Here nothing is
to be decided but whose turn it is (`policies.link_order`), and a reuse of the place has the same two edges:

1. the copy is done before compute reads or writes:  `start` ... `wait` or `drop` ... compute
2. compute is done before a copy overwrites:         compute ... `start`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from river_offload.store.pieces import Buffer
from river_offload.store.reader import Reader, Ticket

_SERIAL_ELEMENTS = 32_000
"""Torch copies this many elements in the calling thread. For more it wakes its own threads, which compute."""


class Resting(Protocol):
    """Keys or values at rest (`kv.rest.Rest` is one)."""

    @property
    def block(self) -> int:
        """Tokens that are put together."""

    def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        """Fill `out` [rows, heads, tokens, head_dim] with the tokens from `start` on."""


class ReaderKvLink:
    """On a CPU the reader threads do it, beside the weights that they read.

    Compute on a CPU is done when its call returns, so that the second edge is kept by who calls.

    Args:
        reader: the threads; closed with the link.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def open(self) -> bool:
        """Is anything fetched?"""
        return not self._reader.closed

    def prepare(self, parts: Sequence[tuple[Resting, torch.Tensor]]) -> Ticket:
        """What to `start`: put it down first, so that whatever happens it can be dropped.

        Args:
            parts: keys and values to bring in from their first token on, and where to: [rows, heads, tokens,
                head_dim], whole blocks.
        """
        return Ticket([_Tokens(rest, out) for rest, out in parts], load="kv")

    def start(self, fetch: Ticket) -> None:
        """Begin to fill the places, which nothing reads any more. Returns at once."""
        self._reader.submit(fetch)

    def wait(self, fetch: Ticket) -> None:
        """Return when all is there. Raises LinkError when it cannot be had."""
        self._reader.wait(fetch)

    def drop(self, fetch: Ticket) -> None:
        """Nobody wants it any more: return when nothing is written for it, as far as it has come."""
        self._reader.cancel(fetch)
        self._reader.settle(fetch)

    def quiet(self) -> None:
        """Return when nothing at rest is being read any more: what was waited for has been."""

    def close(self) -> None:
        """End the threads. May be called twice."""
        self._reader.close()

    def __deepcopy__(self, memo: Any) -> ReaderKvLink:
        """A copied cache goes on with the same threads."""
        return self


class StreamKvLink:
    """On a GPU the copy stream does it, between the weights that it copies.

    The copies are issued here, by the thread that computes, and that gives them their turn (`policies.link_order`):
    it gets here when all of the weights that it needs have been issued, so those go first; the link's own thread is
    never more than a few chunks ahead, so that what it has not issued goes behind. What was issued cannot be overtaken:
    weights that turn out to be needed wait for one layer's keys and values at most, which the same layer needs, too.

    Args:
        stream: the copy stream, that of the weights where weights are streamed.
        device: the GPU.
        cuda: the `torch.cuda` namespace, or a fake one.
    """

    def __init__(self, stream: Any, device: torch.device, *, cuda: Any) -> None:
        self._stream = stream
        self._device = device
        self._cuda = cuda
        self._closed = False

    @property
    def open(self) -> bool:
        """Is anything fetched?"""
        return not self._closed

    def prepare(self, parts: Sequence[tuple[Resting, torch.Tensor]]) -> _Copies:
        """As in `ReaderKvLink`."""
        return _Copies(tuple(parts), self._cuda.Event(), self._cuda.Event())

    def start(self, fetch: _Copies) -> None:
        """Issue the copies, behind all computation that was issued: it may read their places."""
        fetch.computed.record(self._cuda.current_stream(self._device))
        self._let_copy_wait(fetch)
        with self._cuda.stream(self._stream):
            for rest, out in fetch.parts:
                rest.get(0, out, wait=False)
            fetch.copied.record(self._stream)

    def wait(self, fetch: _Copies) -> None:
        """Order what the current stream computes next behind the copies."""
        self._let_compute_wait(fetch.copied)

    def drop(self, fetch: _Copies) -> None:
        """The same for copies that an interrupt may have cut short: behind whatever was issued."""
        issued = self._cuda.Event()
        issued.record(self._stream)
        self._let_compute_wait(issued)

    def quiet(self) -> None:
        """Wait for the device: what rests may be changed by this thread, which no stream orders."""
        self._stream.synchronize()

    def close(self) -> None:
        """Let copies in flight land. May be called twice."""
        self._closed = True
        self._stream.synchronize()

    def __deepcopy__(self, memo: Any) -> StreamKvLink:
        """A copied cache goes on with the same stream."""
        return self

    def _let_compute_wait(self, copied: Any) -> None:
        self._cuda.current_stream(self._device).wait_event(copied)  # copy done -> compute may read

    def _let_copy_wait(self, fetch: _Copies) -> None:
        self._stream.wait_event(fetch.computed)  # compute done -> copy may overwrite


class _Copies(NamedTuple):
    parts: Sequence[tuple[Resting, torch.Tensor]]
    computed: Any
    """Event behind the last computation that may read their places."""
    copied: Any


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Keys, or values, as the reader threads take them: a few tokens at a time."""

    rest: Resting
    out: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.out.numel() * self.out.element_size()

    def pieces(self, piece_bytes: int) -> Iterator[_Piece]:
        """Tokens of all rows and heads. `piece_bytes` is what suits a file."""
        rows, heads, tokens, head_dim = self.out.shape
        block = self.rest.block
        step = max(_SERIAL_ELEMENTS // (rows * heads * head_dim) // block, 1) * block
        for start in range(0, tokens, step):
            yield _Piece(self.rest, start, self.out[:, :, start : start + step])


class _Piece(NamedTuple):
    rest: Resting
    start: int
    out: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.out.numel() * self.out.element_size()

    @property
    def if_lost(self) -> str:
        return f"keys and values: a reader thread died at token {self.start}; try again"

    def bring(self, buffer: Buffer) -> None:
        self.rest.get(self.start, self.out)
