from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from river_offload.errors import LinkError
from river_offload.eval import ceilings
from river_offload.eval.ceilings import Span, disk_read_rate, memory_read_rate, merged


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(100_000))
    return path


def test_spans_that_touch_become_one(file: Path) -> None:
    other = file.with_name("other")
    spans = [Span(file, 300, 50), Span(other, 0, 10), Span(file, 100, 200), Span(file, 351, 9)]
    assert merged(spans) == [Span(other, 0, 10), Span(file, 100, 250), Span(file, 351, 9)]


@pytest.mark.parametrize("readers", [1, 3])
def test_all_bytes_of_the_spans_are_read_in_whole_sectors(
    file: Path, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "CHUNK_BYTES", 8192)
    read: list[tuple[int, int]] = []
    preadv = os.preadv
    lock = threading.Lock()

    def seen(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        with lock:
            read.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", seen)
    rate = disk_read_rate([Span(file, 5000, 30_000), Span(file, 90_000, 10_000)], readers=readers)
    covered = {byte for offset, count in read for byte in range(offset, offset + count)}
    assert set(range(5000, 35_000)) | set(range(90_000, 100_000)) <= covered
    assert 50_000 not in covered
    assert all(offset % 4096 == 0 for offset, _ in read)
    assert rate.nbytes >= 40_000 and rate.bytes_per_s == pytest.approx(rate.nbytes / rate.seconds)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ceiling")]


def test_a_file_system_without_direct_reads_is_read_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    rate = disk_read_rate([Span(file, 0, 100_000)])
    assert (rate.direct, rate.nbytes) == (False, 100_000)


def test_limits_end_the_reading(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "CHUNK_BYTES", 4096)
    assert disk_read_rate([Span(file, 0, 90_000)], max_bytes=8192).nbytes == 8192
    with pytest.raises(LinkError, match="no bytes were read"):
        disk_read_rate([Span(file, 0, 90_000)], max_s=-1.0)


def test_a_missing_file_and_a_failing_read_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LinkError, match="absent: cannot be read: No such file"):
        disk_read_rate([Span(file.with_name("absent"), 0, 10)])
    preadv, calls = os.preadv, []

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(ceilings, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(os, "preadv", broken)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError, match="weights: cannot be read: Input/output error"):
        disk_read_rate([Span(file, 0, 90_000)], readers=2)
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_rate_is_a_rate() -> None:
    assert 1e8 < memory_read_rate(torch.device("cpu"), nbytes=32 << 20) < 1e13
