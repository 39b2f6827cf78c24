"""What a kernel is: one way to hold a quantized matrix in memory and to multiply by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.quant.packing import QuantizedMatrix

Parts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix [rows N, columns K] to be multiplied by activations of `dtype` on a device of `device_type`."""

    rows: int
    columns: int
    bits: int
    group: int
    dtype: torch.dtype
    device_type: str


class Kernel(ABC):
    """Stateless. The matrix lives in `parts`, the tensors that `layout` names: the only copy of it in memory."""

    name: ClassVar[str]

    @abstractmethod
    def declines(self, spec: MatrixSpec) -> str | None:
        """Why this kernel cannot serve `spec`; None when it can."""

    @abstractmethod
    def layout(self, spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part."""

    @abstractmethod
    def prepare(self, matrix: QuantizedMatrix, spec: MatrixSpec, device: torch.device) -> dict[str, Tensor]:
        """The parts of `matrix` on `device`, as `layout` says. Beyond them it needs a few megabytes."""

    @abstractmethod
    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        """`x` [M, K] of spec.dtype -> [M, N] of spec.dtype. Runs on fake tensors too, with the same allocations."""

    @abstractmethod
    def dequantize(self, parts: Parts, spec: MatrixSpec) -> Tensor:
        """The dense matrix [N, K] in spec.dtype."""

    def nbytes(self, spec: MatrixSpec) -> int:
        """Exact bytes of all parts."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.layout(spec).values())


def canonical_layout(spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The layout of a kernel that reads the canonical form of `packing` as it is."""
    groups = (spec.rows, spec.columns // spec.group)
    return {
        "packed": ((spec.rows, spec.columns * spec.bits // 8), torch.uint8),
        "scale": (groups, torch.bfloat16),
        "offset": (groups, torch.bfloat16),
    }


def canonical_parts(matrix: QuantizedMatrix, device: torch.device) -> dict[str, Tensor]:
    """The parts of `canonical_layout`: `matrix`'s own tensors where they already rest on `device`."""
    return {
        "packed": matrix.packed.to(device).contiguous(),
        "scale": matrix.scale.to(device).contiguous(),
        "offset": matrix.offset.to(device).contiguous(),
    }


def block_starts(rows: int, step: int, x: Tensor) -> range:
    """Where the blocks of a matrix of `rows` begin. For a fake `x` the first two stand for all: they allocate alike."""
    starts = range(0, rows, step)
    return starts[:2] if isinstance(x, FakeTensor) else starts
