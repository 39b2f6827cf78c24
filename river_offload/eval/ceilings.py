"""What the machine can do at best, measured apart from the code that is judged by it: memory, disk, host to device.

Nothing here goes through the store or its links, which would hide their own losses in the ceiling.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from river_offload.errors import LinkError

READERS = 8
"""Threads that read at once: a disk behind a network, and NVMe, need several requests in flight."""
CHUNK_BYTES = 8 << 20
SECTOR_BYTES = 4096
"""O_DIRECT wants offsets, lengths and addresses at multiples of the device's sector: 4096 serves every disk."""
MEMORY_BYTES = 512 << 20
"""Far beyond any cache, far below any budget."""
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes at `offset` of `file`."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What reading spans from disk achieved."""

    bytes_per_s: float
    nbytes: int
    seconds: float
    direct: bool
    """Whether the reads bypassed the page cache (O_DIRECT); else it was dropped before."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order of their files and offsets, those that touch each other made one."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda item: (str(item.file), item.offset)):
        if result and (result[-1].file, result[-1].offset + result[-1].nbytes) == (span.file, span.offset):
            result[-1] = Span(span.file, result[-1].offset, result[-1].nbytes + span.nbytes)
        else:
            result.append(span)
    return result


def disk_read_rate(
    spans: Iterable[Span], *, readers: int = READERS, max_bytes: int | None = None, max_s: float | None = None
) -> DiskRate:
    """Read the spans once, in order, with several threads and a cold page cache.

    Args:
        max_bytes, max_s: stop after so many bytes or seconds; the rate is that of what was read by then.

    Raises LinkError when a file cannot be read.
    """
    chunks = _chunks(merged(spans), max_bytes)
    files = sorted({chunk.file for chunk in chunks}, key=str)
    descriptors: dict[Path, int] = {}
    try:
        opened = [_open(file, descriptors) for file in files]  # all of them, whatever the first one says
        for file in files:
            os.posix_fadvise(descriptors[file], 0, 0, os.POSIX_FADV_DONTNEED)
        return _read_all(chunks, descriptors, readers, max_s, all(opened))
    except OSError as error:
        raise LinkError(f"{error.filename or files[0]}: cannot be read: {error.strerror or error}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def memory_read_rate(device: torch.device, *, nbytes: int = MEMORY_BYTES) -> float:
    """Bytes per second at which all cores (or the GPU) read memory in order: the best of several rounds and reductions,
    since which one of them torch vectorizes well depends on the processor."""
    words = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    readings: Sequence[Callable[[], Any]] = (words.amax, words.view(torch.float32).sum, words.view(torch.int64).amax)
    best_s = min(_fastest_s(reading, device) for reading in readings)
    return words.nbytes / best_s


def host_to_device_rate(device: torch.device, *, pinned: bool, nbytes: int = 256 << 20) -> float:
    """Bytes per second of copies from host memory to a GPU, one at a time on their own."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / _fastest_s(lambda: target.copy_(host, non_blocking=pinned), device)


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some calls, after one that warms up. On a GPU until it has done what was asked."""
    call()
    best_s = float("inf")
    for _ in range(ROUNDS):
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - started)
    return best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _chunks(spans: Sequence[Span], max_bytes: int | None) -> list[Span]:
    """Pieces of at most CHUNK_BYTES, begun and ended at sectors."""
    chunks, left = [], float("inf") if max_bytes is None else max_bytes
    for span in spans:
        start = span.offset // SECTOR_BYTES * SECTOR_BYTES
        end = -(-(span.offset + span.nbytes) // SECTOR_BYTES) * SECTOR_BYTES
        while start < end and left > 0:
            nbytes = min(CHUNK_BYTES, end - start)
            chunks.append(Span(span.file, start, nbytes))
            start, left = start + nbytes, left - nbytes
    return chunks


def _open(file: Path, descriptors: dict[Path, int]) -> bool:
    """Open for direct reads where the file system has them; whether it does. Some refuse only the first read."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct:
        try:
            descriptors[file] = os.open(file, flags | direct)
            with mmap.mmap(-1, SECTOR_BYTES) as sector:  # anonymous memory starts at a page
                os.preadv(descriptors[file], [sector], 0)
            return True
        except OSError:
            if file in descriptors:
                os.close(descriptors.pop(file))
    descriptors[file] = os.open(file, flags)
    return False


def _read_all(
    chunks: Sequence[Span], descriptors: dict[Path, int], readers: int, max_s: float | None, direct: bool
) -> DiskRate:
    queue, done_bytes = iter(chunks), [0] * readers
    failures: list[OSError] = []
    lock, stop = threading.Lock(), threading.Event()
    started = time.perf_counter()

    def read(reader: int) -> None:
        with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as memory:
            while not stop.is_set():
                if max_s is not None and time.perf_counter() - started > max_s:
                    return
                with lock:
                    chunk = next(queue, None)
                if chunk is None:
                    return
                try:
                    done_bytes[reader] += _read_chunk(descriptors[chunk.file], chunk, memory)
                except OSError as error:
                    failures.append(OSError(error.errno, error.strerror, str(chunk.file)))
                    stop.set()

    threads = [threading.Thread(target=read, args=(reader,), name=f"ceiling-{reader}") for reader in range(readers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # Ctrl-C: the readers end after the chunk they are at
    seconds = time.perf_counter() - started
    if failures:
        raise failures[0]
    nbytes = sum(done_bytes)
    if not nbytes:
        raise LinkError("no bytes were read: there is nothing to measure the disk with")
    return DiskRate(nbytes / seconds, nbytes, seconds, direct)


def _read_chunk(descriptor: int, chunk: Span, memory: memoryview) -> int:
    """Bytes read; fewer than the chunk has at the end of the file only."""
    done = 0
    while done < chunk.nbytes:
        count = os.preadv(descriptor, [memory[done : chunk.nbytes]], chunk.offset + done)
        done += count
        if count == 0 or count % SECTOR_BYTES:
            break
    return done
