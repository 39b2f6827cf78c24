"""Which of several things that wait for the link goes first: weights and keys and values share it.

What computation waits for comes before all else: every microsecond of it is a stall. Then keys and values of the next
layer: they are certain, since backbone and river share the cache, so the next layer reads them whatever the exit. Then
weights that are only foreseen: the passage may leave before it needs them, and the slots keep them for later.
"""

from __future__ import annotations

from typing import Literal

Load = Literal["weights", "kv"]

FIRST = 0
"""The turn of what computation waits for."""
TURNS = 3
AHEAD_FROM_BYTES = 1 << 20
"""Fewer are there as soon as another thread has woken up, or another stream was told to bring them."""


def turn(load: Load, *, needed: bool = False) -> int:
    """When it is the load's turn: 0 before 1, 1 before 2. Loads of one turn keep the order they were asked for in.

    Args:
        needed: computation waits for it, or is about to.
    """
    if needed:
        return FIRST
    return 1 if load == "kv" else 2


def worth_ahead(kv_bytes: int) -> bool:
    """Should the next layer's keys and values come in ahead, or may the layer bring in so little by itself?"""
    return kv_bytes >= AHEAD_FROM_BYTES
