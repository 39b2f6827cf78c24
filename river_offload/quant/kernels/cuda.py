"""Kernels on CUDA: gemlite's, where it is installed, and torch's int4 matmul (tinygemm)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.quant.kernels.base import Kernel, MatrixSpec, Parts
from river_offload.quant.packing import QuantizedMatrix, unpack

_aten = torch.ops.aten
_ROWS_PER_PACKING = 256  # bounds the int32 temporaries of packing to some KiB a column


class Gemlite(Kernel):
    """gemlite's Triton kernels, called through its functional interface.

    gemlite computes `q * scale + zero`. Our offset counts from the middle of the range, so zero = offset - middle *
    scale, rounded once more to the activation dtype: weights differ from the oracle's by up to 1/64 of a step.
    Source: `forward_functional` and `GemLiteLinearTriton.pack` in gemlite/core.py.
    """

    name = "gemlite"

    def declines(self, spec: MatrixSpec) -> str | None:
        if spec.device_type != "cuda":
            return f"runs on cuda, not {spec.device_type}"
        if spec.bits not in (2, 4, 8):
            return f"2, 4 or 8 bits, not {spec.bits}"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"no {spec.dtype} activations"
        if spec.group == spec.columns:
            return "one group a row means something else to gemlite"
        if find_spec("gemlite") is None:
            return "not installed (pip install gemlite)"
        return None

    def layout(self, spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = (spec.columns // spec.group, spec.rows)
        packed = (spec.columns * spec.bits // 32, spec.rows)
        return {"packed": (packed, torch.int32), "scale": (groups, spec.dtype), "zero": (groups, spec.dtype)}

    def prepare(self, matrix: QuantizedMatrix, spec: MatrixSpec, device: torch.device) -> dict[str, Tensor]:
        fields = 32 // spec.bits
        packed = torch.zeros(spec.columns // fields, spec.rows, dtype=torch.int32, device=device)
        for start in range(0, spec.rows, _ROWS_PER_PACKING):
            rows = slice(start, min(start + _ROWS_PER_PACKING, spec.rows))
            q = unpack(matrix.packed[rows].to(device), spec.bits).to(torch.int32)
            for i in range(fields):
                packed[:, rows] |= (q[:, i::fields] << (i * spec.bits)).T
        scale, offset = matrix.scale.to(device), matrix.offset.to(device)
        zero = offset.float() - 2 ** (spec.bits - 1) * scale.float()
        return {
            "packed": packed,
            "scale": scale.T.to(spec.dtype).contiguous(),
            "zero": zero.T.to(spec.dtype).contiguous(),
        }

    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        if isinstance(x, FakeTensor):
            return x.new_empty(x.shape[0], spec.rows)
        from gemlite.core import GEMLITE_ACC_DTYPE, TORCH_TO_DTYPE, forward_functional

        dtype = TORCH_TO_DTYPE[spec.dtype]
        # activations scaled, bits, group, mask, fields a word, input, output, sum and scale dtype, channel scale mode 0
        # (none), group mode 4 (q * scale + zero), contiguous: the order of GemLiteLinearTriton.get_meta_args
        fields = 32 // spec.bits
        kinds = (dtype.value, dtype.value, GEMLITE_ACC_DTYPE[dtype].value, dtype.value)
        meta = [0, spec.bits, spec.group, 2**spec.bits - 1, fields, *kinds, 0, 4, 1]
        y: Tensor = forward_functional(x, None, [parts["packed"], parts["scale"], parts["zero"]], meta)
        return y

    def dequantize(self, parts: Parts, spec: MatrixSpec) -> Tensor:
        shifts = torch.arange(0, 32, spec.bits, dtype=torch.int32, device=parts["packed"].device).view(1, -1, 1)
        q = (parts["packed"].unsqueeze(1) >> shifts) & (2**spec.bits - 1)
        weight = q.view(-1, spec.group, spec.rows).float()
        weight = weight * parts["scale"].float().unsqueeze(1) + parts["zero"].float().unsqueeze(1)
        return weight.view(spec.columns, spec.rows).T.to(spec.dtype)


class TorchInt4Cuda(Kernel):
    """`aten::_weight_int4pack_mm`: the same arithmetic as ours, `(q - 8) * scale + offset`.

    Source: aten/src/ATen/native/cuda/int4mm.cu. Values are packed two a byte for the conversion, the even column high.
    """

    name = "torch-int4"
    _INNER_K_TILES = (8, 4, 2)

    def declines(self, spec: MatrixSpec) -> str | None:
        if spec.device_type != "cuda":
            return f"runs on cuda, not {spec.device_type}"
        if spec.bits != 4 or spec.dtype != torch.bfloat16:
            return f"4 bits with bfloat16 only, not {spec.bits} with {spec.dtype}"
        if spec.rows % 8 or spec.columns % 32:
            return f"{spec.rows}x{spec.columns} is not a multiple of 8x32"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return "needs compute capability 8.0"
        return None

    def layout(self, spec: MatrixSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        inner = self._inner(spec)
        return {
            "packed": ((spec.rows // 8, spec.columns // (inner * 16), 32, inner // 2), torch.int32),
            "scale_offset": ((spec.columns // spec.group, spec.rows, 2), torch.bfloat16),
        }

    def prepare(self, matrix: QuantizedMatrix, spec: MatrixSpec, device: torch.device) -> dict[str, Tensor]:
        shape, dtype = self.layout(spec)["packed"]
        packed = torch.empty(shape, dtype=dtype, device=device)
        for start in range(0, spec.rows, _ROWS_PER_PACKING):  # whole tiles of 8 rows, which are packed one by one
            rows = slice(start, min(start + _ROWS_PER_PACKING, spec.rows))
            q = unpack(matrix.packed[rows].to(device), 4)
            pairs = (q[:, ::2] << 4 | q[:, 1::2]).contiguous()
            packed[rows.start // 8 : rows.stop // 8] = _aten._convert_weight_to_int4pack(pairs, self._inner(spec))
        scale_offset = torch.stack((matrix.scale.T, matrix.offset.T), dim=-1).contiguous()
        return {"packed": packed, "scale_offset": scale_offset.to(device)}

    def matmul(self, x: Tensor, parts: Parts, spec: MatrixSpec) -> Tensor:
        if isinstance(x, FakeTensor):
            return x.new_empty(x.shape[0], spec.rows)
        y: Tensor = _aten._weight_int4pack_mm(x.contiguous(), parts["packed"], spec.group, parts["scale_offset"])
        return y

    def dequantize(self, parts: Parts, spec: MatrixSpec) -> Tensor:
        """Multiplies the unit vectors: torch has no operation that unpacks. Exact, as each sum has one term."""
        out = torch.empty(spec.rows, spec.columns, dtype=torch.bfloat16, device=parts["packed"].device)
        for start in range(0, spec.columns, 256):
            columns = slice(start, min(start + 256, spec.columns))
            unit = torch.zeros(columns.stop - start, spec.columns, dtype=torch.bfloat16, device=out.device)
            unit[:, columns].fill_diagonal_(1)
            out[:, columns] = self.matmul(unit, parts, spec).T
        return out

    def _inner(self, spec: MatrixSpec) -> int:
        return next(inner for inner in self._INNER_K_TILES if spec.columns % (inner * 16) == 0)
