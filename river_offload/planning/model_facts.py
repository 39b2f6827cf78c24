"""What is known of a model without its weights: from a checkpoint's headers, a configuration, a built-in shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.checkpoint.source import fetch_config, resolve
from river_offload.config import RiverConfig, default_cache_dir
from river_offload.planning.plan import check_options, fit_context, read_config, stored_layers
from river_offload.planning.shapes import builtin_names, builtin_shape
from river_offload.planning.sizes import Stored
from river_offload.progress import Progress
from river_offload.structure import Structure, text_config


@dataclass(frozen=True)
class ModelFacts:
    """A model as far as a plan needs it."""

    config: RiverConfig
    """The options, the context cut to what the model attends to."""
    structure: Structure
    dtype: torch.dtype
    """What it computes in."""
    stored: Stored
    checkpoint_bytes: int
    """Its files on disk, or what they will be."""
    notes: tuple[str, ...] = ()


def find_model(config: RiverConfig, progress: Progress) -> ModelFacts:
    """Look up `config.model`: a built-in shape, a directory with or without weights, a hub id, `demo`, a .gguf file.

    Of a hub id only the configuration is fetched. Raises CheckpointError for a model that is not there or not sound,
    UsageError for an option that cannot take effect on it.
    """
    if config.model in builtin_names():
        shape = builtin_shape(config.model)
        return _from_config(config, text_config(AutoConfig.for_model(**shape)))
    directory = fetch_config(config.model)
    if directory is None:
        cache_dir = config.cache_dir or default_cache_dir()
        directory = resolve(config.model, cache_dir=cache_dir, dtype=config.dtype, progress=progress).directory
    model_config = read_config(directory, config)
    if any(directory.glob("*.safetensors")):
        return _from_checkpoint(config, model_config, directory)
    return _from_config(config, model_config)


def _from_config(config: RiverConfig, model_config: PretrainedConfig) -> ModelFacts:
    """No weights: the checkpoint will be what the configuration says."""
    found = getattr(model_config, "dtype", None) or torch.bfloat16
    stored = getattr(torch, found) if isinstance(found, str) else found
    notes: list[str] = []
    config = fit_context(config, model_config, notes)
    dtype = stored if config.dtype == "auto" else getattr(torch, config.dtype)
    structure = Structure.of(model_config, dtype, trust_remote_code=config.trust_remote_code)
    check_options(config, structure)
    shapes = structure.expected()
    numbers = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in structure.tied)
    return ModelFacts(
        config,
        structure,
        dtype,
        Stored.in_dtype(structure, stored, dtype),
        numbers * stored.itemsize,
        tuple(notes),
    )


def _from_checkpoint(config: RiverConfig, model_config: PretrainedConfig, directory: Path) -> ModelFacts:
    """Weights are there: their headers say how they are stored, as they will tell `load`."""
    checkpoint = Checkpoint.open(directory)
    try:
        config = fit_context(config, model_config, checkpoint.notes)
        dtype = getattr(torch, checkpoint.dtype if config.dtype == "auto" else config.dtype)
        structure = Structure.of(model_config, dtype, trust_remote_code=config.trust_remote_code)
        check_options(config, structure)
        keys = checkpoint.check_keys(structure.expected(), structure.tied)
        nbytes = sum(entry.nbytes for entry in checkpoint.entries.values())
        stored = stored_layers(checkpoint, structure, keys, dtype)
        return ModelFacts(config, structure, dtype, stored, nbytes, tuple(checkpoint.notes))
    finally:
        checkpoint.close()
