"""A model's memory before anything of it is loaded: `plan_memory` runs it on fake tensors and places it.

It asks what `load` asks, of the same code; only where the facts of the model come from differs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from policies.kv_choice import KvAlternative, weigh_kinds
from policies.profiles import HardwareProfile
from policies.types import Mode, Placement, Refusal
from river_offload.config import RiverConfig, check_mode, format_size
from river_offload.errors import UsageError
from river_offload.memory.probes import MARGIN_SHARE, free_device_bytes
from river_offload.planning.constants import device_constants
from river_offload.planning.dry_run import Needs
from river_offload.planning.kv_kinds import kv_needs
from river_offload.planning.model_facts import ModelFacts, find_model
from river_offload.planning.remedies import Remedies, find_remedies
from river_offload.planning.sizes import Weighed, weigh, weigh_within
from river_offload.planning.speed import Speed, check_mean_depth, estimate_speed, expected_course, head_seconds
from river_offload.progress import Progress, Silent
from river_offload.quant.kernels import ordered
from river_offload.quant.kernels.dense import Blocks
from river_offload.quant.precision import Precision
from river_offload.store.ring import RING_BYTES, layers_to_hold

SCHEMA = 1


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of main memory beside a GPU; on a CPU, where the device is main memory, only what is mapped from files."""

    pinned_bytes: int
    """Layers that wait for their turn, the ring that those on disk come through, keys and values of tier host. Pinned
    to the byte."""
    pageable_bytes: int
    """The states of a long prompt that rest off the device between the layers."""
    file_backed_bytes: int
    """An embedding that rests off the device is mapped from its file, and so, on a CPU, are keys and values of tier
    host and such states: the kernel keeps what is in use."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a model needs and where it would rest. All sizes are bytes on the device unless they say otherwise."""

    facts: ModelFacts
    weighed: Weighed
    placement: Placement
    """Within the budget, or the smallest one there is."""
    budget_bytes: int
    budget_source: str
    device_type: str
    categories: dict[str, int]
    held_layers: tuple[int, ...]
    """Streamed layers that wait in host memory; the others wait on disk."""
    host: HostNeeds
    disk_bytes: int
    """The checkpoint and the river's cache."""
    speed: Speed
    constants: dict[str, int]
    remedies: Remedies | None
    """None when it fits."""
    kv_alternatives: tuple[KvAlternative, ...] | None
    """Every kind of KV cache against resident layers, the fastest first; None where no machine was named to time it."""

    @property
    def fits(self) -> bool:
        return self.remedies is None

    @property
    def peak_device_bytes(self) -> int:
        return sum(self.categories.values())

    @property
    def load_peak_bytes(self) -> int:
        """The most that loading holds: what rests there, and what building the last layer of the river takes."""
        terms = self.placement.terms
        resting = sum(terms.values()) - terms["kv"] - terms["transient"] - terms["loading"]
        return resting + (self.weighed.sizes.load_bytes if self.placement.river_layers else 0)

    def tiers(self) -> list[str | None]:
        """Where each backbone layer rests: "device", "host", "disk", or None where the mode has no use for it."""
        resident, streamed = set(self.placement.resident_layers), set(self.placement.streamed_layers)
        away = {layer: "host" if layer in self.held_layers else "disk" for layer in streamed}
        layers = range(self.facts.structure.num_layers)
        return ["device" if layer in resident else away.get(layer) for layer in layers]

    def as_json(self) -> dict[str, Any]:
        """Plain values; docs/river-mem.md describes them."""
        config, placement = self.facts.config, self.placement
        return {
            "schema": SCHEMA,
            "kind": "plan",
            "model": config.model,
            "context": config.context,
            "batch": config.batch,
            "mode": config.mode,
            "options": {
                "bits": config.quant.bits,
                "group_size": config.quant.group_size,
                "head_bits": config.head_bits,
                "kv_bits": config.kv_bits,
                "kv_tier": config.kv_tier,
                "slots": config.slots,
                "dtype": str(self.facts.dtype).removeprefix("torch."),
                "device": self.device_type,
            },
            "budget_bytes": self.budget_bytes,
            "budget_source": self.budget_source,
            "fits": self.fits,
            "peak_device_bytes": self.peak_device_bytes,
            "headroom_bytes": self.budget_bytes - self.peak_device_bytes,
            "categories": self.categories,
            "host": vars(self.host),
            "load_peak_bytes": self.load_peak_bytes,
            "disk_bytes": self.disk_bytes,
            "placement": {
                "num_layers": self.facts.structure.num_layers,
                "backbone": self.tiers(),
                "river_layers": list(placement.river_layers),
                "resident_layers": len(placement.resident_layers),
                "streamed_layers": len(placement.streamed_layers),
                "slots": placement.slots,
                "slot_bytes": placement.slot_bytes,
                "embed_tier": placement.embed_tier,
                "prefill_chunk": placement.prefill_chunk,
                "states_tier": placement.states_tier,
                "kv_ahead": placement.kv_ahead,
            },
            "seconds_per_token": self.speed.as_json(),
            "constants": self.constants,
            "refusal": None if self.remedies is None else self.remedies.as_json(),
            "kv_alternatives": None
            if self.kv_alternatives is None
            else [_as_json(one) for one in self.kv_alternatives],
            "notes": list(self.facts.notes),
        }


