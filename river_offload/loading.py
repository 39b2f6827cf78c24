"""`load`: plan, then assemble."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from policies.exit import ExitRule
from policies.prefill import POLICIES, PrefillRule, backbone_from_tokens, typical_profile
from policies.profiles import load_profile
from river_offload.assemble import assemble
from river_offload.config import QuantConfig, RiverConfig
from river_offload.handle import River
from river_offload.kv.cache import SharedCache, WindowLayer
from river_offload.kv.kind import KvKind
from river_offload.kv.memory import host_memory, kv_folder, states_memory
from river_offload.ledger import held_by_category
from river_offload.memory.probes import return_freed_memory
from river_offload.memory.storages import storage_bytes
from river_offload.parts import CheckpointParts
from river_offload.passage import Flow
from river_offload.planning.plan import Plan, make_plan
from river_offload.progress import Progress, Silent
from river_offload.quant.cache import RiverCache
from river_offload.quant.river import warn_of_misfits
from river_offload.seams import install_seams
from river_offload.store.layout import Layout
from river_offload.store.tiers import DiskTier
from river_offload.streaming import Streaming, open_streaming
from river_offload.structure import Structure, text_config
from river_offload.trace import Trace


def load(
    model: str | Path,
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    context: int = 4096,
    batch: int = 1,
    prefill_chunk: int | None = None,
    kv_bits: int = 16,
    kv_tier: str = "device",
    mode: str | None = None,
    tau: float | None = None,
    min_exit: int | None = None,
    quant: QuantConfig | None = None,
    head_bits: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    cache_dir: str | Path | None = None,
    slots: int = 2,
    prefetch: str = "next",
    link_limit: str | int | None = None,
    on_miss: str | None = None,
    prefill: str | None = None,
    draft: str | int | None = None,
    gate: float | None = None,
    also_modes: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a model so that it generates within a memory budget, on an exit river that shares its KV cache.

    Args:
        model: a directory of safetensors, a .gguf file, a hub id, or "demo".
        budget: device bytes for everything: weights, river, KV, working memory ("8GiB"); None for what is free now.
        host_budget: bytes of pinned host memory for the deep layers of a GPU model, those beyond it are streamed from
            disk; None for what is free now.
        context: tokens per row that the KV cache and the working memory are planned for.
        batch: rows planned for.
        prefill_chunk: tokens of a prompt that a layer reads at once, which bounds the working memory; the context or
            more for any prompt whole, None for what fits best.
        kv_bits: 16 keeps keys and values as they are; 8 or 4 quantizes those of all but the recent tokens.
        kv_tier: where they rest between passes: "device", or "host": pinned memory of a GPU, for a CPU an unnamed file
            in cache_dir that is mapped into memory. Each layer's are brought in when it runs.
        mode: "lossless", "exit", "backbone", "gated", "quantized" or "fixed:D". By default "lossless", the backbone's
            own text; where one of tau, min_exit, on_miss, prefill or a prefetch of exits is given, "exit", which gives
            that up for speed; where gate is, "gated". An option whose mode is one of also_modes changes nothing.
        tau: exit threshold of mode exit, 0.5 by default (River-LLM: 0.5 for Llama, 0.7 near-lossless).
        min_exit: the fewest backbone layers a passage runs in mode exit, 1 by default.
        quant: bits and group size of the river.
        head_bits: 16 leaves the LM head alone; 8 or 4 quantizes an untied one.
        device: "auto" takes a GPU if torch has one.
        dtype: "auto" computes in the checkpoint's own.
        cache_dir: where built rivers and unpacked GGUF files are kept.
        slots: device buffers that streamed layers pass through.
        prefetch: "none", "next" (the coming layers, in order), or of exits "predicted" (those layers that a predictor
            holds for likely) and "oracle" (what forced depths will need).
        link_limit: bytes a second that streamed layers come at most ("500MB"): what a slower disk would do. CPU only.
        on_miss: in mode exit "wait" for a layer that is not there, as by default, or "exit" to the river at once.
        prefill: in mode exit a prompt may "exit", as by default, or runs the whole "backbone"; "auto" goes by its
            length.
        draft: tokens that modes lossless and gated draft on the river before the backbone checks them: "adaptive" or a
            number. By default lossless adapts and gated, whose text depends on it, takes 16.
        gate: mode gated asks the backbone about drafted tokens whose margin (top-1 minus top-2 probability) is at most
            this: 0 asks about none, 1 about all.
        also_modes: modes whose parts are built too, so that the loaded model can switch to them.
        trust_remote_code: run model code that comes with the checkpoint.
        progress: told about long work.

    Returns:
        The transformers model class that the checkpoint names, with `model.river` (see `handle.River`).

    Raises:
        UsageError: an option that cannot be used or cannot take effect.
        CheckpointError: a checkpoint that is missing, damaged or of an unsupported kind.
        BudgetError: it does not fit; `needed_bytes` is the smallest budget that works.
        CacheError: the river cannot be written to cache_dir.
    """
    options = dict(locals())  # each is named once, above
    del options["progress"]
    return load_config(RiverConfig.from_options(**options | {"quant": quant or QuantConfig()}), progress)


