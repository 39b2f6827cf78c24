from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.exit_rates import ExitRates
from policies.predictor import DepthPredictor

LAYERS = 16


def geometric(random_: random.Random, mean: float = 3, layers: int = LAYERS) -> int:
    depth = 1
    while depth < layers and random_.random() > 1 / mean:
        depth += 1
    return depth


def teach(predictor: DepthPredictor, passages: Iterable[tuple[int, float | None]]) -> DepthPredictor:
    for depth, margin in passages:
        predictor.begin(1, margin)
        predictor.end(depth)
    return predictor


def expected_depth(row: Iterable[float]) -> float:
    return sum(row)


def falling(row: Iterable[float]) -> bool:
    values = list(row)
    return all(0 <= value <= 1 for value in values) and values == sorted(values, reverse=True)


def test_before_any_passage_the_prior_says_a_few_layers() -> None:
    predictor = DepthPredictor(32)
    assert falling(predictor.rows()[1])
    assert 2 < expected_depth(predictor.rows()[1]) < 5
    predictor.begin(1)
    assert predictor.probability(0) == 1
    assert 2 < expected_depth(predictor.rows()[0]) < 5


def test_the_prior_expects_unsure_tokens_and_long_passages_deeper() -> None:
    def depth(new_tokens: int, margin: float | None) -> float:
        predictor = DepthPredictor(32)
        predictor.begin(new_tokens, margin)
        return expected_depth(predictor.rows()[0])

    assert depth(1, 0.02) > depth(1, None) > depth(1, 0.98)
    assert depth(200, None) > depth(2, None) > depth(1, None)


@pytest.mark.parametrize("min_exit", [0, 1, 3])
def test_layers_before_min_exit_run_for_certain(min_exit: int) -> None:
    predictor = DepthPredictor(LAYERS, min_exit=min_exit)
    predictor.begin(1)
    certain = [layer for layer in range(LAYERS) if predictor.probability(layer) == 1]
    assert certain == list(range(max(min_exit, 1)))  # an exit is looked at after a layer, so the first one always runs


def test_a_signal_above_tau_ends_all_need_and_one_below_asks_for_the_next_layer() -> None:
    predictor = DepthPredictor(LAYERS, tau=0.5, min_exit=2)
    predictor.begin(1)
    predictor.observe_signal(1, 0.9)  # before min_exit nothing leaves
    assert predictor.probability(1) == 1
    predictor.observe_signal(2, 0.5)
    assert predictor.probability(2) == 1 > predictor.probability(3) > 0
    predictor.observe_signal(3, math.nan)
    assert predictor.probability(3) == 1
    predictor.observe_signal(4, 0.51)
    assert predictor.probability(3) == 1
    assert all(predictor.probability(layer) == 0 for layer in range(4, LAYERS))
    assert falling(predictor.rows()[0])


def test_a_passage_that_ended_needs_nothing_and_the_next_one_does() -> None:
    predictor = DepthPredictor(LAYERS)
    predictor.begin(1)
    predictor.end(3)
    assert predictor.rows()[0] == (0,) * LAYERS
    assert predictor.probability(0, ahead=1) == 1
    assert predictor.probability(1, ahead=1) == predictor.probability(1, ahead=7) > 0


def test_a_known_depth_is_certain_and_teaches_nothing() -> None:
    predictor = teach(DepthPredictor(LAYERS), [(2, 0.5), (5, None)])
    before = predictor.to_json()
    predictor.begin(1, 0.5, known_depth=3)
    predictor.observe_signal(2, 0.99)
    assert [predictor.probability(layer) for layer in range(5)] == [1, 1, 1, 0, 0]
    assert [predictor.probability(layer, ahead=1) for layer in range(5)] == [1, 1, 1, 0, 0]
    predictor.end(3)
    assert predictor.to_json() == before
    assert predictor.calibration().samples == 2 * (LAYERS - 1)


