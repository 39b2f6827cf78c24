"""Reader threads: the right bytes in the right order."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import SIZE, Gated, opened, span, until

from river_offload.errors import LinkError
from river_offload.store import files
from river_offload.store.files import SourceFile
from river_offload.store.pieces import PIECE_BYTES, Span
from river_offload.store.reader import Reader, Ticket


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), min_size=1, max_size=5))
def test_any_ranges_are_those_of_the_file(path: Path, ranges: list[tuple[int, int]]) -> None:
    expected = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    reader, source = Reader(3), opened(path)
    spans = [span(source, min(a, b), max(a, b) - min(a, b)) for a, b in ranges]
    ticket = Ticket(spans)
    reader.submit(ticket)
    reader.wait(ticket)
    assert ticket.landed_bytes == ticket.started_bytes == ticket.nbytes == sum(s.nbytes for s in spans)
    for each in spans:
        assert torch.equal(each.target, expected[each.offset : each.offset + each.nbytes])
    reader.close()
    source.close()


@pytest.mark.parametrize("offset", [0, 8, 4098, 4099])
@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_values_are_converted_on_the_way(reader: Reader, path: Path, offset: int, stored: str, wanted: str) -> None:
    kind, target = getattr(torch, stored), torch.empty(600_001, dtype=getattr(torch, wanted))
    nbytes = len(target) * kind.itemsize
    source = opened(path)
    ticket = Ticket([Span(source, offset, nbytes, target, kind)])
    reader.submit(ticket)
    reader.wait(ticket)
    expected = torch.frombuffer(bytearray(path.read_bytes()[offset : offset + nbytes]), dtype=kind).to(target.dtype)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    source.close()


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    reader: Reader, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, dropped = os.preadv, []
    source = opened(path)
    direct_fd = source._direct_fd

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if fd == direct_fd:
            raise OSError(errno.EINVAL, "not here")
        return plain(fd, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", refuse)
    monkeypatch.setattr(files.os, "posix_fadvise", lambda fd, *range_: dropped.append(range_))
    whole = span(source, 100, SIZE - 100)
    ticket = Ticket([whole])
    reader.submit(ticket)
    reader.wait(ticket)
    assert not source.direct
    assert whole.target.numpy().tobytes() == path.read_bytes()[100:]
    assert {advice for _, _, advice in dropped} == {os.POSIX_FADV_DONTNEED}
    assert sum(nbytes for _, nbytes, _ in dropped) >= SIZE - 100
    source.close()


def test_a_file_replaced_at_its_path_is_still_the_one_that_was_opened(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "replaced.bin"
    path.write_bytes(b"a" * 9000)
    fd = os.open(path, os.O_RDONLY)
    path.rename(tmp_path / "old.bin")
    path.write_bytes(b"b" * 9000)
    source = SourceFile(path, fd)
    os.close(fd)
    whole = span(source, 0, 9000)
    ticket = Ticket([whole])
    reader.submit(ticket)
    reader.wait(ticket)
    assert whole.target.numpy().tobytes() == b"a" * 9000
    source.close()


# Order.


def test_tickets_are_read_in_turn_and_an_urgent_one_first(path: Path) -> None:
    reader, source = Reader(1), opened(path, Gated)
    tickets = [Ticket([span(source, offset, 10)]) for offset in (0, 10_000, 20_000, 30_000)]
    for ticket in tickets[:3]:
        reader.submit(ticket)
    until(lambda: source.offsets == [0])
    reader.submit(tickets[3], urgent=True)
    source.gate.release(4)
    for ticket in tickets:
        reader.wait(ticket)
    assert source.offsets == [0, 30_000, 10_000, 20_000]
    reader.close()


def test_a_ticket_starts_when_the_one_before_it_has_landed(reader: Reader, path: Path) -> None:
    """Also when that one was called off half-way: what was under way still lands, and must not land later."""
    source = opened(path, Gated)
    first = Ticket([span(source, 0, 3 * PIECE_BYTES)])
    reader.submit(first)
    until(lambda: len(source.offsets) == 3)
    second = Ticket([span(source, 8, 8)], after=[first])
    reader.submit(second, urgent=True)
    reader.cancel(first)
    source.gate.release(2)
    until(lambda: first.landed_bytes == 2 * PIECE_BYTES)
    time.sleep(0.02)
    assert len(source.offsets) == 3
    source.gate.release(2)
    reader.wait(second)
    assert first.done
    source.close()


def test_a_cancelled_ticket_drops_what_has_not_started(path: Path) -> None:
    reader, source = Reader(1), opened(path, Gated)
    running, waiting = (Ticket([span(source, 0, 3 * PIECE_BYTES)]) for _ in range(2))
    reader.submit(running)
    reader.submit(waiting)
    until(lambda: len(source.offsets) == 1)
    assert reader.cancel(waiting) == 0
    assert waiting.done
    assert reader.cancel(running) == PIECE_BYTES
    assert not running.done
    source.gate.release(9)
    with pytest.raises(LinkError, match="called off"):
        reader.wait(running)
    last = Ticket([span(source, 0, 10)])
    reader.submit(last)
    reader.wait(last)
    assert source.offsets == [0, 0]
    assert reader.cancel(last) == 10
    reader.wait(last)  # it had landed
    reader.close()


def test_moved_counts_bytes_and_the_time_they_took(path: Path) -> None:
    reader, source = Reader(2), opened(path, Gated)
    assert reader.moved() == (0, 0.0)
    ticket = Ticket([span(source, 0, 2 * PIECE_BYTES)])
    reader.submit(ticket)
    until(lambda: len(source.offsets) == 2)
    time.sleep(0.02)
    assert reader.moved()[1] >= 0.02
    source.gate.release(2)
    reader.wait(ticket)
    moved_bytes, busy_s = reader.moved()
    time.sleep(0.01)
    assert (moved_bytes, reader.moved()[1]) == (2 * PIECE_BYTES, busy_s)
    reader.close()
