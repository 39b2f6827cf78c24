"""Counts real storages: what a set of tensors holds, and how high a computation's own allocations rise."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def storage_bytes(tensors: Iterable[torch.Tensor | None], device: torch.device | None = None) -> int:
    """Bytes of the distinct storages behind `tensors`, those on `device` only when one is given."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and (device is None or tensor.device == device):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class StorageMeter(TorchDispatchMode):
    """Counts the storages that come into being while it is entered, until they die. Works on fake tensors too.

    What an operator allocates and frees inside itself never appears as a tensor and is not seen.

    Args:
        device: count what is on it; None for all.

    Attributes:
        current_bytes: alive now.
        peak_bytes: the most that was alive at once.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), known)
        return result

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key = storage._cdata
        if key in known or key in self._alive or self._device not in (None, storage.device):
            return
        nbytes = storage.nbytes()
        self._alive[key] = nbytes
        self.current_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current_bytes -= self._alive.pop(key, 0)
