"""How high the device memory of a loaded model rises, counted from the storages of its own passages."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from river_offload.call import Call
from river_offload.handle import River
from river_offload.kv.cache import cache_tensors
from river_offload.memory.storages import StorageMeter, storage_bytes


def meter_forward(model: PreTrainedModel, river: River) -> None:
    """Count the allocations of the model's passages into `river.account.peak_device_bytes`.

    Counting costs microseconds for every operator. Passages of several tokens are rare and rise high: each is counted.
    Single tokens are counted once for each mode, number of rows and doubling of the cache; in between they rise alike.
    """
    plain = model.forward
    weights_bytes = river.device_bytes()
    single_token_bytes: dict[tuple[str, int, int], int] = {}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        key = (river.mode, call.rows, call.cached_tokens.bit_length())
        held_bytes = weights_bytes + _held_by(call.cache)
        if call.new_tokens == 1 and key in single_token_bytes:
            rise_bytes = single_token_bytes[key]
            output = plain(*args, **kwargs)
        else:
            with StorageMeter(model.device) as meter:
                output = plain(*args, **kwargs)
            rise_bytes = meter.peak_bytes
            if call.new_tokens == 1 and call.cached_tokens:  # an empty cache is allocated on the way
                single_token_bytes[key] = rise_bytes
        river.account.peak_device_bytes = max(river.account.peak_device_bytes, held_bytes + rise_bytes)
        return output

    model.forward = forward


def _held_by(cache: Cache | None) -> int:
    return 0 if cache is None or not hasattr(cache, "layers") else storage_bytes(cache_tensors(cache))
