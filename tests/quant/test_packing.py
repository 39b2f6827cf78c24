from __future__ import annotations

import pytest
import torch

from river_offload.quant.packing import QuantizedMatrix, dequantize, pack, unpack

BITS = (2, 3, 4, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", (32, 96, 192))
def test_every_value_survives_and_takes_no_more_bits_than_it_needs(bits: int, columns: int) -> None:
    q = torch.randint(0, 2**bits, (7, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(q, bits)
    assert packed.shape == (7, columns * bits // 8)
    assert torch.equal(unpack(packed, bits), q)


def test_four_bit_chunk_holds_the_second_half_in_its_high_nibbles() -> None:
    """native.c and the caches on disk rely on this order."""
    q = torch.arange(32, dtype=torch.uint8).remainder(16).view(1, 32)
    q[0, 16:] = 15 - q[0, 16:]
    assert pack(q, 4)[0].tolist() == [i | (15 - i) << 4 for i in range(16)]


@pytest.mark.parametrize("bits", BITS)
def test_dequantize_is_the_formula(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 2**bits, (3, 128), dtype=torch.uint8, generator=generator)
    scale, offset = torch.randn(2, 3, 2, generator=generator).bfloat16()
    expected = (q.float() - 2 ** (bits - 1)) * scale.float().repeat_interleave(64, 1)
    expected += offset.float().repeat_interleave(64, 1)
    matrix = QuantizedMatrix(pack(q, bits), scale, offset, bits)
    assert (matrix.shape, matrix.group) == ((3, 128), 64)
    assert torch.equal(dequantize(matrix), expected)
    assert torch.equal(dequantize(matrix, torch.bfloat16), expected.bfloat16())
