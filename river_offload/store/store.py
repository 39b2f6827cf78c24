"""The store: knows where every backbone layer is, and lends it for as long as it computes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from river_offload.errors import RiverError
from river_offload.store.link import Link
from river_offload.store.slots import Slots


class Store:
    """Resident layers are handed out as they are, streamed ones after their bytes came into a slot.

    Args:
        backbone: the backbone layer modules by depth. A streamed one arrives without its weights.
        streamed: the depths that rest off the device.
        slots: buffers for streamed layers; may be empty when nothing is streamed.
        link: fills slots; None when nothing is streamed.
        layer_bytes: bytes that a fetch of each streamed layer moves.
    """

    def __init__(
        self,
        backbone: Mapping[int, nn.Module],
        streamed: Mapping[int, int],
        slots: Slots,
        link: Link | None,
    ) -> None:
        self._backbone = backbone
        self._streamed = streamed
        self._slots = slots
        self._link = link
        self._holds: list[int | None] = [None] * len(slots)
        self._in_use: set[int] = set()
        self._next_victim = 0
        self.bytes_streamed = 0
        self.wait_s = 0.0
        self.closed = False

    @contextmanager
    def hold(self, depth: int) -> Iterator[nn.Module]:
        """The backbone layer at `depth`, its weights on the device until the block ends."""
        layer = self.acquire(depth)
        try:
            yield layer
        finally:
            self.release(depth)

    def acquire(self, depth: int) -> nn.Module:
        """Bring the layer in if it is not there and lend it. Raises LinkError when its bytes cannot be read."""
        layer = self._backbone[depth]
        if depth not in self._streamed:
            return layer
        if self.closed or self._link is None:
            raise RiverError(f"backbone layer {depth} was asked for after close(): load the model again")
        started = time.perf_counter()
        slot = self._slot_of(depth)
        self._holds[slot] = None  # a fetch that fails while it is waited for leaves garbage, too
        self._link.wait(slot)
        self._holds[slot] = depth
        self.wait_s += time.perf_counter() - started
        self._in_use.add(slot)
        _bind(layer, self._slots.parameters(depth, slot))
        return layer

    def release(self, depth: int) -> None:
        """The computation with the layer has been issued; its slot may be used anew."""
        if depth not in self._streamed:
            return
        slot = self._holds.index(depth)
        assert self._link is not None
        _unbind(self._backbone[depth], self._slots.parameters(depth, slot))
        self._in_use.discard(slot)
        if self._slots.poison_on_release:
            self._slots.poison(slot)
            self._holds[slot] = None
        self._link.release(slot)

    def reclaim(self) -> None:
        """Take back what an interrupted passage never released. Between passages nothing is lent."""
        for slot in sorted(self._in_use):
            depth = self._holds[slot]
            if depth is not None:
                _unbind(self._backbone[depth], self._slots.parameters(depth, slot))
            if self._link is not None:
                self._link.release(slot)
        self._in_use.clear()

    def close(self) -> None:
        """Stop the link and forget the slots. May be called twice."""
        self.closed = True
        if self._link is not None:
            self._link.close()
        self._slots.clear()
        self._holds.clear()

    def _slot_of(self, depth: int) -> int:
        """The slot that holds the layer, after a fetch when none does."""
        assert self._link is not None
        if depth in self._holds:
            return self._holds.index(depth)
        slot = self._victim()
        self._holds[slot] = None  # a failed fetch leaves garbage that must never pass for the old layer
        self._link.fetch(depth, slot)
        self._holds[slot] = depth
        self.bytes_streamed += self._streamed[depth]
        return slot

    def _victim(self) -> int:
        """The next slot in turn that no computation holds."""
        for step in range(len(self._holds)):
            slot = (self._next_victim + step) % len(self._holds)
            if slot not in self._in_use:
                self._next_victim = (slot + 1) % len(self._holds)
                return slot
        raise RiverError(f"all {len(self._holds)} slots are in use: release a layer before acquiring another")


def _bind(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        layer.get_submodule(module)._parameters[leaf] = parameter


def _unbind(layer: nn.Module, names: Mapping[str, object]) -> None:
    """A released layer has no weights at all: nobody can be handed another layer's bytes, or empty ones."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        layer.get_submodule(module)._parameters[leaf] = None
