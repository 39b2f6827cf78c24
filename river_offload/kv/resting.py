"""A layer's keys and values that rest elsewhere, or otherwise, than attention needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from river_offload.errors import ContextError
from river_offload.kv.kind import RECENT_TOKENS, ROLLBACK_TOKENS, KvKind
from river_offload.kv.memory import Allocate, device_memory
from river_offload.kv.rest import PlainRest, QuantizedRest, Rest
from river_offload.kv.rows import RowsLayer
from river_offload.kv.workspace import Workspace


def check_room(rows: int, held_rows: int, end: int, capacity: int) -> None:
    """Raises ContextError when a layer that holds `held_rows` is given other ones, or tokens beyond its capacity."""
    if rows != held_rows:
        raise ContextError(f"{rows} rows for a KV cache that holds {held_rows}: keep a cache for each batch")
    if end > capacity:
        raise ContextError(
            f"{end} tokens in a KV cache made for {capacity}: make one for more tokens, or load with a larger context"
        )


TokenKind = tuple[int, int, int, torch.dtype]
"""Rows, heads, head dimension and dtype of what is cached of a token."""


def token_kind(keys: torch.Tensor, values: torch.Tensor) -> TokenKind | None:
    """Of cached states [rows, heads, tokens, head_dim]; None where keys and values differ."""
    kinds = [(len(part), part.shape[1], part.shape[3], part.dtype) for part in (keys, values)]
    return kinds[0] if kinds[0] == kinds[1] else None


class RestingLayer(RowsLayer):
    """Keys and values of one depth: old tokens at rest, recent ones in full precision on the device.

    `update` brings all of them into the workspace that the layers share, so attention stays transformers' own. What it
    returns is good until another layer of the cache is updated. What `bring_ahead` has brought in by then need not be
    waited for. What `kind` makes of it: few bits, the host, or both. In full precision there are no recent tokens: all
    rest.

    Transformers' own QuantizedCache does not serve: it cannot be cropped, it concatenates (each step holds a layer
    twice) and quantizes all tokens anew each time its window is full, so that their errors add up; its backends are
    optional packages. Its offloaded caches move whole layers both ways at every step and keep no plan.

    Args:
        capacity: tokens the layer can hold.
        workspace: shared by the layers of a cache.
        place: of the layer among those that share it.
        host: gives the memory of tier "host".
        give_back: tokens that `crop` takes off without a trace, `ROLLBACK_TOKENS` at least; their full precision is
            kept as long.
    """

    def __init__(
        self, capacity: int, kind: KvKind, workspace: Workspace, host: Allocate, give_back: int = 0, *, place: int = 0
    ) -> None:
        super().__init__()
        self.capacity = capacity
        self.place = place
        self._kind = kind
        self._workspace = workspace
        self._host = host
        plain = kind.bits == 16
        self._recent_tokens = 0 if plain else RECENT_TOKENS
        self._give_back = 0 if plain else max(give_back, ROLLBACK_TOKENS)
        self._rests: tuple[Rest, Rest] | None = None
        self._length = 0
        self._rested = 0
        """Tokens that `update` takes from their rest, the others from `_recent`."""
        self._recent_start = 0
        """The first token of `_recent`: before `_rested`, so that tokens can be given back."""
        self._recent: tuple[torch.Tensor, torch.Tensor] | None = None
        """Never written in place: the mark of a pass keeps the old ones."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any) -> None:
        """Allocate for the batch, heads and dtype of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._rests = None  # gives the memory back that an interrupted first pass left
        self._rests = (self._rest(key_states, "tokens"), self._rest(value_states, "channels"))
        self._recent = (key_states[:, :, :0].clone(), value_states[:, :, :0].clone())
        self._workspace.allocate((key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens, [batch, kv_heads, tokens, head_dim]; returns all that is cached.

        Raises ContextError when they do not fit, CacheError when there is no memory on the host.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        shown = self._extend(len(key_states), key_states.shape[2])
        for whole, new in zip(shown, (key_states, value_states), strict=True):
            whole[:, :, self._length :] = new
        self.settle(*shown)
        return shown

    @property
    def token_kind(self) -> TokenKind | None:
        """None before the first states, and where keys and values differ."""
        return None if self._recent is None else token_kind(*self._recent)

    def claim(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is cached and `tokens` more, whose states the caller writes. Then he hands them to `settle`.

        Raises as `update` does.
        """
        return self._extend(self._row_count(), tokens)

    def settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put to rest, or keep, the new ones of the tokens that were claimed, all of which these are."""
        start, end = self._length, keys.shape[2]
        rests, recent = self._held()
        rested = max(self._rested, self._rested_of(end))
        recent_start = max(self._recent_start, self._rested_of(end - self._give_back))
        kept = []
        for rest, old, whole in zip(rests, recent, (keys, values), strict=True):
            if rested > self._rested:
                rest.put(self._rested, whole[:, :, self._rested : rested])
            dropped = recent_start - self._recent_start
            kept.append(torch.cat((old[:, :, dropped:], whole[:, :, max(recent_start, start) :]), dim=2))
        # In few bits what was put to rest just now is still there as it was before.
        self._workspace.keep(self.place, rested if self._kind.bits == 16 else self._rested)
        self._length, self._rested, self._recent_start = end, rested, recent_start
        self._recent = (kept[0], kept[1])

    def bring_ahead(self) -> None:
        """The layer runs next: begin to bring its tokens in, if there is a room for them."""
        if self.is_initialized:
            rests, recent = self._held()
            self._workspace.bring(self.place, rests, recent, self._rested)

    def get_seq_length(self) -> int:
        """Tokens per row."""
        return self._length

    def skip(self, tokens: int) -> None:
        """As if `tokens` more had been appended: their states are whatever is there."""
        recent = self._held()[1]
        self._length += tokens
        self._rested = max(self._rested, self._rested_of(self._length))
        self._recent_start = max(self._recent_start, self._rested_of(self._length - self._give_back))
        kept = self._length - self._recent_start
        keys, values = (old.new_empty((*old.shape[:2], kept, old.shape[3])) for old in recent)
        self._recent = (keys, values)

    def crop(self, tokens_to_remove: int) -> None:
        """Give back the last tokens: a negative count, as transformers passes it.

        A cache of few bits that gives back more than it was made for has no full precision of the last ones left: they
        are then as they were rounded. Raises ValueError for a positive count.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative count of tokens to remove, not {tokens_to_remove}")
        if not self.is_initialized or not tokens_to_remove:
            return
        length = max(self._length + tokens_to_remove, 0)
        if length < self._recent_start:
            self._fetch_recent(length)
        keys, values = self._held()[1]
        left = length - self._recent_start
        self._recent = (keys[:, :, :left], values[:, :, :left])
        self._rested = min(self._rested, max(self._recent_start, self._rested_of(length)))
        self._length = length

    def reset(self) -> None:
        """Forget every token, keep the memory."""
        self.crop(-self._length)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """What the layer holds on the device, the shared workspace left out."""
        if self.is_initialized:
            yield from self._held()[1]
            yield from self.rest_tensors()

    def rest_tensors(self) -> Iterator[torch.Tensor]:
        """What rests on the device."""
        if self.is_initialized and self._kind.tier == "device":
            for rest in self._held()[0]:
                yield from rest.buffers

    def most_recent_bytes(self, before: Mapping[str, Any]) -> int:
        """Device bytes of the recent tokens at most, in a pass that began at the mark `before`: it makes new ones of
        the old, if there were any, which are there until it is over. How many there are changes from pass to pass."""
        if not self._recent_tokens:
            return 0
        rests, recent = self._held()
        old = before["_recent"]
        times = 1 if old is None or not old[0].numel() else 2
        most = min(self._recent_tokens + self._give_back + rests[0].block - 1, self.capacity)
        return times * most * sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in recent)

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What the layer holds on the host."""
        if self.is_initialized and self._kind.tier == "host":
            for rest in self._held()[0]:
                yield from rest.buffers

    def _extend(self, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring all tokens into the workspace, in front of room for more."""
        start, end = self._length, self._length + tokens
        rests, recent = self._held()
        check_room(rows, len(recent[0]), end, self.capacity)
        shown, there = self._workspace.lend(self.place, recent, end)
        there = min(there, self._rested)  # fewer where tokens were given back since
        for rest, old, whole in zip(rests, recent, shown, strict=True):
            rest.get(there, whole[:, :, there : self._rested])
            whole[:, :, self._rested : start] = old[:, :, self._rested - self._recent_start :]
        return shown

    def _held(self) -> tuple[tuple[Rest, Rest], tuple[torch.Tensor, torch.Tensor]]:
        assert self._rests is not None and self._recent is not None
        return self._rests, self._recent

    def _rest(self, like: torch.Tensor, over: str) -> Rest:
        allocate = self._host if self._kind.tier == "host" else device_memory(like.device)
        if self._kind.bits == 16:
            return PlainRest(like, self.capacity, allocate)
        capacity = max(self.capacity - self._recent_tokens, 0)
        return QuantizedRest(like, capacity, allocate, bits=self._kind.bits, over=over)

    def _rested_of(self, length: int) -> int:
        """How many of `length` tokens rest: whole blocks, the recent ones left out."""
        block = self._held()[0][0].block
        return max(length - self._recent_tokens, 0) // block * block

    def _fetch_recent(self, length: int) -> None:
        """Make what rests of the block that `length` ends in the recent tokens."""
        rests, recent = self._held()
        block = rests[0].block
        start = length // block * block
        fetched = []
        for rest, old in zip(rests, recent, strict=True):
            states = old.new_empty((*old.shape[:2], block if length > start else 0, old.shape[3]))
            rest.get(start, states)
            fetched.append(states)
        self._recent_start, self._recent = start, (fetched[0], fetched[1])

    def _row_count(self) -> int:
        return len(self._held()[1][0])

    def _replace_rows(self, rows: torch.Tensor) -> None:
        self._workspace.forget()
        rests, (keys, values) = self._held()
        for rest in rests:
            rest.select_rows(rows)
        chosen = rows.to(keys.device)
        self._recent = (keys.index_select(0, chosen), values.index_select(0, chosen))
