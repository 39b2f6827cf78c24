"""`river-mem doctor`: a table for people, an object for programs, and exit code 0 whatever is missing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from river_offload.cli import mem_doctor
from river_offload.cli.mem_app import app
from river_offload.eval import machine


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from river_offload.progress import Silent

    return machine.examine(tmp_path_factory.mktemp("cache"), seconds=0, progress=Silent())


def test_json_is_one_object_and_nothing_else(runner, tmp_path) -> None:
    done = runner.invoke(app, ["doctor", "--json", "--seconds", "0", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rates"]["directory"] == str(tmp_path)
    assert found["rates"]["memory_read_bytes_per_s"] == {
        "value": None, "reason": "not measured: 0 seconds were given"
    }  # fmt: skip
    assert done.stderr == ""


def test_the_table_has_every_part(runner, tmp_path) -> None:
    done = runner.invoke(app, ["doctor", "--seconds", "0", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name in ("GPU", "memory", "container", "locked memory", "pinning", "disk reads", "kernel, cpu", "compiler"):
        assert f"\n{name} " in f"\n{done.stdout}", name


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_seconds_that_are_none(runner, seconds: str) -> None:
    done = runner.invoke(app, ["doctor", "--seconds", seconds])
    assert done.exit_code == 2
    assert "expected 0 or more" in done.stderr


def reading(value: int | None, reason: str | None = None) -> dict[str, Any]:
    return {"value": value, "reason": reason}


def test_two_gpus_with_what_both_say(facts: dict[str, Any]) -> None:
    gib = 1024**3
    facts = copy.deepcopy(facts)
    card = {name: reading(number * gib) for number, name in enumerate(("reserved", "used", "free", "total"), 1)}
    card["process"] = reading(None, "not listed")
    gpu = {"number": 0, "name": "A40", "uuid": "GPU-1", "pci_bus_id": "0:1", "card": card}
    gpu |= {"torch_free": reading(3 * gib), "torch_total": reading(4 * gib)}
    silent = gpu | {"number": 1, "torch_free": reading(None, "CUDA: lost"), "torch_total": reading(None, "CUDA: lost")}
    silent["card"] = {name: reading(None, "no NVIDIA driver answers") for name in card}
    facts["gpus"] = {"found": [gpu, silent], "torch_reason": None, "nvml_reason": None, "remark": "careful"}
    facts["pinning"] = {"needed": True, "works": False, "tried_bytes": 16 * 2**20, "reason": "out of memory"}
    facts["advice"] = {"gpus": "careful", "pinning": "raise the limit"}
    found = list(mem_doctor.lines(facts))
    assert found[:6] == [
        ("GPU 0", "A40 · GPU-1", "careful"),
        ("  torch", "3.00 GiB of 4.00 GiB free", ""),
        ("  NVML", "3.00 GiB of 4.00 GiB free · 2.00 GiB used · 1.00 GiB reserved", ""),
        ("GPU 1", "A40 · GPU-1", ""),
        ("  torch", "CUDA: lost", ""),
        ("  NVML", "no NVIDIA driver answers", ""),
    ]
    assert ("pinning", "refused · out of memory", "raise the limit") in found


def test_advice_stands_below_its_line(capsys) -> None:
    mem_doctor._print_table([("disk reads", "0.20 GB/s", "buy a faster one"), ("compiler", "none", "")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["disk reads  0.20 GB/s", "            → buy a faster one", "compiler    none"]


def test_help_comes_without_torch() -> None:
    program = "import sys; from river_offload.cli import mem_app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
