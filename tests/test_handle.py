"""The handle of a loaded model: modes, report, trace, memory, and what a model in pieces does not do."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import both, budget_for, load_tiny, tokens
from transformers.generation.streamers import BaseStreamer

from river_offload.errors import LinkError, ModeError, RiverError, UsageError
from river_offload.memory.storages import StorageMeter
from river_offload.trace import Trace

NEW = 10


def test_the_model_says_where_and_what_it_is(pair: Callable[..., Any]) -> None:
    model, plain = pair()
    assert type(model) is type(plain)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.river.placement.embed_tier == "disk"
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.state_dict(),
        lambda model: model.save_pretrained("nowhere"),
        lambda model: model.push_to_hub("nobody/nothing"),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta"),
        lambda model: model.half(),
        lambda model: model.cuda(),
    ],
)
def test_a_model_in_pieces_is_not_handed_out(call: Callable[[Any], Any], pair: Callable[..., Any]) -> None:
    model, _ = pair()
    with pytest.raises(UsageError, match="not possible on a loaded river model"):
        call(model)
    assert model.to("cpu") is model.to(device="cpu", dtype=torch.float32) is model
    assert model.generate(tokens(5), max_new_tokens=2, do_sample=False).shape == (1, 7)


def test_using_puts_the_old_settings_back(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=0.6, also_modes=("quantized",))
    with pytest.raises(KeyError), model.river.using(mode="fixed:2"):
        assert model.river.mode == "fixed:2"
        with model.river.using(mode="exit", tau=0.9):
            assert (model.river.mode, model.river.tau) == ("exit", 0.9)
        assert (model.river.mode, model.river.tau) == ("fixed:2", 0.6)
        raise KeyError
    assert (model.river.mode, model.river.tau) == ("exit", 0.6)
    with (
        pytest.raises(UsageError, match="tau has no effect in mode backbone"),
        model.river.using(mode="backbone", tau=1),
    ):
        pass
    assert (model.river.mode, model.river.tau) == ("exit", 0.6)
    model.river.mode = "quantized"
    model.generate(tokens(5), max_new_tokens=3, do_sample=False)
    assert model.river.report()["depths"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("loaded", "asked", "message"),
    [
        ("exit", "quantized", r"mode quantized needs river layers 0\.\.0, which mode exit did not build"),
        ("backbone", "fixed:3", r"needs river layers 3\.\.4, which mode backbone"),
        ("quantized", "fixed:2", r"needs backbone layers 0\.\.1, which mode quantized"),
        ("fixed:2", "exit", r"needs backbone layers 2\.\.4, which mode fixed:2"),
    ],
)
def test_a_mode_that_was_not_built_is_refused_by_its_layers(
    loaded: str, asked: str, message: str, open_river: Callable[..., Any]
) -> None:
    model = open_river("llama", mode=loaded)
    with pytest.raises(ModeError, match=message) as refused:
        model.river.mode = asked
    assert f"also_modes=('{asked}',)" in str(refused.value)
    assert model.river.mode == loaded
    both_modes = open_river("llama", mode=loaded, also_modes=(asked,))
    both_modes.river.mode = asked
    assert both_modes.generate(tokens(5), max_new_tokens=3, do_sample=False).shape == (1, 8)


def test_forced_depths_are_gone_to_and_given_back(pair: Callable[..., Any]) -> None:
    model, _ = pair(mode="exit", tau=0.6)
    layers = model.river.num_layers
    model.generate(tokens(6), max_new_tokens=2, do_sample=False)
    asked = [layers, 1, 3, 2, layers]
    with model.river.using(depths=asked):
        model.generate(tokens(6), max_new_tokens=len(asked), do_sample=False)
        with pytest.raises(UsageError, match=r"depths were given for 5 passages, this is number 6"):
            model.generate(tokens(6), max_new_tokens=1, do_sample=False)
    records = model.river.trace.records[2:]
    assert [record.depth for record in records] == asked
    # Measured as in mode exit, but no forecast may learn from signals that decide nothing.
    assert [len(record.signals) for record in records] == [layers - 1, 1, 3, 2, layers - 1]
    assert all(math.isnan(signal) for record in records for signal in record.signals)
    assert (model.river.mode, model.river.tau) == ("exit", 0.6)
    model.generate(tokens(6), max_new_tokens=2, do_sample=False)


def test_forced_depths_compute_what_the_fixed_mode_does(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", also_modes=("quantized",))
    for depth in (0, 2, model.river.num_layers):
        with model.river.using(mode=f"fixed:{depth}"):
            fixed = model(tokens(7)).logits
        with model.river.using(depths=[depth]):
            assert torch.equal(model(tokens(7)).logits, fixed)


def test_forced_depths_that_cannot_be_are_refused(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", min_exit=2)
    for depths, error, message in (
        ([1, 3], ModeError, r"depths 1\.\.3 needs river layers 1\.\.1, which mode exit did not build"),
        ([6], UsageError, r"depth 6 is forced on a model of 5 layers: use 0\.\.5"),
    ):
        with pytest.raises(error, match=message), model.river.using(depths=depths):
            pass
    with pytest.raises(UsageError, match="give one or the other"), model.river.using(depths=[3], tau=0.5):
        pass
    with model.river.using(depths=[3]):
        model.river.mode = "exit"  # whoever sets a mode means it
        model.generate(tokens(6), max_new_tokens=3, do_sample=False)


def test_the_report_accounts_for_the_last_generate(pair: Callable[..., Any]) -> None:
    model, _ = pair(mode="exit", tau=0.6, prefetch="none")
    model.generate(tokens(12), max_new_tokens=3, do_sample=False)
    model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
    report, records = model.river.report(), model.river.trace.records[-NEW:]
    layers = model.river.num_layers
    assert len(model.river.trace.records) == 3 + NEW
    assert (report["prompt_tokens"], report["new_tokens"], report["num_layers"]) == (9, NEW, layers)
    assert (report["mode"], report["tau"]) == ("exit", 0.6)
    assert report["depths"] == [record.depth for record in records]
    assert report["prefill_depth"] == records[0].depth
    assert report["mean_depth"] == pytest.approx(sum(record.depth for record in records[1:]) / (NEW - 1))
    layer_bytes = model.river.placement.slot_bytes
    # One layer is resident; in poisoned slots nothing survives from one pass to the next.
    assert report["bytes_streamed"] == sum(record.depth - 1 for record in records) * layer_bytes > 0
    assert set(report["seconds"]) == {"load", "prefill", "decode"}
    assert min(report["seconds"].values()) > 0
    assert report["tokens_per_s"] > 0
    assert report["wait_s"] > 0
    assert report["placement"] == {
        "resident_layers": 1,
        "streamed_layers": layers - 1,
        "slots": 2,
        "embed_tier": "disk",
        "prefill_chunk": None,
        "states_tier": "device",
    }
    assert report["prefill"] == {"policy": "exit", "backbone_from_tokens": None, "mode": "exit"}
    assert report["kernel"] in report["kernels"]["self_attn.q_proj"]["kernel"]
    assert all(reason for _, reason in report["kernels"]["mlp.up_proj"]["declined"].items())
    assert sum(report["planned_bytes"].values()) <= report["budget_bytes"]


def test_the_trace_has_a_record_of_every_passage(pair: Callable[..., Any], tmp_path: Path) -> None:
    model, _ = pair(mode="exit", tau=0.6, batch=2)
    model.generate(tokens(9, rows=2), max_new_tokens=4, do_sample=False)
    records = model.river.trace.records
    assert [record.path for record in records] == ["prefill", "decode", "decode", "decode"]
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert [(record.new_tokens, record.batch, record.cached_tokens) for record in records] == [
        (9, 2, 0),
        (1, 2, 9),
        (1, 2, 10),
        (1, 2, 11),
    ]
    for record in records:
        assert record.mode == "exit"
        left = record.depth < model.river.num_layers
        assert len(record.signals) == (record.depth if left else model.river.num_layers - 1)
        assert (record.signals[-1] > 0.6) == left
        assert all(signal <= 0.6 for signal in record.signals[:-1])
        assert record.seconds >= record.wait_s >= 0
    assert sum(record.seconds for record in records) <= sum(model.river.report()["seconds"].values())
    model.river.trace.write_jsonl(tmp_path / "trace.jsonl")
    assert Trace.read_jsonl(tmp_path / "trace.jsonl").records == records


def test_the_peak_is_what_real_storages_rise_to(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit")
    peaks = []
    for prompt in (40, 10, 40):
        gc.collect()
        held_bytes = model.river.device_bytes()
        with StorageMeter() as meter:
            model.generate(tokens(prompt), max_new_tokens=5, do_sample=False)
        peaks.append(model.river.report()["peak_device_bytes"])
        outside_bytes = held_bytes + meter.peak_bytes
        # generate itself holds ids and masks on top; a shorter prompt may be quoted what a longer one took before.
        assert peaks[-1] >= outside_bytes - 2048
    assert peaks[0] == peaks[2] <= outside_bytes
    assert model.river.device_bytes() == held_bytes


def test_held_bytes_are_the_planned_ones(pair: Callable[..., Any], open_river: Callable[..., Any]) -> None:
    for model in (pair(mode="exit")[0], open_river("gemma3"), open_river("phi3", mode="quantized")):
        terms = dict(model.river.placement.terms)
        del terms["kv"], terms["transient"], terms["loading"]
        assert model.river.device_bytes() == sum(terms.values())


def test_a_failed_read_leaves_the_model_usable(pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair()
    link = model.river._flow.store._link
    fetch, calls = link.fetch, []

    def failing(layer: int, slot: int, *, urgent: bool = False) -> None:
        calls.append(layer)
        if len(calls) == 6:
            raise LinkError("the disk is gone")
        fetch(layer, slot, urgent=urgent)

    monkeypatch.setattr(link, "fetch", failing)
    with pytest.raises(LinkError, match="the disk is gone"):
        model.generate(tokens(9), max_new_tokens=5, do_sample=False)
    assert len(model.river.trace.records) == 1  # the passage that failed has none
    found, expected = both((model, plain), tokens(9), max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)


def test_ctrl_c_leaves_the_model_usable(pair: Callable[..., Any]) -> None:
    model, plain = pair()

    class Interrupt(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens(9), max_new_tokens=5, do_sample=False, streamer=Interrupt())
    found, expected = both((model, plain), tokens(9), max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)


def test_a_closed_model_streams_no_more_and_gives_its_memory_back(checkpoint: Callable[..., Path]) -> None:
    model = load_tiny(checkpoint("llama"), budget=budget_for(checkpoint("llama"), 1))
    model.generate(tokens(9), max_new_tokens=2, do_sample=False)
    slots = model.river._flow.store._slots
    held_bytes, terms = model.river.device_bytes(), model.river.placement.terms
    with model.river:
        pass
    model.river.close()
    assert held_bytes - model.river.device_bytes() == terms["slots"] + terms["staging"]
    assert not slots._parameters  # nothing else holds the buffers
    with pytest.raises(RiverError, match="after close"):
        model.generate(tokens(9), max_new_tokens=2, do_sample=False)


def test_what_is_held_is_told_while_a_passage_is_under_way(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=0.6)
    river = model.river
    assert river.held() == {}
    seen: list[dict[str, int]] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda *_: seen.append(river.held()))
    model.generate(tokens(5), max_new_tokens=3, do_sample=False)
    hook.remove()
    resting_bytes = river.device_bytes()
    assert [sum(held.values()) - held["kv"] for held in seen] == [resting_bytes] * 3
    assert seen[0]["kv"] == 0 < seen[1]["kv"] == seen[2]["kv"]  # the prompt's passage allocates the cache
    after = river.held()
    assert sum(after.values()) > resting_bytes + after["kv"]
    assert sum(after.values()) <= river.report()["peak_device_bytes"]


def test_what_a_gpu_s_allocator_holds_beyond_is_unclaimed(
    open_river: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    river = open_river("llama", mode="backbone").river
    river.account.held = {"backbone": 100, "kv": 20}
    assert river.held() == {"backbone": 100, "kv": 20}
    monkeypatch.setattr(river, "_model", SimpleNamespace(device=torch.device("cuda", 0)))
    for allocated, unclaimed in ((150, 30), (90, 0)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _, allocated=allocated: allocated)
        assert river.held() == {"backbone": 100, "kv": 20, "unclaimed": unclaimed}
    monkeypatch.undo()
