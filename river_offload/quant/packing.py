"""The canonical form of a quantized matrix: what the cache stores and every kernel starts from.

A weight matrix [N, K] is cut along K into groups of `group` values, and
`weight = (q - 2^(bits-1)) * scale + offset`, with q in 0..2^bits-1 and one scale and offset a group.

Scale and offset are bfloat16, whatever the model computes in: one cache serves every dtype, and every kernel and dtype
sees the same numbers. `(q - 2^(bits-1)) * scale` is exact in float32 (at most 8 + 8 significant bits), so a weight is
rounded once, by the addition; bfloat16 converts exactly to float32, and to float16 for magnitudes above 6e-5.

Packing works on chunks of 32 consecutive values of a row, because 32 divides every group. A chunk is a sequence of
planes (3 bits are a plane of 2 and a plane of 1). Within a plane of w bits byte i carries the values i, i + 4w, i + 8w,
... from its low bits upwards, so that a vector unit unpacks contiguous values with one shift and one mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
SCALE_DTYPE = torch.bfloat16
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] in canonical form.

    Attributes:
        packed: uint8 [N, K * bits / 8].
        scale, offset: bfloat16 [N, K / group].
    """

    packed: Tensor
    scale: Tensor
    offset: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.packed.shape[0], self.packed.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]


def pack(q: Tensor, bits: int) -> Tensor:
    """uint8 values [..., K] below 2^bits, K a multiple of 32 -> uint8 [..., K * bits / 8]."""
    chunks = torch.unflatten(q, -1, (-1, CHUNK))
    planes, done = [], 0
    for width in PLANES[bits]:
        values = torch.unflatten((chunks >> done) & (2**width - 1), -1, (8 // width, 4 * width))
        plane = values[..., 0, :].clone()
        for i in range(1, 8 // width):
            plane |= values[..., i, :] << (i * width)
        planes.append(plane)
        done += width
    return torch.cat(planes, dim=-1).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., K * bits / 8] -> uint8 [..., K]."""
    chunks = torch.unflatten(packed, -1, (-1, 4 * bits))
    q = packed.new_zeros((*chunks.shape[:-1], CHUNK))
    done = 0
    for width in PLANES[bits]:
        plane = chunks[..., 4 * done : 4 * (done + width)]
        values = torch.unflatten(q, -1, (8 // width, 4 * width))
        for i in range(8 // width):
            values[..., i, :] |= ((plane >> (i * width)) & (2**width - 1)) << done
        done += width
    return q.flatten(-2)


def dequantize_rows(packed: Tensor, scale: Tensor, offset: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Canonical rows -> dense [n, K] in `dtype`: computed in float32, rounded once to `dtype`."""
    weight = torch.unflatten(unpack(packed, bits).to(torch.float32), -1, (scale.shape[-1], -1))
    weight.sub_(2 ** (bits - 1)).mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1))
    return weight.flatten(-2).to(dtype)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense matrix [N, K] that `matrix` stands for."""
    return dequantize_rows(matrix.packed, matrix.scale, matrix.offset, matrix.bits, dtype)
