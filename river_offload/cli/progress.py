"""Progress on standard error, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from river_offload.config import format_size

_LINE_EVERY_S = 10.0
_WORTH_A_LINE_S = 1.0
_SPEED_OVER_S = 300.0
"""The speed is averaged over this long: one layer may take half a minute to quantize."""


class Bars:
    """Implements `river_offload.progress.Progress`.

    On a terminal a bar with the time left, which goes away when the work is done; elsewhere (a log) a line every
    ten seconds. Work that took over a second leaves one line behind.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: RichProgress | None = None
        self._label = ""

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin `label`; a total of 0 means that nobody knows how much there is to do."""
        self.finish()
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._started_s = self._spoke_s = self._clock()
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                _Amount(unit),
                *((TimeRemainingColumn(), TextColumn("left")) if total else ()),
                console=self._console,
                transient=True,
                speed_estimate_period=_SPEED_OVER_S,
            )
            self._bar.add_task(label, total=total or None)
            self._bar.start()

    def advance(self, amount: int) -> None:
        """`amount` more of the unit is done."""
        if not self._label:
            return
        self._done += amount
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], amount)
        elif self._clock() - self._spoke_s >= _LINE_EVERY_S:
            self._spoke_s = self._clock()
            self._say(f"{self._label}: {count(self._done, self._total, self._unit)}{self._time_left()}")

    def finish(self) -> None:
        """Take the bar away. Says nothing of work that was quick or did not come to its end."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if not self._label:
            return
        took_s = self._clock() - self._started_s
        if took_s >= _WORTH_A_LINE_S and self._total and self._done >= self._total:
            self._say(f"{self._label}: {count(self._done, 0, self._unit)} in {duration(took_s)}")
        self._label = ""

    def _time_left(self) -> str:
        if not 0 < self._done < self._total:
            return ""
        left_s = (self._clock() - self._started_s) / self._done * (self._total - self._done)
        return f", {duration(left_s)} left"

    def _say(self, line: str) -> None:
        self._console.print(Text(line, style="dim"), soft_wrap=True)


class _Amount(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(count(int(task.completed), int(task.total or 0), self._unit) if task.total else "")


def count(done: int, total: int, unit: str) -> str:
    """`12 of 30 layers`, `1.20 GiB of 3.40 GiB`; without a total `30 layers`."""
    if unit == "bytes":
        return f"{format_size(done)} of {format_size(total)}" if total else format_size(done)
    return f"{done} of {total} {unit}" if total else f"{done} {unit}"


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 59.95 else "1 min 00 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
