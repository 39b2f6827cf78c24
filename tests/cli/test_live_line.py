"""The live line, on a small terminal emulator: what a person would see, whatever the text does meanwhile."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from river_offload.cli.live_line import BottomLine, LogLine, column_after, live_line

WIDTH, HEIGHT = 20, 5


class Screen(io.StringIO):
    """As much of a VT100 as the line and plain text need: a scroll region, saved cursors, erased lines."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [""] * HEIGHT
        self.row = self.column = 0
        self.top, self.bottom = 0, HEIGHT - 1
        self.saved = (0, 0)
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        for piece in re.findall(r"\x1b[78D]|\x1b\[[\d;]*[A-Za-z]|[^\x1b]", text):
            self._do(piece)
        return len(text)

    def _do(self, piece: str) -> None:
        if piece in ("\n", "\x1bD"):
            self.column = 0 if piece == "\n" else self.column
            if self.row == self.bottom:
                del self.rows[self.top]
                self.rows.insert(self.bottom, "")
            else:
                self.row = min(self.row + 1, HEIGHT - 1)
        elif piece == "\x1b7":
            self.saved = (self.row, self.column)
        elif piece == "\x1b8":
            self.row, self.column = self.saved
        elif piece.startswith("\x1b"):
            numbers = [int(number) for number in re.findall(r"\d+", piece)]
            if piece[-1] == "H":
                self.row, self.column = numbers[0] - 1, numbers[1] - 1
            elif piece[-1] == "A":
                self.row -= numbers[0]
            elif piece[-1] == "K":
                self.rows[self.row] = ""
            elif piece[-1] == "r":
                self.top, self.bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, HEIGHT - 1)
                self.row = self.column = 0
            else:
                assert piece[-1] == "m", f"the emulator does not know {piece!r}"
        else:
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + piece + line[self.column + 1 :]
            self.column += 1


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def line(screen: Screen) -> BottomLine:
    made = live_line(Console(file=screen, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={"TERM": "xterm"}))
    assert isinstance(made, BottomLine)
    return made


def test_text_in_pieces_goes_on_above_the_line(screen: Screen, line: BottomLine) -> None:
    screen.write("The sky")
    line.show(Text("10 MiB"))
    screen.write(" is")
    line.show(Text("12 MiB"))
    screen.write(" blue.\nYes")
    assert screen.rows == ["The sky is blue.", "Yes", "", "", "12 MiB"]
    line.close()
    screen.write(".")
    assert screen.rows == ["The sky is blue.", "Yes.", "", "", ""]


def test_text_that_scrolls_leaves_the_line_alone(screen: Screen, line: BottomLine) -> None:
    screen.write("1\n2\n3\n4\n5")  # the cursor is in the last row when the line comes
    line.show(Text("here"))
    assert screen.rows == ["2", "3", "4", "5", "here"]
    screen.write(".\n6\n7")
    line.show(Text("there"))
    assert screen.rows == ["4", "5.", "6", "7", "there"]
    line.close()
    screen.write("\n8\n9")
    assert screen.rows == ["5.", "6", "7", "8", "9"]


def test_the_line_is_cut_to_the_width_and_every_update_is_one_write(screen: Screen, line: BottomLine) -> None:
    line.show(Text("a" * 50))
    assert screen.rows[-1] == "a" * (WIDTH - 1) + "…"
    line.show(Text("b"))
    assert screen.rows[-1] == "b"
    assert (
        len([text for text in screen.writes if text]) == 2
    )  # else the text of another thread could come between saving and restoring


def test_a_full_row_is_not_interrupted(screen: Screen, line: BottomLine) -> None:
    """Some terminals forget, when the cursor comes back to the last column, that the row is full."""
    write = line.beside(screen.write)
    line.show(Text("first"))
    write("x" * WIDTH)
    line.show(Text("not now"))
    assert screen.rows[-1] == "first"
    write("y")
    line.show(Text("now"))
    assert screen.rows[-1] == "now"


@pytest.mark.parametrize(
    ("piece", "column", "after"),
    [
        ("abc", 2, 5),
        ("a\nbc", 7, 2),
        ("ab", 18, 20),
        ("c", 20, 1),
        ("界", 19, 2),
        ("\t", 3, 8),
        ("\t", 18, 19),
        ("é", 1, 2),
    ],
)
def test_the_column_is_followed(piece: str, column: int, after: int) -> None:
    assert column_after(piece, column, WIDTH) == after


def test_another_size_of_the_window(screen: Screen, line: BottomLine) -> None:
    line.show(Text("a"))
    line._console.height = HEIGHT - 1
    line.show(Text("b"))
    assert (screen.top, screen.bottom) == (0, HEIGHT - 3)
    line._console.height = 1
    line.show(Text("no room"))
    assert "no room" not in screen.rows


def test_nothing_shown_nothing_to_take_away(screen: Screen, line: BottomLine) -> None:
    line.close()
    assert screen.writes == []


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    out, now_s = io.StringIO(), [0.0]
    line = LogLine(Console(file=out, width=20), clock=lambda: now_s[0])
    for number in range(25):
        now_s[0] = float(number)
        line.show(Text(f"at {number}, in one line whatever its length"))
    line.close()
    assert [text.split(",")[0] for text in out.getvalue().splitlines()] == ["at 10", "at 20"]


@pytest.mark.parametrize(("term", "terminal"), [("dumb", True), ("xterm", False)])
def test_where_the_cursor_cannot_be_moved_it_is_a_log(term: str, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": term})
    assert isinstance(live_line(console), LogLine)
