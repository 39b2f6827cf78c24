"""`load`: plan, then assemble."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from policies.exit import ExitRule
from policies.placement import place
from policies.types import Mode, Placement, Refusal
from river_offload.assemble import assemble
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.checkpoint.source import resolve
from river_offload.config import QuantConfig, RiverConfig, default_cache_dir, format_size
from river_offload.errors import BudgetError, CheckpointError, UsageError
from river_offload.handle import River, check_mode, device_tensors
from river_offload.memory.probes import free_device_bytes, return_freed_memory
from river_offload.memory.storages import storage_bytes
from river_offload.parts import CheckpointParts
from river_offload.planning.dry_run import dry_run
from river_offload.planning.sizes import model_sizes
from river_offload.progress import Progress, Silent
from river_offload.quant.cache import RiverCache
from river_offload.quant.river import choices, warn_of_misfits
from river_offload.seams import install_seams
from river_offload.store.layout import Layout
from river_offload.store.link import Link
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier, HostTier
from river_offload.structure import Structure, text_config
from river_offload.trace import Trace


def load(
    model: str | Path,
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    context: int = 4096,
    batch: int = 1,
    mode: str = "exit",
    tau: float = 0.5,
    min_exit: int = 1,
    quant: QuantConfig | None = None,
    head_bits: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    cache_dir: str | Path | None = None,
    slots: int = 2,
    also_modes: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a model so that it generates within a memory budget, on an exit river that shares its KV cache.

    Args:
        model: a directory of safetensors, a .gguf file, a hub id, or "demo".
        budget: device bytes for everything: weights, river, KV, working memory ("8GiB"); None for what is free now.
        host_budget: bytes of pinned host memory for the deep layers of a GPU model; None for what is free now.
        context: tokens per row that the KV cache and the working memory are planned for.
        batch: rows planned for.
        mode: "exit", "backbone", "quantized" or "fixed:D".
        tau: exit threshold of mode exit (River-LLM: 0.5 for Llama, 0.7 near-lossless).
        min_exit: the fewest backbone layers a passage runs in mode exit.
        quant: bits and group size of the river.
        head_bits: 16 leaves the LM head alone; 8 or 4 quantizes an untied one.
        device: "auto" takes a GPU if torch has one.
        dtype: "auto" computes in the checkpoint's own.
        cache_dir: where built rivers and unpacked GGUF files are kept.
        slots: device buffers that streamed layers pass through.
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
    config = RiverConfig.from_options(
        model=model,
        budget=budget,
        host_budget=host_budget,
        context=context,
        batch=batch,
        mode=mode,
        tau=tau,
        min_exit=min_exit,
        quant=quant or QuantConfig(),
        head_bits=head_bits,
        device=device,
        dtype=dtype,
        cache_dir=cache_dir,
        slots=slots,
        also_modes=also_modes,
        trust_remote_code=trust_remote_code,
    )
    return load_config(config, progress)


def load_config(config: RiverConfig, progress: Progress | None = None) -> PreTrainedModel:
    """`load` with its options in one object (`RiverConfig.from_toml`)."""
    started = time.perf_counter()
    progress = progress or Silent()
    plan = _plan(config, progress)
    try:
        model = _assemble(plan, progress)
    except BaseException:
        plan.checkpoint.close()
        raise
    return_freed_memory()  # what quantization and reading used
    model.river.account.load_s = time.perf_counter() - started
    return model


@dataclass
class _Plan:
    """All that is known before the first weight is read."""

    config: RiverConfig
    structure: Structure
    checkpoint: Checkpoint
    keys: Mapping[str, str]
    directory: Path
    placement: Placement
    budget_source: str
    device: torch.device
    dtype: torch.dtype
    cache_dir: Path


def _plan(config: RiverConfig, progress: Progress) -> _Plan:
    device = _device(config)
    cache_dir = config.cache_dir or default_cache_dir()
    source = resolve(config.model, cache_dir=cache_dir, dtype=config.dtype, progress=progress)
    checkpoint = Checkpoint.open(source.directory)
    try:
        model_config = _model_config(source.directory, config)
        dtype = getattr(torch, checkpoint.dtype if config.dtype == "auto" else config.dtype)
        structure = Structure.of(model_config, dtype, trust_remote_code=config.trust_remote_code)
        modes = tuple(check_mode(text, structure.num_layers) for text in (config.mode, *config.also_modes))
        _check_options(config, structure, modes)
        keys = checkpoint.check_keys(structure.expected(), structure.tied)
        needs = dry_run(
            model_config,
            dtype=dtype,
            quant=config.quant,
            head_bits=config.head_bits,
            device_type=device.type,
            context=config.context,
            batch=config.batch,
            modes=modes,
            trust_remote_code=config.trust_remote_code,
        )
        stored = _stored_dtype_bytes(checkpoint, structure, keys, dtype)
        sizes = model_sizes(
            structure,
            needs,
            dtype=dtype,
            quant=config.quant,
            head_bits=config.head_bits,
            device_type=device.type,
            stored_dtype_bytes=stored,
        )
        budget_bytes, budget_source = config.budget, "given"
        if budget_bytes is None:
            budget_bytes, budget_source = free_device_bytes(device)
        placement = place(
            sizes,
            mode=modes[0],
            also_modes=modes[1:],
            min_exit=config.min_exit,
            budget_bytes=budget_bytes,
            slots=config.slots,
        )
        if isinstance(placement, Refusal):
            raise _does_not_fit(placement, config)
    except BaseException:
        checkpoint.close()
        raise
    return _Plan(
        config, structure, checkpoint, keys, source.directory, placement, budget_source, device, dtype, cache_dir
    )


def _assemble(plan: _Plan, progress: Progress) -> PreTrainedModel:
    config, structure, placement = plan.config, plan.structure, plan.placement
    layouts = [Layout.of(structure.weight_shapes(i), plan.dtype) for i in range(structure.num_layers)]
    layer_keys = [
        {name: plan.keys[structure.full_name(i, name)] for name in structure.weight_shapes(i)}
        for i in range(structure.num_layers)
    ]
    disk = DiskTier(plan.checkpoint, layer_keys, layouts)
    if placement.river_layers:
        warn_of_misfits(structure.layers[0], config.quant.group_size)
    kernels = _kernel_report(plan)
    key = {"checkpoint": plan.checkpoint.fingerprint, "bits": config.quant.bits, "group_size": config.quant.group_size}
    parts = CheckpointParts(
        structure,
        placement,
        plan.checkpoint,
        plan.keys,
        disk,
        RiverCache(plan.cache_dir, key),
        quant=config.quant,
        head_bits=config.head_bits,
        dtype=plan.dtype,
        device=plan.device,
        progress=progress,
    )
    streamed = {i: sum(plan.checkpoint.entries[k].nbytes for k in layer_keys[i].values()) for i in placement.streamed_layers}
    slots = Slots(
        placement.slots, [layouts[i] if i in streamed else None for i in range(structure.num_layers)], plan.device
    )
    rule = ExitRule(placement.mode, config.tau, config.min_exit, structure.num_layers)
    progress.start("loading", structure.num_layers, "layers")
    try:
        flow = assemble(
            structure,
            placement,
            parts,
            rule=rule,
            trace=Trace(structure.num_layers),
            device=plan.device,
            slots=slots,
            link=_link(plan, disk, slots, layouts),
            streamed_bytes=streamed,
        )
    finally:
        progress.finish()
    model = structure.model
    if (plan.directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(plan.directory)
    river = River(
        model,
        flow,
        tokenizer=_tokenizer(plan.directory, config),
        config=config,
        placement=placement,
        budget_source=plan.budget_source,
        kernels=kernels,
        notes=plan.checkpoint.notes,
        measure_device_bytes=lambda: storage_bytes((*device_tensors(model), *slots.buffers), plan.device),
        on_close=plan.checkpoint.close,
    )
    install_seams(model, river)
    return model


def _device(config: RiverConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {name!r}: this torch has no GPU ({torch.__version__}); use device='cpu'")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    elif config.host_budget is not None:
        raise UsageError("host_budget has no effect on CPU, where the device is RAM: give budget alone")
    return device


def _model_config(directory: Path, config: RiverConfig) -> PretrainedConfig:
    try:
        return text_config(AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: transformers cannot read it: {error}") from error


def _check_options(config: RiverConfig, structure: Structure, modes: tuple[Mode, ...]) -> None:
    """Options that could not take effect on this model."""
    if config.min_exit > structure.num_layers:
        raise UsageError(f"min_exit is {config.min_exit}, the model has {structure.num_layers} layers")
    if config.head_bits < 16 and structure.head_name in structure.tied:
        raise UsageError(f"head_bits={config.head_bits} has no effect: this model's head is its embedding (tied weights)")


def _stored_dtype_bytes(
    checkpoint: Checkpoint, structure: Structure, keys: Mapping[str, str], dtype: torch.dtype
) -> int | None:
    """Bytes per element on disk when any streamed matrix is stored in another dtype than it computes in."""
    own = str(dtype).removeprefix("torch.")
    stored = {
        checkpoint.entries[keys[structure.full_name(i, name)]].dtype
        for i in range(structure.num_layers)
        for name in structure.weight_shapes(i)
    }
    other = stored - {own}
    return max((getattr(torch, name).itemsize for name in other), default=None)


def _does_not_fit(refusal: Refusal, config: RiverConfig) -> BudgetError:
    largest_bytes = refusal.terms[refusal.largest_term]
    advice = "; ".join(refusal.advice)
    return BudgetError(
        f"{config.model} does not fit a budget of {format_size(refusal.budget_bytes)}: at a context of {config.context} it "
        f"needs at least {format_size(refusal.needed_bytes)} ({refusal.needed_bytes} bytes), most of it "
        f"{refusal.largest_term} ({format_size(largest_bytes)}). What would help: {advice}",
        needed_bytes=refusal.needed_bytes,
        budget_bytes=refusal.budget_bytes,
        terms=dict(refusal.terms),
    )


def _link(plan: _Plan, disk: DiskTier, slots: Slots, layouts: list[Layout]) -> Link | None:
    if not plan.placement.streamed_layers:
        return None
    if plan.device.type == "cpu":
        return CpuLink(disk, slots)
    host = HostTier(disk, plan.placement.streamed_layers, layouts, pin=True)
    return CudaLink(host, slots, plan.device, cuda=torch.cuda)


def _kernel_report(plan: _Plan) -> dict[str, Any]:
    """Which kernel multiplies the river's matrices, and why those before it in the list do not."""
    if not plan.placement.river_layers:
        return {"kernel": None, "kernels": {}}
    quant = plan.config.quant
    found = choices(
        plan.structure.layers[0], quant.bits, quant.group_size, dtype=plan.dtype, device_type=plan.device.type
    )
    names = [choice.kernel.name for choice in found.values()]
    return {
        "kernel": max(names, key=names.count, default=None),
        "kernels": {
            name: {"kernel": choice.kernel.name, "declined": dict(choice.declined)} for name, choice in found.items()
        },
    }


def _tokenizer(directory: Path, config: RiverConfig) -> Any:
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
