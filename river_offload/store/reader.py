"""Several threads that read ranges of files into memory, beside the computation.

A `Ticket` is a list of ranges to bring in. It is read in pieces through small aligned buffers, so that the page cache
is left alone, what is read may be converted on its way, and a ticket that nobody wants any more stops within a piece.
Tickets are served first in, first out, in three turns (`policies.link_order`): urgent ones and those that somebody
waits for, keys and values of the next layer, all others. One that must follow another (they write to the same place)
starts when that has landed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from policies.link_order import FIRST, TURNS, Load, turn
from river_offload.errors import LinkError
from river_offload.store.pieces import PIECE_BYTES, Buffer, Whole, Work, buffer_bytes_for, piece_bytes_for

THREADS = 4
"""Readers that keep an NVMe disk busy; more than 4 gain little."""


def reader_bytes(largest_bytes: int, threads: int = THREADS) -> int:
    """Memory of a reader's buffers, when no range is larger than `largest_bytes`."""
    return threads * buffer_bytes_for(piece_bytes_for(largest_bytes))


class Ticket:
    """Ranges to bring in, and how far that is. Owned by the reader that it is submitted to.

    Args:
        spans: where from and where to.
        after: tickets that write to the same place: this one starts when they write no more, whatever became of them.
        load: what they are. `Reader.moved` and the reader's limit speak of weights alone.
    """

    def __init__(self, spans: Sequence[Whole], *, after: Sequence[Ticket] = (), load: Load = "weights") -> None:
        self.load: Load = load
        self.nbytes = sum(span.nbytes for span in spans)
        self.started_bytes = 0
        """Of pieces that a thread has taken up: their place is not what it was any more."""
        self.landed_bytes = 0
        self.error: LinkError | None = None
        self.cancelled = False
        self._spans: Sequence[Whole] = spans
        self._pieces: Iterator[Work] | None = None
        self._more = self.nbytes > 0
        self._after = after
        self._flying = 0

    @property
    def done(self) -> bool:
        """Nothing is written for it any more: it has landed, failed or been called off."""
        return not self._more and self._flying == 0

    def _stop(self, error: LinkError | None = None) -> None:
        """Start no more pieces, and let go of the memory they would have gone to."""
        self._more, self._spans, self._pieces = False, (), None
        if self.error is None:
            self.error = error

    def _blocked(self) -> bool:
        self._after = [ticket for ticket in self._after if not ticket.done]  # or each would keep all before it alive
        return self._more and bool(self._after)

    def _take(self, piece_bytes: int) -> Work | None:
        """The next piece; None when none is left."""
        if not self._more:
            return None
        if self._pieces is None:
            self._pieces = (piece for span in self._spans for piece in span.pieces(piece_bytes))
        piece = next(self._pieces, None)
        if piece is None:
            self._stop()
        else:
            self._flying += 1
            self.started_bytes += piece.nbytes
        return piece


