"""How good probabilities were, once it is known what happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
