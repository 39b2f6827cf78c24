"""Methods against contexts: the memory figure of the paper, by running the model on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from policies.types import Mode, Placement
from river_offload.config import RiverConfig
from river_offload.errors import UsageError
from river_offload.planning import paper
from river_offload.planning.methods import Method, note
from river_offload.planning.model_config import ModelConfig
from river_offload.planning.sizes import Stored, Weighed, weigh
from river_offload.progress import Progress
from river_offload.quant.precision import Precision
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
        names = ("resident_layers", "streamed_layers", "river_layers", "slots", "embed_tier")
        placed = {name: getattr(self.placement, name) for name in names}
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
    model: ModelConfig,
    precision: Precision,
    *,
    contexts: Sequence[int],
    methods: Sequence[Method],
    batch: int,
    budget_bytes: int | None,
    progress: Progress,
    trust_remote_code: bool = False,
) -> Sweep:
    """Run every method dry at every context. `contexts` are tokens per row, `batch` is rows.

    Raises UsageError for a context beyond what the model attends to, and for a method that it has no layers for.
    """
    check_contexts(model, contexts)
    runs = _DryRuns(model, precision, batch, trust_remote_code)
    weights = paper.Weights.of(runs.structure(0))
    rows = []
    progress.start("planning", len(methods) * len(contexts), "plans")
    try:
        for method in methods:
            for context in sorted(set(contexts)):
                rows.append(_row(method, context, runs, weights))
                progress.advance(1)
    finally:
        progress.finish()
    layers = len(weights.layers)
    return Sweep(model.name, layers, batch, precision.device_type, budget_bytes, tuple(rows))


def contexts_of(model: ModelConfig) -> tuple[int, ...]:
    """The usual contexts, as far as the model attends; its own limit when that is below all of them."""
    limit = _limit(model)
    return tuple(context for context in DEFAULT_CONTEXTS if limit is None or context <= limit) or (limit or 1,)


def check_contexts(model: ModelConfig, contexts: Sequence[int]) -> None:
    """Raises UsageError for a context beyond what the model attends to."""
    limit = _limit(model)
    for context in contexts:
        if limit is not None and context > limit:
            raise UsageError(f"context {context} is more than the {limit} tokens that {model.name} attends to")


def _limit(model: ModelConfig) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


class _DryRuns:
    """What models weigh, by what it depends on, so that methods which share it run dry once."""

    def __init__(self, model: ModelConfig, precision: Precision, batch: int, trust_remote_code: bool) -> None:
        self._model, self._precision = model, precision
        self.batch, self._trusted = batch, trust_remote_code
        self._structures: dict[int, Structure] = {}
        self._weighed: dict[tuple[int, Mode, int], Weighed] = {}

    def structure(self, extra_layers: int) -> Structure:
        if extra_layers not in self._structures:
            deeper = _deeper(self._model.config, extra_layers)
            found = Structure.of(deeper, self._precision.dtype, trust_remote_code=self._trusted)
            self._structures[extra_layers] = found
        return self._structures[extra_layers]

    def weighed(self, method: Method, context: int) -> Weighed:
        key = (method.extra_layers, method.mode, context)
        if key not in self._weighed:
            structure = self.structure(method.extra_layers)
            stored = Stored.in_dtype(structure, self._model.dtype, self._precision.dtype)
            config = RiverConfig(
                model=self._model.name, context=context, batch=self.batch, trust_remote_code=self._trusted
            )
            self._weighed[key] = weigh(structure, self._precision, config, (method.mode,), stored)
        return self._weighed[key]


def _row(method: Method, context: int, runs: _DryRuns, weights: paper.Weights) -> Row:
    weighed = runs.weighed(method, context)
    placement = method.place(weighed.sizes)
    categories, kv_bytes = weighed.categories(placement), weighed.sizes.kv_bytes
    if method.kind == "ee-llm":
        categories["other"] += paper.ee_llm_bytes(weights, kv_bytes) - paper.backbone_bytes(weights, kv_bytes)
    paper_method = method.kind if method.resident_layers in (None, paper.RIVER_RESIDENT_LAYERS) else method.name
    published = paper.published_bytes(paper_method, context, weights, batch=runs.batch)
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
