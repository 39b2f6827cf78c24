"""How a prompt is read: in which chunks, and in mode exit whether it may leave the backbone."""

from __future__ import annotations

from collections.abc import Callable

from policies.types import Placement, Refusal

FULL_SPEED_TOKENS = 512
"""A chunk of so many tokens keeps a device busy: what one layer computes with them takes longer than reading its
weights, on CPUs and GPUs alike. Longer chunks gain little more."""
_WIDE: tuple[int | None, ...] = (None, 2048, 1024, FULL_SPEED_TOKENS)
_NARROW = (256, 128, 64)


def place_with_chunk(place: Callable[[int | None], Placement | Refusal], context: int) -> Placement | Refusal:
    """Choose how many tokens of a prompt a layer reads at once, None for all of them.

    A resident layer is worth more than a longer chunk: it saves its bytes for every token, while beyond
    `FULL_SPEED_TOKENS` a chunk saves next to nothing. So that length says how many layers can rest on the device, and
    the longest chunk that costs none of them is taken. Shorter ones, which slow a prompt down, come only where nothing
    else fits.

    Args:
        place: the placement for a chunk, or why there is none.
        context: the longest prompt in tokens.
    """
    wide = [chunk for chunk in _WIDE if chunk is None or chunk < context]
    tried = [place(wide[0])]
    if isinstance(tried[0], Placement) and not tried[0].streamed_layers and tried[0].embed_tier == "device":
        return tried[0]
    tried += [place(chunk) for chunk in wide[1:]]
    fitting = [one for one in tried if isinstance(one, Placement)]
    if fitting:
        return max(fitting, key=_worth)  # the first of equals is that of the longest chunk
    for chunk in (chunk for chunk in _NARROW if chunk < context):
        tried.append(place(chunk))
        if isinstance(tried[-1], Placement):
            return tried[-1]
    return min((one for one in tried if isinstance(one, Refusal)), key=lambda refusal: refusal.needed_bytes)


def _worth(placement: Placement) -> tuple[int, bool]:
    return len(placement.resident_layers), placement.embed_tier == "device"
