"""The script for a borrowed machine, on a CPU and with the small checkpoint."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from river_offload.quant import hqq
from river_offload.quant.hqq import quantize_matrix
from river_offload.quant.packing import dequantize
from river_offload.store.link_cpu import CpuLink

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[SimpleNamespace]:
    """The script's three files, imported as running it would."""
    sys.path.insert(0, str(TOOLS))
    names = ("gpu_ground", "gpu_checks", "check_gpu")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(TOOLS))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def rig(tool: SimpleNamespace, tmp_path: Path) -> Iterator[SimpleNamespace]:
    ground = tool.gpu_ground
    rig = ground.Rig(torch.device("cpu"), tmp_path, "none", deadline_s=float("inf"))
    with ground.nearest_rounding():
        rig.models["small"] = ground.write_checkpoint(tmp_path / "small", ground.FAMILIES[0], 0.08, **ground.SMALL)
        yield rig


def test_one_json_object_and_a_file_that_grows(
    tool: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.gpu_checks, "memory_read_rate", lambda device: 1e10)
    wanted = ("ceilings", "quantization", "pinned_exactness", "overlap", "peak_memory", "tokens_per_s")
    only = [word for name in wanted for word in ("--only", name)]
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--large", "none", "--folder", str(tmp_path), "--out", str(out), *only]
    assert tool.check_gpu.main(arguments) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(out.read_text()) == found
    assert tuple(found["checks"]) == wanted and found["ok"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    checks = found["checks"]
    assert checks["pinned_exactness"]["ok"] is None
    assert checks["peak_memory"]["counted_peak_bytes"] <= checks["peak_memory"]["budget_bytes"]
    rows = checks["tokens_per_s"]["rows"]
    assert [(row["mode"], row["depths"]) for row in rows[:4]] == list(tool.gpu_ground.TABLE)
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["bytes_per_token"] > rows[1]["bytes_per_token"] == 0
    assert checks["overlap"]["copy_bytes_per_s"] > 0
    assert len(printed.err.splitlines()) == len(wanted)


def test_models_are_quantized_to_the_nearest(rig: SimpleNamespace, tool: SimpleNamespace, tmp_path: Path) -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hqq, "_hqq", lambda groups, bits: calls.append(1) or tool.gpu_ground.nearest(groups, bits))
        with tool.gpu_ground.closing(rig.load(rig.models["small"], mode="quantized", cache_dir=tmp_path / "new")):
            assert calls


def test_what_one_check_meets_does_not_end_the_others(
    tool: SimpleNamespace, rig: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finds(_: object) -> dict[str, int]:
        raise tool.gpu_ground.Failed("too slow", rate=3)

    def breaks(_: object) -> dict[str, int]:
        raise torch.OutOfMemoryError("no memory")

    def holds(_: object) -> dict[str, int]:
        return {"figure": 1}

    monkeypatch.setattr(tool.check_gpu, "CHECKS", (finds, breaks, holds))
    seen: dict[str, dict[str, object]] = {}
    tool.check_gpu.run_checks(rig, [], seen.__setitem__)
    assert seen["finds"]["failed"] == "too slow" and seen["finds"]["rate"] == 3
    assert "OutOfMemoryError: no memory" in str(seen["breaks"]["failed"]) and "trace" in seen["breaks"]
    assert (seen["holds"]["ok"], seen["holds"]["figure"]) == (True, 1)
    rig.deadline_s = 0.0
    tool.check_gpu.run_checks(rig, ["holds"], seen.__setitem__)
    assert seen["holds"]["ok"] is None


def test_a_link_that_moves_nothing_is_found(
    tool: SimpleNamespace, rig: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuLink, "fetch", lambda *_, **__: None)
    with pytest.raises(tool.gpu_ground.Failed, match="other logits"):
        tool.gpu_checks.link_conformance(rig)
    with pytest.raises(tool.gpu_ground.Failed, match="streamed and resident differ"):
        tool.gpu_checks.bit_equality(rig)


def test_stretching_slows_reads_and_layers_and_ends(
    tool: SimpleNamespace, rig: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, naps = os.preadv, []
    monkeypatch.setattr(time, "sleep", naps.append)
    ids = tool.gpu_ground.prompt_ids(rig, 4)
    with tool.gpu_ground.closing(rig.load(rig.models["small"], budget=rig.budget(rig.models["small"], 1))) as model:
        naps.clear()  # building the native kernel waits for a compiler
        for copies, computes in ((True, False), (False, True)):
            with tool.gpu_ground.stretched(rig, model, copies=copies, computes=computes):
                tool.gpu_ground.generated(model, ids, [8])
            assert naps and set(naps) == {tool.gpu_ground.STRETCH_S}
            naps.clear()
        assert os.preadv is preadv
        tool.gpu_ground.generated(model, ids, [8])
    assert not naps


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_to_nearest_is_off_by_half_a_step(tool: SimpleNamespace, bits: int) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    with tool.gpu_ground.nearest_rounding():
        matrix = quantize_matrix(weight, bits, 64)
    groups = weight.view(8, 2, 64)
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    off = (dequantize(matrix) - weight).abs().view(8, 2, 64).amax(-1)
    assert bool((off <= step * 0.55 + 0.02).all())  # scale and offset are bfloat16
