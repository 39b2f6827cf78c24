"""What the machine says about memory: how much a device has free, and what this process holds."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import psutil
import pynvml
import torch

MARGIN_SHARE = 0.10
"""Left alone when no budget is given: the allocator's fragments, the driver, other programs that grow."""


def free_device_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes that may be taken now, a margin already subtracted, and the words that say where the figure comes from.

    On CUDA the smaller of what torch and NVML report free; on CPU of the available memory and the container's limit.
    """
    if device.type == "cuda":
        found, figure = torch.cuda.mem_get_info(device)[0], "free device memory reported by torch"
        nvml_bytes = nvml_free_bytes(str(torch.cuda.get_device_properties(device).uuid))
        if nvml_bytes is not None and nvml_bytes < found:
            found, figure = nvml_bytes, "free device memory reported by NVML"
    else:
        found, figure = psutil.virtual_memory().available, "available memory"
        limited = cgroup_free_bytes()
        if limited is not None and limited < found:
            found, figure = limited, "memory left under the container's limit"
    return int(found * (1 - MARGIN_SHARE)), f"{figure} less {MARGIN_SHARE:.0%}"


def nvml_free_bytes(uuid: str) -> int | None:
    """Free memory of the GPU with `uuid` (with or without its "GPU-"), None where NVML cannot say.

    Asked by UUID: NVML counts devices its own way and knows nothing of CUDA_VISIBLE_DEVICES.
    """
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, no permission, a device that NVML does not list
        return None


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the tightest memory limit of this process's control groups leaves, None without one (v2, then v1).

    A limit anywhere above the group counts. Reclaimable page cache is not subtracted from the limit.
    """
    left = [
        limit - used
        for group, limit_name, used_name in _memory_groups(root, membership)
        if (limit := _read_int(group / limit_name)) is not None
        and (used := _read_anonymous(group, used_name)) is not None
    ]
    return max(min(left), 0) if left else None


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process (RssAnon), without file-backed pages. Linux; else the whole RSS."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process(os.getpid()).memory_info().rss)


def return_freed_memory() -> None:
    """Ask the C library to hand freed heap pages back to the system; glibc keeps them otherwise (Linux only)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _memory_groups(root: Path, membership: Path) -> list[tuple[Path, str, str]]:
    """The control groups above and at this process, each with the names of its limit and usage files."""
    groups = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's: then only the mount's own root exists.
        while group != base and not group.exists():
            group = group.parent
        while True:
            groups.append((group, *names))
            if group == base:
                break
            group = group.parent
    return groups


def _read_anonymous(group: Path, used_name: str) -> int | None:
    """Memory the group uses that cannot be reclaimed: usage less inactive file pages, as container tools count it."""
    used = _read_int(group / used_name)
    stat = group / "memory.stat"
    if used is None or not stat.exists():
        return used
    fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    return used - int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))


def _read_int(path: Path) -> int | None:
    """The number in a control file; None when there is none ("max", v1's huge default, no file)."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    if not text.isdecimal() or int(text) >= 1 << 62:
        return None
    return int(text)
