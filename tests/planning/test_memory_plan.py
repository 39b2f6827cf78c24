"""Plans without weights, and the faults that other estimators are known for (acceptance 3 and 7)."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from policies.drafting import TYPICAL_DRAFT, TYPICAL_TOKENS_A_CHECK
from river_offload.cli.mem_report import plan_report
from river_offload.config import QuantConfig, RiverConfig
from river_offload.errors import UsageError
from river_offload.memory.categories import CATEGORIES
from river_offload.planning.memory_plan import MemoryPlan, plan_memory
from river_offload.planning.shapes import builtin_names
from river_offload.store.ring import RING_BYTES

GIB = 1 << 30
LAYERS, HIDDEN, VOCAB, MLP = 32, 4096, 128256, 14336  # Llama-3.1-8B
KV_HEADS, HEADS, HEAD_DIM = 8, 32, 128


def plan_of(model: str = "llama-3.1-8b", **options: object) -> MemoryPlan:
    return plan_memory(RiverConfig.from_options(**{"model": model, "budget": "64GiB", "device": "cpu"} | options))


@pytest.fixture(scope="module")
def quantized() -> MemoryPlan:
    return plan_of(mode="quantized", context=8192)


def test_the_head_is_counted(quantized: MemoryPlan) -> None:
    assert quantized.categories["head"] == quantized.categories["embedding"] == VOCAB * HIDDEN * 2


def test_4_bits_have_scales_and_leave_the_embedding_alone(quantized: MemoryPlan) -> None:
    weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * MLP)
    assert quantized.categories["river_packed"] == weights // 2
    assert quantized.categories["river_scales"] == quantized.categories["river_zeros"] == weights // 64 * 2


def test_the_cache_has_key_value_heads_and_does_not_double(quantized: MemoryPlan) -> None:
    assert quantized.categories["kv"] == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2 * 8192


def test_logits_are_those_of_the_last_position(quantized: MemoryPlan) -> None:
    transient_bytes = quantized.placement.terms["transient"]
    assert transient_bytes < 8192 * VOCAB * 4 / 3


@pytest.mark.parametrize("model", builtin_names())
def test_every_built_in_shape_can_be_planned(model: str) -> None:
    plan = plan_of(model, context=4096)
    assert plan.fits and set(plan.categories) == set(CATEGORIES)
    assert plan.peak_device_bytes == sum(plan.categories.values()) <= plan.budget_bytes
    assert json.loads(json.dumps(plan.as_json()))["peak_device_bytes"] == plan.peak_device_bytes
    assert plan.speed.seconds > 0


def test_the_speed_of_a_mode_that_drafts_is_that_of_rounds() -> None:
    """A draft is a token that leaves after the resident layers, a check nearly a token of the backbone."""
    options = {"model": "llama-3.2-1b", "context": 1024, "budget": "1800MiB"}
    plan, gated = plan_of(**options), plan_of(mode="gated", **options)
    assert plan.fits and plan.placement.streamed_layers and plan.placement.resident_layers
    resident, layers = len(plan.placement.resident_layers), plan.facts.structure.num_layers
    draft, backbone = plan_of(mode=f"fixed:{resident}", **options).speed, plan_of(mode="backbone", **options).speed
    assert not (draft.draft or backbone.draft)
    round_s = plan.speed.seconds * TYPICAL_TOKENS_A_CHECK
    assert 0.5 * backbone.seconds < round_s - TYPICAL_DRAFT * draft.seconds < 1.5 * backbone.seconds
    assert plan.speed.seconds < 0.5 * backbone.seconds
    assert gated.placement.resident_layers == plan.placement.resident_layers and gated.speed == plan.speed
    found = plan.as_json()
    speed = found["seconds_per_token"]
    assert (found["mode"], speed["draft"], speed["tokens_per_check"]) == ("lossless", 16, 8.2)
    assert speed["mean_depth"] == pytest.approx((TYPICAL_DRAFT * resident + layers) / TYPICAL_TOKENS_A_CHECK)
    speed = plan_of(mode="gated", gate=0.0, **options).as_json()["seconds_per_token"]  # no checks
    assert (speed["draft"], speed["tokens_per_check"], speed["mean_depth"]) == (None, None, resident)
    assert speed["simulated"] == pytest.approx(draft.seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("lossless", "(assumed) at 8.2 tokens a check of 16 drafted"),
        ("exit", "(assumed) at a mean depth of 3.0"),
        ("backbone", "(assumed)"),
    ],
)
def test_the_line_of_the_speed_says_what_is_assumed(mode: str, said: str) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    plan_report(plan_of("llama-3.2-1b", mode=mode, context=1024).as_json(), console)
    (line,) = (line for line in console.export_text().splitlines() if line.startswith("speed"))
    assert line.rstrip().endswith(said)


@pytest.mark.parametrize("mode", [None, "gated", "backbone", "fixed:2"])
def test_a_mean_depth_is_of_mode_exit(mode: str | None) -> None:
    config = RiverConfig.from_options(model="llama-3.2-1b", budget="8GiB", device="cpu", mode=mode)
    with pytest.raises(UsageError, match=f"mean_depth has no effect in mode {mode or 'lossless'}: .* mode exit"):
        plan_memory(config, mean_depth=4.0)


def test_a_mean_depth_spreads_the_depths_of_mode_exit() -> None:
    config = RiverConfig.from_options(model="llama-3.2-1b", budget="8GiB", device="cpu", mode="exit")
    assert plan_memory(config, mean_depth=4.0).speed.mean_depth == pytest.approx(4.0, rel=0.1)


def test_what_a_refusal_says_would_fit_fits() -> None:
    config = RiverConfig.from_options(model="llama-3.2-1b", budget="1MiB", device="cpu", context=8192)
    hopeless = plan_memory(config).remedies
    assert hopeless is not None
    assert (hopeless.largest_context, hopeless.bits, hopeless.head_bits, hopeless.kv_bits) == (None,) * 4
    config = replace(config, budget=hopeless.needed_bytes - (60 << 20))
    refused = plan_memory(config)
    remedies = refused.remedies
    assert not refused.fits and remedies is not None
    assert plan_memory(replace(config, budget=remedies.needed_bytes)).fits
    assert not plan_memory(replace(config, budget=remedies.needed_bytes - 1)).fits
    assert remedies.largest_context is not None
    assert plan_memory(replace(config, context=remedies.largest_context)).fits
    assert not plan_memory(replace(config, context=remedies.largest_context + 8192 // 64)).fits
    assert remedies.bits is not None
    assert plan_memory(replace(config, quant=QuantConfig(bits=remedies.bits))).fits
    assert remedies.kv_bits is not None
    assert plan_memory(replace(config, kv_bits=remedies.kv_bits)).fits
    assert remedies.kv_tier == "host"
    away = plan_memory(replace(config, kv_tier="host"))
    assert away.fits
    # What rests elsewhere is paid for with every token.
    assert away.speed.seconds > plan_memory(replace(config, budget=away.peak_device_bytes * 2)).speed.seconds


def test_exit_codes_and_json_of_the_command() -> None:
    for budget, code in (("8GiB", 0), ("600MiB", 3)):
        command = ["plan", "llama-3.2-1b", "--budget", budget, "--context", "1k", "--device", "cpu", "--json"]
        done = subprocess.run(
            [sys.executable, "-c", "from river_offload.cli.mem_app import main; main()", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        found = json.loads(done.stdout)
        assert (found["fits"], found["context"], found["refusal"] is None) == (code == 0, 1024, code == 0)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 1.5 * GIB


def test_a_host_budget_holds_layers_beside_keys_values_and_states() -> None:
    budget_bytes = 6 * GIB
    plan = plan_of(
        device="cuda", budget="8GiB", host_budget=budget_bytes, kv_tier="host", context=32768, mode="backbone"
    )
    layer_bytes, pinned_bytes = plan.placement.slot_bytes, plan.host.pinned_bytes + plan.host.pageable_bytes
    assert plan.placement.kv_host_bytes == 4 * GIB
    assert budget_bytes - layer_bytes - RING_BYTES < pinned_bytes <= budget_bytes
    assert 0 < len(plan.held_layers) < len(plan.placement.streamed_layers)
