"""One forward pass through the layers: its path, its depth, its signals. `Flow` opens and closes them in turn."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from policies.exit import ExitRule
from policies.prefill import PrefillRule
from river_offload.call import Call
from river_offload.chunks import Spans, spans_of
from river_offload.errors import UsageError
from river_offload.kv.memory import Allocate
from river_offload.progress import Progress, Silent
from river_offload.store.store import Store
from river_offload.trace import PassageRecord, Trace

SIGNAL_CHUNK_TOKENS = 256
"""Tokens compared at once: bounds the float32 copies of a long prompt's states."""

Path = Literal["prefill", "decode", "draft", "check"]
"""What a passage is for: a prompt, one token after it, one drafted token, or the check of a block of drafted ones."""
OnMiss = Literal["wait", "exit"]
"""What a passage does that needs a layer which is not there: wait for it, or leave for the river where it may."""


def exit_signal(entering: torch.Tensor, leaving: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Minimum over tokens of the cosine between the state entering and leaving a layer (River-LLM, section 3).

    Args:
        entering, leaving: hidden states [batch, tokens, hidden], any floating dtype; compared in float32.
        real: bool [batch, tokens], False at padding; None when every token counts.

    Returns:
        The signal in [-1, 1], a float32 scalar on the device: nothing waits for it yet.
    """
    least = torch.full((), torch.inf, dtype=torch.float32, device=leaving.device)
    starts = range(0, leaving.shape[1], SIGNAL_CHUNK_TOKENS)
    for start in starts[:1] if isinstance(leaving, FakeTensor) else starts:  # all chunks cost what the first does
        chunk = slice(start, start + SIGNAL_CHUNK_TOKENS)
        cosine = torch.cosine_similarity(entering[:, chunk].float(), leaving[:, chunk].float(), dim=-1)
        if real is not None:
            cosine = cosine.masked_fill(~real[:, chunk], torch.inf)
        least = torch.minimum(least, cosine.min())
    return least


def _read(signals: Iterable[torch.Tensor]) -> float:
    """The smallest of the signals of a prompt's chunks; NaN if one of them is. Waits for the device.

    Fake tensors have no signal, they only show what it costs: the answer is NaN.
    """
    values = [math.nan if isinstance(signal, FakeTensor) else float(signal) for signal in signals]
    return math.nan if any(map(math.isnan, values)) else min(values)


def margins(logits: torch.Tensor) -> torch.Tensor | None:
    """How sure the model is of its next token, row by row: top-1 minus top-2 probability.

    Args:
        logits: [batch, tokens, vocabulary]; the last token counts.

    Returns:
        float32 [batch] on the device, so that nothing waits for it yet. Fake tensors have none.
    """
    last = logits[:, -1].float()
    likely = (last.topk(2).values - last.logsumexp(-1, keepdim=True)).exp()
    found = likely[:, 0] - likely[:, 1]
    return None if isinstance(found, FakeTensor) else found


@dataclass
class Passage:
    """What is known about one forward pass while it runs."""

    rule: ExitRule
    batch: int
    new_tokens: int
    cached_tokens: int
    real: torch.Tensor | None = None
    """bool [batch, new_tokens], False at padding; None when every token is real."""
    margin: float | None = None
    """Top-1 minus top-2 probability of the token that it continues from, where known."""
    exit_depth: int | None = None
    """Backbone layers run before the exit; None while on the backbone."""
    path: Path = "prefill"
    signals: list[float] = field(default_factory=list)
    in_chunks: bool = False
    """Whether each layer reads the new tokens chunk by chunk."""
    given_states: torch.Tensor | None = None
    """Embedded tokens as the caller handed them in: his, never overwritten."""
    _seen: list[torch.Tensor] = field(default_factory=list)
    """Signals of the chunks of one layer, not read yet."""

    def owns(self, states: torch.Tensor) -> bool:
        """May `states` be overwritten? All may that came into being during the passage."""
        given = self.given_states
        return given is None or given.untyped_storage()._cdata != states.untyped_storage()._cdata

    def on_river(self, depth: int) -> bool:
        """Is the layer at `depth` taken on the river?"""
        return self.exit_depth is not None and depth >= self.exit_depth

    def look(self, layers_run: int, entering: torch.Tensor, leaving: torch.Tensor, span: slice | None = None) -> None:
        """A backbone layer has run over all new tokens or those in `span`: have their states settled?

        Args:
            layers_run: this layer included.
            entering, leaving: the states of these tokens.
        """
        if self.rule.wants_signal(layers_run):
            real = self.real if span is None or self.real is None else self.real[:, span]
            self._seen.append(exit_signal(entering, leaving, real))

    def observe(self, layers_run: int) -> float | None:
        """A backbone layer has run over all new tokens, `layers_run` of them by now: shall the passage leave?

        Returns the signal if one was measured and says something of the exit.
        """
        seen, self._seen = self._seen, []
        if not seen:
            return None
        signal = self.rule.believed(_read(seen))
        self.signals.append(signal)
        if self.rule.leaves(layers_run, signal):
            self.exit_depth = layers_run
        return None if math.isnan(signal) else signal


class Flow:
    """The passages of one loaded model: at most one is open, and each ends as a record of the trace.

    Args:
        rule: when a passage leaves the backbone.
        store: lends backbone layers, and is told where the passage is so that it can look ahead.
        trace: gets the records.
        on_miss: what a passage does about a layer that is not there. In mode `exit` alone is leaving a choice.
        prefill: whether a prompt may leave the backbone, in mode `exit`.
        prefill_chunk: a layer reads at most so many tokens a row at once; None for any number.
        device: of the layers.
        states_memory: where the states of a prompt of several chunks rest between the layers; None for the device.
    """

    def __init__(
        self,
        rule: ExitRule,
        store: Store,
        trace: Trace,
        *,
        on_miss: OnMiss = "wait",
        prefill: PrefillRule | None = None,
        prefill_chunk: int | None = None,
        device: torch.device | None = None,
        states_memory: Allocate | None = None,
    ) -> None:
        self.rule = rule
        self.store = store
        self.trace = trace
        self.on_miss = on_miss
        self.prefill = prefill or PrefillRule()
        self.prefill_chunk = prefill_chunk
        self.device = device or torch.device("cpu")
        self.states_memory = states_memory
        self.spans: Spans = spans_of(prefill_chunk or 1)
        """The chunks that a layer reads one after the other. A dry run leaves out those that repeat."""
        self.progress: Progress = Silent()
        """Told about prompts that are read in chunks."""
        self.lock = threading.RLock()
        """Held during a forward pass and a generate: slots and passages belong to one thread at a time."""
        self.closing_tokens: frozenset[int] = frozenset()
        """End-of-sequence and padding ids of the generation under way: a row fed with one of them is finished."""
        self.generation: list[PassageRecord] | None = None
        """Records of the generation under way, for its account; None outside of one."""
        self.margins: torch.Tensor | None = None
        """How sure the last passage was of the token to come: [rows], on the device; None before the first."""
        self._passage: Passage | None = None
        self._part: tuple[Path, ExitRule] | None = None
        self._opened_s = 0.0
        self._before = _Counters.of(store)

    @property
    def in_chunks(self) -> bool:
        """Is a passage open that is read in chunks?"""
        return self._passage is not None and self._passage.in_chunks

    @property
    def passage(self) -> Passage:
        """The open passage. A decoder layer that runs outside the model's forward pass is a programming error."""
        assert self._passage is not None, "a RiverLayer ran outside a forward pass of its model"
        return self._passage

    @property
    def resting(self) -> Allocate | None:
        """What gives the states of the open passage their memory; None for the device. Those of a single chunk stay
        there: a check, or a short turn, would gain no room and pay two copies a layer."""
        chunk = self.prefill_chunk
        return self.states_memory if chunk is not None and self.passage.new_tokens > chunk else None

    def on_device(self, states: torch.Tensor) -> torch.Tensor:
        """Some tokens of a prompt in chunks where the layers are: a copy if they rest elsewhere, on a CPU, too."""
        return states if self.resting is None else states.to(self.device, copy=True)

    def states_like(self, states: torch.Tensor) -> torch.Tensor:
        """Memory for the states of a prompt, with anything in it."""
        allocate = self.resting
        return torch.empty_like(states) if allocate is None else allocate(tuple(states.shape), states.dtype)

    def open(self, call: Call) -> Passage:
        """Begin the forward pass of a call of the decoder, under the rule in force.

        Raises UsageError when depths are forced and used up.
        """
        if self._passage is not None or self.store.lends:
            self.store.broken_off()  # an interrupt came between the end of the last pass and its close
        try:
            rule = self._part[1] if self._part else self.rule.of_passage(len(self.trace.records))
        except IndexError as error:
            raise UsageError(f"{error}: force one depth for each, that of the prompt included") from error
        cached_tokens, path = call.cached_tokens, self._part[0] if self._part else self._path(call)
        if path == "prefill" and self.prefill.on_backbone(call.rows * call.new_tokens):
            rule = rule.on_backbone()
        self._passage = Passage(
            rule,
            call.rows,
            call.new_tokens,
            cached_tokens,
            call.real_tokens(self.closing_tokens),
            margin=None if self.margins is None or not cached_tokens else self.margins.min().item(),
            exit_depth=rule.first_depth_on_river(),
            path=path,
            in_chunks=self._in_chunks(call.new_tokens, cached_tokens),
            given_states=call.tokens if call.tokens.ndim > 2 else None,
        )
        self._opened_s = time.perf_counter()
        known_depth = None if rule.mode.kind == "exit" else _depth(self._passage)
        # Drafts and checks take turns: what comes is known, so nothing is guessed and nothing learned from them.
        tau = None if rule.mode.drafts else rule.tau
        self.store.opened(call.new_tokens, self._passage.margin, known_depth, tau)
        if self._passage.exit_depth == 0:
            self.store.left(0)
        if self.prefill_chunk is not None and call.new_tokens > self.prefill_chunk:
            chunks = math.ceil(call.new_tokens / self.prefill_chunk)
            self.progress.start(f"reading {call.new_tokens} tokens", rule.num_layers * chunks, "steps")
        return self._passage

    def _in_chunks(self, new_tokens: int, cached_tokens: int) -> bool:
        """Several tokens after cached ones are a chunk however few they are: a mask would grow with the keys."""
        if self.prefill_chunk is None:
            return False
        return new_tokens > self.prefill_chunk or (new_tokens > 1 and cached_tokens > 0)

    @contextlib.contextmanager
    def part(self, path: Path, rule: ExitRule) -> Iterator[None]:
        """The passages inside are `path`, under a rule of their own: how a generation drafts and checks."""
        outer, self._part = self._part, (path, rule)
        try:
            yield
        finally:
            self._part = outer

    def _path(self, call: Call) -> Path:
        """A generation begins with its prompt, which may come in pieces; a call outside one is judged by its size."""
        if self.generation is None:
            return "prefill" if call.new_tokens > 1 or not call.cached_tokens else "decode"
        in_pieces = call.new_tokens > 1 and call.cache is not None
        return "prefill" if not self.generation or in_pieces else "decode"

    def takes_river(self, depth: int) -> bool:
        """Which way through the layer at `depth`? Here a passage leaves that would have to wait and need not."""
        passage = self.passage
        if passage.on_river(depth):
            return True
        if self.on_miss == "wait" or not passage.rule.wants_signal(depth) or self.store.present(depth):
            return False
        passage.exit_depth = depth
        self.store.misses += 1
        self.store.left(depth, censored=True)
        return True

    def ran(self, layers_run: int) -> None:
        """A backbone layer has run and is given back: shall the next one run, too?"""
        passage = self.passage
        signal = passage.observe(layers_run)
        if signal is not None:
            self.store.observed(layers_run, signal)
        if layers_run == _depth(passage):
            self.store.left(layers_run)

    def spoke(self, logits: torch.Tensor) -> None:
        """The head's output for the passage that just ran: [batch, tokens, vocabulary]."""
        self.margins = margins(logits)

    def close(self, *, completed: bool) -> None:
        """End the forward pass; one that failed or was interrupted leaves no record."""
        passage, self._passage = self._passage, None
        before, done = self._before, _Counters.of(self.store)
        self._before = done
        self.progress.finish()
        if passage is None or not completed:
            self.store.broken_off()
            return
        depth = _depth(passage)
        self.store.passed(passage.rule.num_layers - depth)
        record = PassageRecord(
            index=len(self.trace.records),
            new_tokens=passage.new_tokens,
            batch=passage.batch,
            cached_tokens=passage.cached_tokens,
            path=passage.path,
            mode=str(passage.rule.mode),
            depth=depth,
            signals=passage.signals,
            wait_s=done.wait_s - before.wait_s,
            bytes_streamed=done.bytes_streamed - before.bytes_streamed,
            seconds=time.perf_counter() - self._opened_s,
            margin=passage.margin,
            misses=done.misses - before.misses,
            wasted_bytes=done.wasted_bytes - before.wasted_bytes,
            copy_s=done.copy_s - before.copy_s,
        )
        self.trace.append(record)
        if self.generation is not None:
            self.generation.append(record)


class _Counters(NamedTuple):
    """What a store has counted up to a moment."""

    wait_s: float
    bytes_streamed: int
    wasted_bytes: int
    misses: int
    copy_s: float

    @classmethod
    def of(cls, store: Store) -> _Counters:
        return cls(store.wait_s, store.bytes_streamed, store.wasted_bytes, store.misses, store.copy_s)


def _depth(passage: Passage) -> int:
    """Backbone layers that the passage runs, as far as is known now."""
    return passage.rule.num_layers if passage.exit_depth is None else passage.exit_depth
