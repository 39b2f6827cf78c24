"""Bytes and a budget in, a Placement out, or a Refusal that names what to change.

Every way to place the model is one candidate, and candidates come in order of preference: the first that fits is the
placement. When none fits, the cheapest of the same candidates is what the refusal quotes, so the quoted budget is
exact by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from policies.types import EmbedTier, Mode, ModelSizes, Placement, Refusal

DEVICE_PER_LINK = 20
"""How many times faster device memory is than the link, about: a GPU's against PCIe, main memory against a disk."""


def place(
    sizes: ModelSizes,
    *,
    mode: Mode,
    min_exit: int,
    budget_bytes: int,
    also_modes: Sequence[Mode] = (),
    slots: int = 2,
    prefill_chunk: int | None = None,
) -> Placement | Refusal:
    """Decide what rests on the device within `budget_bytes`.

    River, norms, embedding, head, KV and working memory are there in any case; then as many shallow backbone layers as
    fit, the deeper ones streamed through at most `slots` slots. An embedding that can rest elsewhere makes room for
    layers: a token looks up one of its rows, but needs every byte of a layer. Parts are kept for `mode` and for every
    mode of `also_modes`.

    Where keys and values rest off the device, a second room lets the next layer's come in while a layer computes. It is
    there where it costs no resident layer, and where what must be streamed in its place is less than what it hides
    (`_hidden_bytes`): the longer the context, the more that is.

    A larger budget never gives a worse placement: first in the bytes that are streamed, less those that the room hides;
    among placements with a room, or without one, in the number of resident layers, then in whether the embedding is on
    the device. Raises ValueError when `slots` is less than 1.

    Args:
        prefill_chunk: what the sizes were measured with.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}: a streamed layer needs at least 1")
    candidates = list(_candidates(sizes, (mode, *also_modes), min_exit, budget_bytes, slots))
    fitting = [candidate for candidate in candidates if candidate.planned_bytes <= budget_bytes]
    if fitting:
        best = _with_or_without_a_room(fitting)
        return replace(best, prefill_chunk=prefill_chunk)
    smallest = _cheapest(candidates)
    return Refusal(
        budget_bytes=budget_bytes,
        needed_bytes=smallest.planned_bytes,
        terms=smallest.terms,
        largest_term=max(smallest.terms, key=smallest.terms.__getitem__),
        advice=(*_cheaper_parts(smallest, sizes), *_cheaper_modes(smallest, sizes, slots)),
    )


def smallest(sizes: ModelSizes, *, mode: Mode, min_exit: int, resident_layers: int = 0, slots: int = 1) -> Placement:
    """The placement that needs least of all those with that many resident layers; its budget is what it needs.

    Raises ValueError when the mode has fewer backbone layers than that.
    """
    candidates = [
        candidate
        for candidate in _candidates(sizes, (mode,), min_exit, 0, slots)
        if len(candidate.resident_layers) == resident_layers
    ]
    if not candidates:
        raise ValueError(f"{resident_layers} resident layers: mode {mode} has fewer of {sizes.num_layers}")
    found = _cheapest(candidates)
    return replace(found, budget_bytes=found.planned_bytes)


def _candidates(
    sizes: ModelSizes, modes: Sequence[Mode], min_exit: int, budget_bytes: int, slots: int
) -> Iterator[Placement]:
    """Every placement of the parts that `modes` need, the best first."""
    # Each mode takes its backbone layers from the shallow end and its river layers from the deep end, so the longest
    # range of each kind holds all the others.
    backbone = max((mode.backbone_layers(sizes.num_layers) for mode in modes), key=len)
    tiers: list[EmbedTier] = ["device"]
    if sizes.embed_away_tier is not None:
        tiers.append(sizes.embed_away_tier)
    rooms = (True, False) if sizes.kv_room_bytes else (False,)
    for ahead, resident_count in itertools.product(rooms, range(len(backbone), -1, -1)):
        kv_bytes = sizes.kv_bytes + ahead * sizes.kv_room_bytes
        river = max((mode.river_layers(sizes.num_layers, min_exit, resident_count) for mode in modes), key=len)
        needed = sorted({*backbone, *river})
        for embed_tier in tiers:
            streamed = backbone[resident_count:]
            slot_count = min(slots, len(streamed))
            slot_bytes = max((sizes.backbone_bytes[layer] for layer in streamed), default=0)
            yield Placement(
                mode=modes[0],
                min_exit=min_exit,
                resident_layers=tuple(backbone[:resident_count]),
                streamed_layers=tuple(streamed),
                river_layers=tuple(river),
                slots=slot_count,
                slot_bytes=slot_bytes,
                embed_tier=embed_tier,
                budget_bytes=budget_bytes,
                kv_host_bytes=sizes.kv_host_bytes,
                states_host_bytes=sizes.states_host_bytes,
                kv_ahead=ahead,
                waited_bytes=sum(sizes.backbone_bytes[layer] for layer in streamed) - ahead * _hidden_bytes(sizes),
                terms={
                    "backbone": sum(sizes.backbone_bytes[:resident_count]),
                    "slots": slot_count * slot_bytes,
                    "staging": sizes.staging_bytes if streamed else 0,
                    "river": sum(sizes.river_bytes[layer] for layer in river),
                    # Both copies of a layer share them, so they stay while the weights come and go.
                    "norms": sum(sizes.norm_bytes[layer] for layer in needed),
                    "embedding": sizes.embed_bytes if embed_tier == "device" else sizes.embed_away_bytes,
                    "head": sizes.head_bytes,
                    "other": sizes.other_bytes,
                    "kv": kv_bytes,
                    "transient": sizes.transient_bytes,
                    "loading": max(0, sizes.load_bytes - kv_bytes - sizes.transient_bytes) if river else 0,
                },
            )


def _with_or_without_a_room(fitting: Sequence[Placement]) -> Placement:
    """The first with a second room or the first without, whichever leaves less to wait for."""
    with_room, without = (next((one for one in fitting if one.kv_ahead == ahead), None) for ahead in (True, False))
    if with_room is None or without is None:
        return with_room or fitting[0]
    return with_room if with_room.waited_bytes <= without.waited_bytes else without


def _hidden_bytes(sizes: ModelSizes) -> int:
    """What the link brings in while a token with a full cache computes, at least: what the second room hides.

    Counted low: of each layer the smaller copy, the cache as it rests, read once and written once.
    """
    read_bytes = sum(map(min, sizes.backbone_bytes, sizes.river_bytes)) + 2 * sizes.kv_host_bytes
    return min(read_bytes // DEVICE_PER_LINK, sizes.kv_host_bytes)


def _cheapest(candidates: Sequence[Placement]) -> Placement:
    return min(candidates, key=lambda candidate: candidate.planned_bytes)


def _cheaper_parts(smallest: Placement, sizes: ModelSizes) -> list[str]:
    """What would shrink the parts of the smallest placement, the largest part first."""
    remedies = {
        "kv": "a smaller context or batch",
        "transient": "a smaller context or batch",
        "river": "fewer bits for the river",
    }
    if sizes.head_can_shrink:
        remedies["head"] = "the head on 8 bits"
    if smallest.slots > 1:
        remedies["slots"] = "a single slot, which gives up reading ahead"
    shares: dict[str, int] = {}
    for name, remedy in remedies.items():
        shares[remedy] = shares.get(remedy, 0) + smallest.terms[name]
    return [
        f"{remedy} ({_percent(size_bytes, smallest)} of the need)"
        for remedy, size_bytes in sorted(shares.items(), key=lambda share: share[1], reverse=True)
        if size_bytes > 0.01 * smallest.planned_bytes
    ]


def _cheaper_modes(smallest: Placement, sizes: ModelSizes, slots: int) -> list[str]:
    """The modes that keep less than `smallest` does and so fit, when they are the only ones asked for."""
    reasons = {"backbone": "keeps no river", "quantized": "keeps no backbone layer"}
    advice = []
    for name, reason in reasons.items():
        alone = (Mode.parse(name),)
        other = _cheapest(list(_candidates(sizes, alone, smallest.min_exit, smallest.budget_bytes, slots)))
        if other.planned_bytes <= smallest.budget_bytes:
            advice.append(f"mode {name} alone, which {reason} and fits")
    return advice


def _percent(size_bytes: int, of: Placement) -> str:
    return f"{100 * size_bytes / of.planned_bytes:.0f} %"
