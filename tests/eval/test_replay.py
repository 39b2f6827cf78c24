"""A run replayed: the simulator gets the run's own passages and costs."""

from __future__ import annotations

from typing import Any

import pytest

from policies.types import Mode, Placement
from river_offload.config import RiverConfig
from river_offload.eval.replay import Circumstances, replay
from river_offload.store.pace import Pace
from river_offload.trace import PassageRecord

LAYERS, LAYER_BYTES = 4, 1000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def paced() -> Pace:
    """A pace that has seen a prompt of 8 tokens and a token: 1 s and 0.25 s a backbone layer, half that the river."""
    clock = Clock()
    pace = Pace(clock)
    for tokens, layer_s in ((8, 1.0), (1, 0.25)):
        pace.opened(tokens)
        pace.computing()
        clock.now_s += layer_s
        pace.computed()
        pace.left()
        clock.now_s += layer_s / 2
        pace.closed(1)
    clock.now_s += 0.125
    pace.opened(1)
    return pace


def circumstances(**changes: Any) -> Circumstances:
    placement = Placement(Mode("exit"), 1, (0,), (1, 2, 3), (1, 2, 3), 2, LAYER_BYTES, "device", 0)
    config = RiverConfig.from_options(model="m", mode="exit", prefetch=changes.pop("prefetch", "next"))
    return Circumstances(config, placement, LAYERS, LAYER_BYTES, 1000.0, True, paced())


def record(index: int, depth: int, new_tokens: int = 1) -> PassageRecord:
    return PassageRecord(index, new_tokens, 1, 8, "decode", "exit", depth, [], 0.0, 0, 1.0)


def test_costs_come_from_the_run() -> None:
    setup = circumstances().setup(prompt_tokens=8)
    assert (setup.backbone.seconds(1), setup.backbone.seconds(8)) == (0.25, 1.0)
    assert (setup.river.seconds(1), setup.river.seconds(8)) == (0.125, 0.5)
    assert setup.passage_s == pytest.approx(0.125 * 0.2)  # the newest of two measurements weighs a fifth
    assert (setup.link_s(1), setup.link_abortable, setup.slots) == (1.0, True, 2)


def test_only_the_counted_passages_count_and_the_run_is_set_beside_its_own_kind() -> None:
    records = [record(0, 4, new_tokens=8), record(1, 4), record(2, 1), record(3, 1)]
    figures = replay(records, 2, 3.0, circumstances(prefetch="predicted"))
    assert set(figures) == {"none", "next", "predicted", "oracle"}
    token_s = 0.25 + 3 * 0.125 + 0.025  # one resident layer, three on the river, what is outside
    assert figures["none"]["seconds"] == pytest.approx(2 * token_s)
    assert figures["none"]["stall_s"] == 0
    assert figures["predicted"]["measured_over_simulated"] == pytest.approx(3.0 / (2 * token_s))
    assert "measured_over_simulated" not in figures["none"]


def test_stalls_and_waste_of_earlier_passages_are_left_out() -> None:
    records = [record(0, 4, new_tokens=8), record(1, 4)]
    figures = replay(records, 1, 1.0, circumstances())
    whole = replay(records, 2, 1.0, circumstances())
    assert 0 < figures["none"]["stall_s"] < whole["none"]["stall_s"]
    assert figures["next"]["stall_s"] < figures["none"]["stall_s"]
