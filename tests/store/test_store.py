"""The store with a link that plays tricks: bytes land late, fetches fail, slots are read too early or too late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from river_offload.errors import LinkError, RiverError
from river_offload.store.layout import Layout
from river_offload.store.slots import Slots
from river_offload.store.store import Store

LAYERS, RESIDENT = 6, 2
CPU = torch.device("cpu")


def value_of(layer: int) -> float:
    """What every weight of a layer is."""
    return float(layer + 1)


class LateLink:
    """Moves bytes only when it is waited for, the latest moment the interface allows; puts down every call."""

    def __init__(self, slots: Slots, layout: Layout) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.fail_fetch: Callable[[int], bool] = lambda layer: False
        self.fail_wait: Callable[[int], bool] = lambda layer: False
        self.closed = 0
        self._slots, self._layout = slots, layout
        self._pending: dict[int, int] = {}

    def fetch(self, layer: int, slot: int) -> None:
        self.calls.append(("fetch", layer, slot))
        self._slots.poison(slot)  # half of it may be there at any time: nobody may look
        if self.fail_fetch(layer):
            raise LinkError(f"layer {layer} cannot be read")
        self._pending[slot] = layer

    def wait(self, slot: int) -> float:
        self.calls.append(("wait", slot))
        if slot in self._pending:
            layer = self._pending.pop(slot)
            if self.fail_wait(layer):
                raise LinkError(f"layer {layer} did not arrive")
            for view in self._layout.views(self._slots.buffers[slot]).values():
                view.fill_(value_of(layer))
        return 0.0

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))

    def close(self) -> None:
        self.closed += 1


class Rig:
    """A store of six layers, two of them resident."""

    def __init__(self, slot_count: int, *, poison: bool = True) -> None:
        self.modules = {index: nn.ModuleDict({"proj": nn.Linear(8, 4)}) for index in range(LAYERS)}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.modules[0].named_parameters()}
        layout = Layout.of(shapes, torch.float32)
        for index, module in self.modules.items():
            for parameter in module.parameters():
                nn.init.constant_(parameter, value_of(index))
            if index >= RESIDENT:
                module["proj"]._parameters.update(weight=None, bias=None)
        streamed = dict.fromkeys(range(RESIDENT, LAYERS), layout.nbytes)
        layouts = [layout if index in streamed else None for index in range(LAYERS)]
        self.slots = Slots(slot_count, layouts, CPU, poison=poison)
        self.link = LateLink(self.slots, layout)
        self.layer_bytes = layout.nbytes
        self.store = Store(self.modules, streamed, self.slots, self.link)

    def use(self, depth: int) -> None:
        """What a forward pass does with a layer; the result must be that layer's."""
        with self.store.hold(depth) as layer:
            output = layer["proj"](torch.ones(1, 8))
        assert torch.equal(output, torch.full((1, 4), 9 * value_of(depth)))


@pytest.mark.parametrize("slot_count", [1, 2, 3])
@pytest.mark.parametrize("poison", [True, False])
def test_every_layer_computes_with_its_own_weights(slot_count: int, poison: bool) -> None:
    rig = Rig(slot_count, poison=poison)
    for _ in range(3):
        for depth in range(LAYERS):
            rig.use(depth)
    assert rig.store.bytes_streamed == 3 * (LAYERS - RESIDENT) * rig.layer_bytes
    assert {call[1] for call in rig.link.calls if call[0] == "fetch"} == set(range(RESIDENT, LAYERS))


def test_each_reuse_of_a_slot_has_its_two_edges() -> None:
    """fetch, wait, compute, release, and only then the next fetch into the same slot."""
    rig = Rig(2)
    for _ in range(2):
        for depth in range(LAYERS):
            rig.use(depth)
    for slot in (0, 1):
        calls = [call[0] for call in rig.link.calls if call[-1] == slot]
        assert calls == ["fetch", "wait", "release"] * 4
    assert [call[2] for call in rig.link.calls if call[0] == "fetch"] == [0, 1] * 4


def test_a_layer_that_is_still_in_its_slot_is_not_fetched_again() -> None:
    rig = Rig(2, poison=False)
    rig.use(3)
    rig.use(4)
    rig.use(3)
    assert [call[1] for call in rig.link.calls if call[0] == "fetch"] == [3, 4]
    assert rig.store.bytes_streamed == 2 * rig.layer_bytes
    rig.use(5)
    rig.use(4)  # 3 was the oldest and has gone
    assert [call[1] for call in rig.link.calls if call[0] == "fetch"] == [3, 4, 5]


def test_a_released_layer_has_no_weights_and_its_slot_is_poisoned() -> None:
    rig = Rig(1)
    layer = rig.store.acquire(2)
    assert layer["proj"].weight.isfinite().all()
    rig.store.release(2)
    assert layer["proj"].weight is None
    assert layer["proj"].bias is None
    kept = rig.slots.parameters(2, 0)["proj.weight"]
    assert kept.isnan().all()


def test_a_poisoned_slot_holds_nothing() -> None:
    rig = Rig(1)
    rig.use(2)
    rig.use(2)
    assert [call[1] for call in rig.link.calls if call[0] == "fetch"] == [2, 2]


def test_a_resident_layer_needs_no_link() -> None:
    rig = Rig(1)
    rig.use(0)
    rig.use(1)
    assert rig.link.calls == []
    alone = Store({0: rig.modules[0]}, {}, Slots(0, [None], CPU), None)
    assert alone.acquire(0) is rig.modules[0]
    alone.release(0)
    alone.close()


def test_a_slot_in_use_is_no_victim() -> None:
    rig = Rig(2)
    third = rig.store.acquire(3)
    rig.use(4)
    rig.use(5)
    assert torch.equal(third["proj"].weight, torch.full((4, 8), value_of(3)))
    fifth = rig.store.acquire(5)
    assert fifth["proj"].weight is not third["proj"].weight
    with pytest.raises(RiverError, match="all 2 slots are in use"):
        rig.store.acquire(4)
    rig.store.release(3)
    rig.use(4)


@pytest.mark.parametrize("edge", ["fetch", "wait"])
@pytest.mark.parametrize("poison", [True, False])
def test_a_failed_fetch_leaves_nothing_that_passes_for_a_layer(edge: str, poison: bool) -> None:
    rig = Rig(1, poison=poison)
    rig.use(2)
    setattr(rig.link, f"fail_{edge}", lambda layer: layer == 3)
    streamed_bytes = rig.store.bytes_streamed
    for _ in range(2):
        with pytest.raises(LinkError, match="layer 3"):
            rig.use(3)
        assert rig.modules[3]["proj"].weight is None
    rig.use(2)  # what was in the slot before is not there any more, and is not believed to be
    setattr(rig.link, f"fail_{edge}", lambda layer: False)
    rig.use(3)
    rig.use(4)
    if edge == "fetch":
        assert rig.store.bytes_streamed == streamed_bytes + 3 * rig.layer_bytes


def test_compute_that_fails_gives_its_slot_back() -> None:
    rig = Rig(1)
    with pytest.raises(ZeroDivisionError), rig.store.hold(2):
        raise ZeroDivisionError
    rig.use(3)


def test_a_closed_store_lends_nothing_that_streams() -> None:
    rig = Rig(2)
    rig.use(2)
    rig.store.close()
    rig.store.close()
    assert rig.link.closed == 2
    assert len(rig.slots) == 0
    rig.use(0)
    with pytest.raises(RiverError, match=r"backbone layer 2 was asked for after close\(\)"):
        rig.store.acquire(2)
