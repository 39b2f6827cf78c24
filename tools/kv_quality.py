"""What fewer bits in the KV cache cost: perplexity and agreement on a long English text, beside full precision.

    python tools/kv_quality.py demo --tokens 8192 --bits 8 --bits 4

The text is that of Python's own manual pages (`pydoc_data.topics`), so nothing has to be fetched. It is fed in passages
of `--chunk` tokens in mode backbone: every passage attends to what the ones before it left in the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

import river_offload
from river_offload.kv.cache import cache_argument


@dataclass(frozen=True)
class Quality:
    """One kind of cache on one text."""

    kv_bits: int
    perplexity: float
    change_percent: float
    """Of the perplexity, against full precision."""
    agreement: float
    """Share of positions whose likeliest next token is that of full precision."""
    kv_device_bytes: int
    """Planned for the context, workspace and recent tokens included."""
    seconds: float


@dataclass(frozen=True)
class Reading:
    """What a model made of a text."""

    losses: torch.Tensor
    """float32 [tokens - 1], nats."""
    choices: torch.Tensor
    """int64 [tokens - 1], the likeliest next tokens."""
    kv_device_bytes: int
    seconds: float


@torch.no_grad()
def read(model_name: str, tokens: int, chunk: int, kv_bits: int, **options: Any) -> Reading:
    """Feed the first `tokens` of the text to a model loaded with that many bits in its cache."""
    model = river_offload.load(model_name, mode="backbone", context=tokens, kv_bits=kv_bits, **options)
    with model.river:
        ids = text_ids(model.river.tokenizer, tokens)
        cache, losses, choices = model.river.new_cache(), [], []
        started = time.perf_counter()
        for start in range(0, tokens - 1, chunk):
            end = min(start + chunk, tokens - 1)
            logits = model(ids[:, start:end], use_cache=True, **{cache_argument(model): cache}).logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : end + 1], reduction="none"))
            choices.append(logits.argmax(-1))
        seconds = time.perf_counter() - started
        return Reading(torch.cat(losses), torch.cat(choices), model.river.placement.terms["kv"], seconds)


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    """The first tokens of Python's manual pages, int64 [1, tokens]."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: torch.Tensor = tokenizer(text[: 12 * tokens], return_tensors="pt")["input_ids"][:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has {ids.shape[1]} tokens: ask for no more")
    return ids


def compare(reading: Reading, plain: Reading, kv_bits: int) -> Quality:
    """A reading beside that of full precision."""
    perplexity, expected = (math.exp(each.losses.mean().item()) for each in (reading, plain))
    return Quality(
        kv_bits,
        perplexity,
        100 * (perplexity / expected - 1),
        (reading.choices == plain.choices).float().mean().item(),
        reading.kv_device_bytes,
        reading.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--bits", type=int, action="append", choices=(8, 4), help="default: 8 and 4")
    parser.add_argument("--budget", help="device memory to stay within, 2GiB for example")
    asked = parser.parse_args()
    options = {} if asked.budget is None else {"budget": asked.budget}
    plain = read(asked.model, asked.tokens, asked.chunk, 16, **options)
    print(json.dumps(asdict(compare(plain, plain, 16))), flush=True)
    for bits in asked.bits or (8, 4):
        print(json.dumps(asdict(compare(read(asked.model, asked.tokens, asked.chunk, bits, **options), plain, bits))))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
