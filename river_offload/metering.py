"""How high the device memory of a loaded model rises, counted from the storages of its own passages."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from policies.drafting import MOST_DRAFTED
from river_offload.call import Call
from river_offload.handle import River
from river_offload.kv.cache import SharedCache, cache_tensors
from river_offload.memory.storages import storage_bytes
from river_offload.phases import metered


def meter_forward(model: PreTrainedModel, river: River) -> None:
    """Count the allocations of the model's passages into `river.account`: their peak, what it consisted of, and what is
    held in the passage under way.

    Counting costs microseconds for every operator. Prompts are rare and rise high: each is counted. Short passages
    after one (a token, a block of drafted ones) are counted once for each mode, size and doubling of the cache; in
    between they rise alike.
    """
    plain = model.forward
    weights_bytes, weights = river.device_bytes(), river.held_by_category()
    short_passages: dict[tuple[str, int, int, int], dict[str, int]] = {}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        cached_tokens = call.cached_tokens
        key = (river.mode, call.rows, call.new_tokens, cached_tokens.bit_length())
        before = list(cache_tensors(call.cache)) if isinstance(call.cache, SharedCache) else []
        kv_bytes = _held_by(call.cache)
        river.account.held = weights | {"kv": kv_bytes}
        if key in short_passages:
            rise = short_passages[key]
            output = plain(*args, **kwargs)
        else:
            with metered(model, call.cache, outside="logits") as meter:
                output = plain(*args, **kwargs)
            rise = meter.peak_by_tag()
            # A cache that grew on the way counts as far as it had grown.
            kv_bytes = min(kv_bytes + rise.pop("kv", 0), max(kv_bytes, _held_by(call.cache, before)))
            if call.new_tokens <= MOST_DRAFTED + 1 and cached_tokens:  # an empty cache is allocated on the way
                short_passages[key] = rise
        river.account.held = weights | {"kv": kv_bytes} | rise
        peak_bytes = weights_bytes + kv_bytes + sum(rise.values())
        if peak_bytes > river.account.peak_device_bytes:
            river.account.peak_device_bytes = peak_bytes
            river.account.peak_categories = river.account.held
        return output

    model.forward = forward


def _held_by(cache: Cache | None, before: Iterable[torch.Tensor | None] = ()) -> int:
    """Device bytes of a cache, and of what it held `before` a pass: until that is over, it could be undone."""
    return 0 if cache is None or not hasattr(cache, "layers") else storage_bytes([*cache_tensors(cache), *before])
