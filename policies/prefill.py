"""How a prompt is read: in which chunks, and in mode exit whether it may leave the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from policies.profiles import HardwareProfile
from policies.types import Placement, Refusal

FULL_SPEED_TOKENS = 512
"""A chunk of so many tokens keeps a device busy: what one layer computes with them takes longer than reading its
weights, on CPUs and GPUs alike. Longer chunks gain little more."""
_WHOLE_TOKENS = 4096
"""The longest context whose prompts are read whole where there is room: beyond it a chunk of 2048 is no slower."""
_LONGER = (2048, 1024)
_NARROW = (256, 128, 64)


Place = Callable[[int | None, bool], Placement | Refusal]
"""(chunk, do the states of a prompt rest on the host between the layers?) -> the placement, or why there is none."""


def place_with_chunk(place: Place, context: int, states_bytes: int, chunk: int | None = None) -> Placement | Refusal:
    """Choose how many tokens of a prompt a layer reads at once, None for all of them, and where their states rest.

    Each look at a placement is a dry run, so those that cannot be the answer are left out.

    A resident layer is worth more than a longer chunk: it saves its bytes for every token, while beyond
    `FULL_SPEED_TOKENS` a chunk saves next to nothing. So that length says how many layers can rest on the device, and
    the longest chunk that costs none of them is taken. Shorter ones, which slow a prompt down, come only where nothing
    else fits. States on the host cost a prompt two copies a layer, and nothing afterwards: they go there as soon as
    that makes room for a layer, or for anything at all.

    Args:
        context: the longest prompt in tokens.
        states_bytes: of its states.
        chunk: the length, where it is given and only the states are to be decided on.
    """
    best = _on_the_device(place, context) if chunk is None else place(chunk, False)
    if isinstance(best, Placement):
        quick = chunk or FULL_SPEED_TOKENS
        if quick >= context or not _would_gain(best, states_bytes, quick):
            return best
        resting = place(quick, True)
        return resting if isinstance(resting, Placement) and _worth(resting) > _worth(best) else best
    refused = [best]
    # Where there is too much of the rest, no chunk is a remedy, and the narrowest says what would be the least.
    hopeless = best.needed_bytes - best.terms["transient"] > best.budget_bytes
    narrow = (chunk,) if chunk else _NARROW[-1:] if hopeless else (FULL_SPEED_TOKENS, *_NARROW)
    for length in (length for length in narrow if length < context):
        resting = place(length, True)
        if isinstance(resting, Placement):
            return resting
        refused.append(resting)
    return min(refused, key=lambda refusal: refusal.needed_bytes)


def _on_the_device(place: Place, context: int) -> Placement | Refusal:
    """The longest chunk that costs no layer, the states on the device."""
    whole = place(None, False) if context <= _WHOLE_TOKENS else None
    if isinstance(whole, Placement) and _lacks_nothing(whole):
        return whole
    quick = whole if whole is not None and context <= FULL_SPEED_TOKENS else place(FULL_SPEED_TOKENS, False)
    if isinstance(quick, Refusal):
        return min((one for one in (whole, quick) if isinstance(one, Refusal)), key=lambda one: one.needed_bytes)
    if isinstance(whole, Placement) and _worth(whole) >= _worth(quick):
        return whole
    longer = (place(chunk, False) for chunk in _LONGER if chunk < context and _has_room(quick, chunk))
    fitting = (one for one in longer if isinstance(one, Placement))
    return next((one for one in fitting if _worth(one) >= _worth(quick)), quick)


def _would_gain(placement: Placement, states_bytes: int, chunk: int) -> bool:
    """Could another layer rest on the device, or a room for the cache be there, if the states of a prompt were not?

    They rest off it with this `chunk`, and one that is shorter than that of `placement` takes less besides: at most all
    of the working memory.
    """
    freed_bytes = states_bytes if placement.prefill_chunk == chunk else placement.terms.get("transient", 0)
    room_bytes = placement.budget_bytes - placement.planned_bytes + freed_bytes
    waits = placement.kv_host_bytes > 0 and not placement.kv_ahead
    return waits or (bool(placement.streamed_layers) and room_bytes >= _least_room(placement))


def _least_room(placement: Placement) -> int:
    """What another resident layer takes at least. It may need no river layer; with the last of them the slots go."""
    terms, streamed = placement.terms, len(placement.streamed_layers)
    layer_bytes = placement.slot_bytes - terms.get("river", 0) // max(len(placement.river_layers), 1)
    return min(layer_bytes, streamed * layer_bytes - terms.get("slots", 0) - terms.get("staging", 0))


def _has_room(quick: Placement, chunk: int) -> bool:
    """Could a longer chunk fit beside the layers of `quick`? Working memory grows with it, if not quite in step."""
    growth = quick.terms.get("transient", 0) * (chunk / FULL_SPEED_TOKENS - 1)
    return quick.budget_bytes - quick.planned_bytes >= growth / 4


def _worth(placement: Placement) -> tuple[int, bool, int, bool]:
    """Above all the less to wait for, as in `policies.placement`: a room for the cache hides some of it."""
    resident = len(placement.resident_layers)
    return -placement.waited_bytes, placement.kv_ahead, resident, placement.embed_tier == "device"


def _lacks_nothing(placement: Placement) -> bool:
    """Would more memory leave it as it is?"""
    waits = placement.kv_host_bytes > 0 and not placement.kv_ahead
    return not placement.streamed_layers and placement.embed_tier == "device" and not waits


PrefillPolicy = Literal["auto", "exit", "backbone"]
POLICIES: tuple[PrefillPolicy, ...] = ("auto", "exit", "backbone")


@dataclass(frozen=True)
class PrefillRule:
    """Whether a prompt of mode exit may leave the backbone. Streamed layers are fetched once for all of its tokens, so
    for a long one the whole backbone costs little more than the computation."""

    policy: PrefillPolicy = "exit"
    backbone_from_tokens: int = 0
    """What `auto` goes by: prompts of so many tokens, all rows together, and more run the whole backbone."""

    def on_backbone(self, tokens: int) -> bool:
        """Does a prompt of `tokens`, all rows together, run the whole backbone?"""
        return self.policy == "backbone" or (self.policy == "auto" and tokens >= self.backbone_from_tokens)


def backbone_from_tokens(streamed_bytes: int, weights: int, profile: HardwareProfile) -> int:
    """The shortest prompt whose computation takes as long as its streamed layers do on the link: from there on the
    link is the faster half, and the backbone's layers come in behind the computation.

    Args:
        streamed_bytes: of all streamed layers.
        weights: of all backbone layers, streamed or not: two operations each for every token.
        profile: a machine like the one that runs.
    """
    if not streamed_bytes:
        return 0
    link_s = streamed_bytes / profile.link_bytes_per_s("host" if profile.pinned_bytes_per_s else "disk")
    return math.ceil(link_s * profile.compute_flops / (2 * weights))


def typical_profile(device_type: str) -> str:
    """The profile that stands for a machine nobody has measured: "cpu" or "cuda"."""
    return {"cpu": "cpu-cloud-2core", "cuda": "rtx-4060-8gb"}[device_type]
