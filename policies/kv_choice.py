"""Keys and values against resident layers: what each kind of cache leaves room for, and what a token then costs.

Fewer bits, or a cache that rests off the device, make room for backbone layers that need not be streamed; in exchange a
token has to convert the cache, or bring it in over the link that layers come over, too: beside the computation where
there is a second room for that, else while it stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from policies.course import Course
from policies.placement import place
from policies.prefetch import Kind
from policies.profiles import HardwareProfile, LinkTier, setup_on
from policies.simulate import simulate
from policies.types import Mode, ModelSizes, Placement, Refusal


@dataclass(frozen=True)
class KvNeeds:
    """What one kind of cache takes, full. Bytes."""

    bits: int
    tier: str
    """"device" or "host"."""
    kv_bytes: int
    """On the device, workspace included."""
    kv_host_bytes: int
    transient_bytes: int
    """Working memory of the largest passage with this kind."""
    full_bytes: int
    """All keys and values at full precision: what attention reads for each token."""
    room_bytes: int = 0
    """A second room, for the next layer's keys and values while a layer computes (`ModelSizes.kv_room_bytes`)."""


@dataclass(frozen=True)
class KvAlternative:
    """One kind of cache under the budget."""

    needs: KvNeeds
    placement: Placement | Refusal
    layers_s: float | None
    """Seconds a token spends in the layers and waiting for them; None where nothing fits."""
    kv_s: float | None
    """Seconds a token needs on top to read the cache full, to convert it, and to bring in what is not hidden."""

    @property
    def seconds_per_token(self) -> float | None:
        """With a full cache; None where nothing fits."""
        return None if self.layers_s is None or self.kv_s is None else self.layers_s + self.kv_s


def weigh_kinds(
    sizes: ModelSizes,
    kinds: Iterable[KvNeeds],
    profile: HardwareProfile,
    course: Callable[[Placement], Course],
    *,
    mode: Mode,
    min_exit: int,
    budget_bytes: int,
    also_modes: Sequence[Mode] = (),
    slots: int = 2,
    tier: LinkTier = "host",
    prefetch: Kind = "next",
    tau: float = 0.5,
    outside_s: float = 0.0,
) -> list[KvAlternative]:
    """Each kind placed within the budget and timed, the fastest first; what does not fit comes last.

    Args:
        sizes: of the model; its KV and transient bytes are replaced by those of each kind.
        course: passages to replay, decoding alone, of a model that is placed like that.
        tier: where streamed layers rest; the cache of tier "host" comes from there at the same rate.
        outside_s: seconds a passage takes outside the layers, whatever the cache.
    """
    found = []
    for needs in kinds:
        of_kind = replace(
            sizes,
            kv_bytes=needs.kv_bytes,
            kv_host_bytes=needs.kv_host_bytes,
            transient_bytes=needs.transient_bytes,
            kv_room_bytes=needs.room_bytes,
        )
        placement = place(
            of_kind, mode=mode, also_modes=also_modes, min_exit=min_exit, budget_bytes=budget_bytes, slots=slots
        )
        if isinstance(placement, Refusal):
            found.append(KvAlternative(needs, placement, None, None))
            continue
        setup = setup_on(
            profile,
            num_layers=sizes.num_layers,
            layer_bytes=max(sizes.backbone_bytes),
            river_bytes=max(sizes.river_bytes),
            resident=sizes.num_layers - len(placement.streamed_layers),
            slots=slots,
            tier=tier,
            tau=tau,
            min_exit=min_exit,
        )
        setup = replace(setup, passage_s=outside_s)
        expected = course(placement)
        result, passages = simulate(expected.steps, setup, prefetch), len(expected.steps)
        layers_s, weights_s = result.seconds / passages, result.bytes_moved / passages / setup.link_bytes_per_s
        kv_s = reading_seconds(needs, profile)
        kv_s += bringing_seconds(
            needs, profile, tier, ahead=placement.kv_ahead, beside_s=layers_s + kv_s, weights_s=weights_s
        )
        share = passages / expected.tokens
        found.append(KvAlternative(needs, placement, share * layers_s, share * kv_s))
    return sorted(found, key=_cost)


def reading_seconds(needs: KvNeeds, profile: HardwareProfile) -> float:
    """What a passage pays on the device for a full cache, whatever the layers cost.

    Attention reads keys and values at full precision once. Those at rest are besides written, at full precision, to
    where attention reads them; those that rest in few bits on the device are read there.
    """
    seconds = needs.full_bytes / profile.memory_bytes_per_s
    if needs.tier == "device" and needs.bits < 16:
        seconds += needs.full_bytes * needs.bits / 16 / profile.memory_bytes_per_s
    if needs.tier == "host" or needs.bits < 16:
        seconds += needs.full_bytes / profile.memory_bytes_per_s
    return seconds


def bringing_seconds(
    needs: KvNeeds,
    profile: HardwareProfile,
    tier: LinkTier = "host",
    *,
    ahead: bool = False,
    beside_s: float = 0.0,
    weights_s: float = 0.0,
) -> float:
    """How long a passage waits, on top of all else, for a full cache to come over the link; 0 on the device.

    With a second room (`ahead`) that is what the link takes longer for weights and cache than the passage takes without
    it, and one layer's share, which nothing runs beside: the first layer brings in its own. That is the least it can
    be: it counts on a link that never stands still.

    Args:
        beside_s: seconds of a passage without it, waits for weights included; of several kinds of passage the mean.
        weights_s: seconds of link for the weights of a passage.
    """
    if needs.tier != "host":
        return 0.0
    link_s = needs.kv_host_bytes / profile.link_bytes_per_s(tier)
    if not ahead:
        return link_s
    first_s = link_s * needs.room_bytes / needs.full_bytes if needs.full_bytes else 0.0
    return first_s + max(weights_s + link_s - first_s - beside_s, 0.0)


def _cost(alternative: KvAlternative) -> tuple[bool, float, int]:
    """Fast ones first; of equal ones that with more bits, which is nearer to the model."""
    seconds = alternative.seconds_per_token
    return seconds is None, seconds or 0.0, -alternative.needs.bits
