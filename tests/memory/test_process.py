"""What this process holds, and what of it nobody claims."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeRuntime
from fake_nvml import GIB, FakeCuda, FakeNvml, two_cards

from river_offload.memory.limits import locked_memory, wsl_version
from river_offload.memory.probes import anonymous_bytes
from river_offload.memory.process import ProcessMemory, host_use, read_process
from river_offload.memory.reading import Reading
from river_offload.memory.unattributed import unattributed
from river_offload.store.pinned import HostMemory

MIB = 1024**2
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_the_kinds_of_host_memory(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython: x\nRssAnon:\t  100 kB\nRssFile:\t 20 kB\nRssShmem:\t 3 kB\n")
    use = host_use(status)
    assert (use.anonymous.value, use.file_backed.value, use.shared.value) == (102_400, 20_480, 3_072)
    assert (use.resident.value or 0) > 10 * MIB
    status.write_text("VmRSS:\t 5 kB\n")
    assert "has no RssFile" in (host_use(status).file_backed.reason or "")
    assert "cannot be read" in (host_use(tmp_path / "gone").anonymous.reason or "")


def test_this_process_grows_by_what_it_touches() -> None:
    # Straight from the system: an allocator may hand out what an earlier test has touched and freed.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = anonymous_bytes()
        held.write(bytes(MIB) * 32)
        assert 31 * MIB < anonymous_bytes() - before < 34 * MIB


def test_without_a_gpu_its_figures_have_reasons() -> None:
    for device in (None, CPU):
        found = json.loads(json.dumps(dataclasses.asdict(read_process(device))))
        assert found["device"] is None
        assert found["allocator"]["peak"] == {
            "value": None, "reason": "torch counts the allocations of CUDA devices only"
        }  # fmt: skip
        assert found["card"]["process"]["reason"] == "no GPU is used"


def test_allocator_and_card_are_those_of_the_device() -> None:
    cards = two_cards(processes={os.getpid(): 5 * GIB})
    found = read_process(GPU, cuda=FakeCuda(cards), nvml=FakeNvml(cards))
    assert found.device == "cuda:1"
    allocator = found.allocator
    assert (allocator.current.value, allocator.peak.value) == (3 * GIB, 5 * GIB)
    assert (allocator.reserved.value, allocator.reserved_peak.value) == (4 * GIB, 6 * GIB)
    assert (found.card.used.value, found.card.process.value) == (30 * GIB, 5 * GIB)


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, resource.RLIM_INFINITY))
    assert locked_memory().soft == Reading(65_536)
    assert locked_memory().hard == Reading.missing("unlimited")


@pytest.mark.parametrize(
    ("release", "version"),
    [("5.15.90.1-microsoft-standard-WSL2", 2), ("4.4.0-19041-Microsoft", 1), ("6.1.0-13-amd64", None)],
)
def test_wsl(release: str, version: int | None) -> None:
    assert wsl_version(release) == version


def gpu_reading(*, allocated: int, reserved: int, used: int, process: int | None) -> ProcessMemory:
    cards = two_cards(processes={} if process is None else {os.getpid(): process})
    cards[1].used = used
    cuda = FakeCuda(cards)
    cuda.stats["allocated_bytes.all.current"] = allocated
    cuda.stats["reserved_bytes.all.current"] = reserved
    return read_process(GPU, cuda=cuda, nvml=FakeNvml(cards))


@pytest.mark.parametrize(("process", "beyond", "counts"), [(900, 400, "process"), (None, 1000 - 450, "device")])
def test_what_nobody_claims_on_a_gpu(process: int | None, beyond: int, counts: str) -> None:
    before = gpu_reading(allocated=10, reserved=50, used=2000, process=None)
    after = gpu_reading(allocated=340, reserved=500, used=3000, process=process)
    rests = unattributed(300, before, after)
    assert rests["allocator_minus_ledger_bytes"] == {"value": 340 - 10 - 300, "reason": None}
    assert rests["allocator_spare_bytes"]["value"] == 500 - 340
    assert rests["nvml_minus_allocator_bytes"]["value"] == beyond
    assert rests["nvml_counts"] == counts
    assert rests["anonymous_growth_minus_ledger_bytes"]["value"] is None
    json.dumps(rests)


def test_without_nvml_the_rest_has_its_reason() -> None:
    broken = FakeNvml(failing={"nvmlInit": 12})
    reading = read_process(GPU, cuda=FakeCuda(two_cards()), nvml=broken)
    rests = unattributed(0, reading, reading)
    assert rests["nvml_counts"] is None
    assert "no NVIDIA driver answers" in rests["nvml_minus_allocator_bytes"]["reason"]


UNCLAIMED = """
import json, torch
from river_offload.memory.process import read_process
from river_offload.memory.unattributed import unattributed
before = read_process(torch.device("cpu"))
held = torch.ones(48 << 20, dtype=torch.uint8)
print(json.dumps(unattributed(32 << 20, before, read_process(torch.device("cpu")))))
"""


def test_what_nobody_claims_on_a_cpu() -> None:
    """In a process of its own: what other tests left in this one may be freed at any time."""
    done = subprocess.run([sys.executable, "-c", UNCLAIMED], capture_output=True, text=True, check=True)
    rests = json.loads(done.stdout)
    assert 15 * MIB < rests["anonymous_growth_minus_ledger_bytes"]["value"] < 18 * MIB
    assert rests["allocator_minus_ledger_bytes"]["value"] is None
    before = read_process(CPU)
    with pytest.raises(ValueError, match="None and cuda:1 cannot be compared"):
        unattributed(0, before, gpu_reading(allocated=0, reserved=0, used=0, process=None))


def test_pinned_memory_is_counted_and_not_rounded_to_a_power_of_two() -> None:
    """Torch's pinned allocator takes 64 MiB for 40; estimators forget pinned memory, or count what was asked for."""
    nbytes, runtime = 40 * MIB, FakeRuntime(1 << 30)
    memory = HostMemory(nbytes, runtime)
    before = read_process(CPU)
    buffer = memory.allocate(nbytes)
    buffer.fill_(1)
    rests = unattributed(memory.pinned_bytes, before, read_process(CPU))
    assert memory.pinned_bytes == sum(runtime.registered.values()) == nbytes
    assert abs(rests["anonymous_growth_minus_ledger_bytes"]["value"]) < 2 * MIB
    memory.close()


@pytest.mark.gpu
def test_a_real_gpu_is_read_by_torch_and_by_nvml() -> None:
    device = torch.device("cuda", 0)
    before = read_process(device)
    held = torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    after = read_process(device)
    rests = unattributed(256 * MIB, before, after)
    assert rests["allocator_minus_ledger_bytes"] == {"value": 0, "reason": None}
    assert after.card.total.value == pytest.approx(torch.cuda.mem_get_info(device)[1], rel=0.02)
    assert (after.card.used.value or 0) - (before.card.used.value or 0) >= 256 * MIB
    assert (rests["nvml_minus_allocator_bytes"]["value"] or 0) > 0  # the CUDA context at least
    del held
