from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import QUANT, budget_for

from policies.acceptance import Acceptance, Verdict
from policies.depths import FixedDepths, GeometricDepths, ListedDepths
from river_offload.config import RiverConfig
from river_offload.errors import UsageError
from river_offload.eval import bench as module
from river_offload.eval.bench import Ceilings, Run, bench, measure, result
from river_offload.eval.ceilings import memory_read_rate
from river_offload.eval.request import Request, forced_depths, read_acceptance, read_depths
from river_offload.trace import PassageRecord, Trace

LAYERS = 5
GIB_PER_S = float(2**30)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_read_rate", lambda device: memory_read_rate(device, nbytes=1 << 20))


def record(depth: int, **changes: Any) -> PassageRecord:
    fields = {
        "index": 0, "new_tokens": 1, "batch": 1, "cached_tokens": 4, "path": "decode", "mode": "exit", "depth": depth,
        "signals": [], "wait_s": 0.0, "bytes_streamed": 0, "seconds": 0.1,
    }  # fmt: skip
    return PassageRecord(**fields | changes)


def report(**changes: Any) -> dict[str, Any]:
    plain = {"num_layers": LAYERS, "seconds": {"load": 2.0}, "peak_device_bytes": 7, "budget_bytes": 8, "kernel": "k"}
    return plain | changes


def test_the_figures_follow_from_the_records() -> None:
    records = [
        record(3, wait_s=0.25, bytes_streamed=2**30),
        record(LAYERS, wait_s=0.0, bytes_streamed=2**30),
    ]
    figures = result(Ceilings(1e10, GIB_PER_S), Run(records, [1.0, 3.0], 0.5, report()), {"model": "m"})
    assert figures["tokens_per_s"] == 0.5
    assert figures["bytes_per_token"] == 2**30
    assert figures["stall_s"] == 0.25
    assert figures["hidden_copy_share"] == pytest.approx(1 - 0.25 / 2)
    assert figures["link_over_ceiling"] == pytest.approx(2 / 4)
    assert figures["wasted_bytes"] == 0
    assert figures["depths"]["mean"] == 4.0
    assert figures["token_s"] == {"median": 2.0, "p95": 1.0, "max": 3.0}
    assert figures["seconds"] == {"load": 2.0, "prefill": 0.5, "run": 4.0}
    assert list(figures)[:8] == [
        "ceilings", "tokens_per_s", "bytes_per_token", "hidden_copy_share", "stall_s", "wasted_bytes",
        "link_over_ceiling", "config",
    ]  # fmt: skip
    json.dumps(figures, allow_nan=False)


def test_a_limited_link_is_set_beside_its_limit() -> None:
    records = [record(3, bytes_streamed=2**29)]
    figures = result(Ceilings(1e10, GIB_PER_S), Run(records, [1.0], 0.5, report()), {"link_limit": 2**29})
    assert figures["link_over_ceiling"] == pytest.approx(1.0)


def test_a_run_without_streaming_has_no_link_figures() -> None:
    figures = result(Ceilings(1e10, None), Run([record(2)], [0.1], 0.5, report()), {})
    assert (figures["hidden_copy_share"], figures["link_over_ceiling"], figures["bytes_per_token"]) == (None, None, 0)


def test_what_newer_records_say_of_the_link_is_used() -> None:
    told = record(1, wait_s=1.0, bytes_streamed=2**30, copy_s=4.0, wasted_bytes=5, misses=2)
    figures = result(Ceilings(1e10, GIB_PER_S), Run([told, told], [1.0, 1.0], 0.5, report()), {})
    assert (figures["hidden_copy_share"], figures["wasted_bytes"], figures["misses"]) == (0.75, 10, 4)


def test_waiting_longer_than_copying_hides_nothing() -> None:
    slow = record(1, wait_s=9.0, bytes_streamed=2**30)
    assert result(Ceilings(1e10, GIB_PER_S), Run([slow], [9.0], 0.5, report()), {})["hidden_copy_share"] == 0.0


def test_depths_are_read_from_a_rule_or_a_trace(tmp_path: Path) -> None:
    assert read_depths("fixed:3") == FixedDepths(3)
    path = tmp_path / "t.jsonl"
    Trace(LAYERS, records=[record(depth) for depth in (5, 1, 3)]).write_jsonl(path)
    assert read_depths(str(path)) == ListedDepths((5, 1, 3), str(path))
    for text, message in (("geometric:", "unknown depths"), ("absent.jsonl", "cannot be read")):
        with pytest.raises(UsageError, match=message):
            read_depths(text)


