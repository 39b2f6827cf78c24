"""Attention of a prompt that comes in chunks: masks are made when their chunk comes, and none where order is enough.

Transformers makes the masks of a whole prompt, [tokens, keys], before the first layer. While `deferred_masks` is
entered it makes a `DeferredMask` instead, through its own registry of attention implementations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from river_offload.errors import UsageError

_NAME = "river_chunks"
"""The implementation that stands in for `sdpa` while masks are deferred."""


@dataclass(frozen=True)
class DeferredMask:
    """The mask that transformers asked for, as the arguments of `sdpa_mask`: its rows are made chunk by chunk."""

    arguments: Mapping[str, Any]

    def of_chunk(self, tokens: int, first_token: int, keys: int, first_key: int) -> torch.Tensor | None:
        """bool [batch, 1, tokens, keys], or None when each token sees every key up to its own.

        Args:
            tokens, first_token: the chunk's length and its place in the text.
            keys, first_key: the same of the keys that its layer will hand to attention.
        """
        in_order = self.arguments["mask_function"] is causal_mask_function
        if in_order and self._padding is None and first_key == 0 and keys == first_token + tokens:
            return None
        own = {"q_length": tokens, "q_offset": first_token, "kv_length": keys, "kv_offset": first_key}
        # Transformers' own shortcuts may leave a mask out and mean another alignment by it than `attend` does.
        return sdpa_mask(**{**self.arguments, **own, "attention_mask": self._padding, "allow_is_causal_skip": False})

    @functools.cached_property
    def _padding(self) -> torch.Tensor | None:
        """bool [batch, cached and new tokens], None where all are real. Waits for the device. A fake one hides some."""
        padding = self.arguments["attention_mask"]
        if padding is None or (not isinstance(padding, FakeTensor) and bool(padding.all())):
            return None
        mask: torch.Tensor = padding
        return mask


def why_whole(model: PreTrainedModel) -> str | None:
    """Why the prompts of this decoder cannot be read in chunks; None when they can."""
    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        return f"its attention is {implementation!r}, and only that of 'sdpa' can be cut"
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} has an attention of its own"
    return None


@contextlib.contextmanager
def deferred_masks(model: PreTrainedModel) -> Iterator[None]:
    """While the block runs the decoder gets `DeferredMask`s. Raises UsageError when its prompts cannot be cut."""
    if reason := why_whole(model):
        raise UsageError(f"this prompt is longer than a chunk and cannot be read in chunks: {reason}")
    AttentionMaskInterface.register(_NAME, _defer)
    AttentionInterface.register(_NAME, attend)
    config = model.config
    plain, config._attn_implementation_internal = config._attn_implementation, _NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = plain


def _defer(**arguments: Any) -> DeferredMask:
    return DeferredMask(arguments)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' sdpa attention, but where a chunk stands after other keys and no mask is given.

    There attention falls into two parts that need none, to the keys before the chunk and inside it, and the parts are
    put together by their sums of exponentials. So nothing grows with the keys: neither a mask, nor keys and values
    repeated for each query head.

    Args:
        query: [batch, heads, tokens, head_dim], the last `tokens` of the keys' places.
        key, value: [batch, kv_heads, keys, head_dim].

    Returns:
        [batch, tokens, heads, head_dim], and None for the attention weights.
    """
    tokens, earlier = query.shape[2], key.shape[2] - query.shape[2]
    if attention_mask is None and tokens > 1 and earlier > 0:
        if _has_parts(query, value, kwargs):
            before = _part(query, key[:, :, :earlier], value[:, :, :earlier], scaling, causal=False)
            inside = _part(query, key[:, :, earlier:], value[:, :, earlier:], scaling, causal=True)
            return _merged(before, inside).transpose(1, 2).contiguous(), None
        seen = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=key.device)
        attention_mask = seen.tril(diagonal=earlier)[None, None]
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return output, None


def _has_parts(query: torch.Tensor, value: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel is there that tells the sums of exponentials, and nothing else is asked of it."""
    extras = kwargs.get("dropout") or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if extras or kwargs.get("is_causal") is False or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys: [batch, heads, tokens, head_dim], log sums of exponentials [batch, heads, tokens].

    The kernels that torch's own sdpa would choose; they take fewer key heads than query heads as they are.
    """
    if query.device.type == "cpu":
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scaling
        )
    else:
        output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scaling
        )
    return output, sums


def _merged(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Attention to the keys of both parts, each weighed by its share of the exponentials."""
    share = torch.sigmoid(one[1] - other[1]).unsqueeze(-1)
    return torch.lerp(other[0].float(), one[0].float(), share).to(one[0].dtype)
