"""What each kind of cache takes for a model: measured dry, on shapes that nobody has to load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from policies.types import Mode
from river_offload.planning.kv_kinds import kv_needs
from river_offload.planning.shapes import builtin_shape
from river_offload.quant.kernels import ordered
from river_offload.quant.precision import Precision
from river_offload.structure import Structure


def model(name: str, **changes: object) -> Structure:
    shape = builtin_shape(name) | changes
    return Structure.of(AutoConfig.for_model(shape.pop("model_type"), **shape), torch.bfloat16)


def precision(folder: Path) -> Precision:
    return Precision(dtype=torch.bfloat16, bits=4, group=64, head_bits=16, device_type="cpu", kernels=ordered(folder))


def test_an_8b_model_at_64k_fits_a_small_device_in_few_bits(tmp_path: Path) -> None:
    found = kv_needs(
        model("llama-3.1-8b", num_hidden_layers=4),
        precision(tmp_path),
        context=65536,
        batch=1,
        modes=(Mode("backbone"),),
    )
    assert [(each.bits, each.tier) for each in found] == [(b, t) for t in ("device", "host") for b in (16, 8, 4)]
    full_bytes, layer_bytes = 4 * 65536 * 4096, 65536 * 4096
    assert all(each.full_bytes == full_bytes for each in found)
    # 1 and 1/8 bytes a number for 8 bits, the recent tokens and one layer in full precision beside them.
    shares = [(each.kv_bytes - (each.bits < 16 or each.tier == "host") * layer_bytes) / full_bytes for each in found]
    for share, expected in zip(shares, (1, 9 / 16, 5 / 16, 0, 0, 0), strict=True):
        assert 0 <= share - expected < 0.01
    hosts = [each.kv_host_bytes / full_bytes for each in found]
    for share, expected in zip(hosts, (0, 0, 0, 1, 9 / 16, 5 / 16), strict=True):
        assert abs(share - expected) < 0.01


def test_a_model_of_windows_has_one_kind(tmp_path: Path) -> None:
    windows = model("llama-3.1-8b", num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=1024)
    needs = kv_needs(windows, precision(tmp_path), context=4096, batch=1, modes=(Mode("quantized"),))
    assert [(each.bits, each.tier) for each in needs] == [(16, "device")]
