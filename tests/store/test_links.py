"""The CPU link against a fake checkpoint, the CUDA link against a fake GPU whose copies land as late as they may."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from river_offload.errors import LinkError
from river_offload.store.layout import Layout
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink
from river_offload.store.slots import Slots
from river_offload.store.tiers import DiskTier, HostTier

CPU = torch.device("cpu")
SHAPES = {"q.weight": (4, 8), "q.bias": (4,)}
LAYERS = 3


class Files:
    """A checkpoint in memory; reads into place are told from reads that make a new tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            f"layers.{layer}.{name}": torch.randn(shape, generator=generator).to(dtype)
            for layer in range(LAYERS)
            for name, shape in SHAPES.items()
        }
        self.entries = {
            key: SimpleNamespace(dtype=str(dtype).removeprefix("torch."), nbytes=tensor.nbytes)
            for key, tensor in self.tensors.items()
        }
        self.in_place = 0
        self.broken: str | None = None

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        if name == self.broken:
            raise LinkError(f"{name}: cannot be read")
        if out is None:
            return self.tensors[name].clone()
        self.in_place += 1
        return out.copy_(self.tensors[name])


def disk_tier(files: Files, dtype: torch.dtype = torch.float32) -> tuple[DiskTier, list[Layout]]:
    layouts = [Layout.of(SHAPES, dtype)] * LAYERS
    keys = [{name: f"layers.{layer}.{name}" for name in SHAPES} for layer in range(LAYERS)]
    return DiskTier(files, keys, layouts), layouts


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_cpu_link_reads_a_layer_into_its_slot(stored: torch.dtype) -> None:
    files = Files(stored)
    disk, layouts = disk_tier(files)
    slots = Slots(2, layouts, CPU)
    link = CpuLink(disk, slots)
    link.fetch(2, 1)
    assert link.wait(1) >= 0.0
    for name, parameter in slots.parameters(2, 1).items():
        assert torch.equal(parameter, files.tensors[f"layers.2.{name}"].float())
    # Bytes that need no conversion go straight to their place.
    assert files.in_place == (2 if stored == torch.float32 else 0)
    link.release(1)
    link.close()
    link.close()


def test_the_bytes_read_from_disk_are_those_of_the_file() -> None:
    files = Files(torch.bfloat16)
    disk, layouts = disk_tier(files)
    buffer = torch.empty(layouts[0].nbytes, dtype=torch.uint8)
    assert disk.read(0, buffer) == (32 + 4) * 2


def test_a_read_that_fails_is_a_link_error() -> None:
    files = Files(torch.float32)
    files.broken = "layers.1.q.bias"
    disk, layouts = disk_tier(files)
    link = CpuLink(disk, Slots(1, layouts, CPU))
    with pytest.raises(LinkError, match=r"layers\.1\.q\.bias"):
        link.fetch(1, 0)
    link.fetch(0, 0)


def test_the_host_tier_holds_the_layers_it_was_asked_to() -> None:
    files = Files(torch.float32)
    disk, layouts = disk_tier(files)
    host = HostTier(disk, [0, 2], layouts, pin=False)
    assert host.nbytes == 2 * layouts[0].nbytes
    views = layouts[2].views(host.buffer(2))
    assert torch.equal(views["q.weight"], files.tensors["layers.2.q.weight"])
    with pytest.raises(KeyError):
        host.buffer(1)


class FakeCuda:
    """As much of `torch.cuda` as the link uses: work is queued, and is done only when something waits for it.

    `compute(name)` queues a piece of computation on the current stream, which runs as late.
    """

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.compute_stream = self.Stream(CPU)
        self._current = self.compute_stream

    def Stream(self, _: Any) -> FakeStream:
        stream = FakeStream()
        self.streams.append(stream)
        return stream

    def Event(self) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, _: Any = None) -> FakeStream:
        return self._current


class FakeStream:
    """Runs its work in order, but only when it is drained."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def wait_event(self, event: FakeEvent) -> None:
        stream, marker = event.recorded()  # what was recorded by now; a later record does not count

        def wait() -> None:
            while not marker.done:
                stream.drain(1)

        self.work.append(wait)

    def drain(self, count: int | None = None) -> None:
        for _ in range(len(self.work) if count is None else count):
            if self.work:
                self.work.pop(0)()

    def synchronize(self) -> None:
        self.drain()


class FakeEvent:
    """Recorded behind what its stream has queued; waiting for it does all of that."""

    def __init__(self) -> None:
        self._stream: FakeStream | None = None
        self._behind: Any = None

    def record(self, stream: FakeStream) -> None:
        marker = SimpleNamespace(done=False)
        stream.work.append(lambda: setattr(marker, "done", True))
        self._stream, self._behind = stream, marker

    def recorded(self) -> tuple[FakeStream, SimpleNamespace]:
        assert self._stream is not None, "waited for an event that was never recorded"
        return self._stream, self._behind


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA link between a host tier and slots on the CPU, with copies that land on a fake copy stream."""
    files = Files(torch.float32)
    disk, layouts = disk_tier(files)
    slots = Slots(2, layouts, CPU, poison=True)
    cuda = FakeCuda()
    link = CudaLink(HostTier(disk, range(LAYERS), layouts, pin=False), slots, CPU, cuda=cuda)
    copy = torch.Tensor.copy_

    def queued(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(target, source)
        cuda.current_stream().work.append(lambda: copy(target, source))
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", queued)
    seen: list[torch.Tensor] = []

    def compute(layer: int, slot: int) -> None:
        weight = slots.parameters(layer, slot)["q.weight"]
        cuda.compute_stream.work.append(lambda: seen.append(weight.clone()))

    return SimpleNamespace(files=files, slots=slots, cuda=cuda, link=link, seen=seen, compute=compute)


def test_compute_reads_what_was_copied_for_it(rig: SimpleNamespace) -> None:
    """Every layer through two slots, all of it queued before any of it runs: only the events keep the order."""
    for layer in (0, 1, 2, 0, 1, 2):
        slot = layer % 2
        rig.link.fetch(layer, slot)
        assert rig.link.wait(slot) == 0.0
        rig.compute(layer, slot)
        rig.link.release(slot)
    assert rig.seen == []  # this thread waited for nothing
    rig.cuda.compute_stream.drain()
    for layer, weight in zip((0, 1, 2, 0, 1, 2), rig.seen, strict=True):
        assert torch.equal(weight, rig.files.tensors[f"layers.{layer}.q.weight"])


def test_a_copy_waits_for_the_compute_that_reads_its_slot(rig: SimpleNamespace) -> None:
    """The copy stream runs ahead as far as it can; the slot's old layer must have been used by then."""
    rig.link.fetch(0, 0)
    rig.link.wait(0)
    rig.compute(0, 0)
    rig.link.release(0)
    rig.link.fetch(1, 0)
    copy_stream = rig.cuda.streams[1]
    copy_stream.drain()
    assert len(rig.seen) == 1
    assert torch.equal(rig.seen[0], rig.files.tensors["layers.0.q.weight"])


def test_closing_waits_for_copies_in_flight(rig: SimpleNamespace) -> None:
    rig.link.fetch(0, 0)
    rig.link.close()
    rig.link.close()
    assert torch.equal(rig.slots.parameters(0, 0)["q.weight"], rig.files.tensors["layers.0.q.weight"])
