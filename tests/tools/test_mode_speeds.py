"""The modes side by side, on random weights with the luck of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from families import load_tiny, tokens


@pytest.fixture
def traces(checkpoint: Callable[..., Path], tool: ModuleType, tmp_path: Path) -> Path:
    """What `--traces` leaves behind."""
    folder = tmp_path / "runs"
    folder.mkdir()
    model = load_tiny(checkpoint("llama"), mode="lossless", also_modes=("exit",), draft=4)
    with model.river as river:
        for name in ("exit, tau .5", "exit, tau .95", "lossless"):
            river.trace.clear()
            with river.using(**tool.SETTINGS[name]):
                model.generate(tokens(5), max_new_tokens=30, do_sample=False)
            river.trace.write_jsonl(folder / tool._file(name))
    return folder


def test_every_setting_is_measured_with_the_luck_of_the_traces(
    checkpoint: Callable[..., Path], traces: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint("llama")
    arguments = [str(directory), "--budget", "64MiB", "--replay", str(traces), "--tokens", "12", "--context", "64"]
    assert tool.main([*arguments, "--draft", "4", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == list(tool.SETTINGS)
    assert all(row["tokens"] == 11 and row["seconds"] > 0 for row in found.values())
    layers = {name: row["layers"] / row["tokens"] for name, row in found.items()}
    assert layers["quantized"] == 0 < layers["exit, tau .5"] <= layers["backbone"] == 5
    assert found["lossless"]["checks"] and found["lossless"]["drafts"]
    assert tool.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(tool.SETTINGS) and table[2].startswith("| backbone |")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--prompts for a trained model, or --replay"),
        (["--prompts", "p.jsonl", "--replay", "runs"], "--prompts for a trained model, or --replay"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--prompts", "p.jsonl", "--field", "nope"], "no field 'nope'"),
        (["--prompts", "p.jsonl", "--count", "0"], "cannot give 0"),
        (["--prompts", "p.jsonl", "--count", "2"], "found 1, which cannot give 2"),
        (["--prompts", "p.jsonl", "--tokens", "1"], "expected at least 2"),
        (["--replay", "missing"], "cannot be read"),
        (["--replay", "missing", "--traces", "out"], "--traces has no effect"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_loaded(
    more: list[str],
    message: str,
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"question": "Why?"}\n')
    monkeypatch.setattr(tool.river_offload, "load", lambda *_, **__: pytest.fail("loaded"))
    assert tool.main(["demo", "--budget", "1GiB", *more]) == 2
    assert message in capsys.readouterr().err


def test_the_arithmetic_of_a_round(tool: ModuleType) -> None:
    """Nine tokens in a check of 2 s and eight drafts of half a second."""
    values: dict[str, Any] = {"bytes_streamed": 9 * 2**20, "layers": 18, "draft_s": 4.0, "check_s": 2.0}
    round_ = tool.Speed("lossless", 9, 6.5, drafts=8, checks=1, **values)
    backbone = tool.Speed("backbone", 2, 4.0, 0, 10)
    assert round_.expected_tokens_per_s == 1.5
    assert tool.table([backbone, round_])[3] == "| lossless | 1.38 | 2.77 | 2.0 | 1.0 | 9.00 | 2 | 0.5 | 1.5 |"
