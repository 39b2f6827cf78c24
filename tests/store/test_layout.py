"""How a layer lies in a flat buffer, and the slots made of such buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from river_offload.store.layout import ALIGNMENT_BYTES, Layout, aligned_empty
from river_offload.store.slots import Slots

CPU = torch.device("cpu")
SHAPES = {"q.weight": (5, 7), "q.bias": (5,), "o.weight": (3, 5)}


@given(
    st.dictionaries(
        st.text("ab", min_size=1), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), max_size=6
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_tensors_are_aligned_and_do_not_overlap(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = Layout.of(shapes, dtype)
    end = 0
    for entry, (name, shape) in zip(layout.entries, shapes.items(), strict=True):
        assert (entry.name, entry.shape, entry.dtype) == (name, shape, dtype)
        assert entry.offset % ALIGNMENT_BYTES == 0
        assert end <= entry.offset < end + ALIGNMENT_BYTES
        end = entry.offset + entry.nbytes
        assert entry.nbytes == torch.Size(shape).numel() * dtype.itemsize
    assert end <= layout.nbytes < end + ALIGNMENT_BYTES
    assert layout.nbytes % ALIGNMENT_BYTES == 0


def test_views_are_the_bytes_of_the_buffer() -> None:
    layout = Layout.of(SHAPES, torch.float32)
    buffer = aligned_empty(layout.nbytes, "cpu").zero_()
    views = layout.views(buffer)
    assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
    for number, view in enumerate(views.values(), start=1):
        view.fill_(number)
    again = layout.views(buffer)
    assert [view.unique().tolist() for view in again.values()] == [[1.0], [2.0], [3.0]]
    assert all(view.data_ptr() % ALIGNMENT_BYTES == 0 and view.is_contiguous() for view in again.values())


def test_a_layout_can_be_laid_over_a_larger_buffer() -> None:
    layout = Layout.of(SHAPES, torch.bfloat16)
    views = layout.views(aligned_empty(layout.nbytes + 640, "cpu"))
    assert views["o.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("alignment", [64, 512, 4096])
@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_aligned_memory_starts_where_it_should(alignment: int, nbytes: int) -> None:
    memory = aligned_empty(nbytes, "cpu", alignment)
    assert (memory.nbytes, memory.dtype) == (nbytes, torch.uint8)
    assert nbytes == 0 or memory.data_ptr() % alignment == 0


def test_slots_have_the_size_of_the_largest_layer() -> None:
    small, large = Layout.of({"w": (4, 4)}, torch.float32), Layout.of({"w": (40, 40)}, torch.float32)
    slots = Slots(2, [None, small, large], CPU)
    assert slots.slot_bytes == large.nbytes
    assert [buffer.nbytes for buffer in slots.buffers] == [large.nbytes] * 2
    assert slots.parameters(1, 0)["w"].shape == (4, 4)
    assert slots.parameters(2, 0)["w"].shape == (40, 40)
    # Both begin at the start of the same bytes.
    assert slots.parameters(1, 0)["w"].data_ptr() == slots.parameters(2, 0)["w"].data_ptr()
    assert slots.parameters(1, 1)["w"].data_ptr() != slots.parameters(1, 0)["w"].data_ptr()


def test_layers_of_one_layout_share_their_parameters() -> None:
    layout = Layout.of(SHAPES, torch.float32)
    slots = Slots(1, [layout, Layout.of(SHAPES, torch.float32), None], CPU)
    assert slots.parameters(0, 0) is slots.parameters(1, 0)
    assert not slots.parameters(0, 0)["q.weight"].requires_grad
    with pytest.raises(AssertionError, match="layer 2 is resident"):
        slots.parameters(2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_in_every_dtype(dtype: torch.dtype) -> None:
    slots = Slots(2, [Layout.of(SHAPES, dtype)], CPU)
    for slot in (0, 1):
        for parameter in slots.parameters(0, slot).values():
            parameter.zero_()
    slots.poison(1)
    assert all(parameter.isnan().all() for parameter in slots.parameters(0, 1).values())
    assert not any(parameter.any() for parameter in slots.parameters(0, 0).values())


def test_cleared_slots_hold_no_memory() -> None:
    slots = Slots(2, [Layout.of(SHAPES, torch.float32)], CPU)
    slots.parameters(0, 0)
    slots.clear()
    assert len(slots) == 0
    assert not slots._parameters
    assert len(Slots(0, [None], CPU)) == 0
