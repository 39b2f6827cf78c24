"""One line that is written over while other text goes on: at the bottom of a terminal, now and then in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_LINE_EVERY_S = 10.0
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[2K"
_DOWN = "\x1bD"
"""Unlike a line feed it keeps the column."""


Sink = Callable[[str], None]
"""Writes a piece of text."""


class LiveLine(Protocol):
    """`show` as often as one likes, then `close`."""

    def show(self, text: Text) -> None: ...
    def beside(self, write: Sink) -> Sink:
        """What to write with instead of `write`, when that goes to the same terminal while the line is there."""

    def close(self) -> None: ...


class BottomLine:
    """The last row of a terminal. The rows above become a region of their own, in which everything else scrolls: text
    may be written to the same terminal meanwhile, also in pieces that are no whole lines.

    A redrawn line in the usual way (rich's Live) would eat such pieces, and those are what a model writes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._height = 0
        self._column = 0
        self._lock = threading.Lock()

    def show(self, text: Text) -> None:
        """Write `text` over what the line said, cut to the width of the terminal."""
        width, height = self._console.size
        with self._lock:
            # After a character in the last column some terminals forget, when the cursor goes away and comes back,
            # that the next one belongs in a new row: it would take that character's place. The next text is near.
            if height > 1 and self._column < width:
                self._draw(text, height)

    def beside(self, write: Sink) -> Sink:
        """`write`, followed on its way through the columns."""

        def written(piece: str) -> None:
            with self._lock:
                self._column = column_after(piece, self._column, self._console.width)
                write(piece)

        return written

    def _draw(self, text: Text, height: int) -> None:
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

    def beside(self, write: Sink) -> Sink:
        return write

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


def column_after(piece: str, column: int, width: int) -> int:
    """The column of the cursor, 0..width, after `piece` was written from `column` on; `width`: behind the last one."""
    for character in piece:
        if character in "\r\n":
            column = 0
        elif character == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        else:
            cells = cell_len(character)
            column = column + cells if column + cells <= width else cells
    return column
