"""Disk to RAM: the link of a machine whose compute device is its CPU."""

from __future__ import annotations

from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier


class CpuLink:
    """Reads a layer when it is asked for. Synchronous: both edges hold because everything runs in one thread."""

    def __init__(self, disk: DiskTier, slots: Slots) -> None:
        self._disk = disk
        self._slots = slots

    def fetch(self, layer: int, slot: int) -> None:
        """Fill the slot before returning. Raises LinkError when the file cannot be read."""
        self._disk.read(layer, self._slots.buffers[slot])

    def wait(self, slot: int) -> float:
        """The bytes are there already."""
        return 0.0

    def release(self, slot: int) -> None:
        """Compute on CPU is done when its call returns."""

    def close(self) -> None:
        """Nothing is held."""
