"""A file to read from, as slow as the test wants it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from river_offload.store.files import SourceFile
from river_offload.store.pieces import PIECE_BYTES, Span

SIZE = 3 * PIECE_BYTES + 5000
"""Bytes of the file."""


def opened(path: Path, kind: type[SourceFile] = SourceFile) -> Any:
    fd = os.open(path, os.O_RDONLY)
    source = kind(path, fd)
    os.close(fd)  # it has its own
    return source


def span(source: SourceFile, offset: int, nbytes: int) -> Span:
    return Span(source, offset, nbytes, torch.zeros(nbytes, dtype=torch.uint8), torch.uint8)


class Gated(SourceFile):
    """Lets reads of a file through one by one and notes their order."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.gate = threading.Semaphore(0)
        self.offsets: list[int] = []

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> int:
        self.offsets.append(offset)
        self.gate.acquire()
        return super().read(buffer, offset, nbytes)


def until(condition: Callable[[], bool]) -> None:
    """Wait for threads to get somewhere."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "the threads did not get there"
        time.sleep(0.001)
