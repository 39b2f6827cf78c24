"""The plan of a load: everything that is known, checked and decided before the first weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from policies.types import Placement, Refusal
from river_offload.attention import why_whole
from river_offload.checkpoint.reading import reading, require_json
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.checkpoint.source import resolve
from river_offload.config import RiverConfig, check_mode, default_cache_dir, format_size
from river_offload.errors import BudgetError, CheckpointError, UsageError
from river_offload.kv.cache import only_windows
from river_offload.kv.kind import KvKind
from river_offload.kv.memory import kv_folder, require_space
from river_offload.memory.probes import free_device_bytes
from river_offload.planning.sizes import Stored, Weighed, weigh_within
from river_offload.progress import Progress
from river_offload.quant.hqq import fitting
from river_offload.quant.kernels import ordered
from river_offload.quant.precision import Precision
from river_offload.structure import Structure, attended_tokens, text_config


@dataclass
class Plan:
    """All that is known before the first weight is read."""

    config: RiverConfig
    structure: Structure
    checkpoint: Checkpoint
    keys: Mapping[str, str]
    placement: Placement
    weighed: Weighed
    budget_source: str
    device: torch.device
    precision: Precision
    cache_dir: Path
    tokenizer: Any
    generation_config: GenerationConfig | None

    @property
    def categories(self) -> dict[str, int]:
        """Planned device bytes by category: the placement's terms taken apart."""
        return self.weighed.categories(self.placement)


def make_plan(config: RiverConfig, progress: Progress) -> Plan:
    """Resolve and check the model, run it dry, and place it. Raises what `load` raises; the checkpoint stays open."""
    device = _device(config)
    cache_dir = config.cache_dir or default_cache_dir()
    source = resolve(config.model, cache_dir=cache_dir, dtype=config.dtype, progress=progress)
    checkpoint = Checkpoint.open(source.directory)
    try:
        require_json(source.directory)
        model_config = read_config(source.directory, config)
        config = fit_context(config, model_config, checkpoint.notes)
        dtype = getattr(torch, checkpoint.dtype if config.dtype == "auto" else config.dtype)
        with reading(source.directory / "config.json"):
            structure = Structure.of(model_config, dtype, trust_remote_code=config.trust_remote_code)
        modes = tuple(check_mode(text, structure.num_layers) for text in (config.mode, *config.also_modes))
        check_options(config, structure)
        keys = checkpoint.check_keys(structure.expected(), structure.tied)
        tokenizer = _tokenizer(source.directory, config)
        generation_config = _generation_config(source.directory)
        precision = Precision(
            dtype=dtype,
            bits=config.quant.bits,
            group=config.quant.group_size,
            head_bits=config.head_bits,
            device_type=device.type,
            kernels=ordered(cache_dir),
        )
        budget_bytes, budget_source = config.budget, "given"
        if budget_bytes is None:
            budget_bytes, budget_source = free_device_bytes(device)
        stored = stored_layers(checkpoint, structure, keys, dtype)
        weighed = weigh_within(budget_bytes, structure, precision, config, modes, stored)
        placement = weighed.place(config, modes, budget_bytes)
        if isinstance(placement, Refusal):
            raise _does_not_fit(placement, config)
        _check_host(config, placement, device, cache_dir)
        if config.link_limit is not None and not placement.streamed_layers:
            raise UsageError("link_limit has no effect: every layer fits the budget, nothing is streamed; leave it out")
    except BaseException:
        checkpoint.close()
        raise
    return Plan(
        config,
        structure,
        checkpoint,
        keys,
        placement,
        weighed,
        budget_source,
        device,
        precision,
        cache_dir,
        tokenizer,
        generation_config,
    )


def _device(config: RiverConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {name!r}: this torch has no GPU ({torch.__version__}); use device='cpu'")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if config.link_limit is not None:
            raise UsageError("link_limit has an effect on CPU alone: leave it out, or use device='cpu'")
    elif config.host_budget is not None:
        raise UsageError("host_budget has no effect on CPU, where the device is RAM: give budget alone")
    return device


def read_config(directory: Path, config: RiverConfig) -> PretrainedConfig:
    path = directory / "config.json"
    with reading(path):
        found = text_config(AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code))
    if found.num_hidden_layers < 1:
        raise CheckpointError(f"{path}: num_hidden_layers is {found.num_hidden_layers}, expected at least 1")
    return found


