"""The link: what moves the bytes of a layer into a slot.

One interface for every tier and device. Each reuse of a slot has two edges:

1. the copy is done before compute reads:      `fetch(layer, slot)` ... `wait(slot)` ... compute
2. compute is done before a copy overwrites:   compute ... `release(slot)` ... `fetch(other, slot)`

The store calls in exactly that order; a link owes it both edges, by waiting or by ordering its streams.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Link(Protocol):
    """Moves layers into slots. Not thread-safe: one store drives one link from one thread.

    Fetches are moved one after the other, in the order in which they were asked for, an urgent one first; those into
    one slot always in order. What is said of a slot is said of the newest fetch into it that was not called off.
    """

    @property
    def abortable(self) -> bool:
        """Can a fetch that has started still be called off?"""

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        """Begin to fill `slot` with the bytes of `layer`, before all that is not urgent. Returns at once.

        Raises LinkError only when the link is closed; one that the bytes meet is raised by `wait`.
        """

    def wait(self, slot: int) -> float:
        """Return once compute issued from now on reads the fetched bytes; the seconds this thread stood still.

        Raises LinkError when the fetch failed. Asked again it answers the same.
        """

    def ready(self, slot: int) -> bool:
        """Would `wait` return, or raise, at once? True for a slot that nothing was fetched into."""

    def progress(self, slot: int) -> float:
        """How much of the fetch has been moved, 0 to 1."""

    def release(self, slot: int) -> None:
        """All compute that reads `slot` has been issued: a later fetch may overwrite it once that is done."""

    def cancel(self, slot: int) -> float:
        """Call the fetch off. Returns how much of it had started to move: at 0 the slot is what it was before, above 0
        its content is of no use, at 1 too, since the last bytes may still be on their way.

        A link that is not abortable lets a fetch that has started go on; the answer is 1 then.
        """

    def moved(self) -> tuple[float, float]:
        """How many layers' worth of bytes were moved so far, and the seconds in which the link was at it."""

    def close(self) -> None:
        """Stop moving, wait for what is in flight, give back threads and memory. May be called twice."""


class _Going(Protocol):
    cancelled: bool

    @property
    def done(self) -> bool: ...


Going = TypeVar("Going", bound=_Going)


class Fetches(Generic[Going]):
    """Per slot the fetches that still count: those under way, in order, and the one whose bytes are there."""

    def __init__(self, slots: int) -> None:
        self._of: list[list[Going]] = [[] for _ in range(slots)]

    def newest(self, slot: int) -> Going | None:
        """The newest one that was not called off."""
        return next((fetch for fetch in reversed(self._of[slot]) if not fetch.cancelled), None)

    def going(self, slot: int) -> list[Going]:
        """Those that may still write to the slot, called off or not."""
        return [fetch for fetch in self._of[slot] if not fetch.done]

    def add(self, slot: int, fetch: Going) -> None:
        """Put down a fetch that begins now."""
        newest = self.newest(slot)
        self._of[slot] = [old for old in self._of[slot] if old is newest or not old.done] + [fetch]
