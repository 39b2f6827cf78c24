"""As much of `torch.cuda` as the link uses, on CPU tensors, as unkind as the real one may be.

Work is queued on streams. On a lazy fake copies land only when something waits for them, and computation runs at once:
it finds a missing wait of compute for a copy. On an eager one the copy streams run as far ahead as their events allow,
and computation reads late, when the test advances its stream: it finds a missing wait of a copy for compute.
`queue_copies` makes `copy_(..., non_blocking=True)` one of the queued kinds of work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class FakeCuda:
    """The namespace. One lock guards all streams: the link's thread and the test's use them."""

    def __init__(self, *, eager: bool = False) -> None:
        self.lock = threading.RLock()
        self.eager = eager
        self.copy_streams: list[FakeStream] = []
        self.compute_stream = FakeStream(self)
        self._current = threading.local()
        self.synchronized = 0

    def Stream(self, device: Any = None) -> FakeStream:
        stream = FakeStream(self)
        self.copy_streams.append(stream)
        return stream

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._current, "stream", self.compute_stream)

    def compute(self, work: Callable[[], None]) -> None:
        """Queue a piece of computation on the compute stream."""
        self.compute_stream.add(work)

    def drain(self) -> None:
        """Let the device do all that was queued, computation first."""
        with self.lock:
            for stream in (self.compute_stream, *self.copy_streams):
                stream.run(force=True)

    def run_ahead(self) -> None:
        """Let the copy streams go as far as their events allow."""
        with self.lock:
            for stream in self.copy_streams:
                stream.run(force=False)


class Marker:
    """A place in a stream."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.done = False


class FakeStream:
    """Does its work in order."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._work: deque[Callable[[], None] | Marker] = deque()

    def add(self, work: Callable[[], None] | Marker) -> None:
        with self._cuda.lock:
            self._work.append(work)
            computes = self is self._cuda.compute_stream
            if self._cuda.eager != computes:
                self.run(force=computes)

    def wait_event(self, event: FakeEvent) -> None:
        """Wait here for what the event has recorded by now; a later record does not count."""
        assert event.marker is not None, "waited for an event that was never recorded"
        self.add(event.marker)

    def synchronize(self) -> None:
        with self._cuda.lock:
            self._cuda.synchronized += 1
            self.run(force=True)

    def run(self, *, force: bool, until: Marker | None = None) -> None:
        """Do the work up to a marker; `force`: make the other streams do what this one waits for."""
        while self._work and not (until is not None and until.done):
            work = self._work[0]
            if isinstance(work, Marker):
                if work.done:
                    self._work.popleft()
                elif force:
                    work.stream.run(force=True, until=work)  # which may get this stream to go on, too
                else:
                    return
                continue
            self._work.popleft()
            work()
            if self._cuda.eager and self is self._cuda.compute_stream:
                self._cuda.run_ahead()


class FakeEvent:
    """Recorded behind what its stream has queued; waiting for it makes the stream do all of that."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.marker: Marker | None = None

    def record(self, stream: FakeStream) -> None:
        marker = Marker(stream)
        self.marker = marker
        stream.add(lambda: setattr(marker, "done", True))

    def query(self) -> bool:
        return self.marker is None or self.marker.done

    def synchronize(self) -> None:
        with self._cuda.lock:
            if self.marker is not None and not self.marker.done:
                self.marker.stream.run(force=True, until=self.marker)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "both events must have happened"
        return 1.0


class FakeRuntime:
    """Registers up to a limit, then fails; the error sticks until somebody asks for it."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}
        self.sticky = 0
        self.tries = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.tries += 1
        if sum(self.registered.values()) + nbytes > self.limit_bytes:
            self.sticky = 2
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]

    def cudaGetLastError(self) -> int:
        error, self.sticky = self.sticky, 0
        return error


def queue_copies(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    """Copies that say `non_blocking` go to the current stream of the fake."""
    copy = torch.Tensor.copy_

    def queued(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(target, source)
        cuda.current_stream().add(lambda: copy(target, source))
        return target

    patch.setattr(torch.Tensor, "copy_", queued)
