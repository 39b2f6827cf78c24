"""Memory to slots, when it is told to: a link without a device, whose every delay somebody chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from river_offload.errors import LinkError
from river_offload.store.link import Fetches
from river_offload.store.slots import Slots

PIECES = 4
"""Pieces that a layer is moved in."""


@dataclass(eq=False)
class _Move:
    layer: int
    slot: int
    moved: int = 0
    cancelled: bool = False
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.cancelled or self.failed or self.moved == PIECES


class NullLink:
    """Keeps the letter of the contract and nothing beyond it: bytes land as early or as late as the choices say.

    At every call the next choice tells how many pieces of the queue have landed meanwhile. A slot is destroyed as soon
    as a fetch into it starts, and the pieces of a layer land last one first.

    Args:
        layers: the bytes of each layer, uint8.
        slots: where they go.
        choices: numbers of pieces; 0 when it runs out.
        abortable: may a fetch that has started be called off?
        broken: layers whose fetch fails half-way.
    """

    def __init__(
        self,
        layers: Mapping[int, torch.Tensor],
        slots: Slots,
        choices: Iterator[int],
        *,
        abortable: bool = True,
        broken: frozenset[int] = frozenset(),
    ) -> None:
        self.abortable = abortable
        self.broken = broken
        self.closed = False
        self._layers = layers
        self._slots = slots
        self._choices = choices
        self._queue: list[_Move] = []
        self._fetches: Fetches[_Move] = Fetches(len(slots))
        self._pieces_moved = 0

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        self._elapse()
        if self.closed:
            raise LinkError("the link is closed")
        move = _Move(layer, slot)
        same_slot = [index for index, other in enumerate(self._queue) if other.slot == slot]
        place = (same_slot[-1] + 1 if same_slot else 0) if urgent else len(self._queue)
        self._queue.insert(place, move)
        self._fetches.add(slot, move)

    def wait(self, slot: int) -> float:
        """Whatever is queued before it lands first. Stands still a piece a second."""
        self._elapse()
        move, pieces = self._fetches.newest(slot), 0
        while move is not None and not move.done:
            assert self._queue, "waited for a fetch that nobody carries out"
            self._step()
            pieces += 1
        if move is not None and move.failed:
            raise LinkError(f"layer {move.layer} cannot be read")
        return float(pieces)

    def ready(self, slot: int) -> bool:
        self._elapse()
        move = self._fetches.newest(slot)
        return move is None or move.done

    def progress(self, slot: int) -> float:
        move = self._fetches.newest(slot)
        return 1.0 if move is None else move.moved / PIECES

    def release(self, slot: int) -> None:
        self._elapse()

    def cancel(self, slot: int) -> float:
        move = self._fetches.newest(slot)
        if move is None:
            return 0.0
        if move.moved and not self.abortable:
            return 1.0
        if not move.done:
            move.cancelled = True
            self._queue.remove(move)
        return move.moved / PIECES

    def moved(self) -> tuple[float, float]:
        return self._pieces_moved / PIECES, float(self._pieces_moved)

    def close(self) -> None:
        self.closed = True
        self._queue.clear()

    def _elapse(self) -> None:
        for _ in range(next(self._choices, 0)):
            self._step()

    def _step(self) -> None:
        """Move a piece of the first of the queue."""
        if not self._queue:
            return
        move = self._queue[0]
        buffer, source = self._slots.buffers[move.slot], self._layers[move.layer]
        if not move.moved:
            self._slots.poison(move.slot)
        size = -(-source.nbytes // PIECES)
        start = (PIECES - 1 - move.moved) * size
        part = source[start : start + size]
        buffer[start : start + part.nbytes].copy_(part)
        move.moved += 1
        self._pieces_moved += 1
        if move.layer in self.broken and move.moved == PIECES // 2:
            move.failed = True
        if move.done:
            self._queue.pop(0)
