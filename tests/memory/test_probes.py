from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from river_offload.memory import probes

MIB = 1024**2


def write(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_limit_above_the_group_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    write(tmp_path / "outer", memory__max=str(100 * MIB), memory__current=str(70 * MIB))
    write(tmp_path / "outer/inner", memory__max="max", memory__current=str(60 * MIB))
    assert probes.cgroup_free_bytes(tmp_path, membership) == 30 * MIB
    # Page cache that the kernel would drop is no use of memory.
    write(tmp_path / "outer", memory__stat=f"anon 1\ninactive_file {20 * MIB}")
    assert probes.cgroup_free_bytes(tmp_path, membership) == 50 * MIB
    write(tmp_path / "outer/inner", memory__max=str(65 * MIB))
    assert probes.cgroup_free_bytes(tmp_path, membership) == 5 * MIB


def test_version_one_and_its_huge_default(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("7:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    names = {"memory__limit_in_bytes": str((1 << 63) - 4096), "memory__usage_in_bytes": "5"}
    write(tmp_path / "memory", **names)
    assert probes.cgroup_free_bytes(tmp_path, membership) is None
    # Inside a container the path is the host's: only the mount's root is there, and it is the container's own.
    write(tmp_path / "memory", memory__limit_in_bytes=str(9 * MIB), memory__usage_in_bytes=str(10 * MIB))
    assert probes.cgroup_free_bytes(tmp_path, membership) == 0


def test_no_control_groups_no_limit(tmp_path: Path) -> None:
    assert probes.cgroup_free_bytes(tmp_path, tmp_path / "nothing") is None


def test_the_container_s_limit_is_taken_when_it_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    available = SimpleNamespace(available=1000)
    monkeypatch.setattr(probes.psutil, "virtual_memory", lambda: available)
    for limited, expected, words in ((None, 900, "available"), (5000, 900, "available"), (100, 90, "container")):
        monkeypatch.setattr(probes, "cgroup_free_bytes", lambda limited=limited: limited)
        found, figure = probes.free_device_bytes(torch.device("cpu"))
        assert found == expected
        assert words in figure and "10%" in figure


def test_nvml_is_asked_by_uuid_and_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def handle(uuid: str) -> Any:
        asked.append(uuid)
        if uuid == "GPU-gone":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    closed: list[bool] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(free=7))
    assert [probes.nvml_free_bytes(uuid) for uuid in ("ab", "MIG-1", "gone")] == [7, 7, None]
    assert asked == ["GPU-ab", "MIG-1", "GPU-gone"]
    assert len(closed) == 3

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert probes.nvml_free_bytes("ab") is None
