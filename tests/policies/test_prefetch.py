from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.forecast import certain
from policies.predictor import DepthPredictor
from policies.prefetch import KINDS, Decision, Kind, Snapshot, decide

LAYERS = 10
STREAMED = tuple(range(2, LAYERS))
FULL = certain(LAYERS, LAYERS)
DONE = certain(0, LAYERS)


def row(*probabilities: float) -> tuple[float, ...]:
    """The probabilities from the first streamed layer on; the last of them for all deeper layers."""
    deeper = (probabilities[-1],) * (len(STREAMED) - len(probabilities))
    return (1.0, 1.0, *probabilities, *deeper)


def snapshot(depth: int, holds: tuple[int | None, ...], **changes: object) -> Snapshot:
    """A full passage on a link much slower than computation, with nothing in the queue."""
    base = Snapshot(depth, STREAMED, holds, (FULL, FULL), link_s=1.0, compute_s=0.1, until_next_s=0.1)
    return replace(base, **changes)  # type: ignore[arg-type]


def left(holds: tuple[int | None, ...], **changes: object) -> Snapshot:
    """The passage left the backbone; the river goes on for 0.5 s."""
    changes = {"rows": (DONE, row(0.5, 0.3, 0.2, 0.1)), "until_next_s": 0.5} | changes
    return snapshot(LAYERS, holds, **changes)


# The layer that computation waits for.


@pytest.mark.parametrize("kind", KINDS)
def test_an_acquired_layer_that_is_not_there_is_fetched_first(kind: Kind) -> None:
    assert decide(snapshot(5, (2, 3, 4)), kind).fetches[0][0] == 5


