"""What a backbone said of drafted tokens, out of a trace, for a run whose own backbone has nothing to say.

A river of random weights never agrees with its backbone, so drafting with them would measure one token a check. Here
the margins and the verdicts are those that a trained model had; what they cost is the run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_REMEDY = "write one with generate --mode lossless --trace FILE and a model that was trained"


class Verdict(NamedTuple):
    """One drafted token that the backbone was asked about."""

    margin: float
    """Top-1 minus top-2 probability of the token, by the river."""
    agreed: bool


class Record(Protocol):
    """What `verdicts` reads of a trace's record."""

    @property
    def path(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def new_tokens(self) -> int: ...
    @property
    def margin(self) -> float | None: ...
    @property
    def accepted(self) -> int: ...
    @property
    def decided(self) -> int: ...


def verdicts(records: Sequence[Record]) -> tuple[Verdict, ...]:
    """The drafted tokens of a trace that were judged, in the order of the text.

    What follows the first wrong token of a check was not judged and is left out, as are the checks of mode gated, which
    keep sure tokens unasked. In a batch the least lucky row speaks for all.

    Raises ValueError for a trace without any, and for one that does not tell the margins.
    """
    found: list[Verdict] = []
    checks = [place for place, record in enumerate(records) if record.path == "check"]
    for place in checks:
        if records[place].mode == "lossless":
            found += _of_check(records, place)
    if not found:
        modes = sorted({record.mode for record in records})
        gated = ", which keeps sure tokens unasked" if checks and modes == ["gated"] else ""
        raise ValueError(
            f"no drafted token was checked in mode lossless: the trace has {len(records)} passages"
            f"{' of mode ' if modes else ''}{', '.join(modes)}{gated}; {_REMEDY}"
        )
    return tuple(found)


def _of_check(records: Sequence[Record], place: int) -> list[Verdict]:
    check, drafted = records[place], records[place].new_tokens - 1
    drafts = records[max(place - drafted, 0) : place]
    if len(drafts) < drafted or any(draft.path != "draft" for draft in drafts):
        raise ValueError(f"passage {place} checks {drafted} tokens, and not all of their drafts stand before it")
    # A text that ends within a block has no wrong token there: then nobody decided one more than was accepted.
    wrong = check.accepted < min(drafted, check.decided)
    found = []
    for index in range(check.accepted + wrong):
        margin = records[place - drafted + index + 1].margin  # a passage tells that of the token it continues from
        if margin is None:
            raise ValueError(f"the margin of the token drafted in passage {place - drafted + index} is not known")
        found.append(Verdict(margin, index < check.accepted))
    return found


@dataclass(frozen=True)
class Acceptance:
    """Verdicts to go by, over and over. Raises ValueError when there are none."""

    verdicts: tuple[Verdict, ...]
    source: str = "list"

    def __post_init__(self) -> None:
        if not self.verdicts:
            raise ValueError("an acceptance without a single verdict: expected at least one drafted token")

    def __str__(self) -> str:
        return self.source


class Replayed:
    """Where a run is in an acceptance: each of its blocks begins where the check before it ended, the first one again
    after the last verdict."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._verdicts = acceptance.verdicts
        self._place = 0

    def of(self, index: int) -> Verdict:
        """On the token with this index in the block."""
        return self._verdicts[(self._place + index) % len(self._verdicts)]

    def checked(self, kept: int, drafted: int) -> None:
        """A check kept so many tokens of the block: go on after them, and after the wrong one if there was one, whose
        place in the text the backbone's own token has taken."""
        self._place += kept + (kept < drafted)
