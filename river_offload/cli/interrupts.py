"""Signals that end a command: all of them take the way of Ctrl-C, so that nothing half-done stays behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: cleans up as Ctrl-C does, but nobody is there to go on with."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """128 + the number of the signal, what shells expect."""
    return 128 + (interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextlib.contextmanager
def terminated_by_signals() -> Iterator[None]:
    """While the block runs SIGTERM and SIGHUP raise Terminated. One that is ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may, and signals reach no other
        return
    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, _terminate)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise Terminated(number)
