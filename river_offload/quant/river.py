"""One river layer: a backbone layer's linears quantized, as a flat state that is cached and put into a module.

The state maps names inside the layer to tensors. A quantized linear `q_proj` is `q_proj.packed`, `q_proj.scale` and
`q_proj.offset` (see `packing`); one whose shape suits no group keeps `q_proj.weight`. Biases stay. Norms and whatever
else a layer holds are not in it: they are the backbone layer's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from river_offload.quant.hqq import fitting, quantize_matrix
from river_offload.quant.kernels import Kernel, KernelChoice, MatrixSpec, choose
from river_offload.quant.linear import RiverLinear
from river_offload.quant.native import Library, Unavailable
from river_offload.quant.packing import QuantizedMatrix

State = dict[str, Tensor]

RIVER_PARTS = ("river_packed", "river_scales", "river_zeros", "river_full_precision")
"""What river layers are made of: quantized values, scales, offsets, and what had to stay in full precision."""


def linear_names(layer: nn.Module) -> list[str]:
    """Names of every nn.Linear inside a decoder layer, whatever it is called, in module order."""
    return [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def misfits(layer: nn.Module, group: int) -> list[str]:
    """One sentence for each linear of `layer` that cannot be quantized with `group` as asked."""
    reasons = ((name, fitting(_shape(linear), group).reason) for name, linear in _linears(layer))
    return [f"{name}: {reason}" for name, reason in reasons if reason]


def warn_of_misfits(layers: Sequence[nn.Module], group: int) -> None:
    """The `misfits` of all layers, one warning for each sentence."""
    for sentence in dict.fromkeys(sentence for layer in layers for sentence in misfits(layer, group)):
        warnings.warn(f"river: {sentence}", stacklevel=2)


def quantize_layer(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    bits: int,
    group: int,
    library: Library | Unavailable | None = None,
) -> State:
    """Quantizes the linears `names` of one layer whose tensors (weights [N, K] and biases) are `tensors`.

    `library` is as for `quantize_matrix`.

    Needs the state itself plus some megabytes. Raises CheckpointError for NaN or infinite weights.
    """
    state: State = {}
    for name in names:
        weight = tensors[f"{name}.weight"]
        fit = fitting((weight.shape[0], weight.shape[1]), group)
        if fit.group is None:
            state[f"{name}.weight"] = weight.detach().clone()
        else:
            matrix = quantize_matrix(weight, bits, fit.group, name=f"{name}.weight", library=library)
            state |= {f"{name}.packed": matrix.packed, f"{name}.scale": matrix.scale, f"{name}.offset": matrix.offset}
        if (bias := tensors.get(f"{name}.bias")) is not None:
            state[f"{name}.bias"] = bias.detach().clone()
    return state


def install(
    layer: nn.Module,
    state: MutableMapping[str, Tensor],
    bits: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: Sequence[Kernel] | None = None,
) -> None:
    """Replaces every linear of `layer` (its weights may be on meta) by what `state` holds for it.

    Empties `state` while it goes, so that of each matrix only one form is in memory.
    """
    for name, linear in list(_linears(layer)):
        bias = state.pop(f"{name}.bias", None)
        if (weight := state.pop(f"{name}.weight", None)) is not None:
            _fill(linear, weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
            continue
        packed, scale, offset = (state.pop(f"{name}.{part}") for part in ("packed", "scale", "offset"))
        matrix = QuantizedMatrix(packed, scale, offset, bits)
        kernel = choose(_spec(linear, bits, matrix.group, dtype, torch.device(device).type), kernels).kernel
        layer.set_submodule(
            name, RiverLinear.from_matrix(matrix, bias, dtype=dtype, device=device, kernel=kernel), strict=True
        )


def install_empty(
    layer: nn.Module,
    bits: int,
    group: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    device_type: str | None = None,
    kernels: Sequence[Kernel] | None = None,
) -> None:
    """What `install` does, without data: for planning on fake tensors. `device_type`: what is planned for."""
    for name, linear in list(_linears(layer)):
        fit = fitting(_shape(linear), group)
        if fit.group is None:
            bias = None if linear.bias is None else torch.empty(linear.out_features, dtype=dtype, device=device)
            _fill(linear, torch.empty(_shape(linear), dtype=dtype, device=device), bias)
            continue
        spec = _spec(linear, bits, fit.group, dtype, device_type or torch.device(device).type)
        kernel = choose(spec, kernels).kernel
        river = RiverLinear.empty(spec, bias=linear.bias is not None, device=device, kernel=kernel)
        layer.set_submodule(name, river, strict=True)


def choices(
    layer: nn.Module,
    bits: int,
    group: int,
    *,
    dtype: torch.dtype,
    device_type: str,
    kernels: Sequence[Kernel] | None = None,
) -> dict[str, KernelChoice]:
    """The kernel of every linear of a backbone layer that will be quantized, and why others declined."""
    fits = ((name, linear, fitting(_shape(linear), group).group) for name, linear in _linears(layer))
    return {
        name: choose(_spec(linear, bits, fit, dtype, device_type), kernels)
        for name, linear, fit in fits
        if fit is not None
    }


def river_parts(
    layer: nn.Module,
    bits: int,
    group: int,
    *,
    dtype: torch.dtype,
    device_type: str,
    kernels: Sequence[Kernel] | None = None,
) -> dict[str, int]:
    """Exact bytes of the linears of a river layer once installed, from the shapes of the backbone `layer` (on meta).

    By category (`memory.categories.RIVER_PARTS`).
    """
    chosen = choices(layer, bits, group, dtype=dtype, device_type=device_type, kernels=kernels)
    total = dict.fromkeys(RIVER_PARTS, 0)
    for name, linear in _linears(layer):
        if name in chosen:
            fit = fitting(_shape(linear), group).group
            assert fit is not None
            layout = chosen[name].kernel.layout(_spec(linear, bits, fit, dtype, device_type))
            for part, (shape, part_dtype) in layout.items():
                add_part(total, part, math.prod(shape) * part_dtype.itemsize)
        else:
            total["river_full_precision"] += linear.weight.numel() * dtype.itemsize
        total["river_full_precision"] += 0 if linear.bias is None else linear.out_features * dtype.itemsize
    return total


def add_part(total: dict[str, int], part: str, nbytes: int) -> None:
    """Add a part of a quantized linear, by its name in a kernel's layout, to the category it belongs to."""
    if part == "scale_offset":  # pairs of the two
        total["river_scales"] += nbytes // 2
        total["river_zeros"] += nbytes - nbytes // 2
    else:
        names = {"packed": "river_packed", "scale": "river_scales", "offset": "river_zeros", "zero": "river_zeros"}
        total[names[part]] += nbytes


def _linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear))


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _spec(linear: nn.Linear, bits: int, group: int, dtype: torch.dtype, device_type: str) -> MatrixSpec:
    return MatrixSpec(linear.out_features, linear.in_features, bits, group, dtype, device_type)


def _fill(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
