"""The next layer's keys and values brought in under real models, on the reader threads: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import budget_for, tokens

from policies import link_order, placement

Open = Callable[..., Any]
OPTIONS: dict[str, Any] = {"context": 200, "kv_tier": "host"}
WAYS: list[dict[str, Any]] = [{"prefill_chunk": 200}, {"prefill_chunk": 16}, {"prefill_chunk": 200, "batch": 2}]
ROOM_BYTES = 2 * 2 * 32 * 200 * 4
"""Of a row: keys and values, heads, head_dim, context, float32."""


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny caches, too, are brought in ahead."""
    monkeypatch.setattr(link_order, "AHEAD_FROM_BYTES", 1)


def steps(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    cache = model.river.new_cache()
    with torch.no_grad():
        found = [model(ids[:, :90], past_key_values=cache).logits]
        found += [model(ids[:, 90:97], past_key_values=cache).logits]
        cache.crop(-3)
        found += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(94, 100)]
    for _ in range(2):
        found.append(model.generate(ids[:, :110], max_new_tokens=8, do_sample=False))
    return found


@pytest.mark.parametrize("mode", ["backbone", "exit", "lossless"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=["whole", "chunked", "batch"])
def test_models_give_the_same_bits_with_and_without(
    mode: str,
    streamed: bool,
    options: dict[str, Any],
    open_river: Open,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "DEVICE_PER_LINK", 1)  # a room goes before a layer
    rows = options.get("batch", 1)
    asked = OPTIONS | options | {"mode": mode, "tau": 0.6}
    budget = budget_for(checkpoint("llama"), 0, **asked) + rows * ROOM_BYTES if streamed else 1 << 30
    answers = []
    for kind in ({}, {"kv_tier": "device", "budget": 1 << 30}):
        model = open_river("llama", **{"budget": budget} | asked | kind)
        assert model.river.placement.kv_ahead == (not kind)
        assert kind or bool(model.river.placement.streamed_layers) == streamed
        answers.append(steps(model, tokens(120, rows=rows, seed=3)))
    for ahead, device in zip(*answers, strict=True):
        assert torch.equal(ahead, device)
