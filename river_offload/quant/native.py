"""Builds `native.c` and `layer.c` with the system's C compiler on first use and loads it.

The library is kept in the cache directory, named after source, flags, compiler and processor, so that a home directory
shared between machines never runs code for another one. It is linked to the OpenMP runtime that torch has loaded: a
second runtime would fight with the first for the cores. Without a compiler the caller goes on without this.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "layer.c")]
_HEADER = Path(__file__).with_name("dot.h")
# Not -ffast-math: linked into a library it makes the whole process flush denormals to zero.
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
_LINK = ["-fopenmp", "-shared", "-fPIC", "-Wl,--as-needed"]
_LIBRARIES = ["-lm"]
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Those of activations, and what they are called in C."""
_BUILD_LIMIT_S = 120


class Unavailable(Exception):
    """The library cannot be had here; the message is the reason, for the report."""


class Matrix(ctypes.Structure):
    """A quantized linear, as `layer.c` reads it: addresses of its parts and of its bias, None where it has none."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scale", "offset", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "group")),
    ]


class Norm(ctypes.Structure):
    """An RMS norm; without a weight there is none."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class Layer(ctypes.Structure):
    """A river layer. What it has the addresses of must outlive it."""

    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, Norm) for name in ("before_attention", "before_mlp", "of_queries", "of_keys")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "bits", "dtype")),
        ("scaling", ctypes.c_float),
    ]


class Library:
    """The functions of `native.c` and `layer.c`. They let other Python threads run meanwhile."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.river_linear
        self._linear.argtypes, self._linear.restype = [pointer] * 5 + [integer] * 6, None
        self._dequantize = library.river_dequantize
        self._dequantize.argtypes, self._dequantize.restype = [pointer] * 4 + [integer] * 5, None
        self._quantize = library.river_quantize
        self._quantize.argtypes, self._quantize.restype = [pointer] * 4 + [integer] * 4, None
        self._layer_token = library.river_layer_token
        place: list[Any] = [pointer, pointer, integer, ctypes.c_float]
        cache: list[Any] = [pointer, pointer, integer, integer]
        self._layer_token.argtypes = [ctypes.POINTER(Layer), pointer, *place, *cache, pointer]
        self._layer_token.restype = None
        library.river_most_in_group.restype = integer
        self.most_in_group: int = library.river_most_in_group()
        library.river_takes_bf16.argtypes, library.river_takes_bf16.restype = [integer], integer
        self._takes_bf16 = {bits: bool(library.river_takes_bf16(bits)) for bits in (2, 3, 4, 8)}

    def takes_bf16(self, bits: int) -> bool:
        """Whether this processor multiplies bfloat16 pairs, and `linear` takes bfloat16 at this width."""
        return self._takes_bf16[bits]

    def linear(self, x: Tensor, parts: Mapping[str, Tensor], y: Tensor, bits: int) -> None:
        """y = x W^T: x [M, K] and y [M, N] contiguous, float32, or bfloat16 where `takes_bf16`. For few rows."""
        packed, scale, offset = parts["packed"], parts["scale"], parts["offset"]
        pointers = (x.data_ptr(), packed.data_ptr(), scale.data_ptr(), offset.data_ptr(), y.data_ptr())
        (rows, columns), group = x.shape, x.shape[1] // scale.shape[1]
        self._linear(*pointers, rows, packed.shape[0], columns, bits, group, DTYPES[x.dtype])

    def dequantize(self, parts: Mapping[str, Tensor], start: int, out: Tensor, bits: int) -> None:
        """Rows from `start` on of W into all of `out`, contiguous [n, K], float32 or bfloat16."""
        packed, scale, offset = (parts[name][start:] for name in ("packed", "scale", "offset"))
        rows, columns = out.shape
        pointers = (packed.data_ptr(), scale.data_ptr(), offset.data_ptr(), out.data_ptr())
        self._dequantize(*pointers, rows, columns, bits, columns // scale.shape[1], DTYPES[out.dtype])

    def quantize(self, weight: Tensor, parts: Mapping[str, Tensor], bits: int) -> None:
        """weight [n, K], contiguous, finite float32, into parts of n rows, one thread; groups up to `most_in_group`."""
        packed, scale, offset = parts["packed"], parts["scale"], parts["offset"]
        pointers = (weight.data_ptr(), packed.data_ptr(), scale.data_ptr(), offset.data_ptr())
        rows, columns = weight.shape
        self._quantize(*pointers, rows, columns, bits, columns // scale.shape[1])

    def layer_token(
        self,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_scale: float,
        keys: Tensor,
        values: Tensor,
        y: Tensor,
    ) -> None:
        """y = layer(x), all of the layer's dtype and contiguous, of keys and values each head.

        Args:
            x, y: [hidden] in any shape.
            cos, sin: of the token's place: [dimensions of a head that are turned], in any shape.
            query_scale: what turned queries are multiplied by.
            keys, values: [1, kv_heads, tokens, head_dim], with equal strides. The last token is this one, and written.
        """
        place = (cos.data_ptr(), sin.data_ptr(), cos.shape[-1], query_scale)
        cache = (keys.data_ptr(), values.data_ptr(), keys.stride(1), keys.shape[2] - 1)
        self._layer_token(layer, x.data_ptr(), *place, *cache, y.data_ptr())


@lru_cache
def load(cache_dir: Path) -> Library | Unavailable:
    """The library, built into `cache_dir`/native when it is not there yet (about a second)."""
    try:
        return Library(_built(cache_dir / "native"))
    except Unavailable as reason:
        return reason
    except OSError as error:
        return Unavailable(f"the native library cannot be built or loaded: {error}")


def find_compiler() -> str | None:
    """The C compiler that builds the library, None where there is none."""
    return shutil.which("gcc") or shutil.which("cc")


def _built(directory: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C compiler (gcc or cc) was found")
    command = [compiler, *_FLAGS, *_LINK]
    openmp = _openmp_of_torch()
    version = _run([compiler, "--version"]).stdout
    source = b"".join(file.read_bytes() for file in (_HEADER, *_SOURCES))
    identity = repr((command, openmp, version, _processor())).encode() + source
    path = directory / f"river-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if _is_whole(path):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    handle, building = tempfile.mkstemp(dir=directory, suffix=".so")
    os.close(handle)
    try:
        command += [*map(str, _SOURCES), "-o", building, openmp, *_LIBRARIES]
        done = _run(command)
        if done.returncode:
            raise Unavailable(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['it does not say why'])[-1]}")
        with open(building, "rb") as file:
            os.fsync(file.fileno())
        os.replace(building, path)
        _checksum_file(path).write_text(_checksum(path))
    finally:
        Path(building).unlink(missing_ok=True)
    return path


def _is_whole(path: Path) -> bool:
    """Are these the bytes that were built? Loading a cut file would end the process."""
    try:
        return _checksum_file(path).read_text() == _checksum(path)
    except (OSError, ValueError):
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took longer than {_BUILD_LIMIT_S} s") from error


def _openmp_of_torch() -> str:
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if "libgomp" in line:
                return line.split(maxsplit=5)[5]
    raise Unavailable("torch has loaded no libgomp whose threads could be shared")


def _processor() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    features = ("flags", "Features", "model name", "CPU part")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(features)}))
