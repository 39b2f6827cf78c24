"""The prefetcher carries out what the policy says, and the pace it goes by is the one it sees."""

from __future__ import annotations

import threading
from itertools import repeat
from typing import Any

import pytest
from rigs import Make
from source_files import until

from policies.forecast import Known
from policies.prefetch import Decision, Snapshot
from river_offload.store import prefetcher as prefetcher_module
from river_offload.store.files import SourceFile
from river_offload.store.link_cpu import CpuLink
from river_offload.store.pace import GUESSED_LAYER_S, GUESSED_RATIO, Pace
from river_offload.store.prefetcher import Prefetcher


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def passage(pace: Pace, clock: Clock, *, tokens: int, layers: int, layer_s: float, river: int, river_s: float) -> None:
    pace.opened(tokens)
    for _ in range(layers):
        clock.passes(5.0)  # waiting for the layer is no computation
        pace.computing()
        clock.passes(layer_s)
        pace.computed()
    pace.left()
    clock.passes(river * river_s)
    pace.closed(river)


def test_before_anything_was_seen_the_pace_is_a_guess() -> None:
    pace = Pace(Clock())
    assert pace.link_s == GUESSED_LAYER_S
    assert pace.backbone_s == GUESSED_LAYER_S / GUESSED_RATIO
    assert pace.rest_s(4) == pace.backbone_s


def test_layers_are_timed_by_the_size_of_the_passage() -> None:
    clock = Clock()
    pace = Pace(clock)
    passage(pace, clock, tokens=500, layers=3, layer_s=2.0, river=2, river_s=0.5)
    passage(pace, clock, tokens=1, layers=3, layer_s=0.25, river=2, river_s=0.125)
    pace.opened(1)
    assert pace.backbone_s == 0.25
    assert pace.rest_s(4) == pytest.approx(4 * 0.125)
    pace.opened(400)  # nearer to the prompt of 500 than to a token
    assert (pace.backbone_s, pace.rest_s(1)) == (2.0, 0.5)


def test_a_change_of_pace_is_followed() -> None:
    clock = Clock()
    pace = Pace(clock)
    for layer_s in [1.0] * 5 + [3.0] * 30:
        passage(pace, clock, tokens=1, layers=1, layer_s=layer_s, river=0, river_s=0.0)
    assert pace.backbone_s == pytest.approx(3.0, rel=0.01)


def test_what_is_outside_the_layers_counts_between_passages_of_one_token() -> None:
    clock = Clock()
    pace = Pace(clock)
    passage(pace, clock, tokens=9, layers=2, layer_s=1.0, river=0, river_s=0.0)
    clock.passes(0.5)
    passage(pace, clock, tokens=1, layers=2, layer_s=1.0, river=0, river_s=0.0)
    assert pace.rest_s(0) == pytest.approx(0.5)
    before_s = pace.rest_s(0)
    clock.passes(3600.0)  # somebody types the next prompt
    passage(pace, clock, tokens=9, layers=2, layer_s=1.0, river=0, river_s=0.0)
    assert pace.rest_s(0) == before_s


def test_the_link_is_timed_by_what_it_says() -> None:
    pace = Pace(Clock())
    pace.linked(0.1, 5.0)
    assert pace.link_s == GUESSED_LAYER_S  # too little to tell
    pace.linked(2.0, 1.0)
    assert pace.link_s == 0.5
    for layers in range(3, 40):
        pace.linked(float(layers), 1.0 + 0.25 * (layers - 2))
    assert pace.link_s == pytest.approx(0.25, rel=0.01)


def test_a_passage_that_broke_off_tells_nothing() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.opened(1)
    pace.computing()
    pace.broken_off()
    clock.passes(100.0)
    pace.computed()
    pace.opened(1)
    assert pace.backbone_s == GUESSED_LAYER_S / GUESSED_RATIO
    assert pace.rest_s(0) == 0.0


# What the policy is told, and what becomes of its decision.


def test_the_policy_is_asked_at_every_acquire_and_at_the_exit(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Snapshot] = []

    def decide(snapshot: Snapshot, kind: str) -> Decision:
        asked.append(snapshot)
        missing = snapshot.depth in snapshot.streamed and snapshot.depth not in snapshot.holds
        return Decision(fetches=((snapshot.depth, 0),) if missing else ())

    monkeypatch.setattr(prefetcher_module, "decide", decide)
    rig = make_rig("null", 5, 2, resident=2, kind="next", null={"choices": repeat(1)})
    rig.passage(4)
    assert [snapshot.depth for snapshot in asked] == [0, 1, 2, 3, 5]
    assert {snapshot.streamed for snapshot in asked} == {(2, 3, 4)}
    assert all(snapshot.abortable and snapshot.in_use == frozenset() for snapshot in asked)
    assert asked[0].rows[0] == (1.0,) * 5
    assert asked[-1].rows[0] == (0.0,) * 5
    rig.check()


