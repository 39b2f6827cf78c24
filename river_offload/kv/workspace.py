"""Where attention reads keys and values that rest elsewhere: device memory for one layer's, or for two in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from policies.link_order import worth_ahead
from river_offload.kv.rest import Rest

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [rows, heads, tokens, head_dim]."""


class KvLink(Protocol):
    """Brings keys and values in beside the computation (`store.link_kv`, where the two edges of a reuse are told)."""

    @property
    def open(self) -> bool:
        """Is anything fetched? Where not, a layer brings its own in when it runs."""

    def prepare(self, parts: Sequence[tuple[Rest, torch.Tensor]]) -> Any:
        """What to `start`: put it down first, so that whatever happens it can be dropped."""

    def start(self, fetch: Any) -> None:
        """Begin to fill the places, behind all computation that was issued. Returns at once."""

    def wait(self, fetch: Any) -> None:
        """Return once compute issued from now on reads what was fetched. Raises LinkError when it cannot be had."""

    def drop(self, fetch: Any) -> None:
        """Return once compute issued from now on may write to the places, whatever became of the fetch."""

    def quiet(self) -> None:
        """Return when nothing at rest is being read: it may be changed."""

    def close(self) -> None:
        """Fetch nothing any more. May be called twice."""


class _Room:
    """Device memory for one layer's keys and values."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}
        self.layer: int | None = None
        """Whose tokens are in it, or on their way."""
        self.tokens = 0
        """So many of its first ones are there as they rest, once what is `coming` has come."""
        self.coming: Any | None = None

    def clear(self) -> None:
        """Nobody's any more; the memory stays."""
        self.layer, self.tokens = None, 0


class Workspace:
    """Device memory for the keys and values of a layer, as attention reads them: every layer of a cache in turn.

    With a link there are two rooms, and while a layer computes in one the next layer's are brought into the other. That
    next layer runs in any case: backbone and river share the cache, so an exit changes nothing. What follows the last
    layer is not certain (tokens may be given back, the text may end), so nothing is brought ahead across passages.

    Args:
        capacity: tokens a row.
        link: brings in ahead; None for one room, and nothing ahead.
    """

    def __init__(self, capacity: int, link: KvLink | None = None) -> None:
        self._capacity = capacity
        self._link = link
        self._rooms = [_Room() for _ in range(1 if link is None else 2)]
        self._in_use = self._rooms[0]
        """The room whose views attention was given last."""

    @property
    def ahead(self) -> bool:
        """Is anything brought in ahead?"""
        return self._link is not None

    def lend(self, layer: int, like: States, length: int) -> tuple[States, int]:
        """Room for `length` tokens of states like these, and how many of the layer's first ones are there already.

        They are good until the layer after the next one asks, with a single room the next one. Raises LinkError when
        tokens on their way cannot be had; asked again, the layer brings them in itself.
        """
        room = next((room for room in self._rooms if room.layer == layer), None) or self._other()
        here = room.tokens if room.layer == layer else 0
        self._settle(room, wanted=room.layer == layer)
        room.clear()  # until the layer has put down what it made of it
        self._in_use = room
        return self._views(room, like, length), here

    def keep(self, layer: int, tokens: int) -> None:
        """Of the layer that was lent a room last, so many first tokens are there as they rest."""
        self._in_use.layer, self._in_use.tokens = layer, tokens

    def bring(self, layer: int, rests: tuple[Rest, Rest], like: States, tokens: int) -> None:
        """Begin to bring a layer's first `tokens`, into the room that is not in use, unless they are there or few."""
        room = self._other()
        if self._link is None or not self._link.open or room.layer == layer:
            return
        token_bytes = sum(len(part) * part.shape[1] * part.shape[3] * part.element_size() for part in like)
        if not tokens or not worth_ahead(tokens * token_bytes):
            return
        self._settle(room, wanted=False)
        room.clear()
        views = self._views(room, like, tokens)
        room.coming = self._link.prepare(tuple(zip(rests, views, strict=True)))
        room.layer, room.tokens = layer, tokens
        self._link.start(room.coming)

    def forget(self) -> None:
        """What rests has changed, or may have: nothing is there, nothing on its way, nothing at rest being read."""
        for room in self._rooms:
            room.clear()
            self._settle(room, wanted=False)
        if self._link is not None:
            self._link.quiet()

    def allocate(self, like: States) -> None:
        """Have the memory of all rooms, for states like these, before the first is asked for."""
        for room in self._rooms:
            self._views(room, like, 0)

    def tensors(self) -> Iterator[torch.Tensor]:
        for room in self._rooms:
            yield from room.buffers.values()

    def _other(self) -> _Room:
        """The room that is not in use; with a single one that."""
        return next((room for room in self._rooms if room is not self._in_use), self._in_use)

    def _settle(self, room: _Room, *, wanted: bool) -> None:
        """Nothing is on its way into the room any more. What is `wanted` is there then."""
        if room.coming is None or self._link is None:
            return
        if wanted:
            try:
                self._link.wait(room.coming)
            except BaseException:
                room.clear()
                raise
        else:
            self._link.drop(room.coming)
        room.coming = None

    def _views(self, room: _Room, like: States, length: int) -> States:
        """The room's memory for `length` tokens, made anew when there are more or fewer rows."""
        views = []
        for part, states in zip(("keys", "values"), like, strict=True):
            rows, heads, _, head_dim = states.shape
            key = (part, heads, head_dim, states.dtype)
            buffer = room.buffers.get(key)
            if buffer is None or len(buffer) != rows:
                room.buffers.pop(key, None)
                buffer = room.buffers[key] = states.new_empty((rows, heads, self._capacity, head_dim))
            views.append(buffer[:, :, :length])
        return views[0], views[1]
