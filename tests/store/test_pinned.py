"""Pinning against a fake CUDA runtime: to the byte, and when it is refused once said and otherwise unnoticed."""

from __future__ import annotations

import mmap
import platform
import resource
import warnings

import pytest
from fake_cuda import FakeRuntime

from river_offload.errors import RiverError
from river_offload.store import pinned
from river_offload.store.pinned import HostMemory, page_aligned


def test_pages_are_aligned_and_zeroed() -> None:
    for nbytes in (1, 4096, 10_000):
        memory = page_aligned(nbytes)
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        assert (memory.nbytes, int(memory.sum())) == (nbytes, 0)
        memory.fill_(1)


def test_every_byte_is_pinned_and_no_more() -> None:
    runtime = FakeRuntime(1 << 30)
    memory = HostMemory(3 * 5000, runtime)
    buffers = [memory.allocate(5000) for _ in range(3)]
    assert runtime.registered == {buffer.data_ptr(): 5000 for buffer in buffers}
    assert (memory.pinned_bytes, memory.pageable_bytes) == (15_000, 0)
    memory.close()
    memory.close()
    assert runtime.registered == {}
    assert memory.pinned_bytes == 0


def test_a_refusal_is_said_once_and_the_rest_is_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(12_000)
    memory = HostMemory(30_000, runtime)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8_388_608, 8_388_608))
    memory.allocate(10_000)
    with pytest.warns(
        UserWarning, match=r"failed after 10000 of 30000 bytes: out of memory\. RLIMIT_MEMLOCK .* 8388608"
    ):
        memory.allocate(10_000)
    assert runtime.sticky == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = memory.allocate(10_000)
    buffer.fill_(7)
    assert (memory.pinned_bytes, memory.pageable_bytes, runtime.tries) == (10_000, 20_000, 2)
    memory.close()
    assert runtime.registered == {}


@pytest.mark.parametrize(
    ("release", "limit", "said"),
    [
        ("5.15.90.1-microsoft-standard-WSL2", 1, "This is WSL"),
        ("6.1.0", resource.RLIM_INFINITY, "driver or the container"),
        ("6.1.0", 65_536, r"RLIMIT_MEMLOCK \(ulimit -l\) is 65536 bytes"),
    ],
)
def test_the_warning_says_what_may_be_in_the_way(
    release: str, limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.warns(UserWarning, match=said):
        HostMemory(100, FakeRuntime(0)).allocate(100)


def test_without_a_runtime_nothing_is_pinned() -> None:
    memory = HostMemory(100, None)
    memory.allocate(100)
    assert (memory.pinned_bytes, memory.pageable_bytes) == (0, 100)
    memory.close()


def test_no_memory_at_all_is_an_error_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", refuse)
    with pytest.raises(RiverError, match="100 bytes of host memory cannot be had"):
        page_aligned(100)
