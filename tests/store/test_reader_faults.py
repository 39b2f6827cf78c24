"""What goes wrong under reader threads: for each an error that names file and place, and no hang."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from source_files import SIZE, Gated, opened, span, until

from river_offload.errors import LinkError
from river_offload.store import files
from river_offload.store.files import BLOCK_BYTES, SourceFile
from river_offload.store.pieces import PIECE_BYTES
from river_offload.store.reader import Reader, Ticket


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