def test_what_is_always_the_same_becomes_nearly_certain() -> None:
    predictor = teach(DepthPredictor(LAYERS), [(4, None)] * 100)
    predictor.begin(1)
    assert predictor.probability(3) > 0.97
    assert predictor.probability(4) < 0.03


def test_full_passages_are_remembered_to_the_last_layer() -> None:
    random_ = random.Random(3)
    depths = [32 if random_.random() < 0.08 else geometric(random_, layers=32) for _ in range(600)]
    predictor = teach(DepthPredictor(32), [(depth, None) for depth in depths])
    assert 0.04 < predictor.probability(31, ahead=1) < 0.13
    predictor.begin(1)
    predictor.observe_signal(12, 0.2)
    assert predictor.probability(20) > 0.8


def test_depths_without_a_pattern_are_scored_as_well_as_the_base_rate() -> None:
    random_ = random.Random(1)
    scored = teach(DepthPredictor(LAYERS), [(geometric(random_), None) for _ in range(800)]).calibration()
    assert scored.samples == 800 * (LAYERS - 1)
    assert scored.brier < 1.02 * scored.base_rate_brier
    assert scored.worst_decile(at_least=300) < 0.1


def test_base_rates_by_hand() -> None:
    predictor = DepthPredictor(4, tau=0.5)
    predictor.begin(1)
    predictor.observe_signal(1, 0.1)
    predictor.observe_signal(2, 0.9)
    predictor.end(2)
    predictor.begin(1)
    predictor.observe_signal(1, 0.1)
    predictor.end(4)
    # Before the first passage 1/2 each. Before the second, layers 0 and 1 had run once in one passage, 2 and 3 never.
    first, second = [(1 / 2, 1), (1 / 2, 0), (1 / 2, 0)], [(2 / 3, 1), (1 / 3, 1), (1 / 3, 1)]
    expected = sum((said - ran) ** 2 for said, ran in first + second) / 6
    assert predictor.calibration().base_rate_brier == pytest.approx(expected)
    # After a signal the rate is among those that came so far: the first passage ran layer 1 and then neither 2 nor 3.
    for _ in range(8):
        predictor.begin(1)
        predictor.end(1)
    predictor.begin(1)
    predictor.observe_signal(1, 0.1)
    before = predictor.calibration("signal")
    predictor.end(4)
    after = predictor.calibration("signal")
    gained = after.base_rate_brier * after.samples - before.base_rate_brier * before.samples
    assert gained == pytest.approx(2 * (2 / 4 - 1) ** 2)  # layers 2 and 3: one of two that ran layer 1


def test_a_telling_margin_is_learned() -> None:
    random_ = random.Random(2)
    margins = [random_.random() for _ in range(800)]
    passages = [(LAYERS if margin < 0.2 else geometric(random_, 2), margin) for margin in margins]
    predictor = teach(DepthPredictor(LAYERS), passages)
    scored = predictor.calibration()
    assert scored.brier < 0.5 * scored.base_rate_brier
    predictor.begin(1, 0.1)
    unsure = predictor.probability(LAYERS - 1)
    predictor.begin(1, 0.6)
    assert unsure > 0.8 > 0.1 > predictor.probability(LAYERS - 1)


def test_runs_of_deep_passages_are_learned() -> None:
    random_ = random.Random(4)
    depths, deep = [], False
    for _ in range(600):
        deep ^= random_.random() < 0.05
        depths.append(12 if deep else geometric(random_, 2))
    scored = teach(DepthPredictor(LAYERS), [(depth, None) for depth in depths]).calibration()
    assert scored.brier < 0.52 * scored.base_rate_brier


def test_signals_of_this_passage_are_learned() -> None:
    random_ = random.Random(5)
    predictor = DepthPredictor(LAYERS, tau=0.97)
    for _ in range(500):
        bias, depth = random_.gauss(0, 0.02), 0
        predictor.begin(1)
        while depth < LAYERS:
            depth += 1
            signal = 0.9 + 0.008 * depth + bias + random_.gauss(0, 0.01)
            if depth < LAYERS:
                predictor.observe_signal(depth, signal)
                if signal > 0.97:
                    break
        predictor.end(depth)
    scored = predictor.calibration("signal")
    assert scored.brier < 0.85 * scored.base_rate_brier
    assert scored.worst_decile(at_least=300) < 0.1