def plan_memory(
    config: RiverConfig,
    *,
    profile: HardwareProfile | None = None,
    mean_depth: float | None = None,
    progress: Progress | None = None,
) -> MemoryPlan:
    """Plan for a model that need not be there: a built-in shape, a hub id, a directory, `demo`, a .gguf file.

    Args:
        profile: the machine that is planned for: its kind and its memory, unless `config` names a device or a budget.
        mean_depth: backbone layers of a token in mode exit, for the speed; None for the paper's.

    Raises UsageError for an option that cannot take effect, CheckpointError for a model that cannot be had. A model
    that does not fit is no error here: the plan says what would.
    """
    check_mean_depth(Mode.parse(config.mode), mean_depth)
    device_type = _device_type(config, profile)
    facts = find_model(config, progress or Silent())
    return plan_for(facts, device_type=device_type, profile=profile, mean_depth=mean_depth)


def plan_for(
    facts: ModelFacts, *, device_type: str, profile: HardwareProfile | None = None, mean_depth: float | None = None
) -> MemoryPlan:
    """`plan_memory` of a model that was looked up; `facts.config` has the options."""
    config, structure = facts.config, facts.structure
    constants = device_constants(device_type, profile)
    budget_bytes, budget_source = _budget(config, device_type, profile, constants)
    modes, precision = _modes(facts), _precision(facts, device_type)
    weighed = weigh_within(budget_bytes, structure, precision, config, modes, facts.stored)
    placement, remedies = weighed.place(config, modes, budget_bytes), None
    if isinstance(placement, Refusal):
        chunked = replace(facts, config=replace(config, prefill_chunk=weighed.prefill_chunk or config.context))
        again = functools.partial(weigh_facts, device_type, rest_states=weighed.rest_states)
        remedies = find_remedies(chunked, weighed, placement, again)
        smallest = weighed.place(config, modes, placement.needed_bytes)
        assert isinstance(smallest, Placement), "a refusal quotes a budget that is refused"
        placement = replace(smallest, budget_bytes=budget_bytes)
    held = _held_layers(config, weighed, placement, device_type)
    return MemoryPlan(
        facts=facts,
        weighed=weighed,
        placement=placement,
        budget_bytes=budget_bytes,
        budget_source=budget_source,
        device_type=device_type,
        categories=weighed.categories(placement),
        held_layers=held,
        host=_host(weighed, placement, held, device_type),
        disk_bytes=facts.checkpoint_bytes + _river_cache_bytes(facts, placement),
        speed=estimate_speed(weighed, placement, held, device_type, config, profile, mean_depth),
        constants=constants,
        remedies=remedies,
        kv_alternatives=None
        if profile is None
        else _kv_alternatives(facts, weighed, budget_bytes, profile, mean_depth),
    )


def _kv_alternatives(
    facts: ModelFacts, weighed: Weighed, budget_bytes: int, profile: HardwareProfile, mean_depth: float | None
) -> tuple[KvAlternative, ...]:
    """What `policies.kv_choice` makes of every kind of cache, prompts being read in the chunks of the plan."""
    config, modes = facts.config, _modes(facts)
    device_type = "cuda" if profile.pinned_bytes_per_s else "cpu"
    needs = kv_needs(
        facts.structure,
        _precision(facts, device_type),
        context=config.context,
        batch=config.batch,
        modes=modes,
        prefill_chunk=weighed.prefill_chunk,
        give_back=config.give_back,
        rest_states=weighed.rest_states,
        trust_remote_code=config.trust_remote_code,
    )
    return tuple(
        weigh_kinds(
            weighed.sizes,
            needs,
            profile,
            expected_course(modes[0], config, facts.structure.num_layers, mean_depth),
            mode=modes[0],
            also_modes=modes[1:],
            min_exit=config.min_exit,
            budget_bytes=budget_bytes,
            slots=config.slots,
            tier="disk" if device_type == "cpu" else "host",
            tau=config.tau,
            outside_s=head_seconds(weighed.sizes, profile),
        )
    )


