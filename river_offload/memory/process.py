"""What this process holds, as the system, torch's allocator and NVML say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from river_offload.memory.nvml import CardMemory, card_memory
from river_offload.memory.reading import Reading

STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class HostUse:
    """Host memory of this process. Bytes.

    Attributes:
        resident: all that is in RAM (RSS).
        anonymous: of it, what no file backs: heap, tensors, pinned buffers of ours.
        file_backed: of it, pages of files: libraries, mapped weights; the system may drop them.
        shared: of it, shared memory.
    """

    resident: Reading
    anonymous: Reading
    file_backed: Reading
    shared: Reading


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """Torch's allocator on one CUDA device. Bytes; peaks since the start or the last reset.

    `current` is in use, `reserved` is what was taken from the driver for it.
    """

    current: Reading
    peak: Reading
    reserved: Reading
    reserved_peak: Reading

    @classmethod
    def missing(cls, reason: str) -> AllocatorUse:
        return cls(*(Reading.missing(reason),) * 4)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """All of it at one moment. `device` is the GPU of `allocator` and `card`, None without one."""

    device: str | None
    host: HostUse
    allocator: AllocatorUse
    card: CardMemory


def read_process(device: torch.device | None = None, *, cuda: Any = torch.cuda, nvml: Any = None) -> ProcessMemory:
    """What this process holds now; of the GPU too, when `device` is one. Takes a millisecond, with NVML some more.

    Args:
        cuda: the `torch.cuda` namespace, or a fake one.
        nvml: pynvml, or a fake one.
    """
    if device is None or device.type != "cuda":
        reason = "torch counts the allocations of CUDA devices only"
        nothing = CardMemory.missing("no GPU is used")
        return ProcessMemory(None, host_use(), AllocatorUse.missing(reason), nothing)
    card = card_memory(*card_names(cuda.get_device_properties(device)), module=nvml)
    return ProcessMemory(str(device), host_use(), allocator_use(device, cuda=cuda), card)


def host_use(status: Path = STATUS) -> HostUse:
    """Host memory of this process: of its kinds what /proc tells, else the whole by psutil."""
    try:
        lines = status.read_text().splitlines()
    except OSError as error:
        reason = f"{status} cannot be read ({error.strerror})"
        return HostUse(_resident(), *(Reading.missing(reason),) * 3)
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    kinds = (_kib(fields, name, status) for name in ("RssAnon", "RssFile", "RssShmem"))
    return HostUse(_resident(), *kinds)


def allocator_use(device: torch.device, *, cuda: Any = torch.cuda) -> AllocatorUse:
    """What torch's allocator says of a CUDA device; all zeros before the first tensor is on it."""
    stats = cuda.memory_stats(device)
    kinds = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
    return AllocatorUse(*(Reading(int(stats.get(kind, 0))) for kind in (*kinds, "reserved_bytes.all.peak")))


def card_names(properties: Any) -> tuple[str, ...]:
    """What NVML may know a device by, from torch's properties of it: as a card, as a MIG instance, by its bus id."""
    names = []
    uuid = str(getattr(properties, "uuid", ""))
    if uuid:
        names += [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    bus_id = pci_bus_id(properties)
    return (*names, bus_id) if bus_id else tuple(names)


def pci_bus_id(properties: Any) -> str | None:
    """`00000000:41:00.0`, as NVML writes it; None when this torch does not tell."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, device = (int(part) for part in parts if part is not None)
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def _resident() -> Reading:
    try:
        return Reading(int(psutil.Process().memory_info().rss))
    except psutil.Error as error:
        return Reading.missing(f"psutil: {error}")


def _kib(fields: dict[str, str], name: str, status: Path) -> Reading:
    text = fields.get(name, "").split()
    return Reading(int(text[0]) * 1024) if text else Reading.missing(f"{status} has no {name}: the kernel is too old")
