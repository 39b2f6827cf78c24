"""The tool that measures a machine, on small matrices and a small file."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

from policies.profiles import load_profile, setup_on

SHAPES = ((64, 128), (128, 64))


@pytest.fixture
def small(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = tool.measure
    monkeypatch.setattr(tool, "measure", lambda *given: whole(*given, shapes=SHAPES, scratch_bytes=1 << 20))
    monkeypatch.setattr(tool, "memory_read_rate", lambda device: 1e10)
    monkeypatch.setitem(tool.ROWS, "cpu", 8)
    monkeypatch.chdir(tmp_path)


def test_the_profile_loads_and_serves_the_simulator(small: None, tool: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert tool.main(["--device", "cpu", "--name", "mine", "--out", str(out)]) == 0
    assert os.listdir(tmp_path) == ["mine.toml"]  # the scratch file is gone
    profile = load_profile(out)
    assert (profile.name, profile.memory_bytes_per_s, profile.pinned_bytes_per_s) == ("mine", 1e10, 0)
    assert profile.disk_bytes_per_s > 1e6 and 0 < profile.link_latency_s < 10
    assert out.read_text().count("\n# ") == 9
    setup = setup_on(profile, num_layers=4, layer_bytes=10**6, river_bytes=10**5, resident=1, slots=2, tier="disk")
    assert setup.link_bytes_per_s == profile.disk_bytes_per_s


def test_a_file_of_ones_own_is_read_and_left_alone(
    small: None, tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(os.urandom(1 << 20))
    assert tool.main(["--device", "cpu", "--file", str(weights)]) == 0
    printed = capsys.readouterr().out
    assert "1048576 bytes in order" in printed and f"torch {torch.__version__}" in printed
    assert os.listdir(tmp_path) == ["weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "here.txt"], "expected the name of a new .toml file"),
        (["--file", "absent"], "expected a file, a large one"),
        (["--device", "cuda"], "this torch has no GPU"),
    ],
)
def test_usage(
    small: None,
    tool: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_overwritten(small: None, tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("old")
    assert tool.main(["--out", str(tmp_path / "mine.toml")]) == 2
    assert (tmp_path / "mine.toml").read_text() == "old"


def test_shares_stay_within_what_a_profile_allows(tool: ModuleType) -> None:
    assert (tool._share(2e10, 1e10), tool._share(0.0, 1e10), tool._share(5e9, 1e10)) == (1.0, 0.001, 0.5)
