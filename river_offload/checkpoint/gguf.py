"""A GGUF file unpacked, once, into a directory of safetensors.

Names, permutations and the configuration come from transformers' own GGUF support; only the loop is ours: one tensor
is dequantized, cast and written before the next is read, so a model larger than memory can be unpacked.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from river_offload.checkpoint.headers import DTYPE_NAMES
from river_offload.checkpoint.reading import FAULTS
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.checkpoint.writing import write_tensors
from river_offload.config import format_size
from river_offload.errors import CacheError, CheckpointError, UnsupportedError, UsageError
from river_offload.progress import Progress, Silent

_FORMAT_VERSION = 1  # raise it when what is written changes: older directories are then left alone
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a GGUF file, in the name of its directory
_BLOCK_ELEMENTS = 1 << 24  # dequantized at a time in float32, where a tensor can be taken by rows: 64 MiB
_SPARE_BYTES = 64 << 20  # tokenizer, configuration, and room for the file system itself


@dataclass(frozen=True)
class _Recipe:
    """What to write: the parts of the model that are not weights, and what each weight is made from."""

    config: Any
    tokenizer: Any
    processor: TensorProcessor
    shapes: dict[str, tuple[int, ...]]  # of every tensor of the model
    tied: dict[str, str]
    sources: dict[str, gguf.ReaderTensor]  # of every tensor that is written, in the order of the layers


def unpack(path: Path, *, cache_dir: Path, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """Return the directory with the weights of GGUF file `path` as safetensors, written on the first call.

    Args:
        cache_dir: the directory is `cache_dir/gguf/<key>`; the key changes with the file's content and with dtype.
        dtype: "auto" (bfloat16), "float32", "bfloat16" or "float16".

    The directory appears whole or not at all. Raises CheckpointError for a damaged file, UnsupportedError for an
    architecture or quantization that transformers cannot read, CacheError for no space or no permission.
    """
    dtype = "bfloat16" if dtype == "auto" else dtype
    if dtype not in DTYPE_NAMES.values():
        raise UsageError(f"dtype {dtype!r}: expected auto, float32, bfloat16 or float16.")
    target = cache_dir / "gguf" / _key(path, dtype)
    try:
        if not _is_whole(target):
            _unpack(path, target, getattr(torch, dtype), progress or Silent())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Make room, or choose another" if full else "Let it be written to, or choose another"
        raise CacheError(
            f"{target.parent}: cannot unpack {path.name} there: {error.strerror or error}. {remedy} cache directory."
        ) from error
    return target


def _unpack(path: Path, target: Path, dtype: torch.dtype, progress: Progress) -> None:
    """Write `target`, under another name until it is finished."""
    _require_writable(target.parent)  # before the file is read, which takes long
    progress.start(f"reading {path.name}", 1, "files")  # parsing a large vocabulary takes a minute
    try:
        recipe = _plan(path)
        progress.advance(1)
    finally:
        progress.finish()
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)  # damaged
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with our number
    try:
        temporary.mkdir()
        _write(path, recipe, temporary, dtype, progress)
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when published


def _require_writable(directory: Path) -> None:
    """Raises OSError when the directory cannot be made or written to, as far as that can be told without doing so."""
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    for number, wrong in (
        (errno.ENOTDIR, not nearest.is_dir()),
        (errno.EACCES, not os.access(nearest, os.W_OK | os.X_OK)),
    ):
        if wrong:
            raise OSError(number, os.strerror(number), str(nearest))


def _key(path: Path, dtype: str) -> str:
    """A name for the file's content: its own name, its size, and samples spread over all of it."""
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {dtype} {path.name}".encode())
    try:
        with path.open("rb") as stream:
            if (magic := stream.read(4)) != b"GGUF":
                raise CheckpointError(f"{path}: starts with {magic!r}, expected b'GGUF': not a GGUF file.")
            file_bytes = stream.seek(0, os.SEEK_END)
            digest.update(file_bytes.to_bytes(8, "little"))
            for sample in range(_SAMPLES):
                stream.seek(max(0, file_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    return f"{path.stem[:40]}-{digest.hexdigest()[:16]}"


def _is_whole(directory: Path) -> bool:
    if not (directory / "config.json").is_file():
        return False
    try:
        Checkpoint.open(directory).close()
    except CheckpointError:
        return False
    return True


def _plan(path: Path) -> _Recipe:
    """Read the metadata and decide, before anything is written, where each tensor of the model comes from."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged or cut short ({error}). Download it again.") from error
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise UnsupportedError(f"{path}: one of several parts. Join them first: llama-gguf-split --merge FIRST OUT")
    folder = str(path.resolve().parent)
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # init_empty_weights gave every name a parameter of its own
        architecture = reader.fields["general.architecture"].contents()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = get_gguf_hf_weights_map(model, processor)
    except FAULTS as error:
        raise UnsupportedError(f"{path}: transformers cannot read this GGUF: {error}") from error
    config.architectures = [type(model).__name__]
    tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {name: group[0] for group in find_tied_parameters(model) for name in group[1:]}
    sources = {name: tensors[name] for name in shapes if name in tensors}
    shared = {*tied, *tied.values()}
    if missing := [name for name in shapes if name not in sources and name not in shared]:
        raise CheckpointError(f"{path}: holds no tensor for {missing[0]} ({len(missing)} such). Download it again.")
    _restore_rope_scaling(path, reader, config)
    return _Recipe(config, tokenizer, processor, shapes, tied, sources)


def _restore_rope_scaling(path: Path, reader: gguf.GGUFReader, config: Any) -> None:
    """Give `config` the rotary scaling of Llama 3, which a GGUF keeps as a tensor that transformers does not read.

    The tensor holds, for each frequency, what it is divided by. Meta has used one set of constants and let only the
    factor vary; they are taken over when they give exactly this tensor. Any other scaling gets a warning.
    """
    divisors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if divisors is not None:
        plain = dict(config.rope_parameters)
        config.rope_parameters = {
            **plain,
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        unscaled = plain["rope_theta"] ** -(np.arange(len(divisors)) / len(divisors))
        if len(scaled) == len(divisors) and np.allclose(scaled.numpy() * divisors, unscaled, rtol=1e-4):
            return
        config.rope_parameters = plain
    kind = reader.fields.get(f"{config.model_type}.rope.scaling.type")
    if divisors is not None or (kind is not None and kind.contents() != "none"):
        warnings.warn(
            f"{path.name}: scales its rotary embedding in a way that transformers does not read from GGUF; long texts "
            "lose quality. Prefer the safetensors of this model.",
            stacklevel=2,
        )


def _write(path: Path, recipe: _Recipe, directory: Path, dtype: torch.dtype, progress: Progress) -> None:
    """Fill `directory` and check that what was written is a whole checkpoint of the model."""
    shapes = {name: recipe.shapes[name] for name in recipe.sources}
    total_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < total_bytes + _SPARE_BYTES:
        raise CacheError(
            f"{directory.parent}: found {format_size(free_bytes)} free, expected {format_size(total_bytes)} for "
            f"{path.name}, unpacked. "
            "Make room, or choose another cache directory."
        )
    recipe.config.dtype = dtype
    recipe.config.save_pretrained(directory)
    GenerationConfig.from_model_config(recipe.config).save_pretrained(directory)
    recipe.tokenizer.save_pretrained(directory)
    progress.start(f"unpacking {path.name}", total_bytes, "bytes")
    try:
        write_tensors(
            directory / "model.safetensors",
            shapes,
            dtype,
            lambda name: (
                torch.from_numpy(piece).to(dtype)
                for piece in _dequantized(path, recipe.sources[name], recipe.shapes[name], recipe.processor)
            ),
            progress,
        )
    finally:
        progress.finish()
    with Checkpoint.open(directory) as written:
        written.check_keys(recipe.shapes, recipe.tied)


def _dequantized(
    path: Path, tensor: gguf.ReaderTensor, shape: tuple[int, ...], processor: TensorProcessor
) -> Iterator[np.ndarray]:
    """The values of one tensor as transformers would have them, float32, in blocks of rows where that is possible."""
    # A stand-in that takes no memory: a processor which has nothing to do returns the very object it was given.
    stand_in = np.broadcast_to(np.float32(-1), tensor.shape[::-1])
    processed = processor.process(stand_in, name=tensor.name, parsed_parameters={"tensors": {}}).weights
    if processed.shape != shape:
        raise UnsupportedError(
            f"{path}: {tensor.name} has shape {list(processed.shape)}, the model expects {list(shape)}. "
            "Mixture-of-experts models are not supported yet."
        )
    rows = len(tensor.data)
    if processed is stand_in and tensor.data.ndim > 1:
        rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    for start in range(0, len(tensor.data), rows):
        try:
            block = gguf.dequantize(tensor.data[start : start + rows], tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedError(f"{path}: {tensor.name} is {tensor.tensor_type.name}: {error}.") from error
        if processed is not stand_in:
            block = processor.process(block, name=tensor.name, parsed_parameters={"tensors": {}}).weights
        yield np.array(block, dtype=np.float32, order="C")  # a copy: the block may be a read-only view of the file


def _publish(temporary: Path, target: Path) -> None:
    """Rename a finished directory into place; another process may have finished first with the same content."""
    try:
        temporary.rename(target)
    except OSError:
        if not _is_whole(target):
            raise
        return
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
