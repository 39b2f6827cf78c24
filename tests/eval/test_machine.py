"""What doctor finds, with the parts of a machine that this one lacks made up."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeRuntime

from river_offload.errors import LinkError
from river_offload.eval import machine, quick_rates
from river_offload.eval.advice import advice
from river_offload.memory.devices import Gpus
from river_offload.progress import Silent
from river_offload.quant import native

MIB, GIB = 1024**2, 1024**3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of this machine, without rates. Shared: do not change it."""
    return machine.examine(tmp_path_factory.mktemp("cache"), seconds=0, progress=Silent())


def test_the_schema(facts: dict[str, Any]) -> None:
    """What docs/river-mem.md promises to programs."""
    assert list(facts) == [
        "version", "machine", "gpus", "host", "limits", "pinning", "rates", "kernels", "compiler", "advice",
    ]  # fmt: skip
    assert set(facts["gpus"]) == {"found", "torch_reason", "nvml_reason", "remark"}
    assert set(facts["limits"]) == {"container", "memlock", "wsl_version"}
    assert set(facts["pinning"]) == {"needed", "works", "tried_bytes", "reason"}
    assert set(facts["kernels"][0]) == {"device", "bits", "kernel", "declined"}
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts | {
        "gpus": facts["gpus"] | {"found": list(facts["gpus"]["found"])}
    }
    page = (Path(__file__).parents[2] / "docs/river-mem.md").read_text()
    for name in (*facts, *facts["machine"], *facts["host"], *facts["rates"], *facts["pinning"]):
        assert f"`{name}" in page or f".{name}`" in page, f"{name} is not in docs/river-mem.md"


def test_a_figure_or_a_reason_everywhere(facts: dict[str, Any]) -> None:
    def readings(value: Any) -> list[dict[str, Any]]:
        if isinstance(value, dict):
            if set(value) == {"value", "reason"}:
                return [value]
            return [reading for part in value.values() for reading in readings(part)]
        return [reading for part in value for reading in readings(part)] if isinstance(value, list | tuple) else []

    found = readings(facts)
    assert len(found) > 10
    assert all((reading["value"] is None) != (reading["reason"] is None) for reading in found)


def on_gpu() -> Gpus:
    return Gpus((), None, None, None)


def test_pinning_is_tried_and_given_back() -> None:
    runtime = FakeRuntime(1 << 30)
    found = machine.pinning(on_gpu(), runtime, 3 * MIB)
    assert found == {"needed": True, "works": True, "tried_bytes": 3 * MIB, "reason": None}
    assert (runtime.tries, runtime.registered) == (1, {})


def test_pinning_that_is_refused_says_what_the_driver_said() -> None:
    found = machine.pinning(on_gpu(), FakeRuntime(0), 3 * MIB)
    assert found["works"] is False
    assert "pinning host memory failed after 0 of 3145728 bytes: out of memory" in found["reason"]


def test_without_a_gpu_nothing_is_pinned() -> None:
    runtime = FakeRuntime(1 << 30)
    found = machine.pinning(Gpus((), "no CUDA in this torch", None, None), runtime)
    assert (found["needed"], found["works"], runtime.tries) == (False, None, 0)
    assert "no CUDA in this torch" in found["reason"]


def test_each_width_has_a_kernel_and_the_reasons_of_those_before_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    found = {entry["bits"]: entry for entry in machine.kernels(("cpu",), tmp_path)}
    assert list(found) == [4, 8, 3, 2]
    assert (found[4]["kernel"], found[8]["kernel"]) == ("torch-int4", "dequantize-blocks")
    # Two kernels of one name, for two devices: neither reason is lost.
    assert [entry["kernel"] for entry in found[8]["declined"]] == [
        "gemlite", "torch-int4", "native-int4", "torch-int4", "native",
    ]  # fmt: skip
    assert "no C compiler" in found[8]["declined"][-1]["reason"]


def test_rates_are_measured_and_leave_nothing_behind(tmp_path: Path) -> None:
    rates = quick_rates.quick_rates(CPU, tmp_path / "not" / "there", seconds=0.05, progress=Silent())
    assert rates["memory_read_bytes_per_s"]["value"] > 0
    assert rates["disk_read_bytes_per_s"]["value"] > 0
    assert rates["pinned_copy_bytes_per_s"]["reason"] == "no GPU: nothing is copied"
    assert rates["directory"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_is_read_has_no_name_and_its_size_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quick_rates, "_BLOCK_BYTES", 8192)
    monkeypatch.setattr(quick_rates, "SCRATCH_BYTES", 20_000)
    with quick_rates._scratch(tmp_path, 60) as (path, nbytes):
        assert list(tmp_path.iterdir()) == []
        assert (nbytes, len(path.read_bytes())) == (16_384, 16_384)
    with quick_rates._scratch(tmp_path, 0) as (_, nbytes):
        assert nbytes == 8192


