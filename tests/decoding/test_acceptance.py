"""Drafts of a random model that go by the verdicts of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from families import tokens

from policies.acceptance import Acceptance, Verdict, verdicts
from river_offload import QuantConfig
from river_offload.errors import UsageError

NEW = 24
CHAIN = ((0.9, True), (0.8, True), (0.1, False), (0.95, True))
FINE = QuantConfig(bits=8, group_size=32)
"""A river that is right now and then, and wrong now and then."""


def acceptance(*found: tuple[float, bool]) -> Acceptance:
    return Acceptance(tuple(Verdict(*verdict) for verdict in found))


def checks(model: Any) -> list[tuple[int, int]]:
    """Of each check of the last generation: tokens looked at, tokens kept."""
    records = model.river.account.records
    return [(record.new_tokens - 1, record.accepted) for record in records if record.path == "check"]


@pytest.mark.parametrize("rows", [1, 2])
def test_checks_keep_what_the_chain_says_whatever_the_tokens_are(rows: int, drafter: Callable[..., Any]) -> None:
    model = drafter("llama", draft=3, batch=2)
    cache = model.river.new_cache()
    with model.river.using(acceptance=acceptance(*CHAIN)):
        text = model.generate(tokens(9, rows=rows), past_key_values=cache, max_new_tokens=13, do_sample=False)
        assert checks(model) == [(3, 2), (3, 3), (3, 0), (3, 3)]
        assert {layer.get_seq_length() for layer in cache.layers} == {text.shape[1] - 1}
        assert model.river.report()["checked_share"] == 1.0
        # The next text goes on where this one ended, again and again.
        model.generate(tokens(9, rows=rows, seed=2), max_new_tokens=2 + 4 + 1 + 3, do_sample=False)
        assert checks(model) == [(3, 0), (3, 3), (3, 0), (2, 2)]
    model.generate(tokens(9, rows=rows), max_new_tokens=13, do_sample=False)
    assert checks(model) != [(3, 2), (3, 3), (3, 0), (3, 3)]


def test_the_text_is_the_rivers_where_all_is_right_and_the_backbones_where_nothing_is(
    drafter: Callable[..., Any],
) -> None:
    model = drafter("llama", mode="gated", draft=4, also_modes=("lossless",))

    def written(new_tokens: int, **settings: Any) -> list[int]:
        with model.river.using(**settings):
            return model.generate(tokens(9), max_new_tokens=new_tokens, do_sample=False)[0].tolist()

    block = 1 + 4  # the prompt's token and a draft
    river, backbone = written(block, gate=0.0), written(NEW, mode="lossless")
    assert river != backbone[: 9 + block]
    assert written(block + 1, mode="lossless", acceptance=acceptance((0.5, True)))[:-1] == river
    assert written(NEW, mode="lossless", acceptance=acceptance((0.5, False))) == backbone


def test_the_gate_looks_at_the_margins_of_the_chain(drafter: Callable[..., Any]) -> None:
    model = drafter("llama", mode="gated", gate=0.5, draft=3)
    # Sure, so kept unasked although the backbone would not agree; asked and right; asked and wrong.
    with model.river.using(acceptance=acceptance((0.9, False), (0.2, True), (0.3, False))):
        model.generate(tokens(9), max_new_tokens=1 + 3 + 3 + 3, do_sample=False)
    assert checks(model) == [(3, 2)] * 2 + [(2, 2)]
    assert [record.decided for record in model.river.account.records if record.path == "check"] == [2, 2, 2]
    with model.river.using(acceptance=acceptance((0.9, False))):
        model.generate(tokens(9), max_new_tokens=1 + 4 + 4, do_sample=False)
    assert checks(model) == [(3, 3)] * 2
    assert model.river.report()["checked_share"] == pytest.approx(2 / 8)


def test_a_run_by_its_own_trace_keeps_as_many_again(drafter: Callable[..., Any]) -> None:
    model = drafter("llama", draft=4, quant=FINE)
    options = {"max_new_tokens": 48, "do_sample": False}
    model.generate(tokens(9), **options)
    expected, chain = checks(model), verdicts(model.river.account.records)
    assert len({accepted for _, accepted in expected}) > 2
    with model.river.using(acceptance=Acceptance(chain)):
        model.generate(tokens(9, seed=4), **options)
    assert checks(model) == expected
    assert verdicts(model.river.account.records) == chain  # the trace tells the margins that were gone by


def test_an_adaptive_draft_goes_by_the_chain_and_learns_nothing_for_later(drafter: Callable[..., Any]) -> None:
    model = drafter("llama")
    river = model.river
    own = river.drafting
    with river.using(acceptance=acceptance((0.99, True))):
        assert river.draft == "adaptive"
        model.generate(tokens(9), max_new_tokens=60, do_sample=False)
        assert river.drafting.draft_s is not None
    found = checks(model)
    assert found[0] == (8, 8)
    assert all(accepted == drafted for drafted, accepted in found)
    assert river.drafting is own
    assert own.draft_s is None


def test_where_nothing_is_checked_there_is_nothing_to_replay(drafter: Callable[..., Any]) -> None:
    river = drafter("llama", mode="gated", also_modes=("backbone",)).river
    given = acceptance((0.5, True))
    for settings, message in (
        ({"mode": "backbone"}, "acceptance has no effect in mode backbone, which checks no drafts"),
        ({"gate": 0.0}, "acceptance has no effect in mode gated with a gate of 0"),
        ({"depths": [5]}, "acceptance has no effect in mode exit"),
    ):
        with pytest.raises(UsageError, match=message), river.using(acceptance=given, **settings):
            pass
        assert river.acceptance is None and river.mode == "gated" and river.gate == 0.3
