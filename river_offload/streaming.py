"""What streamed layers come through, for a plan: slots, the link that fills them, and what decides for the link."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from policies.forecast import Forecast, Known
from policies.prefetch import KINDS, forecast_of
from river_offload.config import RiverConfig
from river_offload.kv.workspace import KvLink
from river_offload.memory.probes import free_device_bytes
from river_offload.planning.plan import Plan
from river_offload.store.layout import Layout
from river_offload.store.link import Link
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink
from river_offload.store.link_kv import ReaderKvLink, StreamKvLink
from river_offload.store.pinned import HostMemory
from river_offload.store.prefetcher import Prefetcher
from river_offload.store.reader import Reader
from river_offload.store.ring import RING_BYTES, HostSource, layers_to_hold
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier, HostTier

KV_THREADS = 2
"""That bring keys and values in where no weights are read: one waits for the disk while the other copies."""


@dataclass(frozen=True)
class Streaming:
    """The moving parts; without streamed layers there are none but an empty `slots`."""

    slots: Slots
    link: Link | None
    layer_bytes: Mapping[int, int]
    """Bytes that a fetch of each streamed layer moves."""
    prefetcher: Prefetcher | None
    memory: HostMemory | None
    """Host memory of a GPU's layers: how much of it is pinned."""
    held_bytes: Callable[[], int]
    """Device bytes that the link holds now, beside the slots."""
    kv_link: KvLink | None = None
    """What brings keys and values in ahead, over the same link; None where the plan has no room for them."""


def open_streaming(plan: Plan, disk: DiskTier, layouts: list[Layout]) -> Streaming:
    """Make the slots of the plan and start the link, which from then on owns `disk`.

    On a GPU this reads the layers that fit the host budget into pinned memory, the shallow ones, which most passages
    need; the others come from disk through a few pinned buffers. Raises RiverError when a slot or host memory cannot
    be allocated, LinkError when layers cannot be read.
    """
    layers, ahead = plan.placement.streamed_layers, plan.placement.kv_ahead
    slots = Slots(
        plan.placement.slots, [layout if i in layers else None for i, layout in enumerate(layouts)], plan.device
    )
    if not layers:
        return Streaming(slots, None, {}, None, None, lambda: 0, _own_kv_link(plan))
    prefetcher = make_prefetcher(plan.config, len(layouts))
    if plan.device.type == "cpu":
        sizes = {layer: disk.stored_bytes(layer) for layer in layers}
        kv_link = ReaderKvLink(disk.reader) if ahead else None
        return Streaming(slots, CpuLink(disk, slots), sizes, prefetcher, None, lambda: disk.reader.nbytes, kv_link)
    budget_bytes = plan.config.host_budget
    if budget_bytes is None:
        budget_bytes, _ = free_device_bytes(torch.device("cpu"))
    budget_bytes = max(budget_bytes - plan.placement.host_bytes, 0)
    link, memory = open_cuda_link(layers, disk, layouts, slots, plan.device, budget_bytes, cuda=torch.cuda)
    sizes = {layer: layouts[layer].nbytes for layer in layers}
    copies = StreamKvLink(link.stream, plan.device, cuda=torch.cuda) if ahead else None
    return Streaming(slots, link, sizes, prefetcher, memory, lambda: 0, copies)


def _own_kv_link(plan: Plan) -> KvLink | None:
    """What brings keys and values in ahead where no weights come: on threads, or a stream, of its own."""
    if not plan.placement.kv_ahead:
        return None
    if plan.device.type == "cpu":
        return ReaderKvLink(Reader(KV_THREADS, largest_bytes=0))
    return StreamKvLink(torch.cuda.Stream(plan.device), plan.device, cuda=torch.cuda)


def open_cuda_link(
    layers: Sequence[int],
    disk: DiskTier,
    layouts: Sequence[Layout],
    slots: Slots,
    device: torch.device,
    budget_bytes: int,
    *,
    cuda: Any,
) -> tuple[CudaLink, HostMemory]:
    """The link of a GPU, with as many layers in pinned host memory as the budget allows, and that memory.

    Args:
        cuda: the `torch.cuda` namespace, or a fake one.
    """
    sizes = {layer: layouts[layer].nbytes for layer in layers}
    held = layers_to_hold(sizes, budget_bytes)
    need_bytes = sum(sizes[layer] for layer in held) + (RING_BYTES if len(held) < len(layers) else 0)
    memory = HostMemory(need_bytes, cuda.cudart())
    event = functools.partial(cuda.Event, blocking=True)  # or a waiting thread would spin
    try:
        source = HostSource(HostTier(disk, held, layouts, memory), disk, layouts, event=event)
    except BaseException:
        memory.close()
        raise
    return CudaLink(source, slots, sizes, device, cuda=cuda), memory


def make_prefetcher(config: RiverConfig, num_layers: int) -> Prefetcher:
    """What decides for the link, of the kind that `config` asks for; it has learned nothing yet."""
    kind = next(kind for kind in KINDS if kind == config.prefetch)
    learner = "next" if kind == "oracle" else kind  # an oracle is told, with each forced run

    def forecast_for(tau: float | None) -> Forecast:
        if tau is None:
            return Known(num_layers, num_layers)
        return forecast_of(learner, num_layers, tau=tau, min_exit=config.min_exit)

    return Prefetcher(kind, forecast_for, tau=config.tau)
