"""A river layer's forward for one token as one native call, where the layer computes what `quant/layer.c` does.

For one token the matrices of a small model are quicker than the seventy operators around them. Whether a layer is of
Llama's kind is asked of its code and of its results, never of its name: it has the parts that Llama's has, its methods
name nothing that Llama's do not, and on random states the native call gives what it gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.kv.cache import SharedCache, SharedLayer
from river_offload.quant.kernels.native_cpu import Native
from river_offload.quant.linear import RiverLinear
from river_offload.quant.native import DTYPES, Layer, Library, Matrix, Norm

_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "of_queries": "self_attn.q_norm",
    "of_keys": "self_attn.k_norm",
}
_OPTIONAL = {"self_attn.q_norm", "self_attn.k_norm"}
_PARTS = {"self_attn", "mlp", "mlp.act_fn", *_LINEARS.values(), *_NORMS.values()}
_NAMES = {
    "": "input_layernorm self_attn post_attention_layernorm mlp",
    "self_attn": """shape head_dim view transpose reshape contiguous q_proj k_proj v_proj o_proj q_norm k_norm
        apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation
        eager_attention_forward training attention_dropout scaling sliding_window getattr""",
    "mlp": "down_proj act_fn gate_proj up_proj",
    **dict.fromkeys(_NORMS.values(), "dtype to torch float32 pow mean rsqrt variance_epsilon weight"),
}
"""What the forward of each part may name. Anything else could be a scale, a cap or a place in the text."""
_UNDERSTOOD = {"attention_mask", "position_ids", "position_embeddings", "use_cache", "cache_position"}
_PROBED_TOKENS = 5
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""How far the results may be apart, by the largest: what rounding leaves. Another formula is off by far more."""


