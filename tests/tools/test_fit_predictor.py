"""The tool that fits the predictor of exits, on traces made up so that one margin in two means a deep passage."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from policies.predictor import DepthPredictor
from river_offload.trace import PassageRecord, Trace

LAYERS = 6


def record(index: int, depth: int, margin: float, **changes: Any) -> PassageRecord:
    signals = [0.4] * (depth - 1) + [0.9] if depth < LAYERS else [0.4] * (LAYERS - 1)
    fields = {"margin": margin, "signals": signals} | changes
    return PassageRecord(index, 1, 1, 8, "decode", "exit", depth, fields.pop("signals"), 0.0, 0, 0.1, **fields)


def write(path: Path, count: int = 400, **about: Any) -> Path:
    random_ = random.Random(1)
    records = []
    for index in range(count):
        unsure = random_.random() < 0.5
        records.append(record(index, LAYERS if unsure else 1, 0.05 if unsure else 0.9))
    Trace(LAYERS, {"tau": 0.5, "min_exit": 1} | about, records).write_jsonl(path)
    return path


def test_margins_that_tell_the_depth_beat_the_base_rate(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "coefficients.json"
    assert tool.main([str(write(tmp_path / "a.jsonl")), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passages"] == 400
    assert found["begin"]["brier"] < 0.5 * found["begin"]["base_rate_brier"]
    assert found["begin"]["base_rate_brier"] == pytest.approx(0.25, abs=0.02)
    predictor = DepthPredictor.from_json(out.read_text())
    predictor.begin(1, 0.05)
    unsure = predictor.probability(LAYERS - 1)
    predictor.begin(1, 0.9)
    assert unsure > 0.8 > 0.2 > predictor.probability(LAYERS - 1)


def test_the_table_tells_both_moments(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(write(tmp_path / "a.jsonl"))]) == 0
    said = capsys.readouterr().out
    assert "samples or more off by" in said
    assert tool.main([str(write(tmp_path / "short.jsonl", count=2))]) == 0
    assert "too few samples in every decile" in capsys.readouterr().out
    assert "before the first layer: Brier" in said and "after each signal: Brier" in said


def test_traces_that_teach_nothing_are_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forced = tmp_path / "forced.jsonl"
    Trace(LAYERS, {"tau": 0.5, "min_exit": 1}, [record(0, 2, 0.5, signals=[float("nan")])]).write_jsonl(forced)
    deep = tmp_path / "deep.jsonl"
    Trace(LAYERS, {"tau": 0.5, "min_exit": 1}, [record(0, 99, 0.5, signals=[0.4])]).write_jsonl(deep)
    plain, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", tau=0.9)
    for arguments, words in (
        ([str(forced)], "no passage with a free exit"),
        ([str(plain), str(other)], "traces of different runs"),
        ([str(write(tmp_path / "c.jsonl", tau=None))], "without tau"),
        ([str(tmp_path / "absent.jsonl")], "cannot be read"),
        ([str(deep)], "line 2: depth is 99: expected at most 6"),
        ([str(plain), "--out", str(tmp_path / "no" / "where")], "cannot be written"),
    ):
        assert tool.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_model_itself_may_write_the_passages(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    for text, words in (("", "found 0"), ('{"q": 1}', "no field 'question'"), ("{", "JSON lines")):
        prompts.write_text(text)
        assert tool.main(["--model", "demo", "--prompts", str(prompts), "--count", "1"]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["--model", "demo"])
