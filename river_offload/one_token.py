"""A river layer's forward for one token as one native call, where `quant/layer.c` computes layers of its kind.

For one token the matrices of a small model are quicker than the seventy operators around them, and over a long text
torch's attention of a single query takes longer than the matrices of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from river_offload.kv.cache import SharedCache, SharedLayer
from river_offload.kv.resting import RestingLayer
from river_offload.layer_kind import Described, cache_name, described

_UNDERSTOOD = {"attention_mask", "position_ids", "position_embeddings", "use_cache", "cache_position"}
_PROBED_TOKENS = 5
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""How far the results may be apart, by the largest: what rounding leaves. Another formula is off by far more."""


class OneToken:
    """The native call of one layer, which it has the addresses of: its linears and norms must stay where they are."""

    def __init__(self, layer: nn.Module, what: Described) -> None:
        attention: Any = layer.get_submodule("self_attn")
        self._layer = layer
        self._what = what
        self._config = attention.config
        self._depth: int = attention.layer_idx
        self._cache_name = cache_name(layer)
        self._understood = _UNDERSTOOD | {self._cache_name}
        self._token_kind = (1, what.native.kv_heads, what.native.head_dim, what.dtype)
        self._hooks = [hooks for m in layer.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    @classmethod
    def of(cls, layer: nn.Module) -> OneToken | str:
        """For a river layer of a real model; the reason where it has to do without.

        Whatever its code says, on random states the call must give what the layer gives.
        """
        what = described(layer)
        if isinstance(what, str):
            return what
        one_token = cls(layer, what)
        apart = one_token._apart(layer)
        if apart is None:
            return "it could not be tried here"
        if not apart <= _LIMITS[what.dtype]:
            return f"its results are not those of a layer of Llama's kind: {apart:.0%} apart"
        return one_token

    def run(self, states: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What the layer makes of `states` [1, 1, hidden]; None when this call is for the layer itself.

        The cache gets the token's keys and values. Raises ContextError when it has no room.
        """
        what = self._what
        if args or states.shape[:2] != (1, 1) or states.dtype != what.dtype or states.requires_grad:
            return None
        if kwargs.get("attention_mask") is not None or self._config._attn_implementation != "sdpa":
            return None
        if any(value is not None for name, value in kwargs.items() if name not in self._understood):
            return None
        if self._layer.training or torch.is_autocast_enabled("cpu") or not what.is_current:
            return None
        if what.query_scale is not None and kwargs.get("position_ids") is None:
            return None
        cache = kwargs.get(self._cache_name)
        if type(cache) is not SharedCache or any(self._hooks):  # whoever watches a part shall see it run
            return None
        place = cache.layers[self._depth]
        if not isinstance(place, (SharedLayer, RestingLayer)) or place.token_kind != self._token_kind:
            return None
        cos, sin = (part.contiguous() for part in kwargs["position_embeddings"])
        if not self._is_place(cos) or cos.shape != sin.shape or cos.dtype != sin.dtype:
            return None
        scale = 1.0 if what.query_scale is None else what.query_scale(kwargs["position_ids"])
        keys, values = cache.claim(self._depth, 1)
        y = torch.empty_like(states)
        what.code.layer_token(what.native, states.contiguous(), cos, sin, scale, keys, values, y)
        cache.settle(self._depth, keys, values)
        return y

    def _is_place(self, cos: Tensor) -> bool:
        """Of one token, and of no more dimensions than a head has?"""
        turned = cos.shape[-1]
        return cos.dtype == self._what.dtype and cos.numel() == turned <= self._what.native.head_dim and turned % 2 == 0

    @torch.no_grad()
    def _apart(self, layer: nn.Module) -> float | None:
        """How far this is from `layer` in what it adds to a token, and in the key and value it caches. None where calls
        are for the layer itself."""
        native, dtype = self._what.native, self._what.dtype
        generator = torch.Generator().manual_seed(0)
        # Small beside what the layer adds to them, which is of the size of its weights: the norms see to that.
        states = 0.02 * torch.randn(1, _PROBED_TOKENS, native.q.columns, generator=generator).to(dtype)
        angles = 6.3 * torch.rand(1, _PROBED_TOKENS, native.head_dim // 2, generator=generator).repeat(1, 1, 2)
        embeddings = angles.cos().to(dtype), angles.sin().to(dtype)
        far = (getattr(self._config, "max_position_embeddings", None) or _PROBED_TOKENS) - _PROBED_TOKENS
        cache = SharedCache(self._config, _PROBED_TOKENS)
        place = cache.layers[self._depth] = SharedLayer(_PROBED_TOKENS)  # whatever window it may have

        def call(first: int, last: int) -> tuple[Tensor, dict[str, Any]]:
            return states[:, first:last], {
                "attention_mask": None,
                "position_ids": torch.arange(far + first, far + last)[None],
                "position_embeddings": tuple(part[:, first:last].contiguous() for part in embeddings),
                self._cache_name: cache,
            }

        def outcome(made: Tensor) -> list[Tensor]:
            return [(made - token).float(), place.keys[:, :, -1].float(), place.values[:, :, -1].float()]

        earlier, kwargs = call(0, _PROBED_TOKENS - 1)
        if not isinstance(layer(earlier, **kwargs), Tensor):
            return None
        token, kwargs = call(_PROBED_TOKENS - 1, _PROBED_TOKENS)
        expected = outcome(layer(token, **kwargs))
        place.crop(-1)
        made = self.run(token, (), kwargs)
        if made is None:
            return None
        return max(_relative(mine, its) for mine, its in zip(outcome(made), expected, strict=True))


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference by the largest value; infinite where either is not finite."""
    apart, size = float((found - expected).abs().max()), float(expected.abs().max())
    if not math.isfinite(apart + size):
        return math.inf
    return apart / size if size else math.inf if apart else 0.0
