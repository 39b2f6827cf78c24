"""Host to device over its own copy stream, ordered against compute by events: no thread ever waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from river_offload.store.slots import Slots
from river_offload.store.tiers import HostTier


class CudaLink:
    """Copies a layer from pinned host memory into a slot, in one piece, beside the computation.

    Args:
        host: the layers' bytes.
        slots: where they go.
        device: the GPU.
        cuda: the `torch.cuda` namespace; a fake one, whose copies land only when something waits for them, finds a
            missing wait without a GPU.
    """

    def __init__(self, host: HostTier, slots: Slots, device: torch.device, *, cuda: Any) -> None:
        self._host = host
        self._slots = slots
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._copied = [cuda.Event() for _ in range(len(slots))]
        self._computed: list[Any | None] = [None] * len(slots)

    def fetch(self, layer: int, slot: int) -> None:
        """Queue the copy on the copy stream, behind the last computation that read the slot."""
        source = self._host.buffer(layer)
        with self._cuda.stream(self._stream):
            if (computed := self._computed[slot]) is not None:
                self._stream.wait_event(computed)  # compute done -> copy may overwrite
            self._slots.buffers[slot][: source.nbytes].copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> float:
        """Order what the current stream computes next behind the copy; this thread goes on at once."""
        self._cuda.current_stream(self._device).wait_event(self._copied[slot])  # copy done -> compute may read
        return 0.0

    def release(self, slot: int) -> None:
        """Mark where in the compute stream the slot was last read."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        self._computed[slot] = event

    def close(self) -> None:
        """The buffers must outlive the copies in flight: the one place that waits for the device."""
        self._stream.synchronize()
