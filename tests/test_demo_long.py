"""The demo model reads 7,000 tokens: its answer is the same in chunks as at once, and within 200 MiB as with room."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch

import river_offload

pytestmark = [pytest.mark.demo, pytest.mark.slow]
CONTEXT, PROMPT_TOKENS = 7168, 7000
NEEDLE = "\nThe secret number of the lighthouse keeper is 4817.\n"
QUESTION = "\nQuestion: What is the secret number of the lighthouse keeper?\nAnswer: The secret number is"


def prompt(tokenizer: Any, share: float) -> torch.Tensor:
    """[1, 7000] tokens of Python's manual with a sentence planted at `share` of it, and a question."""
    manual = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    needle, question = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (NEEDLE, QUESTION))
    hay = tokenizer(manual, add_special_tokens=False)["input_ids"][: PROMPT_TOKENS - len(needle) - len(question)]
    place = int(share * len(hay))
    return torch.tensor([[*hay[:place], *needle, *hay[place:], *question]])


def answers(shares: tuple[float, ...], **options: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """The tokens after each prompt, in mode backbone, and the report of each."""
    model = river_offload.load("demo", mode="backbone", context=CONTEXT, device="cpu", **options)
    found = []
    with model.river as river:
        for share in shares:
            ids = prompt(river.tokenizer, share)
            assert ids.shape[1] == PROMPT_TOKENS
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            found.append(
                (
                    text[0, PROMPT_TOKENS:].tolist(),
                    river.report() | {"text": river.tokenizer.decode(text[0, PROMPT_TOKENS:])},
                )
            )
    return found


def test_a_sentence_in_a_long_text_is_read_in_chunks_as_at_once() -> None:
    """Float32: bfloat16 rounds differently in chunks. The sentence stands at 10, 50 and 90 % of the text."""
    shares = (0.1, 0.5, 0.9)
    chunked = answers(shares, dtype="float32", budget="3GiB", prefill_chunk=512)
    at_once = answers(shares, dtype="float32", budget="3GiB", prefill_chunk=CONTEXT)
    assert [ids for ids, _ in chunked] == [ids for ids, _ in at_once]
    assert all(report["placement"]["prefill_chunk"] == 512 for _, report in chunked)
    assert all(report["placement"]["prefill_chunk"] is None for _, report in at_once)
    assert "4817" in chunked[-1][1]["text"]


def test_7000_tokens_within_200_mib(tmp_path: Path) -> None:
    """Keys and values rest off the device, to the bit as they were; the states of the prompt do."""
    ((small, report),) = answers((0.9,), budget="200MiB", kv_tier="host", prefill_chunk=512)
    ((roomy, other),) = answers((0.9,), budget="2GiB", prefill_chunk=512)
    assert small == roomy
    assert report["peak_device_bytes"] <= report["budget_bytes"] == 200 << 20 < other["peak_device_bytes"]
    assert report["placement"]["streamed_layers"] > 0 == other["placement"]["streamed_layers"]
