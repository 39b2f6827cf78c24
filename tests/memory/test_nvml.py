"""NVML against a fake one with two GPUs: the right card, or the reason why there is no figure."""

from __future__ import annotations

import builtins
import dataclasses
import json
from typing import Any

import pynvml
import pytest
from fake_nvml import GIB, FakeNvml, two_cards

from river_offload.memory.nvml import CardMemory, card_memory, cards


def reasons(memory: CardMemory) -> set[str | None]:
    return {field["reason"] for field in dataclasses.asdict(memory).values()}


def test_both_cards_are_listed_with_what_names_them() -> None:
    nvml = FakeNvml()
    listed, reason = cards(nvml)
    assert reason is None
    assert [(card.index, card.uuid, card.pci_bus_id, card.name) for card in listed] == [
        (0, "GPU-aaaa1111-0000", "00000000:01:00.0", "NVIDIA A40"),
        (1, "GPU-bbbb2222-0000", "00000000:41:00.0", "NVIDIA A40"),
    ]
    assert nvml.opened == nvml.closed == 1


@pytest.mark.parametrize("name", ["GPU-bbbb2222-0000", "00000000:41:00.0"])
def test_memory_is_that_of_the_card_named(name: str) -> None:
    nvml = FakeNvml(two_cards(processes={7: 3 * GIB, 8: GIB}))
    memory = card_memory(name, module=nvml, pid=7)
    assert (memory.used.value, memory.process.value) == (30 * GIB, 3 * GIB)
    assert nvml.opened == nvml.closed == 1


def test_the_first_name_that_nvml_knows_counts() -> None:
    nvml = FakeNvml()
    assert card_memory("GPU-gone", "MIG-gone", "00000000:01:00.0", module=nvml).used.value == 2 * GIB
    unknown = card_memory("GPU-gone", "00000000:99:00.0", module=nvml)
    assert reasons(unknown) == {"NVML: Not Found (GPU-gone); NVML: Not Found (00000000:99:00.0)"}
    assert reasons(card_memory(module=nvml)) == {"the GPU's UUID is not known"}
    assert nvml.opened == nvml.closed


@pytest.mark.parametrize("structs", [0, 1, 2])
def test_old_and_new_memory_structures(structs: int) -> None:
    memory = card_memory("GPU-aaaa1111-0000", module=FakeNvml(structs=structs))
    assert (memory.total.value, memory.free.value) == (48 * GIB, 48 * GIB - 2 * GIB - GIB // 2)
    if structs == 2:
        assert (memory.used.value, memory.reserved.value) == (2 * GIB, GIB // 2)
    else:
        assert memory.used.value == 2 * GIB + GIB // 2
        assert "too old" in (memory.reserved.reason or "")


def test_a_process_that_nvml_cannot_tell() -> None:
    def process(nvml: FakeNvml) -> str:
        reading = card_memory("GPU-aaaa1111-0000", module=nvml, pid=7).process
        assert reading.value is None
        return reading.reason or ""

    assert "does not list this process" in process(FakeNvml(two_cards(processes={8: GIB})))
    assert "WDDM or WSL" in process(FakeNvml(two_cards(processes={7: None})))
    newer = FakeNvml(failing={"nvmlDeviceGetComputeRunningProcesses": 0})
    assert "does not match the NVML lib" in process(newer)
    assert card_memory("GPU-aaaa1111-0000", module=newer, pid=7).used.value == 2 * GIB


def test_an_instance_of_a_card_is_named_by_its_own_uuid() -> None:
    nvml = FakeNvml(two_cards(instances=()))
    nvml.cards[1].instances = ("MIG-1", "MIG-2")
    listed, _ = cards(nvml)
    assert [card.instances for card in listed] == [(), ("MIG-1", "MIG-2")]
    assert card_memory("MIG-2", module=nvml).used.value == 30 * GIB


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver answers: NVML Shared Library Not Found"),
        ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no NVIDIA driver answers: Driver Not Loaded"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NO_PERMISSION, "NVML: Insufficient Permissions"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, "NVML: GPU is lost"),
    ],
)
def test_an_error_of_nvml_is_the_reason(function: str, code: int, words: str) -> None:
    nvml = FakeNvml(failing={function: code})
    assert reasons(card_memory("GPU-aaaa1111-0000", module=nvml)) == {words}
    assert nvml.opened == nvml.closed
    listed, reason = cards(nvml)
    assert (listed == (), reason) == ((True, words) if function == "nvmlInit" else (False, None))


def test_a_pynvml_without_a_function_says_which() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetComputeRunningProcesses = None  # type: ignore[assignment]
        nvmlDeviceGetMaxMigDeviceCount = None  # type: ignore[assignment]

    assert len(cards(Old())[0]) == 2
    memory = card_memory("GPU-aaaa1111-0000", module=Old())
    assert "no nvmlDeviceGetComputeRunningProcesses: update" in (memory.process.reason or "")


def test_without_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_pynvml(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "pynvml":
            raise ImportError("No module named 'pynvml'")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_pynvml)
    assert cards() == ((), "pynvml is not installed: pip install nvidia-ml-py")
    memory = card_memory("GPU-aaaa1111-0000")
    assert reasons(memory) == {"pynvml is not installed: pip install nvidia-ml-py"}
    assert json.loads(json.dumps(dataclasses.asdict(memory)))["total"]["value"] is None


def test_this_machine_answers_or_says_why() -> None:
    listed, reason = cards()
    assert bool(listed) != bool(reason)
