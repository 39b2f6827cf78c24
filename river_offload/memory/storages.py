"""Counts real storages: what a set of tensors holds, and how high a computation's own allocations rise."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Born:
    """A storage that came into being, and what it is counted as."""

    nbytes: int
    tag: str


class StorageMeter(TorchDispatchMode):
    """Counts the storages that come into being while it is entered, until they die. Works on fake tensors too.

    What an operator allocates and frees inside itself never appears as a tensor and is not seen.

    Args:
        where: names what is going on; a storage is counted under the name in force when it is born.
        device: count what is on it; None for all.

    Attributes:
        current_bytes: alive now.
        peak_bytes: the most that was alive at once.
    """

    def __init__(self, where: Callable[[], str] = lambda: "", device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self._where = where
        self._alive: dict[int, _Born] = {}
        self._at_peak: tuple[_Born, ...] = ()

    def peak_by_tag(self) -> dict[str, int]:
        """Bytes that were alive at the peak, by name; their sum is `peak_bytes`."""
        found: Counter[str] = Counter()
        for born in self._at_peak:
            found[born.tag] += born.nbytes
        return dict(found)

    def current_by_tag(self) -> dict[str, int]:
        """Bytes that are alive now, by name."""
        found: Counter[str] = Counter()
        for born in self._alive.values():
            found[born.tag] += born.nbytes
        return dict(found)

    def claim(self, tensors: Iterable[torch.Tensor | None], tag: str) -> None:
        """Count the storages behind `tensors` under `tag` after all, in a peak that has passed, too."""
        for tensor in tensors:
            if tensor is not None and (born := self._alive.get(tensor.untyped_storage()._cdata)):
                born.tag = tag

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            # The storage of a fake tensor is on device "meta", whatever the tensor says.
            if isinstance(tensor, torch.Tensor) and self._device in (None, tensor.device):
                self._count(tensor.untyped_storage(), known)
        return result

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key = storage._cdata
        if key in known or key in self._alive:
            return
        born = self._alive[key] = _Born(storage.nbytes(), self._where())
        self.current_bytes += born.nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            # The records themselves: what a storage turns out to be is often known only when it is handed on.
            self._at_peak = tuple(self._alive.values())
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        if born := self._alive.pop(key, None):
            self.current_bytes -= born.nbytes
