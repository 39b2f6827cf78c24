"""KV caches of every kind under real models: the families, the modes, generate, the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, budget_for, tokens
from transformers import DynamicCache

from policies import link_order
from river_offload.errors import BudgetError, CacheError, UsageError
from river_offload.kv import memory
from river_offload.kv.resting import RestingLayer

KINDS = [(16, "host"), (8, "device"), (4, "device"), (8, "host"), (4, "host")]
CONTEXT = 200
WINDOWS_ONLY = "mistral"
WITH_FULL_ATTENTION = [family for family in FAMILIES if family != WINDOWS_ONLY]

Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny caches on the host, too, are brought in ahead."""
    monkeypatch.setattr(link_order, "AHEAD_FROM_BYTES", 1)


def lengths(cache: Any) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


def generated(model: Any, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    return found


@pytest.mark.parametrize("family", WITH_FULL_ATTENTION)
@pytest.mark.parametrize(("bits", "tier"), [(16, "host"), (8, "device"), (4, "host")])
def test_every_family_generates_in_every_mode(family: str, bits: int, tier: str, open_river: Open) -> None:
    kind = {"kv_bits": bits, "kv_tier": tier}
    model = open_river(family, mode="exit", tau=0.6, also_modes=("quantized",), context=CONTEXT, **kind)
    for mode in ("backbone", "exit", "quantized"):
        with model.river.using(mode=mode):
            cache = model.river.new_cache()
            first = generated(model, tokens(130), 2, past_key_values=cache)
            assert lengths(cache) == [131] * model.river.num_layers
            second = generated(model, first, 2, past_key_values=cache)
            assert lengths(cache) == [133] * model.river.num_layers
            assert torch.equal(second, generated(model, tokens(130), 4))
    resting = [layer for layer in cache.layers if isinstance(layer, RestingLayer)]
    assert all(layer._kind.bits == bits and layer._kind.tier == tier for layer in resting)
    assert len(resting) == (2 if family == "gemma3" else model.river.num_layers)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
@pytest.mark.parametrize("mode", ["backbone", "exit"])
def test_the_host_tier_equals_the_device_tier_to_the_bit(family: str, mode: str, open_river: Open) -> None:
    """Also in a second call on the same cache, and after tokens were given back and written anew."""
    ids = tokens(CONTEXT, seed=3)
    answers = []
    for tier in ("device", "host"):
        model = open_river(family, mode=mode, tau=0.6, context=CONTEXT, kv_tier=tier)
        cache = model.river.new_cache()
        with torch.no_grad():
            found = [model(ids[:, :5], past_key_values=cache, use_cache=True).logits]
            cache.crop(-2)  # within the window: what a window gives back beyond that is another matter
            found += [model(ids[:, 3:90], past_key_values=cache, use_cache=True).logits]
            found += [model(ids[:, 90:97], past_key_values=cache, use_cache=True).logits]
            found += [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(97, 100)]
        first = generated(model, ids[:, :110], 3, past_key_values=cache)
        second = generated(model, torch.cat([first, tokens(9, seed=8)], dim=1), 4, past_key_values=cache)
        answers.append([*found, first, second])
    for device, host in zip(*answers, strict=True):
        assert torch.equal(device, host)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_few_bits_are_the_same_on_either_tier(bits: int, open_river: Open) -> None:
    outputs = []
    for tier in ("device", "host"):
        model = open_river("qwen3", mode="backbone", context=CONTEXT, kv_bits=bits, kv_tier=tier)
        cache = model.river.new_cache()
        with torch.no_grad():
            steps = [model(tokens(150)[:, i : i + 50], past_key_values=cache).logits for i in (0, 50, 100)]
        outputs.append(torch.cat(steps, dim=1))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_change_the_logits_a_little_and_eight_less_than_four(
    bits: int, open_river: Open, plain: Callable[[str], Any]
) -> None:
    model, cache = open_river("llama", mode="backbone", context=CONTEXT, kv_bits=bits), None
    cache, ids = model.river.new_cache(), tokens(160)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        found = model(ids[:, 150:], past_key_values=cache).logits
        expected = plain("llama")(ids).logits[:, 150:]
    off = ((found - expected).norm() / expected.norm()).item()
    assert 0 < off < {8: 0.01, 4: 0.15}[bits]


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("bits", "tier"), KINDS)
def test_tokens_given_back_and_written_anew_equal_never_having_been_there(
    family: str, bits: int, tier: str, open_river: Open
) -> None:
    model = open_river(family, mode="exit", tau=0.6, context=CONTEXT, kv_bits=bits, kv_tier=tier)
    ids, refused = tokens(150), tokens(9, seed=9)
    found = []
    for disturbed in (True, False):
        cache = model.river.new_cache()
        with torch.no_grad():
            model(ids[:, :130], past_key_values=cache)
            if disturbed:
                model(refused, past_key_values=cache)
                cache.crop(-9)
            found.append(model(ids[:, 130:], past_key_values=cache).logits)
        assert lengths(cache) == [150] * model.river.num_layers
    assert torch.equal(*found)


