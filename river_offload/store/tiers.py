"""Where streamed layers rest: on disk inside the checkpoint's own files, or in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from river_offload.store.files import SourceFile
from river_offload.store.layout import Layout
from river_offload.store.pieces import Span
from river_offload.store.pinned import HostMemory
from river_offload.store.reader import Reader, Ticket


class TensorEntry(Protocol):
    """What a tensor file says of one tensor: its place in the file, torch's name of its dtype ("bfloat16")."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class TensorFiles(Protocol):
    """An open checkpoint, as far as a tier needs it (`checkpoint.Checkpoint` is one)."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...
    def fd(self, file: Path) -> int: ...


class DiskTier:
    """Layers resting in the checkpoint's safetensors files, read by offset: no second copy of the model on disk.

    Args:
        checkpoint: the open checkpoint; it may be closed before this is.
        keys: one mapping per layer, from a name inside the layer to its key in the checkpoint.
        layouts: one layout per layer.
        reader: the threads that read; closed with the tier.

    Attributes:
        layer_bytes: bytes on disk of the largest layer.
    """

    def __init__(
        self,
        checkpoint: TensorFiles,
        keys: Sequence[Mapping[str, str]],
        layouts: Sequence[Layout],
        reader: Reader | None = None,
    ) -> None:
        self._entries = [{name: checkpoint.entries[key] for name, key in layer.items()} for layer in keys]
        largest_bytes = max((entry.nbytes for layer in self._entries for entry in layer.values()), default=0)
        self.reader = reader or Reader(largest_bytes=largest_bytes)
        self._layouts = layouts
        self.layer_bytes = max((self.stored_bytes(layer) for layer in range(len(keys))), default=0)
        paths = {entry.file for layer in self._entries for entry in layer.values()}
        self._files = {path: SourceFile(path, checkpoint.fd(path)) for path in paths}

    def stored_bytes(self, layer: int) -> int:
        """Bytes of the layer on disk."""
        return sum(entry.nbytes for entry in self._entries[layer].values())

    def spans(self, layer: int, buffer: torch.Tensor, start: int = 0, stop: int | None = None) -> list[Span]:
        """What to read so that `buffer` (uint8, CPU) holds the bytes `start` to `stop` of the layer's layout.

        `start` is a multiple of the layout's alignment. A tensor whose dtype on disk is not the one it computes in is
        converted on its way.
        """
        spans = []
        for item in self._layouts[layer].entries:
            first, last = max(start, item.offset), item.offset + item.nbytes
            if stop is not None:
                last = min(last, stop)
            if first >= last:
                continue
            entry = self._entries[layer][item.name]
            stored: torch.dtype = getattr(torch, entry.dtype)
            offset, nbytes = ((n // item.dtype.itemsize) * stored.itemsize for n in (first - item.offset, last - first))
            target = buffer[first - start : last - start].view(item.dtype)
            spans.append(Span(self._files[entry.file], entry.offset + offset, nbytes, target, stored))
        return spans

    def read(self, layer: int, buffer: torch.Tensor) -> int:
        """Fill `buffer` (uint8, CPU, laid out by the layer's layout) now; returns the bytes read from disk.

        Raises LinkError when a read fails or comes up short.
        """
        ticket = Ticket(self.spans(layer, buffer))
        self.reader.submit(ticket)
        try:
            self.reader.wait(ticket)
        finally:
            self.reader.cancel(ticket)  # an interrupt: the buffer is about to go
        return ticket.nbytes

    def close(self) -> None:
        """End the threads and close the files. May be called twice."""
        self.reader.close()
        for file in self._files.values():
            file.close()


class HostTier:
    """Layers held in host memory, one flat buffer each.

    Args:
        disk: they are read from there, straight into their buffers.
        layers: the layers to hold.
        layouts: one layout per layer.
        memory: gives the buffers; closed with the tier.

    Raises LinkError when a layer cannot be read.
    """

    def __init__(self, disk: DiskTier, layers: Sequence[int], layouts: Sequence[Layout], memory: HostMemory) -> None:
        self.memory = memory
        self._buffers: dict[int, torch.Tensor] = {}
        for layer in layers:
            buffer = memory.allocate(layouts[layer].nbytes)
            self._buffers[layer] = buffer
            disk.read(layer, buffer)

    def buffer(self, layer: int) -> torch.Tensor | None:
        """The layer's bytes: uint8, CPU; None when it is not held."""
        return self._buffers.get(layer)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def close(self) -> None:
        """Give the memory back; no copy from it may be under way."""
        self._buffers.clear()
        self.memory.close()
