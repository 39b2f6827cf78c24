"""How fast a model runs here, beside what the machine would allow: first the ceilings, then the run.

The prompt is random tokens, and the depths, or what checks say of drafts, may be given, so that a checkpoint of random
weights without a tokenizer measures the same as a trained one. Nothing is printed here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from policies.depths import summary
from river_offload.config import RiverConfig
from river_offload.eval.ceilings import READERS, Span, disk_read_rate, host_to_device_rate, memory_read_rate
from river_offload.eval.replay import Circumstances, replay
from river_offload.eval.request import Request, forced_depths
from river_offload.loading import load_config
from river_offload.planning.plan import Plan, make_plan
from river_offload.progress import Progress, Silent
from river_offload.trace import PassageRecord

CHECKING = ("backbone_passes", "drafted", "accepted", "tokens_per_backbone_pass", "checked_share")
"""What of the report tells how the backbone was asked."""
LINK_LIMIT_S = 8.0
"""As long may measuring the raw link rate take: a few passages' worth of bytes from a slow disk."""


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best, measured just before the run. Bytes per second."""

    memory_read_bytes_per_s: float
    link_bytes_per_s: float | None
    """None when nothing is streamed."""
    link: str | None = None
    """What was measured for it."""


@dataclass(frozen=True)
class Run:
    """What a run did: the counted passages and the time between their tokens."""

    records: Sequence[PassageRecord]
    token_s: Sequence[float]
    """Wall clock from one token to the next: the layers, the head, the choice of the token."""
    prefill_s: float
    report: dict[str, Any] = field(default_factory=dict)
    """`model.river.report()`."""

    @property
    def seconds(self) -> float:
        return sum(self.token_s)


def bench(
    config: RiverConfig, request: Request, *, progress: Progress | None = None, trace: Path | None = None
) -> dict[str, Any]:
    """Plan, measure the ceilings, load, run, close. Returns the object of `result`.

    Args:
        trace: where to write the trace of the whole run, the passages that are not counted included.

    Raises UsageError for a request that the model cannot serve, and what `load` raises.
    """
    progress = progress or Silent()
    plan = make_plan(config, progress)
    try:
        forced = forced_depths(request, plan.structure.num_layers, config.min_exit)
        progress.start("measuring the machine", 0, "")
        ceilings = measure_ceilings(plan)
    finally:
        progress.finish()
        plan.checkpoint.close()
    model = load_config(config, progress)
    try:
        model.river.trace.about |= _forced(request)
        try:
            run = measure(model, request, forced, progress)
        finally:
            if trace is not None:
                model.river.trace.write_jsonl(trace)
        figures = result(ceilings, run, described(model, request))
        return figures | {"simulated": _simulated(model, plan, ceilings, run)}
    finally:
        model.river.close()


def _simulated(model: PreTrainedModel, plan: Plan, ceilings: Ceilings, run: Run) -> dict[str, Any] | None:
    """The run beside its replay (see `eval.replay`); None when nothing is streamed, and in modes that draft: the
    simulator takes every passage for a token."""
    river, link = model.river, ceilings.link_bytes_per_s
    if link is None or river.store.pace is None or river.drafts:
        return None
    spans, layers = streamed_spans(plan), len(plan.placement.streamed_layers)
    limit = river.config.link_limit
    circumstances = Circumstances(
        config=river.config,
        placement=river.placement,
        num_layers=river.num_layers,
        layer_bytes=sum(span.nbytes for span in spans) // layers,
        link_bytes_per_s=link if limit is None else min(link, limit),
        link_abortable=river.store.abortable,
        pace=river.store.pace,
    )
    return replay(river.trace.records, len(run.records), run.seconds, circumstances)


def measure_ceilings(plan: Plan) -> Ceilings:
    """Memory read rate of the device, and the raw rate of the way that the streamed layers come."""
    memory = memory_read_rate(plan.device)
    placement = plan.placement
    if not placement.streamed_layers:
        return Ceilings(memory, None)
    if plan.device.type == "cuda":
        rate = host_to_device_rate(plan.device, pinned=True, nbytes=placement.slot_bytes)
        return Ceilings(memory, rate, f"pinned host memory to {plan.device}, one layer at a time")
    disk = disk_read_rate(streamed_spans(plan), max_s=LINK_LIMIT_S)
    way = "O_DIRECT" if disk.direct else "page cache dropped"
    return Ceilings(memory, disk.bytes_per_s, f"the streamed layers' own bytes from disk, {READERS} readers, {way}")


def streamed_spans(plan: Plan) -> list[Span]:
    """Where the streamed layers' weights lie in the checkpoint's files."""
    structure, entries = plan.structure, plan.checkpoint.entries
    found = (
        entries[plan.keys[structure.full_name(layer, name)]]
        for layer in plan.placement.streamed_layers
        for name in structure.weight_shapes(layer)
    )
    return [Span(entry.file, entry.offset, entry.nbytes) for entry in found]


def measure(
    model: PreTrainedModel, request: Request, forced: Sequence[int] | None = None, progress: Progress | None = None
) -> Run:
    """Generate greedily after a random prompt and time each token.

    Args:
        forced: depths for all passages (`forced_depths`); None leaves the exits to the mode.
    """
    river = model.river
    text_config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(request.seed)
    ids = torch.randint(0, text_config.vocab_size, (1, request.prompt_tokens), generator=generator).to(model.device)
    clock = _Clock(request.new_tokens(), progress or Silent())
    own, model.generation_config = model.generation_config, _greedy_to_the_end()
    try:
        with river.using(depths=forced, acceptance=request.acceptance):
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.new_tokens(), streamer=clock
            )
    finally:
        model.generation_config = own
        clock.end()
    stamps = clock.stamps_s
    token_s = [later - earlier for earlier, later in pairwise(stamps)]
    if river.drafts:  # tokens come by the block: none of them can be told from a warm-up
        counted, records = len(token_s) - 1, [r for r in river.account.records if r.path != "prefill"]
    else:
        counted = request.counted()
        records = river.trace.records[-counted:]
    return Run(records, token_s[-counted:], token_s[0], river.report())


def result(ceilings: Ceilings, run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a bench: plain values; a figure that there is none of is None.

    `bytes_per_token` is what a token moved over the link, `hidden_copy_share` the share of the copying that no token
    stood still for, `link_over_ceiling` the link's mean rate over the whole run beside its raw rate: a run that streams
    all layers of every token comes near 1, one that leaves early should not.
    """
    records, tokens, seconds = run.records, len(run.token_s), run.seconds
    nbytes = sum(record.bytes_streamed for record in records)
    stall_s = sum(record.wait_s for record in records)
    link = ceilings.link_bytes_per_s
    if link and config.get("link_limit"):
        link = min(link, config["link_limit"])  # what it is held to, not what the disk could do
    copy_s = _copy_s(records, nbytes, link)
    ordered = sorted(run.token_s)
    return {
        "ceilings": asdict(ceilings),
        "tokens_per_s": tokens / seconds,
        "bytes_per_token": nbytes / tokens,
        "hidden_copy_share": max(1 - stall_s / copy_s, 0.0) if copy_s else None,
        "stall_s": stall_s,
        "wasted_bytes": _sum_of("wasted_bytes", records),
        "link_over_ceiling": nbytes / seconds / link if link and nbytes else None,
        "config": config,
        "depths": summary([record.depth for record in records], run.report["num_layers"]),
        "misses": _sum_of("misses", records),
        "tokens": tokens,
        **{name: run.report.get(name) for name in CHECKING},
        "token_s": {"median": median(ordered), "p95": ordered[int(0.95 * (tokens - 1))], "max": ordered[-1]},
        "seconds": {"load": run.report["seconds"]["load"], "prefill": run.prefill_s, "run": seconds},
        "peak_device_bytes": run.report["peak_device_bytes"],
        "budget_bytes": run.report["budget_bytes"],
        "kernel": run.report["kernel"],
    }


