"""Whose turn it is on the link."""

from __future__ import annotations

import itertools

from policies import link_order
from policies.link_order import FIRST, TURNS, turn, worth_ahead


def test_what_is_needed_then_certain_keys_and_values_then_foreseen_weights() -> None:
    turns = [turn("weights", needed=True), turn("kv"), turn("weights")]
    assert turns == sorted(set(turns)) == list(range(TURNS))


def test_whatever_computation_waits_for_goes_first() -> None:
    assert turn("weights", needed=True) == turn("kv", needed=True) == FIRST


def test_the_order_is_total_and_within_the_turns() -> None:
    for load, needed in itertools.product(("weights", "kv"), (False, True)):
        assert FIRST <= turn(load, needed=needed) < TURNS  # type: ignore[arg-type]


def test_little_is_not_worth_it() -> None:
    least = link_order.AHEAD_FROM_BYTES
    assert [worth_ahead(nbytes) for nbytes in (0, least - 1, least, 10 * least)] == [False, False, True, True]