def load_config(config: RiverConfig, progress: Progress | None = None) -> PreTrainedModel:
    """`load` with its options in one object (`RiverConfig.from_toml`)."""
    started = time.perf_counter()
    progress = progress or Silent()
    plan = make_plan(config, progress)
    try:
        model = _assemble(plan, progress)
    except BaseException:
        progress.finish()
        plan.checkpoint.close()
        raise
    return_freed_memory()  # what quantization and reading used
    model.river.load_s = time.perf_counter() - started
    return model


def _assemble(plan: Plan, progress: Progress) -> PreTrainedModel:
    structure = plan.structure
    layers = range(structure.num_layers)
    layouts = [Layout.of(structure.weight_shapes(i), plan.precision.dtype) for i in layers]
    keys = [{name: plan.keys[structure.full_name(i, name)] for name in structure.weight_shapes(i)} for i in layers]
    kernels = _kernel_report(plan)  # while the layers are still the model's own
    with contextlib.ExitStack() as undo:
        disk = DiskTier(plan.checkpoint, keys, layouts)
        undo.callback(disk.close)
        streaming = open_streaming(plan, disk, layouts)
        if streaming.link is not None:
            undo.callback(streaming.link.close)
        flow = _fill(plan, disk, streaming, progress)
        disk.reader.limit = plan.config.link_limit  # from here on: loading is as quick as it can be
        if streaming.link is None:
            disk.close()  # all is read
        undo.pop_all()
    return _handled(plan, flow, streaming, kernels)


def _fill(plan: Plan, disk: DiskTier, streaming: Streaming, progress: Progress) -> Flow:
    """Read, quantize and place every layer."""
    config, structure, placement = plan.config, plan.structure, plan.placement
    return assemble(
        structure,
        placement,
        _parts(plan, disk, progress),
        rule=ExitRule(placement.mode, config.tau, config.min_exit, structure.num_layers),
        trace=Trace(structure.num_layers, about=_about(config)),
        device=plan.device,
        slots=streaming.slots,
        link=streaming.link,
        streamed_bytes=streaming.layer_bytes,
        prefetcher=streaming.prefetcher,
        on_miss="exit" if config.on_miss == "exit" else "wait",
        prefill=_prefill_rule(plan, streaming),
        states_memory=states_memory(plan.device, kv_folder(plan.cache_dir)) if placement.states_host_bytes else None,
    )


def _about(config: RiverConfig) -> dict[str, Any]:
    """What the head of a trace says of the run."""
    return {"model": config.model, "mode": config.mode, "tau": config.tau, "min_exit": config.min_exit}


def _prefill_rule(plan: Plan, streaming: Streaming) -> PrefillRule:
    """Whether prompts may leave the backbone. What `auto` goes by is noted, since no option says it."""
    policy = next(policy for policy in POLICIES if policy == plan.config.prefill)
    if policy != "auto":
        return PrefillRule(policy)
    structure = plan.structure
    layers = range(structure.num_layers)
    weights = sum(math.prod(shape) for i in layers for shape in structure.weight_shapes(i).values())
    profile = load_profile(typical_profile(plan.device.type))
    rule = PrefillRule(policy, backbone_from_tokens(sum(streaming.layer_bytes.values()), weights, profile))
    if "exit" in (plan.config.mode, *plan.config.also_modes):
        shorter = ", shorter ones may leave it" if rule.backbone_from_tokens > 1 else ""
        plan.checkpoint.notes.append(
            f"prompts of {rule.backbone_from_tokens} tokens and more run the whole backbone{shorter}"
        )
    return rule


