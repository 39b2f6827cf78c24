"""A run that fills the context, its bytes counted under the names of its plan: what `river-mem measure` shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from river_offload.config import RiverConfig
from river_offload.errors import UsageError
from river_offload.kv.cache import host_tensors
from river_offload.loading import load_config
from river_offload.memory.process import read_process
from river_offload.memory.storages import storage_bytes
from river_offload.memory.unattributed import unattributed
from river_offload.phases import metered
from river_offload.planning.plan import Plan, make_plan
from river_offload.progress import Progress, Silent

SCHEMA = 1
NEW_TOKENS = 8
Watched = Callable[[PreTrainedModel], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Bytes:
    """Device bytes at the highest moment."""

    peak_device_bytes: int
    categories: Mapping[str, int]
    kv_host_bytes: int = 0
    """Keys and values that rest on the host: main memory of a GPU, a file of a CPU."""

    def as_json(self) -> dict[str, Any]:
        return {
            "peak_device_bytes": self.peak_device_bytes,
            "categories": dict(self.categories),
            "kv_host_bytes": self.kv_host_bytes,
        }


def measure_memory(
    config: RiverConfig,
    *,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
    watched: Watched | None = None,
) -> dict[str, Any]:
    """Plan, load, run, count. Returns plain values (docs/river-mem.md).

    Args:
        watched: what to enter while the loaded model runs.

    Raises what `load` raises: a model that does not fit is refused before anything of it is read.
    """
    progress = progress or Silent()
    plan = make_plan(config, progress)
    plan.checkpoint.close()
    if new_tokens >= plan.config.context:
        raise UsageError(f"{new_tokens} new tokens leave no room for a prompt in a context of {plan.config.context}")
    before = read_process(plan.device)
    model = load_config(config, progress)
    try:
        if watched is None:
            progress.start("running", 0, "")
        with contextlib.nullcontext() if watched is None else watched(model):
            measured = run_full(model, new_tokens, seed=seed, second_turn=plan.weighed.needs.second_turn)
        progress.finish()
        nobodys = unattributed(model.river.device_bytes(), before, read_process(plan.device))
        return _result(plan, model, measured, new_tokens) | {"unattributed": nobodys}
    finally:
        progress.finish()
        model.river.close()


def run_full(model: PreTrainedModel, new_tokens: int, *, seed: int = 0, second_turn: bool = False) -> Bytes:
    """Random tokens in, until the context is full, the way that is the highest in the plan, too: a prompt of all but
    one token, or with `second_turn` a conversation in two halves. Then a shorter prompt and `new_tokens` after it.
    """
    context = model.river.config.context
    half = context // 2
    runs = [[(half, 1), (context - 1, 1)] if second_turn else [(context - 1, 1)]]
    if new_tokens > 1:
        runs.append([(context - new_tokens, new_tokens)])
    return max((_run(model, run, seed) for run in runs), key=lambda found: found.peak_device_bytes)


def _run(model: PreTrainedModel, turns: list[tuple[int, int]], seed: int) -> Bytes:
    """(prompt tokens, new tokens) of each turn of one conversation; a prompt holds those before it."""
    river = model.river
    held_bytes, held = river.device_bytes(), river.held_by_category()
    torch.manual_seed(seed)  # the sampler's, too
    # Sampling has more working memory than taking the likeliest token: it is what the plan holds room for.
    own, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    cache: Cache = river.new_cache()
    try:
        with metered(model, cache) as meter:
            ids = _random_ids(model, turns[-1][0])
            # A cache that was in use before is there in whole from the first layer on: the higher of the two cases.
            _generate(model, ids[:, :1], cache, 1)
            cache.reset()
            for prompt_tokens, new_tokens in turns:
                _generate(model, ids[:, :prompt_tokens], cache, new_tokens)
    finally:
        model.generation_config = own
    kv_host_bytes = sum(storage_bytes(host_tensors(layer)) for layer in cache.layers)
    return Bytes(held_bytes + meter.peak_bytes, held | meter.peak_by_tag(), kv_host_bytes)


def _generate(model: PreTrainedModel, prompt: torch.Tensor, cache: Cache, new_tokens: int) -> None:
    mask = _mask(prompt)
    options = {"do_sample": True, "top_p": 0.9}
    model.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=new_tokens, **options)


def _random_ids(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, vocab_size, (model.river.config.batch, tokens), device=model.device)


def _mask(prompt: torch.Tensor) -> torch.Tensor:
    """Rows of different length, as a batch has: the first row is whole, the others begin with padding."""
    mask = torch.ones_like(prompt)
    if len(prompt) > 1 and prompt.shape[1] > 1:
        mask[1:, 0] = 0
    return mask


def _result(plan: Plan, model: PreTrainedModel, measured: Bytes, new_tokens: int) -> dict[str, Any]:
    river = model.river
    categories = plan.categories
    return {
        "schema": SCHEMA,
        "kind": "run",
        "model": plan.config.model,
        "context": plan.config.context,
        "batch": plan.config.batch,
        "mode": plan.config.mode,
        "new_tokens": new_tokens,
        "device": str(model.device),
        "budget_bytes": plan.placement.budget_bytes,
        "planned": Bytes(sum(categories.values()), categories, plan.placement.kv_host_bytes).as_json(),
        "measured": measured.as_json(),
        "tokens_per_s": river.report()["tokens_per_s"],
    }
