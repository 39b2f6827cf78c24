"""Draft lengths side by side on the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.demo
def test_every_way_of_drafting_has_a_line_and_writes_the_same_text(
    river_cache: Path,
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RIVER_OFFLOAD_CACHE", str(river_cache))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question": "Tom has 3 apples and buys 4 more. How many apples does he have?"}\n')
    options = ["--count", "1", "--tokens", "12", "--budget", "400MiB", "--context", "96", "--plain"]
    assert tool.main(["demo", "--prompts", str(prompts), *options, "--drafts", "backbone", "4"]) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {row["draft"]: row for row in map(json.loads, (line for line in out if line.startswith("{")))}
    assert set(rows) == {"backbone", "4"}
    assert all(row["same"] and row["tokens"] == 12 for row in rows.values())
    assert rows["backbone"]["checks"] == 11 > rows["4"]["checks"] > 0 == rows["backbone"]["drafted"]
    assert rows["backbone"]["bytes"] > rows["4"]["bytes"] > 0
    assert out[-2].startswith("| backbone | 1 | 1 | 1.00 | 0.00 |")
    assert out[-1].startswith("| 4 | 1 | 1 |")


def test_a_wrong_option_is_an_error_of_ours(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["demo", "--prompts", str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl: cannot be read" in capsys.readouterr().err
