from __future__ import annotations

import pytest

from policies.forecast import Known, Oracle
from policies.prefetch import KINDS, forecast_of


def test_known_needs_the_same_layers_in_every_passage() -> None:
    known = Known(4, 3)
    assert known.rows() == ((0, 0, 0, 0), (1, 1, 1, 0))
    known.begin(1)
    assert known.rows() == ((1, 1, 1, 0), (1, 1, 1, 0))
    known.end(3)
    assert known.rows() == ((0, 0, 0, 0), (1, 1, 1, 0))


def test_known_never_runs_more_layers_than_there_are() -> None:
    assert Known(2, 9).rows()[1] == (1, 1)


def test_oracle_tells_the_passages_in_order_and_then_nothing() -> None:
    oracle = Oracle(3, [1, 3], ahead=2)
    assert oracle.rows() == ((0, 0, 0), (1, 0, 0), (1, 1, 1))
    oracle.begin(1)
    assert oracle.rows() == ((1, 0, 0), (1, 1, 1), (0, 0, 0))
    oracle.end(1)
    assert oracle.rows() == ((0, 0, 0), (1, 1, 1), (0, 0, 0))
    for _ in range(5):
        oracle.begin(1)
        oracle.end(3)
    assert oracle.rows() == ((0, 0, 0), (0, 0, 0), (0, 0, 0))


def test_every_kind_has_a_forecast_of_two_rows_at_least() -> None:
    for kind in KINDS:
        forecast = forecast_of(kind, 5, depths=[2, 5])
        assert len(forecast.rows()) >= 2
        assert all(len(row) == 5 for row in forecast.rows())


def test_an_unknown_kind_and_an_oracle_without_depths_are_refused() -> None:
    with pytest.raises(ValueError, match="none, next, predicted, oracle"):
        forecast_of("best", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trace"):
        forecast_of("oracle", 5)
