"""Is a river layer of the kind that `quant/layer.c` computes, and what has the C code to know of it?

Asked of its parts and its code, never of its name: it has the parts of a layer of Llama's kind, and its methods name
nothing that such a layer has no use for. A scale, a cap or a place in the text would have to be named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.quant.kernels.native_cpu import Native
from river_offload.quant.linear import RiverLinear
from river_offload.quant.native import DTYPES, Layer, Library, Matrix, Norm

_NORMS = {
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "of_queries": "self_attn.q_norm",
    "of_keys": "self_attn.k_norm",
}
_OPTIONAL = {"self_attn.q_norm", "self_attn.k_norm", "resid_attn_dropout", "resid_mlp_dropout"}
_SHARED = {"self_attn", "mlp", "self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"}
_ATTENTIONS = ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"self_attn.qkv_proj"})
_MLPS = ({"mlp.gate_proj", "mlp.up_proj", "mlp.act_fn"}, {"mlp.gate_up_proj", "mlp.activation_fn"})
_SCALE = "get_llama_4_attn_scale"
"""A factor of the queries that grows with their place (Ministral 3)."""
_NAMES = {
    "": "input_layernorm self_attn post_attention_layernorm mlp resid_attn_dropout resid_mlp_dropout",
    "self_attn": f"""shape head_dim view transpose reshape contiguous q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm
        num_attention_heads num_key_value_heads apply_rotary_pos_emb {_SCALE} rope_parameters get to dtype
        update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation
        eager_attention_forward training attention_dropout scaling sliding_window getattr""",
    "mlp": "down_proj act_fn gate_proj up_proj gate_up_proj chunk activation_fn",
    **dict.fromkeys(_NORMS.values(), "dtype to torch float32 pow mean rsqrt variance_epsilon weight"),
}
"""What the forward of each part may name."""
_ATTRIBUTES = {
    "self_attn": ("config", "layer_idx", "head_dim", "scaling"),
    **dict.fromkeys(_NORMS.values(), ("weight", "variance_epsilon")),
}
_ROTARY_NAMES = "unsqueeze rotate_half shape torch cat"


@dataclass(frozen=True)
class Described:
    """A layer as the C code is told of it."""

    native: Layer
    code: Library
    dtype: torch.dtype
    query_scale: Callable[[torch.Tensor], float] | None
    """Of the position ids [1, 1] of a token; None where queries are not scaled by their place."""
    held: tuple[torch.Tensor, ...]
    """What `native` has the addresses of: kept, or they would be those of other things some day."""
    parameters: tuple[tuple[Mapping[str, Any], str, int], ...]
    """Norms and biases by their module's parameters, their name and their address."""

    @property
    def is_current(self) -> bool:
        """Are norms and biases still the tensors that `native` knows?"""
        return all(parameters[name].data_ptr() == address for parameters, name, address in self.parameters)


def described(layer: nn.Module) -> Described | str:
    """What `layer.c` is to know of a river layer, or the reason why it cannot compute it."""
    modules: dict[str, Any] = {name: module for name, module in layer.named_modules() if name}
    if (reason := _other_parts(set(modules)) or _other_code(layer)) is not None:
        return reason
    for path, module in modules.items():
        if path.endswith("_proj") and not (isinstance(module, RiverLinear) and isinstance(module.kernel, Native)):
            return "its matrices are not all multiplied by the native kernel"
    output = modules["self_attn.o_proj"]
    if isinstance(output.packed, FakeTensor):
        return "its matrices are fake"
    if (reason := _other_activation(modules)) is not None:
        return reason
    spec, attention = output.spec, modules["self_attn"]
    if (implementation := attention.config._attn_implementation) != "sdpa":
        return f"its attention is {implementation!r}, not 'sdpa'"
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} is not one of {', '.join(str(dtype) for dtype in DTYPES)}"
    native = Layer(bits=spec.bits, dtype=DTYPES[spec.dtype], head_dim=attention.head_dim, scaling=attention.scaling)
    native.heads = spec.columns // native.head_dim
    for name, matrix in _matrices(modules, spec.columns).items():
        setattr(native, name, matrix)
    native.kv_heads = native.k.rows // native.head_dim
    if not _shapes_fit(native):
        return "its matrices have other shapes than those of a layer of Llama's kind"
    for name, path in _NORMS.items():
        if path in modules:
            weight = modules[path].weight
            width = native.head_dim if path in _OPTIONAL else native.q.columns
            if weight.dtype != spec.dtype or weight.shape != (width,):
                return f"{path} has a weight of {weight.dtype} {list(weight.shape)}"
            setattr(native, name, Norm(weight.data_ptr(), modules[path].variance_epsilon))
    named = [(m._parameters, n, p) for m in layer.modules() for n, p in m._parameters.items() if p is not None]
    return Described(
        native,
        output.kernel.code(),
        spec.dtype,
        _query_scale(attention, spec.dtype),
        held=tuple(t.detach() for t in (*layer.parameters(), *layer.buffers())),
        parameters=tuple((parameters, name, parameter.data_ptr()) for parameters, name, parameter in named),
    )


