"""Host or disk to device: the link of a GPU, on a copy stream and a thread of its own.

The thread issues the copies chunk by chunk and never far ahead, so that a fetch which turns out to be useless stops
within milliseconds. What computes is ordered against what copies by events alone; the calling thread waits only until
the last copy of the layer it needs has been issued.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from river_offload.errors import LinkError
from river_offload.store.link import Fetches
from river_offload.store.ring import Chunk, HostSource
from river_offload.store.slots import Slots

CHUNKS_AHEAD = 2
"""Copies that are issued and not done: the engine never runs dry, and no more than these are lost to a change of
mind."""


class _Job:
    """A layer on its way into a slot. Guarded by the link's lock."""

    def __init__(self, layer: int, slot: int, nbytes: int, computed: Any | None, cuda: Any) -> None:
        self.layer = layer
        self.slot = slot
        self.nbytes = nbytes
        self.computed = computed
        """Event behind the last computation that reads the slot; None when there was none."""
        self.begun = cuda.Event(enable_timing=True)
        self.copied = cuda.Event(enable_timing=True)
        self.issued_bytes = 0
        self.wanted = False
        """Computation waits for it: it will not be called off any more."""
        self.cancelled = False
        self.interrupted = False
        self.error: LinkError | None = None
        self.done = False
        """No more of it will be issued."""


