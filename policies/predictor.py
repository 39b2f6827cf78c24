"""How probable it is that this passage, and each of the next, runs backbone layer d.

A passage that came to depth d leaves there with a probability of its own (a hazard), so the probability of running
layer k is the product of (1 - hazard) over the depths up to k: it can only fall with depth. The hazard is a logistic
regression, learned online: the logit of the rate so far at that depth, plus what is special about this passage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from policies.calibration import Calibration, Correction, Tally
from policies.exit_rates import ExitRates
from policies.forecast import certain

VERSION = 1
KNOTS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""The margin enters as a piecewise linear curve with these knots: what tells is whether it is under 0.2 or so."""
MARGIN = range(len(KNOTS))
TOKENS, LATELY, LAST, DISTANCE, UNUSUAL = range(len(KNOTS), len(KNOTS) + 5)
NAMES = (*(f"margin_{knot:g}" for knot in KNOTS), "new_tokens", "lately", "last_passage", "distance", "unusual_signal")
PRIOR_WEIGHTS = (-0.4, -0.3, 0.0, 0.1, 0.2, -0.5, 0.2, 0.0, -0.3, 0.3)
"""Unsure tokens go deeper, so do passages of many tokens (the signal is their minimum) and those far from tau."""
SIGNAL_REACH = 4
"""Depths after a signal on which it still tells something, 1/j of it at the j-th."""
STEP = 0.15
FIRST_SQUARES = 1.0
"""AdaGrad: a weight moves by STEP * gradient / sqrt(sum of the squares of its gradients so far)."""
WEIGHT_LIMIT = 12.0

Moment = Literal["begin", "signal"]
Features = Sequence[tuple[int, float]]
"""(index of the weight, value) of those that are not zero."""


