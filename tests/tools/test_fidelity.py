"""The program around `river_offload.eval.fidelity`: points are kept, read again and drawn; wrong options are said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from river_offload.eval.fidelity import Point


def test_points_of_earlier_runs_are_shown_and_drawn(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [Point("tau", 0.5, "teacher", 4.0, 0.75, 0.5, 100), Point("lossless", None, "free", 7.0, 1.0, 0.0, 100)]
    path, plot = tmp_path / "points.json", tmp_path / "plot.svg"
    path.write_text(json.dumps([asdict(point) for point in points]))
    assert tool.main(["--read", str(path), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "| tau | 0.5 | teacher | 4.0 | 0.750 | 0.500 | 100 |"
    assert out[3] == "| lossless |  | free | 7.0 | 1.000 | 0.000 | 100 |"
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ([], "give --prompts to measure, or --read"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--read", "missing.json"], "expected points that --out has written"),
        (["--read", "other.json"], "expected points that --out has written"),
    ),
)
def test_a_wrong_option_is_an_error_of_ours(
    arguments: list[str],
    message: str,
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('[{"curve": "tau"}]')
    assert tool.main(arguments) == 2
    assert message in capsys.readouterr().err