def described(model: PreTrainedModel, request: Request) -> dict[str, Any]:
    """What was run, on what: the options of the load as they turned out, the placement, the machine's threads."""
    river = model.river
    config, placement = river.config, river.placement
    options = {name: value for name, value in asdict(config).items() if name not in ("quant", "cache_dir")}
    return options | {
        "mode": river.mode,
        "tau": river.tau if river.mode == "exit" and request.depths is None else None,
        "budget": placement.budget_bytes,
        "also_modes": list(config.also_modes),
        "bits": config.quant.bits,
        "group_size": config.quant.group_size,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        **_forced(request),
        "prompt_tokens": request.prompt_tokens,
        "seed": request.seed,
        "num_layers": river.num_layers,
        "resident_layers": len(placement.resident_layers),
        "streamed_layers": len(placement.streamed_layers),
        "slots": placement.slots,
        "slot_bytes": placement.slot_bytes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _forced(request: Request) -> dict[str, Any]:
    """Where the depths of a run and the luck of its drafts came from, None for each that the model itself decided."""
    given = {"depths": request.depths, "acceptance": request.acceptance}
    return {name: None if value is None else str(value) for name, value in given.items()}


class _Clock(BaseStreamer):
    """A streamer of transformers that notes when each token was there. On a GPU the token has been waited for."""

    def __init__(self, tokens: int, progress: Progress) -> None:
        self.stamps_s: list[float] = []
        self._progress = progress
        progress.start("running", tokens, "tokens")

    def put(self, value: torch.Tensor) -> None:
        """First the prompt, then token by token."""
        self.stamps_s.append(time.perf_counter())
        if len(self.stamps_s) > 1:
            self._progress.advance(1)

    def end(self) -> None:
        self._progress.finish()


def _greedy_to_the_end() -> GenerationConfig:
    """No stop token and no habits of the checkpoint's own: a run has the length that was asked for."""
    return GenerationConfig(do_sample=False, num_beams=1)


def _copy_s(records: Sequence[PassageRecord], nbytes: int, link: float | None) -> float | None:
    """Seconds that the link was copying: as the records say, else what the bytes take at its raw rate."""
    if all(record.copy_s is not None for record in records):
        return sum(record.copy_s or 0.0 for record in records) or None
    return nbytes / link if link and nbytes else None


def _sum_of(name: str, records: Sequence[PassageRecord]) -> Any:
    """The sum of a figure that older traces do not have: nothing was fetched ahead then, and nothing in vain."""
    return sum(getattr(record, name, 0) for record in records)
