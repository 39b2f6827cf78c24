"""The link: what moves the bytes of a layer into a slot.

One interface for every tier and device. Each reuse of a slot has two edges:

1. the copy is done before compute reads:      `fetch(layer, slot)` ... `wait(slot)` ... compute
2. compute is done before a copy overwrites:   compute ... `release(slot)` ... `fetch(other, slot)`

The store calls in exactly that order; a link owes it both edges, by waiting or by ordering its streams.
"""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """Moves layers into slots. Not thread-safe: one store drives one link from one thread."""

    def fetch(self, layer: int, slot: int) -> None:
        """Begin to fill `slot` with the bytes of `layer`; may return before they are there.

        Raises LinkError when the bytes cannot be read (a synchronous link), else `wait` raises it.
        """

    def wait(self, slot: int) -> float:
        """Return once compute issued from now on reads the fetched bytes; the seconds this thread stood still.

        Raises LinkError when the fetch failed.
        """

    def release(self, slot: int) -> None:
        """All compute that reads `slot` has been issued: a later fetch may overwrite it once that is done."""

    def close(self) -> None:
        """Stop moving, wait for what is in flight, give back threads and memory. May be called twice."""
