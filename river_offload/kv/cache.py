"""The shared KV cache: allocated once for the planned context, written in place, never doubled.

Backbone and river layers of one depth carry the same `layer_idx`, so they write to the same place of one cache and no
entry is ever missing, whatever the depths of the passages were.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from river_offload.errors import UnsupportedError
from river_offload.kv.kind import PLAIN, KvKind
from river_offload.kv.memory import Allocate, plain_memory
from river_offload.kv.resting import RestingLayer, TokenKind, check_room, token_kind
from river_offload.kv.rows import RowsLayer
from river_offload.kv.workspace import KvLink, Workspace

Mark = list[dict[str, Any]]
"""The state of a cache between two passes, by layer."""


class SharedLayer(RowsLayer):
    """Keys and values of one depth, [batch, kv_heads, capacity, head_dim], filled from the front.

    `keys` and `values` are views of what is filled. Transformers' own layer concatenates instead: each step would hold
    one layer twice and copy all of it.

    Args:
        capacity: tokens the layer can hold.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any) -> None:
        """Allocate for the batch, heads and dtype of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_buffer = _empty_like(key_states, self.capacity)
        self._value_buffer = _empty_like(value_states, self.capacity)
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens, [batch, kv_heads, tokens, head_dim]; returns all that is cached.

        Raises ContextError when they do not fit.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        keys, values = self._extend(len(key_states), key_states.shape[-2])
        keys[:, :, start:] = key_states
        values[:, :, start:] = value_states
        return keys, values

    @property
    def token_kind(self) -> TokenKind | None:
        """None before the first states, and where keys and values differ."""
        if self._key_buffer is None or self._value_buffer is None:
            return None
        return token_kind(self._key_buffer, self._value_buffer)

    def claim(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is cached and `tokens` more, whose states the caller writes. Raises ContextError when they do not
        fit."""
        return self._extend(self._row_count(), tokens)

    def settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What was claimed is written, where it rests: nothing is left to do."""

    def crop(self, tokens_to_remove: int) -> None:
        """Give back the last tokens: a negative count, as transformers passes it.

        Raises ValueError for a positive one, which once was the length to keep.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative count of tokens to remove, not {tokens_to_remove}")
        if self.is_initialized and tokens_to_remove:
            self._show(max(self.get_seq_length() + tokens_to_remove, 0))

    def skip(self, tokens: int) -> None:
        """As if `tokens` more had been appended: their states are whatever is there."""
        self._show(self.get_seq_length() + tokens)

    def reset(self) -> None:
        """Forget every token, keep the memory."""
        if self.is_initialized:
            self._show(0)

    def _row_count(self) -> int:
        assert self._key_buffer is not None
        return len(self._key_buffer)

    def _replace_rows(self, rows: torch.Tensor) -> None:
        assert self._key_buffer is not None and self._value_buffer is not None
        length = self.get_seq_length()
        keys, values = (t.index_select(0, rows.to(t.device)) for t in (self.keys, self.values))
        if len(rows) != len(self._key_buffer):
            self._key_buffer, self._value_buffer = _empty_like(keys, self.capacity), _empty_like(values, self.capacity)
        self._key_buffer[:, :, :length] = keys
        self._value_buffer[:, :, :length] = values
        self._show(length)

    def _extend(self, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.get_seq_length() + tokens
        check_room(rows, self._row_count(), end, self.capacity)
        self._show(end)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        assert self._key_buffer is not None and self._value_buffer is not None
        self.keys = self._key_buffer[:, :, :length]
        self.values = self._value_buffer[:, :, :length]


class WindowLayer(DynamicSlidingWindowLayer):
    """Keys and values of the last `sliding_window - 1` tokens of one depth, and of `give_back` older ones.

    Transformers' own layer keeps them as a view of all states of a prompt, and with that all their memory.

    Args:
        give_back: how many of its last tokens the layer can give back: so many older ones come into the window again.
    """

    keys: torch.Tensor
    values: torch.Tensor
    cumulative_length: int

    def __init__(self, sliding_window: int, give_back: int = 0) -> None:
        super().__init__(sliding_window)
        self.give_back = give_back

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; returns those of every token that one of them may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_tokens = key_states.shape[-2]
        seen = min(self.cumulative_length, self.sliding_window - 1) + new_tokens
        self.cumulative_length += new_tokens
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        kept = max(self.sliding_window - 1, 1) + self.give_back
        self.keys, self.values = keys[:, :, -kept:], values[:, :, -kept:]
        if new_tokens > 1:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return keys[:, :, -seen:], values[:, :, -seen:]

    def crop(self, tokens_to_remove: int) -> None:
        """Give back the last tokens: a negative count, as transformers passes it.

        Raises ValueError for a positive one, and for more tokens than older ones are kept for.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative count of tokens to remove, not {tokens_to_remove}")
        if not self.is_initialized or not tokens_to_remove:
            return
        length = max(self.cumulative_length + tokens_to_remove, 0)
        left = max(self.keys.shape[-2] + tokens_to_remove, 0)
        if left < min(length, self.sliding_window - 1):
            raise ValueError(
                f"a window of {self.sliding_window} tokens cannot give back {-tokens_to_remove}: it was made to give "
                f"back {self.give_back}"
            )
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
        self.cumulative_length = length

    def reset(self) -> None:
        """Forget every token, and give their memory back: a window grows anew with each text."""
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :0].clone(), self.values[:, :, :0].clone()
            self.cumulative_length = 0

    def skip(self, tokens: int) -> None:
        """As if `tokens` more had been appended: their states are whatever is there."""
        self.cumulative_length += tokens
        batch, heads, held, head_dim = self.keys.shape
        most = max(self.sliding_window - 1, 1) + self.give_back
        if (kept := min(self.cumulative_length, most)) > held:
            self.keys = self.keys.new_empty((batch, heads, kept, head_dim))
            self.values = self.values.new_empty((batch, heads, kept, self.values.shape[-1]))


class SharedCache(Cache):
    """The KV cache of a loaded model: `SharedLayer`, or `RestingLayer` in other kinds; `WindowLayer` where attention
    slides within its capacity.

    Args:
        config: the text config of the model.
        capacity: tokens per row.
        kind: bits and tier of the layers without a window.
        host: gives the memory of tier "host".
        link: brings the next layer's keys and values in ahead, which takes a second room of the workspace; None for
            one room. Tier "host" alone has a use for it.
        give_back: the most of its last tokens that a `crop` takes off without a trace. Windows refuse more.

    Raises:
        UnsupportedError: the model keeps another kind of state than keys and values (linear attention, say).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        capacity: int,
        kind: KvKind = PLAIN,
        host: Allocate = plain_memory,
        *,
        give_back: int = 0,
        link: KvLink | None = None,
    ) -> None:
        self.capacity = capacity
        self.kind = kind
        self.workspace = Workspace(capacity, link)
        layers: list[Any] = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
            if type(layer) is DynamicLayer or (window is not None and window >= capacity):  # it would never slide
                plain = kind.is_plain
                resting = functools.partial(RestingLayer, kind=kind, workspace=self.workspace, host=host, place=index)
                layers.append(SharedLayer(capacity) if plain else resting(capacity, give_back=give_back))
            elif window is not None:
                layers.append(WindowLayer(window, give_back))
            else:
                raise UnsupportedError(
                    f"layer {index} of this model caches {type(layer).__name__}: expected full or sliding-window "
                    "attention, other kinds are not supported yet"
                )
        resting_layers = (index for index, layer in enumerate(layers) if isinstance(layer, RestingLayer))
        self._following = dict(itertools.pairwise(resting_layers)) if self.workspace.ahead else {}
        super().__init__(layers=layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens at one depth; returns all that is cached there, for attention to read.

        While it does, the next layer's are brought in. Raises what the layer's own `update` raises.
        """
        shown: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._bring_ahead(layer_idx)
        return shown

    def claim(self, depth: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is cached at one depth and `tokens` more, [rows, heads, tokens, head_dim], whose states the caller
        writes. Then he hands them to `settle`. Raises as `update` does."""
        shown: tuple[torch.Tensor, torch.Tensor] = self.layers[depth].claim(tokens)
        self._bring_ahead(depth)
        return shown

    def settle(self, depth: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What was claimed at `depth` is written."""
        self.layers[depth].settle(keys, values)

    def _bring_ahead(self, depth: int) -> None:
        if (following := self._following.get(depth)) is not None:
            self.layers[following].bring_ahead()

    def device_tensors(self) -> Iterator[torch.Tensor | None]:
        """What the cache holds on the device, None where a layer holds nothing yet."""
        for layer in self.layers:
            yield from device_tensors(layer)
        yield from self.workspace.tensors()

    def mark(self) -> Mark:
        """What to hand to `back_to`: the views and lengths of every layer, no copies."""
        return [dict(vars(layer)) for layer in self.layers]

    def skip(self, depth: int, tokens: int) -> None:
        """Go on at `depth` as if `tokens` more had been appended. For dry runs, where states do not matter."""
        self.layers[depth].skip(tokens)

    def back_to(self, mark: Mark) -> None:
        """Forget all that was cached since `mark`, which must be the last pass: older views may be overwritten."""
        for layer, before in zip(self.layers, mark, strict=True):
            vars(layer).clear()
            vars(layer).update(before)
        self.workspace.forget()


def only_windows(config: PretrainedConfig, capacity: int) -> bool:
    """Whether attention slides in every layer within so many tokens, so that there is nothing but windows to cache."""
    return all(isinstance(layer, WindowLayer) for layer in SharedCache(config, capacity).layers)


def cache_argument(model: PreTrainedModel) -> str:
    """What this transformers version calls a cache that is handed to the model: `cache` from 5.24 on."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def cache_tensors(cache: Cache) -> Iterator[torch.Tensor | None]:
    """The key and value tensors a cache holds on the device, None where a layer holds nothing yet."""
    if isinstance(cache, SharedCache):
        yield from cache.device_tensors()
        return
    for layer in cache.layers:
        yield from device_tensors(layer)


def device_tensors(layer: Any) -> Iterator[torch.Tensor | None]:
    """What a layer of a cache holds on the device by itself, None where it holds nothing yet."""
    yield from layer.device_tensors() if isinstance(layer, RestingLayer) else (layer.keys, layer.values)


def host_tensors(layer: Any) -> Iterator[torch.Tensor]:
    """What a layer of a cache holds on the host."""
    yield from layer.host_tensors() if isinstance(layer, RestingLayer) else ()


def mark_tensors(before: dict[str, Any]) -> Iterator[torch.Tensor]:
    """What the mark of a layer keeps alive on the device."""
    yield from (value for value in tree_iter(before) if isinstance(value, torch.Tensor))


def _empty_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, head_dim = states.shape
    return states.new_empty((batch, heads, capacity, head_dim))
