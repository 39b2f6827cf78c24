"""What every slot holds, and what is on its way into which: the book of a store over its link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from river_offload.errors import LinkError, RiverError
from river_offload.store.link import Link


@dataclass(eq=False, slots=True)
class Fetch:
    """A layer on its way into a slot."""

    layer: int
    slot: int
    before: int | None
    """What the slot held when the fetch was asked for; it does so still if the fetch is called off in time."""
    wasteful: bool
    """Nobody has used what the slot held."""


class Transfers:
    """Fetches and cancels, and keeps account of both.

    Whatever interrupts one of its methods (Ctrl-C), `reset` makes a sound state out of what is left: a slot is put
    down as empty before anything is fetched into it, and as full only after the bytes are there.

    Args:
        streamed: bytes that a fetch of each streamed layer moves, by layer.
        slots: number of slots.
        link: fills them.

    Attributes:
        holds: per slot the layer whose bytes are all there.
        queue: fetches not known to be done, first to finish first.
        in_use: slots that computation reads.
        bytes_streamed: of fetches done, and of those called off half-way as much as they had moved.
        wasted_bytes: of those, what was overwritten before it was used.
    """

    def __init__(self, streamed: Mapping[int, int], slots: int, link: Link) -> None:
        self.streamed = streamed
        self.link = link
        self.holds: list[int | None] = [None] * slots
        self.queue: list[Fetch] = []
        self.in_use: set[int] = set()
        self.bytes_streamed = 0
        self.wasted_bytes = 0
        self._used = [True] * slots

    def poll(self) -> None:
        """Put down what has arrived."""
        while self.queue and self.link.ready(self.queue[0].slot):
            self._settle(self.queue[0])

    def present(self, layer: int) -> bool:
        """Are the layer's bytes all there?"""
        self.poll()
        return layer in self.holds

    def has(self, layer: int) -> bool:
        """Is the layer there or on its way?"""
        return layer in self.holds or any(fetch.layer == layer for fetch in self.queue)

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        """Begin to bring the layer in, over what the slot holds; urgent: ahead of all that may be overtaken."""
        assert slot not in self.in_use, f"slot {slot} is being read"
        fetch = Fetch(layer, slot, self.holds[slot], not self._used[slot])
        self.holds[slot] = None
        same_slot = [index for index, other in enumerate(self.queue) if other.slot == slot]
        place = (same_slot[-1] + 1 if same_slot else 0) if urgent else len(self.queue)
        self.queue.insert(place, fetch)
        try:
            self.link.fetch(layer, slot, urgent=urgent)
        except LinkError:
            self.queue.remove(fetch)
            raise

    def cancel(self, layer: int, slot: int) -> None:
        """Call a fetch of the queue off. The newest into its slot: cancel a queue from its end."""
        fetch = next(f for f in reversed(self.queue) if (f.layer, f.slot) == (layer, slot))
        if self.link.ready(slot):
            self._settle(fetch)
            return
        share = self.link.cancel(slot)
        if share >= 1.0 and not self.link.abortable:
            return
        self.queue.remove(fetch)
        if share:
            self._overwritten(fetch)
            moved_bytes = round(share * self.streamed[layer])
            self.bytes_streamed += moved_bytes
            self.wasted_bytes += moved_bytes
        elif all(other.slot != slot for other in self.queue):
            self.holds[slot], self._used[slot] = fetch.before, not fetch.wasteful

    def take(self, layer: int) -> tuple[int, float]:
        """The slot with the layer in it, once it may be read, and the seconds that this stood still for it.

        Raises LinkError when its bytes cannot be had, RiverError when no fetch of it is under way.
        """
        fetch = next((fetch for fetch in self.queue if fetch.layer == layer), None)
        if fetch is None and layer not in self.holds:
            raise RiverError(
                f"all {len(self.holds)} slots are in use: release a layer before acquiring another ({layer})"
            )
        slot = self.holds.index(layer) if fetch is None else fetch.slot
        try:
            waited_s = self.link.wait(slot)
        except LinkError:
            self.holds[slot] = None  # garbage that must never pass for the layer
            if fetch is not None:
                self.queue.remove(fetch)
            raise
        if fetch is not None:
            before = self.queue[: self.queue.index(fetch)]
            for other in (*(earlier for earlier in before if earlier.slot == slot), fetch):
                self._arrived(other)  # those into one slot arrive in order
        self.in_use.add(slot)
        self._used[slot] = True
        return slot, waited_s

    def release(self, slot: int, *, forget: bool) -> None:
        """The computation that reads the slot has been issued. `forget`: its bytes were destroyed."""
        self.in_use.discard(slot)
        if forget:
            self.holds[slot] = None
        self.link.release(slot)

    def reset(self) -> None:
        """After a passage that broke off: nothing is in use, nothing on its way."""
        self.in_use.clear()
        for fetch in reversed(tuple(self.queue)):
            self.cancel(fetch.layer, fetch.slot)
        self.poll()

    def _settle(self, fetch: Fetch) -> None:
        """One that is done has arrived, or failed before anybody needed it: then it will be tried again in time."""
        try:
            self.link.wait(fetch.slot)
        except LinkError:
            self.queue.remove(fetch)
        else:
            self._arrived(fetch)

    def _arrived(self, fetch: Fetch) -> None:
        self.queue.remove(fetch)
        self._overwritten(fetch)
        self.bytes_streamed += self.streamed[fetch.layer]
        self._used[fetch.slot] = False
        if all(other.slot != fetch.slot for other in self.queue):
            self.holds[fetch.slot] = fetch.layer

    def _overwritten(self, fetch: Fetch) -> None:
        if fetch.before is not None and fetch.wasteful:
            self.wasted_bytes += self.streamed[fetch.before]
