"""From load to link: layers held in host memory, passages that leave instead of waiting, faults while it streams."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeRuntime, queue_copies
from families import both, budget_for, load_tiny, logits_of_steps, poison_slots, tokens

from river_offload import streaming
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.errors import LinkError, RiverError, UsageError
from river_offload.store import files, ring
from river_offload.store.layout import Layout
from river_offload.store.ring import CHUNK_BYTES, RING_BUFFERS, RING_BYTES
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier
from river_offload.streaming import layers_to_hold, open_cuda_link

SIZES = {2: 100, 3: 100, 4: 50}


@pytest.mark.parametrize(
    ("budget_bytes", "held"),
    [
        (250, [2, 3, 4]),
        (249, []),
        (0, []),
        (RING_BYTES + 100, [2, 3, 4]),
    ],
)
def test_host_memory_holds_all_layers_or_those_beside_the_ring(budget_bytes: int, held: list[int]) -> None:
    assert layers_to_hold(SIZES, budget_bytes) == held


def test_shallow_layers_go_first_when_not_all_fit() -> None:
    large = dict.fromkeys(range(2, 8), RING_BYTES)
    assert layers_to_hold(large, 3 * RING_BYTES + 5) == [2, 3]
    assert layers_to_hold(large, 5 * RING_BYTES) == [2, 3, 4, 5]


@pytest.mark.parametrize("budget", ["all", "half", "none"])
@pytest.mark.parametrize("limit", [1 << 40, 400_000])
def test_a_gpu_link_is_fed_from_host_memory_and_from_disk(
    budget: str, limit: int, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wiring of the GPU's tiers on a fake GPU, with a runtime that pins everything or only two layers."""
    for module in (streaming, ring):
        monkeypatch.setattr(module, "RING_BYTES", 0)  # or no layer of a tiny model would be worth holding
    files = Checkpoint.open(checkpoint("llama"))
    keys = [
        {name: name for name in files.entries if name.startswith(f"model.layers.{i}.") and "norm" not in name}
        for i in range(5)
    ]
    layouts = [Layout.of({name: files.entries[name].shape for name in layer}, torch.float32) for layer in keys]
    slots = Slots(2, layouts, torch.device("cpu"))
    cuda, runtime = FakeCuda(), FakeRuntime(limit)
    monkeypatch.setattr(cuda, "cudart", lambda: runtime, raising=False)
    queue_copies(cuda, monkeypatch)
    budget_bytes = {"all": 5, "half": 2, "none": 0}[budget] * layouts[0].nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it could not pin, and how much
        link, memory = open_cuda_link(
            range(5), DiskTier(files, keys, layouts), layouts, slots, torch.device("cpu"), budget_bytes, cuda=cuda
        )
        for layer in (0, 4, 1, 3, 2):
            link.fetch(layer, layer % 2)
            link.wait(layer % 2)
            cuda.drain()
            for name, parameter in slots.parameters(layer, layer % 2).items():
                assert torch.equal(parameter, files.read(name))
            link.release(layer % 2)
    ring_bytes = 0 if budget == "all" else RING_BUFFERS * CHUNK_BYTES
    assert memory.pinned_bytes + memory.pageable_bytes == budget_bytes + ring_bytes
    assert memory.pinned_bytes == sum(runtime.registered.values()) <= limit
    assert cuda.synchronized == 0
    link.close()
    link.close()
    files.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("prefetch", ["none", "next", "predicted"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kind_of_prefetch_changes_what_is_computed(
    prefetch: str, slots: int, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    options = {"mode": "exit", "tau": 0.6, "prefetch": prefetch, "slots": slots}
    streamed = open_river("llama", budget=budget_for(checkpoint("llama"), 1, **options), **options)
    resident = open_river("llama", **options)
    assert len(streamed.river.placement.streamed_layers) == 4
    ids = tokens(24)
    for poison in (False, True):
        if poison:
            poison_slots(streamed)
        found, expected = (logits_of_steps(m, ids, 12, m.river.new_cache()) for m in (streamed, resident))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    records = streamed.river.trace.records
    assert [r.depth for r in records] == [r.depth for r in resident.river.trace.records]
    assert [r.margin for r in records] == [r.margin for r in resident.river.trace.records]
    assert records[0].margin is None
    assert all(r.margin is not None and 0 <= r.margin <= 1 for r in records[1:13])
    assert records[13].margin is None  # another cache, another text
    assert all(r.wasted_bytes >= 0 and r.misses <= r.depth for r in records)


def test_a_record_knows_the_margin_of_the_token_it_continues_from(open_river: Callable[..., Any]) -> None:
    model = open_river("llama")
    first, *_ = logits_of_steps(model, tokens(13), 12, model.river.new_cache())
    likely = torch.softmax(first[0, -1], -1).topk(2).values
    assert model.river.trace.records[1].margin == pytest.approx((likely[0] - likely[1]).item(), abs=1e-6)


def test_a_passage_may_leave_instead_of_waiting(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"mode": "exit", "tau": 2.0, "min_exit": 2, "prefetch": "none", "on_miss": "exit"}
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 1, **options), **options)
    fixed = open_river("llama", mode="exit", also_modes=("quantized",))
    ids = tokens(14)
    poison_slots(model)
    found = logits_of_steps(model, ids, 10, model.river.new_cache())
    # Layer 1 is under min_exit: it is waited for. Layer 2 is never there.
    assert {record.depth for record in model.river.trace.records} == {2}
    assert {record.misses for record in model.river.trace.records} == {2}
    with fixed.river.using(mode="fixed:2"):
        expected = logits_of_steps(fixed, ids, 10, fixed.river.new_cache())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_what_is_there_in_time_is_not_left_for_the_river(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"mode": "exit", "tau": 2.0, "min_exit": 4, "slots": 4, "on_miss": "exit"}
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 1, **options), **options)
    logits_of_steps(model, tokens(20), 10, model.river.new_cache())
    assert {record.depth for record in model.river.trace.records[-5:]} == {5}
    report = model.river.report()
    assert report["host"] == {"pinned_bytes": 0, "pageable_bytes": 0}


