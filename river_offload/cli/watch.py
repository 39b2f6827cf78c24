"""`--watch`: the bytes on the device by category while a model runs, and a warning when they are more than planned."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from rich.text import Text

from river_offload.cli import runtime
from river_offload.cli.live_line import Sink
from river_offload.cli.options import ShowOptions, flag
from river_offload.cli.terminal import Terminal
from river_offload.config import format_size
from river_offload.errors import UsageError
from river_offload.memory.categories import RIVER, TRANSIENT

EVERY_S = 0.25
_CHANGING = ("kv", "working", "unclaimed")

Held = Mapping[str, int]
"""Device bytes by category."""


@dataclass(frozen=True)
class WatchOptions:
    """What is shown while a model runs."""

    watch: Annotated[
        bool,
        flag(
            "--watch",
            panel="Output",
            help="Show the bytes on the device while it runs: in the last row of a terminal, else as a line every ten "
            "seconds. Warns, once, when they are more than planned.",
        ),
    ] = False

    def check(self, show: ShowOptions) -> None:
        """Raises UsageError for an option that cannot take effect."""
        if self.watch and show.quiet:
            raise UsageError("--watch shows on stderr what --quiet leaves out: drop one of them")


class Watch:
    """A context in which a thread shows what `held` gives, some times a second. May be entered again and again.

    The work goes on undisturbed: the thread reads a few numbers and writes one line. At the end one line stays behind,
    the most that each category held. More than planned is seen at once by the colour of the line; the warning follows
    at the end, since in the midst of a text on the same terminal it would become part of it.

    Args:
        held: device bytes by category now. Called in another thread than the work.
        planned_bytes: more than that is worth a warning, one for the whole life of this object.
        peak: the same at the highest moment of all: looking some times a second would miss it.
    """

    def __init__(
        self,
        terminal: Terminal,
        held: Callable[[], Held],
        planned_bytes: int,
        *,
        peak: Callable[[], Held] = dict,
        every_s: float = EVERY_S,
    ) -> None:
        self._terminal = terminal
        self._held = held
        self._peak = peak
        self._planned_bytes = planned_bytes
        self._every_s = every_s
        self._warned = False

    def __enter__(self) -> Watch:
        self._most: dict[str, int] = {}
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._line = self._terminal.live_line()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._line.close()
        self._look()
        self._note(in_few_words(self._peak()))
        if self._most:
            self._terminal.note(f"held at most: {_parts(self._most)}")
        if self._peak_bytes > self._planned_bytes and not self._warned:
            self._warned = True
            self._terminal.warning(self._too_much())

    def beside(self, write: Sink) -> Sink:
        """What to write text with while the line is there, instead of `write`, which goes to standard output."""
        return self._line.beside(write) if sys.stdout.isatty() else write

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            held = self._look()
            total_bytes = sum(held.values())
            text = f"{format_size(total_bytes)} of {format_size(self._planned_bytes)} planned · {_parts(held)}"
            self._line.show(Text(text, style="yellow" if total_bytes > self._planned_bytes else "dim"))

    def _look(self) -> Held:
        held = in_few_words(self._held())
        self._note(held)
        return held

    def _note(self, held: Held) -> None:
        for name, nbytes in held.items():
            self._most[name] = max(self._most.get(name, 0), nbytes)
        self._peak_bytes = max(self._peak_bytes, sum(held.values()))

    def _too_much(self) -> str:
        over_bytes = self._peak_bytes - self._planned_bytes
        return (
            f"the device held {format_size(self._peak_bytes)}, {format_size(over_bytes)} more than the "
            f"{format_size(self._planned_bytes)} planned: keep that much free beside the budget, and please report it"
        )


class Unwatched:
    """The context of a run that nobody watches."""

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def beside(self, write: Sink) -> Sink:
        return write


def watching(options: WatchOptions, loaded: runtime.Loaded, terminal: Terminal) -> Watch | Unwatched:
    """A context that watches a loaded model if that was asked for."""
    if not options.watch:
        return Unwatched()
    river = loaded.river
    return Watch(terminal, river.held, river.placement.planned_bytes, peak=river.held_at_most)


def in_few_words(held: Held) -> dict[str, int]:
    """The categories of the ledger (`memory.categories`) as one line has room for: parts of one thing become one."""
    names = dict.fromkeys(RIVER, "river") | dict.fromkeys(TRANSIENT, "working")
    names |= {"staging": "slots", "norms": "other", "loading": "other"}
    found: dict[str, int] = {}
    for name, nbytes in held.items():
        word = names.get(name, name)
        found[word] = found.get(word, 0) + nbytes
    return found


def _parts(held: Held) -> str:
    """What changes while a model runs comes first, the rest by its size: the end of a long line is cut."""
    order = sorted(held.items(), key=lambda entry: (entry[0] not in _CHANGING, -entry[1]))
    return " · ".join(f"{name} {format_size(nbytes)}" for name, nbytes in order if nbytes)