class DepthPredictor:
    """A `Forecast` that learns from every passage.

    Args:
        num_layers: of the model.
        tau: a signal above it leaves.
        min_exit: the fewest layers that a passage runs.
    """

    def __init__(self, num_layers: int, tau: float = 0.5, min_exit: int = 1) -> None:
        if min_exit < 0 or num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, min_exit is {min_exit}: expected at least 1 and at least 0")
        self.num_layers = num_layers
        self.tau = tau
        self.min_exit = min_exit
        self._first = max(min_exit, 1)  # the exit is looked at after a layer has run
        self._weights = list(PRIOR_WEIGHTS)
        self._squares = [FIRST_SQUARES] * len(NAMES)
        self._rates = {"one": ExitRates(num_layers), "several": ExitRates(num_layers)}
        self._slow_change: dict[str, tuple[list[float], list[float]]] = {}
        self._signal_stats = [[0.0, 0.0, 0.0] for _ in range(num_layers + 1)]  # count, mean, mean square around it
        self._ran = [0] * num_layers  # passages that ran each layer, the running base rate
        self._passages = 0
        self._tallies: dict[Moment, Tally] = {"begin": Tally(), "signal": Tally()}
        self._corrections: dict[Moment, Correction] = {"begin": Correction(), "signal": Correction()}
        self._last_depth: int | None = None
        self._nothing = certain(0, num_layers)
        self._row: Sequence[float] = self._nothing
        self._next_row: Sequence[float] = self._nothing
        self._known: int | None = None
        self._running = False
        self._kind = "one"
        self._signals: dict[int, float] = {}
        self._common: Features = ()
        self._logits: list[float] = []
        self._raw: Sequence[float] = self._nothing
        self._guesses: list[tuple[Moment, int, float, float, float]] = []
        self._refresh(*self._rates)

    def begin(self, new_tokens: int, margin: float | None = None, known_depth: int | None = None) -> None:
        """See `Forecast`. A margin that is not a number counts as not known."""
        self._running, self._known = True, known_depth
        self._signals, self._guesses = {}, []
        if known_depth is not None:
            self._row = self._next_row = certain(min(known_depth, self.num_layers), self.num_layers)
            return
        self._kind = "one" if new_tokens == 1 else "several"
        self._common = (*_margin_features(margin), (TOKENS, min(math.log2(max(new_tokens, 1)) / 8, 1.0)))
        self._logits = self._passage_logits()
        self._raw = self._survival(0)
        self._row = self._corrections["begin"].apply(self._raw, self._first)
        self._next_row = self._blank_row(last=False)
        self._guess("begin", range(self._first, self.num_layers))

    def observe_signal(self, layers_run: int, signal: float) -> None:
        """See `Forecast`. One that leaves ends all need for deeper layers."""
        if self._known is not None or not self._running:
            return
        self._signals[layers_run] = signal
        if self._first <= layers_run < self.num_layers and signal > self.tau:
            self._row = (*self._row[:layers_run], *(0.0,) * (self.num_layers - layers_run))
            return
        self._raw = self._survival(layers_run)
        self._row = self._corrections["signal"].apply(self._raw, max(self._first, layers_run + 1))
        self._guess("signal", range(layers_run + 1, min(layers_run + 1 + SIGNAL_REACH, self.num_layers)))

    def probability(self, depth: int, ahead: int = 0) -> float:
        """That the `ahead`-th passage from here (0: the present one) runs backbone layer `depth`."""
        return (self._row if ahead == 0 else self._next_row)[depth]

    def rows(self) -> tuple[Sequence[float], ...]:
        """See `Forecast`."""
        return (self._row, self._next_row)

    def end(self, depth_reached: int, *, censored: bool = False) -> None:
        """See `Forecast`. A passage whose depth was known teaches nothing."""
        if not self._running:
            return
        self._running = False
        self._row = self._nothing
        if self._known is not None:
            return
        last = min(depth_reached, self.num_layers - 1)
        left = not censored and self._first <= depth_reached < self.num_layers
        if not censored:
            self._score(depth_reached)
        self._fit(last, left)
        self._rates[self._kind].learn(self._first, last, left)
        for layers_run, signal in self._signals.items():
            if math.isfinite(signal):
                _include(self._signal_stats[layers_run], signal)
        self._last_depth = depth_reached
        self._refresh(self._kind)

    def calibration(self, moment: Moment = "begin") -> Calibration:
        """How good the probabilities were against the running base rate, over all passages whose depth came out.

        `begin`: of every layer from min_exit on, before the first layer ran. `signal`: of the next layers after each
        signal, where the base rate is that of the passages that came so far.
        """
        return self._tallies[moment].result()

    def to_json(self) -> str:
        """All that was learned; the calibration is not part of it."""
        values = {
            "version": VERSION,
            "num_layers": self.num_layers,
            "tau": self.tau,
            "min_exit": self.min_exit,
            "weights": dict(zip(NAMES, self._weights, strict=True)),
            "squares": dict(zip(NAMES, self._squares, strict=True)),
            "corrections": {moment: correction.to_list() for moment, correction in self._corrections.items()},
            "rates": {kind: rates.to_dict() for kind, rates in self._rates.items()},
            "signals": self._signal_stats,
            "ran": self._ran,
            "passages": self._passages,
            "last_depth": self._last_depth,
        }
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> DepthPredictor:
        """Inverse of `to_json`. Raises ValueError that says what is wrong."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or values.get("version") != VERSION:
                raise ValueError(f"expected an object of version {VERSION}")
            predictor = cls(int(values["num_layers"]), float(values["tau"]), int(values["min_exit"]))
            predictor._restore(values)
        except KeyError as error:
            raise ValueError(f"predictor coefficients: {error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"predictor coefficients: {error}") from error
        return predictor

    def _restore(self, values: Mapping[str, Any]) -> None:
        layers = self.num_layers
        self._weights = [_number("weights", values["weights"][name]) for name in NAMES]
        self._squares = [_number("squares", values["squares"][name]) for name in NAMES]
        if min(self._squares) <= 0:
            raise ValueError("squares: expected numbers above 0")
        self._rates = {kind: ExitRates.from_dict(values["rates"][kind], layers) for kind in self._rates}
        self._corrections = {
            moment: Correction.from_list(values["corrections"][moment]) for moment in self._corrections
        }
        self._signal_stats = [[_number("signals", x) for x in stats] for stats in values["signals"]]
        self._ran = [int(count) for count in values["ran"]]
        if len(self._signal_stats) != layers + 1 or {len(stats) for stats in self._signal_stats} != {3}:
            raise ValueError(f"signals: expected {layers + 1} triples")
        if len(self._ran) != layers:
            raise ValueError(f"ran: found {len(self._ran)} counts, expected {layers}")
        self._passages = int(values["passages"])
        last = values["last_depth"]
        self._last_depth = None if last is None else int(last)
        self._refresh(*self._rates)

    # Hazards and what follows from them.

    def _refresh(self, *kinds: str) -> None:
        """What the next passages start from, after something was learned."""
        for kind in kinds:
            self._slow_change[kind] = self._rates[kind].logits()
        self._next_row = self._blank_row(last=True)

    def _blank_row(self, *, last: bool) -> list[float]:
        """The row of a one-token passage of which nothing is known but, with `last`, the passage before it."""
        slow, change = self._slow_change["one"]
        lately, weight = self._weights[LATELY], self._weights[LAST] if last else 0.0
        logits = [
            slow[depth] + lately * change[depth] + (weight * self._last_feature(depth) if last else 0.0)
            for depth in range(self.num_layers)
        ]
        return _survival([1.0] * self.num_layers, logits, self._first)

    def _passage_logits(self) -> list[float]:
        """Per depth the logit of leaving there, as long as no signal is known."""
        slow, change = self._slow_change[self._kind]
        weights = self._weights
        common = sum(weights[index] * value for index, value in self._common)
        lately, last = weights[LATELY], weights[LAST]
        return [
            slow[depth] + common + lately * change[depth] + last * self._last_feature(depth)
            for depth in range(self.num_layers)
        ]

    def _survival(self, layers_run: int) -> list[float]:
        """The row of this passage after `layers_run` layers with the signal measured there, if one was."""
        first = max(self._first, layers_run + 1)
        logits = self._logits
        features = self._signal_features(layers_run)
        if features:
            logits = list(logits)
            push = sum(self._weights[index] * value for index, value in features)
            for step, depth in enumerate(range(first, min(layers_run + 1 + SIGNAL_REACH, self.num_layers))):
                logits[depth] += push / (step + 1)
        return _survival([1.0] * self.num_layers, logits, first)

    def _last_feature(self, depth: int) -> float:
        """Did the last passage leave at this depth (1), run on (-1), or not get there (0)?"""
        if self._last_depth is None or self._last_depth < depth:
            return 0.0
        return 1.0 if self._last_depth == depth else -1.0

    def _signal_features(self, layers_run: int) -> Features:
        signal = self._signals.get(layers_run)
        if signal is None or not math.isfinite(signal):
            return ()
        distance = (self.tau - signal) / (abs(1 - self.tau) + 0.01)
        count, mean, variance = self._signal_stats[layers_run]
        unusual = (signal - mean) / math.sqrt(variance + 1e-6) if count >= 5 else 0.0
        return ((DISTANCE, min(max(distance, -1.0), 2.0)), (UNUSUAL, min(max(unusual, -3.0), 3.0) / 2))

    # Learning and scoring.

    def _fit(self, last: int, left: bool) -> None:
        """One AdaGrad step a depth that the passage came to: without the signals, and with the one just before."""
        slow, change = self._slow_change[self._kind]
        for depth in range(self._first, last + 1):
            happened = left and depth == last
            plain = (*self._common, (LATELY, change[depth]), (LAST, self._last_feature(depth)))
            self._step(slow[depth], plain, happened)
            if signal := self._signal_features(depth - 1):
                self._step(slow[depth], (*plain, *signal), happened)

    def _step(self, offset: float, features: Features, happened: bool) -> None:
        weights, squares = self._weights, self._squares
        error = _sigmoid(offset + sum(weights[index] * value for index, value in features)) - happened
        for index, value in features:
            gradient = error * value
            squares[index] += gradient * gradient
            moved = weights[index] - STEP * gradient / math.sqrt(squares[index])
            weights[index] = min(max(moved, -WEIGHT_LIMIT), WEIGHT_LIMIT)

    def _guess(self, moment: Moment, layers: range) -> None:
        """Keep what was said of `layers`, and what the base rate says, until the depth comes out."""
        if not layers:
            return
        # A passage that came to depth r runs layer r, so the base rate then counts among those that ran it.
        came = self._passages if moment == "begin" else self._ran[layers.start - 1]
        for layer in layers:
            base_rate = (self._ran[layer] + 1) / (came + 2)
            self._guesses.append((moment, layer, self._raw[layer], self._row[layer], base_rate))

    def _score(self, depth_reached: int) -> None:
        for moment, layer, raw, probability, base_rate in self._guesses:
            self._corrections[moment].learn(raw, layer < depth_reached)
            self._tallies[moment].add(probability, base_rate, layer < depth_reached)
        self._passages += 1
        for layer in range(min(depth_reached, self.num_layers)):
            self._ran[layer] += 1


def _margin_features(margin: float | None) -> tuple[tuple[int, float], ...]:
    """The two knots around the margin, weighted by nearness; none when the margin is not known."""
    if margin is None or not math.isfinite(margin):
        return ()
    margin = min(max(margin, KNOTS[0]), KNOTS[-1])
    upper = next(index for index in MARGIN if index and margin <= KNOTS[index])
    share = (margin - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1])
    return ((upper - 1, 1 - share), (upper, share))


def _survival(row: list[float], logits: Sequence[float], first: int) -> list[float]:
    """Fill `row` from `first` on with the probability of leaving at no depth up to there."""
    stays = 1.0
    for depth in range(first, len(row)):
        stays *= _sigmoid(-logits[depth])
        row[depth] = stays
    return row


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _include(stats: list[float], value: float) -> None:
    """Running mean and mean square deviation, the first values weighted evenly, later ones as of the last hundred."""
    stats[0] = min(stats[0] + 1, 100.0)
    difference = value - stats[1]
    stats[1] += difference / stats[0]
    stats[2] += (difference * (value - stats[1]) - stats[2]) / stats[0]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a finite number")
    return float(value)
