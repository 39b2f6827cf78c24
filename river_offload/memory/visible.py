"""Which cards CUDA_VISIBLE_DEVICES leaves, in CUDA's order: for where torch, which asks CUDA itself, cannot say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from river_offload.memory.nvml import Card

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_BY_BUS = "PCI_BUS_ID"


@dataclass(frozen=True, slots=True)
class Visible:
    """UUIDs of the cards or MIG instances that CUDA numbers 0, 1, ..., and what is to be said about the list."""

    uuids: tuple[str, ...]
    remark: str | None = None


def visible(cards: Sequence[Card], setting: str | None, order: str | None = None) -> Visible:
    """What the environment leaves of `cards`.

    Args:
        setting: the value of CUDA_VISIBLE_DEVICES, None when it is not set. Numbers or UUIDs, by commas; a UUID may be
            cut short as long as it is unique. CUDA drops what follows the first entry that it cannot use, and
            everything when one is there twice.
        order: the value of CUDA_DEVICE_ORDER.
    """
    if setting is None:
        return Visible(tuple(_first_part(card) for card in cards), _order_remark(cards, order))
    if not setting.strip():
        return Visible((), f"{VARIABLE} is empty, which hides every GPU: unset it to use them")
    entries = [entry.strip() for entry in setting.split(",")]
    named = entries[0].startswith(("GPU-", "MIG-"))
    found: list[str] = []
    for entry in entries:
        uuid = _by_uuid(cards, entry) if named else _by_number(cards, entry)
        if uuid is None:
            return Visible(tuple(found), _stop_remark(cards, setting, entry))
        if uuid in found:
            return Visible((), f"{VARIABLE}={setting} names {uuid} twice, for which CUDA hides every GPU")
        found.append(uuid)
    return Visible(tuple(found), None if named else _order_remark(cards, order))


def _by_number(cards: Sequence[Card], entry: str) -> str | None:
    # CUDA reads a number as far as it goes: "1gpu" is 1.
    number = re.match(r"\+?\d+", entry)
    if number is None or int(number[0]) >= len(cards):
        return None
    return _first_part(cards[int(number[0])])


def _by_uuid(cards: Sequence[Card], entry: str) -> str | None:
    if entry.startswith("MIG-"):
        known = [uuid for card in cards for uuid in card.instances]
    elif entry.startswith("GPU-"):
        known = [card.uuid for card in cards]
    else:
        return None
    found = [uuid for uuid in known if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _first_part(card: Card) -> str:
    """A card that is cut into MIG instances computes on one only: the first, unless another is named."""
    return card.instances[0] if card.instances else card.uuid


def _order_remark(cards: Sequence[Card], order: str | None) -> str | None:
    """CUDA numbers the fastest card first unless told otherwise; NVML, and this list, by the PCI bus."""
    if order == _BY_BUS or len({card.name for card in cards}) < 2:
        return None
    return f"CUDA may number these unlike cards otherwise: set {ORDER}={_BY_BUS}, or name cards by UUID"


def _stop_remark(cards: Sequence[Card], setting: str, entry: str) -> str:
    there = ", ".join(f"{card.index} {card.uuid}" for card in cards) or "none"
    return f"{VARIABLE}={setting}: CUDA stops at {entry!r}, which is no GPU of this machine. There are: {there}"