def _as_json(alternative: KvAlternative) -> dict[str, Any]:
    needs, placement = alternative.needs, alternative.placement
    fits = isinstance(placement, Placement)
    return {
        "kv_bits": needs.bits,
        "kv_tier": needs.tier,
        "kv_bytes": needs.kv_bytes,
        "kv_host_bytes": needs.kv_host_bytes,
        "fits": fits,
        "kv_ahead": placement.kv_ahead if isinstance(placement, Placement) else None,
        "resident_layers": len(placement.resident_layers) if isinstance(placement, Placement) else None,
        "seconds_per_token": alternative.seconds_per_token,
        "layers_s": alternative.layers_s,
        "kv_s": alternative.kv_s,
    }


def weigh_facts(
    device_type: str, facts: ModelFacts, needs: Needs | None = None, *, rest_states: bool = False
) -> tuple[Weighed, tuple[Mode, ...]]:
    """Run the model dry with the options of `facts.config`, unless its `needs` are known.

    Returns also its modes, the one it starts in first.
    """
    modes, precision = _modes(facts), _precision(facts, device_type)
    return weigh(facts.structure, precision, facts.config, modes, facts.stored, needs, rest_states=rest_states), modes


def _modes(facts: ModelFacts) -> tuple[Mode, ...]:
    config = facts.config
    return tuple(check_mode(text, facts.structure.num_layers) for text in (config.mode, *config.also_modes))


def _precision(facts: ModelFacts, device_type: str) -> Precision:
    config = facts.config
    return Precision(
        dtype=facts.dtype,
        bits=config.quant.bits,
        group=config.quant.group_size,
        head_bits=config.head_bits,
        device_type=device_type,
        kernels=ordered(config.cache_dir),
    )


def _device_type(config: RiverConfig, profile: HardwareProfile | None) -> str:
    """What is planned for; it need not be there."""
    asked = None if config.device == "auto" else config.device.partition(":")[0]
    if profile is not None:
        kind = "cuda" if profile.pinned_bytes_per_s else "cpu"
        if asked not in (None, kind):
            raise UsageError(f"device is {config.device}, profile {profile.name} is of a {kind} machine: drop one")
    else:
        kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu" and config.host_budget is not None:
        raise UsageError("host_budget has no effect on CPU, where the device is RAM: give budget alone")
    return kind


def _budget(
    config: RiverConfig, device_type: str, profile: HardwareProfile | None, constants: dict[str, int]
) -> tuple[int, str]:
    if config.budget is not None and profile is not None:
        room_bytes = profile.device_memory_bytes - sum(constants.values())
        over = f", {format_size(config.budget - room_bytes)} more than {profile.name} has room for beside the constants"
        return config.budget, "given" + (over if config.budget > room_bytes else "")
    if config.budget is not None:
        return config.budget, "given"
    if profile is not None:
        free_bytes = profile.device_memory_bytes - sum(constants.values())
        if device_type == "cpu":
            return int(free_bytes * (1 - MARGIN_SHARE)), f"memory of profile {profile.name} less {MARGIN_SHARE:.0%}"
        return free_bytes, f"memory of profile {profile.name} less the constants"
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this torch has no GPU whose free memory could be the budget: give a budget or a profile")
    device = torch.device(config.device if config.device != "auto" else device_type)
    return free_device_bytes(device)


def _held_layers(config: RiverConfig, weighed: Weighed, placement: Placement, device_type: str) -> tuple[int, ...]:
    if device_type == "cpu":
        return ()
    if config.host_budget is None:
        return placement.streamed_layers
    sizes = {layer: weighed.sizes.backbone_bytes[layer] for layer in placement.streamed_layers}
    return tuple(layers_to_hold(sizes, max(config.host_budget - placement.host_bytes, 0)))


def _host(weighed: Weighed, placement: Placement, held: tuple[int, ...], device_type: str) -> HostNeeds:
    sizes = weighed.sizes
    kv_bytes = placement.kv_host_bytes
    on_disk = device_type != "cpu" and len(held) < len(placement.streamed_layers)
    return HostNeeds(
        pinned_bytes=sum(sizes.backbone_bytes[layer] for layer in held)
        + (RING_BYTES if on_disk else 0)
        + (kv_bytes if device_type != "cpu" else 0),
        pageable_bytes=placement.states_host_bytes if device_type != "cpu" else 0,
        file_backed_bytes=(0 if placement.embed_tier == "device" else sizes.embed_bytes)
        + (kv_bytes + placement.states_host_bytes if device_type == "cpu" else 0),
    )


def _river_cache_bytes(facts: ModelFacts, placement: Placement) -> int:
    """What the built river takes on disk, in the form that suits every machine."""
    canonical = replace(_precision(facts, "cpu"), kernels=(Blocks(),))
    layers = facts.structure.layers
    return sum(canonical.river_bytes(layers[i]) for i in placement.river_layers)
