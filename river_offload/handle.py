"""`model.river`: the mode in force, the account of the last generate, the trace, and the way out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from policies.acceptance import Acceptance, Replayed
from policies.drafting import GATED_DRAFT, Drafting, drafting_of
from policies.exit import ExitRule, ForcedExits
from policies.types import Mode, Placement
from river_offload.config import DEFAULT_GATE, RiverConfig, check_mode, check_option
from river_offload.errors import ContextError, ModeError, UsageError, not_possible
from river_offload.kv.cache import SharedCache
from river_offload.passage import Flow
from river_offload.progress import Progress
from river_offload.report import generation_report, generation_seconds, placement_report, prefill_report
from river_offload.store.store import Store
from river_offload.trace import Account, Trace


class River:
    """The handle of a loaded model.

    Attributes:
        tokenizer: the checkpoint's tokenizer, None when it has none.
        config: the options it was loaded with.
        placement: what rests where.
        trace: one record per passage since the model was loaded (or since `trace.clear()`).
        notes: remarks on the checkpoint: files ignored, tensors not used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        flow: Flow,
        *,
        tokenizer: Any,
        config: RiverConfig,
        placement: Placement,
        budget_source: str,
        kernels: dict[str, Any],
        notes: list[str],
        measure_device_bytes: Callable[[], int],
        measure_categories: Callable[[], dict[str, int]],
        host_bytes: Callable[[], dict[str, int]],
        make_cache: Callable[[int], SharedCache],
        on_close: Callable[[], None],
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.placement = placement
        self.notes = notes
        self.account = Account()
        self.load_s = 0.0
        self._gate = DEFAULT_GATE if config.gate is None else config.gate
        self._draft = config.draft
        self._policies: dict[tuple[str, str | int], Drafting] = {}
        self._acceptance: Replayed | None = None
        self._model = model
        self._flow = flow
        self._budget_source = budget_source
        self._kernels = kernels
        self._measure_device_bytes = measure_device_bytes
        self._measure_categories = measure_categories
        self._host_bytes = host_bytes
        self._make_cache = make_cache
        self._on_close = on_close

    @property
    def flow(self) -> Flow:
        """What the passages of this model go through: for the loops that are built on it."""
        return self._flow

    @property
    def drafts(self) -> bool:
        """Does a generation in this mode draft and check?"""
        return self._flow.rule.mode.drafts

    @property
    def trace(self) -> Trace:
        return self._flow.trace

    @property
    def store(self) -> Store:
        """Lends backbone layers, and knows how long that takes."""
        return self._flow.store

    @property
    def progress(self) -> Progress:
        """Told about prompts that are read in chunks: one step for each chunk and layer. Silent unless set."""
        return self._flow.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._flow.progress = progress

    @property
    def num_layers(self) -> int:
        return self._flow.rule.num_layers

    @property
    def mode(self) -> str:
        """As in `load`. Setting it raises ModeError when its parts were not built."""
        return str(self._flow.rule.mode)

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set(mode=check_option("mode", mode))

    @property
    def tau(self) -> float:
        """The exit threshold of mode `exit`."""
        return self._flow.rule.tau

    @tau.setter
    def tau(self, tau: float) -> None:
        self._set(tau=check_option("tau", tau))

    @property
    def min_exit(self) -> int:
        """The fewest backbone layers of a passage in mode `exit`."""
        return self._flow.rule.min_exit

    @property
    def gate(self) -> float:
        """The margin up to which mode `gated` asks the backbone."""
        return self._gate

    @gate.setter
    def gate(self, gate: float) -> None:
        if self._flow.rule.mode.kind != "gated":
            raise UsageError(f"gate has no effect in mode {self.mode}: only mode gated asks it")
        self._gate = float(check_option("gate", gate))

    @property
    def draft(self) -> str | int:
        """What modes `lossless` and `gated` draft before a check: `adaptive` or a number of tokens."""
        if self._draft is not None:
            return self._draft
        return GATED_DRAFT if self._flow.rule.mode.kind == "gated" else "adaptive"

    @draft.setter
    def draft(self, draft: str | int) -> None:
        if not self.drafts:
            raise UsageError(f"draft has no effect in mode {self.mode}: only modes lossless and gated draft")
        self._draft = check_option("draft", draft)

    @property
    def drafting(self) -> Drafting:
        """The policy in force. It is kept for later generations, so that what it learns is."""
        key = self.mode, self.draft
        if key not in self._policies:
            self._policies[key] = drafting_of(self.draft)
        return self._policies[key]

    @property
    def acceptance(self) -> Replayed | None:
        """What checks are to find, where it is given (see `using`); None when the backbone says it."""
        return self._acceptance

    @property
    def draft_depth(self) -> int:
        """Backbone layers of a drafted token (see `Placement.draft_depth`)."""
        return self.placement.draft_depth(self.num_layers)

    @contextlib.contextmanager
    def using(
        self,
        *,
        mode: str | None = None,
        tau: float | None = None,
        depths: Sequence[int] | None = None,
        gate: float | None = None,
        draft: str | int | None = None,
        acceptance: Acceptance | None = None,
    ) -> Iterator[River]:
        """Other settings until the block ends, the old ones after it. Raises ModeError, UsageError.

        Args:
            depths: force the exits: backbone layers to run in each coming passage, the first being the prompt's. A
                passage beyond the last depth raises UsageError. Excludes mode and tau, which decide the same.
            acceptance: force the checks of modes lossless and gated: drafted tokens take these margins and verdicts one
                after the other, whatever their own are, and the text means nothing. All rows of a batch have the same.
        """
        before = self._flow.rule, self._gate, self._draft, self._acceptance, self._policies
        try:
            self._use(mode, tau, depths)
            if gate is not None:
                self.gate = gate
            if draft is not None:
                self.draft = draft
            if acceptance is not None:
                self._replay(acceptance)
            yield self
        finally:
            self._flow.rule, self._gate, self._draft, self._acceptance, self._policies = before
            self._flow.store.foretell(None)

    def _use(self, mode: str | None, tau: float | None, depths: Sequence[int] | None) -> None:
        if depths is None:
            given = {"mode": mode, "tau": tau}
            self._set(**{name: check_option(name, value) for name, value in given.items() if value is not None})
        elif mode is None and tau is None:
            self._force(tuple(depths))
        else:
            raise UsageError("depths force every exit, mode and tau decide it otherwise: give one or the other")

    def new_cache(self, max_tokens: int | None = None) -> SharedCache:
        """An empty KV cache to keep over several calls, as `past_key_values` of `generate`. The plan holds one.

        It is of the kind that `kv_bits` and `kv_tier` ask for.

        Args:
            max_tokens: tokens per row; the planned context when not given. Raises ContextError for more than that.
        """
        capacity = self.config.context if max_tokens is None else max_tokens
        if not 0 < capacity <= self.config.context:
            remedy = "load with a larger context" if capacity > 0 else "ask for at least one"
            raise ContextError(
                f"a cache for {capacity} tokens was asked for, the plan holds 1 to {self.config.context}: {remedy}"
            )
        return self._make_cache(capacity)

    @contextlib.contextmanager
    def accounting(self, prompt_tokens: int, closing_tokens: frozenset[int]) -> Iterator[Account]:
        """Account for what happens inside as one generate, whether it ends well or not.

        Args:
            closing_tokens: ids after which a row of a batch is finished and has no say in the exit of the others.
        """
        if not self._flow.lock.acquire(blocking=False):
            raise UsageError("this model generates in another thread: one generate at a time")
        outer = self.account, self._flow.generation, self._flow.closing_tokens
        account = self.account = Account(self.mode, self.tau, prompt_tokens)
        self._flow.generation, self._flow.closing_tokens = account.records, closing_tokens
        started = time.perf_counter()
        try:
            yield account
        finally:
            account.seconds = time.perf_counter() - started
            if outer[1] is not None:  # one generate inside another, as assisted decoding does: the outer one goes on
                outer[1].extend(account.records)
                self.account, self._flow.generation, self._flow.closing_tokens = outer
            else:
                self._flow.generation, self._flow.closing_tokens = None, frozenset()
            self._flow.lock.release()

    def device_bytes(self) -> int:
        """Bytes that weights, river, buffers and slots hold on the device now, counted from their storages."""
        return self._measure_device_bytes()

    def held_by_category(self) -> dict[str, int]:
        """The ledger: the same bytes by the names of a plan (`memory.categories`), those of the weights and slots.

        What caches and working memory add while the model runs is in `account.peak_categories`.
        """
        return self._measure_categories()

    def held_at_most(self) -> dict[str, int]:
        """Device bytes by category at the highest moment of the last generate, or of the one under way."""
        return dict(self.account.peak_categories)

    def held(self) -> dict[str, int]:
        """Device bytes by category in the passage under way, or in the last one with all that it rose to; empty before
        the first one. What torch's allocator holds beyond that on a GPU is `unclaimed`.

        May be called from another thread than the one that generates, and costs it nothing.
        """
        held = dict(self.account.held)
        if held and self._model.device.type == "cuda":
            rest_bytes = torch.cuda.memory_allocated(self._model.device) - sum(held.values())
            held["unclaimed"] = max(rest_bytes, 0)
        return held

    def report(self) -> dict[str, Any]:
        """The account of the last generate. Byte counts are bytes, times are seconds.

        `depths` has the depth of each passage, the first being the prefill's: one passage a new token, or, in modes
        `lossless` and `gated`, one a drafted token and one a check. `mean_depth` is their sum without the prefill's by
        the new tokens but the first (the prefill's when there is no other). See `checking_figures` for those of drafts.
        `peak_device_bytes` is what the weights hold plus the highest that caches and working memory rose to. `host`
        tells how much of the host memory of a GPU's layers is pinned; `misses` counts layers that were needed and not
        there, `wait_s` the time that cost.
        """
        account = self.account
        return {
            **generation_report(account, self.num_layers),
            "mode": account.mode or self.mode,
            "tau": account.tau if account.mode else self.tau,
            "num_layers": self.num_layers,
            "prefill": prefill_report(account.records, self._flow.prefill),
            "seconds": {"load": self.load_s, **generation_seconds(account)},
            "host": self._host_bytes(),
            "budget_source": self._budget_source,
            **placement_report(self.placement, self.config),
            **self._kernels,
        }

    def close(self) -> None:
        """Give back threads, files and slots. The model can no longer stream; calling it twice does nothing."""
        try:
            self._flow.store.close()
        finally:
            self._on_close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_possible("copying or pickling")

    def __enter__(self) -> River:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, *, mode: str | None = None, tau: float | None = None) -> None:
        rule = self._flow.rule
        if mode is not None:
            rule = ExitRule(self._built(mode), rule.tau, rule.min_exit, rule.num_layers)  # ends forced depths
        if tau is not None:
            if rule.mode.kind != "exit":
                raise UsageError(f"tau has no effect in mode {rule.mode}: only mode exit looks at the exit signal")
            rule = replace(rule, tau=float(tau))
        self._flow.rule = rule

    def _force(self, depths: tuple[int, ...]) -> None:
        rule, layers = self._flow.rule, self.num_layers
        wrong = [depth for depth in depths if not 0 <= depth <= layers]
        if wrong:
            raise UsageError(f"depth {wrong[0]} is forced on a model of {layers} layers: use 0..{layers}")
        if depths:
            shallow, deep = min(depths), max(depths)
            remedy = "exit" if shallow else "quantized"
            self._require_parts(f"depths {shallow}..{deep}", range(deep), range(shallow, layers), remedy)
        self._flow.rule = ForcedExits(
            Mode("exit"), rule.tau, rule.min_exit, layers, depths, first_passage=len(self.trace.records)
        )
        self._flow.store.foretell(depths)

    def _replay(self, acceptance: Acceptance) -> None:
        if not isinstance(acceptance, Acceptance):
            raise UsageError(
                f"acceptance is a {type(acceptance).__name__}: expected what policies.acceptance makes of a trace"
            )
        never = self.mode == "gated" and self.gate == 0
        if never or not self.drafts:
            raise UsageError(
                f"acceptance has no effect in mode {self.mode}{' with a gate of 0' if never else ''}, which checks no "
                "drafts: use mode lossless, or gated with a gate above 0"
            )
        self._acceptance = Replayed(acceptance)
        self._policies = {}  # what a policy learns of these tokens is not true of the model's own

    def _built(self, text: str) -> Mode:
        """The mode, if every layer that it may reach is there."""
        mode = check_mode(text, self.num_layers)
        resident = len(self.placement.resident_layers)
        river = mode.river_layers(self.num_layers, self.min_exit, resident)
        self._require_parts(f"mode {mode}", mode.backbone_layers(self.num_layers), river, text)
        return mode

    def _require_parts(self, what: str, backbone: range, river: range, remedy: str) -> None:
        """Raises ModeError when `what` may reach a layer that is not there; mode `remedy` would have built it."""
        placed = {*self.placement.resident_layers, *self.placement.streamed_layers}
        for part, needed, built in (
            ("backbone", backbone, placed),
            ("river", river, set(self.placement.river_layers)),
        ):
            missing = sorted(set(needed) - built)
            if missing:
                raise ModeError(
                    f"{what} needs {part} layers {missing[0]}..{missing[-1]}, which mode {self.placement.mode} "
                    f"did not build: load with mode={remedy!r}, or with also_modes=({remedy!r},)"
                )
