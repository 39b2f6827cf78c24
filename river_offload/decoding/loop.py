"""Draft, check, keep what is right, and again.

One round: some tokens are drafted, one passage each, through the resident backbone layers and the river. The cache
gives their places back, and one passage of the backbone runs over the last token of the text and all drafted ones. It
writes the places anew and says of each what the backbone would have put there. What follows the first wrong token is
given back, so between two rounds the cache holds backbone keys and values of the whole text but its last token, as if
nothing had been drafted.

A batch goes on in step: a round keeps as many tokens as its least lucky unfinished row allows. The others draft theirs
again, and, as a token depends on its place alone, get the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from policies.acceptance import Replayed
from policies.drafting import Drafting
from policies.exit import DraftExit
from river_offload.decoding.text import Text
from river_offload.errors import UsageError
from river_offload.kv.cache import SharedCache
from river_offload.passage import Flow, margins
from river_offload.trace import PassageRecord


@dataclass(frozen=True)
class DraftPlan:
    """How a generation drafts and when it asks the backbone."""

    depth: int
    """Backbone layers that a draft runs."""
    drafting: Drafting
    gate: float | None
    """Drafted tokens with a margin above this are kept unasked. None asks about each, 0 about none: no checks."""
    acceptance: Replayed | None = None
    """What the river and the backbone are to say of drafted tokens, instead of what they do say."""


@dataclass
class Block:
    """What was drafted since the last check."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """[rows] each."""
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    sure: list[torch.Tensor] = field(default_factory=list)
    """bool [rows] each: kept unasked."""
    margins: list[float] = field(default_factory=list)
    """The least over the unfinished rows."""

    def __len__(self) -> int:
        return len(self.tokens)


def decoding_method(flow: Flow, plan: DraftPlan, cache_name: str, streamer: BaseStreamer | None) -> Callable[..., Any]:
    """What to hand to `generate` as `custom_generate`: it prepares everything as ever, the loop is ours.

    Args:
        cache_name: the keyword that the model takes its cache by.
        streamer: `generate` shows it the prompt and does not hand it on.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        output = model._prefill(input_ids, generation_config, kwargs)
        cache = kwargs.get(cache_name)
        _require_croppable(cache)
        text = Text(model, input_ids, kwargs, generation_config, logits_processor, stopping_criteria, streamer)
        logits = output.logits[:, -1].clone()
        del output  # or the logits of a whole prompt would stay
        text.add(*text.pick(text.ids, logits), logits)
        rounds = _Rounds(flow, plan, text, cache)
        while not text.done:
            rounds.run()
        return text.end(cache_name)

    return decode


