"""What streamed layers come through, for a plan: slots, the link that fills them, and what decides for the link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from policies.prefetch import KINDS, forecast_of
from river_offload.config import RiverConfig
from river_offload.planning.plan import Plan
from river_offload.store.layout import Layout
from river_offload.store.link import Link
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink
from river_offload.store.prefetcher import Prefetcher
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier, HostTier


@dataclass(frozen=True)
class Streaming:
    """The moving parts; without streamed layers there are none but an empty `slots`."""

    slots: Slots
    link: Link | None
    layer_bytes: Mapping[int, int]
    """Bytes that a fetch of each streamed layer moves."""
    prefetcher: Prefetcher | None
    held_bytes: Callable[[], int]
    """Device bytes that the link holds now, beside the slots."""


def open_streaming(plan: Plan, disk: DiskTier, layouts: list[Layout]) -> Streaming:
    """Make the slots of the plan and start the link, which from then on owns `disk`.

    Raises RiverError when a slot cannot be allocated, LinkError when layers cannot be read into host memory.
    """
    layers = plan.placement.streamed_layers
    slots = Slots(
        plan.placement.slots, [layout if i in layers else None for i, layout in enumerate(layouts)], plan.device
    )
    if not layers:
        return Streaming(slots, None, {}, None, lambda: 0)
    prefetcher = _prefetcher(plan.config, len(layouts))
    if plan.device.type == "cpu":
        sizes = {layer: disk.stored_bytes(layer) for layer in layers}
        return Streaming(slots, CpuLink(disk, slots), sizes, prefetcher, lambda: disk.reader.nbytes)
    host = HostTier(disk, layers, layouts, pin=True)
    sizes = {layer: layouts[layer].nbytes for layer in layers}
    return Streaming(slots, CudaLink(host, slots, plan.device, cuda=torch.cuda), sizes, prefetcher, lambda: 0)


def _prefetcher(config: RiverConfig, num_layers: int) -> Prefetcher:
    kind = next(kind for kind in KINDS if kind == config.prefetch)
    return Prefetcher(
        kind, lambda tau: forecast_of(kind, num_layers, tau=tau, min_exit=config.min_exit), tau=config.tau
    )
