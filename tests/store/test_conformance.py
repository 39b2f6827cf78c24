"""Every link under one suite: whatever is fetched, called off, skipped or broken, compute reads a layer's own bytes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs import LINKS, MOST, Make, Rig, drive, layout, random_passages

from policies.prefetch import KINDS, Kind
from river_offload.store.files import SourceFile
from river_offload.store.link_cpu import CpuLink
from river_offload.store.link_cuda import CudaLink, _Job
from river_offload.store.reader import Ticket


@pytest.mark.parametrize("layers", range(1, MOST + 1))
@pytest.mark.parametrize("link", LINKS)
def test_what_streams_computes_as_what_is_resident(link: str, layers: int, make_rig: Make) -> None:
    for slots in range(1, MOST + 1):
        kind = KINDS[(layers + slots) % len(KINDS)]
        for poison in (True, False):
            depths = [depth for depth, _ in random_passages(layers, 6, slots)]
            rig = make_rig(link, layers, slots, kind=kind, poison=poison, oracle=depths, resident=slots % 2)
            drive(rig, seed=slots)
            if rig.cuda:
                assert rig.cuda.synchronized == 0  # no step waited for the device
            rig.close()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, MOST),
    slots=st.integers(1, MOST),
    kind=st.sampled_from(KINDS),
    abortable=st.booleans(),
    poison=st.booleans(),
    choices=st.lists(st.integers(0, 9), max_size=300),
    passages=st.lists(st.tuples(st.integers(0, MOST), st.frozensets(st.integers(0, MOST))), min_size=1, max_size=6),
)
def test_in_whatever_order_bytes_land(
    layers_directory: Path,
    layers: int,
    slots: int,
    kind: Kind,
    abortable: bool,
    poison: bool,
    choices: list[int],
    passages: list[tuple[int, frozenset[int]]],
) -> None:
    null = {"choices": iter(choices), "abortable": abortable}
    depths = [min(depth, layers) for depth, _ in passages]
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(layers_directory, "null", layers, slots, patch, kind=kind, poison=poison, oracle=depths, null=null)
        for depth, (_, skipped) in zip(depths, passages, strict=True):
            rig.passage(depth, skipped)
        rig.check()
        assert rig.store.wasted_bytes <= rig.store.bytes_streamed <= rig.link.moved()[0] * layout.nbytes
        rig.close()


def test_prefetches_are_called_off_half_way_and_before_they_start(make_rig: Make) -> None:
    """The sweeps above would prove little if this never happened."""
    counts = {"started": 0, "unstarted": 0}

    def counted(rig: Rig) -> None:
        plain = rig.link.cancel

        def cancel(slot: int) -> float:
            share = plain(slot)
            counts["started" if share else "unstarted"] += 1
            return share

        rig.link.cancel = cancel  # type: ignore[method-assign]

    for link in ("cuda-lazy", "null"):
        null = {"choices": iter([0, 1, 0, 2] * 200)}
        rig = make_rig(link, 7, 3, kind="next", null=null if link == "null" else None)
        counted(rig)
        drive(rig, passages=20, seed=4)
    assert min(counts.values()) > 0


# A link that lacks an edge fails.


class UnwaitedCopy(CudaLink):
    """Compute does not wait for the copy."""

    def _let_compute_wait(self, job: _Job) -> None:
        pass


class UnwaitedCompute(CudaLink):
    """The copy does not wait for compute."""

    def _let_copy_wait(self, job: _Job) -> None:
        pass


class UnwaitedRead(CpuLink):
    """Compute does not wait for the reader threads."""

    def wait(self, slot: int) -> float:
        return 0.0


class UnorderedReads(CpuLink):
    """A read does not wait for one into the same slot that was called off and still lands."""

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        ticket = Ticket(self._disk.spans(layer, self._slots.buffers[slot]))
        self._fetches.add(slot, ticket)
        self._reader.submit(ticket, urgent=urgent)


@pytest.mark.parametrize("source", ["cuda", "ring"])
def test_without_the_edge_from_copy_to_compute_the_suite_fails(source: str, make_rig: Make) -> None:
    drive(make_rig(f"{source}-lazy", 5, 2, kind="next", link_type=CudaLink))
    with pytest.raises(AssertionError, match="computed with other bytes"):
        drive(make_rig(f"{source}-lazy", 5, 2, kind="next", link_type=UnwaitedCopy))


@pytest.mark.parametrize("source", ["cuda", "ring"])
def test_without_the_edge_from_compute_to_copy_the_suite_fails(source: str, make_rig: Make) -> None:
    drive(make_rig(f"{source}-eager", 5, 2, kind="next", link_type=CudaLink))
    with pytest.raises(AssertionError, match="computed with other bytes"):
        drive(make_rig(f"{source}-eager", 5, 2, kind="next", link_type=UnwaitedCompute))


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every read of a file takes long: a race made wide enough to lose."""
    plain = SourceFile.read

    def read(self: SourceFile, buffer: memoryview, offset: int, nbytes: int) -> int:
        skip = plain(self, buffer, offset, nbytes)
        time.sleep(seconds)
        return skip

    monkeypatch.setattr(SourceFile, "read", read)


