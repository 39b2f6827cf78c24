"""A trace replayed on a virtual clock, for hardware one does not have, with the very code that decides at run time.

One link, first in first out; a fetch can be called off until it starts, with an abortable link until it is done.
Computation is serial. What is not modelled: computation and copying that slow each other down, and the time that the
decisions take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from policies.forecast import Forecast
from policies.prefetch import KINDS, WASTE_WEIGHT, Kind, Snapshot, decide, forecast_of


@dataclass(frozen=True)
class Step:
    """One passage of a trace: how deep it goes if nothing stops it."""

    depth: int
    new_tokens: int = 1
    signals: tuple[float, ...] = ()
    """As measured after min_exit, min_exit + 1, ... layers; empty when the depth was forced."""
    margin: float | None = None
    """Top-1 minus top-2 probability of the last token, where known."""
    known: bool = False
    """The mode fixes the depth, so every kind but `next` knows it beforehand."""


class Record(Protocol):
    """What `steps_of` reads of a trace's record; a `margin` is read where there is one."""

    @property
    def depth(self) -> int: ...
    @property
    def new_tokens(self) -> int: ...
    @property
    def signals(self) -> Sequence[float]: ...
    @property
    def mode(self) -> str: ...


def steps_of(records: Iterable[Record]) -> list[Step]:
    """The passages of a trace. A record in a mode that fixes the depth says so."""
    return [
        Step(
            depth=record.depth,
            new_tokens=record.new_tokens,
            signals=tuple(record.signals),
            margin=getattr(record, "margin", None),
            known=record.mode != "exit",
        )
        for record in records
    ]


@dataclass(frozen=True)
class LayerCost:
    """Seconds that one layer computes: reading its weights, or working through its tokens, whichever is longer."""

    read_s: float
    token_s: float = 0.0

    def seconds(self, new_tokens: int) -> float:
        return max(self.read_s, self.token_s * new_tokens)


@dataclass(frozen=True)
class Setup:
    """A placed model on a machine."""

    num_layers: int
    streamed: Mapping[int, int]
    """Layer -> bytes that a fetch of it moves. The other backbone layers are resident."""
    slots: int
    link_bytes_per_s: float
    backbone: LayerCost
    river: LayerCost
    link_latency_s: float = 0.0
    link_abortable: bool = False
    """Whether a running fetch can be called off (a link that copies in pieces); what it has copied is then lost."""
    passage_s: float = 0.0
    """Per passage outside the layers: embedding, head, sampling."""
    tau: float = 0.5
    min_exit: int = 1

    def __post_init__(self) -> None:
        if self.streamed and self.slots < 1:
            raise ValueError(f"{len(self.streamed)} layers stream through {self.slots} slots: expected at least 1")
        if self.link_bytes_per_s <= 0:
            raise ValueError(f"link_bytes_per_s is {self.link_bytes_per_s}: expected more than 0")
        if any(not 0 <= layer < self.num_layers for layer in self.streamed):
            raise ValueError(f"streamed layers {sorted(self.streamed)}: expected layers of 0..{self.num_layers - 1}")

    def link_s(self, layer: int) -> float:
        return self.link_latency_s + self.streamed[layer] / self.link_bytes_per_s


@dataclass
class Result:
    """What a replay took."""

    kind: Kind
    seconds: float = 0.0
    stall_s: float = 0.0
    """Time that computation stood still for a layer."""
    bytes_moved: int = 0
    wasted_bytes: int = 0
    """Fetched and overwritten unused, or called off half-way. What the slots hold at the end may still be used."""
    misses: int = 0
    """Acquired layers that were not there: waited for, or left for the river."""
    new_tokens: int = 0
    """Tokens generated: one a passage."""
    passage_seconds: list[float] = field(default_factory=list)
    passage_stall_s: list[float] = field(default_factory=list)
    passage_wasted_bytes: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def wasted_share(self) -> float:
        """Of the bytes moved."""
        return self.wasted_bytes / self.bytes_moved if self.bytes_moved else 0.0


