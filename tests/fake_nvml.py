"""A pynvml with two GPUs, and a torch.cuda to go with it. What a test wants to go wrong is an attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


@dataclass
class FakeCard:
    uuid: str
    pci_bus_id: str
    name: str
    total: int
    used: int
    reserved: int = GIB // 2
    processes: dict[int, int | None] = field(default_factory=dict)
    instances: tuple[str, ...] = ()


def two_cards(**changes: Any) -> list[FakeCard]:
    return [
        FakeCard("GPU-aaaa1111-0000", "00000000:01:00.0", "NVIDIA A40", 48 * GIB, 2 * GIB, **changes),
        FakeCard("GPU-bbbb2222-0000", "00000000:41:00.0", "NVIDIA A40", 48 * GIB, 30 * GIB, **changes),
    ]


class FakeNvml:
    """Handles are cards, or (card, UUID of an instance); answers have the types that pynvml gives.

    Args:
        structs: 2 where driver and pynvml know the memory structure with `reserved`; 1 for an old driver, 0 for a
            pynvml that has never heard of another one.
        failing: functions that raise, each with the error code.
    """

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def __init__(
        self, cards: list[FakeCard] | None = None, *, structs: int = 2, failing: dict[str, int] | None = None
    ) -> None:
        self.cards = two_cards() if cards is None else cards
        self.structs = structs
        self.failing = failing or {}
        self.opened = self.closed = 0
        if structs:
            self.nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def nvmlInit(self) -> None:
        self._fail("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        self._fail("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for card in self.cards:
            if card.uuid == uuid:
                return card
            if uuid in card.instances:
                return card, uuid
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> FakeCard:
        for card in self.cards:
            if card.pci_bus_id == bus_id:
                return card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return handle[1] if isinstance(handle, tuple) else handle.uuid

    def nvmlDeviceGetName(self, handle: FakeCard) -> bytes:
        return handle.name.encode()  # old versions gave bytes

    def nvmlDeviceGetPciInfo(self, handle: FakeCard) -> Any:
        return SimpleNamespace(busId=handle.pci_bus_id)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeCard) -> int:
        if not handle.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeCard, index: int) -> Any:
        if index >= len(handle.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle, handle.instances[index]

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        self._fail("nvmlDeviceGetMemoryInfo")
        card = handle[0] if isinstance(handle, tuple) else handle
        free = card.total - card.used - card.reserved
        if version is None:
            return SimpleNamespace(total=card.total, free=free, used=card.used + card.reserved)
        if self.structs == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=card.total, free=free, used=card.used, reserved=card.reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        if "nvmlDeviceGetComputeRunningProcesses" in self.failing:  # as pynvml when it is newer than the driver
            raise pynvml.NVMLLibraryMismatchError("pyNVML version does not match the NVML lib version")
        card = handle[0] if isinstance(handle, tuple) else handle
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in card.processes.items()]

    def _fail(self, name: str) -> None:
        if name in self.failing:
            raise pynvml.NVMLError(self.failing[name])


class FakeCuda:
    """torch.cuda on some of the cards, in its own order; the UUID without its prefix, as torch gives it."""

    def __init__(self, cards: list[FakeCard], *, broken: bool = False) -> None:
        self.cards = cards
        self.broken = broken
        self.stats = {
            "allocated_bytes.all.current": 3 * GIB,
            "allocated_bytes.all.peak": 5 * GIB,
            "reserved_bytes.all.current": 4 * GIB,
            "reserved_bytes.all.peak": 6 * GIB,
        }

    def is_available(self) -> bool:
        return bool(self.cards)

    def device_count(self) -> int:
        return len(self.cards)

    def get_device_properties(self, device: Any) -> Any:
        card = self.cards[device if isinstance(device, int) else device.index]
        _, bus, place = card.pci_bus_id.split(":")
        return SimpleNamespace(
            name=card.name,
            uuid=card.uuid.partition("-")[2],
            pci_domain_id=0,
            pci_bus_id=int(bus, 16),
            pci_device_id=int(place.split(".")[0], 16),
        )

    def mem_get_info(self, device: int) -> tuple[int, int]:
        if self.broken:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        card = self.cards[device]
        return card.total - card.used - card.reserved, card.total

    def memory_stats(self, device: Any) -> dict[str, int]:
        return self.stats
