"""Disk to RAM: the link of a machine whose compute device is its CPU."""

from __future__ import annotations

from river_offload.store.link import Fetches
from river_offload.store.reader import Ticket
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier


class CpuLink:
    """Reader threads fill slots while the calling thread computes.

    Both edges: `wait` waits for the last byte; and since compute on a CPU is done when its call returns, nothing is
    read from a slot any more when the store releases it. What this link must see to itself is that two copies into one
    slot never overlap: a read starts when the one before it, called off or not, writes no more.

    Args:
        disk: the layers' files and the threads that read them; closed with the link.
        slots: where they go.
    """

    abortable = True

    def __init__(self, disk: DiskTier, slots: Slots) -> None:
        self._disk = disk
        self._slots = slots
        self._reader = disk.reader
        self._fetches: Fetches[Ticket] = Fetches(len(slots))

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        """Queue the layer's ranges of its files."""
        ticket = Ticket(self._disk.spans(layer, self._slots.buffers[slot]), after=self._fetches.going(slot))
        self._fetches.add(slot, ticket)  # first, so that whatever happens it can be called off
        self._reader.submit(ticket, urgent=urgent)

    def wait(self, slot: int) -> float:
        """Wait for the threads. Raises LinkError that names file and place."""
        ticket = self._fetches.newest(slot)
        return 0.0 if ticket is None else self._reader.wait(ticket)

    def ready(self, slot: int) -> bool:
        ticket = self._fetches.newest(slot)
        return ticket is None or ticket.done

    def progress(self, slot: int) -> float:
        ticket = self._fetches.newest(slot)
        return 1.0 if ticket is None else ticket.landed_bytes / ticket.nbytes

    def release(self, slot: int) -> None:
        """Compute on CPU is done when its call returns."""

    def cancel(self, slot: int) -> float:
        """Drop what no thread has taken up. A piece under way still lands; the next read of the slot waits for it."""
        ticket = self._fetches.newest(slot)
        return 0.0 if ticket is None else self._reader.cancel(ticket) / ticket.nbytes

    def moved(self) -> tuple[float, float]:
        moved_bytes, seconds = self._reader.moved()
        return moved_bytes / self._disk.layer_bytes, seconds

    def close(self) -> None:
        """End the threads and close the files."""
        self._disk.close()
