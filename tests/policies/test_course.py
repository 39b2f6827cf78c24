"""What a plan reckons that a generation runs, and what the simulator makes of it."""

from __future__ import annotations

import pytest

from policies.course import in_rounds, one_by_one
from policies.drafting import TYPICAL_DRAFT, TYPICAL_TOKENS_A_CHECK
from policies.simulate import LayerCost, Setup, simulate

LAYERS, RESIDENT, LAYER_BYTES = 8, 2, 1000


def setup(link_bytes_per_s: float) -> Setup:
    """A token reads a backbone layer in 4 ms and a river layer in 1 ms, a dozen tokens compute as long as one reads."""
    return Setup(
        num_layers=LAYERS,
        streamed=dict.fromkeys(range(RESIDENT, LAYERS), LAYER_BYTES),
        slots=2,
        link_bytes_per_s=link_bytes_per_s,
        backbone=LayerCost(0.004, 0.004 / 12),
        river=LayerCost(0.001),
        passage_s=0.002,
    )


def test_tokens_one_by_one() -> None:
    course = one_by_one([3, 1, 8], known=False)
    assert ([step.depth for step in course.steps], course.tokens, course.draft) == ([3, 1, 8], 3, None)
    assert course.mean_depth == 4


def test_a_round_is_its_drafts_and_a_check_of_all_of_them() -> None:
    course = in_rounds(2, RESIDENT, LAYERS)
    passages = [(step.depth, step.new_tokens, step.known) for step in course.steps]
    assert passages == ([(RESIDENT, 1, True)] * TYPICAL_DRAFT + [(LAYERS, TYPICAL_DRAFT + 1, True)]) * 2
    assert (course.tokens, course.draft) == (2 * TYPICAL_TOKENS_A_CHECK, TYPICAL_DRAFT)
    assert course.mean_depth == (TYPICAL_DRAFT * RESIDENT + LAYERS) / TYPICAL_TOKENS_A_CHECK


def test_a_round_streams_every_layer_once_and_the_first_ones_during_the_drafts() -> None:
    rounds = 4
    draft_s = RESIDENT * 0.004 + (LAYERS - RESIDENT) * 0.001 + 0.002
    check_s = LAYERS * 0.004 * (TYPICAL_DRAFT + 1) / 12 + 0.002
    quick = simulate(in_rounds(rounds, RESIDENT, LAYERS).steps, setup(1e9), "next")
    assert quick.seconds == pytest.approx(rounds * (TYPICAL_DRAFT * draft_s + check_s), rel=1e-3)
    slow = simulate(in_rounds(rounds, RESIDENT, LAYERS).steps, setup(1e4), "next")  # 100 ms a layer
    streamed_bytes = rounds * (LAYERS - RESIDENT) * LAYER_BYTES
    assert streamed_bytes <= slow.bytes_moved <= streamed_bytes + 2 * LAYER_BYTES  # and what the slots hold at the end
    assert slow.wasted_bytes == 0
    # Two of the six layers are there when a check comes, the other four are waited for, less what it computes.
    waits_s = slow.stall_s / rounds
    assert 0.4 - LAYERS * 0.006 <= waits_s <= 0.4
