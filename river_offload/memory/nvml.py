"""What NVML says about the GPUs of this machine, or why it says nothing.

NVML counts every card in the order of the PCI bus and knows nothing of CUDA_VISIBLE_DEVICES: a number of torch means
nothing to it. Cards are therefore named by their UUID, or by their PCI bus id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from river_offload.memory.reading import Reading


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as NVML lists it.

    Attributes:
        index: NVML's number, in the order of the PCI bus.
        instances: UUIDs of its MIG instances; empty where MIG is off.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of one card, or MIG instance. Bytes.

    Attributes:
        used: by all processes, without `reserved` where that is known.
        reserved: kept by the driver and the firmware.
        process: held by this process, CUDA context included.
    """

    total: Reading
    used: Reading
    reserved: Reading
    free: Reading
    process: Reading

    @classmethod
    def missing(cls, reason: str) -> CardMemory:
        return cls(*(Reading.missing(reason),) * 5)


class Unanswered(Exception):
    """NVML did not answer; the message is the reason. Never leaves this module."""


class _Session:
    """An initialized NVML. `module` is pynvml or what stands in for it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        # A mismatch of library and driver is an exception of its own, not one of NVML's.
        self._errors = (module.NVMLError, getattr(module, "NVMLLibraryMismatchError", module.NVMLError))

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """The answer of the function `name`. Raises Unanswered."""
        function = getattr(self.module, name, None)
        if function is None:
            raise Unanswered(f"this pynvml has no {name}: update nvidia-ml-py")
        try:
            return function(*arguments, **keywords)
        except self._errors as error:
            # What it says of a missing library or module is all there is to say about a machine without a driver.
            where = "no NVIDIA driver answers" if name == "nvmlInit" else "NVML"
            raise Unanswered(f"{where}: {error}") from error


def cards(module: Any | None = None) -> tuple[tuple[Card, ...], str | None]:
    """Every card of the machine, whatever CUDA_VISIBLE_DEVICES hides; none, and why, where NVML cannot say.

    Args:
        module: pynvml by default.
    """
    try:
        with _opened(module) as nvml:
            return tuple(_card(nvml, index) for index in range(nvml.ask("nvmlDeviceGetCount"))), None
    except Unanswered as unanswered:
        return (), str(unanswered)


def card_memory(*names: str, module: Any | None = None, pid: int | None = None) -> CardMemory:
    """Memory of the first card that NVML knows by one of `names`: UUIDs or PCI bus ids.

    Args:
        module: pynvml by default.
        pid: of the process whose share is told; this one by default.
    """
    try:
        with _opened(module) as nvml:
            handle = _handle(nvml, names)
            memory, reserved = _memory(nvml, handle)
            return CardMemory(
                total=Reading(int(memory.total)),
                used=Reading(int(memory.used)),
                reserved=reserved,
                free=Reading(int(memory.free)),
                process=_process(nvml, handle, os.getpid() if pid is None else pid),
            )
    except Unanswered as unanswered:
        return CardMemory.missing(str(unanswered))


@contextlib.contextmanager
def _opened(module: Any | None) -> Iterator[_Session]:
    """NVML between its init and its shutdown. Raises Unanswered."""
    nvml = _Session(_pynvml() if module is None else module)
    nvml.ask("nvmlInit")
    try:
        yield nvml
    finally:
        with contextlib.suppress(Unanswered):
            nvml.ask("nvmlShutdown")


def _pynvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise Unanswered("pynvml is not installed: pip install nvidia-ml-py") from error
    module: ModuleType = pynvml
    return module


def _card(nvml: _Session, index: int) -> Card:
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    return Card(
        index=index,
        uuid=_text(nvml.ask("nvmlDeviceGetUUID", handle)),
        pci_bus_id=_text(nvml.ask("nvmlDeviceGetPciInfo", handle).busId),
        name=_text(nvml.ask("nvmlDeviceGetName", handle)),
        instances=tuple(_instances(nvml, handle)),
    )


def _instances(nvml: _Session, handle: Any) -> Iterator[str]:
    """UUIDs of the MIG instances of a card; none where MIG is off or unknown to card, driver or pynvml."""
    try:
        places = int(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle))
    except Unanswered:
        return
    for place in range(places):
        with contextlib.suppress(Unanswered):  # not every place is taken
            yield _text(nvml.ask("nvmlDeviceGetUUID", nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)))


def _handle(nvml: _Session, names: tuple[str, ...]) -> Any:
    reasons = []
    for name in names:
        by_uuid = name.startswith(("GPU-", "MIG-"))
        try:
            return nvml.ask("nvmlDeviceGetHandleByUUID" if by_uuid else "nvmlDeviceGetHandleByPciBusId", name)
        except Unanswered as unanswered:
            reasons.append(f"{unanswered} ({name})")
    raise Unanswered("; ".join(reasons) or "the GPU's UUID is not known")


def _memory(nvml: _Session, handle: Any) -> tuple[Any, Reading]:
    """The memory structure, the new one where driver and pynvml have it, and what is reserved."""
    version = getattr(nvml.module, "nvmlMemory_v2", None)
    if version is not None:
        try:
            memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=version)
            return memory, Reading(int(memory.reserved))
        except Unanswered:  # a driver older than pynvml
            pass
    old = "driver or pynvml is too old to tell it apart: it is part of what is used"
    return nvml.ask("nvmlDeviceGetMemoryInfo", handle), Reading.missing(old)


def _process(nvml: _Session, handle: Any, pid: int) -> Reading:
    try:
        processes = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    except Unanswered as unanswered:
        return Reading.missing(str(unanswered))
    mine = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not mine:
        return Reading.missing(
            "NVML does not list this process: it holds nothing on this GPU, or a container gives it another number"
        )
    if any(nbytes is None for nbytes in mine):
        return Reading.missing("the driver does not tell processes apart (WDDM or WSL)")
    return Reading(sum(int(nbytes) for nbytes in mine))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