def hold_up_the_first_read(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The first read of a file ends when the event is set."""
    plain, first, may_end = SourceFile.read, [True], threading.Event()

    def read(self: SourceFile, buffer: memoryview, offset: int, nbytes: int) -> int:
        skip = plain(self, buffer, offset, nbytes)
        if first.pop() if first else False:
            assert may_end.wait(10)
        return skip

    monkeypatch.setattr(SourceFile, "read", read)
    return may_end


@pytest.mark.parametrize("link_type", [CpuLink, UnwaitedRead])
def test_without_waiting_for_the_readers_the_suite_fails(
    link_type: type[CpuLink], make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("cpu", 5, 2, kind="next", link_type=link_type)
    slow_down(monkeypatch, 0.002)
    if link_type is CpuLink:
        drive(rig)
    else:
        with pytest.raises(AssertionError, match="computed with other bytes"):
            drive(rig)


@pytest.mark.parametrize("link_type", [CpuLink, UnorderedReads])
def test_a_read_that_was_called_off_never_lands_on_the_next_one(
    link_type: type[CpuLink], make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("cpu", 2, 1, link_type=link_type)
    may_end = hold_up_the_first_read(monkeypatch)
    rig.link.fetch(0, 0)
    while not rig.link.cancel(0):  # until a thread has taken it up
        rig.link.fetch(0, 0)
        time.sleep(0.001)
    rig.link.fetch(1, 0)
    if link_type is CpuLink:
        may_end.set()
        rig.link.wait(0)
        rig.compute(1, dict(rig.slots.parameters(1, 0)))
        rig.check()
    else:  # the second read is done before the first one
        rig.link.wait(0)
        arrived = rig.slots.buffers[0].clone()
        may_end.set()
        deadline = time.monotonic() + 10
        while torch.equal(rig.slots.buffers[0], arrived) and time.monotonic() < deadline:
            time.sleep(0.001)
        rig.compute(1, dict(rig.slots.parameters(1, 0)))
        with pytest.raises(AssertionError, match="computed with other bytes"):
            rig.check()


@pytest.mark.parametrize("link", [*LINKS, "null"])
def test_a_fetch_before_the_layer_was_released_would_show(link: str, make_rig: Make) -> None:
    """The other half of the second edge is the store's: it fetches over no slot that is lent."""
    rig = make_rig(link, 3, 1, null={"choices": iter([9] * 99)} if link == "null" else None)
    rig.store.acquire(0)
    with pytest.raises(Exception, match="all 1 slots are in use"):
        rig.store.acquire(1)
    with pytest.raises(AssertionError, match="is being read"):
        rig.store._transfers.fetch(1, 0)
    rig.store.release(0)
    drive(rig)


# The contract of a link by itself.

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("fetch"), st.integers(0, 2), st.integers(0, MOST - 1), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 2)),
        st.tuples(st.just("use"), st.integers(0, 2)),
        st.tuples(st.just("elapse"), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, choices=st.lists(st.integers(0, 5), max_size=60))
@pytest.mark.parametrize("link", [*LINKS, "null"])
def test_fetches_and_cancels_in_any_order(
    link: str, layers_directory: Path, operations: list[Any], choices: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        null = {"choices": iter(choices)} if link == "null" else None
        rig = Rig(layers_directory, link, MOST, 3, patch, null=null)
        contents: list[list[int | None]] = [[], [], []]  # per slot the layers fetched into it; None: part of one
        for name, slot, *rest in operations:
            content = contents[slot]
            if name == "fetch":
                layer, urgent = rest
                rig.link.fetch(layer, slot, urgent=urgent)
                content.append(layer)
            elif name == "cancel" and content and content[-1] is not None:
                ready = rig.link.ready(slot)
                share = rig.link.cancel(slot)
                # All of it may have begun and its end still be on its way: an abortable link has called it off then.
                if not ready and (share < 1 or rig.link.abortable):
                    content.pop()
                    if share:
                        content.append(None)
            elif name == "use" and content and content[-1] is not None:
                rig.link.wait(slot)
                rig.compute(content[-1], dict(rig.slots.parameters(content[-1], slot)))
                rig.link.release(slot)
                contents[slot] = content[-1:]
            elif name == "elapse" and rig.cuda:
                rig.cuda.run_ahead()
        rig.check()
        rig.close()


def test_an_urgent_fetch_overtakes_and_the_overtaken_one_still_arrives(make_rig: Make) -> None:
    for link in (*LINKS, "null"):
        rig = make_rig(link, MOST, 4, null={"choices": iter(())} if link == "null" else None)
        for slot in range(3):
            rig.link.fetch(slot, slot)
        rig.link.fetch(6, 3, urgent=True)
        for slot, layer in ((3, 6), (0, 0), (1, 1), (2, 2)):
            rig.link.wait(slot)
            rig.compute(layer, dict(rig.slots.parameters(layer, slot)))
            rig.link.release(slot)
        rig.check()
