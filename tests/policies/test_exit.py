from __future__ import annotations

import math

import pytest

from policies.exit import ExitRule, ForcedExits
from policies.types import Mode

LAYERS = 4


def rule(mode: str, tau: float = 0.5, min_exit: int = 2) -> ExitRule:
    return ExitRule(Mode.parse(mode), tau, min_exit, LAYERS)


@pytest.mark.parametrize(
    ("mode", "first"),
    [("quantized", 0), ("fixed:0", 0), ("fixed:3", 3), ("fixed:4", None), ("fixed:9", None), ("backbone", None)],
)
def test_a_mode_decided_beforehand_asks_for_no_signal(mode: str, first: int | None) -> None:
    decided = rule(mode, tau=-1.0)
    assert decided.first_depth_on_river() == first
    assert not any(decided.wants_signal(depth) or decided.leaves(depth, 1.0) for depth in range(LAYERS + 1))


def test_exit_asks_from_min_exit_on_but_not_after_the_last_layer() -> None:
    assert rule("exit").first_depth_on_river() is None
    assert [depth for depth in range(1, LAYERS + 1) if rule("exit").wants_signal(depth)] == [2, 3]
    assert [depth for depth in range(1, LAYERS + 1) if rule("exit", tau=-1.0).leaves(depth, 0.9)] == [2, 3]


@pytest.mark.parametrize(
    ("tau", "signal", "leaves"),
    [(0.5, 0.51, True), (0.5, 0.5, False), (-1.0, -0.9, True), (1.01, 1.0, False), (-1.0, math.nan, False)],
)
def test_exit_leaves_above_tau(tau: float, signal: float, leaves: bool) -> None:
    assert rule("exit", tau).leaves(2, signal) is leaves


@pytest.mark.parametrize("min_exit", [1, 2, 3, 4, 5])
def test_exit_with_a_low_tau_reaches_the_river_where_placement_begins_to_keep_it(min_exit: int) -> None:
    eager = rule("exit", tau=-1.0, min_exit=min_exit)
    left_at = next((depth for depth in range(1, LAYERS + 1) if eager.leaves(depth, 0.0)), LAYERS)
    assert range(left_at, LAYERS) == eager.mode.river_layers(LAYERS, min_exit)


@pytest.mark.parametrize("depth", range(LAYERS + 1))
def test_a_forced_passage_leaves_at_its_depth_whatever_the_signal(depth: int) -> None:
    forced = ForcedExits(Mode("exit"), 0.5, 2, LAYERS, (LAYERS, depth)).of_passage(1)
    asked = range(1, LAYERS + 1)
    left = [done for done in asked if forced.wants_signal(done) and forced.leaves(done, -1.0)]
    first = forced.first_depth_on_river()
    assert (0 if first == 0 else left[0] if left else LAYERS) == depth
    # Nothing but depth 0 is known before it is reached, and signals are measured as in mode exit, for their cost.
    assert (first is None) is (depth > 0)
    if depth >= 2:
        assert [done for done in asked if forced.wants_signal(done)] == [2, 3]
    assert math.isnan(forced.believed(0.9))
    assert forced.mode == Mode("exit")


def test_forced_depths_go_by_the_index_in_the_trace_and_end() -> None:
    forced = ForcedExits(Mode("exit"), 0.5, 1, LAYERS, (1, 3), first_passage=5)
    assert [forced.of_passage(index).leaves(1, 0.0) for index in (5, 6, 5)] == [True, False, True]
    for index in (4, 7):
        with pytest.raises(IndexError, match="depths were given for 2 passages"):
            forced.of_passage(index)


def test_other_rules_are_the_same_for_every_passage() -> None:
    assert rule("exit").of_passage(9) == rule("exit")
    assert rule("exit").believed(0.3) == 0.3