def _tokenizer(directory: Path, config: RiverConfig) -> Any:
    """The tokenizer beside the checkpoint, None where there is none."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    with reading(directory / "tokenizer.json"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)


def _generation_config(directory: Path) -> GenerationConfig | None:
    """The generation defaults beside the checkpoint, None where there are none."""
    path = directory / "generation_config.json"
    if not path.exists():
        return None
    with reading(path):
        found = GenerationConfig.from_pretrained(directory)
        for tokens in (found.eos_token_id, found.pad_token_id, found.bos_token_id):
            torch.as_tensor([] if tokens is None else tokens, dtype=torch.long)  # ids or lists of ids
    return found


def fit_context(config: RiverConfig, model_config: PretrainedConfig, notes: list[str]) -> RiverConfig:
    """No memory for tokens that the model cannot attend to."""
    limit = attended_tokens(model_config)
    if not limit or config.context <= limit:
        return config
    notes.append(f"context {config.context} is more than the {limit} tokens the model attends to: planned for {limit}")
    return replace(config, context=limit)


def check_options(config: RiverConfig, structure: Structure) -> None:
    """Options that could not take effect on this model."""
    if config.min_exit > structure.num_layers:
        raise UsageError(f"min_exit is {config.min_exit}, the model has {structure.num_layers} layers")
    chunk = config.prefill_chunk
    if chunk is not None and chunk < config.context and (reason := why_whole(structure.decoder)):
        raise UsageError(f"prefill_chunk={chunk} is not possible with this model: {reason}")
    kind = KvKind.of(config)
    if not kind.is_plain and only_windows(structure.model.config, config.context):
        raise UsageError(
            f"{kind} has no effect: attention slides in every layer of this model, and a window stays on the device as "
            "it is; leave kv_bits and kv_tier out"
        )
    if config.head_bits < 16:
        head, wish = structure.head, f"head_bits={config.head_bits}"
        if structure.head_name in structure.tied:
            raise UsageError(f"{wish} has no effect: this model's head is its embedding (tied weights)")
        if reason := fitting((head.out_features, head.in_features), config.quant.group_size).reason:
            raise UsageError(
                f"{wish} is not possible: in the LM head {reason}; use another group size, or head_bits=16"
            )


def stored_layers(checkpoint: Checkpoint, structure: Structure, keys: Mapping[str, str], dtype: torch.dtype) -> Stored:
    """The layers' matrices as the checkpoint has them. `keys`: the model's names -> the checkpoint's."""
    names = (
        structure.full_name(layer, name)
        for layer in range(structure.num_layers)
        for name in structure.weight_shapes(layer)
    )
    entries = [checkpoint.entries[keys[name]] for name in names]
    others = {entry.dtype for entry in entries} - {str(dtype).removeprefix("torch.")}
    return Stored(
        max((entry.nbytes for entry in entries), default=0),
        max((getattr(torch, name).itemsize for name in others), default=None),
    )


def _check_host(config: RiverConfig, placement: Placement, device: torch.device, cache_dir: Path) -> None:
    """Does the host tier hold what rests there of cache and prompts? Asked before hours of work, not after."""
    need_bytes = placement.host_bytes
    if device.type == "cpu":
        if need_bytes:
            require_space(kv_folder(cache_dir), need_bytes)
    elif config.host_budget is not None and config.host_budget < need_bytes:
        raise UsageError(
            f"host_budget is {config.host_budget} bytes, the keys and values that kv_tier=host keeps there take "
            f"{placement.kv_host_bytes}, the states of a long prompt {placement.states_host_bytes}: give at least as "
            "much, or take a smaller context or fewer kv_bits"
        )


def _does_not_fit(refusal: Refusal, config: RiverConfig) -> BudgetError:
    largest_bytes = refusal.terms[refusal.largest_term]
    advice = "; ".join(refusal.advice)
    return BudgetError(
        f"{config.model} does not fit a budget of {format_size(refusal.budget_bytes)} ({refusal.budget_bytes} bytes): "
        f"it needs at least {format_size(refusal.needed_bytes)} ({refusal.needed_bytes} bytes) at a context of "
        f"{config.context}, most of it {refusal.largest_term} ({format_size(largest_bytes)}). "
        f"What would help: {advice}",
        needed_bytes=refusal.needed_bytes,
        budget_bytes=refusal.budget_bytes,
        terms=dict(refusal.terms),
    )
