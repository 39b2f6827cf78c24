from __future__ import annotations

import io

import pytest
from rich.console import Console

from river_offload.cli.progress import Bars, count, duration


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def bars(*, terminal):
    out, clock = io.StringIO(), Clock()
    return Bars(Console(file=out, force_terminal=terminal, width=100), clock), out, clock


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end():
    progress, out, clock = bars(terminal=False)
    progress.start("quantizing", 30, "layers")
    for _ in range(30):
        clock.now_s += 4
        progress.advance(1)
    progress.finish()
    lines = out.getvalue().splitlines()
    assert lines[0] == "quantizing: 3 of 30 layers, 1 min 48 s left"
    assert lines[-1] == "quantizing: 30 layers in 2 min 00 s"
    assert len(lines) == 11


def test_quick_and_unfinished_work_leaves_nothing():
    progress, out, clock = bars(terminal=False)
    progress.start("reading", 2, "layers")
    progress.advance(2)
    progress.finish()
    progress.start("reading", 2, "layers")
    clock.now_s += 5
    progress.advance(1)
    progress.finish()
    progress.finish()
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away():
    progress, out, clock = bars(terminal=True)
    progress.start("unpacking", 2**31, "bytes")
    progress.advance(2**30)
    progress._bar.refresh()
    assert "unpacking" in out.getvalue() and "1.00 GiB of 2.00 GiB" in out.getvalue() and "left" in out.getvalue()
    clock.now_s += 2
    progress.advance(2**30)
    progress.finish()
    assert out.getvalue().rstrip().endswith("unpacking: 2.00 GiB in 2.0 s\x1b[0m")


def test_work_of_unknown_length_and_advance_without_start():
    progress, out, _ = bars(terminal=True)
    progress.advance(1)
    progress.start("starting", 0, "")
    progress.finish()
    assert "left" not in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (4.24, "4.2 s"), (59.96, "1 min 00 s"), (65, "1 min 05 s"), (7380, "2 h 03 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_count():
    assert (count(12, 30, "layers"), count(30, 0, "layers"), count(2**20, 0, "bytes")) == (
        "12 of 30 layers", "30 layers", "1.0 MiB"
    )  # fmt: skip
