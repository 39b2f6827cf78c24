"""The exit signal in, stay on the backbone or leave for the river out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policies.types import Mode


@dataclass(frozen=True)
class ExitRule:
    """When a passage leaves the backbone. Stateless: once it has left, nobody asks again."""

    mode: Mode
    tau: float
    """The signal is a cosine: above 1 no passage leaves, below -1 each leaves at `min_exit`."""
    min_exit: int
    """Backbone layers that run in any case in mode `exit`; the other modes do not look at it."""
    num_layers: int

    def of_passage(self, index: int) -> ExitRule:
        """The rule of the passage with this index in the trace: the same for all, unless depths are forced."""
        return self

    def on_backbone(self) -> ExitRule:
        """The rule of a prompt that shall run the whole backbone: what the mode or a forced depth fixes, stays."""
        return replace(self, mode=Mode("backbone")) if self.mode.kind == "exit" else self

    def first_depth_on_river(self) -> int | None:
        """The first layer that runs on the river whatever the signal; None when there is none."""
        first = {"quantized": 0, "fixed": self.mode.depth or 0}.get(self.mode.kind, self.num_layers)
        return first if first < self.num_layers else None

    def wants_signal(self, depth_done: int) -> bool:
        """Whether the signal after `depth_done` backbone layers can change anything.

        Measuring it makes the host wait for the device, so it is measured only then: not before `min_exit`, and not
        after the last layer, where nothing is left to run on the river.
        """
        return self.mode.kind == "exit" and self.min_exit <= depth_done < self.num_layers

    def believed(self, signal: float) -> float:
        """What the measured signal says of the exit: all that is kept of it, and all that a forecast may learn."""
        return signal

    def leaves(self, depth_done: int, signal: float) -> bool:
        """Whether layer `depth_done` and all later ones run on the river.

        `signal` is the smallest cosine, over the tokens of the passage, between the states that enter and leave the
        last backbone layer. A NaN stays on the backbone.
        """
        return self.wants_signal(depth_done) and signal > self.tau


@dataclass(frozen=True)
class ForcedExit(ExitRule):
    """The rule of one passage whose depth was given beforehand, for measuring speed.

    To everybody else it is mode `exit`: signals are measured, since they cost time, but they do not have to do with
    the exit, so none is believed (NaN), and the depth shows only when it is reached: no prefetch can know it.
    """

    depth: int

    def on_backbone(self) -> ExitRule:
        return self

    def first_depth_on_river(self) -> int | None:
        return 0 if self.depth == 0 else None

    def wants_signal(self, depth_done: int) -> bool:
        return min(self.min_exit, self.depth) <= depth_done < self.num_layers

    def believed(self, signal: float) -> float:
        return math.nan

    def leaves(self, depth_done: int, signal: float) -> bool:
        return self.depth <= depth_done < self.num_layers


@dataclass(frozen=True)
class DraftExit(ExitRule):
    """The rule of a passage that drafts: it leaves after `depth` backbone layers, and everybody knows."""

    depth: int

    def first_depth_on_river(self) -> int | None:
        return self.depth if self.depth < self.num_layers else None

    def wants_signal(self, depth_done: int) -> bool:
        return False


@dataclass(frozen=True)
class ForcedExits(ExitRule):
    """Depths given beforehand, one per passage (see `policies.depths`).

    It never applies itself: `of_passage` hands out the rule of each passage, by its index in the trace, so a passage
    that failed and is run again goes just as deep.
    """

    depths: tuple[int, ...]
    first_passage: int = 0
    """Index in the trace of the passage that the first depth is for."""

    def of_passage(self, index: int) -> ExitRule:
        """Raises IndexError when there is no depth left for the passage."""
        place = index - self.first_passage
        if not 0 <= place < len(self.depths):
            raise IndexError(f"depths were given for {len(self.depths)} passages, this is number {place + 1}")
        return ForcedExit(self.mode, self.tau, self.min_exit, self.num_layers, self.depths[place])
