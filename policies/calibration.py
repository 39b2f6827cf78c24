"""How good probabilities were, once it is known what happened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIRST_WEIGHT = 100.0
LAST_WEIGHT = 2000.0
"""Samples that a knot of a correction is worth before any came, and the most it is worth later."""


@dataclass(frozen=True)
class Decile:
    """The samples whose probability fell into one tenth of 0..1."""

    count: int
    mean_probability: float
    observed_rate: float

    @property
    def error(self) -> float:
        """How far the mean probability is from what happened."""
        return abs(self.mean_probability - self.observed_rate)


@dataclass(frozen=True)
class Calibration:
    """Brier score = mean squared difference of probability and outcome: 0 is perfect, 0.25 is a coin."""

    samples: int
    brier: float
    base_rate_brier: float
    """The score of saying, each time, how often it had happened so far."""
    deciles: tuple[Decile, ...]

    @classmethod
    def of(cls, samples: Iterable[tuple[float, float, bool]]) -> Calibration:
        """Score samples of (probability, base rate, what happened)."""
        tally = Tally()
        for probability, base_rate, happened in samples:
            tally.add(probability, base_rate, happened)
        return tally.result()

    def worst_decile(self, at_least: int = 50) -> float:
        """The largest error of a decile that holds `at_least` samples; 0 when none does."""
        return max((decile.error for decile in self.deciles if decile.count >= at_least), default=0.0)


class Tally:
    """Scores samples one by one, in constant memory."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._base_squares = 0.0
        self._counts = [0] * 10
        self._probabilities = [0.0] * 10
        self._happened = [0] * 10

    def add(self, probability: float, base_rate: float, happened: bool) -> None:
        self._squares += (probability - happened) ** 2
        self._base_squares += (base_rate - happened) ** 2
        tenth = min(int(probability * 10), 9)
        self._counts[tenth] += 1
        self._probabilities[tenth] += probability
        self._happened[tenth] += happened

    def result(self) -> Calibration:
        samples = sum(self._counts)
        return Calibration(
            samples=samples,
            brier=self._squares / max(samples, 1),
            base_rate_brier=self._base_squares / max(samples, 1),
            deciles=tuple(
                Decile(count, total / max(count, 1), happened / max(count, 1))
                for count, total, happened in zip(self._counts, self._probabilities, self._happened, strict=True)
            ),
        )


class Correction:
    """A rising curve from probabilities as computed to what they turned out to mean, learned online.

    Piecewise linear over tenths, at first the identity. Each knot follows the mean of the outcomes near it.
    """

    def __init__(self) -> None:
        self._heights = [tenth / 10 for tenth in range(11)]
        self._weights = [FIRST_WEIGHT] * 11

    def apply(self, row: Sequence[float], first: int) -> list[float]:
        """The row with its values from `first` on corrected: still never increasing, and never above 1."""
        heights = self._heights
        corrected = list(row[:first])
        for probability in row[first:]:
            position = probability * 10
            tenth = min(int(position), 9)
            low = heights[tenth]
            corrected.append(low + (position - tenth) * (heights[tenth + 1] - low))
        return corrected

    def learn(self, probability: float, happened: bool) -> None:
        """Pull the two knots around `probability` towards the outcome, the nearer one more."""
        heights, position = self._heights, probability * 10
        tenth = min(int(position), 9)
        share = position - tenth
        error = happened - (heights[tenth] * (1 - share) + heights[tenth + 1] * share)
        for knot, near in ((tenth, 1 - share), (tenth + 1, share)):
            heights[knot] = min(max(heights[knot] + error * near / self._weights[knot], 0.0), 1.0)
            self._weights[knot] = min(self._weights[knot] + near, LAST_WEIGHT)
        # The curve must not fall: the two that moved meet half-way, and another gives way to them.
        if heights[tenth] > heights[tenth + 1]:
            heights[tenth] = heights[tenth + 1] = (heights[tenth] + heights[tenth + 1]) / 2
        knot = tenth
        while knot and heights[knot - 1] > heights[knot]:
            heights[knot - 1] = heights[knot]
            knot -= 1
        knot = tenth + 1
        while knot < 10 and heights[knot + 1] < heights[knot]:
            heights[knot + 1] = heights[knot]
            knot += 1

    def to_list(self) -> list[list[float]]:
        return [self._heights, self._weights]

    @classmethod
    def from_list(cls, values: Sequence[Sequence[float]]) -> Correction:
        """Inverse of `to_list`. Raises ValueError for what is no rising curve over eleven knots."""
        correction = cls()
        heights, weights = ([float(value) for value in numbers] for numbers in values)
        rising = heights == sorted(heights) and all(0 <= height <= 1 for height in heights)
        if len(heights) != 11 or len(weights) != 11 or not rising or not all(1 <= w < math.inf for w in weights):
            raise ValueError("corrections: expected eleven rising heights in 0..1 and eleven weights of at least 1")
        correction._heights, correction._weights = heights, weights
        return correction