def test_early_exits_in_the_steady_state_stream_nothing(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"mode": "fixed:1", "also_modes": ("exit",)}
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 1, **options), **options)
    logits_of_steps(model, tokens(30), 10, model.river.new_cache())
    steady = model.river.trace.records[5:]
    assert {(r.misses, r.wait_s) for r in steady} == {(0, 0.0)}
    assert sum(r.bytes_streamed for r in steady) == 0


def test_an_oracle_is_told_the_forced_depths_and_nothing_else(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    budget = budget_for(checkpoint("llama"), 1, slots=2)
    model = open_river("llama", budget=budget, prefetch="oracle", slots=2)
    depths, ids = (5, 1, 1, 2, 1), tokens(14)
    with pytest.raises(UsageError, match="prefetch=oracle knows no exits but forced ones"):
        model(ids)
    with model.river.using(depths=depths):
        assert model.river.store.pace is not None
        found = logits_of_steps(model, ids, 10, model.river.new_cache())
    records = model.river.trace.records
    assert [record.depth for record in records] == list(depths)
    # Once layer 1 is there, no passage needs another.
    assert records[-1].bytes_streamed == 0 and sum(record.misses for record in records[2:]) <= 1
    with pytest.raises(UsageError, match="prefetch=oracle"):
        model(ids)
    other = open_river("llama", budget=budget, prefetch="none", slots=2)
    with other.river.using(depths=depths):
        expected = logits_of_steps(other, ids, 10, other.river.new_cache())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_records_tell_how_long_the_link_was_copying(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    model = open_river("llama", mode="backbone", budget=budget_for(checkpoint("llama"), 1, mode="backbone"))
    logits_of_steps(model, tokens(14), 10, model.river.new_cache())
    records = model.river.trace.records
    assert all(record.copy_s is not None and record.copy_s > 0 for record in records)
    link_s = model.river.store.copy_s
    assert 0 < sum(record.copy_s for record in records) <= link_s
    resident = open_river("llama", mode="backbone")
    resident(tokens(14))
    assert [record.copy_s for record in resident.river.trace.records] == [0.0]


def test_a_limited_link_brings_no_more_than_it_may(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    limit = 2_000_000
    budget = budget_for(checkpoint("llama"), 1, mode="backbone")
    model = open_river("llama", mode="backbone", budget=budget, link_limit=limit)
    started_s = time.perf_counter()
    model(tokens(14))
    (record,) = model.river.trace.records
    landed_bytes = record.bytes_streamed - record.wasted_bytes
    assert 0 < landed_bytes <= limit * (time.perf_counter() - started_s)
    assert record.copy_s >= 0.9 * landed_bytes / limit
    model.river.close()  # ends at once, whatever is held back
    with pytest.raises(UsageError, match="link_limit has no effect: every layer fits"):
        open_river("llama", mode="backbone", link_limit=limit)


# Faults. After each the next generate works and computes what it should.


def break_reads(monkeypatch: pytest.MonkeyPatch, after: int, error: int | None) -> None:
    """From the n-th read on the disk fails, or has no more."""
    plain, calls = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) <= after:
            return plain(fd, buffers, offset)
        if error is None:
            return 0
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files.os, "preadv", preadv)


@pytest.mark.parametrize(
    ("error", "said"),
    [(errno.EIO, r"reading \d+ bytes at byte \d+ failed: Input/output error"), (None, "ends at byte")],
)
@pytest.mark.parametrize("after", [0, 3, 40])
def test_a_broken_disk_is_an_error_that_names_the_file_and_passes(
    after: int, error: int | None, said: str, pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = pair()
    with monkeypatch.context() as patch:
        break_reads(patch, after, error)
        with pytest.raises(LinkError, match=rf"model\.safetensors: {said}"):
            model.generate(tokens(9), max_new_tokens=9, do_sample=False)
    found, expected = both((model, plain), tokens(9), max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)


def test_ctrl_c_inside_a_layer_leaves_the_model_usable(
    pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch runs no closing hook then: the next passage clears up."""
    model, plain = pair(slots=1)
    for depth in (1, 3):
        with monkeypatch.context() as patch:

            def interrupt(*_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(model.model.layers[depth].backbone.mlp, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.generate(tokens(9), max_new_tokens=5, do_sample=False)
        found, expected = both((model, plain), tokens(9), max_new_tokens=5, do_sample=False)
        assert torch.equal(found, expected)


def test_closing_while_it_streams_leaves_no_thread(checkpoint: Callable[..., Path]) -> None:
    before = set(threading.enumerate())
    model = load_tiny(checkpoint("llama"), budget=budget_for(checkpoint("llama"), 1), slots=2)
    model.generate(tokens(9), max_new_tokens=2, do_sample=False)
    assert set(threading.enumerate()) > before
    model.river.close()
    assert set(threading.enumerate()) == before


def test_a_model_that_is_all_resident_has_no_threads(checkpoint: Callable[..., Path]) -> None:
    before = set(threading.enumerate())
    model = load_tiny(checkpoint("llama"))
    assert set(threading.enumerate()) == before
    model.river.close()


def test_slots_that_cannot_be_allocated_are_an_error_and_leave_nothing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from river_offload.store import slots

    budget, before = budget_for(checkpoint("llama"), 1), set(threading.enumerate())

    def refuse(*_: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(slots, "aligned_empty", refuse)
    with pytest.raises(RiverError, match="slot 1 of 2"):
        load_tiny(checkpoint("llama"), budget=budget)
    assert set(threading.enumerate()) == before
