"""The ordered list of kernels, and the choice among them. The first that does not decline serves; reasons are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from river_offload.config import default_cache_dir
from river_offload.quant.kernels.base import Kernel, MatrixSpec
from river_offload.quant.kernels.cuda import Gemlite, TorchInt4Cuda
from river_offload.quant.kernels.dense import Blocks, Reference
from river_offload.quant.kernels.native_cpu import Native, NativeInt4
from river_offload.quant.kernels.torch_cpu import TorchInt4Cpu

__all__ = ["Kernel", "KernelChoice", "MatrixSpec", "Reference", "choose", "ordered"]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel that serves a matrix, and (name, reason) of each one before it that declined."""

    kernel: Kernel
    declined: tuple[tuple[str, str], ...]


def ordered(cache_dir: Path | None = None) -> tuple[Kernel, ...]:
    """Every kernel for the user, the fastest first; the last declines nothing.

    `cache_dir` is where native code is built; None means `default_cache_dir()`.
    """
    cache_dir = cache_dir or default_cache_dir()
    return (Gemlite(), TorchInt4Cuda(), NativeInt4(cache_dir), TorchInt4Cpu(), Native(cache_dir), Blocks())


def choose(spec: MatrixSpec, kernels: Sequence[Kernel] | None = None) -> KernelChoice:
    """The first of `kernels` (default: `ordered()`) that serves `spec`."""
    declined: list[tuple[str, str]] = []
    for kernel in ordered() if kernels is None else kernels:
        reason = kernel.declines(spec)
        if reason is None:
            return KernelChoice(kernel, tuple(declined))
        declined.append((kernel.name, reason))
    raise ValueError(f"no kernel serves {spec}: {declined}")
