"""How far to draft before the backbone checks: a fixed length, or what pays best by all that was measured so far.

A check costs nearly the same whether it looks at two tokens or at twenty, since each streamed layer is brought in once.
So a draft should be long; but all that follows its first wrong token is wasted. The longer, the less likely the next
token still counts:

    P(it counts) = product over the drafted tokens of P(the backbone agrees | margin) * P(it agrees with the next)

One more token pays as long as what it is worth exceeds what its seconds would bring elsewhere: P(it counts) against
(draft seconds + what a check of one more token takes longer) * (tokens per second so far). P never rises while a draft
grows, so to stop when the first token does not pay is the best rule there is, for the rate that it is told; and the
rate that a rule reaches is what it is told next (Dinkelbach's iteration).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

MOST_DRAFTED = 32
"""Tokens that are drafted at most before a check, and that a cache must be able to give back."""
GATED_DRAFT = 16
"""Of mode gated, whose text depends on where its checks are: an adaptive length, which depends on measured times, would
give another text every time."""
TYPICAL_DRAFT = 16
TYPICAL_TOKENS_A_CHECK = 8.2
"""What a plan reckons with, since nobody knows the text beforehand: as measured on the demo model (docs/results.md),
tokens of a check, which adds one of its own, after so many drafted ones."""
FIRST_DRAFTED = 8
"""Length of an adaptive draft until a check was measured."""
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 0.995)
"""Margins are told apart by these: between two of them one figure holds for how often the backbone agrees."""
_PRIOR_TOKENS = 8.0
"""What is believed beforehand of a margin weighs as much as so many observed tokens."""
_TRIED_AGAIN = 16
"""Checks without a draft after which one is tried."""
_NEWEST = 0.1
"""Weight of the newest measurement of a duration, once there are some."""
_REMEMBERED_CHECKS = 64
"""Checks after which an observation counts by 1/e: texts differ."""


class Drafting(Protocol):
    """Asked after each drafted token whether to draft another, told how the check of the block went."""

    def goes_on(self, margins: Sequence[float]) -> bool:
        """Draft one more token?

        Args:
            margins: top-1 minus top-2 probability of the tokens drafted since the last check, by the river.
        """

    def drafted(self, seconds: float) -> None:
        """A token was drafted, in so many seconds."""

    def checked(self, margins: Sequence[float], accepted: int, seconds: float) -> None:
        """The tokens with these margins were checked in one pass of so many seconds, `accepted` of them are kept."""


class FixedLength:
    """Every draft has the same length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self.length

    def drafted(self, seconds: float) -> None:
        """Learns nothing from it."""

    def checked(self, margins: Sequence[float], accepted: int, seconds: float) -> None:
        """Learns nothing from it."""

    def __str__(self) -> str:
        return str(self.length)


class Adaptive:
    """Drafts as long as the next token pays. Learns from every token and every check, over generations too."""

    def __init__(self, most: int = MOST_DRAFTED) -> None:
        self.most = most
        self.agreement = Agreement()
        self.check = CheckCost()
        self.draft_s: float | None = None
        self._drafted = 0
        self._tokens = self._seconds = 0.0
        self._undrafted = 0
        """Checks in a row of no drafts at all."""

    def goes_on(self, margins: Sequence[float]) -> bool:
        if len(margins) >= self.most:
            return False
        if self.draft_s is None or not self._seconds:
            return len(margins) < FIRST_DRAFTED
        if not margins:  # one now and then, or it would never learn that drafts have become better
            return self._undrafted >= _TRIED_AGAIN or self._drafts_pay(self.draft_s)
        counts = self.agreement.mean
        for margin in margins:
            counts *= self.agreement.of(margin)
        rate = self._tokens / self._seconds
        return counts > rate * (self.draft_s + self.check.next_token_s)

    def drafted(self, seconds: float) -> None:
        self._drafted += 1  # the very first one often takes much longer
        weight = max(_NEWEST, 1 / self._drafted)
        self.draft_s = seconds if self.draft_s is None else self.draft_s + weight * (seconds - self.draft_s)

    def checked(self, margins: Sequence[float], accepted: int, seconds: float) -> None:
        self._undrafted = 0 if margins else self._undrafted + 1
        self.agreement.observe(margins, accepted)
        self.check.observe(len(margins) + 1, seconds)
        kept = 1 - 1 / _REMEMBERED_CHECKS
        block_s = self.check.of(len(margins) + 1) + len(margins) * (self.draft_s or 0.0)
        self._tokens = kept * self._tokens + accepted + 1
        self._seconds = kept * self._seconds + block_s

    def _drafts_pay(self, draft_s: float) -> bool:
        """Is there a length that beats the backbone token by token? Not where all of it is on the device and a draft
        costs about as much as a pass of its own."""
        alone, counts, tokens = 1 / max(self.check.of(1), 1e-9), 1.0, 1.0
        for length in range(1, self.most + 1):
            counts *= self.agreement.mean
            tokens += counts
            if tokens > alone * (length * draft_s + self.check.of(length + 1)):
                return True
        return False

    def __str__(self) -> str:
        return "adaptive"


