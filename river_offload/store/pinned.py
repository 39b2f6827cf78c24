"""Host memory that a GPU's copy engine can read by itself: page-locked to the byte, as far as the system allows."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import resource
import warnings
from typing import Any

import numpy as np
import torch

from river_offload.errors import RiverError


def page_aligned(nbytes: int) -> torch.Tensor:
    """Zeroed private memory of whole pages: uint8 [nbytes] that starts at one. Raises RiverError when there is none."""
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise RiverError(
            f"{nbytes} bytes of host memory cannot be had ({error}): give a smaller host_budget"
        ) from error
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8, count=nbytes))


class HostMemory:
    """Buffers, pinned one by one with cudaHostRegister. (Torch's own allocator rounds up to a power of two.)

    When the system refuses to pin any more, this says so once and goes on with pageable memory: copies from it are
    slower and hold the thread that issues them, and nothing else changes.

    Args:
        need_bytes: what will be asked for in all; for the message.
        cudart: the CUDA runtime (`torch.cuda.cudart()`), or None to pin nothing.

    Attributes:
        pinned_bytes, pageable_bytes: of the buffers handed out.
    """

    def __init__(self, need_bytes: int, cudart: Any | None) -> None:
        self.need_bytes = need_bytes
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._cudart = cudart
        self._refused = cudart is None
        self._pinned: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A buffer: uint8 [nbytes], CPU, page-aligned. Raises RiverError when there is no memory."""
        buffer = page_aligned(nbytes)
        if not self._refused and self._pin(buffer):
            self._pinned.append(buffer)
            self.pinned_bytes += nbytes
        else:
            self.pageable_bytes += nbytes
        return buffer

    def close(self) -> None:
        """Unpin all buffers; no copy from them may be under way. May be called twice."""
        while self._pinned:
            buffer = self._pinned.pop()
            assert self._cudart is not None
            self._cudart.cudaHostUnregister(buffer.data_ptr())
        self.pinned_bytes = self.pageable_bytes = 0

    def _pin(self, buffer: torch.Tensor) -> bool:
        assert self._cudart is not None
        error = self._cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        if error == self._cudart.cudaError.success:
            return True
        self._refused = True
        _clear_last_error(self._cudart)
        reason = self._cudart.cudaGetErrorString(error)
        warnings.warn(
            f"pinning host memory failed after {self.pinned_bytes} of {self.need_bytes} bytes: {reason}. "
            f"{_limit()} Goes on with pageable memory, from which copies to the GPU take about twice as long. Raise "
            "the limit, or give a smaller host_budget.",
            stacklevel=3,
        )
        return False


def _limit() -> str:
    """What may be in the way."""
    if "microsoft" in platform.release().lower():
        return "This is WSL, where only part of the memory can be pinned."
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return "RLIMIT_MEMLOCK is unlimited, so it is the driver or the container that refuses."
    return f"RLIMIT_MEMLOCK (ulimit -l) is {limit_bytes} bytes."


def _clear_last_error(cudart: Any) -> None:
    """CUDA keeps the error and would report it at the next kernel. Torch binds no call that clears it; the runtime
    that it loaded has one."""
    clear = getattr(cudart, "cudaGetLastError", None)
    if clear is None:
        with contextlib.suppress(AttributeError, OSError):
            clear = ctypes.CDLL(None).cudaGetLastError
    if clear is not None:
        clear()
