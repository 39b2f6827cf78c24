"""torch's own int4 matmul on CPU (`aten::_weight_int4pack_mm_for_cpu`).

Its packed form depends on the vector unit torch found (aten/src/ATen/native/cpu/int4mm_kernel.cpp), and torch has no
operation that unpacks it. What all forms share: rows are cut into tiles of 64 or 32, the last tile may be shorter, and
within a tile of n rows the n values of one column are n / 2 consecutive bytes. Which nibble belongs to which row is
probed, with torch's own packing of the numbers of the rows; a form that does not fit is declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from river_offload.quant.kernels.base import Kernel, MatrixSpec, Parts
from river_offload.quant.packing import QuantizedMatrix, unpack

_aten = torch.ops.aten

# Measured on 2 Zen 4 cores, 4096x4096 bf16: the op takes 0.19 ms a row, dequantizing 9 ms a call and 0.09 ms a row.
_MAX_ROWS_OF_OP = 96
# Values that are dequantized at once: the temporaries should stay in the cache.
_BLOCK_VALUES = 1 << 21
_ROWS_PER_PACKING = 256  # the op takes int32 values: packing in blocks of rows bounds them to 1 KiB a column


@dataclass(frozen=True, slots=True)
class TileLayout:
    """How this machine's torch packs int4: tiles of `tile_rows` rows, shorter last tile; `order` by tile height."""

    tile_rows: int
    order: dict[int, tuple[int, ...]]

    def tiles(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """(first row, number of tiles, rows a tile): all the whole tiles, then the shorter one."""
        whole = rows // self.tile_rows
        if whole:
            yield 0, whole, self.tile_rows
        if rows % self.tile_rows:
            yield whole * self.tile_rows, 1, rows % self.tile_rows


def unpack_tiles(packed: Tensor) -> Tensor:
    """uint8 [T, K, height / 2] -> uint8 [T, K, height]; value j of a column belongs to row `order[height][j]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


@lru_cache(maxsize=1)
def probe() -> TileLayout | None:
    """The layout of this machine's torch; None when it is not of the known kind. Runs once, on small real tensors."""
    with unset_fake_temporarily():
        for tile_rows in (64, 32):
            layout = TileLayout(tile_rows, {height: _nibble_order(height) for height in range(16, tile_rows + 1, 16)})
            if _describes(layout):
                return layout
    return None


def _nibble_order(height: int) -> tuple[int, ...]:
    """The row behind each nibble of one column (low nibbles first): packs the row numbers, 4 bits at a time."""
    rows = torch.arange(height, dtype=torch.int32).unsqueeze(1).repeat(1, 2)
    digits = []
    for digit in (rows & 15, rows >> 4):
        column = _aten._convert_weight_to_int4pack_for_cpu(digit, 1).flatten()[: height // 2]
        digits.append(unpack_tiles(column))
    return tuple((digits[0] + 16 * digits[1]).tolist())


def _describes(layout: TileLayout) -> bool:
    rows, columns = 2 * 64 + 48, 6
    q = torch.randint(0, 16, (rows, columns), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = _aten._convert_weight_to_int4pack_for_cpu(q, 1).flatten()
    for start, count, height in layout.tiles(rows):
        order = layout.order[height]
        if sorted(order) != list(range(height)):
            return False
        stop = start + count * height
        tiles = packed[start * columns // 2 : stop * columns // 2].view(count, columns, height // 2)
        expected = q[start:stop].view(count, height, columns)[:, list(order)].transpose(1, 2)
        if not torch.equal(unpack_tiles(tiles).int(), expected):
            return False
    return True


class TorchInt4Cpu(Kernel):
    """The op for few rows of activations; for many, tiles are dequantized and multiplied."""

    name = "torch-int4"

    def declines(self, spec: MatrixSpec) -> str | None:
        if spec.device_type != "cpu":
            return f"runs on cpu, not {spec.device_type}"
        if spec.bits != 4:
            return f"4 bits only, not {spec.bits}"
        if spec.rows % 16:
            return f"{spec.rows} output features are not a multiple of 16"
        if spec.dtype != torch.bfloat16:
            # The op has vector code for bfloat16 alone: in float32 one row of 4096x4096 takes 24 ms, dequantizing 9.
            return f"bfloat16 activations only, not {spec.dtype}"
        if not hasattr(_aten, "_weight_int4pack_mm_for_cpu"):
            return "this torch has no _weight_int4pack_mm_for_cpu"
        if probe() is None:
            return "this torch packs int4 in an unknown order"
        return None

    def layout(self, spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "packed": ((spec.rows, spec.columns // 2), torch.uint8),
            "scale_offset": ((spec.columns // spec.group, spec.rows, 2), spec.dtype),
        }

    def prepare(self, matrix: QuantizedMatrix, spec: MatrixSpec, device: torch.device) -> dict[str, Tensor]:
        packed = torch.empty(spec.rows, spec.columns // 2, dtype=torch.uint8, device=device)
        for start in range(0, spec.rows, _ROWS_PER_PACKING):  # whole tiles, so blocks are packed as the whole would be
            rows = slice(start, min(start + _ROWS_PER_PACKING, spec.rows))
            q = unpack(matrix.packed[rows], 4).to(torch.int32)
            packed[rows] = _aten._convert_weight_to_int4pack_for_cpu(q, 1)
        scale_offset = torch.empty(spec.columns // spec.group, spec.rows, 2, dtype=spec.dtype, device=device)
        scale_offset[..., 0] = matrix.scale.T
        scale_offset[..., 1] = matrix.offset.T
        return {"packed": packed, "scale_offset": scale_offset}

    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        if x.shape[0] <= _MAX_ROWS_OF_OP:
            y: Tensor = _aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), parts["packed"], spec.group, parts["scale_offset"]
            )
            return y
        out = x.new_empty(x.shape[0], spec.rows)
        for start, order, weight in self._dense_tiles(parts, spec):
            tiles, _, height = weight.shape
            columns = torch.unflatten(out[:, start : start + tiles * height], 1, (tiles, height))
            columns[..., order] = torch.matmul(x, weight).transpose(0, 1)
        return out

    def dequantize(self, parts: Parts, spec: MatrixSpec) -> Tensor:
        out = torch.empty(spec.rows, spec.columns, dtype=spec.dtype, device=parts["packed"].device)
        for start, order, weight in self._dense_tiles(parts, spec):
            tiles, _, height = weight.shape
            torch.unflatten(out[start : start + tiles * height], 0, (tiles, height))[:, order] = weight.transpose(1, 2)
        return out

    def _dense_tiles(self, parts: Parts, spec: MatrixSpec) -> Iterator[tuple[int, list[int], Tensor]]:
        """(first row, order of rows within a tile, dense [T, K, rows a tile]) until all rows were given."""
        layout = probe()
        assert layout is not None, "a declined kernel was used"
        flat = parts["packed"].view(-1)
        for first, count, height in layout.tiles(spec.rows):
            order = list(layout.order[height])
            step = max(1, _BLOCK_VALUES // (spec.columns * height))
            for tile in range(0, count, step):
                tiles = min(step, count - tile)
                start, stop = first + tile * height, first + (tile + tiles) * height
                packed = flat[start * spec.columns // 2 : stop * spec.columns // 2].view(tiles, spec.columns, -1)
                # [K / group, tiles, height, 2] -> [tiles, K / group, 1, height]
                scale, offset = (
                    part[:, :, order].transpose(0, 1).unsqueeze(2)
                    for part in torch.unflatten(parts["scale_offset"][:, start:stop], 1, (tiles, height)).unbind(-1)
                )
                q = torch.unflatten(unpack_tiles(packed).to(spec.dtype).sub_(8), 1, (-1, spec.group))
                yield start, order, torch.addcmul(offset, q, scale, out=q).flatten(1, 2)