class OneToken:
    """The native call of one layer, which it has the addresses of: its linears and norms must stay where they are."""

    def __init__(self, layer: nn.Module, native: Layer, library: Library, dtype: torch.dtype) -> None:
        attention = layer.get_submodule("self_attn")
        self._native = native
        self._library = library
        self._dtype = dtype
        self._config: Any = attention.config
        self._depth: int = attention.layer_idx  # type: ignore[assignment]
        self._cache_name = _cache_name(layer)
        self._understood = _UNDERSTOOD | {self._cache_name}
        self._cached_shape = (1, native.kv_heads, native.head_dim)
        modules = list(layer.modules())
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    @classmethod
    def of(cls, layer: nn.Module) -> OneToken | str:
        """For a river layer of a real model; the reason where it has to do without."""
        found = _described(layer)
        if isinstance(found, str):
            return found
        native, library, dtype = found
        one_token = cls(layer, native, library, dtype)
        apart = one_token._apart(layer)
        if not apart <= _LIMITS[dtype]:
            return f"its results are not those of a layer of Llama's kind: {apart:.0%} apart"
        return one_token

    def run(self, states: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What the layer makes of `states` [1, 1, hidden]; None when this call is for the layer itself.

        The cache gets the token's keys and values. Raises ContextError when it has no room.
        """
        if args or states.shape[:2] != (1, 1) or states.dtype != self._dtype or states.requires_grad:
            return None
        if kwargs.get("attention_mask") is not None or self._config._attn_implementation != "sdpa":
            return None
        if any(value is not None for name, value in kwargs.items() if name not in self._understood):
            return None
        cache = kwargs.get(self._cache_name)
        if type(cache) is not SharedCache or any(self._hooks):  # whoever watches a part shall see it run
            return None
        place = cache.layers[self._depth]
        if type(place) is not SharedLayer or place.shape_of_a_token != self._cached_shape or place.dtype != self._dtype:
            return None
        cos, sin = kwargs["position_embeddings"]
        cached = place.get_seq_length()
        keys, values = place.claim(1)
        y = torch.empty_like(states)
        self._library.layer_token(self._native, states.contiguous(), cos, sin, keys, values, cached, y)
        return y

    @torch.no_grad()
    def _apart(self, layer: nn.Module) -> float:
        """How far this is from `layer` in what it adds to a token, and in the key and value it caches."""
        native, dtype = self._native, self._dtype
        generator = torch.Generator().manual_seed(0)
        # Small beside what the layer adds to them, which is of the size of its weights: the norms see to that.
        states = 0.02 * torch.randn(1, _PROBED_TOKENS, native.q.columns, generator=generator).to(dtype)
        angles = 6.3 * torch.rand(1, _PROBED_TOKENS, native.head_dim // 2, generator=generator).repeat(1, 1, 2)
        places = angles.cos().to(dtype), angles.sin().to(dtype)
        cache = SharedCache(self._config, _PROBED_TOKENS)
        place = cache.layers[self._depth]

        def call(first: int, last: int) -> tuple[Tensor, dict[str, Any]]:
            embeddings = tuple(part[:, first:last].contiguous() for part in places)
            return states[:, first:last], {"position_embeddings": embeddings, self._cache_name: cache}

        def outcome(made: Tensor) -> list[Tensor]:
            return [(made - token).float(), place.keys[:, :, -1].float(), place.values[:, :, -1].float()]

        earlier, kwargs = call(0, _PROBED_TOKENS - 1)
        layer(earlier, **kwargs)
        token, kwargs = call(_PROBED_TOKENS - 1, _PROBED_TOKENS)
        expected = outcome(layer(token, **kwargs))
        place.crop(-1)
        made = self.run(token, (), kwargs)
        if made is None:
            return float("inf")
        pairs = zip(outcome(made), expected, strict=True)
        return max(float((mine - its).abs().max() / its.abs().max()) for mine, its in pairs)


def _described(layer: nn.Module) -> tuple[Layer, Library, torch.dtype] | str:
    """What `layer.c` is to know of a layer, or why it is not for it."""
    modules = {name: module for name, module in layer.named_modules() if name}
    if (odd := sorted(modules.keys() ^ _PARTS - _OPTIONAL)) and set(odd) - _OPTIONAL:
        return f"it has other parts than a layer of Llama's kind: {', '.join(odd)}"
    if reason := _unknown_code(layer):
        return reason
    linears = {name: modules[path] for name, path in _LINEARS.items()}
    for linear in linears.values():
        if not isinstance(linear, RiverLinear) or not isinstance(linear.kernel, Native):
            return "its matrices are not all multiplied by the native kernel"
        if isinstance(linear.packed, FakeTensor):
            return "its matrices are fake"
    first: Any = linears["q"]
    spec, library = first.spec, first.kernel.library()
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} is not one of its dtypes"
    native = Layer(bits=spec.bits, dtype=DTYPES[spec.dtype], **{n: _matrix(m) for n, m in linears.items()})
    attention: Any = modules["self_attn"]
    native.head_dim, native.scaling = attention.head_dim, attention.scaling
    native.heads, native.kv_heads = native.q.rows // native.head_dim, native.k.rows // native.head_dim
    if not _shapes_fit(native):
        return "its matrices have other shapes than those of a layer of Llama's kind"
    for name, path in _NORMS.items():
        if path in modules:
            weight: Any = modules[path].weight
            width = native.head_dim if path in _OPTIONAL else native.q.columns
            if weight.dtype != spec.dtype or weight.shape != (width,):
                return f"{path} has a weight of {weight.dtype} {list(weight.shape)}"
            setattr(native, name, Norm(weight.data_ptr(), modules[path].variance_epsilon))
    return native, library, spec.dtype


def _unknown_code(layer: nn.Module) -> str | None:
    for path, known in _NAMES.items():
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue
        if "forward" in vars(module):
            return f"{path or 'the layer'} was given a forward of its own"
        code: Any = inspect.unwrap(type(module).forward).__code__
        if strange := sorted(set(code.co_names) - set(known.split())):
            return f"{path or 'the layer'} is not computed as Llama's is: {', '.join(strange)}"
    return None


def _matrix(linear: Any) -> Matrix:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    addresses = {name: getattr(linear, name).data_ptr() for name in ("packed", "scale", "offset")}
    spec = linear.spec
    return Matrix(**addresses, bias=bias, rows=spec.rows, columns=spec.columns, group=spec.group)


def _shapes_fit(native: Layer) -> bool:
    hidden, inner = native.q.columns, native.gate.rows
    wide, kv_wide = native.heads * native.head_dim, native.kv_heads * native.head_dim
    found = [(m.rows, m.columns) for m in (getattr(native, name) for name in _LINEARS)]
    expected = [(wide, hidden), *[(kv_wide, hidden)] * 2, (hidden, wide), *[(inner, hidden)] * 2, (hidden, inner)]
    return found == expected and native.heads % native.kv_heads == 0 and native.head_dim % 2 == 0


def _cache_name(layer: nn.Module) -> str:
    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
