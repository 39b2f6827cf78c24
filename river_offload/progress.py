"""What long work reports while it runs. The command line draws it; the library only counts."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One piece of work at a time: `start`, any number of `advance`, `finish` (also when the work failed)."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin `label`; `total` counts in `unit` (bytes, layers)."""

    def advance(self, amount: int) -> None:
        """`amount` more of the unit given to `start` is done."""

    def finish(self) -> None:
        """The work ended, whole or not."""


class Silent:
    """Reports nothing."""

    def start(self, label: str, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def finish(self) -> None:
        pass