class _Rounds:
    """Drafts and checks of one generation."""

    def __init__(self, flow: Flow, plan: DraftPlan, text: Text, cache: Cache) -> None:
        self.flow = flow
        self.plan = plan
        self.text = text
        self.cache = cache
        rule = flow.rule
        self._draft_rule = DraftExit(rule.mode, rule.tau, rule.min_exit, rule.num_layers, plan.depth)

    def run(self) -> None:
        """One round. One that fails or is interrupted leaves the cache with what the text has."""
        cached = _length(self.cache)
        before = self.text.ids.shape[1]
        with self._given_back_on_failure(cached, before):
            block = self._draft()
            if self.plan.gate == 0:
                self._keep(block)
            else:
                self._check(block)
            self._give_back(_length(self.cache) - cached - (self.text.ids.shape[1] - before))

    def _draft(self) -> Block:
        """Draft until the policy says stop, there is no room left, or every row has come to its end."""
        block, text = Block(), self.text
        writing = text.writing
        # A check adds a token of its own: in front of the last one there is nothing to draft.
        most = text.room - (self.plan.gate != 0)
        with self.flow.part("draft", self._draft_rule):
            while len(block) < most and self.plan.drafting.goes_on(block.margins):
                started_s = time.perf_counter()
                ids, kwargs = text.extended(block.tokens)
                logits = self._logits(ids, kwargs, 1)[:, 0]
                token, scores = text.pick(ids, logits)
                token = text.padded(token, writing)
                self._put(block, token, scores, logits, writing)
                self.plan.drafting.drafted(time.perf_counter() - started_s)
                writing = writing & ~text.ends(token)
                if not bool(writing.any()):
                    break
        return block

    def _put(
        self, block: Block, token: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor, writing: torch.Tensor
    ) -> None:
        sureness = self._sureness(scores, len(block))
        self.flow.margins = sureness  # the records of the trace tell the margins that were gone by
        block.tokens.append(token)
        block.margins.append(sureness.masked_fill(~writing, 1.0).min().item())
        block.sure.append(sureness > (1.0 if self.plan.gate is None else self.plan.gate))
        if self.plan.gate == 0:
            block.scores.append(scores)
            block.logits.append(logits)

    def _sureness(self, scores: torch.Tensor, place: int) -> torch.Tensor:
        """How sure the river is of the token that it picked by `scores`, [rows]: by what it was picked from, which
        processors have changed, not by the logits."""
        found = margins(scores[:, None]) if self.text.processes else self.flow.margins
        assert found is not None
        if self.plan.acceptance is not None:
            return torch.full_like(found, self.plan.acceptance.of(place).margin)
        return found

    def _keep(self, block: Block) -> None:
        """Nobody is asked: the river's tokens, on the river's keys and values."""
        records = self.flow.trace.records[-len(block) :]
        for token, scores, logits, record in zip(block.tokens, block.scores, block.logits, records, strict=True):
            record.accepted = 1
            self.text.add(token, scores, logits)
            if self.text.done:
                return

    def _check(self, block: Block) -> None:
        """The backbone writes the block's places anew and has its say."""
        started_s = time.perf_counter()
        self._give_back(len(block))
        ids, kwargs = self.text.extended(block.tokens)
        with self.flow.part("check", self.flow.rule):
            logits = self._logits(ids, kwargs, len(block) + 1)
        record = self.flow.trace.records[-1]
        self._judge(block, logits, record)
        if self.plan.acceptance is not None:
            self.plan.acceptance.checked(record.accepted, len(block))
        if not self.text.done:  # else it may be the text that ended, not the luck of the draft
            self.plan.drafting.checked(block.margins, record.accepted, time.perf_counter() - started_s)

    def _judge(self, block: Block, logits: torch.Tensor, record: PassageRecord) -> None:
        """Add to the text what stands: drafted tokens up to the first wrong one, and the backbone's own after them.

        Args:
            logits: [rows, drafted + 1, vocabulary].
            record: of the check; told of each token as it stands, so that it is true of a text that breaks off, too.
        """
        text, record.added = self.text, 0
        for index in range(len(block) + 1):
            token, scores = text.pick(text.ids, logits[:, index])
            drafted = index < len(block)
            writing = text.writing
            asked, wrong = writing, writing
            if drafted:
                right = block.sure[index] | self._agrees(block, index, token)
                token = torch.where(right, block.tokens[index], token)
                asked = writing & ~block.sure[index]
                wrong = writing & ~right
            goes_on = drafted and not bool(wrong.any())
            record.added += 1
            record.decided += bool(asked.any())
            record.accepted += goes_on
            text.add(token, scores, logits[:, index])
            if not goes_on or text.done:
                break
        self.flow.spoke(logits[:, : index + 1])

    def _agrees(self, block: Block, index: int, token: torch.Tensor) -> torch.Tensor:
        """Is `token`, the backbone's own, what was drafted there, or is it to be taken for that? bool [rows]."""
        if self.plan.acceptance is None:
            return token == block.tokens[index]
        return torch.full_like(token, self.plan.acceptance.of(index).agreed, dtype=torch.bool)

    def _logits(self, ids: torch.Tensor, kwargs: dict[str, Any], tokens: int) -> torch.Tensor:
        """Run the last `tokens` of a text: logits [rows, tokens, vocabulary]."""
        model = self.text.model
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = tokens
        logits: torch.Tensor = model(**inputs, return_dict=True).logits
        return logits[:, -tokens:]

    def _give_back(self, tokens: int) -> None:
        self.cache.crop(-tokens)  # 0 too: transformers' own windows then drop what they kept for it

    @contextmanager
    def _given_back_on_failure(self, cached: int, before: int) -> Iterator[None]:
        completed = False
        try:
            yield
            completed = True
        finally:
            if not completed:
                self._cut_back(cached + self.text.ids.shape[1] - before)

    def _cut_back(self, tokens: int) -> None:
        """Leave so many tokens a row in every layer. A passage that broke off gave them to the first ones only; a cache
        of ours has taken them back by itself."""
        for layer in self.cache.layers:
            if (excess := int(layer.get_seq_length()) - tokens) > 0:
                layer.crop(-excess)


def _length(cache: Cache) -> int:
    """Tokens a row that the cache holds. For a static cache this waits for the device."""
    return int(cache.get_seq_length())


def _require_croppable(cache: Cache | None) -> None:
    # Older versions of transformers do not say it of their caches.
    if cache is None or not getattr(cache, "is_croppable", isinstance(cache, SharedCache)):
        found = "without a cache" if cache is None else f"with a {type(cache).__name__} that cannot give back tokens"
        raise UsageError(
            f"modes lossless and gated do not work {found} (a static cache longer than an attention window cannot): "
            "leave the cache to this model, or use mode='backbone' or mode='exit'"
        )
    # Windows of transformers' own caches keep what a `crop` needs only when they are told.
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
