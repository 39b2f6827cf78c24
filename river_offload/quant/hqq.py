"""Quantizes one matrix with HQQ (half-quadratic quantization, no calibration data), a block of rows at a time.

On a CPU our own C code (`native.c`) does it, ten times as fast as the library hqq and with the same error to four
digits: 8 billion weights take one minute instead of five. The library serves where there is no compiler.

Fed 64 rows at a time its temporaries stay in the processor's cache: four times as fast on CPU as the whole matrix in
one call, and a few megabytes of memory instead of several times the matrix. Groups lie inside rows (axis 1) and HQQ
couples groups only through its stopping rule, so blocks lose nothing.

Two habits of HQQ never reach the user. It clamps the inverse scale at 2e4 and gives up on groups narrower than 1e-4:
such groups are centered and scaled up by a power of two before, and put back after. And it computes scale and zero in
float32 while we store bfloat16: q is rounded again against the stored values, so rounding them costs no accuracy twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.config import default_cache_dir
from river_offload.errors import CheckpointError
from river_offload.quant.native import Library, Unavailable, load
from river_offload.quant.packing import CHUNK, SCALE_DTYPE, QuantizedMatrix, pack

GROUPS = (128, 64, 32)
HQQ_BYTES_PER_COLUMN = 20 * 64
"""Temporaries of one block of rows: five float32 copies of it. Each core has a block."""
_MAX_INVERSE_SCALE = 2e4  # hqq.core.quantize.Quantizer.quantize clamps there
_COMFORTABLE_RANGE = 0.125  # where a narrow group is moved to: the range of an ordinary trained group


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How to quantize a linear: `group` None means "keep full precision"; `reason` says why it is not as asked."""

    group: int | None
    reason: str | None = None


def fitting(shape: tuple[int, int], group: int) -> LinearPlan:
    """The group for a weight [N, K]: the one asked for, else the largest smaller one that divides K, else none."""
    columns = shape[1]
    if columns % group == 0:
        return LinearPlan(group)
    smaller = next((g for g in GROUPS if g < group and columns % g == 0), None)
    found = f"{columns} input features are not a multiple of the group of {group}"
    if smaller is None:
        return LinearPlan(None, f"{found} nor of any smaller group: kept in full precision")
    return LinearPlan(smaller, f"{found}: group {smaller} is used")


def quantize_matrix(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    name: str = "weight",
    rows_per_block: int = 64,
    library: Library | Unavailable | None = None,
) -> QuantizedMatrix:
    """Quantizes `weight` [N, K] (any float dtype, any device) to canonical form on the same device.

    Needs the result plus about 20 * rows_per_block * K bytes. Source of the method: https://mobiusml.github.io/hqq_blog/

    Args:
        library: our C code, for weights on a CPU; what is in the default cache directory when not given.

    Raises:
        CheckpointError: the matrix holds NaN or infinity.
        ValueError: `group` does not divide K (ask `fitting` first).
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"{name}: {columns} columns cannot be cut into groups of {group}")
    packed = torch.empty(rows, columns * bits // 8, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, columns // group, dtype=SCALE_DTYPE, device=weight.device)
    offset = torch.empty_like(scale)
    native = _native(library, weight, group)

    def quantize_rows(start: int) -> None:
        block = slice(start, min(start + rows_per_block, rows))
        values = weight[block].detach().float().contiguous()
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{name}: found NaN or infinite values in rows {block.start} to {block.stop - 1}, expected finite "
                "weights. The checkpoint is damaged or overflowed when it was converted: fetch or convert it again."
            )
        if native is not None:
            parts = {"packed": packed[block], "scale": scale[block], "offset": offset[block]}
            native.quantize(values, parts, bits)
        else:
            q, s, z = _quantize_groups(values.view(-1, group), bits)
            packed[block] = pack(q.view(-1, columns), bits)
            scale[block] = s.view(-1, columns // group)
            offset[block] = z.view(-1, columns // group)
        if not bool(torch.isfinite(scale[block]).all() & torch.isfinite(offset[block]).all()):
            raise CheckpointError(
                f"{name}: found a group of {group} weights in rows {block.start} to {block.stop - 1} that spans more "
                "than float32 can hold, expected weights. The checkpoint is damaged: fetch or convert it again."
            )

    _each_on_a_core(quantize_rows, range(0, rows, rows_per_block))
    return QuantizedMatrix(packed, scale, offset, bits)


def _native(library: Library | Unavailable | None, weight: Tensor, group: int) -> Library | None:
    """Our C code if it can quantize this weight; built now where none was given."""
    if weight.device.type != "cpu" or isinstance(weight, FakeTensor) or group % CHUNK:
        return None
    library = load(default_cache_dir()) if library is None else library
    return library if isinstance(library, Library) and group <= library.most_in_group else None


def _each_on_a_core(work: Callable[[int], None], items: Sequence[int]) -> None:
    """Do `work` for every item, one core each. Raises what the first failing one raised.

    Blocks are small, so threads that share one block's operators mostly wait for each other: for ever so long on a
    machine that has other work, where one of them may not be running.
    """
    cores = torch.get_num_threads()
    if cores == 1 or len(items) == 1:
        for item in items:
            work(item)
        return
    try:
        with ThreadPoolExecutor(cores, "river-quantize", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            done = [pool.submit(work, item) for item in items]
            try:
                for future in done:
                    future.result()
            except BaseException:  # an interrupt, too: what has not begun is not worth waiting for
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(cores)


def _quantize_groups(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [G, group] -> q uint8 [G, group], scale and offset bfloat16 [G, 1]."""
    half, top = 2 ** (bits - 1), 2**bits - 1
    low, high = groups.aminmax(dim=1, keepdim=True)
    spread = high - low
    # A constant group has no spread to scale up: exp2(0) leaves it alone, and its scale becomes 0 below.
    narrow = spread < 2 * top / _MAX_INVERSE_SCALE
    lift = torch.where(narrow & (spread > 0), (_COMFORTABLE_RANGE / spread).log2().floor().clamp(max=120).exp2(), 1.0)
    center = torch.where(narrow, (low + high) / 2, 0.0)

    scale, zero = _hqq((groups - center) * lift, bits)
    scale = scale / lift
    offset = ((half - zero) * scale + center).to(SCALE_DTYPE)
    scale = scale.to(SCALE_DTYPE)

    constant = spread == 0
    scale = torch.where(constant, 0.0, scale)
    offset = torch.where(constant, low.to(SCALE_DTYPE), offset)
    steps = (groups - offset.float()) / torch.where(scale == 0, 1.0, scale.float())
    q = torch.where(scale == 0, 0.0, steps).round_().add_(half).clamp_(0, top).to(torch.uint8)
    return q, scale, offset


def _hqq(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """HQQ's scale and zero, float32 [G, 1] each, of groups [G, group]: weight = (q - zero) * scale."""
    from hqq.core.quantize import Quantizer  # seconds to import: only when something is quantized

    _, meta = Quantizer.quantize(
        groups, nbits=bits, group_size=groups.shape[1], axis=1, bitpack=False, device=str(groups.device)
    )
    return meta["scale"].float(), meta["zero"].float()