class CudaLink:
    """Copies layers into slots beside the computation.

    Args:
        source: the layers' bytes in host memory, chunk by chunk; closed with the link.
        slots: where they go.
        layer_bytes: bytes of each layer's layout.
        device: the GPU.
        cuda: the `torch.cuda` namespace; a fake one, whose copies land only when something waits for them, finds a
            missing wait without a GPU.
    """

    abortable = True

    def __init__(
        self, source: HostSource, slots: Slots, layer_bytes: dict[int, int], device: torch.device, *, cuda: Any
    ) -> None:
        self._source = source
        self._slots = slots
        self._layer_bytes = layer_bytes
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._computed: list[Any | None] = [None] * len(slots)
        self._fetches: Fetches[_Job] = Fetches(len(slots))
        self._changed = threading.Condition()
        self._queue: list[_Job] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._timing: deque[_Job] = deque()
        self._moved = [0.0, 0.0]

    @property
    def stream(self) -> Any:
        """What copies: for others that share the link."""
        return self._stream

    def fetch(self, layer: int, slot: int, *, urgent: bool = False) -> None:
        """Queue the layer's copies, behind the last computation that reads the slot."""
        if self._closed:
            raise LinkError("the link is closed: load the model again")
        job = _Job(layer, slot, self._layer_bytes[layer], self._computed[slot], self._cuda)
        self._fetches.add(slot, job)  # first, so that whatever happens it can be called off
        with self._changed:
            same_slot = [index for index, other in enumerate(self._queue) if other.slot == slot]
            place = (same_slot[-1] + 1 if same_slot else 0) if urgent else len(self._queue)
            self._queue.insert(place, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="river-link", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, slot: int) -> float:
        """Order what the current stream computes next behind the copies, as soon as they are all issued."""
        job = self._fetches.newest(slot)
        if job is None:
            return 0.0
        started_s = time.perf_counter()
        with self._changed:
            job.wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: job.done)  # the link thread issues it, or ends and says why not
        if job.error is not None:
            raise LinkError(*job.error.args) from job.error
        self._let_compute_wait(job)
        return time.perf_counter() - started_s

    def ready(self, slot: int) -> bool:
        job = self._fetches.newest(slot)
        return job is None or (job.done and (job.error is not None or bool(job.copied.query())))

    def progress(self, slot: int) -> float:
        job = self._fetches.newest(slot)
        return 1.0 if job is None else job.issued_bytes / job.nbytes

    def release(self, slot: int) -> None:
        """Mark where in the compute stream the slot was last read."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        self._computed[slot] = event

    def cancel(self, slot: int) -> float:
        """Issue no more of the fetch. Copies into the slot that follow are on the same stream, hence behind it."""
        job = self._fetches.newest(slot)
        if job is None:
            return 0.0
        with self._changed:
            if not job.done:
                job.cancelled = job.done = True
                self._queue = [other for other in self._queue if other is not job]
                self._changed.notify_all()
            return job.issued_bytes / job.nbytes

    def moved(self) -> tuple[float, float]:
        """From the events around each layer's copies, of those that are known to be done."""
        while self._timing and self._timing[0].copied.query():
            job = self._timing.popleft()
            self._moved[0] += 1
            self._moved[1] += job.begun.elapsed_time(job.copied) / 1000
        return self._moved[0], self._moved[1]

    def close(self) -> None:
        """End the thread, let copies in flight land (the one place that waits for the device), give memory back."""
        with self._changed:
            self._closed = True
            self._fail_all("the link was closed")
            thread = self._thread
        if thread is not None:
            thread.join()
        try:
            self._stream.synchronize()
        finally:
            self._source.close()

    def _let_compute_wait(self, job: _Job) -> None:
        self._cuda.current_stream(self._device).wait_event(job.copied)  # copy done -> compute may read

    def _let_copy_wait(self, job: _Job) -> None:
        if job.computed is not None:
            self._stream.wait_event(job.computed)  # compute done -> copy may overwrite

    # The link thread.

    def _run(self) -> None:
        job: _Job | None = None
        chunks: Iterator[Chunk] = iter(())
        outstanding: deque[Any] = deque()
        try:
            with torch.inference_mode():  # or a slot that was made in this mode could not be written to
                while (front := self._front()) is not None:
                    if front is not job:  # the one before is done, or an urgent one overtakes it
                        if job is not None:
                            job.interrupted = True
                        job, chunks = front, self._source.chunks(front.layer, front.issued_bytes)
                    self._step(job, chunks, outstanding)
        finally:
            with self._changed:
                self._thread = None  # the next fetch starts another
                self._fail_all(f"the link thread ended: {sys.exception()!r}")

    def _front(self) -> _Job | None:
        """The job to go on with; None when the link closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue[0]

    def _step(self, job: _Job, chunks: Iterator[Chunk], outstanding: deque[Any]) -> None:
        """Issue one chunk of the job."""
        failure: LinkError | None = LinkError(f"the link thread died while it copied layer {job.layer}; try again")
        try:
            chunk = next(chunks, None)
            while len(outstanding) >= CHUNKS_AHEAD:
                event = outstanding.popleft()
                if not job.wanted:
                    event.synchronize()
            with self._cuda.stream(self._stream):
                self._issue(job, chunk, outstanding)
            failure = None
        except LinkError as error:
            failure = error
        except RuntimeError as error:  # what torch makes of an error of CUDA
            failure = LinkError(f"layer {job.layer} could not be copied to {self._device}: {error}")
        finally:
            if failure is not None:
                with self._changed:
                    self._finish(job, failure)

    def _issue(self, job: _Job, chunk: Chunk | None, outstanding: deque[Any]) -> None:
        if chunk is None:
            job.copied.record(self._stream)
            with self._changed:
                if not job.interrupted and not job.cancelled:
                    self._timing.append(job)
                self._finish(job)
            return
        with self._changed:
            if job.done:  # called off in the meantime
                return
            first = job.issued_bytes == 0
            job.issued_bytes += chunk.source.nbytes
        if first:
            self._let_copy_wait(job)
            job.begun.record(self._stream)
        slot = self._slots.buffers[job.slot]
        slot[chunk.start : chunk.start + chunk.source.nbytes].copy_(chunk.source, non_blocking=True)
        chunk.copied.record(self._stream)
        outstanding.append(chunk.copied)

    def _finish(self, job: _Job, error: LinkError | None = None) -> None:
        if not job.done:
            job.done, job.error = True, error
            self._queue.remove(job)
            self._changed.notify_all()

    def _fail_all(self, reason: str) -> None:
        for job in tuple(self._queue):
            self._finish(job, LinkError(reason))
        self._changed.notify_all()
