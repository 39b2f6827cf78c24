"""Reader threads: the right bytes in the right order, and for everything that goes wrong an error and no hang."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from river_offload.errors import LinkError
from river_offload.store import files
from river_offload.store.files import BLOCK_BYTES, SourceFile
from river_offload.store.reader import PIECE_BYTES, Reader, Span, Ticket

SIZE = 3 * PIECE_BYTES + 5000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "bytes.bin"
    path.write_bytes(torch.randint(256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy())
    return path


@pytest.fixture
def reader() -> Iterator[Reader]:
    before = set(threading.enumerate())
    reader = Reader()
    yield reader
    reader.close()
    assert set(threading.enumerate()) <= before


def opened(path: Path, kind: type[SourceFile] = SourceFile) -> Any:
    fd = os.open(path, os.O_RDONLY)
    source = kind(path, fd)
    os.close(fd)  # it has its own
    return source


def span(source: SourceFile, offset: int, nbytes: int) -> Span:
    return Span(source, offset, nbytes, torch.zeros(nbytes, dtype=torch.uint8), torch.uint8)


class Gated(SourceFile):
    """Lets reads of a file through one by one and notes their order."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.gate = threading.Semaphore(0)
        self.offsets: list[int] = []

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> int:
        self.offsets.append(offset)
        self.gate.acquire()
        return super().read(buffer, offset, nbytes)


def until(condition: Callable[[], bool]) -> None:
    """Wait for threads to get somewhere."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "the threads did not get there"
        time.sleep(0.001)


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


# Faults.


def failing(path: Path, error: BaseException) -> Any:
    class Failing(SourceFile):
        def read(self, buffer: memoryview, offset: int, nbytes: int) -> int:
            if offset >= PIECE_BYTES:
                raise error
            return super().read(buffer, offset, nbytes)

    return opened(path, Failing)


def test_a_disk_error_names_file_and_place(reader: Reader, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = opened(path)
    monkeypatch.setattr(files.os, "preadv", broken)
    ticket = Ticket([span(source, 5000, 10)])
    reader.submit(ticket)
    with pytest.raises(LinkError, match=rf"bytes\.bin: reading {BLOCK_BYTES} bytes at byte 4096 failed: Input/output"):
        reader.wait(ticket)
    with pytest.raises(LinkError, match="Input/output"):
        reader.wait(ticket)
    monkeypatch.undo()
    again = Ticket([span(source, 5000, 10)])
    reader.submit(again)
    reader.wait(again)
    source.close()


def test_a_file_that_shrank_says_where_it_ends(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.bin"
    path.write_bytes(bytes(SIZE))
    source = opened(path)
    os.truncate(path, PIECE_BYTES + 777)
    ticket = Ticket([span(source, 64, SIZE - 64)])
    reader.submit(ticket)
    with pytest.raises(LinkError, match=r"shrinks\.bin: ends at byte (\d+), expected bytes \d+ to \d+"):
        reader.wait(ticket)
    source.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("threads", [1, 4])
def test_a_thread_that_dies_leaves_nobody_waiting_and_is_replaced(path: Path, threads: int) -> None:
    reader, source = Reader(threads), failing(path, RuntimeError("a bug"))
    dying, behind = Ticket([span(source, 0, SIZE)]), Ticket([span(source, 0, 10)])
    reader.submit(dying)
    reader.submit(behind)
    with pytest.raises(LinkError, match=r"bytes\.bin: a reader thread died at byte \d+"):
        reader.wait(dying)
    if threads == 1:
        with pytest.raises(LinkError, match="last reader thread ended: RuntimeError"):
            reader.wait(behind)
    again = Ticket([span(source, 0, 10)])
    reader.submit(again)
    reader.wait(again)
    reader.close()


def test_closing_ends_the_threads_and_fails_what_is_left(path: Path) -> None:
    before = threading.active_count()
    reader, source = Reader(2), opened(path, Gated)
    running, waiting = (Ticket([span(source, 0, SIZE)]) for _ in range(2))
    reader.submit(running)
    reader.submit(waiting)
    until(lambda: len(source.offsets) == 2)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            reader.wait(running)
        except LinkError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=reader.close)
    closer.start()
    until(lambda: waiting.done)
    source.gate.release(2)  # pieces under way land
    closer.join(10)
    waiter.join(10)
    assert threading.active_count() == before
    assert "closed" in str(failures[0])
    assert len(source.offsets) == 2
    with pytest.raises(LinkError, match="closed"):
        reader.submit(Ticket([]))
    reader.close()
    source.close()
    source.close()


def test_ctrl_c_while_waiting_leaves_the_ticket_as_it_is(reader: Reader, path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
    source = opened(path, Gated)
    whole = span(source, 0, SIZE)
    ticket = Ticket([whole])
    reader.submit(ticket)
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        reader.wait(ticket)
    timer.join()
    signal.signal(signal.SIGINT, before)
    source.gate.release(9)
    reader.wait(ticket)
    assert whole.target.numpy().tobytes() == path.read_bytes()
    source.close()
