"""What the planner of fetches is told about depth: a protocol, and the two forecasts that need no guessing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Forecast(Protocol):
    """How probable it is that a passage runs each backbone layer.

    A passage goes `begin`, `observe_signal` after each layer whose signal was measured, and `end` as soon as it leaves
    the backbone, which is before its river layers run.
    """

    @property
    def num_layers(self) -> int: ...

    def begin(self, new_tokens: int, margin: float | None = None, known_depth: int | None = None) -> None:
        """A passage of `new_tokens` tokens a row starts.

        `margin` is the top-1 minus top-2 probability of the last token. `known_depth` is given when the mode fixes the
        depth (fixed:D, backbone, quantized): nothing is then left to guess.
        """

    def observe_signal(self, layers_run: int, signal: float) -> None:
        """The exit signal after `layers_run` backbone layers."""

    def end(self, depth_reached: int, *, censored: bool = False) -> None:
        """The passage left the backbone after `depth_reached` layers.

        `censored`: it would have gone deeper and left for another reason (a layer that was not there).
        """

    def rows(self) -> tuple[Sequence[float], ...]:
        """Per passage, this one first, the probability of running each layer: num_layers values that never increase.

        At least two rows; the last stands for every later passage too. Row 0 is all zero between `end` and `begin`.
        """


def certain(depth: int, num_layers: int) -> tuple[float, ...]:
    """The row of a passage that is known to run `depth` backbone layers."""
    return (1.0,) * depth + (0.0,) * (num_layers - depth)


class Known:
    """Every passage runs `depth` layers. With `depth` = num_layers it is the plain assumption of kind `next`."""

    def __init__(self, num_layers: int, depth: int) -> None:
        self.num_layers = num_layers
        self._row = certain(min(depth, num_layers), num_layers)
        self._nothing = certain(0, num_layers)
        self._running = False

    def begin(self, new_tokens: int, margin: float | None = None, known_depth: int | None = None) -> None:
        self._running = True

    def observe_signal(self, layers_run: int, signal: float) -> None:
        """Learns nothing from it."""

    def end(self, depth_reached: int, *, censored: bool = False) -> None:
        self._running = False

    def rows(self) -> tuple[Sequence[float], ...]:
        return (self._row if self._running else self._nothing, self._row)


class Oracle:
    """Knows the depths to come, out of a trace: the bound that a predictor is measured against.

    Args:
        num_layers: of the model.
        depths: what the passages will reach, in order. After the last one nothing is needed any more.
        ahead: how many passages after the present one it tells of.
    """

    def __init__(self, num_layers: int, depths: Sequence[int], ahead: int = 16) -> None:
        self.num_layers = num_layers
        self._table = [certain(depth, num_layers) for depth in range(num_layers + 1)]
        self._depths = (*depths, *(0,) * (ahead + 1))
        self._ahead = ahead
        self._index = 0
        self._running = False

    def begin(self, new_tokens: int, margin: float | None = None, known_depth: int | None = None) -> None:
        self._running = True

    def observe_signal(self, layers_run: int, signal: float) -> None:
        """Knows already."""

    def end(self, depth_reached: int, *, censored: bool = False) -> None:
        self._running = False
        self._index = min(self._index + 1, len(self._depths) - self._ahead - 1)

    def rows(self) -> tuple[Sequence[float], ...]:
        start = self._index + self._running
        later = (self._table[depth] for depth in self._depths[start : start + self._ahead])
        return (self._table[self._depths[self._index] if self._running else 0], *later)
