"""The exit signal in, stay on the backbone or leave for the river out."""

from __future__ import annotations

from dataclasses import dataclass

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

    def leaves(self, depth_done: int, signal: float) -> bool:
        """Whether layer `depth_done` and all later ones run on the river.

        `signal` is the smallest cosine, over the tokens of the passage, between the states that enter and leave the
        last backbone layer. A NaN stays on the backbone.
        """
        return self.wants_signal(depth_done) and signal > self.tau
