"""Rows of different length, padded on the left: no row notices, and padding never keeps a passage on the backbone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import tokens
from transformers import LogitsProcessor, LogitsProcessorList

from river_offload.call import Call

LENGTHS = (12, 5, 9)
PAD = 0
WIDTHS = (9, 10, 16)
"""A prompt of 9 tokens: no padding, one token of it, nearly as much as there is text."""


def rows() -> list[torch.Tensor]:
    return [tokens(count, seed=10 + count) for count in LENGTHS]


def padded(prompts: list[torch.Tensor], width: int | None = None) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [rows, width], padding on the left."""
    width = width or max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :] = prompt[0]
        mask[row, width - prompt.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, new_tokens: int = 6, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [rows, new] and their logits [rows, new, vocab]."""
    output = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_backbone_gives_each_row_what_it_gets_alone(
    family: str, cache: str | None, plain: Callable[[str], Any], open_river: Callable[..., Any]
) -> None:
    model = open_river(family, mode="backbone", batch=3)
    options = {} if cache is None else {"cache_implementation": cache}
    found, logits = generated(model, **padded(rows()), **options)
    their, their_logits = generated(plain(family), **padded(rows()), **options)
    assert torch.equal(found, their)
    assert torch.equal(logits, their_logits)
    for row, prompt in enumerate(rows()):
        alone, alone_logits = generated(model, input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(found[row], alone[0])
        torch.testing.assert_close(logits[row], alone_logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_padding_does_not_change_the_depth(family: str, cache: str | None, open_river: Callable[..., Any]) -> None:
    model = open_river(family, mode="exit", tau=2.0)
    options = {} if cache is None else {"cache_implementation": cache}
    prompt = rows()[2]
    recorded = []
    for width in WIDTHS:
        model.river.trace.clear()
        generated(model, **padded([prompt], width), **options)
        recorded.append([record.signals for record in model.river.trace.records])
    alone = recorded[0]
    for with_padding in recorded[1:]:
        for expected, found in zip(alone, with_padding, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
    for tau in middles(alone[0]):
        with model.river.using(tau=tau):
            depths = []
            for width in WIDTHS:
                generated(model, 2, **padded([prompt], width), **options)
                depths.append(model.river.report()["depths"][0])
        assert len(set(depths)) == 1
        assert depths[0] < model.river.num_layers


def middles(signals: list[float]) -> list[float]:
    """Thresholds between any two of the signals, and one below all."""
    ordered = sorted(signals)
    return [ordered[0] - 0.05, *((a + b) / 2 for a, b in pairwise(ordered) if b - a > 1e-3)]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_batch_leaves_when_its_slowest_row_would(
    family: str, cache: str | None, open_river: Callable[..., Any]
) -> None:
    model = open_river(family, mode="exit", tau=2.0, batch=3)
    options = {} if cache is None else {"cache_implementation": cache}
    alone = []
    for prompt in rows():
        generated(model, 1, input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        alone.append(model.river.trace.records[-1].signals)
    generated(model, 1, **padded(rows()), **options)
    expected = [min(signals) for signals in zip(*alone, strict=True)]
    assert model.river.trace.records[-1].signals == pytest.approx(expected, abs=1e-5)


REAL = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


def causal(real: torch.Tensor, window: int | None = None, keys: int | None = None) -> torch.Tensor:
    """The 4-d mask that transformers makes of a 2-d one: bool [rows, 1, queries, keys]."""
    count = real.shape[1]
    query, key = torch.arange(count)[:, None], torch.arange(count)[None]
    seen = (key <= query) & (key > query - (window or count))
    allowed = (seen[None] & real[:, None])[:, None]
    return torch.nn.functional.pad(allowed, (0, (keys or count) - count))


def real_tokens(mask: Any, new_tokens: int, cached_tokens: int) -> torch.Tensor | None:
    class Cached:
        def get_seq_length(self) -> int:
            return cached_tokens

    rows = 3 if mask is None or isinstance(mask, dict) else len(mask)
    ids = torch.ones(rows, new_tokens, dtype=torch.long)
    return Call.of((ids,), {"attention_mask": mask, "past_key_values": Cached()}).real_tokens()


@pytest.mark.parametrize("kind", ["2-d", "bool", "float", "static", "window", "dict", "sliding dict"])
def test_real_tokens_are_found_in_every_kind_of_mask(kind: str) -> None:
    allowed = causal(REAL)
    mask: object = {
        "2-d": REAL.long(),
        "bool": allowed,
        "float": torch.where(allowed, 0.0, torch.finfo(torch.float32).min),
        "static": causal(REAL, keys=9),
        "window": causal(REAL, window=2),
        "dict": {"sliding_attention": causal(REAL, window=1), "full_attention": allowed},
        "sliding dict": {"sliding_attention": causal(REAL, window=2)},
    }[kind]
    found = real_tokens(mask, new_tokens=5, cached_tokens=0)
    assert found is not None
    assert torch.equal(found, REAL)


def test_masks_over_cached_tokens_speak_of_the_new_ones_only() -> None:
    later = real_tokens(REAL.long(), new_tokens=3, cached_tokens=2)
    assert later is not None
    assert torch.equal(later, REAL[:, 2:])
    four = real_tokens(causal(REAL)[:, :, 1:], new_tokens=4, cached_tokens=1)
    assert four is not None
    assert torch.equal(four, REAL[:, 1:])
    assert real_tokens(None, new_tokens=4, cached_tokens=0) is None
    assert real_tokens(REAL.long(), new_tokens=1, cached_tokens=4) is None


def test_rows_that_are_finished_have_no_say_in_the_exit(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=0.0, batch=3)
    rows = tokens(5, rows=3)
    eos = 7
    # Sequences are forced: the first row ends at once, the others never do.
    forced = torch.tensor([[eos, 0, 0, 0], [11, 12, 13, 14], [21, 22, 23, 24]])
    seen: list[list[list[bool]] | None] = []
    plain = model.river._flow.open

    def opened(call: Call) -> Any:
        passage = plain(call)
        seen.append(None if passage.real is None else passage.real.tolist())
        return passage

    class Force(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = forced[:, input_ids.shape[1] - 5]
            return torch.full_like(scores, -1e9).scatter(1, chosen.unsqueeze(1), 0.0)

    model.river._flow.open = opened
    processors = LogitsProcessorList([Force()])
    model.generate(
        rows, max_new_tokens=4, do_sample=False, eos_token_id=eos, pad_token_id=0, logits_processor=processors
    )
    assert seen[1:] == [[[False], [True], [True]]] * 3


def test_padding_of_a_single_row_is_taken_off_and_put_back(pair: Callable[..., Any]) -> None:
    model, plain = pair()
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens(6)], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, plain.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
    assert model.river.trace.records[0].new_tokens == 6
    whole = model.generate(
        ids, attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    assert torch.equal(whole.sequences, found)
