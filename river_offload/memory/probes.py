"""How much memory may be taken here, and the one figure of this process that is watched most."""

from __future__ import annotations

import ctypes
import sys

import psutil
import torch

from river_offload.memory.cgroups import container_memory
from river_offload.memory.nvml import card_memory
from river_offload.memory.process import card_names, host_use

MARGIN_SHARE = 0.10
"""Left alone when no budget is given: the allocator's fragments, the driver, other programs that grow."""


def free_device_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes that may be taken now, a margin already subtracted, and the words that say where the figure comes from.

    On CUDA the smaller of what torch and NVML report free; on CPU of the available memory and the container's limit.
    """
    if device.type == "cuda":
        found, figure = torch.cuda.mem_get_info(device)[0], "free device memory reported by torch"
        nvml_bytes = card_memory(*card_names(torch.cuda.get_device_properties(device))).free.value
        if nvml_bytes is not None and nvml_bytes < found:
            found, figure = nvml_bytes, "free device memory reported by NVML"
    else:
        found, figure = psutil.virtual_memory().available, "available memory"
        limited_bytes = container_memory().free.value
        if limited_bytes is not None and limited_bytes < found:
            found, figure = limited_bytes, "memory left under the container's limit"
    return int(found * (1 - MARGIN_SHARE)), f"{figure} less {MARGIN_SHARE:.0%}"


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process (RssAnon), without file-backed pages. Linux; else the whole RSS."""
    use = host_use()
    return use.anonymous.value or use.resident.value or 0


def return_freed_memory() -> None:
    """Ask the C library to hand freed heap pages back to the system; glibc keeps them otherwise (Linux only)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
