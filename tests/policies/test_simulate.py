from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.predictor import DepthPredictor
from policies.prefetch import KINDS, Kind
from policies.simulate import LayerCost, Result, Setup, Step, simulate, simulate_all, steps_of


def small(slots: int = 2, layers: int = 3, **changes: object) -> Setup:
    """Layer 0 resident; one second a fetch, a quarter to compute a layer, an eighth on the river."""
    streamed = dict.fromkeys(range(1, layers), 100)
    base = Setup(layers, streamed, slots, 100.0, backbone=LayerCost(0.25), river=LayerCost(0.125))
    return replace(base, **changes)  # type: ignore[arg-type]


def eight_billion(slots: int = 4, link_s: float = 0.38, **changes: object) -> Setup:
    """An 8B model on the disk of a two-core machine, 3 of 32 layers resident."""
    layer_bytes = 436_000_000
    streamed = dict.fromkeys(range(3, 32), layer_bytes)
    base = Setup(32, streamed, slots, layer_bytes / link_s, backbone=LayerCost(0.027), river=LayerCost(0.0063))
    return replace(base, **changes)  # type: ignore[arg-type]


def mostly_early(count: int, seed: int, mean: float = 3.0, full: float = 0.08) -> list[Step]:
    random_ = random.Random(seed)
    steps = []
    for _ in range(count):
        depth = 1
        while depth < 32 and random_.random() > 1 / mean:
            depth += 1
        steps.append(Step(32 if random_.random() < full else depth))
    return steps


def recovered(results: dict[Kind, Result], kind: Kind) -> float:
    """Share of the stall between none and oracle that a kind avoids."""
    none, oracle = results["none"].stall_s, results["oracle"].stall_s
    return (none - results[kind].stall_s) / (none - oracle)


# By hand.


def test_without_reading_ahead_every_layer_is_waited_for_once() -> None:
    result = simulate([Step(3), Step(3)], small(), "none")
    assert result.passage_seconds == [2.75, 0.75]
    assert (result.stall_s, result.misses, result.bytes_moved, result.wasted_bytes) == (2.0, 2, 200, 0)


def test_reading_ahead_overlaps_with_computation() -> None:
    # 0..1 s layer 1 arrives, computed until 1.25 s, while 1..2 s layer 2 arrives.
    result = simulate([Step(3)], small(), "next")
    assert result.seconds == 2.25
    assert (result.stall_s, result.misses, result.bytes_moved) == (1.5, 2, 200)


def test_latency_counts_for_every_fetch() -> None:
    assert simulate([Step(3)], small(link_latency_s=0.5), "none").stall_s == 3.0


def test_many_tokens_take_the_time_of_their_products() -> None:
    cost = LayerCost(read_s=0.25, token_s=0.01)
    assert (cost.seconds(1), cost.seconds(50)) == (0.25, 0.5)
    everything = small(backbone=cost, passage_s=1.0)
    assert simulate([Step(3, new_tokens=50)], everything, "none").seconds == 4.5
    assert simulate([Step(0, new_tokens=50)], everything, "none").seconds == 1.375


def test_a_guess_that_is_overwritten_unused_is_waste() -> None:
    # Layer 3 is on its way over layer 1 when the passage leaves, and the refill puts layer 1 back.
    setup = small(layers=4)
    result = simulate([Step(3), Step(1), Step(1), Step(1), Step(1), Step(1), Step(1)], setup, "next")
    assert result.bytes_moved == 400
    assert result.wasted_bytes == 100
    stopped = simulate([Step(3), Step(1), Step(1), Step(1), Step(1)], replace(setup, link_abortable=True), "next")
    assert stopped.wasted_bytes == 25  # it ran for the 0.25 s of layer 2's computation
    assert stopped.bytes_moved == 325


def test_leaving_on_a_miss_waits_for_nothing_and_counts_it() -> None:
    result = simulate([Step(3), Step(3)], small(), "next", on_miss="exit")
    # Layer 1 is still on its way at 0.25 s; it is there in the second passage, and then layer 2 is not.
    assert result.stall_s == 0
    assert result.misses == 2
    assert result.passage_seconds == [0.5, 0.5]
    late = simulate([Step(3)], small(min_exit=2), "next", on_miss="exit")
    assert (late.stall_s, late.misses) == (0.75, 2)


def test_nothing_streamed_is_the_plain_sum() -> None:
    result = simulate([Step(3), Step(1)], replace(small(), streamed={}, slots=0), "predicted")
    assert (result.seconds, result.stall_s, result.bytes_moved) == (0.75 + 0.25 + 0.25, 0, 0)
    assert result.tokens_per_s == 2 / 1.25


def test_a_trace_becomes_steps() -> None:
    @dataclass
    class Record:
        depth: int
        new_tokens: int
        mode: str
        signals: list[float] = field(default_factory=list)

    @dataclass
    class WithMargin(Record):
        margin: float = 0.4

    assert steps_of([Record(2, 7, "exit", [0.1, 0.9]), WithMargin(3, 1, "fixed:3")]) == [
        Step(2, 7, (0.1, 0.9)),
        Step(3, 1, (), margin=0.4, known=True),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"slots": 0}, "0 slots"), ({"link_bytes_per_s": 0.0}, "link_bytes_per_s"), ({"num_layers": 2}, "0..1")],
)
def test_an_impossible_setup_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize("depth", [-1, 4])
def test_a_depth_outside_the_model_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"passage 1 has depth {depth}"):
        simulate([Step(3), Step(depth)], small(), "none")