def simulate(
    steps: Sequence[Step],
    setup: Setup,
    kind: Kind,
    *,
    forecast: Forecast | None = None,
    on_miss: Literal["wait", "exit"] = "wait",
    waste_weight: float = WASTE_WEIGHT,
) -> Result:
    """Replay `steps`, slots empty at first. `forecast` replaces the fresh one of the kind, and learns.

    With `on_miss="exit"` a passage leaves for the river where a layer is not there, from min_exit on.
    Raises ValueError for a depth outside 0..num_layers.
    """
    for number, step in enumerate(steps):
        if not 0 <= step.depth <= setup.num_layers:
            raise ValueError(f"passage {number} has depth {step.depth}: expected 0..{setup.num_layers}")
    if forecast is None:
        depths = [step.depth for step in steps]
        forecast = forecast_of(kind, setup.num_layers, tau=setup.tau, min_exit=setup.min_exit, depths=depths)
    replay = _Replay(setup, kind, forecast, on_miss, waste_weight)
    for step in steps:
        replay.passage(step)
    return replay.result


def simulate_all(
    steps: Sequence[Step], setup: Setup, kinds: Iterable[Kind] = KINDS, *, on_miss: Literal["wait", "exit"] = "wait"
) -> dict[Kind, Result]:
    """`simulate` for each kind, each with a fresh forecast."""
    return {kind: simulate(steps, setup, kind, on_miss=on_miss) for kind in kinds}


@dataclass
class _Slot:
    layer: int | None = None
    used: bool = True


@dataclass
class _Fetch:
    layer: int
    slot: int
    done_s: float | None = None
    """None until it starts."""


class _Link:
    """Slots and the queue of fetches into them, as of a time that only goes forward."""

    def __init__(self, setup: Setup, result: Result) -> None:
        self._setup = setup
        self._result = result
        self.slots = [_Slot() for _ in range(setup.slots)]
        self.queue: list[_Fetch] = []
        self.free_s = 0.0

    def advance(self, now_s: float) -> None:
        """Finish what is done by `now_s` and start what can be."""
        while self.queue:
            fetch = self.queue[0]
            if fetch.done_s is None:
                self._start(fetch)
            if fetch.done_s is None or fetch.done_s > now_s:
                return
            self.slots[fetch.slot] = _Slot(fetch.layer, used=False)
            self.free_s = fetch.done_s
            self.queue.pop(0)

    def put(self, layer: int, slot: int, now_s: float) -> None:
        if not self.queue:
            self.free_s = max(self.free_s, now_s)
        self.queue.append(_Fetch(layer, slot))
        self.advance(now_s)

    def cancel(self, layer: int, slot: int, now_s: float) -> None:
        """Call off a fetch. The slot of one that has not started keeps what it holds."""
        fetch = next(fetch for fetch in self.queue if (fetch.layer, fetch.slot) == (layer, slot))
        self.queue.remove(fetch)
        if fetch.done_s is not None:
            assert self._setup.link_abortable, f"the fetch of layer {layer} has started"
            left_bytes = round(self._setup.streamed[layer] * (fetch.done_s - now_s) / self._setup.link_s(layer))
            self._result.bytes_moved -= left_bytes
            self._result.wasted_bytes += self._setup.streamed[layer] - left_bytes
            self.free_s = now_s

    def holds(self) -> list[int | None]:
        coming = {fetch.slot for fetch in self.queue}
        return [None if index in coming else slot.layer for index, slot in enumerate(self.slots)]

    def arrival_s(self, layer: int) -> float | None:
        """When the layer will be there if nothing is called off; None when nobody fetches it."""
        free_s = self.free_s
        for fetch in self.queue:
            free_s = fetch.done_s if fetch.done_s is not None else free_s + self._setup.link_s(fetch.layer)
            if fetch.layer == layer:
                return free_s
        return None

    def _start(self, fetch: _Fetch) -> None:
        fetch.done_s = self.free_s + self._setup.link_s(fetch.layer)
        bytes_moved = self._setup.streamed[fetch.layer]
        self._result.bytes_moved += bytes_moved
        old = self.slots[fetch.slot]
        if old.layer is not None and not old.used:
            self._result.wasted_bytes += self._setup.streamed[old.layer]
        self.slots[fetch.slot] = _Slot()


