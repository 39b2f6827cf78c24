"""Mode lossless writes what transformers writes, token for token, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, QUANT, tokens

from river_offload import QuantConfig

NEW = 64
FINE = QuantConfig(bits=8, group_size=32)
"""Nearly always right; four bits of random weights are nearly always wrong."""


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(
    family: str, place: str, plain: Callable[[str], Any], drafter: Callable[..., Any]
) -> None:
    model = drafter(family, place, quant=FINE if place == "streamed" else QUANT)
    ids = tokens(9)
    expected = plain(family).generate(ids, max_new_tokens=NEW, do_sample=False)
    for draft in (*range(1, 9), "adaptive"):
        with model.river.using(draft=draft):
            found = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(found, expected), draft
        records = model.river.account.records
        assert {record.path for record in records[1:]} == {"draft", "check"}
        assert not any(record.signals for record in records)
        accepted = sum(record.accepted for record in records)
        assert 0 < accepted <= sum(record.path == "draft" for record in records)


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_model_writes_its_own_text_in_a_fraction_of_the_passes(river_cache: Path) -> None:
    import river_offload

    options = {"mode": "lossless", "also_modes": ("backbone",), "budget": "400MiB", "context": 128}
    with river_offload.load("demo", cache_dir=river_cache, device="cpu", dtype="float32", **options).river as river:
        chat = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}]
        model = river._model
        inputs = river.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        report = river.report()
        with river.using(mode="backbone"):
            assert torch.equal(found, model.generate(**inputs, max_new_tokens=40, do_sample=False))
    assert report["tokens_per_backbone_pass"] > 3
    assert report["peak_device_bytes"] <= report["budget_bytes"]
