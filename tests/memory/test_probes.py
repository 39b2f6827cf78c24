from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from river_offload.memory import probes
from river_offload.memory.cgroups import ContainerMemory
from river_offload.memory.reading import Reading


@pytest.mark.parametrize(
    ("limited", "expected", "words"), [(None, 900, "available"), (5000, 900, "available"), (100, 90, "container")]
)
def test_the_container_s_limit_is_taken_when_it_is_less(
    limited: int | None, expected: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil tells the machine's memory, whatever the container is held to: estimators that believe it are killed."""
    free = Reading.missing("no limit") if limited is None else Reading(limited)
    monkeypatch.setattr(probes.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=2000))
    monkeypatch.setattr(probes, "container_memory", lambda: ContainerMemory(2, "/", free, free, free))
    found, figure = probes.free_device_bytes(torch.device("cpu"))
    assert found == expected
    assert words in figure and "10%" in figure


def test_a_reading_is_a_figure_or_a_reason() -> None:
    assert Reading(0).minus(3) == Reading(-3)
    assert Reading(5).minus(Reading(3)) == Reading(2)
    assert Reading(5).minus(Reading.missing("gone")) == Reading.missing("gone")
    assert Reading.missing("gone").minus(Reading.missing("other")) == Reading.missing("gone")
    for wrong in ({}, {"value": 1, "reason": "both"}):
        with pytest.raises(ValueError, match="expected one of them"):
            Reading(**wrong)
