"""How often passages left at each depth, lately and over a longer time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

PRIOR_RATE = 0.3
"""Share of passages that leave at a depth, before any was seen: River-LLM reports a mean depth of 3 at tau 0.5."""
PRIOR_COUNT = 2.0
"""Passages that the prior is worth; it fades where passages were seen at the depths around."""
NEIGHBOURS = 2
"""Depths on either side that lend a depth their rate while it has few passages of its own."""
OWN_COUNT = 1.0
FAST_COUNT = 2.0
"""How many passages the pooled rate is worth to the slow one, and the slow rate to the fast one."""
SLOW_DECAY = 0.5 ** (1 / 200)
FAST_DECAY = 0.5 ** (1 / 4)
"""Half-lives of 200 and of 4 passages: a whole answer, and a clause."""
LOGIT_LIMIT = 9.0


def logit(rate: float) -> float:
    """log(rate / (1 - rate)), kept within +-9: nothing is certain that was only seen often."""
    rate = min(max(rate, 1e-9), 1 - 1e-9)
    return min(max(math.log(rate / (1 - rate)), -LOGIT_LIMIT), LOGIT_LIMIT)


class ExitRates:
    """Counts, decayed at two speeds, of the passages that came to each depth and of those that left there."""

    def __init__(self, num_layers: int) -> None:
        self.came = {"slow": [0.0] * num_layers, "fast": [0.0] * num_layers}
        self.left = {"slow": [0.0] * num_layers, "fast": [0.0] * num_layers}

    def learn(self, first: int, last: int, left: bool) -> None:
        """A passage came to each depth in first..last and, if `left`, left at the last."""
        for speed, decay in (("slow", SLOW_DECAY), ("fast", FAST_DECAY)):
            self.came[speed] = [count * decay for count in self.came[speed]]
            self.left[speed] = [count * decay for count in self.left[speed]]
            for depth in range(first, last + 1):
                self.came[speed][depth] += 1
            if left:
                self.left[speed][last] += 1

    def logits(self) -> tuple[list[float], list[float]]:
        """Per depth the logit of the rate of leaving there: over the longer time, and lately minus that."""
        came, left = self.came["slow"], self.left["slow"]
        slow, change = [], []
        for depth in range(len(came)):
            around = slice(max(depth - NEIGHBOURS, 0), depth + NEIGHBOURS + 1)
            pooled = (sum(left[around]) + PRIOR_RATE * PRIOR_COUNT) / (sum(came[around]) + PRIOR_COUNT)
            rate = (left[depth] + pooled * OWN_COUNT) / (came[depth] + OWN_COUNT)
            lately = (self.left["fast"][depth] + rate * FAST_COUNT) / (self.came["fast"][depth] + FAST_COUNT)
            slow.append(logit(rate))
            change.append(logit(lately) - slow[-1])
        return slow, change

    def to_dict(self) -> dict[str, dict[str, list[float]]]:
        return {"came": self.came, "left": self.left}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Sequence[float]]], num_layers: int) -> ExitRates:
        """Inverse of `to_dict`. Raises ValueError or KeyError for lists that are missing or of another length."""
        rates = cls(num_layers)
        for name, counts in (("came", rates.came), ("left", rates.left)):
            for speed in counts:
                found = [float(count) for count in values[name][speed]]
                if len(found) != num_layers or not all(math.isfinite(count) and count >= 0 for count in found):
                    raise ValueError(f"{name}.{speed} holds {len(found)} numbers: expected {num_layers}, none below 0")
                counts[speed] = found
        return rates
