"""What a safetensors checkpoint says about itself, believed only after it has been checked.

A file is an 8-byte little-endian header length, a JSON header, then the tensors back to back. Everything here reads
headers only, so a checkpoint of any size is judged in milliseconds, before any work is done on it.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from river_offload.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # what a model can be loaded from
# Every element type the format knows. The others may occur in tensors that the model never asks for.
_ELEMENT_BITS = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "I64 U64 F64 C64",
    }.items()
    for name in names.split()
}
CONVERT_HINT = (
    "Pickle files can run code when they are opened, so they are never read here. Convert them once, if you trust "
    'where they come from: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "M.from_pretrained('DIR', dtype='auto').save_pretrained('OUT'); T.from_pretrained('DIR').save_pretrained('OUT')\""
)
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor rests: `nbytes` bytes at the absolute `offset` (bytes) of `file`.

    `dtype` is torch's name ("bfloat16"), or the format's own ("F8_E4M3") for a type no model is loaded from.
    """

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file: its raw JSON bytes, the size of the whole file and its tensors by name."""

    raw: bytes
    file_bytes: int
    entries: Mapping[str, TensorEntry]


def read_header(file: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises CheckpointError, naming the file, when it is cut short, is not safetensors, or contradicts itself.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = stream.seek(0, 2)
            stream.seek(0)
            header_bytes = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(file_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: not a whole safetensors file: it claims a header of {header_bytes} bytes, the file has "
                    f"{file_bytes} bytes in all. Download it again."
                )
            raw = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
    try:
        tensors = json.loads(raw)
    except ValueError as error:  # also UnicodeDecodeError
        raise CheckpointError(f"{file}: the header is not JSON ({error}). Download the file again.") from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: the header is a JSON {type(tensors).__name__}, expected an object.")
    tensors.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {name: _entry(file, name, fields, data_start) for name, fields in tensors.items()}
    _check_layout(file, entries, data_start, file_bytes)
    return Header(raw, file_bytes, entries)


def _entry(file: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and type(dtype) is str
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{file}: header entry of {name!r} needs dtype, shape, data_offsets; found {fields!r}.")
    if dtype not in _ELEMENT_BITS:
        raise CheckpointError(f"{file}: {name!r} has unknown dtype {dtype!r}; expected one of F32, BF16, F16.")
    nbytes = math.prod(shape) * _ELEMENT_BITS[dtype] // 8
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file}: {name!r} is {dtype} {list(shape)}, which takes {nbytes} bytes; its offsets leave {end - begin}."
        )
    return TensorEntry(file, data_start + begin, nbytes, DTYPE_NAMES.get(dtype, dtype), shape)


def _check_layout(file: Path, entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    """Tensors must follow each other without gap or overlap and end with the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise CheckpointError(f"{file}: {name!r} starts at byte {entry.offset}, expected {end}: a gap or overlap.")
        end += entry.nbytes
    if end != file_bytes:
        what = "cut short" if file_bytes < end else "longer than its header says"
        raise CheckpointError(
            f"{file}: {what}: the header describes {end} bytes, the file has {file_bytes}. Download it again."
        )


def shards_of(directory: Path) -> tuple[dict[str, set[str] | None], list[str]]:
    """The files that make up the checkpoint in `directory`, and remarks on files that do not.

    Returns {file name: tensor names it must hold, or None for "whatever it holds"} and the remarks. The index is the
    truth: a file that it does not name is no part of the checkpoint. Raises CheckpointError when nothing can be loaded.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; expected a folder with config.json and safetensors.")
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    weights = [name for name in files if name.endswith(".safetensors")]
    indexes = [name for name in files if name.endswith(".safetensors.index.json")]
    if indexes:
        index = "model.safetensors.index.json" if "model.safetensors.index.json" in indexes else indexes[0]
        shards: dict[str, set[str] | None] = dict(_read_index(directory / index))
    elif "model.safetensors" in weights or len(weights) == 1:
        shards = {"model.safetensors" if "model.safetensors" in weights else weights[0]: None}
    elif weights:
        raise CheckpointError(
            f"{directory}: {len(weights)} safetensors files ({', '.join(weights[:3])}, ...) but no "
            "model.safetensors.index.json that says which belong together. Download the index."
        )
    elif pickles := [name for name in files if Path(name).suffix in PICKLE_SUFFIXES]:
        raise CheckpointError(f"{directory}: holds only pickle weights ({', '.join(pickles[:3])}). {CONVERT_HINT}")
    else:
        raise CheckpointError(f"{directory}: no *.safetensors found; expected model.safetensors or shards and index.")
    stray = [n for n in files if n not in shards and (n in weights or Path(n).suffix in PICKLE_SUFFIXES)]
    return shards, [f"{name}: not part of the checkpoint, ignored" for name in stray]


def _read_index(path: Path) -> dict[str, set[str]]:
    """{shard: tensor names} of an index file; every shard it names exists next to it."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no readable index with a weight_map ({error}). Download it again.") from error
    shards: dict[str, set[str]] = {}
    for name, shard in pairs:
        shards.setdefault(shard, set()).add(name)
    for shard, names in shards.items():
        if Path(shard).name != shard:
            raise CheckpointError(f"{path}: shard {shard!r} is not a plain file name next to the index.")
        if not (path.parent / shard).is_file():
            raise CheckpointError(
                f"{path.parent / shard}: missing shard; {path.name} expects {len(names)} tensors in it "
                f"({min(names)}, ...). Download it."
            )
    if not shards:
        raise CheckpointError(f"{path}: the weight_map is empty; expected tensor names and their shards.")
    return shards