def test_none_fetches_only_that_layer_over_the_deepest() -> None:
    assert decide(snapshot(5, (2, 4, 3)), "none") == Decision(fetches=((5, 1),))
    assert decide(snapshot(4, (2, 4, 3)), "none") == Decision()
    assert decide(snapshot(1, (None, None, None)), "none") == Decision()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_slot_is_taken_before_any_layer_goes(kind: Kind) -> None:
    assert decide(snapshot(5, (4, None, 3)), kind).fetches[0] == (5, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_queued_layer_that_is_acquired_overtakes_the_others(kind: Kind) -> None:
    waiting = snapshot(5, (4, None, None, None), queue=((9, 1), (6, 2), (5, 3)), started=1, busy_s=0.5)
    decision = decide(waiting, kind)
    assert decision.cancels == ((6, 2), (5, 3))
    assert decision.fetches[0] == (5, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_acquired_layer_on_its_way_is_not_fetched_again(kind: Kind) -> None:
    decision = decide(snapshot(5, (4, None, 3), queue=((5, 1),), started=1, busy_s=0.5), kind)
    assert 5 not in [layer for layer, _ in decision.fetches]
    assert decision.cancels == ()


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_slot_a_needed_layer_queues_behind_the_copy_into_it(kind: Kind) -> None:
    assert decide(snapshot(5, (None,), queue=((9, 0),), started=1, busy_s=0.5), kind) == Decision(((5, 0),))


@pytest.mark.parametrize("kind", KINDS)
def test_slots_in_use_are_never_overwritten(kind: Kind) -> None:
    assert decide(snapshot(5, (2, 3), in_use={0}), kind).fetches[0] == (5, 1)
    assert decide(snapshot(5, (2, 3), in_use={0, 1}), kind) == Decision()


# Reading ahead.


def test_a_full_passage_keeps_the_first_layers_and_turns_over_two_slots() -> None:
    held = snapshot(6, (2, 3, 5, 6))
    assert decide(held, "next") == Decision(fetches=((7, 2),))
    late = snapshot(7, (2, 3, None, 6), queue=((7, 2),), started=1, busy_s=0.9)
    assert decide(late, "next") == Decision(fetches=((8, 3),))


def test_the_end_of_a_full_passage_turns_to_the_first_layers() -> None:
    assert decide(snapshot(9, (4, 3, 8, 9)), "next") == Decision(fetches=((2, 2),))


def test_no_more_is_queued_than_the_link_can_start_before_the_next_decision() -> None:
    assert decide(snapshot(3, (2, 3, None, None)), "next").fetches == ((4, 2),)
    assert decide(snapshot(3, (2, 3, None, None), link_s=0.06), "next").fetches == ((4, 2),)
    assert decide(snapshot(3, (None,) * 6, link_s=0.3, until_next_s=0.5), "next").fetches == ((3, 0), (4, 1), (5, 2))


def test_what_can_wait_without_a_stall_waits() -> None:
    # Layer 9 is needed in 0.4 s, and in 0.1 s there is another decision.
    fast = snapshot(5, (6, 7, 8, None, 5), rows=(FULL, row(0)), link_s=0.25)
    assert decide(fast, "predicted") == Decision()
    assert decide(replace(fast, link_s=0.35), "predicted").fetches == ((9, 3),)


def test_an_improbable_layer_is_left_alone_and_a_probable_one_is_not() -> None:
    def decision(probability: float, waste_weight: float = 0.3, **changes: object) -> Decision:
        rows = (row(1, 1, 1, probability, 0), row(0.5, 0.3, 0.2, 0.1, 0))
        return decide(snapshot(4, (None, 3, 4), rows=rows, **changes), "predicted", waste_weight=waste_weight)

    assert decision(0.95).fetches == ((5, 0),)
    assert decision(0.5) == Decision()
    assert decision(0.5, waste_weight=0.05).fetches == ((5, 0),)
    assert decision(0.5, abortable=True).fetches == ((5, 0),)  # such a link loses no more than the time until it stops
    # One of the first streamed layers stays until some passage uses it.
    rows = (row(0.8, 0.2, 0.1, 0), row(0.5, 0.3, 0.2, 0.1, 0))
    assert decide(snapshot(2, (2, None, None), rows=rows), "predicted").fetches == ((3, 1),)


def test_probabilities_count_from_the_layer_that_was_reached() -> None:
    rows = (row(0.2, 0.2, 0.2, 0.19, 0), row(0.5, 0.3, 0.2, 0.1, 0))
    assert decide(snapshot(4, (2, 3, 4), rows=rows), "predicted").fetches == ((5, 1),)


def test_no_layer_goes_for_one_that_is_needed_later() -> None:
    rows = (row(1, 1, 1, 0.9, 0.8), row(1, 1, 1, 1, 0))
    early = snapshot(1, (2, 3, 4), rows=rows, until_next_s=5.0)
    assert decide(early, "predicted") == Decision()


def test_a_known_early_exit_moves_nothing() -> None:
    three = certain(2, LAYERS)
    for depth in (0, 1, LAYERS):
        now = three if depth < LAYERS else DONE
        assert decide(snapshot(depth, (None, None, 9), rows=(now, three), until_next_s=9.0), "predicted") == Decision()


def test_idle_slots_refill_with_the_first_layers_in_order() -> None:
    assert decide(left((8, 3, 9, None)), "predicted").fetches == ((2, 3),)
    assert decide(left((8, 3, 9, None), until_next_s=2.5), "predicted").fetches == ((2, 3), (4, 2), (5, 0))
    assert decide(left((5, 3, 4, 2), until_next_s=9.0), "predicted") == Decision()
    assert decide(left((8, 3, 9, None), until_next_s=0.0), "predicted") == Decision()


def test_a_running_refill_is_left_alone_even_when_the_next_decision_is_due_at_once() -> None:
    running = left((4, 3, None), until_next_s=0.0, queue=((2, 2),), started=1, busy_s=0.6, abortable=True)
    assert decide(running, "predicted") == Decision()


def test_a_refill_does_not_stand_in_the_way_of_this_passage() -> None:
    def decision(probability: float, **changes: object) -> Decision:
        rows = (row(1, 1, 1, 1, probability, 0), row(0.5, 0.3, 0.2, 0.1, 0))
        return decide(snapshot(5, (2, 5, None), rows=rows, **changes), "predicted")

    assert decision(0.1) == Decision()
    assert decision(0.0).fetches == ((3, 2),)
    assert decision(0.1, abortable=True).fetches == ((3, 2),)


# Calling off.


def test_a_guess_is_called_off_once_the_passage_left() -> None:
    guess = left((2, 3, 4, None), queue=((6, 3),))
    assert decide(guess, "predicted") == Decision(fetches=((5, 3),), cancels=((6, 3),))
    started = replace(guess, started=1, busy_s=0.3)
    assert decide(started, "predicted") == Decision()
    assert decide(replace(started, abortable=True), "predicted") == Decision(fetches=((5, 3),), cancels=((6, 3),))


def test_a_fetch_that_is_still_wanted_stays_as_it_is() -> None:
    wanted = left((2, 3, 4, None), queue=((5, 3),))
    for changes in ({}, {"started": 1, "busy_s": 0.3}, {"started": 1, "busy_s": 0.3, "abortable": True}):
        assert decide(replace(wanted, **changes), "predicted") == Decision()  # type: ignore[arg-type]


@pytest.mark.parametrize(("busy_s", "finishes"), [(0.02, True), (0.9, False)])
def test_a_running_refill_is_finished_before_a_needed_layer_only_when_nearly_done(
    busy_s: float, finishes: bool
) -> None:
    rows = (row(1, 1, 1, 1, 1, 0), row(0.5, 0.3, 0.2, 0.1, 0))
    running = snapshot(6, (2, 5, None), rows=rows, queue=((3, 2),), started=1, busy_s=busy_s, abortable=True)
    decision = decide(running, "predicted")
    assert decision.cancels == (() if finishes else ((3, 2),))
    assert decision.fetches[0] == (6, 1 if finishes else 2)


# What holds whatever the numbers are.


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    layers = draw(st.integers(2, 12))
    streamed = tuple(range(draw(st.integers(0, layers - 1)), layers))
    slots = draw(st.integers(1, len(streamed)))
    contents = draw(st.permutations(streamed))[:slots]
    states = draw(st.lists(st.sampled_from(["held", "held", "empty", "queued"]), min_size=slots, max_size=slots))
    filled = list(zip(contents, states, strict=True))
    queue = tuple((layer, slot) for slot, (layer, state) in enumerate(filled) if state == "queued")
    started = draw(st.integers(0, len(queue)))
    abortable = draw(st.booleans())
    started = min(started, 1) if abortable else started
    depth = draw(st.integers(0, layers))
    falling = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=layers, max_size=layers)
    rows = [tuple(sorted(draw(falling), reverse=True)) for _ in range(draw(st.integers(2, 4)))]
    rows[0] = certain(0, layers) if depth == layers else rows[0]
    seconds = st.sampled_from([0.0, 0.01, 0.1, 1.0])
    return Snapshot(
        depth=depth,
        streamed=streamed,
        holds=tuple(layer if state == "held" else None for layer, state in filled),
        rows=rows,
        link_s=draw(st.sampled_from([0.01, 0.1, 1.0])),
        compute_s=0.1,
        until_next_s=draw(seconds),
        queue=queue,
        started=started,
        abortable=abortable,
        busy_s=draw(seconds) if started else 0.0,
        in_use={slot for slot in range(slots) if states[slot] == "held" and draw(st.booleans())},
    )


@settings(max_examples=400, deadline=None)
@given(snapshots(), st.sampled_from(KINDS))
def test_every_decision_can_be_carried_out(now: Snapshot, kind: Kind) -> None:
    decision = decide(now, kind)
    firm = 0 if now.abortable else now.started
    assert set(decision.cancels) <= set(now.queue[firm:])
    queue = [entry for entry in now.queue if entry not in decision.cancels]
    # What stays is the front of the queue: first in, first out is never broken by taking from the middle.
    assert queue == list(now.queue[: len(queue)])
    queue += decision.fetches
    layers = [layer for layer, _ in queue]
    assert len(set(layers)) == len(layers)
    assert not set(layers) & set(now.holds)
    for layer, slot in decision.fetches:
        assert layer in now.streamed
        assert slot not in now.in_use
        assert now.holds[slot] is None or now.holds[slot] != now.depth
    slots = [slot for _, slot in queue]
    missing = now.depth in now.streamed and now.depth not in now.holds
    if len(set(slots)) < len(slots):  # behind a running copy, for a layer that is needed and only then
        assert missing
        assert decision.fetches[0][0] == now.depth
    if missing and len(set(now.in_use)) < len(now.holds):
        assert now.depth in layers


@settings(max_examples=200, deadline=None)
@given(snapshots())
def test_between_passages_a_layer_only_gives_way_to_a_shallower_one(now: Snapshot) -> None:
    layers = len(now.rows[0])
    idle = replace(now, depth=layers, rows=(certain(0, layers), *now.rows[1:]))
    for layer, slot in decide(idle, "predicted").fetches:
        gone = idle.holds[slot]
        assert gone is None or gone > layer


def test_a_decision_costs_far_less_than_a_layer() -> None:
    layers = 40
    predictor = DepthPredictor(layers)
    rows = predictor.rows()
    worst = Snapshot(layers, range(3, layers), (None, *range(30, 37)), rows, 0.3, 0.02, 3.0)
    passage = replace(worst, depth=7, rows=(FULL + FULL + FULL + FULL, rows[1]), until_next_s=0.02)
    for now in (worst, passage):
        started = time.process_time()
        for _ in range(300):
            decide(now, "predicted")
        assert (time.process_time() - started) / 300 < 100e-6  # 10 to 20 on an idle core
