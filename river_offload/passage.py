"""One forward pass through the layers: its path, its depth, its signals. `Flow` opens and closes them in turn."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor

from policies.exit import ExitRule
from river_offload.call import Call
from river_offload.errors import UsageError
from river_offload.store.store import Store
from river_offload.trace import PassageRecord, Trace

SIGNAL_CHUNK_TOKENS = 256
"""Tokens compared at once: bounds the float32 copies of a long prompt's states."""


def exit_signal(entering: torch.Tensor, leaving: torch.Tensor, real: torch.Tensor | None = None) -> float:
    """Minimum over tokens of the cosine between the state entering and leaving a layer (River-LLM, section 3).

    Args:
        entering, leaving: hidden states [batch, tokens, hidden], any floating dtype; compared in float32.
        real: bool [batch, tokens], False at padding; None when every token counts.

    Returns:
        The signal in [-1, 1]. Reading it waits for the device: the exit is decided on the host. Fake tensors have
        none, they only show what it costs: the answer is NaN.
    """
    least = torch.full((), torch.inf, dtype=torch.float32, device=leaving.device)
    for start in range(0, leaving.shape[1], SIGNAL_CHUNK_TOKENS):
        chunk = slice(start, start + SIGNAL_CHUNK_TOKENS)
        cosine = torch.cosine_similarity(entering[:, chunk].float(), leaving[:, chunk].float(), dim=-1)
        if real is not None:
            cosine = cosine.masked_fill(~real[:, chunk], torch.inf)
        least = torch.minimum(least, cosine.min())
    return math.nan if isinstance(least, FakeTensor) else least.item()


@dataclass
class Passage:
    """What is known about one forward pass while it runs."""

    rule: ExitRule
    batch: int
    new_tokens: int
    cached_tokens: int
    real: torch.Tensor | None = None
    """bool [batch, new_tokens], False at padding; None when every token is real."""
    exit_depth: int | None = None
    """Backbone layers run before the exit; None while on the backbone."""
    path: str = "prefill"
    """"prefill" or "decode"."""
    signals: list[float] = field(default_factory=list)

    def on_river(self, depth: int) -> bool:
        """Is the layer at `depth` taken on the river?"""
        return self.exit_depth is not None and depth >= self.exit_depth

    def observe(self, layers_run: int, entering: torch.Tensor, leaving: torch.Tensor) -> None:
        """A backbone layer has run, `layers_run` of them by now: look whether the states have settled."""
        if self.rule.wants_signal(layers_run):
            signal = self.rule.believed(exit_signal(entering, leaving, self.real))
            self.signals.append(signal)
            if self.rule.leaves(layers_run, signal):
                self.exit_depth = layers_run


class Flow:
    """The passages of one loaded model: at most one is open, and each ends as a record of the trace."""

    def __init__(self, rule: ExitRule, store: Store, trace: Trace) -> None:
        self.rule = rule
        self.store = store
        self.trace = trace
        self.lock = threading.RLock()
        """Held during a forward pass and a generate: slots and passages belong to one thread at a time."""
        self.closing_tokens: frozenset[int] = frozenset()
        """End-of-sequence and padding ids of the generation under way: a row fed with one of them is finished."""
        self.generation: list[PassageRecord] | None = None
        """Records of the generation under way, for its account; None outside of one."""
        self._passage: Passage | None = None
        self._opened_s = 0.0
        self._bytes_before = 0
        self._wait_before_s = 0.0

    @property
    def passage(self) -> Passage:
        """The open passage. A decoder layer that runs outside the model's forward pass is a programming error."""
        assert self._passage is not None, "a RiverLayer ran outside a forward pass of its model"
        return self._passage

    def open(self, call: Call) -> Passage:
        """Begin the forward pass of a call of the decoder, under the rule in force.

        Raises UsageError when depths are forced and used up.
        """
        self.store.reclaim()  # an interrupt may have come between the end of the last pass and its close
        try:
            rule = self.rule.of_passage(len(self.trace.records))
        except IndexError as error:
            raise UsageError(f"{error}: force one depth for each, that of the prompt included") from error
        self._passage = Passage(
            rule,
            call.rows,
            call.new_tokens,
            call.cached_tokens,
            call.real_tokens(self.closing_tokens),
            exit_depth=rule.first_depth_on_river(),
            path=self._path(call),
        )
        self._opened_s = time.perf_counter()
        self._bytes_before, self._wait_before_s = self.store.bytes_streamed, self.store.wait_s
        return self._passage

    def _path(self, call: Call) -> str:
        """A generation begins with its prompt, which may come in pieces; a call outside one is judged by its size."""
        if self.generation is None:
            return "prefill" if call.new_tokens > 1 or not call.cached_tokens else "decode"
        in_pieces = call.new_tokens > 1 and call.cache is not None
        return "prefill" if not self.generation or in_pieces else "decode"

    def close(self, *, completed: bool) -> None:
        """End the forward pass; one that failed or was interrupted leaves no record."""
        passage, self._passage = self._passage, None
        if passage is None or not completed:
            self.store.reclaim()
            return
        depth = passage.exit_depth
        record = PassageRecord(
            index=len(self.trace.records),
            new_tokens=passage.new_tokens,
            batch=passage.batch,
            cached_tokens=passage.cached_tokens,
            path=passage.path,
            mode=str(passage.rule.mode),
            depth=passage.rule.num_layers if depth is None else depth,
            signals=passage.signals,
            wait_s=self.store.wait_s - self._wait_before_s,
            bytes_streamed=self.store.bytes_streamed - self._bytes_before,
            seconds=time.perf_counter() - self._opened_s,
        )
        self.trace.append(record)
        if self.generation is not None:
            self.generation.append(record)
