"""What fewer bits in the KV cache cost the demo model (the tool's own figures are in docs/results.md)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

TOKENS = 1024


def test_a_reading_beside_another(tool: ModuleType) -> None:
    def reading(loss: float, *choices: int) -> Any:
        return tool.Reading(torch.full((4,), loss), torch.tensor(choices), 7, 1.0)

    found = tool.compare(reading(1.1, 1, 2, 3, 5), reading(1.0, 1, 2, 3, 4), 8)
    assert (found.kv_bits, found.agreement, found.kv_device_bytes) == (8, 0.75, 7)
    assert found.perplexity == pytest.approx(3.004, abs=1e-3)
    assert found.change_percent == pytest.approx(10.517, abs=1e-3)


@pytest.mark.demo
@pytest.mark.slow
def test_eight_bits_keep_the_perplexity_within_half_a_percent(tool: ModuleType) -> None:
    """In float32: in bfloat16 the rounding of everything else moves it as far."""
    plain, eight, four = (tool.read("demo", TOKENS, 128, bits, dtype="float32", budget="2GiB") for bits in (16, 8, 4))
    found = {bits: tool.compare(reading, plain, bits) for bits, reading in ((8, eight), (4, four))}
    assert abs(found[8].change_percent) < 0.5 and found[8].agreement > 0.98
    assert abs(found[4].change_percent) < 5 and found[4].agreement > 0.9
    assert found[4].kv_device_bytes < found[8].kv_device_bytes < plain.kv_device_bytes
    assert not torch.equal(eight.losses, plain.losses)
