from __future__ import annotations

from pathlib import Path

import pytest
import torch

from river_offload.config import default_cache_dir
from river_offload.errors import CheckpointError
from river_offload.quant import hqq
from river_offload.quant.hqq import fitting, quantize_matrix
from river_offload.quant.native import Library, Unavailable, load
from river_offload.quant.packing import dequantize, unpack

NO_COMPILER = Unavailable("no C compiler")


@pytest.fixture(params=["ours", "library"], autouse=True)
def quantizer(request: pytest.FixtureRequest, native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is of both: our C code, and the library that serves without a compiler."""
    if request.param == "library":
        monkeypatch.setattr(hqq, "load", lambda _: NO_COMPILER)


def _weight(rows: int, columns: int, size: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * size


def _error(weight: torch.Tensor, bits: int, group: int) -> float:
    back = dequantize(quantize_matrix(weight, bits, group))
    return ((back - weight).norm() / weight.norm()).item()


@pytest.mark.parametrize(("bits", "limit"), ((2, 0.52), (3, 0.23), (4, 0.105), (8, 0.0065)))
@pytest.mark.parametrize("group", (32, 64, 128))
def test_error_is_what_the_bits_allow(bits: int, limit: float, group: int) -> None:
    assert _error(_weight(70, 256), bits, group) < limit


@pytest.mark.parametrize("rows", (1, 3, 65))
def test_odd_numbers_of_groups(rows: int) -> None:
    """HQQ's own 4-bit packing halves the number of groups."""
    assert _error(_weight(rows, 96), 4, 32) < 0.105


@pytest.mark.parametrize("value", (0.0, 1.5, -0.0390625, 3e-30, 1e30))
def test_a_constant_group_is_exact(value: float) -> None:
    weight = _weight(4, 128).bfloat16()
    weight[1, 64:] = value
    back = dequantize(quantize_matrix(weight, 4, 64), torch.bfloat16)
    assert torch.equal(back[1, 64:], weight[1, 64:])


@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("size", (1e-3, 1e-5, 1e-9, 1e-20, 1e4))
def test_error_does_not_depend_on_the_size_of_the_weights(bits: int, size: float) -> None:
    """HQQ clamps the scale of narrow groups, and gives up below a range of 1e-4."""
    assert _error(_weight(8, 128, size), bits, 64) < 1.25 * _error(_weight(8, 128, 0.02), bits, 64)


def test_a_narrow_group_far_from_zero_keeps_its_values() -> None:
    weight = 3 + _weight(2, 64, 1e-6)
    assert (dequantize(quantize_matrix(weight, 4, 64)) - weight).abs().max() < 3 * 2**-8  # bfloat16 at 3


def test_blocks_of_rows_agree_with_one_call() -> None:
    weight = _weight(130, 128)
    whole = dequantize(quantize_matrix(weight, 4, 64, rows_per_block=130))
    blocks = dequantize(quantize_matrix(weight, 4, 64))
    assert (whole - blocks).norm() < 0.02 * weight.norm()


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    weight = _weight(70, 64)
    weight[66, 5] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.up.*rows 64 to 69"):
        quantize_matrix(weight, 4, 64, name="layers.3.up")


@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize(
    "weight", (_weight(64, 512), _weight(64, 512, 3), 1 + _weight(64, 512, 1e-5)), ids=lambda _: "w"
)
def test_ours_finds_what_the_library_finds(weight: torch.Tensor, bits: int, group: int) -> None:
    """Both stop by a rule of their own, so some values are a step apart.

    Weights of size 3 have errors that HQQ takes for outliers.
    """
    library = load(default_cache_dir())
    assert isinstance(library, Library)
    ours = quantize_matrix(weight, bits, group, library=library)
    theirs = quantize_matrix(weight, bits, group, library=NO_COMPILER)
    steps = unpack(ours.packed, bits).int() - unpack(theirs.packed, bits).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 0.01
    errors = [(dequantize(matrix) - weight).norm() for matrix in (ours, theirs)]
    assert errors[0] <= 1.001 * errors[1]


def test_a_group_that_spans_more_than_float32_is_refused_by_name() -> None:
    weight = _weight(70, 64)
    weight[66, 5], weight[66, 6] = 2e38, -2e38
    with pytest.raises(CheckpointError, match=r"layers\.3\.up.*group of 64 weights in rows 64 to 69"):
        quantize_matrix(weight, 4, 64, name="layers.3.up")


def test_fitting_group() -> None:
    assert fitting((10, 256), 64).group == 64
    assert fitting((10, 256), 64).reason is None
    smaller = fitting((10, 96), 128)
    assert smaller.group == 32
    assert smaller.reason is not None and "96" in smaller.reason
    none = fitting((10, 100), 64)
    assert none.group is None
    assert none.reason is not None and "full precision" in none.reason