def test_a_queue_is_told_from_its_front_with_what_is_left_of_it(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("null", 5, 3, kind="next", poison=False, null={"choices": iter(())})
    transfers = rig.store._transfers
    assert transfers is not None
    transfers.fetch(1, 0)
    transfers.fetch(2, 1)
    rig.link._step()  # type: ignore[attr-defined]
    seen: list[Snapshot] = []
    monkeypatch.setattr(prefetcher_module, "decide", lambda snapshot, kind: seen.append(snapshot) or Decision())
    rig.prefetcher.pace.linked(1.0, 2.0)
    rig.prefetcher.acquiring(0, transfers)
    assert (seen[0].queue, seen[0].started, seen[0].holds) == (((1, 0), (2, 1)), 1, (None, None, None))
    assert seen[0].busy_s == pytest.approx(0.75 * seen[0].link_s)


def test_cancels_go_before_fetches_and_what_has_arrived_is_not_fetched_again(make_rig: Make) -> None:
    rig = make_rig("null", 6, 2, kind="next", poison=False, null={"choices": iter(())})
    transfers = rig.store._transfers
    assert transfers is not None
    transfers.fetch(1, 0)
    transfers.fetch(2, 1)
    carry_out = prefetcher_module._carry_out
    carry_out(Decision(fetches=((3, 0), (1, 1)), cancels=((1, 0), (2, 1))), transfers, urgent=3)
    assert [(fetch.layer, fetch.slot) for fetch in transfers.queue] == [(3, 0), (1, 1)]
    rig.link.wait(0)
    rig.link.wait(1)
    carry_out(Decision(fetches=((1, 0),), cancels=((1, 1),)), transfers, urgent=None)
    transfers.poll()
    assert transfers.holds == [3, 1]
    assert transfers.queue == []


def test_a_fetch_called_off_with_its_last_bytes_on_their_way_has_not_arrived(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), SourceFile.read

    def late(self: SourceFile, *arguments: Any) -> int:
        gate.wait(10)
        return read(self, *arguments)

    monkeypatch.setattr(SourceFile, "read", late)
    rig = make_rig("cpu", 6, 2, kind="none")
    transfers = rig.store._transfers
    assert transfers is not None and isinstance(rig.link, CpuLink)
    transfers.fetch(4, 0)
    ticket = rig.link._fetches.newest(0)
    assert ticket is not None
    until(lambda: ticket.started_bytes == ticket.nbytes)
    transfers.cancel(4, 0)
    assert not transfers.has(4)
    transfers.fetch(5, 0)
    gate.set()
    assert transfers.take(5)[0] == 0
    rig.compute(5, dict(rig.slots.parameters(5, 0)))
    rig.check()
    transfers.release(0, forget=False)


def test_a_fetch_called_off_before_it_started_leaves_the_slot_as_it_was(make_rig: Make) -> None:
    rig = make_rig("null", 6, 1, kind="none", poison=False, null={"choices": iter(())})
    transfers = rig.store._transfers
    assert transfers is not None
    rig.use(2)
    transfers.fetch(4, 0)
    assert transfers.holds == [None]
    transfers.cancel(4, 0)
    assert (transfers.holds, transfers.wasted_bytes) == ([2], 0)
    transfers.fetch(4, 0)
    rig.link._step()  # type: ignore[attr-defined]
    transfers.cancel(4, 0)
    assert transfers.holds == [None]
    assert transfers.wasted_bytes == transfers.streamed[4] // 4
    assert transfers.bytes_streamed == transfers.streamed[2] + transfers.streamed[4] // 4


def test_what_is_learned_under_one_threshold_stays_there() -> None:
    made: list[float] = []

    def forecast_for(tau: float) -> Known:
        made.append(tau)
        return Known(4, 4)

    prefetcher = Prefetcher("predicted", forecast_for, tau=0.5)
    first = prefetcher.forecast
    prefetcher.opened(1, None, None, 0.9)
    assert prefetcher.forecast is not first
    prefetcher.opened(1, None, None, 0.5)
    assert prefetcher.forecast is first
    assert made == [0.5, 0.9]
