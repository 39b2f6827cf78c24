"""Layers on their way through host memory, chunk by chunk: out of a pinned tier, or off the disk through a ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from river_offload.store.layout import Layout
from river_offload.store.pinned import HostMemory
from river_offload.store.reader import Ticket
from river_offload.store.tiers import DiskTier, HostTier

CHUNK_BYTES = 16 << 20
"""What is copied to the device at once: 0.6 ms at 25 GB/s, so a copy that nobody wants any more stops soon, and a
thousand times what it takes to issue."""
RING_BUFFERS = 3
"""One being copied to the device, two being read."""
RING_BYTES = RING_BUFFERS * CHUNK_BYTES
"""Host memory that layers on disk come through."""


def layers_to_hold(sizes: Mapping[int, int], budget_bytes: int) -> list[int]:
    """The layers that host memory holds within a budget, shallow ones first: all, or as many as fit beside the ring
    that the others come through. The ring is there even if the budget is smaller."""
    if sum(sizes.values()) <= budget_bytes:
        return sorted(sizes)
    left_bytes, held = budget_bytes - RING_BYTES, []
    for layer in sorted(sizes):
        left_bytes -= sizes[layer]
        if left_bytes < 0:
            break
        held.append(layer)
    return held


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a layer in host memory."""

    start: int
    """Their place in the layer's layout."""
    source: torch.Tensor
    copied: Any
    """Event to record after the copy out of `source`."""


class HostSource:
    """Gives the chunks of a layer, wherever it rests. Used by one thread.

    Args:
        host: layers that rest in host memory; its memory gives the ring's buffers, too, when they are first needed.
        disk: where the others are.
        layouts: one per layer.
        event: makes an event that a thread can wait for.
        chunk_bytes: a multiple of the layouts' alignment.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier,
        layouts: Sequence[Layout],
        *,
        event: Callable[[], Any],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._host = host
        self._disk = disk
        self._layouts = layouts
        self._event = event
        self._chunk_bytes = chunk_bytes
        self._ring: list[_RingBuffer] = []

    def chunks(self, layer: int, start: int = 0) -> Iterator[Chunk]:
        """The layer from byte `start` on. Raises LinkError when a read fails.

        Record a chunk's event before asking for the next; close the iterator to give the rest up.
        """
        buffer = self._host.buffer(layer)
        starts = range(start, self._layouts[layer].nbytes, self._chunk_bytes)
        if buffer is None:
            return self._from_disk(layer, starts)
        return (Chunk(at, buffer[at : at + self._chunk_bytes], self._event()) for at in starts)

    def close(self) -> None:
        """Give all memory back and end the reads; no copy from it may be under way."""
        self._disk.close()
        self._ring.clear()
        self._host.close()

    def _from_disk(self, layer: int, starts: range) -> Iterator[Chunk]:
        reader = self._disk.reader
        ring = self._buffers(self._host.memory)
        reading: deque[tuple[int, int, _RingBuffer]] = deque()
        left = iter(starts)
        try:
            while True:
                while len(reading) < len(ring) - 1 and (at := next(left, None)) is not None:
                    stop = min(at + self._chunk_bytes, self._layouts[layer].nbytes)
                    self._read(layer, at, stop, ring[0])
                    reading.append((at, stop, ring[0]))
                    ring.rotate(-1)
                if not reading:
                    return
                at, stop, buffer = reading[0]
                reader.wait(buffer.ticket)
                reading.popleft()
                yield Chunk(at, buffer.bytes[: stop - at], buffer.copied)
        finally:
            for _, _, buffer in reading:
                reader.cancel(buffer.ticket)

    def _read(self, layer: int, start: int, stop: int, buffer: _RingBuffer) -> None:
        """Fill a ring buffer, once the copy out of it is done and no read that was given up writes to it any more."""
        buffer.copied.synchronize()
        buffer.ticket = Ticket(self._disk.spans(layer, buffer.bytes, start, stop), after=(buffer.ticket,))
        self._disk.reader.submit(buffer.ticket)

    def _buffers(self, memory: HostMemory) -> deque[_RingBuffer]:
        if not self._ring:
            self._ring = [_RingBuffer(memory.allocate(self._chunk_bytes), self._event()) for _ in range(RING_BUFFERS)]
        return deque(self._ring)


class _RingBuffer:
    """A chunk of pinned memory, the read into it and the copy out of it."""

    def __init__(self, memory: torch.Tensor, copied: Any) -> None:
        self.bytes = memory
        self.copied = copied
        self.ticket = Ticket(())
