"""Memory for what rests off the device, keys and values above all: pinned for a GPU, a file mapped into memory for a
CPU."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from river_offload.errors import CacheError

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Shape and dtype -> a CPU tensor with anything in it."""

_ZEROS = bytes(1 << 20)


def device_memory(device: torch.device) -> Allocate:
    """Memory of the device that attention runs on."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def host_memory(device: torch.device, folder: Path) -> Allocate:
    """Where the host tier of a cache on `device` rests; `folder` is where a CPU keeps the file."""
    if device.type == "cuda":
        return pinned_memory
    return lambda shape, dtype: file_memory(folder, shape, dtype)


def states_memory(device: torch.device, folder: Path) -> Allocate:
    """Where the states of a long prompt rest between the layers of a model on `device`. Beside a GPU that is ordinary
    memory: it is made anew for each prompt, and pinning takes longer than the copies would gain."""
    if device.type == "cuda":
        return plain_memory
    return lambda shape, dtype: file_memory(folder, shape, dtype)


def kv_folder(cache_dir: Path) -> Path:
    """Where a CPU keeps keys and values that rest on the host."""
    return cache_dir / "kv"


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises CacheError when the disk of `folder`, which is made, has fewer than `need_bytes` free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise _no_memory(folder, need_bytes, error.strerror or str(error)) from error
    if free_bytes < need_bytes:
        raise _no_memory(folder, need_bytes, f"{free_bytes} are free")


def plain_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary memory: what a dry run allocates, where only sizes matter."""
    return torch.empty(shape, dtype=dtype)


def pinned_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pinned main memory, which a GPU reads at the full rate of its link."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def file_memory(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file of its own in `folder` that has no name: it goes with the tensor, however the process ends.

    Under memory pressure the kernel writes its pages out rather than keep them. Raises CacheError when the disk has no
    room, here and now: a page that finds none later would kill the process.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="kv-") as file:
            _reserve(file, nbytes)
            mapped = mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise _no_memory(folder, nbytes, error.strerror or str(error)) from error
    return torch.frombuffer(mapped, dtype=dtype).view(shape)


def _no_memory(folder: Path, need_bytes: int, why: str) -> CacheError:
    return CacheError(
        f"{need_bytes} bytes for keys and values, or the states of a prompt, cannot be had in {folder}: {why}. Free "
        "some space, take a smaller context, fewer kv_bits or a larger budget, or choose another folder with cache_dir"
    )


def _reserve(file: IO[bytes], nbytes: int) -> None:
    """Make the file's blocks exist. Raises OSError when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    for start in range(0, nbytes, len(_ZEROS)):
        file.write(_ZEROS[: nbytes - start])
    file.flush()
