"""How far to draft: the adaptive length against every fixed one, on a recorded chain and two machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from policies.drafting import (
    FIRST_DRAFTED,
    MOST_DRAFTED,
    Adaptive,
    Agreement,
    CheckCost,
    Drafting,
    FixedLength,
    drafting_of,
    parse_draft,
)

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHECK_S = {"a fast link": (2.0, 0.02), "a slow link": (40.0, 0.05)}
"""Seconds of a check and of one more token in it; a draft step takes one second."""


def recorded() -> list[tuple[float, bool]]:
    """The margin of each drafted token that was looked at, and whether the backbone agreed: the demo model on
    arithmetic questions, four bits."""
    file = Path(__file__).with_name("drafted_chain.json")
    margins, right = (json.loads(file.read_text())[name] for name in ("margins", "right"))
    return [(margin / 1000, agrees == "1") for margin, agrees in zip(margins, right, strict=True)]


def replay(policy: Drafting, chain: Sequence[tuple[float, bool]], check_s: tuple[float, float]) -> float:
    """Tokens per second after a first fifth to learn from."""
    place, tokens, seconds, learning = 0, 0, 0.0, len(chain) // 5
    while place < len(chain) - MOST_DRAFTED:
        margins: list[float] = []
        while policy.goes_on(margins):
            margins.append(chain[place + len(margins)][0])
            policy.drafted(1.0)
        accepted = next((i for i in range(len(margins)) if not chain[place + i][1]), len(margins))
        block_s = check_s[0] + check_s[1] * len(margins)
        policy.checked(margins, accepted, block_s)
        place += accepted + 1
        if place > learning:
            tokens, seconds = tokens + accepted + 1, seconds + len(margins) + block_s
    return tokens / seconds


@pytest.mark.parametrize("link", CHECK_S)
def test_the_adaptive_length_reaches_the_best_fixed_one_untold(link: str) -> None:
    chain = recorded()
    fixed = {length: replay(FixedLength(length), chain, CHECK_S[link]) for length in LENGTHS}
    assert replay(Adaptive(), chain, CHECK_S[link]) >= max(fixed.values())


@pytest.mark.parametrize("check_s", [2.0, 10.0, 40.0])
def test_a_text_of_sixty_tokens_is_not_spent_on_learning(check_s: float) -> None:
    """On average over places of the record, the first draft being slow, as it is in a real run."""

    def rate(policy: Drafting, chain: Sequence[tuple[float, bool]]) -> float:
        place, seconds = 0, 0.0
        while place < 64:
            margins: list[float] = []
            while policy.goes_on(margins):
                margins.append(chain[place + len(margins)][0])
                policy.drafted(1.0 if seconds else 2.5)
                seconds += 1.0 if seconds else 2.5
            accepted = next((i for i in range(len(margins)) if not chain[place + i][1]), len(margins))
            policy.checked(margins, accepted, check_s)
            seconds += check_s
            place += accepted + 1
        return place / seconds

    chains = [recorded()[start:] for start in range(0, 800, 40)]
    fixed = max(sum(rate(FixedLength(length), chain) for chain in chains) for length in LENGTHS)
    assert sum(rate(Adaptive(), chain) for chain in chains) > 0.98 * fixed


@pytest.mark.parametrize("check_s", [0.7, 1.2])
def test_where_a_draft_costs_a_check_it_is_left_out(check_s: float) -> None:
    """All is on the device, and Python takes longer than any layer: the backbone alone is the quickest."""
    chain, costs = recorded(), (check_s, 0.2)
    alone = 1 / check_s
    assert max(replay(FixedLength(length), chain, costs) for length in LENGTHS) < alone
    assert replay(Adaptive(), chain, costs) > 0.93 * alone


def test_the_two_links_want_different_lengths() -> None:
    """Or the test above would not tell an adaptive length from a lucky one."""
    chain = recorded()
    best = [max(LENGTHS, key=lambda n: replay(FixedLength(n), chain, check_s)) for check_s in CHECK_S.values()]
    assert best[0] * 1.5 < best[1]


def blocks(
    policy: Adaptive, margin: float, *, count: int = 50, right: int = 99, check_s: float = 10.0
) -> Iterator[int]:
    """Lengths of drafts whose tokens all have one margin, the first `right` of them being right."""
    for _ in range(count):
        margins: list[float] = []
        while policy.goes_on(margins):
            margins.append(margin)
            policy.drafted(1.0)
        policy.checked(margins, min(right, len(margins)), check_s)
        yield len(margins)


def test_drafts_grow_while_all_is_right_and_shrink_when_it_is_not() -> None:
    policy = Adaptive()
    assert next(blocks(policy, 0.99)) == FIRST_DRAFTED
    *_, grown = blocks(policy, 0.99)
    assert grown == MOST_DRAFTED
    shrunk = [*blocks(policy, 0.99, right=0, count=200)][-40:]
    assert max(shrunk) <= 2 and sum(shrunk) >= 2  # one now and then, or it would never learn of better days
    *_, grown = blocks(policy, 0.99, count=300)
    assert grown == MOST_DRAFTED


def test_a_draft_stops_at_the_token_that_is_likely_wrong() -> None:
    policy = Adaptive()
    for _ in range(60):
        policy.drafted(1.0)
        policy.checked([0.99] * 6 + [0.01], 6, 5.0)
    assert policy.goes_on([0.99] * 6)
    assert not policy.goes_on([0.99, 0.01])


def test_agreement_learns_by_margin_and_only_up_to_the_first_wrong_token() -> None:
    agreement = Agreement()
    unseen = agreement.of(0.6)
    for _ in range(100):
        agreement.observe([0.95, 0.01, 0.6], 1)
    assert agreement.of(0.95) > 0.95
    assert agreement.of(0.01) < 0.1
    assert agreement.of(0.6) == unseen
    assert agreement.mean == pytest.approx(0.5, abs=0.05)


def test_the_cost_of_a_check_is_a_line() -> None:
    cost = CheckCost()
    cost.observe(5, 7.0)
    assert (cost.next_token_s, cost.of(9)) == (0.0, 7.0)
    for tokens in (3, 8, 17, 5, 9):
        cost.observe(tokens, 6.0 + 0.2 * tokens)
    assert cost.next_token_s == pytest.approx(0.2)
    assert cost.of(20) == pytest.approx(10.0)


@pytest.mark.parametrize(("text", "value"), [("adaptive", "adaptive"), ("1", 1), (32, 32), (" 8 ", 8)])
def test_drafts_are_read(text: str | int, value: str | int) -> None:
    assert parse_draft(text) == value
    assert str(drafting_of(value)) == str(value)


@pytest.mark.parametrize("text", ["0", 33, True, "tree", "", "1.5", None])
def test_what_is_no_draft_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="expected adaptive or a number of tokens from 1 to 32"):
        parse_draft(text)
