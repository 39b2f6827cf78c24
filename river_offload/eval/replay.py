"""A run replayed by the simulator, with the costs that the run itself met: is the simulator right, and what would
another kind of prefetch have done with the very same passages?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.prefetch import KINDS, Kind
from policies.simulate import LayerCost, Result, Setup, simulate, steps_of
from policies.types import Placement
from river_offload.config import RiverConfig
from river_offload.store.pace import Pace
from river_offload.trace import PassageRecord


@dataclass(frozen=True)
class Circumstances:
    """What the replay takes over from the run."""

    config: RiverConfig
    placement: Placement
    num_layers: int
    layer_bytes: int
    """That a fetch of one layer moves."""
    link_bytes_per_s: float
    link_abortable: bool
    pace: Pace

    def setup(self, prompt_tokens: int) -> Setup:
        """The run's machine, as the simulator wants it."""
        prompt, token = self.pace.costs_of(prompt_tokens), self.pace.costs_of(1)
        streamed = self.placement.streamed_layers
        return Setup(
            num_layers=self.num_layers,
            streamed=dict.fromkeys(streamed, self.layer_bytes),
            slots=self.placement.slots,
            link_bytes_per_s=self.link_bytes_per_s,
            link_abortable=self.link_abortable,
            backbone=LayerCost(token.backbone_s, prompt.backbone_s / prompt_tokens),
            river=LayerCost(token.river_s, prompt.river_s / prompt_tokens),
            passage_s=token.outside_s,
            tau=self.config.tau,
            min_exit=self.config.min_exit,
        )


def replay(
    records: Sequence[PassageRecord], counted: int, run_s: float, of: Circumstances
) -> dict[str, dict[str, Any]]:
    """The last `counted` passages of a trace under every kind of prefetch, those before them as they were.

    Args:
        run_s: seconds that the counted passages took.

    Returns:
        By kind: `seconds`, `stall_s`, `tokens_per_s`, `wasted_bytes`; for the kind that was run also
        `measured_over_simulated`: the seconds of the run divided by those of its replay.
    """
    steps, setup = steps_of(records), of.setup(records[0].new_tokens)
    figures: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        figures[kind] = _figures(simulate(steps, setup, kind), counted)
    mine: Kind = next(kind for kind in KINDS if kind == of.config.prefetch)
    figures[mine]["measured_over_simulated"] = run_s / figures[mine]["seconds"]
    return figures


def _figures(result: Result, counted: int) -> dict[str, Any]:
    seconds = sum(result.passage_seconds[-counted:])
    return {
        "seconds": seconds,
        "stall_s": sum(result.passage_stall_s[-counted:]),
        "tokens_per_s": counted / seconds,
        "wasted_bytes": sum(result.passage_wasted_bytes[-counted:]),
    }