def test_passages_of_several_tokens_have_rates_of_their_own() -> None:
    predictor = DepthPredictor(LAYERS)
    for _ in range(30):
        predictor.begin(50)
        predictor.end(LAYERS)
        predictor.begin(1)
        predictor.end(2)
    assert predictor.probability(5, ahead=1) < 0.1
    predictor.begin(50)
    assert predictor.probability(LAYERS - 1) > 0.7
    assert predictor.probability(5, ahead=1) < 0.1  # after a prompt comes one token


def test_leaving_for_want_of_a_layer_is_no_exit_and_is_not_scored() -> None:
    predictor = DepthPredictor(LAYERS)
    for _ in range(100):
        predictor.begin(1)
        predictor.end(3, censored=True)
    assert predictor.probability(3, ahead=1) > 0.9
    assert predictor.calibration().samples == 0


def test_end_without_begin_changes_nothing() -> None:
    predictor = teach(DepthPredictor(LAYERS), [(3, 0.4)])
    before = predictor.to_json()
    predictor.end(9)
    predictor.observe_signal(2, 0.1)
    assert predictor.to_json() == before


events = st.tuples(
    st.sampled_from([1, 1, 1, 7, 300]),
    st.none() | st.floats(allow_nan=True, allow_infinity=True),
    st.lists(st.floats(-1, 1) | st.just(math.nan), max_size=LAYERS),
    st.integers(0, LAYERS),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=15), st.integers(0, 4), st.floats(-1, 1.01))
def test_rows_never_rise_and_json_restores_every_one(
    passages: list[tuple[int, float | None, list[float], int, bool]], min_exit: int, tau: float
) -> None:
    predictor = DepthPredictor(LAYERS, tau, min_exit)
    for new_tokens, margin, signals, depth, censored in passages:
        twin = DepthPredictor.from_json(predictor.to_json())
        predictor.begin(new_tokens, margin)
        twin.begin(new_tokens, margin)
        assert twin.rows() == predictor.rows()
        for layers_run, signal in enumerate(signals, start=1):
            predictor.observe_signal(layers_run, signal)
            assert all(falling(row) for row in predictor.rows())
        predictor.end(depth, censored=censored)
        assert all(falling(row) for row in predictor.rows())


def without(key: str) -> str:
    values = json.loads(DepthPredictor(LAYERS).to_json())
    del values[key]
    return json.dumps(values)


def with_(key: str, value: object) -> str:
    return json.dumps(json.loads(DepthPredictor(LAYERS).to_json()) | {key: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "predictor coefficients"),
        ("[]", "version 1"),
        (with_("version", 2), "version 1"),
        (without("weights"), "'weights' is missing"),
        (with_("weights", {"lately": 1}), "'margin_0' is missing"),
        (with_("squares", dict.fromkeys(json.loads(DepthPredictor(2).to_json())["squares"], 0)), "squares"),
        (with_("signals", [[0, 0, 0]]), "signals"),
        (with_("signals", [[0, 0, "x"]] * (LAYERS + 1)), "signals"),
        (with_("ran", [1]), "ran"),
        (with_("rates", {"one": {}}), "is missing"),
        (with_("rates", dict.fromkeys(("one", "several"), ExitRates(3).to_dict())), "came"),
        (with_("num_layers", 0), "num_layers"),
        (with_("num_layers", None), "predictor coefficients"),
        (with_("weights", None), "predictor coefficients"),
    ],
)
def test_broken_coefficients_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DepthPredictor.from_json(text)


def test_nonsense_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is 0"):
        DepthPredictor(0)
    with pytest.raises(ValueError, match="min_exit is -1"):
        DepthPredictor(4, min_exit=-1)
