"""One line that is written over while other text goes on: at the bottom of a terminal, now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.text import Text

_LINE_EVERY_S = 10.0
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[2K"
_DOWN = "\x1bD"
"""Unlike a line feed it keeps the column."""


class LiveLine(Protocol):
    """`show` as often as one likes, then `close`."""

    def show(self, text: Text) -> None: ...
    def close(self) -> None: ...


class BottomLine:
    """The last row of a terminal. The rows above become a region of their own, in which everything else scrolls: text
    may be written to the same terminal meanwhile, by whomever, also in pieces that are no whole lines.

    A redrawn line in the usual way (rich's Live) would eat such pieces, and those are what a model writes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._height = 0

    def show(self, text: Text) -> None:
        """Write `text` over what the line said, cut to the width of the terminal."""
        height = self._console.size.height
        if height < 2:
            return
        opening = ""
        if height != self._height:  # at first, and when the window has another size
            self._height = height
            # Down and up: scrolls if the cursor is in the last row, which is outside of the region. Setting the region
            # sends the cursor home.
            opening = f"{_DOWN}\x1b[1A{_SAVE}\x1b[1;{height - 1}r{_RESTORE}"
        with self._console.capture() as captured:
            self._console.print(text, no_wrap=True, overflow="ellipsis", crop=True, end="")
        self._write(f"{opening}{_SAVE}\x1b[{height};1H{_ERASE}{captured.get()}{_RESTORE}")

    def close(self) -> None:
        """Give the row back, empty."""
        if self._height:
            self._write(f"{_SAVE}\x1b[{self._height};1H{_ERASE}\x1b[r{_RESTORE}")
            self._height = 0

    def _write(self, sequence: str) -> None:
        # In one piece: another writer's text must not come between saving the cursor and restoring it.
        self._console.file.write(sequence)
        self._console.file.flush()


class LogLine:
    """For what is no terminal: a line every ten seconds, each below the other."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._spoke_s = clock()

    def show(self, text: Text) -> None:
        if self._clock() - self._spoke_s >= _LINE_EVERY_S:
            self._spoke_s = self._clock()
            self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        pass


def live_line(console: Console) -> LiveLine:
    """What suits the console: a terminal that can move its cursor, or not."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BottomLine(console)
    return LogLine(console)
