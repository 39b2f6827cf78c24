"""How long a token would take: the simulator on the figures of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from policies.depths import GeometricDepths
from policies.kv_choice import KvNeeds, kv_seconds
from policies.prefetch import KINDS
from policies.prefill import typical_profile
from policies.profiles import HardwareProfile, load_profile, setup_on
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
    setup = _setup(weighed, placement, held_layers, device_type, config, machine)
    kind = next(kind for kind in KINDS if kind == config.prefetch)
    steps = [Step(depth, known=placement.mode.kind != "exit") for depth in depths]
    on_miss: Literal["wait", "exit"] = "exit" if config.on_miss == "exit" else "wait"
    result = simulate(steps, setup, kind, on_miss=on_miss)
    return Speed(result.seconds / _TOKENS, machine.name, profile is None, sum(depths) / len(depths))


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
        tier="disk" if device_type == "cpu" else "host",
        tau=config.tau,
        min_exit=placement.min_exit,
    )
    streamed = {layer: sizes.backbone_bytes[layer] for layer in placement.streamed_layers}
    if device_type == "cuda":
        # The simulator knows one link: a layer on disk is one that is as many times larger as the disk is slower.
        slower = machine.link_bytes_per_s("host") / machine.link_bytes_per_s("disk")
        streamed = {i: nbytes if i in held_layers else round(nbytes * slower) for i, nbytes in streamed.items()}
    passage_s = head_seconds(sizes, machine) + _kv_seconds(sizes, config, device_type, machine)
    return replace(setup, streamed=streamed, passage_s=passage_s)


def head_seconds(sizes: ModelSizes, machine: HardwareProfile) -> float:
    """What reading the head takes a token."""
    return (sizes.head_bytes or sizes.embed_bytes) / (machine.memory_bytes_per_s * machine.backbone_read_efficiency)


def _kv_seconds(sizes: ModelSizes, config: RiverConfig, device_type: str, machine: HardwareProfile) -> float:
    """What a full cache of the kind in `config` costs a token, wherever it rests (`policies.kv_choice`)."""
    resting_bytes = sizes.kv_host_bytes or sizes.kv_bytes
    full_bytes = resting_bytes * 16 // config.kv_bits
    needs = KvNeeds(config.kv_bits, config.kv_tier, sizes.kv_bytes, sizes.kv_host_bytes, 0, full_bytes)
    return kv_seconds(needs, machine, "disk" if device_type == "cpu" else "host")
