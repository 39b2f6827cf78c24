"""Keys and values against resident layers: what each kind of cache leaves room for, and what a token then costs.

Fewer bits, or a cache that rests off the device, make room for backbone layers that need not be streamed; in exchange a
token has to convert the cache, or bring it in over the link that layers come over, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from policies.placement import place
from policies.prefetch import Kind
from policies.profiles import HardwareProfile, LinkTier, setup_on
from policies.simulate import Step, simulate
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


@dataclass(frozen=True)
class KvAlternative:
    """One kind of cache under the budget."""

    needs: KvNeeds
    placement: Placement | Refusal
    layers_s: float | None
    """Seconds a token spends in the layers and waiting for them; None where nothing fits."""
    kv_s: float | None
    """Seconds a token needs on top to read the cache full, to convert it and to bring it in."""

    @property
    def seconds_per_token(self) -> float | None:
        """With a full cache; None where nothing fits."""
        return None if self.layers_s is None or self.kv_s is None else self.layers_s + self.kv_s


def weigh_kinds(
    sizes: ModelSizes,
    kinds: Iterable[KvNeeds],
    profile: HardwareProfile,
    steps: Sequence[Step],
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
        steps: passages to replay (`simulate.steps_of` a trace, or depths as expected), decoding alone.
        tier: where streamed layers rest; the cache of tier "host" comes from there at the same rate.
        outside_s: seconds a token takes outside the layers, whatever the cache.
    """
    found = []
    for needs in kinds:
        of_kind = replace(
            sizes,
            kv_bytes=needs.kv_bytes,
            kv_host_bytes=needs.kv_host_bytes,
            transient_bytes=needs.transient_bytes,
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
        layers_s = simulate(steps, setup, prefetch).seconds / max(len(steps), 1)
        found.append(KvAlternative(needs, placement, layers_s, kv_seconds(needs, profile, tier)))
    return sorted(found, key=_cost)


def kv_seconds(needs: KvNeeds, profile: HardwareProfile, tier: LinkTier = "host") -> float:
    """What a token pays for a full cache, whatever the layers cost; nothing of it is overlapped, as in the first cache
    of tier "host".

    Attention reads keys and values at full precision once. A cache at rest is read besides and written, at full
    precision, to where attention reads it: from device memory, or over the link.
    """
    rate = profile.memory_bytes_per_s
    seconds = needs.full_bytes / rate
    if needs.tier == "host":
        seconds += needs.kv_host_bytes / profile.link_bytes_per_s(tier)
    elif needs.bits < 16:
        seconds += needs.full_bytes * needs.bits / 16 / rate
    if needs.tier == "host" or needs.bits < 16:
        seconds += needs.full_bytes / rate
    return seconds


def _cost(alternative: KvAlternative) -> tuple[bool, float, int]:
    """Fast ones first; of equal ones that with more bits, which is nearer to the model."""
    seconds = alternative.seconds_per_token
    return seconds is None, seconds or 0.0, -alternative.needs.bits
