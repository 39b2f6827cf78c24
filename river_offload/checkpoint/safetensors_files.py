"""A safetensors checkpoint on disk, one tensor at a time.

Opening one reads headers only. Reading a tensor is one positional read straight into the tensor's memory, so any
number of threads may read at once, nothing is mapped, and the page cache is left as it was found.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from river_offload.checkpoint.headers import DTYPE_NAMES, Header, TensorEntry, read_header, shards_of
from river_offload.checkpoint.keys import match_keys
from river_offload.errors import CheckpointError, LinkError

_READ_BYTES = 16 << 20  # per system call: how long Ctrl-C waits, and how much page cache a read may occupy
_SAMPLES, _SAMPLE_BYTES = 8, 512  # spread over every tensor, in the fingerprint


class Checkpoint:
    """An open, checked checkpoint. Use as a context manager, or call `close()`.

    Attributes:
        directory: the folder it was opened from.
        entries: every tensor of the checkpoint, by the checkpoint's own name.
        dtype: torch's name of the dtype that most bytes have ("bfloat16").
        total_bytes: bytes of all tensors.
        fingerprint: hex digest that tells checkpoints apart: headers, sizes, samples from all over every tensor.
        notes: remarks for the user: files and tensors ignored, mixed dtypes.
    """

    def __init__(
        self, directory: Path, headers: Mapping[str, Header], entries: Mapping[str, TensorEntry], notes: list[str]
    ) -> None:
        """Take over checked headers; `Checkpoint.open` is the way in."""
        self.directory = directory
        self.entries = dict(entries)
        self.notes = notes
        self.total_bytes = sum(entry.nbytes for entry in entries.values())
        self.dtype = self._common_dtype()
        self._fds: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._fds)
        try:
            for name in headers:
                self._fds[directory / name] = _open_for_reading(directory / name)
            self.fingerprint = self._fingerprint(headers)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Open the checkpoint in `directory` (one `*.safetensors`, or shards with an index) and check it whole.

        Raises CheckpointError, naming the file, for a missing or cut shard, a header that contradicts its file, an
        index that names a tensor its shard does not hold, or a folder with no safetensors in it.
        """
        directory = Path(directory)
        shards, notes = shards_of(directory)
        headers = {name: read_header(directory / name) for name in sorted(shards)}
        entries: dict[str, TensorEntry] = {}
        for name, wanted in shards.items():
            found = headers[name].entries
            if wanted is None:
                wanted = set(found)
            elif absent := wanted - set(found):
                raise CheckpointError(
                    f"{directory / name}: the index expects tensor {min(absent)!r} in it ({len(absent)} such); the "
                    "file does not hold it. Index and shard are of different downloads: download both again."
                )
            if extra := set(found) - wanted:
                notes.append(f"{name}: {len(extra)} tensors that the index does not list are ignored ({min(extra)})")
            entries.update((key, found[key]) for key in sorted(wanted))
        return cls(directory, headers, entries, notes)

    def check_keys(self, expected: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> dict[str, str]:
        """Find the tensors that a model expects: {expected name: name in `entries`}.

        Args:
            expected: shape by name of the parameters and persistent buffers of the model.
            tied: {name: name it shares its tensor with}, such as {"lm_head.weight": "model.embed_tokens.weight"}.

        Tied names that the checkpoint does not repeat are left out of the result; tensors that the model does not
        ask for are ignored and noted. Raises CheckpointError for a missing tensor, another shape or dtype.
        """
        matched = match_keys(self.entries, expected, tied, self.directory)
        surplus = sorted(set(self.entries) - set(matched.values()))
        if surplus:
            self.notes.append(f"{len(surplus)} tensors the model does not use are ignored ({surplus[0]}, ...)")
        return matched

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read tensor `name` into `out`, or into a new CPU tensor, and return it.

        `out` is a contiguous CPU tensor of the entry's dtype and number of elements (ValueError otherwise). Safe to
        call from several threads. Raises LinkError, naming file and offset, when the bytes cannot be had.
        """
        entry = self.entries[name]
        dtype = _torch_dtype(name, entry)
        if out is None:
            out = torch.empty(entry.shape, dtype=dtype)
        elif (out.dtype, out.device.type, out.nbytes) != (dtype, "cpu", entry.nbytes) or not out.is_contiguous():
            raise ValueError(f"{name!r} needs a contiguous CPU tensor of {dtype} {list(entry.shape)}, got {out.shape}")
        if entry.nbytes:
            self._read_into(out.detach().reshape(-1).view(torch.uint8).numpy().data, entry)
        return out

    def mmap_tensor(self, name: str) -> torch.Tensor:
        """Tensor `name` mapped from its file: it takes memory only where it is read, and the kernel may drop it.

        The mapping is private, so a write would change a copy of the page and never the file. It outlives `close()`.
        """
        entry = self.entries[name]
        dtype = _torch_dtype(name, entry)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        start = entry.offset % mmap.ALLOCATIONGRANULARITY
        view = mmap.mmap(
            self._fd(entry.file), start + entry.nbytes, access=mmap.ACCESS_COPY, offset=entry.offset - start
        )
        view.madvise(mmap.MADV_RANDOM)  # single rows are looked up: reading ahead would only evict other pages
        flat = torch.frombuffer(view, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=start)
        return flat.view(entry.shape)

    def close(self) -> None:
        """Close the files; tensors already read or mapped stay valid. Calling it again does nothing."""
        _close_all(self._fds)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fd(self, file: Path) -> int:
        if file not in self._fds:
            raise LinkError(f"{file}: the checkpoint was closed; open it again to read from it.")
        return self._fds[file]

    def _read_into(self, memory: memoryview, entry: TensorEntry) -> None:
        """Fill `memory` with the bytes of `entry`, then tell the kernel that nobody will want them again soon."""
        fd = self._fd(entry.file)
        done = 0
        while done < entry.nbytes:
            position = entry.offset + done
            try:
                count = os.preadv(fd, [memory[done : done + _READ_BYTES]], position)
            except OSError as error:
                raise LinkError(f"{entry.file}: reading at byte {position} failed: {error.strerror}.") from error
            if count == 0:
                raise LinkError(
                    f"{entry.file}: ends at byte {position}, expected bytes up to {entry.offset + entry.nbytes}. "
                    "The file was changed while in use: restore it and load again."
                )
            os.posix_fadvise(fd, position, count, os.POSIX_FADV_DONTNEED)
            done += count

    def _common_dtype(self) -> str:
        weights: Counter[str] = Counter()
        for entry in self.entries.values():
            if entry.dtype in DTYPE_NAMES.values():
                weights[entry.dtype] += entry.nbytes
        if not weights:
            raise CheckpointError(f"{self.directory}: no tensor in F32, BF16 or F16; this is no checkpoint of a model.")
        ranked = [name for name, _ in weights.most_common()]
        if len(ranked) > 1:
            self.notes.append(f"mixed dtypes: mostly {ranked[0]}, also {', '.join(ranked[1:])}")
        return ranked[0]

    def _fingerprint(self, headers: Mapping[str, Header]) -> str:
        digest = hashlib.sha256()
        for name in sorted(headers):
            digest.update(headers[name].raw + headers[name].file_bytes.to_bytes(8, "little"))
        for _, entry in sorted(self.entries.items()):
            step = max(entry.nbytes // _SAMPLES, _SAMPLE_BYTES)
            for start in range(0, entry.nbytes, step):
                sample = bytearray(min(entry.nbytes - start, _SAMPLE_BYTES))
                if os.preadv(self._fd(entry.file), [sample], entry.offset + start) != len(sample):
                    raise CheckpointError(f"{entry.file}: became shorter while it was opened.")
                digest.update(sample)
        return digest.hexdigest()


def _close_all(fds: dict[Path, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _open_for_reading(file: Path) -> int:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened: {error.strerror}.") from error
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # tensors are read whole: let the kernel read ahead
    return fd


def _torch_dtype(name: str, entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in DTYPE_NAMES.values():
        raise CheckpointError(f"{entry.file}: {name!r} has dtype {entry.dtype}; expected F32, BF16 or F16.")
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype
