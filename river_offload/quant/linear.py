"""The linear of a river layer: quantized weights, activations and results in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from river_offload.quant.hqq import quantize_matrix
from river_offload.quant.kernels import Kernel, MatrixSpec, choose
from river_offload.quant.packing import QuantizedMatrix


class RiverLinear(nn.Module):
    """`y = x W^T + bias` with W held only in the form its kernel multiplies from.

    The kernel's parts are buffers, the bias is a parameter that takes no gradient. Made by one of the class methods;
    built with `empty` and run under FakeTensorMode it allocates exactly what the real one does.
    """

    def __init__(self, kernel: Kernel, spec: MatrixSpec, parts: dict[str, Tensor], bias: Tensor | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.spec = spec
        self.out_features, self.in_features = spec.rows, spec.columns
        for name, part in parts.items():
            self.register_buffer(name, part)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def from_matrix(
        cls,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kernel: Kernel | None = None,
    ) -> RiverLinear:
        """Prepares a matrix in canonical form for `kernel` (default: the first that serves it)."""
        device = torch.device(device)
        spec = MatrixSpec(*matrix.shape, matrix.bits, matrix.group, dtype, device.type)
        kernel = kernel or choose(spec).kernel
        return cls(kernel, spec, kernel.prepare(matrix, spec, device), None if bias is None else bias.to(device, dtype))

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        bits: int = 4,
        group: int = 64,
        dtype: torch.dtype | None = None,
        kernel: Kernel | None = None,
        name: str = "weight",
    ) -> RiverLinear:
        """Quantizes `weight` [N, K]. `dtype` of the activations defaults to the weight's. Raises as quantize_matrix."""
        matrix = quantize_matrix(weight, bits, group, name=name)
        return cls.from_matrix(matrix, bias, dtype=dtype or weight.dtype, device=weight.device, kernel=kernel)

    @classmethod
    def empty(
        cls, spec: MatrixSpec, *, bias: bool = False, device: torch.device | str = "cpu", kernel: Kernel | None = None
    ) -> RiverLinear:
        """Allocates without data. For planning a GPU on fake CPU tensors `device` may differ from spec.device_type."""
        kernel = kernel or choose(spec).kernel
        parts = {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in kernel.layout(spec).items()
        }
        return cls(kernel, spec, parts, torch.empty(spec.rows, dtype=spec.dtype, device=device) if bias else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the real storages behind this linear."""
        tensors = [*self._buffers.values(), *self._parameters.values()]
        return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)

    def dequantize(self) -> Tensor:
        """The dense weight [N, K] in the activation dtype."""
        return self.kernel.dequantize(self._parts(), self.spec)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., K] -> [..., N]."""
        y = self.kernel.matmul(x.reshape(-1, self.in_features), self._parts(), self.spec)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _parts(self) -> dict[str, Tensor]:
        return self._buffers  # type: ignore[return-value]  # a part is never None

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.columns} -> {spec.rows}, {spec.bits} bits, group {spec.group}, {self.kernel.name}"
