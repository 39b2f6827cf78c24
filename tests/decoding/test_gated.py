"""Mode gated: the backbone has its say where the river is unsure; the gate is a dial from the river to lossless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import both, tokens
from transformers import LogitsProcessor, LogitsProcessorList

from river_offload.errors import UsageError

NEW = 24


@torch.no_grad()
def by_hand(
    model: Any, ids: torch.Tensor, gate: float, draft: int, new_tokens: int, sign: int = 1
) -> tuple[list[int], int]:
    """The text, and how many of its tokens the backbone had a say in: passage by passage, without the loop.

    `sign`: scores are so many times the logits.
    """
    river = model.river
    depth, cache = river.draft_depth, river.new_cache()

    def run(mode: str, text: list[int]) -> torch.Tensor:
        with river.using(mode=mode):
            fed = torch.tensor([text[cache.get_seq_length() :]])
            return model(fed, past_key_values=cache, use_cache=True).logits[0] * sign

    text = ids[0].tolist()
    goal, decided = len(text) + new_tokens, 0
    text.append(int(run("lossless", text)[-1].argmax()))
    while len(text) < goal:
        drafted, sure = list(text), []
        while len(sure) < min(draft, goal - len(text) - 1):
            likely = run(f"fixed:{depth}", drafted)[-1].softmax(-1).topk(2)
            drafted.append(int(likely.indices[0]))
            sure.append(float(likely.values[0] - likely.values[1]) > gate)
        cache.crop(-(cache.get_seq_length() - (len(text) - 1)))
        theirs = run("lossless", drafted).argmax(-1).tolist()
        before = len(text)
        for index, own in enumerate(theirs):
            kept = index < len(sure) and sure[index]
            decided += not kept
            text.append(drafted[before + index] if kept else own)
            if index == len(sure) or text[-1] != drafted[before + index]:
                break
        cache.crop(-(cache.get_seq_length() - (len(text) - 1)))
    return text, decided


@pytest.mark.parametrize("gate", [0.005, 0.02, 0.05])
def test_sure_tokens_are_kept_and_the_backbone_decides_the_others(gate: float, drafter: Callable[..., Any]) -> None:
    model = drafter("gemma3", mode="gated", draft=4, also_modes=("exit", "lossless"))
    model.river.gate = gate
    expected, decided = by_hand(model, tokens(9), gate, 4, NEW)
    found = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
    assert found[0].tolist() == expected
    report = model.river.report()
    assert report["checked_share"] == pytest.approx(decided / (NEW - 1))
    assert 0 < report["checked_share"] < 1
    assert model.river.account.mode == "gated"


def test_a_row_may_write_the_padding_token(drafter: Callable[..., Any]) -> None:
    """Nothing is finished by it: the text is the same whatever pads."""
    model = drafter("llama", mode="gated", gate=0.0, draft=4, batch=2)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 1}
    prompt = tokens(6, rows=2)
    mask = torch.ones_like(prompt)
    free = model.generate(prompt, attention_mask=mask, pad_token_id=2, **options)
    assert 1 not in free[:, 6:]  # no row ends
    for pad in set(free[1, 6:].tolist()):
        found = model.generate(prompt, attention_mask=mask, pad_token_id=pad, **options)
        assert torch.equal(found, free), pad


class Upside(LogitsProcessor):
    """The least likely token becomes the likeliest."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return -scores


def test_the_gate_goes_by_what_the_token_was_picked_from(drafter: Callable[..., Any]) -> None:
    model = drafter("gemma3", mode="gated", draft=4, gate=0.002, also_modes=("exit", "lossless"))
    expected, decided = by_hand(model, tokens(9), 0.002, 4, NEW, sign=-1)
    processors = LogitsProcessorList([Upside()])
    found = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False, logits_processor=processors)
    assert found[0].tolist() == expected
    assert model.river.report()["checked_share"] == pytest.approx(decided / (NEW - 1))
    assert 0 < decided < NEW - 1


