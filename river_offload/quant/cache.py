"""The built river on disk: one safetensors file a layer, and a manifest: what it was built from, a checksum a file.

Written layer by layer, so that an interrupted build goes on where it stopped. Nothing in it is trusted: a manifest of
another key, a file of another size or checksum is as good as absent, and is built again. Files are written under
temporary names, synced and renamed; the manifest names a file only after the file is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from river_offload.config import format_size
from river_offload.errors import CacheError

T = TypeVar("T")

FORMAT = 1  # of packing.py and of the files; anything else is rebuilt
_SPARE_BYTES = 16 << 20  # left free on the disk for the manifest and for others
_LEFT_AFTER_S = 3600
_MAX_HEADER_BYTES = 1 << 20
_DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class RiverCache:
    """The river of one checkpoint and quantization, in a folder of its own below `cache_dir`/river.

    Args:
        key: what the river depends on (checkpoint fingerprint, quantization settings, layer count): JSON values.
    """

    def __init__(self, cache_dir: Path, key: Mapping[str, Any]) -> None:
        self._identity = json.loads(json.dumps({"format": FORMAT, **key}, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        self.directory = cache_dir / "river" / digest[:24]

    def has_layer(self, layer: int) -> bool:
        """Whether `layer` was written and its file has the right size. Cheap: `read_layer` checks the contents."""
        entry = self._manifest().get(str(layer))
        with suppress(OSError):
            return entry is not None and self._path(layer).stat().st_size == entry["bytes"]
        return False

    def read_layer(self, layer: int) -> dict[str, Tensor] | None:
        """The state written for `layer`, in memory of its own. None when absent; a damaged file is deleted."""
        entry = self._manifest().get(str(layer))
        if entry is None:
            return None
        try:
            state, checksum = _read_file(self._path(layer))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            state, checksum = {}, ""
        if checksum != entry["sha256"]:
            with suppress(OSError):
                self._path(layer).unlink()
            return None
        return state

    def reserve(self, river_bytes: int) -> None:
        """Makes the folder and sees that `river_bytes` more fit on its disk: before hours of work, not after.

        Raises CacheError when they do not, or when the folder cannot be made.
        """
        need_bytes = river_bytes + _SPARE_BYTES
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            free_bytes = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._unwritable(error) from error
        if free_bytes < need_bytes:
            raise CacheError(
                f"{self.directory}: found {format_size(free_bytes)} free, expected {format_size(need_bytes)} for the "
                "river. Free some space or choose another folder with cache_dir."
            )

    def write_layer(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """Writes the state of `layer`, then the manifest.

        Raises:
            CacheError: the folder cannot be written, or the disk has too little space. Nothing half-written stays.
        """
        self.reserve(sum(t.nbytes for t in state.values()))
        try:
            checksum = _replace(self._path(layer), lambda file: _write_file(file, state))
            # Read anew, for another process may build the same river: what both write is as good.
            layers = self._manifest() | {str(layer): {"bytes": self._path(layer).stat().st_size, "sha256": checksum}}
            manifest = json.dumps({"key": self._identity, "layers": layers}, indent=1).encode()
            _replace(self.directory / "manifest.json", lambda file: file.write(manifest))
        except OSError as error:
            raise self._unwritable(error) from error

    def _sweep(self) -> None:
        """Delete what killed builds left. A file that is being written now is younger than an hour."""
        for left in self.directory.glob(".*.*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                    left.unlink()

    def _unwritable(self, error: OSError) -> CacheError:
        return CacheError(
            f"{error.filename or self.directory}: the river cannot be cached ({error.strerror or error}), expected a "
            "folder that can be written and has space. Make it so, or choose another folder with cache_dir."
        )

    def _path(self, layer: int) -> Path:
        return self.directory / f"layer-{layer:03d}.safetensors"

    def _manifest(self) -> dict[str, dict[str, Any]]:
        """The layers of the manifest; none when it is missing, damaged or of another river."""
        try:
            manifest = json.loads((self.directory / "manifest.json").read_bytes())
            if manifest["key"] != self._identity:
                return {}
            return {
                str(layer): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for layer, entry in manifest["layers"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _replace(path: Path, write: Callable[[BinaryIO], T]) -> T:
    """Calls `write` on a file that becomes `path` once it is whole and on the disk; on any failure nothing stays."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return result
    finally:
        Path(temporary).unlink(missing_ok=True)


def _write_file(file: BinaryIO, state: Mapping[str, Tensor]) -> str:
    """Writes safetensors, returns the SHA-256 of the file. safetensors' own writer would copy the whole layer first."""
    checksum = hashlib.sha256()

    def write(data: bytes | memoryview) -> None:
        checksum.update(data)
        file.write(data)

    header: dict[str, Any] = {}
    stop = 0
    for name, tensor in state.items():
        start, stop = stop, stop + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    write(struct.pack("<Q", len(text)) + text)
    for tensor in state.values():
        write(_bytes_of(tensor.detach().cpu().contiguous()))
    return checksum.hexdigest()


def _read_file(path: Path) -> tuple[dict[str, Tensor], str]:
    """Tensors and SHA-256 of a file of `_write_file`, read once. Raises ValueError or OSError when it is not one."""
    checksum = hashlib.sha256()
    state: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix.ljust(8, b"\xff"))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        text = file.read(length)
        checksum.update(prefix + text)
        try:
            fields = [(name, _DTYPES[field["dtype"]], field["shape"]) for name, field in json.loads(text).items()]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a header of ours") from error
        size = sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in fields)
        if os.fstat(file.fileno()).st_size != 8 + length + size:
            raise ValueError("not the size that its header says")
        for name, dtype, shape in fields:
            state[name] = torch.empty(shape, dtype=dtype)
            data = _bytes_of(state[name])
            if file.readinto(data) != len(data):
                raise ValueError("truncated while it was read")
            checksum.update(data)
    return state, checksum.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs lack Buffer
