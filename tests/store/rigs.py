"""One store, any link: what the conformance tests drive, and what they compare with.

Layers are random bytes in a real safetensors file. Computation with a layer is a look at its weights, at once on a CPU
link and as late as possible on the fake GPU; `Rig.check` holds all that was seen against the file, bit for bit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, queue_copies
from safetensors.torch import save_file
from torch import nn

from policies.prefetch import Kind, forecast_of
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.store.layout import Layout
from river_offload.store.link import Link
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink
from river_offload.store.link_null import NullLink
from river_offload.store.pinned import HostMemory
from river_offload.store.prefetcher import Prefetcher
from river_offload.store.ring import HostSource
from river_offload.store.slots import Slots
from river_offload.store.store import Store
from river_offload.store.tiers import DiskTier, HostTier

CPU = torch.device("cpu")
MOST = 7
SHAPES = {"proj.weight": (16, 8), "proj.bias": (16,)}
CHUNK_BYTES = 128
"""A layer has five: two are issued ahead, so that a copy which was called off has begun, and has not ended."""
LINKS = ("cpu", "cuda-lazy", "cuda-eager", "ring-lazy", "ring-eager")
"""The real links. On the last two no layer is in host memory: they come from disk through a ring."""

layout = Layout.of(SHAPES, torch.float32)


def write_layers(directory: Path) -> Path:
    """A checkpoint of MOST layers."""
    generator = torch.Generator().manual_seed(11)
    tensors = {
        f"layers.{layer}.{name}": torch.randn(shape, generator=generator)
        for layer in range(MOST)
        for name, shape in SHAPES.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def require_no_thread_but(before: set[threading.Thread]) -> None:
    """A thread that died says so after it has left its link or reader: it may need a moment to end."""
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


class LateSlots(Slots):
    """Poisons in the order of the compute stream, as a real GPU does."""

    cuda: FakeCuda

    def poison(self, slot: int) -> None:
        self.cuda.compute(lambda: Slots.poison(self, slot))


class Rig:
    """`layers` layers, the first `resident` of them on the device, the others through `slots` slots."""

    def __init__(
        self,
        directory: Path,
        name: str,
        layers: int,
        slots: int,
        patch: pytest.MonkeyPatch,
        *,
        kind: Kind = "next",
        resident: int = 0,
        poison: bool = True,
        oracle: Sequence[int] | None = None,
        link_type: Any = None,
        null: dict[str, Any] | None = None,
    ) -> None:
        self.threads_before = set(threading.enumerate())
        self.layers = layers
        self.checkpoint = Checkpoint.open(directory)
        self.expected = {
            layer: {item: self.checkpoint.read(f"layers.{layer}.{item}") for item in SHAPES} for layer in range(MOST)
        }
        self.seen: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.cuda = FakeCuda(eager=name.endswith("eager")) if name.startswith(("cuda", "ring")) else None
        streamed = range(resident, layers)
        layouts = [layout if layer in streamed else None for layer in range(layers)]
        self.slots = (LateSlots if self.cuda else Slots)(slots, layouts, CPU, poison=poison)
        self.link: Link = self._link(name, link_type, null or {})
        if self.cuda:
            self.slots.cuda = self.cuda
            queue_copies(self.cuda, patch)
        forecast = forecast_of(kind, layers, depths=oracle)
        self.prefetcher = Prefetcher(kind, lambda tau: forecast)
        self.prefetcher.foretell(oracle)
        sizes = dict.fromkeys(streamed, layout.nbytes)
        self.store = Store(self._modules(resident), sizes, self.slots, self.link, self.prefetcher)

    def _link(self, name: str, link_type: Any, null: dict[str, Any]) -> Link:
        if name == "null":
            flat = {layer: torch.zeros(layout.nbytes, dtype=torch.uint8) for layer in range(self.layers)}
            for layer, buffer in flat.items():
                for item, view in layout.views(buffer).items():
                    view.copy_(self.expected[layer][item])
            return NullLink(flat, self.slots, **null)
        keys = [{item: f"layers.{layer}.{item}" for item in SHAPES} for layer in range(self.layers)]
        layouts = [layout] * self.layers
        disk = DiskTier(self.checkpoint, keys, layouts)
        if name == "cpu":
            return (link_type or CpuLink)(disk, self.slots)
        assert self.cuda is not None
        held = range(self.layers) if name.startswith("cuda") else ()
        host = HostTier(disk, held, layouts, HostMemory(0, None))
        source = HostSource(host, disk, layouts, event=self.cuda.Event, chunk_bytes=CHUNK_BYTES)
        sizes = dict.fromkeys(range(self.layers), layout.nbytes)
        return (link_type or CudaLink)(source, self.slots, sizes, CPU, cuda=self.cuda)

    def _modules(self, resident: int) -> dict[int, nn.Module]:
        modules: dict[int, nn.Module] = {}
        for layer in range(self.layers):
            modules[layer] = nn.ModuleDict({"proj": nn.Linear(8, 16)})
            for item in SHAPES:
                leaf = item.removeprefix("proj.")
                parameter = nn.Parameter(self.expected[layer][item], requires_grad=False)
                modules[layer]["proj"]._parameters[leaf] = parameter if layer < resident else None
        return modules

    def compute(self, depth: int, weights: dict[str, torch.Tensor]) -> None:
        """Look at a layer's weights: now, or when the fake GPU gets to it."""

        def look() -> None:
            self.seen.append((depth, {item: tensor.detach().clone() for item, tensor in weights.items()}))

        if self.cuda:
            self.cuda.compute(look)
        else:
            look()

    def use(self, depth: int) -> None:
        """What a forward pass does with a layer."""
        with self.store.hold(depth) as module:
            self.compute(depth, dict(module.named_parameters()))

    def passage(self, depth: int, skipped: frozenset[int] = frozenset()) -> None:
        """A forward pass that leaves after `depth` layers; `skipped` ones are not asked for."""
        self.store.opened(1, None, None, 0.5)
        for layer in range(depth):
            if layer not in skipped:
                self.use(layer)
        self.store.left(depth)
        self.store.passed(self.layers - depth)

    def check(self) -> None:
        """All that computation saw is what the file holds."""
        if self.cuda:
            self.cuda.drain()
        for depth, weights in self.seen:
            for item, tensor in weights.items():
                assert torch.equal(tensor, self.expected[depth][item]), f"layer {depth} computed with other bytes"

    def close(self) -> None:
        """End everything; no thread may be left."""
        self.store.close()
        self.checkpoint.close()
        require_no_thread_but(self.threads_before)


def random_passages(layers: int, count: int, seed: int) -> Iterator[tuple[int, frozenset[int]]]:
    """(depth, skipped layers): any depth, the first and last few a full one."""
    chance = random.Random(seed)
    for number in range(count):
        depth = layers if number in (0, count - 1) else chance.randint(0, layers)
        skipped = frozenset(layer for layer in range(layers) if chance.random() < 0.15)
        yield depth, skipped


def drive(rig: Rig, passages: int = 6, seed: int = 0) -> None:
    """Several passages of any depth, layers skipped, then the comparison."""
    for depth, skipped in random_passages(rig.layers, passages, seed):
        rig.passage(depth, skipped)
        if rig.cuda and seed % 2:
            rig.cuda.drain()
    rig.check()


Make = Callable[..., Rig]