@pytest.mark.parametrize("gate", [0.0, 0.02])
@pytest.mark.parametrize("end", [None, 3, 9])
def test_report_and_trace_count_the_same_tokens(gate: float, end: int | None, drafter: Callable[..., Any]) -> None:
    """`end`: the new token that ends the text, wherever in a block it stands."""
    model = drafter("gemma3", mode="gated", draft=4, gate=gate)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if end is not None:
        free = model.generate(tokens(9), **options)[0, 9:].tolist()
        options |= {"eos_token_id": free[end], "pad_token_id": 0}
        model.river.trace.clear()
    found, report = model.generate(tokens(9), **options), model.river.report()
    later = [record for record in model.river.trace.records if record.path != "prefill"]
    assert sum(record.text_tokens for record in later) == found.shape[1] - 9 - 1
    assert model.river.trace.mean_depth == pytest.approx(report["mean_depth"])
    nbytes = sum(record.bytes_streamed for record in later)
    assert report["bytes_per_token"] == pytest.approx(nbytes / (report["new_tokens"] - 1))
    assert report["accepted"] == sum(record.accepted for record in later) > 0


def test_a_gate_of_0_is_the_river_and_a_gate_of_1_the_backbone(drafter: Callable[..., Any]) -> None:
    model = drafter("llama", mode="gated", gate=0.0, also_modes=("exit", "backbone"))
    river = model.river
    found = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
    report = river.report()
    assert (report["backbone_passes"], report["checked_share"]) == (0, 0.0)
    cache, text = river.new_cache(), tokens(9)
    for mode in ("backbone", *[f"fixed:{river.draft_depth}"] * (NEW - 1)):
        with torch.no_grad(), river.using(mode=mode):
            logits = model(text[:, cache.get_seq_length() :], past_key_values=cache).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, text)
    with river.using(gate=1.0):
        found = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
        assert river.report()["checked_share"] == 1.0
    with river.using(mode="backbone"):
        assert torch.equal(found, model.generate(tokens(9), max_new_tokens=NEW, do_sample=False))


def test_a_seed_repeats_a_gated_sample(drafter: Callable[..., Any]) -> None:
    model = drafter("llama", mode="gated", gate=0.02, batch=2)
    assert model.river.draft == 16  # and no length that depends on measured times
    prompt = tokens(9, rows=2)
    found, again = both((model, model), prompt, max_new_tokens=NEW, do_sample=True)
    assert torch.equal(found, again)
    assert 0 < model.river.report()["checked_share"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "gated", "gate": 1.5}, "gate is 1.5: expected a probability"),
        ({"mode": "lossless", "gate": 0.5}, "gate has no effect in mode lossless"),
        ({"mode": "exit", "draft": 4}, "draft has no effect in mode exit"),
        ({"mode": "lossless", "draft": 99}, "unknown draft 99: expected adaptive or a number of tokens from 1 to 32"),
        ({"mode": "lossless", "draft": "long"}, "unknown draft 'long'"),
        ({"mode": "lossless", "prefetch": "predicted"}, "prefetch=predicted has no effect in mode lossless"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(
    options: dict[str, Any], message: str, open_river: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match=message):
        open_river("llama", **options)


def test_settings_are_checked_and_put_back(drafter: Callable[..., Any]) -> None:
    river = drafter("llama", mode="gated", also_modes=("lossless", "exit")).river
    with river.using(mode="lossless"):
        assert river.draft == "adaptive"
    with pytest.raises(UsageError), river.using(draft=3, gate=7.0):
        pass
    for setting in ({"mode": "lossless", "gate": 0.5}, {"mode": "exit", "gate": 0.5}, {"mode": "exit", "draft": 4}):
        with pytest.raises(UsageError, match="has no effect in mode"), river.using(**setting):
            pass
    assert (river.mode, river.draft, river.gate) == ("gated", 16, 0.3)
