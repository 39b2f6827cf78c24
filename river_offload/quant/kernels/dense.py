"""Kernels in plain torch that dequantize and multiply: any device, bits, group and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from river_offload.quant.kernels.base import (
    Kernel,
    MatrixSpec,
    Parts,
    block_starts,
    canonical_layout,
    canonical_parts,
)
from river_offload.quant.packing import QuantizedMatrix, dequantize_rows

# Dense values a block may hold. On CPU its float32 temporary (4 MiB) should stay in the last-level cache; on a GPU
# blocks only bound the temporary memory (192 MiB with its 16-bit result), and fewer launches are better.
_BLOCK_VALUES = {"cpu": 1 << 20, "cuda": 1 << 25}


class _Canonical(Kernel):
    def declines(self, spec: MatrixSpec) -> str | None:
        return None

    def layout(self, spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return canonical_layout(spec)

    def prepare(self, matrix: QuantizedMatrix, spec: MatrixSpec, device: torch.device) -> dict[str, Tensor]:
        return canonical_parts(matrix, device)

    def dequantize(self, parts: Parts, spec: MatrixSpec) -> Tensor:
        return dequantize_rows(parts["packed"], parts["scale"], parts["offset"], spec.bits, spec.dtype)


class Reference(_Canonical):
    """Dequantizes the whole matrix, then multiplies. The oracle of every other kernel; too large and slow to serve."""

    name = "reference"

    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        return F.linear(x, self.dequantize(parts, spec))


class Blocks(_Canonical):
    """Dequantizes some rows of the matrix, multiplies by them, and goes on: bounded memory. Declines nothing."""

    name = "dequantize-blocks"

    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        out = x.new_empty(x.shape[0], spec.rows)
        step = max(1, _BLOCK_VALUES.get(spec.device_type, 1 << 20) // spec.columns)
        for start in block_starts(spec.rows, step, x):
            block = slice(start, min(start + step, spec.rows))
            packed, scale, offset = (parts[part][block] for part in ("packed", "scale", "offset"))
            out[:, block] = F.linear(x, dequantize_rows(packed, scale, offset, spec.bits, spec.dtype))
        return out
