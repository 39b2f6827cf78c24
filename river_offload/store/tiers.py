"""Where streamed layers rest: on disk inside the checkpoint's own files, or in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from river_offload.store.layout import Layout


class TensorEntry(Protocol):
    """What a tensor file says of one tensor: torch's name of its dtype ("bfloat16"), its bytes on disk."""

    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class TensorFiles(Protocol):
    """An open checkpoint, as far as a tier needs it (`checkpoint.Checkpoint` is one)."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...
    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor: ...


class DiskTier:
    """Layers resting in the checkpoint's safetensors files, read by offset: no second copy of the model on disk.

    Args:
        checkpoint: the open checkpoint.
        keys: one mapping per layer, from a name inside the layer to its key in the checkpoint.
        layouts: one layout per layer.
    """

    def __init__(self, checkpoint: TensorFiles, keys: Sequence[Mapping[str, str]], layouts: Sequence[Layout]) -> None:
        self._checkpoint = checkpoint
        self._keys = keys
        self._layouts = layouts

    def read(self, layer: int, buffer: torch.Tensor) -> int:
        """Fill `buffer` (uint8, CPU, laid out by the layer's layout); returns the bytes read from disk.

        A tensor whose dtype on disk is the one it computes in is read straight into its place; another is converted
        on the way, through a temporary of that one tensor. Raises LinkError when a read fails or comes up short.
        """
        read_bytes = 0
        for name, view in self._layouts[layer].views(buffer).items():
            key = self._keys[layer][name]
            entry = self._checkpoint.entries[key]
            if entry.dtype == str(view.dtype).removeprefix("torch."):
                self._checkpoint.read(key, out=view)
            else:
                view.copy_(self._checkpoint.read(key))
            read_bytes += entry.nbytes
        return read_bytes


class HostTier:
    """Layers held in host memory, pinned where the platform allows it, one flat buffer each.

    Args:
        layers: the layers to hold; they are read from `disk` here.
        pin: ask for page-locked memory, which the copy engine of a GPU reads directly.
    """

    def __init__(self, disk: DiskTier, layers: Sequence[int], layouts: Sequence[Layout], *, pin: bool) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        for layer in layers:
            buffer = torch.empty(layouts[layer].nbytes, dtype=torch.uint8, pin_memory=pin)
            disk.read(layer, buffer)
            self._buffers[layer] = buffer

    def buffer(self, layer: int) -> torch.Tensor:
        """The layer's bytes: uint8, CPU."""
        return self._buffers[layer]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
