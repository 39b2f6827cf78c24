"""What fits loads, what does not is refused with the smallest budget that works, and what cannot work says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import QUANT, budget_for, load_tiny, logits_of_steps, plain_model, tokens
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from river_offload.errors import BudgetError, UsageError
from river_offload.memory.storages import StorageMeter
from river_offload.quant.linear import RiverLinear

CONTEXT = 64


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"mode": "exit"}),
        ("llama", {"mode": "backbone"}),
        ("llama", {"mode": "quantized"}),
        ("llama", {"mode": "fixed:3"}),
        ("llama", {"mode": "exit", "head_bits": 8}),
        ("mistral", {"mode": "exit", "slots": 1}),
        ("gemma3", {"mode": "exit", "also_modes": ("quantized",)}),
        ("phi3", {"mode": "exit", "batch": 3}),
    ],
)
def test_the_needed_bytes_of_a_refusal_are_exact_and_enough(
    family: str, options: dict[str, Any], checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    with pytest.raises(BudgetError) as refused:
        open_river(family, **options, budget=1)
    needed_bytes = refused.value.needed_bytes
    assert sum(refused.value.terms.values()) == needed_bytes
    with pytest.raises(BudgetError) as again:
        open_river(family, **options, budget=needed_bytes - 1)
    assert again.value.needed_bytes == needed_bytes
    model = open_river(family, **options, budget=needed_bytes)
    rows = options.get("batch", 1)
    for prompt in (1, 20, CONTEXT - 1):
        with StorageMeter() as meter:
            held_bytes = model.river.device_bytes()
            ids = tokens(prompt, rows=rows)
            mask = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=CONTEXT - prompt, do_sample=False)
        assert output.shape == (rows, CONTEXT)
        report = model.river.report()
        assert 0 < report["peak_device_bytes"] <= report["budget_bytes"] == needed_bytes
        # Everything that generate allocated, forward passes or not, counted from outside.
        assert held_bytes + meter.peak_bytes <= needed_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_budget_up_to_the_whole_model_is_kept(
    family: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    directory = checkpoint(family)
    resident_layers = []
    for resident in range(0, 6, 2):
        model = open_river(family, budget=budget_for(directory, resident))
        for prompt in (30, CONTEXT - 2):
            model.generate(tokens(prompt), max_new_tokens=CONTEXT - prompt, do_sample=False)
            report = model.river.report()
            assert report["peak_device_bytes"] <= report["budget_bytes"]
            assert model.river.device_bytes() < report["peak_device_bytes"]
        resident_layers.append(report["placement"]["resident_layers"])
    assert resident_layers == sorted(resident_layers)
    assert (resident_layers[0], resident_layers[-1]) == (0, model.river.num_layers)


def test_a_refusal_names_the_largest_term_and_what_helps(open_river: Callable[..., Any]) -> None:
    with pytest.raises(BudgetError, match=r"a budget of 1 B .1 bytes.: .* most of it \w+ .* What would help: "):
        open_river("llama", budget=1)
    with pytest.raises(BudgetError, match=r"a smaller context or batch"):
        open_river("llama", budget=1, context=5000)


def test_without_a_budget_the_report_says_where_the_figure_is_from(
    open_river: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_river("llama", budget=None)
    assert "less 10%" in model.river.report()["budget_source"]
    assert model.river.placement.budget_bytes > 1 << 20
    assert open_river("llama", budget="1GiB").river.report()["budget_source"] == "given"


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_tied_head_is_the_embedding_itself(family: str, open_river: Callable[..., Any]) -> None:
    model = open_river(family)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.river.placement.terms["head"] == 0


def test_an_untied_embedding_moves_to_disk_when_the_budget_is_small(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    small = open_river("llama", mode="quantized", budget=budget_for(checkpoint("llama"), 0, mode="quantized"))
    assert small.river.placement.embed_tier == "disk"
    assert small.river.placement.terms["embedding"] == 0
    large = open_river("llama", mode="quantized")
    assert large.river.placement.embed_tier == "device"
    assert large.river.device_bytes() - small.river.device_bytes() == large.model.embed_tokens.weight.nbytes
    ids = tokens(14)
    assert torch.equal(
        *(torch.cat(logits_of_steps(model, ids, 9, model.river.new_cache()), 1) for model in (small, large))
    )
    assert small.device == torch.device("cpu")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_head(bits: int, checkpoint: Callable[..., Path], open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="backbone", head_bits=bits)
    head = model.get_output_embeddings()
    assert isinstance(head, RiverLinear)
    plain = plain_model(checkpoint("llama"))
    plain.lm_head.weight.data = RiverLinear.quantize(
        plain.lm_head.weight.data, bits=bits, group=QUANT.group_size
    ).dequantize()
    ids = tokens(14)
    expected = logits_of_steps(plain, ids, 9, DynamicCache())
    for mine, theirs in zip(logits_of_steps(model, ids, 9, model.river.new_cache()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert model.river.placement.terms["head"] == head.nbytes < plain.lm_head.weight.nbytes / 2


def test_a_head_that_cannot_be_quantized_is_refused(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match="head_bits=8 has no effect"):
        open_river("qwen3", head_bits=8)
    odd = checkpoint("llama", hidden_size=40)
    with pytest.raises(UsageError, match="head_bits=8 is not possible"):
        open_river(odd, head_bits=8)


def test_a_matrix_that_suits_no_group_stays_whole_and_is_named(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    odd = checkpoint("llama", hidden_size=40)
    with pytest.warns(UserWarning, match=r"self_attn\.q_proj"):
        model = open_river(odd, mode="quantized")
    layer = model.model.layers[0].river
    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert isinstance(layer.self_attn.o_proj, RiverLinear)
    assert model.generate(tokens(5), max_new_tokens=3, do_sample=False).shape == (1, 8)


@pytest.mark.parametrize("resident", ["all", "one"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_bfloat16_checkpoint_computes_in_float32(
    family: str, resident: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    """gemma3 scales its embedding: an untied one, resting on disk in bfloat16, must be scaled in float32."""
    directory = checkpoint(family, dtype=torch.bfloat16, tie_word_embeddings=False)
    options: dict[str, Any] = {"mode": "backbone", "dtype": "float32"}
    if resident == "one":
        options["budget"] = budget_for(directory, 1, **options)
    model = open_river(directory, **options)
    assert model.dtype == torch.float32
    assert model.river.placement.embed_tier == ("disk" if resident == "one" else "device")
    assert (model.river.placement.terms["staging"] > 0) == (resident == "one")  # what files are read through
    plain = plain_model(directory)
    ids = tokens(15)
    expected = logits_of_steps(plain, ids, 9, DynamicCache(config=plain.config))
    for mine, theirs in zip(logits_of_steps(model, ids, 9, model.river.new_cache()), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_bfloat16_checkpoint_computes_in_bfloat16_by_default(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    directory = checkpoint("llama", dtype=torch.bfloat16, tie_word_embeddings=False)
    model = open_river(directory, mode="backbone", budget=budget_for(directory, 1, mode="backbone"))
    assert model.dtype == torch.bfloat16
    plain = plain_model(directory, torch.bfloat16)
    ids = tokens(15)
    expected = logits_of_steps(plain, ids, 9, DynamicCache())
    for mine, theirs in zip(logits_of_steps(model, ids, 9, model.river.new_cache()), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_is_left_on_meta_and_rotary_tables_are_computed(
    plain: Callable[[str], PreTrainedModel], checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 1))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.equal(model.model.rotary_emb.inv_freq, plain("llama").model.rotary_emb.inv_freq)


def test_a_built_river_is_read_back_not_built_again(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_river("llama", cache_dir=tmp_path)
    monkeypatch.setattr("river_offload.parts.quantize_layer", lambda *_: pytest.fail("quantized a second time"))
    second = open_river("llama", cache_dir=tmp_path)
    ids = tokens(12)
    with first.river.using(mode="fixed:1"), second.river.using(mode="fixed:1"):
        outputs = [torch.cat(logits_of_steps(m, ids, 9, m.river.new_cache()), dim=1) for m in (first, second)]
    assert torch.equal(*outputs)


def test_a_composite_checkpoint_gives_its_language_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The text half of a multimodal model: its tensors are found under their prefix, the rest is noted."""
    from safetensors.torch import load_file, save_file

    directory = checkpoint("gemma3")
    tensors = load_file(directory / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.patch.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
        )
    )
    model = load_tiny(tmp_path, mode="backbone")
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert any("vision_tower" in note for note in model.river.notes)
    ids = tokens(12)
    plain = plain_model(directory)
    expected = logits_of_steps(plain, ids, 9, DynamicCache(config=plain.config))
    for mine, theirs in zip(logits_of_steps(model, ids, 9, model.river.new_cache()), expected, strict=True):
        assert torch.equal(mine, theirs)
    model.river.close()