class Reader:
    """The threads. They start with the first ticket and end with `close()`.

    Args:
        threads: how many read at once.
        largest_bytes: of the ranges of files to read, if that is known; 0 when none are.

    Attributes:
        limit: bytes a second that land at most; None for as many as the disk gives.
    """

    def __init__(self, threads: int = THREADS, largest_bytes: int = PIECE_BYTES) -> None:
        self._buffers_bytes = reader_bytes(largest_bytes, threads)
        self._piece_bytes = piece_bytes_for(largest_bytes)
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._lanes: tuple[deque[Ticket], ...] = tuple(deque() for _ in range(TURNS))
        self._closed = False
        self.limit: int | None = None
        self._due_s = 0.0
        self._flying = 0
        self._moved_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    @property
    def closed(self) -> bool:
        """Is nothing read any more?"""
        return self._closed

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, whether or not the threads have started; none once it is closed."""
        return 0 if self._closed else self._buffers_bytes

    def submit(self, ticket: Ticket, *, urgent: bool = False) -> None:
        """Begin to read. Raises LinkError after `close()`."""
        with self._changed:
            if self._closed:
                ticket._stop(LinkError("the reader is closed: load the model again"))
                raise LinkError("the reader is closed: load the model again")
            self._lanes[turn(ticket.load, needed=urgent)].append(ticket)
            self._hire()
            self._changed.notify_all()

    def wait(self, ticket: Ticket) -> float:
        """Return when the ticket has landed: the seconds that took. Raises LinkError when it cannot land.

        What is waited for is needed: from here on the ticket is served before those that nobody waits for yet.
        A Ctrl-C leaves the ticket as it is: it goes on, and may be waited for again or called off.
        """
        started_s = time.perf_counter()
        self.settle(ticket)
        if ticket.error is not None:
            raise LinkError(*ticket.error.args) from ticket.error
        return time.perf_counter() - started_s

    def cancel(self, ticket: Ticket) -> int:
        """Call off what has not started, at once; the bytes that had. What is under way still lands."""
        with self._changed:
            if not ticket.done:
                ticket.cancelled = True
                ticket._stop(LinkError("the read was called off"))
            self._changed.notify_all()
            return ticket.started_bytes

    def settle(self, ticket: Ticket) -> None:
        """Return when nothing is written for the ticket any more, whatever became of it."""
        with self._changed:
            self._hasten(ticket)
            # Whoever takes a piece of a ticket, or ends without one, notifies: there is no one else to wait for.
            self._changed.wait_for(lambda: ticket.done)

    def moved(self) -> tuple[int, float]:
        """Bytes of weights brought in so far, and the seconds in which at least one thread was at it."""
        with self._changed:
            running_s = time.perf_counter() - self._busy_since_s if self._flying else 0.0
            return self._moved_bytes, self._busy_s + running_s

    def close(self) -> None:
        """Let pieces under way land, fail all the rest, end the threads. May be called twice."""
        with self._changed:
            self._closed = True
            self._fail_all("the reader was closed")
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._threads.clear()

    def _hasten(self, ticket: Ticket) -> None:
        """It is needed now, and so are those that must be done before it."""
        for lane in self._lanes[FIRST + 1 :]:
            if ticket in lane:
                for before in ticket._after:
                    self._hasten(before)
                lane.remove(ticket)
                self._lanes[FIRST].append(ticket)

    def _hire(self) -> None:
        """Start the threads, or those that take the place of dead ones."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(self._wanted - len(self._threads)):
            # Daemons: a program that forgets close() must still be able to end.
            thread = threading.Thread(target=self._run, name="river-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        """A thread's life. One that ends before its time leaves nobody waiting."""
        try:
            with torch.inference_mode():  # or a slot that was made in this mode could not be written to
                buffer = Buffer(self._buffers_bytes // self._wanted)
                while (work := self._next()) is not None:
                    self._bring(*work, buffer)
        finally:
            with self._changed:
                self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
                if not self._threads:
                    self._fail_all(f"the last reader thread ended: {sys.exception()!r}")

    def _bring(self, ticket: Ticket, piece: Work, buffer: Buffer) -> None:
        failure: LinkError | None = LinkError(piece.if_lost)
        try:
            due_s = self._due(piece) if ticket.load == "weights" else 0.0
            piece.bring(buffer)
            self._hold_back(due_s)
            failure = None
        except LinkError as error:
            failure = error
        finally:
            self._landed(ticket, piece, failure)

    def _due(self, piece: Work) -> float:
        """When the piece may land at the earliest. Pieces share the limit in the order in which they are begun."""
        if (limit := self.limit) is None:
            return 0.0
        with self._changed:
            self._due_s = max(self._due_s, time.perf_counter()) + piece.nbytes / limit
            return self._due_s

    def _hold_back(self, due_s: float) -> None:
        """Wait for that time, or for close()."""
        with self._changed:
            while not self._closed and (left_s := due_s - time.perf_counter()) > 0:
                self._changed.wait(left_s)

    def _next(self) -> tuple[Ticket, Work] | None:
        """The piece to bring in next, as soon as there is one; None when the reader closes."""
        with self._changed:
            while not self._closed:
                if (work := self._take()) is not None:
                    if work[0].load == "weights":
                        if not self._flying:
                            self._busy_since_s = time.perf_counter()
                        self._flying += 1
                    return work
                self._changed.wait()  # for a ticket, for the end of the one before it, or for close()
        return None

    def _take(self) -> tuple[Ticket, Work] | None:
        for lane in self._lanes:
            while lane and not lane[0]._blocked():
                if (piece := lane[0]._take(self._piece_bytes)) is not None:
                    return lane[0], piece
                lane.popleft()
        return None

    def _landed(self, ticket: Ticket, piece: Work, failure: LinkError | None) -> None:
        weights = ticket.load == "weights"
        with self._changed:
            ticket._flying -= 1
            self._flying -= weights
            if weights and not self._flying:
                self._busy_s += time.perf_counter() - self._busy_since_s
            if failure is None:
                ticket.landed_bytes += piece.nbytes
                self._moved_bytes += piece.nbytes if weights else 0
                if ticket.landed_bytes == ticket.nbytes:
                    ticket._stop()
            else:
                ticket._stop(failure)
            if ticket.done:
                self._changed.notify_all()

    def _fail_all(self, reason: str) -> None:
        for lane in self._lanes:
            for ticket in lane:
                if not ticket.done:
                    ticket._stop(LinkError(reason))
            lane.clear()
        self._changed.notify_all()