def _other_parts(found: set[str]) -> str | None:
    kinds = [_SHARED | attention | mlp for attention in _ATTENTIONS for mlp in _MLPS]
    nearest = min(kinds, key=lambda kind: len((found - _OPTIONAL) ^ kind))
    if odd := sorted((found - _OPTIONAL) ^ nearest):
        return f"it has other parts than a layer of Llama's kind: {', '.join(odd)}"
    return None


def _other_code(layer: nn.Module) -> str | None:
    for path, known in _NAMES.items():
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue
        if "forward" in vars(module):
            return f"{path or 'the layer'} was given a forward of its own"
        if strange := _names(_forward(module)) - set(known.split()):
            return f"{path or 'the layer'} is not computed as Llama's is: {', '.join(sorted(strange))}"
        if missing := [name for name in _ATTRIBUTES.get(path, ()) if getattr(module, name, None) is None]:
            return f"{path} has no {', '.join(missing)}"
    parameters = inspect.signature(_forward(layer)).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {"position_embeddings", cache_name(layer)} | (set() if takes_any else {"attention_mask", "position_ids"})
    if not named <= parameters.keys():
        return "it is not called as Llama's layers are"
    rotary = _forward(layer.get_submodule("self_attn")).__globals__.get("apply_rotary_pos_emb")
    strange = {"no apply_rotary_pos_emb"} if rotary is None else _names(inspect.unwrap(rotary))
    if strange := strange - set(_ROTARY_NAMES.split()):
        return f"places are not told as Llama tells them: {', '.join(sorted(strange))}"
    return None


@torch.no_grad()
def _other_activation(modules: Mapping[str, Any]) -> str | None:
    activation = modules.get("mlp.act_fn") or modules["mlp.activation_fn"]
    gates = torch.linspace(-30, 30, 601)
    if torch.allclose(activation(gates), torch.nn.functional.silu(gates), rtol=1e-4, atol=1e-5):
        return None
    return f"its activation is {type(activation).__name__}, not SiLU"


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    return {"no code of Python"} if code is None else set(code.co_names)


def cache_name(layer: nn.Module) -> str:
    """What its forward calls the cache: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(_forward(layer)).parameters else "past_key_values"


def _matrices(modules: Mapping[str, Any], wide: int) -> dict[str, Matrix]:
    """The seven matrices; `wide` are the rows of that of the queries. Some layers have them in one piece."""
    found = {"o": _rows(modules["self_attn.o_proj"]), "down": _rows(modules["mlp.down_proj"])}
    if (whole := modules.get("self_attn.qkv_proj")) is not None:
        kv_wide = (whole.out_features - wide) // 2
        found |= {"q": _rows(whole, 0, wide), "k": _rows(whole, wide, kv_wide)}
        found["v"] = _rows(whole, wide + kv_wide, kv_wide)
    else:
        found |= {name: _rows(modules[f"self_attn.{name}_proj"]) for name in "qkv"}
    if (whole := modules.get("mlp.gate_up_proj")) is not None:
        inner = whole.out_features // 2
        found |= {"gate": _rows(whole, 0, inner), "up": _rows(whole, inner, inner)}
    else:
        found |= {name: _rows(modules[f"mlp.{name}_proj"]) for name in ("gate", "up")}
    return found


def _rows(linear: Any, start: int = 0, rows: int | None = None) -> Matrix:
    parts = {name: getattr(linear, name)[start:] for name in ("packed", "scale", "offset")}
    bias = None if linear.bias is None else linear.bias[start:].data_ptr()
    spec = linear.spec
    return Matrix(
        **{name: part.data_ptr() for name, part in parts.items()},
        bias=bias,
        rows=spec.rows if rows is None else rows,
        columns=spec.columns,
        group=spec.group,
    )


def _shapes_fit(native: Layer) -> bool:
    hidden, inner = native.q.columns, native.gate.rows
    wide, kv_wide = native.heads * native.head_dim, native.kv_heads * native.head_dim
    matrices = (native.q, native.k, native.v, native.o, native.gate, native.up, native.down)
    found = [(matrix.rows, matrix.columns) for matrix in matrices]
    expected = [(wide, hidden), *[(kv_wide, hidden)] * 2, (hidden, wide), *[(inner, hidden)] * 2, (hidden, inner)]
    return found == expected and native.kv_heads > 0 and native.heads % native.kv_heads == 0


def _query_scale(attention: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], float] | None:
    forward = _forward(attention)
    if _SCALE not in _names(forward):
        return None
    scale = forward.__globals__[_SCALE]
    ropes = attention.config.rope_parameters
    beta, original = ropes.get("llama_4_scaling_beta"), ropes.get("original_max_position_embeddings")
    return lambda place: float(scale(place, beta, original).to(dtype))
