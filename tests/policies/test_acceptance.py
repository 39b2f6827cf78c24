"""What a trace says of drafted tokens, and how another run goes by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from policies.acceptance import Acceptance, Replayed, Verdict, verdicts


@dataclass
class Record:
    path: str
    mode: str = "lossless"
    new_tokens: int = 1
    margin: float | None = None
    accepted: int = 0
    decided: int = 0


def block(
    margins: Sequence[float | None], accepted: int, *, ended: bool = False, mode: str = "lossless"
) -> list[Record]:
    """Drafted tokens of these margins and their check. A passage tells the margin of the token before its own."""
    fed = [0.123, *margins]
    drafts = [Record("draft", mode, margin=margin) for margin in fed[:-1]]
    check = Record("check", mode, len(margins) + 1, fed[-1], accepted, accepted + (not ended))
    return [*drafts, check]


def test_what_was_judged_is_read_in_the_order_of_the_text() -> None:
    records = [
        Record("prefill", new_tokens=9),
        *block([0.9, 0.8, 0.1, 0.7], 2),
        *block([0.6, 0.5], 2),
        *block([0.4], 0),
        *block([], 0),
    ]
    assert verdicts(records) == (
        (0.9, True), (0.8, True), (0.1, False), (0.6, True), (0.5, True), (0.4, False),
    )  # fmt: skip


def test_a_text_that_ends_within_a_block_has_no_wrong_token_there() -> None:
    assert verdicts(block([0.9, 0.8, 0.7], 1, ended=True)) == ((0.9, True),)


def test_drafts_that_were_interrupted_do_not_count() -> None:
    assert verdicts(block([0.1, 0.2], 0)[:-1] + block([0.9, 0.8], 1)) == ((0.9, True), (0.8, False))


def test_checks_of_mode_gated_are_passed_over() -> None:
    gated = block([0.9, 0.8], 2, mode="gated")
    assert verdicts(gated + block([0.3], 0)) == ((0.3, False),)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "the trace has 0 passages; write one"),
        ([Record("prefill", "exit"), Record("decode", "exit")], "the trace has 2 passages of mode exit; write one"),
        (block([0.9], 1, mode="gated"), "2 passages of mode gated, which keeps sure tokens unasked; write one"),
        (block([], 0), "no drafted token was checked in mode lossless"),
        (block([0.9, None], 1), "the margin of the token drafted in passage 1 is not known"),
        (block([0.9, 0.8], 1)[1:], "passage 1 checks 2 tokens, and not all of their drafts stand before it"),
        ([Record("decode"), *block([0.9, 0.8], 1)[1:]], "passage 2 checks 2 tokens, and not all of their drafts"),
    ],
)
def test_what_cannot_be_replayed_is_said(records: list[Record], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verdicts(records)


CHAIN = (Verdict(0.9, True), Verdict(0.8, True), Verdict(0.1, False), Verdict(0.7, True))


def kept(replayed: Replayed, drafted: int) -> int:
    """A block of so many tokens is checked."""
    count = next((index for index in range(drafted) if not replayed.of(index).agreed), drafted)
    replayed.checked(count, drafted)
    return count


def test_a_run_goes_on_where_its_last_check_ended_and_begins_again_at_the_end() -> None:
    replayed = Replayed(Acceptance(CHAIN))
    assert [replayed.of(index).margin for index in range(6)] == [0.9, 0.8, 0.1, 0.7, 0.9, 0.8]
    assert [kept(replayed, 3) for _ in range(5)] == [2, 3, 0, 3, 0]
    assert replayed.of(0) == CHAIN[3]


def test_shorter_blocks_meet_the_same_verdicts() -> None:
    replayed = Replayed(Acceptance(CHAIN))
    assert [kept(replayed, 1) for _ in range(8)] == [1, 1, 0, 1] * 2


def test_an_acceptance_without_verdicts_is_none() -> None:
    with pytest.raises(ValueError, match="without a single verdict"):
        Acceptance(())
    assert str(Acceptance(CHAIN, "run.jsonl")) == "run.jsonl"
