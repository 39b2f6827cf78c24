"""The standard streams of a command: closed, full or hung up, they are an error of one line or nothing at all."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from river_offload.errors import RiverError, UsageError


class OutputError(RiverError):
    """Standard output cannot be written."""


def guard_standard_streams() -> None:
    """Make the three streams of this process safe to use. For `main`, before anything is written.

    Standard output raises OutputError where a file raises OSError (BrokenPipeError stays what it is); what standard
    error cannot take is dropped; a closed stream exists and fails when it is used. Text that cannot be shown gets a
    replacement, and what is no text on standard input arrives as lone surrogates, which whoever encodes it refuses.
    """
    # Lowest first, since the lowest free number is given. Left closed, a number would go to the next file opened, and
    # a library that writes to standard error would write into that one. The wrong direction makes each use fail.
    for descriptor, direction in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, direction)
    if _is_ours(sys.stdout, 1):
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.stdout)
    if _is_ours(sys.stderr, 2):
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.stderr)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), errors="surrogateescape")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def require_stdout() -> None:
    """Raises OutputError when standard output takes nothing: before a model is loaded, not after it has written."""
    try:
        os.write(sys.stdout.fileno(), b"")  # a write of nothing fails where any write would
    except io.UnsupportedOperation:
        pass  # not a file: a caller's own stream
    except OSError as error:
        raise _unwritable(error) from error


def require_stdin() -> None:
    """Raises UsageError when standard input cannot be read."""
    try:
        os.read(sys.stdin.fileno(), 0)
    except io.UnsupportedOperation:
        pass
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError) -> UsageError:
    """What to raise when reading standard input fails."""
    return UsageError(f"standard input cannot be read: {reason(error)}")


class _Stdout(io.FileIO):
    """Its first failure is an OutputError; what comes after is dropped, or Python's flush at exit would fail again."""

    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:
            return memoryview(data).nbytes
        try:
            return _write(super(), self, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed = True
            raise _unwritable(error) from error


class _Stderr(io.FileIO):
    """Takes everything. A message that nobody can see must not end the work that it is about."""

    def write(self, data: Any, /) -> int:
        try:
            return _write(super(), self, data)
        except OSError:
            return memoryview(data).nbytes


def _write(raw: Any, stream: io.FileIO, data: Any) -> int:
    # A terminal or pipe that another program has set to non-blocking takes nothing while it is full.
    while (written := raw.write(data)) is None:
        select.select([], [stream], [])
    return int(written)


def _is_ours(stream: TextIO | None, descriptor: int) -> bool:
    """Whether `stream` is that of the process: a caller's own one is left alone. None is what a closed one becomes."""
    try:
        return stream is None or stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _text(raw: io.FileIO, old: TextIO | None) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=None if old is None else old.encoding,
        # Text that a model wrote must not end in a traceback.
        errors="replace",
        line_buffering=raw.fileno() == 2 or raw.isatty(),
    )


def _unwritable(error: OSError) -> OutputError:
    return OutputError(f"standard output cannot be written: {reason(error)}")


def reason(error: OSError) -> str:
    """Why a stream cannot be used, in words."""
    return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
