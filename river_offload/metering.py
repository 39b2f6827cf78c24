"""How high the device memory of a loaded model rises, counted from the storages of its own passages."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from river_offload.call import Call
from river_offload.handle import River
from river_offload.kv.cache import SharedCache, cache_tensors
from river_offload.memory.storages import storage_bytes
from river_offload.phases import metered


def meter_forward(model: PreTrainedModel, river: River) -> None:
    """Count the allocations of the model's passages into `river.account`: their peak, what it consisted of, and what is
    held in the passage under way.

    Counting costs microseconds for every operator. Passages of several tokens are rare and rise high: each is counted.
    Single tokens are counted once for each mode, number of rows and doubling of the cache; in between they rise alike.
    """
    plain = model.forward
    weights_bytes, weights = river.device_bytes(), river.held_by_category()
    single_token: dict[tuple[str, int, int], dict[str, int]] = {}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        key = (river.mode, call.rows, call.cached_tokens.bit_length())
        before = list(cache_tensors(call.cache)) if isinstance(call.cache, SharedCache) else []
        kv_bytes = _held_by(call.cache)
        river.account.held = weights | {"kv": kv_bytes}
        if call.new_tokens == 1 and key in single_token:
            rise = single_token[key]
            output = plain(*args, **kwargs)
        else:
            with metered(model, call.cache, outside="logits") as meter:
                output = plain(*args, **kwargs)
            rise = meter.peak_by_tag()
            rise.pop("kv", None)  # a cache that grew, or windows that replaced others: counted as held
            kv_bytes = max(kv_bytes, _held_by(call.cache, before))
            if call.new_tokens == 1 and call.cached_tokens:
                single_token[key] = rise
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
