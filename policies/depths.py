"""Depths to force on passages, so that random weights measure speed as honestly as trained ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FixedDepths:
    """Every passage leaves after `depth` layers."""

    depth: int

    def draw(self, passages: int, num_layers: int, *, lowest: int = 1, seed: int = 0) -> tuple[int, ...]:
        """One depth per passage. Raises ValueError for a depth outside `lowest`..`num_layers`."""
        return _checked((self.depth,) * passages, num_layers, lowest)

    def __str__(self) -> str:
        return f"fixed:{self.depth}"


@dataclass(frozen=True)
class GeometricDepths:
    """Each further layer is as probable as the one before, as the depths of a river roughly are.

    The depths are the quantiles of the distribution in a random order, rather than draws: a short run, too, has the
    mean that was asked for, so that two runs of one length differ in their order alone.
    """

    mean: float
    """Of the passages that are not sent to full depth, before depths beyond the last layer are cut to it."""
    full_share: float = 0.0
    """Share of the passages that run every layer."""

    def draw(self, passages: int, num_layers: int, *, lowest: int = 1, seed: int = 0) -> tuple[int, ...]:
        """One depth per passage, `lowest` at least. Raises ValueError for a mean outside `lowest`..`num_layers`."""
        if not lowest <= self.mean <= num_layers:
            raise ValueError(f"{self}: the mean is {self.mean:g}, expected {lowest}..{num_layers}")
        full = min(round(self.full_share * passages), passages)
        quantiles = ((index + 0.5) / (passages - full) for index in range(passages - full))
        depths = [min(lowest + self._layers_at(quantile, lowest), num_layers) for quantile in quantiles]
        depths += [num_layers] * full
        random.Random(seed).shuffle(depths)
        return tuple(depths)

    def __str__(self) -> str:
        return f"geometric:{self.mean:g}" + (f",full={self.full_share:g}" if self.full_share else "")

    def _layers_at(self, quantile: float, lowest: int) -> int:
        """Layers beyond the lowest depth of the passage at `quantile` (0..1): the inverse of 1 - stay^(n+1)."""
        stay = 1 - 1 / (self.mean - lowest + 1)
        return int(math.log1p(-quantile) / math.log(stay)) if stay > 0 else 0


@dataclass(frozen=True)
class ListedDepths:
    """Depths out of a trace, one per passage."""

    depths: tuple[int, ...]
    source: str = "list"

    def draw(self, passages: int, num_layers: int, *, lowest: int = 1, seed: int = 0) -> tuple[int, ...]:
        """The first `passages` depths. Raises ValueError when there are fewer, or when one is out of range."""
        if passages > len(self.depths):
            raise ValueError(f"{self.source} has {len(self.depths)} passages, {passages} are to run: ask for fewer")
        return _checked(self.depths[:passages], num_layers, lowest)

    def __str__(self) -> str:
        return self.source


Depths = FixedDepths | GeometricDepths | ListedDepths


def parse_depths(text: str) -> FixedDepths | GeometricDepths:
    """`fixed:3`, `geometric:3` or `geometric:3,full=0.08`. Raises ValueError that says what was found and expected."""
    kind, colon, rest = text.strip().partition(":")
    figure, comma, option = rest.partition(",")
    if kind == "fixed" and not comma and figure.isdecimal():
        return FixedDepths(int(figure))
    name, equals, share = option.partition("=")
    if kind == "geometric" and colon and bool(comma) == (name == "full" and bool(equals)):
        mean, full_share = _number(figure), _number(share) if comma else 0.0
        if mean is not None and mean >= 0 and full_share is not None and 0 <= full_share <= 1:
            return GeometricDepths(mean, full_share)
    raise ValueError(
        f"unknown depths {text!r}: expected fixed:D, geometric:MEAN, geometric:MEAN,full=SHARE (full=0.08: so many of "
        "the tokens at full depth) or a trace file"
    )


def looks_like_file(text: str) -> bool:
    """Whether `text` is meant as a trace file rather than as a rule."""
    return text.strip().partition(":")[0] not in ("fixed", "geometric")


def summary(depths: Sequence[int], num_layers: int) -> dict[str, Any]:
    """What a report says of depths: their mean, extremes, the share at full depth, passages by depth."""
    count = len(depths)
    return {
        "passages": count,
        "mean": sum(depths) / count if count else None,
        "min": min(depths, default=None),
        "max": max(depths, default=None),
        "full_share": sum(depth == num_layers for depth in depths) / count if count else None,
        "histogram": {str(depth): number for depth, number in sorted(Counter(depths).items())},
    }


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _checked(depths: tuple[int, ...], num_layers: int, lowest: int) -> tuple[int, ...]:
    for number, depth in enumerate(depths):
        if not lowest <= depth <= num_layers:
            raise ValueError(f"passage {number} is to leave after {depth} layers: expected {lowest}..{num_layers}")
    return depths
