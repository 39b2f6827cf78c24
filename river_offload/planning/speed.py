"""How long a token would take: the simulator on the figures of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from policies.course import Course, in_rounds, one_by_one
from policies.depths import GeometricDepths
from policies.drafting import TYPICAL_TOKENS_A_CHECK
from policies.kv_choice import KvNeeds, bringing_seconds, reading_seconds
from policies.prefetch import KINDS
from policies.prefill import typical_profile
from policies.profiles import HardwareProfile, LinkTier, load_profile, setup_on
from policies.simulate import Setup, simulate
from policies.types import Mode, ModelSizes, Placement
from river_offload.config import RiverConfig
from river_offload.errors import UsageError
from river_offload.planning.sizes import Weighed

PAPER_MEAN_DEPTH = 3.0
"""Backbone layers of a token on Llama-3.1-8B at tau 0.5 (River-LLM, arXiv 2604.18396)."""
_TOKENS, _ROUNDS = 128, 8
"""Replayed: of one passage each, or rounds of drafts and a check."""


@dataclass(frozen=True)
class Speed:
    """Simulated, for generated tokens; the prompt is not in it."""

    seconds: float
    profile: str
    assumed: bool
    """Nobody named the machine."""
    mean_depth: float
    """Backbone layers that are run a token, in drafts and checks, too."""
    draft: int | None
    """Tokens that are drafted before each check, which gives TYPICAL_TOKENS_A_CHECK; None where nothing is checked."""

    def as_json(self) -> dict[str, Any]:
        return {
            "simulated": self.seconds,
            "profile": self.profile,
            "profile_assumed": self.assumed,
            "mean_depth": self.mean_depth,
            "draft": self.draft,
            "tokens_per_check": None if self.draft is None else TYPICAL_TOKENS_A_CHECK,
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
    """Replay what `expected_course` says. Raises UsageError for a mean depth that cannot be, or cannot take effect."""
    machine = profile or load_profile(typical_profile(device_type))
    course = expected_course(placement.mode, config, weighed.sizes.num_layers, mean_depth)(placement)
    cache, tier = _cache(weighed.sizes, config), _tier(device_type)
    setup = _setup(weighed, placement, held_layers, device_type, config, machine)
    if not placement.kv_ahead:
        setup = replace(setup, passage_s=setup.passage_s + bringing_seconds(cache, machine, tier))
    kind = next(kind for kind in KINDS if kind == config.prefetch)
    on_miss: Literal["wait", "exit"] = "exit" if config.on_miss == "exit" else "wait"
    result = simulate(course.steps, setup, kind, on_miss=on_miss)
    passages = len(course.steps)
    passage_s = result.seconds / passages
    if placement.kv_ahead:
        weights_s = result.bytes_moved / passages / setup.link_bytes_per_s
        passage_s += bringing_seconds(cache, machine, tier, ahead=True, beside_s=passage_s, weights_s=weights_s)
    seconds = passage_s * passages / course.tokens
    return Speed(seconds, machine.name, profile is None, course.mean_depth, course.draft)


def expected_course(
    mode: Mode, config: RiverConfig, num_layers: int, mean_depth: float | None
) -> Callable[[Placement], Course]:
    """What a generation would run, as soon as it is known which layers are resident.

    Passages of the depth that the mode fixes; of depths spread around `mean_depth`, the paper's where that is None, in
    mode exit; or rounds of drafts and a check, for mode gated too, which keeps more of them.

    Raises UsageError for a mean that cannot be, or cannot take effect.
    """
    check_mean_depth(mode, mean_depth)
    if mode.kind == "gated" and config.gate == 0:  # no checks
        return lambda placement: one_by_one((placement.draft_depth(num_layers),) * _TOKENS, known=True)
    if mode.drafts:
        return lambda placement: in_rounds(_ROUNDS, placement.draft_depth(num_layers), num_layers)
    if mode.kind != "exit":
        depth = len(mode.backbone_layers(num_layers))
        return lambda _: one_by_one((depth,) * _TOKENS, known=True)
    depths = _exits(config.min_exit, num_layers, mean_depth)
    return lambda _: one_by_one(depths, known=False)


def check_mean_depth(mode: Mode, mean_depth: float | None) -> None:
    """Raises UsageError for a mean depth that cannot take effect."""
    if mode.kind != "exit" and mean_depth is not None:
        raise UsageError(f"mean_depth has no effect in mode {mode}: leave it out, or plan for mode exit")


def _exits(min_exit: int, num_layers: int, mean_depth: float | None) -> Sequence[int]:
    """Depths of tokens in mode exit, spread as a river's are."""
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
