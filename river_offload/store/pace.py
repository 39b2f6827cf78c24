"""How long the steps of a passage take, learned as they go by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

GUESSED_LAYER_S = 0.4
"""A layer of an 8B model (416 MiB) from an ordinary NVMe disk, until the link's own pace is known."""
GUESSED_RATIO = 14.0
"""Bringing a layer in takes this many times as long as computing one token with it: 14 measured on a CPU with an NVMe
disk, 20 to 28 on cards with PCIe."""
_NEWEST = 0.2
"""Weight of the newest measurement."""
_WORTH_MEASURING = 0.25
"""Layers moved before the link's pace is looked at again."""


class Costs(NamedTuple):
    """Seconds, for a passage of some size."""

    backbone_s: float
    """One backbone layer."""
    river_s: float
    """One river layer."""
    outside_s: float
    """What is outside the layers, per passage of one token."""


class Pace:
    """Seconds that a layer takes on the link, on the backbone, on the river, and what is outside the layers.

    Computation is timed by token count (in powers of two): a prompt takes longer than a token.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._link_s: float | None = None
        self._moved = (0.0, 0.0)
        self._backbone_s: dict[int, float] = {}
        self._river_s: dict[int, float] = {}
        self._outside_s: float | None = None
        self._size = 1
        self._since_s: float | None = None
        self._closed_s: float | None = None

    @property
    def link_s(self) -> float:
        """Seconds a whole layer takes on the link."""
        return GUESSED_LAYER_S if self._link_s is None else self._link_s

    @property
    def backbone_s(self) -> float:
        """Seconds from one backbone layer to the next in a passage of this size."""
        return _nearest(self._backbone_s, self._size, self.link_s / GUESSED_RATIO)

    def costs_of(self, new_tokens: int) -> Costs:
        """What was learned of passages of about so many tokens a row."""
        size = new_tokens.bit_length()
        backbone_s = _nearest(self._backbone_s, size, self.link_s / GUESSED_RATIO)
        return Costs(backbone_s, _nearest(self._river_s, size, backbone_s / 4), self._outside_s or 0.0)

    def rest_s(self, river_layers: int) -> float:
        """Seconds from the exit to the next passage: the river, the head, sampling, the embedding."""
        return river_layers * _nearest(self._river_s, self._size, self.backbone_s / 4) + (self._outside_s or 0.0)

    def linked(self, layers: float, seconds: float) -> None:
        """What the link says that it moved in all, and how long it was at it."""
        moved, busy_s = layers - self._moved[0], seconds - self._moved[1]
        if moved >= _WORTH_MEASURING and busy_s > 0:
            self._moved = (layers, seconds)
            self._link_s = _average(self._link_s, busy_s / moved)

    def opened(self, new_tokens: int) -> None:
        """A passage begins; what is outside the layers is measured between passages of one token."""
        if self._closed_s is not None and new_tokens == 1:
            self._outside_s = _average(self._outside_s, self._clock() - self._closed_s)
        self._size = new_tokens.bit_length()
        self._since_s = None

    def computing(self) -> None:
        """A backbone layer is there: its computation begins."""
        self._since_s = self._clock()

    def computed(self) -> None:
        """Its computation is done, and the next decision is due."""
        if self._since_s is not None:
            self._backbone_s[self._size] = _average(self._backbone_s.get(self._size), self._clock() - self._since_s)
            self._since_s = None

    def left(self) -> None:
        """The river begins."""
        self._since_s = self._clock()

    def closed(self, river_layers: int) -> None:
        """The last layer is done."""
        now_s = self._clock()
        if self._since_s is not None and river_layers:
            sample_s = (now_s - self._since_s) / river_layers
            self._river_s[self._size] = _average(self._river_s.get(self._size), sample_s)
        self._since_s, self._closed_s = None, now_s

    def broken_off(self) -> None:
        """The passage failed: what was being timed tells nothing."""
        self._since_s = self._closed_s = None


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)


def _nearest(known: dict[int, float], size: int, otherwise: float) -> float:
    return known[min(known, key=lambda other: abs(other - size))] if known else otherwise
