"""The store and its book: what is fetched, what is kept, what is counted, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
import torch
from rigs import CPU, Make, Rig, layout
from torch import nn

from river_offload.errors import LinkError, RiverError
from river_offload.store import slots as slots_module
from river_offload.store.slots import Slots
from river_offload.store.store import Store

LAYERS, RESIDENT = 6, 2


def rig_of(make_rig: Make, slots: int, choices: Iterator[int] | None = None, **options: object) -> Rig:
    """Six layers, two of them resident, on a link that lands bytes only when they are waited for."""
    null = {"choices": choices or iter(())} | dict(options.pop("null", {}))
    return make_rig("null", LAYERS, slots, resident=RESIDENT, null=null, **{"kind": "none", "poison": False} | options)


def fetched(rig: Rig) -> list[tuple[int, int]]:
    """From now on, (layer, slot) of every fetch."""
    calls: list[tuple[int, int]] = []
    plain = rig.link.fetch

    def fetch(layer: int, slot: int, *, urgent: bool = False) -> None:
        calls.append((layer, slot))
        plain(layer, slot, urgent=urgent)

    rig.link.fetch = fetch  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_in_poisoned_slots_every_layer_is_fetched_every_time(slots: int, make_rig: Make) -> None:
    rig = rig_of(make_rig, slots, poison=True)
    for _ in range(3):
        rig.passage(LAYERS)
    rig.check()
    assert rig.store.bytes_streamed == 3 * (LAYERS - RESIDENT) * layout.nbytes
    assert rig.store.misses == 3 * (LAYERS - RESIDENT)
    assert rig.store.wasted_bytes == 0


def test_a_layer_that_is_still_in_its_slot_is_not_read_again(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2)
    calls = fetched(rig)
    for depth in (3, 4, 3, 5, 3, 4):
        rig.use(depth)
    assert calls == [(3, 0), (4, 1), (5, 1), (4, 1)]  # over the deepest
    assert rig.store.bytes_streamed == 4 * layout.nbytes
    assert rig.store.misses == 4
    rig.check()


def test_early_exits_on_what_is_there_move_nothing(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2, kind="next", choices=repeat(2))
    for _ in range(4):
        rig.passage(3)
    moved_bytes, misses = rig.store.bytes_streamed, rig.store.misses
    calls = fetched(rig)
    for _ in range(20):
        rig.passage(3)
    assert (calls, rig.store.bytes_streamed - moved_bytes, rig.store.misses - misses) == ([], 0, 0)
    rig.check()


def test_the_slots_refill_behind_the_river_and_in_order(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2, kind="next", choices=repeat(4))
    rig.passage(LAYERS)
    rig.passage(RESIDENT)
    calls = fetched(rig)
    rig.passage(RESIDENT)
    assert calls == []  # all of it is on its way by now
    assert all(rig.store.present(layer) for layer in (2, 3))
    assert not rig.store.present(4)
    wait_s = rig.store.wait_s
    rig.passage(4)
    assert rig.store.wait_s == wait_s


def test_a_prefetch_that_nobody_used_is_counted_as_wasted(make_rig: Make) -> None:
    rig = rig_of(make_rig, 1, kind="next", choices=repeat(4))
    rig.passage(RESIDENT)  # brings in layer 2 for the next passage
    assert rig.store.present(2)
    assert rig.store.wasted_bytes == 0
    rig.use(4)
    assert rig.store.wasted_bytes == layout.nbytes


def test_a_released_layer_has_no_weights_and_its_slot_is_poisoned(make_rig: Make) -> None:
    rig = rig_of(make_rig, 1, poison=True)
    layer = rig.store.acquire(2)
    assert layer["proj"].weight.isfinite().all()
    rig.store.release(2)
    assert (layer["proj"].weight, layer["proj"].bias) == (None, None)
    assert rig.slots.parameters(2, 0)["proj.weight"].isnan().all()
    assert not rig.store.present(2)


def test_a_resident_layer_needs_no_link(make_rig: Make) -> None:
    rig = rig_of(make_rig, 1)
    calls = fetched(rig)
    rig.use(0)
    rig.use(1)
    assert calls == []
    assert rig.store.present(0)
    module = nn.Linear(2, 2)
    alone = Store({0: module}, {}, Slots(0, [None], CPU), None, None)
    alone.opened(1, None, None, 0.5)
    assert alone.acquire(0) is module
    alone.release(0)
    alone.left(1)
    alone.passed(0)
    assert (alone.bytes_streamed, alone.wasted_bytes, alone.misses, alone.wait_s) == (0, 0, 0, 0.0)
    alone.close()


def test_a_slot_in_use_is_no_victim(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2)
    third = rig.store.acquire(3)
    rig.use(4)
    rig.use(5)
    assert torch.equal(third["proj"].weight, rig.expected[3]["proj.weight"])
    fifth = rig.store.acquire(5)
    assert fifth["proj"].weight is not third["proj"].weight
    with pytest.raises(RiverError, match="all 2 slots are in use"):
        rig.store.acquire(4)
    rig.store.release(3)
    rig.use(4)
    rig.check()


def test_a_failed_fetch_leaves_nothing_that_passes_for_a_layer(make_rig: Make) -> None:
    rig = rig_of(make_rig, 1, null={"broken": frozenset([3])})
    rig.use(2)
    for _ in range(2):
        with pytest.raises(LinkError, match="layer 3"):
            rig.use(3)
    assert not rig.store.present(2)  # what was in the slot is not there any more
    rig.use(2)
    rig.link.broken = frozenset()  # type: ignore[attr-defined]
    rig.use(3)
    rig.use(4)
    rig.check()
    assert rig.store.bytes_streamed == 4 * layout.nbytes


def test_a_prefetch_that_failed_is_tried_again_when_it_is_needed(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2, kind="next", choices=repeat(4), null={"broken": frozenset([2])})
    rig.passage(RESIDENT)
    assert not rig.store.present(2)
    rig.link.broken = frozenset()  # type: ignore[attr-defined]
    rig.passage(LAYERS)
    rig.check()


def test_compute_that_fails_gives_its_slot_back(make_rig: Make) -> None:
    rig = rig_of(make_rig, 1)
    with pytest.raises(ZeroDivisionError), rig.store.hold(2):
        raise ZeroDivisionError
    rig.use(3)


def test_a_closed_store_lends_nothing_that_streams(make_rig: Make) -> None:
    rig = rig_of(make_rig, 2)
    rig.use(2)
    rig.store.close()
    rig.store.close()
    assert len(rig.slots) == 0
    rig.use(0)
    rig.store.left(1)
    with pytest.raises(RiverError, match=r"backbone layer 2 was asked for after close\(\)"):
        rig.store.acquire(2)


def test_a_slot_that_cannot_be_allocated_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = slots_module.aligned_empty, []

    def refuse(nbytes: int, device: torch.device) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return plain(nbytes, device)

    monkeypatch.setattr(slots_module, "aligned_empty", refuse)
    with pytest.raises(RiverError, match=rf"slot 2 of 3 \({layout.nbytes} bytes\) cannot be allocated on cpu"):
        Slots(3, [layout], CPU)