def test_a_disk_that_fails_is_a_reason(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(quick_rates.tempfile, "TemporaryFile", fail)
    reading = quick_rates._disk_rate(tmp_path, 0.01)
    assert reading.value is None and f"{tmp_path}: No space left" in (reading.reason or "")

    def unreadable(*_: Any, **__: Any) -> None:
        raise LinkError("file: cannot be read: Input/output error")

    monkeypatch.undo()
    monkeypatch.setattr(quick_rates, "disk_read_rate", unreadable)
    assert quick_rates._disk_rate(tmp_path, 0).reason == "file: cannot be read: Input/output error"


def test_little_memory_is_left_alone(monkeypatch) -> None:
    class Little:
        available = 100 * MIB

    monkeypatch.setattr(quick_rates.psutil, "virtual_memory", Little)
    assert quick_rates._memory_rate(CPU, 1).reason == "only 100.0 MiB of memory is free"


def test_a_machine_as_good_as_it_gets_hears_nothing() -> None:
    assert advice(good()) == {}


def good() -> dict[str, Any]:
    none = {"value": None, "reason": "none"}
    return {
        "machine": {"cuda": "13.0", "cores": 8, "usable_cpus": 16, "threads": 8},
        "gpus": {"found": [{}], "torch_reason": None, "nvml_reason": None, "remark": None},
        "host": {"total_bytes": 64 * GIB},
        "limits": {"container": {"limit": none}, "memlock": {"soft": none}, "wsl_version": None},
        "pinning": {"works": True},
        "rates": {
            "seconds": 4, "file_system": "ext4", "disk_read_bytes_per_s": {"value": 3e9},
            "pinned_copy_bytes_per_s": {"value": 24e9}, "pageable_copy_bytes_per_s": {"value": 8e9},
        },
        "kernels": [{"device": "cuda", "kernel": "gemlite", "declined": []}],
        "compiler": "/usr/bin/gcc",
    }  # fmt: skip


NO_COMPILER = [{"kernel": "native-int4", "reason": "no C compiler (gcc or cc) was found"}]
ON_CPU = {"found": [], "torch_reason": "no CUDA", "nvml_reason": "no driver", "remark": None}


@pytest.mark.parametrize(
    ("changes", "about", "words"),
    [
        ({"gpus": ON_CPU | {"found": [{}]}, "machine.cuda": None}, "gpus", "install a build of torch for CUDA"),
        ({"gpus": ON_CPU | {"found": [{}]}}, "gpus", "update the driver"),
        ({"gpus.remark": "CUDA_VISIBLE_DEVICES is empty"}, "gpus", "is empty"),
        ({"limits.container.limit": {"value": 8 * GIB}}, "container", "held to 8.00 GiB of 64.00 GiB"),
        ({"limits.wsl_version": 2}, "wsl", ".wslconfig"),
        ({"limits.wsl_version": 1}, "wsl", "--set-version"),
        ({"pinning.works": False, "limits.memlock.soft": {"value": 8 * MIB}}, "pinning", "8.0 MiB now (ulimit -l"),
        ({"pinning.works": False}, "pinning", "ask the driver"),
        ({"rates.file_system": "tmpfs"}, "disk", "tmpfs is memory"),
        ({"rates.file_system": "nfs4"}, "disk", "over a network"),
        ({"rates.disk_read_bytes_per_s": {"value": 2e8}}, "disk", "NVMe"),
        ({"rates.disk_read_bytes_per_s": {"value": None}}, "disk", "--cache-dir"),
        ({"rates.pinned_copy_bytes_per_s": {"value": 8e9}}, "link", "PCIe"),
        (
            {"kernels": [{"device": "cuda", "declined": [{"kernel": "gemlite", "reason": "not installed (pip)"}]}]},
            "kernels",
            "pip install gemlite",
        ),
        ({"kernels": [{"device": "cpu", "kernel": "x", "declined": NO_COMPILER}], "compiler": None}, "kernels", "gcc"),
        (
            {
                "kernels": [
                    {"device": "cpu", "kernel": "native", "declined": [{"kernel": "native-int4", "reason": "no AVX"}]}
                ]
            },
            "kernels",
            "no AVX",
        ),
        ({"gpus": ON_CPU, "machine.threads": 1}, "threads", "OMP_NUM_THREADS=8"),
    ],
)
def test_what_could_be_better_says_what_to_do(changes: dict[str, Any], about: str, words: str) -> None:
    facts = copy.deepcopy(good())
    for path, value in changes.items():
        *outer, last = path.split(".")
        part = facts
        for name in outer:
            part = part[name]
        part[last] = value
    found = advice(facts)
    assert list(found) == [about]
    assert words in found[about]


def test_the_kind_of_file_system_is_that_of_the_closest_mount(monkeypatch) -> None:
    class Part:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    parts = [Part("/", "ext4"), Part("/data/fast", "xfs"), Part("/data", "nfs4"), Part("/dat", "tmpfs")]
    monkeypatch.setattr(quick_rates.psutil, "disk_partitions", lambda all: parts)
    found = {place: quick_rates.file_system(Path(place)) for place in ("/data/x", "/data/fast/x", "/datas", "/home")}
    assert found == {"/data/x": "nfs4", "/data/fast/x": "xfs", "/datas": "ext4", "/home": "ext4"}
    parts.clear()
    assert quick_rates.file_system(Path("/x")) is None
