"""Samples have the backbone's distribution, and are those that transformers draws with the same seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import budget_for, tokens
from transformers import set_seed

from river_offload import QuantConfig
from river_offload.decoding import loop

SAMPLES = 20_000
ROWS = 2_000
SMALL: dict[str, Any] = {"vocab_size": 16, "num_hidden_layers": 3, "initializer_range": 0.3}
COARSE = QuantConfig(bits=2, group_size=32)
"""A river that 20,000 samples can tell from the backbone."""
PROMPT = torch.tensor([[3, 9, 4, 12]])


@pytest.fixture
def small(checkpoint: Callable[..., Path], open_river: Callable[..., Any]) -> Any:
    """16 tokens, 3 layers of which one is resident, a river that is often wrong."""
    directory = checkpoint("llama", **SMALL)
    options: dict[str, Any] = {
        "mode": "lossless",
        "context": 16,
        "batch": ROWS,
        "slots": 1,
        "draft": 2,
        "quant": COARSE,
    }
    return open_river(directory, budget=budget_for(directory, 1, **options), **options)


@torch.no_grad()
def exact(model: Any, top_p: float) -> torch.Tensor:
    """Probabilities of all 16^3 continuations, by the backbone: float64 [4096]."""
    ends = torch.tensor(list(itertools.product(range(16), repeat=2)))
    with model.river.using(mode="lossless"):
        logits = model(torch.cat([PROMPT.expand(256, -1), ends], dim=1)).logits[:, 3:].double()
    steps = nucleus(logits.softmax(-1), top_p)
    first = steps[:, 0].gather(1, ends[:, :1])
    second = steps[:, 1].gather(1, ends[:, 1:])
    return (first * second * steps[:, 2]).flatten()


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens that make up `top_p`, the one that crosses it included, as transformers has it."""
    ordered, places = probabilities.sort(descending=True)
    ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
    kept = torch.zeros_like(probabilities).scatter(-1, places, ordered)
    return kept / kept.sum(-1, keepdim=True)


def drawn(model: Any, top_p: float) -> torch.Tensor:
    """How often each continuation came: float64 [4096].

    In so many rows one is always wrong, so every round keeps one token; the texts of a seed, below, keep more.
    """
    set_seed(5)
    counts = torch.zeros(4096, dtype=torch.float64)
    for _ in range(SAMPLES // ROWS):
        rows = model.generate(
            PROMPT.expand(ROWS, -1), max_new_tokens=3, do_sample=True, temperature=1.0, top_p=top_p, top_k=0
        )[:, 4:]
        counts += torch.bincount(rows @ torch.tensor([256, 16, 1]), minlength=4096)
    return counts


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test, cells of fewer than 5 expected samples put together."""
    expected = probabilities * SAMPLES
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    some = expected > 1e-9
    assert counts[~some].sum() == 0
    statistic = ((counts - expected)[some] ** 2 / expected[some]).sum()
    freedom = torch.tensor((int(some.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_samples_have_the_distribution_of_the_backbone(top_p: float, small: Any) -> None:
    probabilities = exact(small, top_p)
    assert probabilities.sum() == pytest.approx(1.0)
    counts = drawn(small, top_p)
    assert p_value(counts, probabilities) > 0.01
    assert small.river.report()["drafted"] > 0


def test_a_wrong_rule_is_found(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft accepted: the samples are the river's."""

    def gullible(rounds: loop._Rounds, block: loop.Block, *found: Any) -> None:
        block.sure = [torch.ones_like(sure) for sure in block.sure]
        honest(rounds, block, *found)

    honest = loop._Rounds._judge
    monkeypatch.setattr(loop._Rounds, "_judge", gullible)
    assert p_value(drawn(small, 1.0), exact(small, 1.0)) < 1e-6


@pytest.mark.parametrize("draft", [1, 4, "adaptive"])
@pytest.mark.parametrize("options", [{"temperature": 1.3}, {"top_p": 0.8, "top_k": 20}, {"num_return_sequences": 3}])
def test_a_seed_gives_the_sample_that_transformers_draws(
    options: dict[str, Any], draft: int | str, plain: Callable[[str], Any], drafter: Callable[..., Any]
) -> None:
    model = drafter("llama", batch=3)
    found = []
    with model.river.using(draft=draft):
        for each in (model, plain("llama")):
            set_seed(11)
            # Twice: the second text begins where the first one left the generator.
            found.append([each.generate(tokens(9), max_new_tokens=12, do_sample=True, **options) for _ in range(2)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert not torch.equal(*found[0])
    # An adaptive length leaves drafts out here, where a check of one token costs no more.
    assert draft == "adaptive" or model.river.report()["accepted"] > 0 or "num_return_sequences" in options


def test_the_chi_square_of_a_fair_die() -> None:
    """The test's own arithmetic: 10 more than expected in one of two cells of 10,000 each, 20 in the tails."""
    counts = torch.tensor([10_100.0, 9_900.0], dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert p_value(counts, half) == pytest.approx(math.erfc(math.sqrt(2.0 / 2)), rel=1e-9)
