"""What kind of KV cache a model has: how many bits a number takes, and where it rests between passes."""

from __future__ import annotations

from dataclasses import dataclass

from river_offload.config import RiverConfig

BLOCK_TOKENS = 32
"""Tokens that are quantized together: keys share a scale over a block, channel by channel."""
RECENT_TOKENS = 64
"""The last tokens at least, which stay in full precision in a cache of few bits."""
ROLLBACK_TOKENS = 32
"""Tokens that such a cache gives back without a trace: their full precision is kept as long."""


@dataclass(frozen=True)
class KvKind:
    """Plan and run make caches of one kind, so that they allocate alike.

    Layers whose attention slides are the same in every kind: they hold a window, which is small.
    """

    bits: int = 16
    """16 is the dtype of the states, whatever that is; 8 or 4 for all tokens but the recent ones."""
    tier: str = "device"
    """"device" or "host"."""

    @classmethod
    def of(cls, config: RiverConfig) -> KvKind:
        """The kind that was asked for."""
        return cls(config.kv_bits, config.kv_tier)

    @property
    def is_plain(self) -> bool:
        """Full precision on the device: nothing is moved or converted."""
        return self.bits == 16 and self.tier == "device"

    def __str__(self) -> str:
        return f"kv_bits={self.bits}, kv_tier={self.tier}"


PLAIN = KvKind()
