from __future__ import annotations

import math

import pytest

from policies.exit import ExitRule
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
