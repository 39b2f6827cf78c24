"""What a loaded model computes is what transformers computes: bit for bit on the backbone, within 1e-5 on the river."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Reference, budget_for, logits_of_steps, poison_slots, tokens
from transformers import DynamicCache, PreTrainedModel

DECODE_STEPS = 12
PROMPTS = (6, 9, 17)
"""Below, across and well beyond a sliding window of 8."""
TOLERANCE = 1e-5


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [True] * len(expected)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("resident", ["all", "one"])
def test_backbone_is_bit_equal_to_transformers(
    family: str,
    resident: str,
    checkpoint: Callable[..., Path],
    plain: Callable[[str], PreTrainedModel],
    open_river: Callable[..., Any],
) -> None:
    options: dict[str, Any] = {"mode": "backbone"}
    if resident == "one":
        options["budget"] = budget_for(checkpoint(family), 1, **options)
    model = open_river(family, **options)
    layers = model.river.num_layers
    placement = model.river.placement
    assert placement.resident_layers == tuple(range(layers if resident == "all" else 1))
    assert placement.streamed_layers == tuple(range(len(placement.resident_layers), layers))
    poison_slots(model)
    for prompt in PROMPTS:
        ids = tokens(prompt + DECODE_STEPS, seed=prompt)
        expected = logits_of_steps(plain(family), ids, prompt, DynamicCache(config=plain(family).config))
        assert_same_bits(logits_of_steps(model, ids, prompt, model.river.new_cache()), expected)
        assert_same_bits(logits_of_steps(model, ids, prompt, DynamicCache(config=model.config)), expected)
    assert {record.depth for record in model.river.trace.records} == {layers}
    streamed = sum(record.bytes_streamed for record in model.river.trace.records)
    assert (streamed > 0) == (resident == "one")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_fixed_depth_is_the_dequantized_model_above_it(
    family: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"mode": "exit", "also_modes": ("quantized",)}
    model = open_river(family, budget=budget_for(checkpoint(family), 1, **options), **options)
    assert len(model.river.placement.streamed_layers) == model.river.num_layers - 1
    poison_slots(model)
    reference = Reference(checkpoint(family))
    prompt, steps = 11, 4
    ids = tokens(prompt + steps)
    outputs = []
    for depth in range(model.river.num_layers + 1):
        with model.river.using(mode=f"fixed:{depth}"):
            found = logits_of_steps(model, ids, prompt, model.river.new_cache())
        expected = logits_of_steps(reference.at(depth), ids, prompt, DynamicCache(config=model.config))
        assert_close(found, expected)
        outputs.append(torch.cat(found, dim=1))
    assert {record.depth for record in model.river.trace.records} == set(range(model.river.num_layers + 1))
    # Each depth computes something else, or this test would compare nothing.
    assert min((a - b).abs().max().item() for a, b in pairwise(outputs)) > 100 * TOLERANCE
    with model.river.using(mode="quantized"):
        assert_same_bits([outputs[0]], [torch.cat(logits_of_steps(model, ids, prompt, model.river.new_cache()), dim=1)])


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_a_model_loaded_for_one_depth_keeps_only_its_parts(
    depth: int, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    model = open_river("llama", mode=f"fixed:{depth}")
    assert model.river.placement.resident_layers == tuple(range(depth))
    assert model.river.placement.river_layers == tuple(range(depth, 5))
    ids = tokens(15)
    found = logits_of_steps(model, ids, 11, model.river.new_cache())
    assert_close(found, logits_of_steps(Reference(checkpoint("llama")).at(depth), ids, 11, DynamicCache()))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_tau_above_one_never_leaves_and_minus_one_leaves_at_once(
    family: str, plain: Callable[[str], PreTrainedModel], open_river: Callable[..., Any]
) -> None:
    ids = tokens(14)
    expected = logits_of_steps(plain(family), ids, 9, DynamicCache(config=plain(family).config))
    for min_exit in (1, 2):
        model = open_river(family, mode="exit", tau=1.01, min_exit=min_exit)
        assert_same_bits(logits_of_steps(model, ids, 9, model.river.new_cache()), expected)
        last = model.river.trace.records[-1]
        assert last.depth == model.river.num_layers
        assert len(last.signals) == model.river.num_layers - min_exit
        model.river.trace.clear()
        with model.river.using(tau=-1):
            left = logits_of_steps(model, ids, 9, model.river.new_cache())
        assert {record.depth for record in model.river.trace.records} == {min_exit}
        with model.river.using(mode=f"fixed:{min_exit}"):
            assert_same_bits(left, logits_of_steps(model, ids, 9, model.river.new_cache()))
        assert not torch.equal(left[0], expected[0])


def test_an_exit_is_taken_after_the_layer_whose_signal_is_over_tau(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=1.01)
    ids = tokens(12)
    logits_of_steps(model, ids, 12, model.river.new_cache())
    signals = model.river.trace.records[-1].signals
    for tau in (-1.0, 0.3, 0.5, 0.7, 0.9):
        with model.river.using(tau=tau):
            logits_of_steps(model, ids, 12, model.river.new_cache())
        record = model.river.trace.records[-1]
        depth = next((index + 1 for index, signal in enumerate(signals) if signal > tau), 5)
        assert (record.depth, record.signals) == (depth, signals[:depth])


def test_the_signal_is_the_smallest_cosine_over_the_tokens(
    plain: Callable[[str], PreTrainedModel], open_river: Callable[..., Any]
) -> None:
    model = open_river("qwen3", mode="exit", tau=1.01)
    ids = tokens(10)
    logits_of_steps(model, ids, 10, model.river.new_cache())
    with torch.no_grad():
        states = plain("qwen3").model(ids, output_hidden_states=True).hidden_states
    expected = [torch.nn.functional.cosine_similarity(states[i], states[i + 1], dim=-1).min().item() for i in range(4)]
    assert model.river.trace.records[-1].signals == pytest.approx(expected, abs=1e-6)
