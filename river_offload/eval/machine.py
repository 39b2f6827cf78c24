"""What this machine offers to a model: devices, limits, pinning, rates, kernels. What `river-mem doctor` prints."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from river_offload._version import __version__
from river_offload.errors import RiverError
from river_offload.eval.advice import advice
from river_offload.eval.quick_rates import quick_rates
from river_offload.memory.cgroups import container_memory
from river_offload.memory.devices import Gpus, gpus
from river_offload.memory.limits import locked_memory, wsl_version
from river_offload.memory.probes import free_device_bytes
from river_offload.memory.process import host_use
from river_offload.progress import Progress
from river_offload.quant.kernels import MatrixSpec, choose, ordered
from river_offload.quant.native import find_compiler
from river_offload.store.pinned import HostMemory

PIN_BYTES = 16 << 20
WIDTHS = (4, 8, 3, 2)
"""Bits of a river weight, the usual ones first."""
SIDE, GROUP, DTYPE = 4096, 64, torch.bfloat16
"""The matrix that kernels are asked about: one of an 8B model in its own dtype."""


def examine(cache_dir: Path, *, seconds: float, progress: Progress) -> dict[str, Any]:
    """Everything about this machine, ready for JSON; docs/river-mem.md has the schema. What cannot be had is null,
    beside the reason.

    Args:
        cache_dir: where native code is built, and on whose file system the disk is measured.
        seconds: about how long to measure rates; 0 measures none.
    """
    found = gpus()  # first: what NVML counts should not include the CUDA context that measuring makes
    device = torch.device("cuda", found.found[0].number) if found.torch_reason is None else torch.device("cpu")
    facts = {
        "version": __version__,
        "machine": _machine(),
        "gpus": asdict(found),
        "host": _host(),
        "limits": {
            "container": asdict(container_memory()),
            "memlock": asdict(locked_memory()),
            "wsl_version": wsl_version(),
        },
        "pinning": pinning(found),
        "rates": quick_rates(device, cache_dir, seconds=seconds, progress=progress),
        "kernels": list(kernels(("cpu", "cuda") if device.type == "cuda" else ("cpu",), cache_dir)),
        "compiler": find_compiler(),
    }
    return facts | {"advice": advice(facts)}


def pinning(found: Gpus, cudart: Any | None = None, nbytes: int = PIN_BYTES) -> dict[str, Any]:
    """Whether host memory can be pinned, tried with a small piece: {"needed", "works", "tried_bytes", "reason"}.

    Args:
        cudart: the CUDA runtime; that of torch by default.
    """
    if found.torch_reason is not None:
        reason = f"no GPU reads host memory here ({found.torch_reason}): layers go from disk to where they are used"
        return {"needed": False, "works": None, "tried_bytes": 0, "reason": reason}
    outcome = {"needed": True, "tried_bytes": nbytes}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            memory = HostMemory(nbytes, torch.cuda.cudart() if cudart is None else cudart)
            memory.allocate(nbytes)
        except (RiverError, RuntimeError) as error:  # no memory at all; a CUDA runtime that does not start
            return outcome | {"works": False, "reason": str(error).splitlines()[0]}
    works = memory.pinned_bytes == nbytes
    memory.close()
    return outcome | {"works": works, "reason": None if works else str(said[-1].message)}


def kernels(device_types: Sequence[str], cache_dir: Path) -> Iterator[dict[str, Any]]:
    """Which kernel multiplies river matrices of an 8B model, for each device and width, and why others do not."""
    known = ordered(cache_dir)
    for device_type in device_types:
        for bits in WIDTHS:
            choice = choose(MatrixSpec(SIDE, SIDE, bits, GROUP, DTYPE, device_type), known)
            declined = [{"kernel": name, "reason": reason} for name, reason in choice.declined]
            yield {"device": device_type, "bits": bits, "kernel": choice.kernel.name, "declined": declined}


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _host() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    usable_bytes, source = free_device_bytes(torch.device("cpu"))
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "usable_bytes": usable_bytes,
        "usable_source": source,
        "swap_bytes": psutil.swap_memory().total,
        "process": asdict(host_use()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
