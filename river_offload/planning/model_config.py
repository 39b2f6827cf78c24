"""The configuration of a model that is only planned for: no weights are downloaded, unpacked or opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from river_offload.checkpoint.reading import reading
from river_offload.checkpoint.source import demo_file
from river_offload.errors import CheckpointError
from river_offload.planning.shapes import builtin_names, builtin_shape
from river_offload.structure import text_config


@dataclass(frozen=True)
class ModelConfig:
    """What a plan needs to know of a model."""

    name: str
    config: PretrainedConfig
    """Of the language model; the one inside, where the model is multimodal."""
    dtype: torch.dtype
    """What its checkpoint is stored in, bfloat16 where the config does not say."""


def model_config(model: str, *, trust_remote_code: bool = False) -> ModelConfig:
    """The configuration of a built-in shape, a directory, "demo", a .gguf file or a hub id.

    Raises CheckpointError when there is no such model or its configuration cannot be read.
    """
    if model in builtin_names():
        return _known(model, AutoConfig.for_model(**builtin_shape(model)))
    path = demo_file() if model == "demo" else Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        with reading(path):
            config = AutoConfig.from_pretrained(path.resolve().parent, gguf_file=path.name)
        return _known(path.stem if model != "demo" else model, config)
    if path.is_dir():
        with reading(path / "config.json"):
            return _known(path.resolve().name, _read(str(path), trust_remote_code))
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"{model}: no such model; expected a directory with config.json, a .gguf file, a hub id like "
            f'"org/name", "demo", or one of {", ".join(builtin_names())}'
        )
    with reading(Path(model)):
        return _known(model, _read(model, trust_remote_code))


def _read(name: str, trust_remote_code: bool) -> PretrainedConfig:
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def _known(name: str, config: PretrainedConfig) -> ModelConfig:
    config = text_config(config)
    dtype = getattr(config, "dtype", None)
    return ModelConfig(name, config, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)