def test_the_prompt_goes_as_deep_as_the_deepest_counted_token() -> None:
    assert forced_depths(Request(3, depths=FixedDepths(2)), LAYERS, 1) == (2,) * 5
    forced = forced_depths(Request(20, depths=GeometricDepths(2.0, 0.1)), LAYERS, 1)
    assert forced is not None
    assert forced[:2] == (LAYERS, LAYERS) and len(forced) == 22
    assert forced_depths(Request(3), LAYERS, 1) is None
    with pytest.raises(UsageError, match=r"depths: passage 0 is to leave after 1 layers: expected 2\.\.5"):
        forced_depths(Request(3, depths=FixedDepths(1)), LAYERS, 2)


def test_a_trace_is_replayed_passage_by_passage() -> None:
    listed = Request(depths=ListedDepths((5, 1, 3, 2), "t"))
    assert (listed.counted(), listed.new_tokens()) == (2, 4)
    assert forced_depths(listed, LAYERS, 1) == (5, 1, 3, 2)
    with pytest.raises(UsageError, match="t has 2 passages"):
        Request(depths=ListedDepths((5, 1), "t")).counted()
    with pytest.raises(UsageError, match="4 passages, 7 are to run"):
        forced_depths(Request(5, depths=listed.depths), LAYERS, 1)


def config_for(directory: Path, resident: int, **options: Any) -> RiverConfig:
    budget = budget_for(directory, resident, **options)
    fields = {"mode": "exit", "context": 64, "quant": QUANT, "device": "cpu"} | options
    return RiverConfig.from_options(model=directory, budget=budget, **fields)


def test_bench_of_a_streaming_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory, trace = checkpoint("llama"), tmp_path / "trace.jsonl"
    request = Request(tokens=6, prompt_tokens=4, depths=GeometricDepths(2.0, 0.3))
    figures = bench(config_for(directory, 1), request, trace=trace)
    json.dumps(figures, allow_nan=False)
    assert figures["tokens"] == 6 and figures["depths"]["full_share"] == pytest.approx(2 / 6)
    assert figures["ceilings"]["link_bytes_per_s"] > 0 and figures["bytes_per_token"] > 0
    assert figures["tokens_per_s"] == pytest.approx(6 / figures["seconds"]["run"])
    assert figures["peak_device_bytes"] <= figures["budget_bytes"]
    said = figures["config"]
    assert (said["resident_layers"], said["streamed_layers"], said["depths"]) == (1, 4, "geometric:2,full=0.3")
    assert (said["mode"], said["tau"], said["dtype"], said["bits"]) == ("exit", None, "float32", 4)
    written = Trace.read_jsonl(trace)
    assert [r.depth for r in written.records[2:]] == list(forced_depths(request, LAYERS, 1) or ())[2:]
    assert written.about["depths"] == "geometric:2,full=0.3"
    # The depths of a trace give the same run again.
    again = bench(config_for(directory, 1), Request(prompt_tokens=4, depths=read_depths(str(trace))))
    assert again["depths"] == figures["depths"]


ALTERNATING = Acceptance(tuple(Verdict(0.9, index % 3 != 2) for index in range(9)), "two of three")


def test_bench_of_drafts_finds_what_it_is_given(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory, trace = checkpoint("llama"), tmp_path / "trace.jsonl"
    config = config_for(directory, 1, mode="lossless", draft=3)
    figures = bench(config, Request(tokens=10, prompt_tokens=4, acceptance=ALTERNATING), trace=trace)
    assert figures["tokens_per_backbone_pass"] == pytest.approx(11 / 4)  # 3, 3, 3, and room for two more
    assert (figures["drafted"], figures["accepted"]) == (10, 7)
    assert figures["config"]["acceptance"] == "two of three" and figures["bytes_per_token"] > 0
    assert Trace.read_jsonl(trace).about["acceptance"] == "two of three"
    # Its own trace tells the same story.
    assert read_acceptance(str(trace)).verdicts == tuple(
        Verdict(pytest.approx(margin), agreed) for margin, agreed in (*ALTERNATING.verdicts, (0.9, True))
    )


def test_a_trace_without_checks_has_no_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    Trace(LAYERS, records=[record(2), record(3)]).write_jsonl(path)
    with pytest.raises(UsageError, match=r"acceptance .*t\.jsonl: no drafted token was checked in mode lossless"):
        read_acceptance(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        read_acceptance(str(tmp_path / "absent.jsonl"))


def test_early_exits_within_the_resident_layers_stream_nothing(checkpoint: Callable[..., Path]) -> None:
    figures = bench(config_for(checkpoint("llama"), 2), Request(tokens=4, prompt_tokens=4, depths=FixedDepths(2)))
    assert (figures["bytes_per_token"], figures["stall_s"], figures["link_over_ceiling"]) == (0, 0, None)
    assert figures["config"]["streamed_layers"] == 3


def test_a_stop_token_does_not_end_the_run(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="backbone")
    own = model.generation_config
    own.eos_token_id = list(range(101))
    run = measure(model, Request(tokens=5, prompt_tokens=3))
    assert len(run.records) == len(run.token_s) == 5
    assert model.generation_config is own
    assert run.report["new_tokens"] == 7
