"""How long a token would take: the simulator on the figures of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from policies.depths import GeometricDepths
from policies.kv_choice import KvNeeds, bringing_seconds, reading_seconds
from policies.prefetch import KINDS
from policies.prefill import typical_profile
from policies.profiles import HardwareProfile, LinkTier, load_profile, setup_on
from policies.simulate import Setup, Step, simulate
from policies.types import Mode, ModelSizes, Placement
from river_offload.config import RiverConfig
from river_offload.errors import UsageError
from river_offload.planning.sizes import Weighed

PAPER_MEAN_DEPTH = 3.0
"""Backbone layers of a token on Llama-3.1-8B at tau 0.5 (River-LLM, arXiv 2604.18396)."""
_TOKENS = 128


@dataclass(frozen=True)
class Speed:
    """Simulated, for generated tokens; the prompt is not in it."""

    seconds: float
    profile: str
    assumed: bool
    """Nobody named the machine."""
    mean_depth: float

    def as_json(self) -> dict[str, Any]:
        return {
            "simulated": self.seconds,
            "profile": self.profile,
            "profile_assumed": self.assumed,
            "mean_depth": self.mean_depth,
        }


def estimate_speed(
    weighed: Weighed,
    placement: Placement,
    held_layers: Sequence[int],
    device_type: str,
    config: RiverConfig,
    profile: HardwareProfile | None,
    mean_depth: float | None,
) -> Speed:
    """Replay tokens whose depths are spread as a river's are. Raises UsageError for a mean that cannot be."""
    machine = profile or load_profile(typical_profile(device_type))
    depths = expected_depths(placement.mode, placement.min_exit, weighed.sizes.num_layers, mean_depth)
    cache, tier = _cache(weighed.sizes, config), _tier(device_type)
    setup = _setup(weighed, placement, held_layers, device_type, config, machine)
    if not placement.kv_ahead:
        setup = replace(setup, passage_s=setup.passage_s + bringing_seconds(cache, machine, tier))
    kind = next(kind for kind in KINDS if kind == config.prefetch)
    steps = [Step(depth, known=placement.mode.kind != "exit") for depth in depths]
    on_miss: Literal["wait", "exit"] = "exit" if config.on_miss == "exit" else "wait"
    result = simulate(steps, setup, kind, on_miss=on_miss)
    seconds = result.seconds / _TOKENS
    if placement.kv_ahead:
        weights_s = result.bytes_moved / _TOKENS / setup.link_bytes_per_s
        seconds += bringing_seconds(cache, machine, tier, ahead=True, beside_s=seconds, weights_s=weights_s)
    return Speed(seconds, machine.name, profile is None, sum(depths) / len(depths))


def expected_depths(mode: Mode, min_exit: int, num_layers: int, mean_depth: float | None) -> Sequence[int]:
    """Depths of generated tokens: what the mode fixes, or spread around `mean_depth`, the paper's where that is None.

    Raises UsageError for a mean that cannot be, or cannot take effect.
    """
    if mode.drafts and mean_depth is not None:
        raise UsageError(f"mean_depth has no effect in mode {mode}: drafting is not simulated, only its checks are")
    if mode.kind != "exit":
        if mean_depth is not None:
            raise UsageError(f"mean_depth has no effect in mode {mode}, which fixes the depth of every token")
        return (len(mode.backbone_layers(num_layers)),) * _TOKENS
    if mean_depth is None:
        mean_depth = min(max(PAPER_MEAN_DEPTH, min_exit), num_layers)
    try:
        return GeometricDepths(mean_depth).draw(_TOKENS, num_layers, lowest=min_exit)
    except ValueError as error:
        raise UsageError(f"mean_depth: {error}") from error


def _setup(
    weighed: Weighed,
    placement: Placement,
    held_layers: Sequence[int],
    device_type: str,
    config: RiverConfig,
    machine: HardwareProfile,
) -> Setup:
    sizes = weighed.sizes
    setup = setup_on(
        machine,
        num_layers=sizes.num_layers,
        layer_bytes=max(sizes.backbone_bytes),
        river_bytes=max(sizes.river_bytes),
        resident=len(placement.resident_layers) if placement.streamed_layers else sizes.num_layers,
        slots=placement.slots,
        tier=_tier(device_type),
        tau=config.tau,
        min_exit=placement.min_exit,
    )
    streamed = {layer: sizes.backbone_bytes[layer] for layer in placement.streamed_layers}
    if device_type == "cuda":
        # The simulator knows one link: a layer on disk is one that is as many times larger as the disk is slower.
        slower = machine.link_bytes_per_s("host") / machine.link_bytes_per_s("disk")
        streamed = {i: nbytes if i in held_layers else round(nbytes * slower) for i, nbytes in streamed.items()}
    passage_s = head_seconds(sizes, machine) + reading_seconds(_cache(sizes, config), machine)
    return replace(setup, streamed=streamed, passage_s=passage_s)


def _tier(device_type: str) -> LinkTier:
    """Where streamed layers, and a cache of tier "host", come from."""
    return "disk" if device_type == "cpu" else "host"


def head_seconds(sizes: ModelSizes, machine: HardwareProfile) -> float:
    """What reading the head takes a token."""
    return (sizes.head_bytes or sizes.embed_bytes) / (machine.memory_bytes_per_s * machine.backbone_read_efficiency)


def _cache(sizes: ModelSizes, config: RiverConfig) -> KvNeeds:
    """The kind in `config`, with what it takes full."""
    full_bytes = (sizes.kv_host_bytes or sizes.kv_bytes) * 16 // config.kv_bits
    return KvNeeds(
        config.kv_bits, config.kv_tier, sizes.kv_bytes, sizes.kv_host_bytes, 0, full_bytes, sizes.kv_room_bytes
    )