# What the kinds are for.


@pytest.mark.parametrize("kind", ["next", "predicted", "oracle"])
def test_full_passages_never_let_the_link_rest(kind: Kind) -> None:
    """At most 1.1 x max(bytes / rate, compute); two of four slots keep their layers, so 27 of 29 are read again."""
    result = simulate([Step(32, known=True)] * 10, eight_billion(), kind)
    assert result.passage_seconds[-1] <= 1.01 * 27 * 0.38
    assert result.bytes_moved <= (29 + 9 * 27 + 2) * 436_000_000
    assert result.wasted_bytes == 0


def test_a_fast_link_hides_behind_computation() -> None:
    result = simulate([Step(32, known=True)] * 5, eight_billion(link_s=0.02), "predicted")
    assert result.stall_s == 0


def test_early_exits_at_a_known_depth_move_nothing() -> None:
    results = simulate_all([Step(3, known=True)] * 20, eight_billion())
    assert all(result.stall_s == 0 for result in results.values())
    for kind in ("none", "predicted", "oracle"):
        assert results[kind].bytes_moved == 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("abortable", [False, True])
def test_prediction_recovers_most_of_what_an_oracle_would(seed: int, abortable: bool) -> None:
    results = simulate_all(mostly_early(300, seed), eight_billion(link_abortable=abortable))
    assert recovered(results, "predicted") > (0.9 if abortable else 0.7)
    assert results["predicted"].wasted_share < 0.1
    assert results["none"].wasted_bytes == 0
    assert results["oracle"].stall_s < results["predicted"].stall_s


def test_prediction_beats_the_plain_order_where_most_guesses_fail() -> None:
    steps = mostly_early(300, 1, mean=6)
    results = simulate_all(steps, eight_billion(link_abortable=True))
    assert recovered(results, "predicted") > recovered(results, "next") + 0.1


def test_the_forecast_that_is_given_is_the_one_that_learns() -> None:
    predictor = DepthPredictor(32)
    simulate(mostly_early(50, 3), eight_billion(), "predicted", forecast=predictor)
    assert predictor.calibration().samples == 50 * 31


class Listening(DepthPredictor):
    """Writes down what it is told."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.heard: list[object] = []

    def begin(self, new_tokens: int, margin: float | None = None, known_depth: int | None = None) -> None:
        self.heard.append(("begin", new_tokens, margin, known_depth))
        super().begin(new_tokens, margin, known_depth)

    def observe_signal(self, layers_run: int, signal: float) -> None:
        self.heard.append((layers_run, signal))
        super().observe_signal(layers_run, signal)

    def end(self, depth_reached: int, *, censored: bool = False) -> None:
        self.heard.append(("end", depth_reached, censored))
        super().end(depth_reached, censored=censored)


def test_the_forecast_hears_each_passage_as_it_would_at_run_time() -> None:
    forecast = Listening(6)
    steps = [Step(4, 7, signals=(0.1, 0.2, 0.9), margin=0.3), Step(5, known=True)]
    simulate(steps, small(layers=6, min_exit=2), "predicted", forecast=forecast)
    first = [("begin", 7, 0.3, None), (2, 0.1), (3, 0.2), (4, 0.9), ("end", 4, False)]
    assert forecast.heard == [*first, ("begin", 1, None, 5), ("end", 5, False)]


def test_leaving_on_a_miss_is_no_exit_to_the_forecast() -> None:
    forecast = Listening(3)
    simulate([Step(3)], small(), "predicted", forecast=forecast, on_miss="exit")
    assert forecast.heard == [("begin", 1, None, None), ("end", 1, True)]


# What holds whatever the numbers are.


@settings(max_examples=120, deadline=None)
@given(
    layers=st.integers(1, 8),
    resident=st.integers(0, 8),
    slots=st.integers(1, 5),
    link_s=st.sampled_from([0.05, 0.25, 1.0]),
    abortable=st.booleans(),
    kind=st.sampled_from(KINDS),
    on_miss=st.sampled_from(["wait", "exit"]),
    depths=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=12),
)
def test_the_clock_adds_up(
    layers: int,
    resident: int,
    slots: int,
    link_s: float,
    abortable: bool,
    kind: Kind,
    on_miss: str,
    depths: list[tuple[int, bool]],
) -> None:
    setup = Setup(
        layers,
        dict.fromkeys(range(min(resident, layers), layers), 100),
        slots,
        100 / link_s,
        backbone=LayerCost(0.25),
        river=LayerCost(0.125),
        link_abortable=abortable,
    )
    steps = [Step(min(depth, layers), known=known) for depth, known in depths]
    result = simulate(steps, setup, kind, on_miss=on_miss)  # type: ignore[arg-type]
    assert result.seconds == pytest.approx(sum(result.passage_seconds))
    assert len(result.passage_seconds) == result.new_tokens == len(steps)
    assert 0 <= result.wasted_bytes <= result.bytes_moved
    assert result.stall_s >= 0
    assert result.bytes_moved <= 100 * (result.seconds / link_s + 1) + 1e-6
    if on_miss == "wait":
        computed = sum(step.depth * 0.25 + (layers - step.depth) * 0.125 for step in steps)
        assert result.seconds == pytest.approx(computed + result.stall_s)
        assert result.stall_s <= result.misses * 2 * link_s + 1e-9  # at worst behind one running copy
    if kind == "none":
        assert result.wasted_bytes == 0 or on_miss == "exit"