@pytest.mark.parametrize(("bits", "tier"), KINDS)
def test_beams_batches_and_padding_work(bits: int, tier: str, open_river: Open) -> None:
    model = open_river("llama", mode="backbone", context=CONTEXT, batch=4, kv_bits=bits, kv_tier=tier)
    expected = open_river("llama", mode="backbone", context=CONTEXT, batch=4)
    prompt, options = tokens(20, rows=2), {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    # So short a text rests in full precision in every kind.
    outputs = [each.generate(prompt, attention_mask=mask, **options) for each in (model, expected)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("bits", "tier"), KINDS)
def test_an_interrupt_leaves_the_cache_as_it_was(
    bits: int, tier: str, open_river: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_river("llama", mode="backbone", context=CONTEXT, kv_bits=bits, kv_tier=tier)
    caches = [model.river.new_cache(), model.river.new_cache()]
    ids, lost = tokens(190), tokens(60, seed=2)
    found = []
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :120], past_key_values=cache)
            if cache is caches[0]:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(model.get_decoder().layers[3].backbone.mlp, "forward", _interrupt)
                    model(lost, past_key_values=cache)
                assert lengths(cache) == [120] * model.river.num_layers
            found.append(model(ids[:, 120:], past_key_values=cache).logits)
    assert torch.equal(*found)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("family", "bits", "tier"),
    [("llama", 16, "device"), *(("llama", *kind) for kind in KINDS), ("gemma3", 8, "host"), ("phi3", 4, "device")],
)
def test_the_peak_stays_under_the_plan_and_the_cache_is_what_was_planned(
    family: str, bits: int, tier: str, checkpoint: Callable[..., Path], open_river: Open
) -> None:
    options: dict[str, Any] = {"mode": "exit", "context": CONTEXT, "kv_bits": bits, "kv_tier": tier}
    model = open_river(family, budget=budget_for(checkpoint(family), 1, **options), tau=0.6, **options)
    cache = model.river.new_cache()
    generated(model, tokens(150), 50, past_key_values=cache)
    report = model.river.report()
    assert report["peak_device_bytes"] <= sum(report["planned_bytes"].values()) <= report["budget_bytes"]
    held = {tensor.data_ptr(): tensor.nbytes for layer in cache.layers for tensor in _on_host(layer)}
    assert sum(held.values()) == report["kv"]["planned_host_bytes"] == model.river.placement.kv_host_bytes
    assert (report["kv"]["bits"], report["kv"]["tier"]) == (bits, tier)
    assert bool(held) == (tier == "host")


def _on_host(layer: Any) -> list[torch.Tensor]:
    return list(layer.host_tensors()) if isinstance(layer, RestingLayer) else []


def test_fewer_bits_and_the_host_leave_room_for_layers(checkpoint: Callable[..., Path]) -> None:
    """Long enough a context, or many enough layers: here the cache of a layer is what weighs."""
    directory = checkpoint("llama", max_position_embeddings=8192, num_hidden_layers=12)
    needed = {
        kind: budget_for(directory, 0, mode="backbone", context=8192, kv_bits=kind[0], kv_tier=kind[1])
        for kind in [(16, "device"), (8, "device"), (4, "device"), (16, "host"), (4, "host")]
    }
    assert needed[16, "host"] < needed[4, "device"] < needed[8, "device"] < needed[16, "device"]
    assert needed[4, "host"] < needed[4, "device"]  # but no less than 16 bits there: recent tokens stay on the device


def test_what_cannot_combine_is_refused_by_name(open_river: Open) -> None:
    model = open_river("llama", mode="backbone", context=CONTEXT, kv_bits=8)
    for options, name in (
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"past_key_values": DynamicCache()}, "DynamicCache"),
    ):
        with pytest.raises(UsageError, match=f"{name}.* does not go with kv_bits=8, kv_tier=device"):
            generated(model, tokens(5), 2, **options)
    for kind in ({"kv_bits": 8}, {"kv_tier": "host"}):
        with pytest.raises(UsageError, match="has no effect: attention slides in every layer"):
            open_river(WINDOWS_ONLY, **kind)


def test_a_full_disk_is_refused_when_loading(open_river: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CacheError, match=r"cannot be had .* 10 are free.*cache_dir"):
        open_river("llama", kv_tier="host")


def test_a_budget_that_is_refused_still_works_when_given(checkpoint: Callable[..., Path], open_river: Open) -> None:
    options: dict[str, Any] = {"mode": "backbone", "context": CONTEXT, "kv_bits": 4, "kv_tier": "host"}
    needed_bytes = budget_for(checkpoint("qwen2"), 0, **options)
    with pytest.raises(BudgetError):
        open_river("qwen2", budget=needed_bytes - 1, **options)
    generated(open_river("qwen2", budget=needed_bytes, **options), tokens(30), 3)