class _Replay:
    """The mechanism in small: acquire, compute, release, and the decisions in between."""

    def __init__(
        self, setup: Setup, kind: Kind, forecast: Forecast, on_miss: Literal["wait", "exit"], waste_weight: float
    ) -> None:
        self.result = Result(kind)
        self._setup = setup
        self._forecast = forecast
        self._on_miss = on_miss
        self._waste_weight = waste_weight
        self._streamed = tuple(sorted(setup.streamed))
        self._link_s = max((setup.link_s(layer) for layer in setup.streamed), default=0.0)
        self._link = _Link(setup, self.result)
        self._now_s = 0.0

    def passage(self, step: Step) -> None:
        """Run one passage to its end."""
        setup, started_s, result = self._setup, self._now_s, self.result
        stalled_s, wasted_bytes = result.stall_s, result.wasted_bytes
        compute_s = setup.backbone.seconds(step.new_tokens)
        river_s = setup.river.seconds(step.new_tokens)
        self._forecast.begin(step.new_tokens, step.margin, step.depth if step.known else None)
        depth = 0
        while depth < step.depth:
            if not self._acquire(depth, compute_s):
                break
            self._now_s += compute_s
            depth += 1
            signal_index = depth - setup.min_exit
            if 0 <= signal_index < len(step.signals) and depth < setup.num_layers:
                self._forecast.observe_signal(depth, step.signals[signal_index])
        self._forecast.end(depth, censored=depth < step.depth)
        tail_s = (setup.num_layers - depth) * river_s + setup.passage_s
        self._decide(setup.num_layers, compute_s, tail_s)
        self._now_s += tail_s
        result.new_tokens += 1
        result.passage_seconds.append(self._now_s - started_s)
        result.passage_stall_s.append(result.stall_s - stalled_s)
        result.passage_wasted_bytes.append(result.wasted_bytes - wasted_bytes)
        result.seconds = self._now_s

    def _acquire(self, depth: int, compute_s: float) -> bool:
        """Have the layer there. False when the passage leaves instead."""
        self._link.advance(self._now_s)
        missing = depth in self._setup.streamed and depth not in self._link.holds()
        self.result.misses += missing
        if missing and self._on_miss == "exit" and depth >= self._setup.min_exit:
            return False
        self._decide(depth, compute_s, compute_s)
        if missing:
            there_s = self._link.arrival_s(depth)
            assert there_s is not None, f"layer {depth} was acquired and nobody fetches it"
            self.result.stall_s += there_s - self._now_s
            self._now_s = there_s
            self._link.advance(self._now_s)
        if depth in self._setup.streamed:
            self._link.slots[self._link.holds().index(depth)].used = True
        return True

    def _decide(self, depth: int, compute_s: float, until_next_s: float) -> None:
        link = self._link
        link.advance(self._now_s)
        started = [fetch for fetch in link.queue if fetch.done_s is not None]
        snapshot = Snapshot(
            depth=depth,
            streamed=self._streamed,
            holds=link.holds(),
            rows=self._forecast.rows(),
            link_s=self._link_s,
            compute_s=compute_s,
            until_next_s=until_next_s,
            queue=[(fetch.layer, fetch.slot) for fetch in link.queue],
            started=len(started),
            abortable=self._setup.link_abortable,
            busy_s=(started[-1].done_s or 0.0) - self._now_s if started else 0.0,
        )
        decision = decide(snapshot, self.result.kind, waste_weight=self._waste_weight)
        for layer, slot in decision.cancels:
            link.cancel(layer, slot, self._now_s)
        for layer, slot in decision.fetches:
            link.put(layer, slot, self._now_s)
