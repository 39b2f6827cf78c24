"""Limits of a container, from made-up trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from river_offload.memory.cgroups import container_memory

MIB = 1024**2


def write(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def test_the_tightest_limit_above_the_group_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/outer/inner\n")
    write(tmp_path / "outer", memory__max=str(100 * MIB), memory__current=str(70 * MIB))
    write(tmp_path / "outer/inner", memory__max="max", memory__current=str(60 * MIB))
    found = container_memory(tmp_path, membership)
    assert (found.version, found.group) == (2, str(tmp_path / "outer"))
    assert (found.limit.value, found.used.value, found.free.value) == (100 * MIB, 70 * MIB, 30 * MIB)
    # Page cache that the kernel would drop is no use of memory.
    write(tmp_path / "outer", memory__stat=f"anon 1\ninactive_file {20 * MIB}")
    assert container_memory(tmp_path, membership).free.value == 50 * MIB
    write(tmp_path / "outer/inner", memory__max=str(65 * MIB))
    found = container_memory(tmp_path, membership)
    assert (found.group, found.free.value) == (str(tmp_path / "outer/inner"), 5 * MIB)


def test_a_smaller_limit_may_leave_more(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/outer/inner\n")
    write(tmp_path / "outer", memory__max=str(100 * MIB), memory__current=str(95 * MIB))
    write(tmp_path / "outer/inner", memory__max=str(50 * MIB), memory__current=str(20 * MIB))
    found = container_memory(tmp_path, membership)
    assert (found.limit.value, found.free.value) == (100 * MIB, 5 * MIB)


def test_version_one_and_its_huge_default(tmp_path: Path, membership: Path) -> None:
    membership.write_text("7:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    names = {"memory__limit_in_bytes": str((1 << 63) - 4096), "memory__usage_in_bytes": "5"}
    write(tmp_path / "memory", **names)
    found = container_memory(tmp_path, membership)
    assert (found.limit.value, found.limit.reason) == (None, "no control group of this process limits memory")
    # Inside a container the path is the host's: only the mount's root is there, and it is the container's own.
    write(tmp_path / "memory", memory__limit_in_bytes=str(9 * MIB), memory__usage_in_bytes=str(10 * MIB))
    found = container_memory(tmp_path, membership)
    assert (found.version, found.limit.value, found.free.value) == (1, 9 * MIB, 0)


def test_version_one_counts_the_groups_below(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/a\n")
    stat = f"inactive_file 0\ntotal_inactive_file {3 * MIB}"
    write(
        tmp_path / "memory/a",
        memory__limit_in_bytes=str(9 * MIB), memory__usage_in_bytes=str(5 * MIB), memory__stat=stat,
    )  # fmt: skip
    assert container_memory(tmp_path, membership).free.value == 7 * MIB


def test_both_versions_at_once(tmp_path: Path, membership: Path) -> None:
    """A hybrid system: version 2 is mounted too, and the memory controller is with version 1."""
    membership.write_text("4:memory:/a\n0::/a\n")
    write(tmp_path / "memory/a", memory__limit_in_bytes=str(9 * MIB), memory__usage_in_bytes=str(5 * MIB))
    write(tmp_path / "unified")
    assert container_memory(tmp_path, membership).version == 1


def test_no_limit_says_why(tmp_path: Path, membership: Path) -> None:
    assert "cannot be read (No such file" in (container_memory(tmp_path, membership).limit.reason or "")
    membership.write_text("0::/a/b\n")
    assert container_memory(tmp_path, membership).free.reason == f"no memory control group is mounted at {tmp_path}"
    write(tmp_path / "a/b", memory__max="max", memory__current="1")
    found = container_memory(tmp_path, membership)
    assert found.limit.reason == found.free.reason == "no control group of this process limits memory"


@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_a_file_that_cannot_be_read_is_the_reason(tmp_path: Path, membership: Path, name: str) -> None:
    membership.write_text("0::/a\n")
    write(tmp_path / "a", memory__max=str(MIB), memory__current="1")
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).mkdir()  # root may read any file, a directory nobody
    found = container_memory(tmp_path, membership)
    assert found.limit.value is None
    assert f"{name} cannot be read ({os.strerror(21)})" in (found.limit.reason or "")
