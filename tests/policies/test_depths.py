from __future__ import annotations

import itertools
import math

import pytest

from policies.depths import FixedDepths, GeometricDepths, ListedDepths, looks_like_file, parse_depths, summary


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fixed:3", FixedDepths(3)),
        ("geometric:3", GeometricDepths(3.0)),
        ("geometric:2.5", GeometricDepths(2.5)),
        ("geometric:3,full=0.08", GeometricDepths(3.0, 0.08)),
    ],
)
def test_what_is_parsed_is_written_the_same(text: str, expected: object) -> None:
    assert parse_depths(text) == expected
    assert str(parse_depths(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:", "fixed:-1", "fixed:1.5", "fixed:3,full=0.1", "geometric", "geometric:", "geometric:x",
     "geometric:nan", "geometric:3,", "geometric:3,full", "geometric:3,full=2", "geometric:3,deep=0.1", "uniform:3"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(ValueError, match=r"fixed:D, geometric:MEAN"):
        parse_depths(text)


def test_a_file_is_told_from_a_rule() -> None:
    assert looks_like_file("trace.jsonl") and looks_like_file("/a/fixed:3") and looks_like_file("C:geometric")
    assert not looks_like_file("fixed:x") and not looks_like_file("geometric:")


@pytest.mark.parametrize(("mean", "lowest"), [(3.0, 1), (1.0, 1), (4.5, 2), (2.0, 0), (2.0, 2)])
def test_a_short_run_has_the_mean_that_was_asked_for(mean: float, lowest: int) -> None:
    depths = GeometricDepths(mean).draw(200, 64, lowest=lowest)
    assert len(depths) == 200 and min(depths) >= lowest
    assert sum(depths) / 200 == pytest.approx(mean, abs=0.05)


def test_depths_fall_off_geometrically() -> None:
    depths = GeometricDepths(3.0).draw(3000, 64)
    counts = [depths.count(depth) for depth in (1, 2, 3, 4)]
    for first, second in itertools.pairwise(counts):
        assert second / first == pytest.approx(2 / 3, abs=0.02)


def test_the_share_at_full_depth_is_exact_and_the_order_is_seeded() -> None:
    rule = GeometricDepths(3.0, 0.08)
    depths = rule.draw(100, 32)
    assert depths.count(32) == 8
    assert depths == rule.draw(100, 32, seed=0)
    other = rule.draw(100, 32, seed=1)
    assert depths != other and sorted(depths) == sorted(other)
    assert GeometricDepths(1.0, 1.0).draw(5, 7) == (7,) * 5


def test_depths_beyond_the_model_are_cut_or_refused() -> None:
    assert max(GeometricDepths(3.9).draw(100, 4)) == 4
    with pytest.raises(ValueError, match=r"the mean is 5, expected 1\.\.4"):
        GeometricDepths(5.0).draw(10, 4)
    with pytest.raises(ValueError, match=r"passage 0 is to leave after 5 layers: expected 1\.\.4"):
        FixedDepths(5).draw(2, 4)
    with pytest.raises(ValueError, match="passage 0 is to leave after 1 layers"):
        FixedDepths(1).draw(2, 4, lowest=2)


def test_a_trace_gives_as_many_as_it_has() -> None:
    listed = ListedDepths((3, 1, 4), "t.jsonl")
    assert listed.draw(2, 4) == (3, 1)
    with pytest.raises(ValueError, match=r"t\.jsonl has 3 passages, 4 are to run"):
        listed.draw(4, 4)
    with pytest.raises(ValueError, match="passage 2"):
        listed.draw(3, 3)


def test_summary() -> None:
    assert summary((1, 4, 1), 4) == {
        "passages": 3, "mean": 2.0, "min": 1, "max": 4, "full_share": pytest.approx(1 / 3),
        "histogram": {"1": 2, "4": 1},
    }  # fmt: skip
    assert summary((), 4)["mean"] is None and not math.isnan(summary((), 4)["passages"])
