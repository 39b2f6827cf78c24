from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from river_offload.quant.linear import RiverLinear
from river_offload.quant.river import (
    choices,
    install,
    install_empty,
    linear_names,
    quantize_layer,
    river_parts,
    warn_of_misfits,
)


class _Layer(nn.Module):
    """A fused projection with bias, one that only group 32 suits, one that no group suits, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(128, 192, bias=True)})
        self.up = nn.Linear(96, 48, bias=False)
        self.odd = nn.Linear(40, 16, bias=True)
        self.norm = nn.RMSNorm(128)


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(tensor) * 0.02 for name, tensor in layer.state_dict().items()}


def test_a_layer_is_quantized_and_installed() -> None:
    source = _tensors(_Layer())
    with torch.device("meta"):
        layer = _Layer()
    state = quantize_layer(source, linear_names(layer), 4, 64)
    assert set(state) == {
        *(f"attention.qkv.{part}" for part in ("packed", "scale", "offset", "bias")),
        *(f"up.{part}" for part in ("packed", "scale", "offset")),
        *(f"odd.{part}" for part in ("weight", "bias")),
    }
    install(layer, state, 4, dtype=torch.float32)
    assert not state, "each matrix must leave the state once it is installed"

    qkv, up = layer.attention["qkv"], layer.up
    assert isinstance(qkv, RiverLinear) and isinstance(up, RiverLinear)
    assert (qkv.spec.group, up.spec.group) == (64, 32)
    for name, linear in (("attention.qkv", qkv), ("up", up)):
        weight = source[f"{name}.weight"]
        assert (linear.dequantize() - weight).norm() < 0.11 * weight.norm()
        x = torch.randn(2, 3, linear.in_features)
        expected = nn.functional.linear(x, linear.dequantize(), source.get(f"{name}.bias"))
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.odd.weight, source["odd.weight"])
    assert torch.equal(layer.odd.bias, source["odd.bias"])
    assert layer.norm.weight.is_meta, "norms belong to the backbone layer"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("bits", (2, 4))
def test_bytes_are_exact_and_known_before(bits: int, dtype: torch.dtype) -> None:
    source = _tensors(_Layer())
    with torch.device("meta"):
        layer = _Layer()
    planned = sum(river_parts(layer, bits, 64, dtype=dtype, device_type="cpu").values())
    with FakeTensorMode():
        fake = _Layer()
        install_empty(fake, bits, 64, dtype=dtype)
    install(layer, quantize_layer(source, linear_names(layer), bits, 64), bits, dtype=dtype)

    def held(module: nn.Module) -> int:
        tensors = [*module.attention.parameters(), *module.up.parameters(), *module.odd.parameters()]
        return sum(t.untyped_storage().nbytes() for t in [*tensors, *module.buffers()])

    assert held(layer) == held(fake) == planned
    assert not any(t.is_meta for name in linear_names(layer) for t in layer.get_submodule(name).parameters())


def test_choices_name_every_quantized_linear() -> None:
    found = choices(_Layer(), 4, 64, dtype=torch.bfloat16, device_type="cpu")
    assert set(found) == {"attention.qkv", "up"}


def test_misfits_are_warned_of_by_name() -> None:
    with pytest.warns(UserWarning) as caught:
        warn_of_misfits([_Layer(), _Layer()], 64)  # what two layers share is said once
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "up: 96" in messages[0] and "group 32" in messages[0]
    assert "odd: 40" in messages[1] and "full precision" in messages[1]
