"""How high the device memory of a loaded model rises, counted from the storages of its own passages."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from policies.drafting import MOST_DRAFTED
from river_offload.call import Call
from river_offload.handle import River
from river_offload.kv.cache import cache_tensors
from river_offload.memory.storages import StorageMeter, storage_bytes


def meter_forward(model: PreTrainedModel, river: River) -> None:
    """Count the allocations of the model's passages into `river.account.peak_device_bytes`.

    Counting costs microseconds for every operator. Prompts are rare and rise high: each is counted. Short passages
    after one (a token, a block of drafted ones) are counted once for each mode, size and doubling of the cache; in
    between they rise alike.
    """
    plain = model.forward
    weights_bytes = river.device_bytes()
    short_passage_bytes: dict[tuple[str, int, int, int], int] = {}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        cached_tokens = call.cached_tokens
        key = (river.mode, call.rows, call.new_tokens, cached_tokens.bit_length())
        held_bytes = weights_bytes + _held_by(call.cache)
        if key in short_passage_bytes:
            rise_bytes = short_passage_bytes[key]
            output = plain(*args, **kwargs)
        else:
            with StorageMeter() as meter:
                output = plain(*args, **kwargs)
            rise_bytes = meter.peak_bytes
            if call.new_tokens <= MOST_DRAFTED + 1 and cached_tokens:  # an empty cache is allocated on the way
                short_passage_bytes[key] = rise_bytes
        river.account.peak_device_bytes = max(river.account.peak_device_bytes, held_bytes + rise_bytes)
        return output

    model.forward = forward


def _held_by(cache: Cache | None) -> int:
    return 0 if cache is None or not hasattr(cache, "layers") else storage_bytes(cache_tensors(cache))