def _handled(plan: Plan, flow: Flow, streaming: Streaming, kernels: dict[str, Any]) -> PreTrainedModel:
    """The model with its handle on it."""
    model = plan.structure.model
    if plan.generation_config is not None:
        model.generation_config = plan.generation_config

    def device_bytes() -> int:
        tensors = (*model.parameters(), *model.buffers(), *streaming.slots.buffers)
        return storage_bytes(tensors, plan.device) + streaming.held_bytes()

    def held() -> dict[str, int]:
        return held_by_category(plan.structure, streaming.slots.buffers, streaming.held_bytes(), plan.device)

    def host_bytes() -> dict[str, int]:
        memory = streaming.memory
        return {
            "pinned_bytes": memory.pinned_bytes if memory else 0,
            "pageable_bytes": memory.pageable_bytes if memory else 0,
        }

    def close() -> None:
        if streaming.kv_link is not None:
            streaming.kv_link.close()
        plan.checkpoint.close()

    river = River(
        model,
        flow,
        tokenizer=plan.tokenizer,
        config=plan.config,
        placement=plan.placement,
        budget_source=plan.budget_source,
        kernels=kernels | _one_token_report(plan.structure, plan.config.context),
        notes=plan.checkpoint.notes,
        measure_device_bytes=device_bytes,
        measure_categories=held,
        host_bytes=host_bytes,
        make_cache=functools.partial(
            SharedCache,
            model.config.get_text_config(decoder=True),
            kind=KvKind.of(plan.config),
            give_back=plan.config.give_back,
            link=streaming.kv_link,
            host=host_memory(plan.device, kv_folder(plan.cache_dir)),
        ),
        on_close=close,
    )
    install_seams(model, river)
    return model


def _parts(plan: Plan, disk: DiskTier, progress: Progress) -> CheckpointParts:
    """The model's parts, with the caches of what is quantized once; the missing rest must fit on their disk."""
    structure, quant = plan.structure, plan.config.quant
    key = {"checkpoint": plan.checkpoint.fingerprint, "group_size": quant.group_size}
    cache = RiverCache(plan.cache_dir, key | {"bits": quant.bits})
    missing = [i for i in plan.placement.river_layers if not cache.has_layer(i)]
    if missing:
        cache.reserve(sum(plan.precision.river_bytes(structure.layers[i]) for i in missing))
    if plan.placement.river_layers:
        warn_of_misfits([structure.layers[i] for i in plan.placement.river_layers], quant.group_size)
    return CheckpointParts(
        structure,
        plan.placement,
        plan.checkpoint,
        plan.keys,
        disk,
        cache,
        RiverCache(plan.cache_dir, key | {"bits": plan.precision.head_bits, "part": "head"}),
        plan.precision,
        native_dir=plan.cache_dir,
        device=plan.device,
        progress=progress,
        label="building the river, once" if missing else "loading",
    )


def _kernel_report(plan: Plan) -> dict[str, Any]:
    """Which kernel multiplies the river's matrices, and why those before it in the list do not."""
    if not plan.placement.river_layers:
        return {"kernel": None, "kernels": {}}
    found = plan.precision.choices(plan.structure.layers[0])
    names = [choice.kernel.name for choice in found.values()]
    return {
        "kernel": max(names, key=names.count, default=None),
        "kernels": {
            name: {"kernel": choice.kernel.name, "declined": dict(choice.declined)} for name, choice in found.items()
        },
    }


def _one_token_report(structure: Structure, context: int) -> dict[str, Any]:
    """How many river layers take a single token in one native call, and why the others do not."""
    caches = SharedCache(text_config(structure.model.config), context).layers
    served = 0
    reasons: list[str] = []
    layer: Any
    for layer, cache in zip(structure.layers, caches, strict=True):
        if layer.river is None:
            continue
        if isinstance(layer.one_token, str):
            reasons.append(layer.one_token)
        elif isinstance(cache, WindowLayer):
            reasons.append("its attention slides within the context")
        else:
            served += 1
    return {"one_token": {"layers": served, "declined": list(dict.fromkeys(reasons))}}
