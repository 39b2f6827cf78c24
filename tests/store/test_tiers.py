"""Layers on disk and in host memory: the right bytes at the right places, whole or in chunks, converted or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeCuda
from safetensors.torch import save_file

from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.errors import LinkError
from river_offload.store.layout import ALIGNMENT_BYTES, Layout
from river_offload.store.pinned import HostMemory
from river_offload.store.ring import RING_BUFFERS, HostSource
from river_offload.store.tiers import DiskTier, HostTier

SHAPES = {"q.weight": (40, 33), "q.bias": (40,), "up.weight": (7, 3)}
LAYERS = 3
DTYPES = ["float32", "bfloat16", "float16"]

Open = Callable[[str, str], tuple[DiskTier, list[Layout], dict[str, torch.Tensor]]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """`opened(dtype on disk, dtype of compute)`: a disk tier, its layouts, the tensors of the file."""
    tiers = []

    def make(stored: str, wanted: str) -> tuple[DiskTier, list[Layout], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        tensors = {
            f"layers.{layer}.{name}": torch.randn(shape, generator=generator).to(getattr(torch, stored))
            for layer in range(LAYERS)
            for name, shape in SHAPES.items()
        }
        save_file(tensors, tmp_path / "model.safetensors")
        layouts = [Layout.of(SHAPES, getattr(torch, wanted))] * LAYERS
        keys = [{name: f"layers.{layer}.{name}" for name in SHAPES} for layer in range(LAYERS)]
        with Checkpoint.open(tmp_path) as checkpoint:
            tiers.append(DiskTier(checkpoint, keys, layouts))
        return tiers[-1], layouts, tensors

    yield make
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_layer_is_read_into_its_layout(stored: str, wanted: str, opened: Open) -> None:
    disk, layouts, tensors = opened(stored, wanted)
    buffer = torch.empty(layouts[2].nbytes, dtype=torch.uint8)
    elements = 40 * 33 + 40 + 21
    assert (
        disk.read(2, buffer) == disk.stored_bytes(2) == disk.layer_bytes == elements * getattr(torch, stored).itemsize
    )
    for name, view in layouts[2].views(buffer).items():
        assert torch.equal(view, tensors[f"layers.2.{name}"].to(view.dtype))


@pytest.mark.parametrize("chunk_bytes", [ALIGNMENT_BYTES, 5 * ALIGNMENT_BYTES, 1 << 20])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_a_ring_brings_a_layer_in_chunks_from_any_place_on(chunk_bytes: int, wanted: str, opened: Open) -> None:
    disk, layouts, _ = opened("float32", wanted)
    whole = torch.zeros(layouts[1].nbytes, dtype=torch.uint8)
    disk.read(1, whole)
    cuda = FakeCuda()
    memory = HostMemory(0, None)
    source = HostSource(HostTier(disk, (), layouts, memory), disk, layouts, event=cuda.Event, chunk_bytes=chunk_bytes)
    for start in (0, chunk_bytes if chunk_bytes < whole.nbytes else 0):
        found = torch.zeros_like(whole)
        for chunk in source.chunks(1, start):
            found[chunk.start : chunk.start + chunk.source.nbytes] = chunk.source
            chunk.copied.record(cuda.Stream())
        for item in layouts[1].entries:  # what lies between tensors is nobody's
            part = slice(max(item.offset, start), item.offset + item.nbytes)
            assert torch.equal(found[part], whole[part])
    assert memory.pageable_bytes == RING_BUFFERS * chunk_bytes
    source.close()
    source.close()


def test_a_ring_that_is_left_half_way_serves_the_next_layer(opened: Open) -> None:
    disk, layouts, tensors = opened("float32", "float32")
    cuda = FakeCuda()
    source = HostSource(
        HostTier(disk, (), layouts, HostMemory(0, None)), disk, layouts, event=cuda.Event, chunk_bytes=ALIGNMENT_BYTES
    )
    for layer in (0, 1, 2):
        chunks = source.chunks(layer)
        first = next(chunks)
        assert torch.equal(first.source.view(torch.float32), tensors[f"layers.{layer}.q.weight"].flatten()[:16])


def test_the_host_tier_holds_the_layers_it_was_asked_to(opened: Open) -> None:
    disk, layouts, tensors = opened("float32", "float32")
    host = HostTier(disk, [0, 2], layouts, HostMemory(0, None))
    assert host.nbytes == 2 * layouts[0].nbytes == host.memory.pageable_bytes
    buffer = host.buffer(2)
    assert buffer is not None
    assert torch.equal(layouts[2].views(buffer)["q.weight"], tensors["layers.2.q.weight"])
    assert host.buffer(1) is None
    host.close()
    assert (host.nbytes, host.memory.pageable_bytes) == (0, 0)


def test_a_closed_tier_reads_no_more(opened: Open) -> None:
    disk, layouts, _ = opened("float32", "float32")
    disk.close()
    disk.close()
    with pytest.raises(LinkError, match="closed"):
        disk.read(0, torch.empty(layouts[0].nbytes, dtype=torch.uint8))
