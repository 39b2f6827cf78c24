"""In which precision the parts of a model are held, and which kernels may multiply the quantized ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from river_offload.errors import UsageError
from river_offload.quant.hqq import fitting
from river_offload.quant.kernels import Kernel, KernelChoice, MatrixSpec, choose
from river_offload.quant.linear import RiverLinear
from river_offload.quant.packing import QuantizedMatrix
from river_offload.quant.river import choices, install, install_empty, river_parts


@dataclass(frozen=True)
class Precision:
    """One model's settings: what the plan, the dry run and the loader must agree on."""

    dtype: torch.dtype
    """Of activations, and of all that is not quantized."""
    bits: int
    group: int
    head_bits: int
    """16 leaves the LM head alone."""
    device_type: str
    """What is planned for, "cpu" or "cuda"; fake tensors are CPU ones either way."""
    kernels: tuple[Kernel, ...]

    def river_bytes(self, layer: nn.Module) -> int:
        """Bytes of the quantized linears of a layer (its weights may be on meta)."""
        return sum(self.river_parts(layer).values())

    def river_parts(self, layer: nn.Module) -> dict[str, int]:
        """The same by category: packed values, scales, zeros, what stays in full precision."""
        return river_parts(
            layer, self.bits, self.group, dtype=self.dtype, device_type=self.device_type, kernels=self.kernels
        )

    def choices(self, layer: nn.Module) -> dict[str, KernelChoice]:
        """The kernel of each linear of a layer, with the reasons of those that declined."""
        return choices(
            layer, self.bits, self.group, dtype=self.dtype, device_type=self.device_type, kernels=self.kernels
        )

    def install(self, layer: nn.Module, state: dict[str, torch.Tensor], device: torch.device) -> None:
        """Replace every linear of a layer by what `state` holds for it, and empty `state`."""
        install(layer, state, self.bits, dtype=self.dtype, device=device, kernels=self.kernels)

    def install_empty(self, layer: nn.Module) -> None:
        """The same without data, on the CPU: for fake tensors."""
        install_empty(
            layer, self.bits, self.group, dtype=self.dtype, device_type=self.device_type, kernels=self.kernels
        )

    def head_bytes(self, head: nn.Linear) -> int:
        """Bytes of an LM head that has a weight of its own."""
        bias_bytes = 0 if head.bias is None else head.out_features * self.dtype.itemsize
        if self.head_bits == 16:
            return head.weight.numel() * self.dtype.itemsize + bias_bytes
        spec = self._head_spec(head)
        return choose(spec, self.kernels).kernel.nbytes(spec) + bias_bytes

    def head_can_shrink(self, head: nn.Linear) -> bool:
        """Whether an LM head at full precision could be quantized."""
        return self.head_bits == 16 and fitting((head.out_features, head.in_features), self.group).group is not None

    def quantized_head(self, head: nn.Linear, state: dict[str, torch.Tensor], device: torch.device) -> RiverLinear:
        """The LM head out of the state that `quantize_layer` made of it under the name "head"."""
        packed, scale, offset = (state[f"head.{part}"] for part in ("packed", "scale", "offset"))
        matrix = QuantizedMatrix(packed, scale, offset, self.head_bits)
        kernel = choose(self._head_spec(head), self.kernels).kernel
        return RiverLinear.from_matrix(matrix, state.get("head.bias"), dtype=self.dtype, device=device, kernel=kernel)

    def empty_head(self, head: nn.Linear) -> RiverLinear:
        """The same without data, on the CPU: for fake tensors."""
        spec = self._head_spec(head)
        return RiverLinear.empty(spec, bias=head.bias is not None, kernel=choose(spec, self.kernels).kernel)

    def _head_spec(self, head: nn.Linear) -> MatrixSpec:
        fit = fitting((head.out_features, head.in_features), self.group)
        if fit.group is None:
            raise UsageError(
                f"head_bits={self.head_bits} is not possible: the {head.in_features} inputs of the LM head are a "
                "multiple of no group of 32, 64 or 128; use head_bits=16"
            )
        return MatrixSpec(head.out_features, head.in_features, self.head_bits, fit.group, self.dtype, self.device_type)
