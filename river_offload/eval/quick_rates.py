"""The rates of `eval.ceilings`, measured in a few seconds on a machine that nothing was prepared on."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from river_offload.config import format_size
from river_offload.errors import LinkError
from river_offload.eval.ceilings import MEMORY_BYTES, Span, disk_read_rate, host_to_device_rate, memory_read_rate
from river_offload.memory.reading import Reading
from river_offload.progress import Progress

SCRATCH_BYTES = 1 << 30
"""Of the file that the disk is read with: beyond the cache of the drive itself, at most a tenth of what is free."""
_BLOCK_BYTES = 16 << 20
_PROBE_BYTES = 32 << 20
_PASSES = 18
"""How often `memory_read_rate` goes through its memory."""
_COPY_BYTES = 64 << 20

Rates = dict[str, Any]


def quick_rates(device: torch.device, directory: Path, *, seconds: float, progress: Progress) -> Rates:
    """Bytes per second that memory, disk and the way to the GPU allow, each a `Reading` as a dict.

    Half of the time goes to writing the file that the disk is read with; it has no name, so nothing of it stays behind
    however the process ends.

    Args:
        device: computes; its memory is read.
        directory: on the file system to be measured; it need not be there yet.
        seconds: about how long in all; 0 measures nothing.
    """
    place = _existing(directory)
    steps: dict[str, Callable[[], Reading]] = {
        "memory_read_bytes_per_s": lambda: _memory_rate(device, seconds / 4),
        "disk_read_bytes_per_s": lambda: _disk_rate(place, seconds / 4),
        "pinned_copy_bytes_per_s": lambda: _copy_rate(device, pinned=True),
        "pageable_copy_bytes_per_s": lambda: _copy_rate(device, pinned=False),
    }
    rates: Rates = {"seconds": seconds, "directory": str(place), "file_system": file_system(place)}
    if not seconds:
        return rates | {name: asdict(Reading.missing("not measured: 0 seconds were given")) for name in steps}
    progress.start("measuring", len(steps), "rates")
    try:
        for name, measure in steps.items():
            rates[name] = asdict(measure())
            progress.advance(1)
    finally:
        progress.finish()
    return rates


def file_system(path: Path) -> str | None:
    """The kind of file system that `path` is on, `ext4` or `tmpfs` say; None when the system does not tell."""
    best = max(
        (part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return None if best is None else best.fstype or None


def _memory_rate(device: torch.device, seconds: float) -> Reading:
    """A short try says how much can be read in the time; no more than a quarter of what is free is taken for it."""
    free_bytes = psutil.virtual_memory().available
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    if free_bytes < 4 * _PROBE_BYTES:
        return Reading.missing(f"only {format_size(free_bytes)} of memory is free")
    try:
        rate = memory_read_rate(device, nbytes=_PROBE_BYTES)
        nbytes = min(MEMORY_BYTES, free_bytes // 4, int(rate * seconds / _PASSES)) // 8 * 8
        return Reading(round(memory_read_rate(device, nbytes=nbytes) if nbytes > _PROBE_BYTES else rate))
    except RuntimeError as error:  # torch is out of memory
        return Reading.missing(_first_line(error))


def _copy_rate(device: torch.device, *, pinned: bool) -> Reading:
    if device.type != "cuda":
        return Reading.missing("no GPU: nothing is copied")
    try:
        return Reading(round(host_to_device_rate(device, pinned=pinned, nbytes=_COPY_BYTES)))
    except RuntimeError as error:
        return Reading.missing(_first_line(error))


def _disk_rate(directory: Path, seconds: float) -> Reading:
    """Reads, past the page cache, a file of random bytes that took at most twice `seconds` to write."""
    try:
        with _scratch(directory, 2 * seconds) as (path, nbytes):
            return Reading(round(disk_read_rate([Span(path, 0, nbytes)], max_s=seconds).bytes_per_s))
    except OSError as error:
        return Reading.missing(
            f"a file of {format_size(_BLOCK_BYTES)} cannot be written in {directory}: {error.strerror}"
        )
    except LinkError as error:
        return Reading.missing(str(error))


@contextmanager
def _scratch(directory: Path, seconds: float) -> Iterator[tuple[Path, int]]:
    """A path to a file of random bytes without a name, on the disk and not in the page cache, and its size."""
    limit_bytes = min(SCRATCH_BYTES, shutil.disk_usage(directory).free // 10)
    block, written_bytes = os.urandom(_BLOCK_BYTES), 0
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        until_s = time.perf_counter() + seconds
        while not written_bytes or (written_bytes + len(block) <= limit_bytes and time.perf_counter() < until_s):
            written_bytes += file.write(block)
            os.fdatasync(file.fileno())  # block by block, or the last one would take all the time at once
        yield Path(f"/proc/self/fd/{file.fileno()}"), written_bytes


def _existing(directory: Path) -> Path:
    """The directory or the closest one above it that is there."""
    return next(place for place in (directory.absolute(), *directory.absolute().parents) if place.is_dir())


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
