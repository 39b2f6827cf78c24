"""Frozen snapshots that go into a decision and the decisions that come out.

Byte counts are real storage bytes (alignment included); a depth counts backbone layers, 0..num_layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ModeKind = Literal["exit", "backbone", "quantized", "fixed", "lossless", "gated"]
EmbedTier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Mode:
    """How a passage goes through the layers.

    `exit` leaves the backbone when the exit signal passes tau, `backbone` never leaves, `quantized` runs the
    river from layer 0 (the static-quantization baseline), `fixed` leaves after `depth` backbone layers. In `lossless`
    and `gated` a generation drafts tokens on the river and checks blocks of them on the backbone (`policies.drafting`);
    any other passage in these modes never leaves.
    """

    kind: ModeKind
    depth: int | None = None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """A mode from its name, `fixed:D` included. Raises ValueError that says what was found and expected."""
        kind, colon, depth = text.strip().partition(":")
        if kind == "fixed" and depth.isdecimal():
            return cls("fixed", int(depth))
        if not colon and kind in ("exit", "backbone", "quantized", "lossless", "gated"):
            return cls(kind)  # type: ignore[arg-type]
        raise ValueError(
            f"unknown mode {text!r}: expected exit, backbone, quantized, lossless, gated or fixed:D (fixed:3, say)"
        )

    def __str__(self) -> str:
        return f"fixed:{self.depth}" if self.kind == "fixed" else self.kind

    @property
    def drafts(self) -> bool:
        """Does a generation draft tokens on the river and check them on the backbone?"""
        return self.kind in ("lossless", "gated")

    def backbone_layers(self, num_layers: int) -> range:
        """Depths at which a passage in this mode may need the backbone layer."""
        if self.kind == "quantized":
            return range(0)
        if self.kind == "fixed":
            return range(min(self.depth or 0, num_layers))
        return range(num_layers)

    def river_layers(self, num_layers: int, min_exit: int, resident: int = 0) -> range:
        """Depths at which a passage in this mode may need the river layer.

        Args:
            resident: backbone layers that stay on the device. A draft runs those, whose weights are there anyway, and
                the river from there on; where all of them stay, it leaves at `min_exit`, or it would be no draft.
        """
        if self.kind == "backbone":
            return range(num_layers, num_layers)
        if self.drafts:
            return range(resident if resident < num_layers else min_exit, num_layers)
        first = {"quantized": 0, "fixed": self.depth or 0, "exit": min_exit}[self.kind]
        return range(min(first, num_layers), num_layers)


@dataclass(frozen=True)
class ModelSizes:
    """What every part of a model weighs, in bytes, on the device. Input of `policies.placement.place`."""

    backbone_bytes: tuple[int, ...]
    """One entry per layer: its linears at full precision, as laid out in a slot."""
    river_bytes: tuple[int, ...]
    """One entry per layer: its linears quantized, with scales, offsets and what had to stay in full precision."""
    norm_bytes: tuple[int, ...]
    """One entry per layer: norms and the rest, which both copies share and which never leave the device."""
    embed_bytes: int
    head_bytes: int
    """0 when the head is tied to the embedding."""
    head_can_shrink: bool
    """Whether a head of its own is there that fewer bits would make smaller."""
    other_bytes: int
    """Final norm, rotary tables, other buffers."""
    kv_bytes: int
    """What the KV cache holds on the device at the planned context and batch."""
    transient_bytes: int
    """The largest working memory of one passage: activations, logits, dequantization workspace."""
    embed_away_tier: EmbedTier | None = None
    """Where the embedding can rest when it is not on the device; None when it must stay (tied to the head)."""
    embed_away_bytes: int = 0
    """Device bytes it still costs when it rests there."""
    load_bytes: int = 0
    """Beside what is placed, while the last layer is loaded: before the cache, slots and working memory are in use."""
    staging_bytes: int = 0
    """Extra device bytes that streaming needs beside its slots: buffers that files are read through."""
    kv_host_bytes: int = 0
    """What the KV cache holds off the device: main memory of a GPU, disk of a CPU."""
    states_host_bytes: int = 0
    """The states of a long prompt, where they rest off the device between the layers. 0 when they stay on it."""
    kv_room_bytes: int = 0
    """What a second room takes, into which the next layer's keys and values are brought while a layer computes; 0 where
    the cache has no use for one."""

    def __post_init__(self) -> None:
        lengths = len(self.backbone_bytes), len(self.river_bytes), len(self.norm_bytes)
        if len(set(lengths)) > 1:
            raise ValueError(
                f"backbone, river and norm sizes for {lengths} layers: expected one entry per layer in each"
            )

    @property
    def num_layers(self) -> int:
        return len(self.backbone_bytes)


@dataclass(frozen=True)
class Placement:
    """Which parts rest on which tier."""

    mode: Mode
    min_exit: int
    resident_layers: tuple[int, ...]
    streamed_layers: tuple[int, ...]
    river_layers: tuple[int, ...]
    slots: int
    slot_bytes: int
    """Size of one slot: the largest streamed layer."""
    embed_tier: EmbedTier
    budget_bytes: int
    prefill_chunk: int | None = None
    """Tokens a row that a layer reads at once; None when it reads any prompt whole."""
    terms: Mapping[str, int] = field(default_factory=dict)
    """Device bytes by category; their sum is `planned_bytes`."""
    kv_host_bytes: int = 0
    """What the KV cache holds off the device, which no term counts."""
    states_host_bytes: int = 0
    """The same of a long prompt's states between the layers; 0 when they stay on the device."""
    kv_ahead: bool = False
    """Whether the next layer's keys and values are brought in while a layer computes; the term `kv` has the room."""
    waited_bytes: int = 0
    """Of the streamed layers, less what that room hides: what placements are compared by."""

    @property
    def planned_bytes(self) -> int:
        return sum(self.terms.values())

    def draft_depth(self, num_layers: int) -> int:
        """Backbone layers of a drafted token: those on the device; if all are, those below the first river layer."""
        resident = len(self.resident_layers)
        return resident if resident < num_layers else min(self.river_layers, default=num_layers)

    @property
    def host_bytes(self) -> int:
        """What rests off the device beside layers and embedding: keys and values, the states of a prompt."""
        return self.kv_host_bytes + self.states_host_bytes

    @property
    def states_tier(self) -> str:
        """Where the states of a prompt are between the layers: "device" or "host"."""
        return "host" if self.states_host_bytes else "device"


@dataclass(frozen=True)
class Refusal:
    """Why nothing fits, and what would."""

    budget_bytes: int
    needed_bytes: int
    """The smallest budget for which `place` gives a Placement."""
    terms: Mapping[str, int]
    """Device bytes by category of that smallest placement."""
    largest_term: str
    advice: tuple[str, ...] = ()
