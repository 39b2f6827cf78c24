"""Which card a number of torch means: NVML counts its own way and knows nothing of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import builtins
import functools
from typing import Any

import pytest
import torch
from fake_nvml import GIB, FakeCuda, FakeNvml, two_cards

from river_offload.memory import probes
from river_offload.memory.devices import gpus
from river_offload.memory.nvml import Card, card_memory
from river_offload.memory.visible import visible

FIRST, SECOND = (card.uuid for card in two_cards())
USED = {FIRST: 2 * GIB, SECOND: 30 * GIB}
SETTINGS: list[tuple[str | None, list[str]]] = [
    (None, [FIRST, SECOND]),
    ("1", [SECOND]),
    ("1,0", [SECOND, FIRST]),
    (SECOND, [SECOND]),
    ("GPU-bbbb", [SECOND]),
    (f"{SECOND},{FIRST}", [SECOND, FIRST]),
    ("", []),
]


def environ(setting: str | None) -> dict[str, str]:
    return {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}


@pytest.mark.parametrize(("setting", "expected"), SETTINGS)
def test_torch_s_numbers_meet_the_right_cards(setting: str | None, expected: list[str]) -> None:
    """As CUDA gives them: torch sees the cards that are left, in the order of the setting."""
    nvml = FakeNvml()
    cuda = FakeCuda([next(card for card in nvml.cards if card.uuid == uuid) for uuid in expected])
    found = gpus(cuda=cuda, nvml=nvml, environ=environ(setting))
    assert [(gpu.number, gpu.uuid, gpu.card.used.value) for gpu in found.found] == [
        (number, uuid, USED[uuid]) for number, uuid in enumerate(expected)
    ]
    for gpu in found.found:
        assert gpu.torch_free == gpu.card.free
    assert (found.torch_reason is None) == bool(expected)
    if not expected:
        assert found.remark is not None and "hides every GPU: unset it" in found.remark


@pytest.mark.parametrize(("setting", "expected"), SETTINGS)
def test_without_a_torch_that_uses_gpus_the_environment_says_which(setting: str | None, expected: list[str]) -> None:
    found = gpus(cuda=FakeCuda([]), nvml=FakeNvml(), environ=environ(setting))
    assert [(gpu.uuid, gpu.card.used.value) for gpu in found.found] == [(uuid, USED[uuid]) for uuid in expected]
    for gpu in found.found:
        assert gpu.torch_total.reason == found.torch_reason is not None


def test_without_nvml_torch_s_own_figures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_pynvml(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_pynvml)
    found = gpus(cuda=FakeCuda(two_cards()[1:]), environ=environ("1"))
    assert [(gpu.uuid, gpu.torch_total.value) for gpu in found.found] == [(SECOND, 48 * GIB)]
    assert found.found[0].card.used.reason == found.nvml_reason == "pynvml is not installed: pip install nvidia-ml-py"


def test_a_gpu_that_cuda_cannot_ask_is_still_listed() -> None:
    found = gpus(cuda=FakeCuda(two_cards(), broken=True), nvml=FakeNvml(), environ={})
    assert found.found[1].torch_free.reason == "CUDA: CUDA error: out of memory"
    assert found.found[1].card.used.value == 30 * GIB


def test_a_card_without_a_uuid_that_nvml_knows_is_found_by_its_place_on_the_bus() -> None:
    nvml = FakeNvml()
    for card in nvml.cards:
        card.uuid = card.uuid.replace("0000", "9999")
    found = gpus(cuda=FakeCuda(two_cards()), nvml=nvml, environ={})
    assert [gpu.card.used.value for gpu in found.found] == [2 * GIB, 30 * GIB]


def test_torch_on_an_instance_of_a_card() -> None:
    """Torch tells a UUID without saying what it is of."""
    nvml = FakeNvml()
    nvml.cards[1].instances = ("MIG-cccc3333-0000",)
    torch_s = two_cards()[1]
    torch_s.uuid = "MIG-cccc3333-0000"
    found = gpus(cuda=FakeCuda([torch_s]), nvml=nvml, environ=environ("MIG-cccc3333-0000"))
    assert [(gpu.uuid, gpu.card.used.value) for gpu in found.found] == [("MIG-cccc3333-0000", 30 * GIB)]


def listed(*names: str, instances: tuple[str, ...] = ()) -> list[Card]:
    return [Card(i, f"GPU-{i}{i}", f"0:{i}", name, instances if i == 0 else ()) for i, name in enumerate(names)]


def test_mig_instances() -> None:
    cards = listed("H100", "H100", instances=("MIG-a1", "MIG-b2"))
    assert visible(cards, "MIG-b2").uuids == ("MIG-b2",)
    assert visible(cards, "MIG-b").uuids == ("MIG-b2",)
    # Without a name CUDA computes on the first instance only.
    assert visible(cards, None).uuids == ("MIG-a1", "GPU-11")
    assert visible(cards, "1,0").uuids == ("GPU-11", "MIG-a1")
    assert visible(cards, "MIG-c").uuids == ()


@pytest.mark.parametrize(
    ("setting", "left", "words"),
    [
        ("0,7,1", ("GPU-00",), "stops at '7'"),
        ("-1", (), "stops at '-1'"),
        ("NoDevFiles", (), "stops at 'NoDevFiles'"),
        ("1,1", (), "twice"),
        ("GPU-", (), "stops at 'GPU-'"),  # two cards begin so
        ("GPU-11,0", ("GPU-11",), "stops at '0'"),
        ("1gpu", ("GPU-11",), None),
        (" 1 , 0 ", ("GPU-11", "GPU-00"), None),
    ],
)
def test_settings_that_are_not_what_they_seem(setting: str, left: tuple[str, ...], words: str | None) -> None:
    found = visible(listed("A40", "A40"), setting)
    assert found.uuids == left
    assert (found.remark is None) if words is None else words in (found.remark or "")


def test_unlike_cards_may_be_numbered_otherwise() -> None:
    cards = listed("T4", "H100")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in (visible(cards, "1").remark or "")
    assert visible(cards, "1", "PCI_BUS_ID").remark is None
    assert visible(cards, "GPU-11").remark is None


def test_the_budget_is_what_torch_and_nvml_both_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, cuda = FakeNvml(), FakeCuda(two_cards()[::-1])
    monkeypatch.setattr(probes, "card_memory", functools.partial(card_memory, module=nvml))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 48 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cuda.get_device_properties)
    expected = {0: (48 * GIB - 30 * GIB - GIB // 2, "NVML"), 1: (20 * GIB, "torch")}
    for number, (free_bytes, source) in expected.items():
        found, words = probes.free_device_bytes(torch.device("cuda", number))
        assert found == int(free_bytes * 0.9)
        assert source in words and "10%" in words
