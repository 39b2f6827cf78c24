"""One file, read by position from any number of threads, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from river_offload.errors import LinkError

BLOCK_BYTES = 4096
"""What O_DIRECT asks of offsets, lengths and addresses at most (a disk's own block is 512 or 4096 bytes)."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What file systems answer that open a file with O_DIRECT and then cannot read it so."""


class SourceFile:
    """Reads ranges of one file. The descriptors are its own: whoever opened the file may close it.

    Args:
        path: names the file in errors.
        fd: an open descriptor of it. It is opened again through the descriptor, so that a file which was replaced at
            its path is still the one that was checked.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = os.dup(fd)
        self._direct_fd = _open_direct(fd)
        self._direct = self._direct_fd is not None

    @property
    def direct(self) -> bool:
        """Do reads go past the page cache? Otherwise they go through it, and what they leave there is dropped."""
        return self._direct

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> int:
        """Read the range into `buffer` and return the place in `buffer` where it begins.

        `buffer` starts at a multiple of BLOCK_BYTES in memory and has room for the whole blocks around the range.
        Raises LinkError that says where the read failed or where the file ended.
        """
        start = offset // BLOCK_BYTES * BLOCK_BYTES
        skip = offset - start
        needed = skip + nbytes
        whole = -(-needed // BLOCK_BYTES) * BLOCK_BYTES
        done = 0
        while done < needed:
            count = self._read_once(buffer[done:whole], start + done)
            if done + count >= needed:
                break
            # A short count is rare before the end of a file. A direct read goes on at a whole block, so the rest of
            # the last one is read again; when that brings nothing new the file has no more.
            resumed = (done + count) // BLOCK_BYTES * BLOCK_BYTES
            if resumed == done:
                raise LinkError(
                    f"{self.path}: ends at byte {start + done + count}, expected bytes {offset} to {offset + nbytes}. "
                    "The file was changed while in use: restore it and load again."
                )
            done = resumed
        if not self._direct:
            os.posix_fadvise(self._fd, start, whole, os.POSIX_FADV_DONTNEED)
        return skip

    def close(self) -> None:
        """Close the descriptors; no read may be under way. May be called twice."""
        for fd in (self._fd, self._direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct_fd, self._direct = -1, None, False

    def _read_once(self, memory: memoryview, position: int) -> int:
        fd = self._direct_fd if self._direct and self._direct_fd is not None else self._fd
        try:
            return os.preadv(fd, [memory], position)
        except OSError as error:
            if fd != self._fd and error.errno in _NOT_DIRECT:
                self._direct = False  # the descriptor stays open: another thread may be reading from it
                return self._read_once(memory, position)
            raise LinkError(
                f"{self.path}: reading {len(memory)} bytes at byte {position} failed: {error.strerror}. "
                "Check the disk, or copy the checkpoint to another one."
            ) from error


def _open_direct(fd: int) -> int | None:
    """The same file once more, for reading past the page cache; None where that is not possible."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux only, and so is /proc
    if not flag:
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError:
        return None
