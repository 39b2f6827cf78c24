"""Working memory of long prompts: that of a chunk and of the states of the prompt, as planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import budget_for, load_tiny, tokens

HIDDEN, CHUNK = 320, 256
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 1280, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 65536,
}  # fmt: skip
CALLERS_BYTES = 3 * torch.long.itemsize
"""Ids, mask and positions of a token: the plan counts what `generate` keeps, a passage does not allocate it."""
LENGTHS = (4096, 16384, 65536)


def rises(directory: Path, length: int, **options: Any) -> tuple[int, int]:
    """Measured and planned bytes above weights and KV, for a prompt that fills the context."""
    model = load_tiny(directory, mode="backbone", context=length, budget="4GiB", **options)
    with model.river, torch.no_grad():
        cache = model.river.new_cache()
        model(tokens(length - 1), past_key_values=cache, logits_to_keep=1)
        terms = model.river.placement.terms
        return model.river.account.peak_device_bytes - model.river.device_bytes() - terms["kv"], terms["transient"]


@pytest.mark.slow
def test_a_prompt_sixteen_times_as_long_takes_its_states_and_no_more(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", **SHAPE)
    measured = []
    for length in LENGTHS:
        measured_bytes, planned_bytes = rises(directory, length, prefill_chunk=CHUNK)
        assert measured_bytes + CALLERS_BYTES * length == pytest.approx(planned_bytes, rel=0.02)
        measured.append(measured_bytes)
    for more, length in zip(measured[1:], LENGTHS[1:], strict=True):
        assert more - measured[0] <= length * HIDDEN * torch.float32.itemsize
    whole_bytes, _ = rises(directory, LENGTHS[0])
    assert whole_bytes > 4 * measured[0]


@pytest.mark.slow
def test_states_on_the_host_leave_a_prompt_of_any_length_what_a_chunk_takes(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", **SHAPE)
    measured = []
    for length in LENGTHS[:2]:
        options: dict[str, Any] = {"mode": "backbone", "context": length, "prefill_chunk": CHUNK}
        model = load_tiny(directory, budget=budget_for(directory, 0, **options), **options)
        with model.river, torch.no_grad():
            placement = model.river.placement
            assert placement.states_host_bytes == (length - 1) * HIDDEN * torch.float32.itemsize
            model(tokens(length - 1), past_key_values=model.river.new_cache(), logits_to_keep=1)
            held_bytes = model.river.device_bytes() + placement.terms["kv"]
            measured.append(model.river.account.peak_device_bytes - held_bytes)
            assert measured[-1] + CALLERS_BYTES * length == pytest.approx(placement.terms["transient"], rel=0.02)
    # Rotary tables and the mask of a chunk grow with the prompt; its states would be ten times as much.
    assert measured[1] - measured[0] < (LENGTHS[1] - LENGTHS[0]) * (2 * 8 * 4 + 4 * CHUNK)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi3"])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_plan_holds_for_every_kind_of_layer(family: str, batch: int, open_river: Callable[..., Any]) -> None:
    model = open_river(family, mode="backbone", context=256, prefill_chunk=16, batch=batch)
    ids = tokens(250, rows=batch)
    mask = torch.ones_like(ids)
    mask[0, : 9 * (batch - 1)] = 0
    model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    report = model.river.report()
    planned_bytes = sum(report["planned_bytes"].values())
    # A window is planned as KV, and as working memory, too: a prompt allocates it on its way.
    assert 0.95 * planned_bytes <= report["peak_device_bytes"] <= planned_bytes
