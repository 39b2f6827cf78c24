from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calibration import Calibration, Correction

shares = st.floats(0, 1)


def test_scores_by_hand() -> None:
    scored = Calibration.of([(0.95, 0.5, True), (0.95, 0.5, True), (0.05, 0.5, True), (1.0, 0.5, False)])
    assert scored.samples == 4
    assert scored.brier == pytest.approx((2 * 0.0025 + 0.9025 + 1) / 4)
    assert scored.base_rate_brier == 0.25
    assert [decile.count for decile in scored.deciles] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert scored.deciles[9].mean_probability == pytest.approx(2.9 / 3)
    assert scored.deciles[9].observed_rate == pytest.approx(2 / 3)


def test_small_deciles_do_not_count_as_the_worst() -> None:
    scored = Calibration.of([(0.05, 0.5, True), *[(0.75, 0.5, True)] * 50])
    assert scored.worst_decile() == pytest.approx(0.25)
    assert scored.worst_decile(at_least=1) == pytest.approx(0.95)
    assert Calibration.of([]).worst_decile() == 0


def test_a_correction_is_the_identity_before_it_learned() -> None:
    row = [1.0, 0.93, 0.5, 0.07, 0.0]
    assert Correction().apply(row, 1) == pytest.approx(row)


def test_a_correction_learns_what_probabilities_mean() -> None:
    random_ = random.Random(0)
    correction = Correction()
    for _ in range(20_000):
        said = random_.random()
        correction.learn(said, random_.random() < said**2)
    assert correction.apply([0.9, 0.5, 0.2], 0) == pytest.approx([0.81, 0.25, 0.04], abs=0.05)


@given(st.lists(st.tuples(shares, st.booleans()), max_size=60), st.lists(shares, max_size=10))
def test_a_correction_keeps_rows_falling_and_within_bounds(learned: list[tuple[float, bool]], row: list[float]) -> None:
    correction = Correction()
    correction._weights = [1.0] * 11  # no patience: every outcome moves the curve as far as it can
    for probability, happened in learned:
        correction.learn(probability, happened)
    corrected = correction.apply(sorted(row, reverse=True), 0)
    assert all(-1e-12 <= value <= 1 + 1e-12 for value in corrected)
    assert all(later <= before + 1e-12 for before, later in pairwise(corrected))
    assert Correction.from_list(correction.to_list()).apply(row, 0) == correction.apply(row, 0)


@pytest.mark.parametrize(
    "values",
    [
        [[0.0] * 10, [1.0] * 11],
        [[0.5] * 10 + [0.4], [1.0] * 11],
        [[2.0] * 11, [1.0] * 11],
        [[0.0] * 11, [0.0] * 11],
        [[0.0] * 11],
    ],
)
def test_a_broken_correction_is_refused(values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"corrections|unpack"):
        Correction.from_list(values)
