"""Methods against contexts: the memory figure of the paper, by running the model on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from policies.prefill import FULL_SPEED_TOKENS
from policies.types import Mode, Placement
from river_offload.attention import why_whole
from river_offload.errors import UsageError
from river_offload.planning import paper
from river_offload.planning.memory_plan import weigh_facts
from river_offload.planning.methods import Method, note
from river_offload.planning.model_facts import ModelFacts
from river_offload.planning.plan import check_options
from river_offload.planning.sizes import Weighed
from river_offload.progress import Progress
from river_offload.structure import Structure

SCHEMA = 1
DEFAULT_CONTEXTS = tuple(1024 * k for k in (4, 8, 16, 32, 64))


@dataclass(frozen=True)
class Row:
    """One method at one context. All sizes are bytes on the device."""

    method: str
    context: int
    peak_device_bytes: int
    """Everything a run holds at its highest: the sum of `categories`."""
    paper_accounting_bytes: int
    """The same method as the paper counts: weights at exactly 16 or 4 bits, and KV."""
    published_bytes: int | None
    categories: Mapping[str, int]
    placement: Placement
    note: str

    def as_json(self, budget_bytes: int | None) -> dict[str, Any]:
        """A row of the JSON. `fits` is null without a budget."""
        placed = {name: getattr(self.placement, name) for name in _PLACED}
        return {
            "method": self.method,
            "context": self.context,
            "peak_device_bytes": self.peak_device_bytes,
            "paper_accounting_bytes": self.paper_accounting_bytes,
            "published_bytes": self.published_bytes,
            "fits": None if budget_bytes is None else self.peak_device_bytes <= budget_bytes,
            "categories": dict(self.categories),
            "placement": {name: list(value) if isinstance(value, tuple) else value for name, value in placed.items()},
            "note": self.note,
        }


@dataclass(frozen=True)
class Sweep:
    """All rows, the methods in the order they were asked for, each with the shortest context first."""

    model: str
    num_layers: int
    batch: int
    device_type: str
    budget_bytes: int | None
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """The object of `river-mem sweep --json`."""
        return {
            "schema": SCHEMA,
            "kind": "sweep",
            "model": self.model,
            "num_layers": self.num_layers,
            "batch": self.batch,
            "device": self.device_type,
            "budget_bytes": self.budget_bytes,
            "rows": [row.as_json(self.budget_bytes) for row in self.rows],
        }


def sweep(
    facts: ModelFacts,
    device_type: str,
    *,
    contexts: Sequence[int] | None,
    methods: Sequence[Method],
    progress: Progress,
) -> Sweep:
    """Run every method dry at every context.

    Args:
        facts: the model; of its options, those that say how it is quantized, for how many rows, and the budget.
        device_type: what is planned for, "cuda" or "cpu"; it need not be there.
        contexts: tokens per row; None for 4K to 64K, as far as the model attends.

    Prompts are read in chunks of `facts.config.prefill_chunk`, where that is None in the shortest ones that cost no
    speed. Raises UsageError for a context beyond what the model attends to, and for a method it has no layers for.
    """
    contexts = _contexts(facts, contexts)
    check_options(replace(facts.config, context=contexts[-1]), facts.structure)
    weights = paper.Weights.of(facts.structure)
    runs = _DryRuns(facts, device_type)
    rows = []
    progress.start("planning", len(methods) * len(contexts), "plans")
    try:
        for method in methods:
            for context in contexts:
                rows.append(_row(method, context, runs, weights, facts.config.batch))
                progress.advance(1)
    finally:
        progress.finish()
    config, layers = facts.config, facts.structure.num_layers
    return Sweep(config.model, layers, config.batch, device_type, config.budget, tuple(rows))


def _contexts(facts: ModelFacts, asked: Sequence[int] | None) -> list[int]:
    """In rising order, each once."""
    limit: int | None = getattr(facts.structure.model.config, "max_position_embeddings", None)
    if asked is None:
        return [context for context in DEFAULT_CONTEXTS if not limit or context <= limit] or [limit or 1]
    for context in asked:
        if limit and context > limit:
            raise UsageError(f"context {context} is more than the {limit} tokens that the model attends to")
    return sorted(set(asked))


_PLACED = (
    *("resident_layers", "streamed_layers", "river_layers", "slots"),
    *("embed_tier", "prefill_chunk", "states_tier"),
)
"""What the JSON says of a placement."""


class _DryRuns:
    """What models weigh, by what it depends on, so that methods which share it run dry once."""

    def __init__(self, facts: ModelFacts, device_type: str) -> None:
        self._facts, self._device_type = facts, device_type
        whole = why_whole(facts.structure.decoder) is not None
        self._chunk = facts.config.prefill_chunk or (None if whole else FULL_SPEED_TOKENS)
        self._structures = {0: facts.structure}
        self._weighed: dict[tuple[int, Mode, int, bool], Weighed] = {}

    def weighed(self, method: Method, context: int) -> Weighed:
        rest_states = method.keeps_least and self._chunk is not None and self._chunk < context
        key = (method.extra_layers, method.mode, context, rest_states)
        if key not in self._weighed:
            config = replace(self._facts.config, context=context, mode=str(method.mode), prefill_chunk=self._chunk)
            facts = replace(self._facts, config=config, structure=self._structure(method.extra_layers))
            self._weighed[key], _ = weigh_facts(self._device_type, facts, rest_states=rest_states)
        return self._weighed[key]

    def _structure(self, extra_layers: int) -> Structure:
        if extra_layers not in self._structures:
            deeper = _deeper(self._facts.structure.model.config, extra_layers)
            trusted = self._facts.config.trust_remote_code
            self._structures[extra_layers] = Structure.of(deeper, self._facts.dtype, trust_remote_code=trusted)
        return self._structures[extra_layers]


def _row(method: Method, context: int, runs: _DryRuns, weights: paper.Weights, batch: int) -> Row:
    weighed = runs.weighed(method, context)
    placement = replace(method.place(weighed.sizes), prefill_chunk=weighed.prefill_chunk)
    categories, kv_bytes = weighed.categories(placement), weighed.sizes.kv_bytes
    if method.kind == "ee-llm":
        categories["other"] += paper.ee_llm_bytes(weights, kv_bytes) - paper.backbone_bytes(weights, kv_bytes)
    paper_method = method.kind if method.resident_layers in (None, paper.RIVER_RESIDENT_LAYERS) else method.name
    published = paper.published_bytes(paper_method, context, weights, batch=batch)
    return Row(
        method=method.name,
        context=context,
        peak_device_bytes=sum(categories.values()),
        paper_accounting_bytes=method.paper_bytes(weights, kv_bytes),
        published_bytes=published,
        categories=categories,
        placement=placement,
        note=note(method, placement, published=paper.is_the_papers(weights)),
    )


def _deeper(config: PretrainedConfig, extra_layers: int) -> PretrainedConfig:
    """The same model with more decoder layers, all of the kind of its last one."""
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers += extra_layers
    if extra_layers and getattr(deeper, "layer_types", None):
        deeper.layer_types = [*deeper.layer_types, *deeper.layer_types[-1:] * extra_layers]
    return deeper