class Agreement:
    """How often the backbone agrees with a drafted token of a margin, as long as all before it were right."""

    def __init__(self) -> None:
        # To begin with, about what the demo model's river is right in (docs/results.md): a text of a hundred tokens is
        # too short to find that out first.
        places = (0.0, *_EDGES, 1.0)
        middles = [(low + high) / 2 for low, high in pairwise(places)]
        self._right = [_PRIOR_TOKENS * (1 - 0.55 * math.exp(-5 * middle)) for middle in middles]
        self._seen = [_PRIOR_TOKENS] * len(middles)
        self._all_right, self._all_seen = 0.9 * _PRIOR_TOKENS, _PRIOR_TOKENS

    @property
    def mean(self) -> float:
        """Of a token that is not drafted yet."""
        return self._all_right / self._all_seen

    def of(self, margin: float) -> float:
        """Of a token with this margin."""
        place = _place(margin)
        return self._right[place] / self._seen[place]

    def observe(self, margins: Sequence[float], accepted: int) -> None:
        """The first `accepted` tokens were right, the next one, if there is one, was not; the rest tells nothing."""
        kept = 1 - 1 / (_REMEMBERED_CHECKS * 4)
        for index, margin in enumerate(margins[: accepted + 1]):
            place, right = _place(margin), index < accepted
            self._right[place] = kept * self._right[place] + right
            self._seen[place] = kept * self._seen[place] + 1
            self._all_right = kept * self._all_right + right
            self._all_seen = kept * self._all_seen + 1


class CheckCost:
    """Seconds of a check as a line over its tokens, fitted to the latest ones."""

    def __init__(self) -> None:
        self._weight = self._mean_tokens = self._mean_s = self._spread = self._joint = 0.0

    @property
    def next_token_s(self) -> float:
        """What one more token takes longer. Nothing as long as all checks had one length."""
        return max(self._joint / self._spread, 0.0) if self._spread > 1e-9 else 0.0

    def of(self, tokens: int) -> float:
        """Seconds of a check of so many tokens."""
        return max(self._mean_s + self.next_token_s * (tokens - self._mean_tokens), 0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        kept = 1 - 1 / _REMEMBERED_CHECKS
        self._weight = kept * self._weight + 1
        share = 1 / self._weight
        off_tokens, off_s = tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        self._spread = kept * self._spread + off_tokens * (tokens - self._mean_tokens)
        self._joint = kept * self._joint + off_tokens * (seconds - self._mean_s)


def parse_draft(text: str | int) -> str | int:
    """`adaptive`, or a length from 1 to MOST_DRAFTED. Raises ValueError that says what was found and expected."""
    value = int(text) if isinstance(text, str) and text.strip().isdecimal() else text
    if value == "adaptive" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_DRAFTED):
        return value
    raise ValueError(f"unknown draft {text!r}: expected adaptive or a number of tokens from 1 to {MOST_DRAFTED}")


def drafting_of(draft: str | int) -> Drafting:
    """The policy that a draft, as `parse_draft` gives it, stands for."""
    return FixedLength(draft) if isinstance(draft, int) else Adaptive()


def _place(margin: float) -> int:
    return sum(margin >= edge for edge in _EDGES)
