"""Standard error: notes, warnings, errors, progress. Standard output belongs to the text a model writes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from river_offload.cli.interrupts import Terminated, exit_code, terminated_by_signals
from river_offload.cli.live_line import LiveLine, live_line
from river_offload.cli.progress import Bars
from river_offload.errors import RiverError
from river_offload.progress import Progress, Silent

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, what shells expect."""
BROKEN_PIPE = 141
"""Exit code when the reader of standard output has gone: 128 + SIGPIPE."""
_OPTIONS = {
    "cache_dir": "--cache-dir",
    "head_bits": "--head-bits",
    "min_exit": "--min-exit",
    "on_miss": "--on-miss",
    "prefill_chunk": "--prefill-chunk",
    "trust_remote_code": "--trust-remote-code",
    "quant.bits": "--bits",
    "quant.group_size": "--group-size",
}
"""Options by the names that the library's messages give them. Only names that are no English words."""
# Not as a part of a path, and not before a colon, where a message names a file or a model.
_PYTHON_NAME = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, _OPTIONS))})(?![\w/:-]|\.\w)(=(?=\w))?")
_PYTHON_DEVICE = re.compile(r"(?<![\w./-])device='([\w:]+)'")


class Terminal:
    """Where a command says everything that is not its result. With `quiet`, only errors."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False)

    def note(self, message: str, style: str = "dim") -> None:
        if not self.quiet:
            self._print(Text(message, style=style))

    def warning(self, message: str) -> None:
        if not self.quiet:
            self._print(Text.assemble(("warning: ", "yellow"), message))

    def error(self, message: str) -> None:
        self._print(Text.assemble(("error: ", "bold red"), in_option_names(message)))

    def progress(self) -> Progress:
        """A drawer of progress: bars on a terminal, now and then a line elsewhere, nothing when quiet."""
        return Silent() if self.quiet else Bars(self._console)

    def live_line(self) -> LiveLine:
        """A line to write over while text goes on. Not for a quiet terminal."""
        return live_line(self._console)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def in_option_names(message: str) -> str:
    """A message of the library with its arguments named as the options are: `head_bits=8` becomes `--head-bits 8`."""
    message = _PYTHON_NAME.sub(lambda found: _OPTIONS[found[1]] + (" " if found[2] else ""), message)
    message = message.replace("--trust-remote-code True", "--trust-remote-code")
    return _PYTHON_DEVICE.sub(r"--device \1", message)


@contextlib.contextmanager
def boundary(terminal: Terminal) -> Iterator[None]:
    """What a command runs in: errors written for users end it with their message and exit code, without traceback.

    Warnings of Python and of this package's logger become lines of `terminal`; SIGTERM and SIGHUP end the command as
    Ctrl-C does. Raises typer.Exit.
    """
    try:
        with terminated_by_signals(), _warnings_to(terminal):
            yield
    except RiverError as error:
        terminal.error(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        terminal.note(f"ended by {interrupt}" if isinstance(interrupt, Terminated) else "interrupted")
        raise typer.Exit(exit_code(interrupt)) from None
    except BrokenPipeError:
        # `river-offload ... | head`: not worth a word. Python flushes stdout at exit and would complain there.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


class _Lines(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.warning(record.getMessage())


@contextlib.contextmanager
def _warnings_to(terminal: Terminal) -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        # What libraries tell programmers (deprecations and the like) says nothing to who runs a command.
        if not issubclass(category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
            terminal.warning(str(message))

    logger = logging.getLogger("river_offload")
    handler = _Lines(terminal)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
