"""`model.river`: the mode in force, the account of the last generate, the trace, and the way out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from policies.types import Placement
from river_offload.config import RiverConfig
from river_offload.errors import ContextError, UsageError, not_possible
from river_offload.kv.cache import SharedCache
from river_offload.passage import Flow
from river_offload.progress import Progress
from river_offload.report import generation_report, generation_seconds, placement_report, prefill_report
from river_offload.settings import Settings
from river_offload.store.store import Store
from river_offload.trace import Account, Trace


class River(Settings):
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
        super().__init__(flow, config, placement)
        self.tokenizer = tokenizer
        self.notes = notes
        self.account = Account()
        self.load_s = 0.0
        self._model = model
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
        there, `wait_s` the time that cost. `one_token`: river layers that take a single token in one native call, and
        why others do not.
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
