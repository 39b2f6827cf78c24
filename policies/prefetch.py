"""Prediction + link + slots -> which layers to fetch now, into which slots, and which fetches to call off.

Slots are a cache. What is worth a slot is a layer's expected next use, discounted by how far away it is:

    value = sum over coming uses t of P(the next use is at t) * DISCOUNT ** (layers to run until t)

With certain depths that is Belady's rule: drop what is needed last, which in a full pass over more layers than slots is
what was just used. With the depths of a river it keeps the shallow layers, which most tokens need. Nothing is fetched
over a layer of higher value, and nothing before it pays: the link may have better to do at the next decision.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from policies.forecast import Forecast, Known, Oracle
from policies.predictor import DepthPredictor

Kind = Literal["none", "next", "predicted", "oracle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DISCOUNT = 0.98
"""A use half as sure counts the same when it is 34 layers nearer: about one full pass of an 8B model."""
WASTE_WEIGHT = 0.3
"""Seconds of stall that one second of useless copying is worth: for the rest of it nothing else wants the link."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision looks at. Ask for one as a layer is acquired (resident ones too), before waiting for it, and
    once more when the passage leaves the backbone."""

    depth: int
    """The backbone layer being acquired; the number of layers once the passage has left, and between passages."""
    streamed: Sequence[int]
    """The layers that pass through slots, ascending."""
    holds: Sequence[int | None]
    """Per slot the layer whose bytes are all there; None while a fetch into the slot is queued or runs."""
    rows: Sequence[Sequence[float]]
    """`Forecast.rows()`."""
    link_s: float
    """Seconds the link takes for one layer."""
    compute_s: float
    """Seconds to compute one backbone layer of this passage."""
    until_next_s: float
    """Seconds until the next decision if nothing must be waited for: `compute_s`, or the rest of the river."""
    queue: Sequence[tuple[int, int]] = ()
    """(layer, slot) of the fetches not yet done, first to finish first."""
    started: int = 0
    """How many of the queue, from its front, have started."""
    abortable: bool = False
    """Whether a started fetch can still be called off; what it has copied by then is lost."""
    busy_s: float = 0.0
    """Seconds until the started ones are done."""
    in_use: Collection[int] = ()
    """Slots that computation still reads and no fetch may be queued for."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Carry out `cancels` first: a fetch of `fetches` may reuse the slot."""

    fetches: tuple[tuple[int, int], ...] = ()
    """(layer, slot to overwrite), to be queued in this order. A layer that is acquired and not on its way comes first,
    unless every slot is in use."""
    cancels: tuple[tuple[int, int], ...] = ()
    """(layer, slot) entries of the queue to call off; one that has started only if the link is abortable."""


def forecast_of(
    kind: Kind, num_layers: int, *, tau: float = 0.5, min_exit: int = 1, depths: Sequence[int] | None = None
) -> Forecast:
    """What a kind believes: `next` that every passage runs all layers, `oracle` what `depths` says. Raises ValueError
    for an unknown kind and for an oracle without depths."""
    if kind == "predicted":
        return DepthPredictor(num_layers, tau, min_exit)
    if kind == "oracle":
        if depths is None:
            raise ValueError("prefetch oracle needs the depths of the passages to come: give it a trace")
        return Oracle(num_layers, depths)
    if kind in ("none", "next"):
        return Known(num_layers, num_layers)
    raise ValueError(f"unknown prefetch {kind!r}: expected one of {', '.join(KINDS)}")


def decide(snapshot: Snapshot, kind: Kind, *, waste_weight: float = WASTE_WEIGHT) -> Decision:
    """What the link should do from now on.

    `none` fetches only the acquired layer, over the deepest layer held. The other kinds differ in their forecast alone.
    The queue is planned anew each time: an entry that is not wanted any more is called off if it still can be.
    """
    plan = _Plan(snapshot, by_depth=kind == "none")
    plan.fetch_acquired()
    if kind != "none":
        plan.fetch_for_this_passage(waste_weight)
        plan.fetch_for_the_next()
    return plan.decision()


class _Plan:
    """The queue as it should be, grown one fetch at a time."""

    def __init__(self, snapshot: Snapshot, *, by_depth: bool) -> None:
        self.of = snapshot
        self.by_depth = by_depth
        firm = 0 if snapshot.abortable else snapshot.started
        self.waiting = snapshot.queue[firm:]
        self.running = snapshot.queue[0] if snapshot.abortable and snapshot.started else None
        """The started fetch that the plan may drop."""
        self.content = list(snapshot.holds)
        self.locked = set(snapshot.in_use)
        for layer, slot in snapshot.queue[:firm]:
            self.content[slot] = layer
            self.locked.add(slot)
        if snapshot.depth in self.content:
            self.locked.add(self.content.index(snapshot.depth))
        self.fetches: list[tuple[int, int]] = []
        self.free_s = snapshot.busy_s if firm else 0.0
        """When the link will have done all that is planned."""
        self.wait_s = 0.0
        """When the acquired layer will be there."""
        self.next_decision_s = snapshot.until_next_s
        self.blocked_risk = 0.0
        """Probability that this passage needs a layer that is not planned: fetches for later would be in its way."""
        row = snapshot.rows[0]
        self.reach = row[snapshot.depth] if snapshot.depth < len(row) else 0.0
        self.remaining = sum(row[snapshot.depth + 1 :]) / self.reach if self.reach else 0.0

    def fetch_acquired(self) -> None:
        """Bring in the layer that computation waits for, ahead of everything that has not started."""
        depth = self.of.depth
        if depth in self.of.streamed and depth not in self.of.holds:
            if depth in self.content:
                ahead = [layer for layer, _ in self.of.queue].index(depth) + 1
                self.wait_s = self.of.busy_s * ahead / self.of.started
            else:
                self._let_finish(depth, 1.0)
                slot = self.slot_for(depth, needed=True)
                if slot is None:
                    slot = self._started_slot()
                if slot is not None:
                    self._add(depth, slot)
                    self.wait_s = self.free_s
        self.next_decision_s = self.wait_s + self.of.until_next_s

    def fetch_for_this_passage(self, waste_weight: float) -> None:
        """Fetch the next layers, in order, while it pays."""
        of = self.of
        if not self.reach:
            return
        needed_s, before = self.wait_s, of.depth
        homes = of.streamed[: len(of.holds)]
        for layer in of.streamed:
            if layer <= of.depth:
                continue
            needed_s, before = needed_s + (layer - before) * of.compute_s, layer
            if layer in self.content:
                continue
            probability = of.rows[0][layer] / self.reach
            if not probability:
                return
            self.blocked_risk = 0.0 if of.abortable else probability
            copy_s = self._copy_s(layer)
            later_s = max(self.free_s, self.next_decision_s) + of.link_s
            saved_s = max(later_s - needed_s, 0.0) - max(self.free_s + copy_s - needed_s, 0.0)
            # A layer of the first ones stays until it is used, by whichever passage; others only serve this one. When
            # it leaves, at the next decision, an abortable link has lost no more than the time until then.
            lost_s = min(copy_s, max(self.next_decision_s - self.free_s, 0.0)) if of.abortable else copy_s
            waste_s = 0.0 if layer in homes else (1 - probability) * lost_s
            if probability * saved_s <= waste_weight * waste_s:
                return
            self._let_finish(layer, probability)
            slot = self.slot_for(layer)
            if slot is None:
                return
            self._add(layer, slot)
            self.blocked_risk = 0.0

    def fetch_for_the_next(self) -> None:
        """Refill the slots with the first streamed layers, in order, while the link would stand still otherwise."""
        of = self.of
        for layer in of.streamed[: len(of.holds)]:
            if layer in self.content:
                continue
            idle_s = self.next_decision_s - self.free_s
            if not self._runs_first(layer) and self._soon(layer) * idle_s <= self.blocked_risk * of.link_s:
                return
            self._let_finish(layer, 1.0)
            slot = self.slot_for(layer)
            if slot is None:
                return
            self._add(layer, slot)

    def _copy_s(self, layer: int) -> float:
        """Seconds of link that the layer still takes, put next into the plan."""
        return self.of.busy_s if self._runs_first(layer) else self.of.link_s

    def _runs_first(self, layer: int) -> bool:
        """Is the layer on its way, and nothing planned before it? Then it only has to be left alone."""
        return self.running is not None and self.running[0] == layer and not self.fetches

    def _let_finish(self, layer: int, probability: float) -> None:
        """Leave the running fetch in front of `layer` when dropping its progress costs more than the delay it means."""
        if self.running is None or self.fetches or self.running[0] == layer:
            return
        busy_s = self.of.busy_s
        if self._soon(self.running[0]) * (self.of.link_s - busy_s) > probability * busy_s:
            self._add(*self.running)

    def _soon(self, layer: int) -> float:
        """Probability that this passage or one of the forecast ones needs the layer."""
        unused = 1.0
        if layer > self.of.depth and self.reach:
            unused -= self.of.rows[0][layer] / self.reach
        for row in self.of.rows[1:]:
            unused *= 1 - row[layer]
        return 1 - unused

    def value(self, layer: int) -> float:
        """See the head of the module; kind `none`, which asks no forecast, takes the shallower layer for the better."""
        if self.by_depth:
            return -layer
        rows = self.of.rows
        value, unused = 0.0, 1.0
        if layer > self.of.depth and self.reach:
            probability = rows[0][layer] / self.reach
            value, unused = probability * DISCOUNT ** (layer - self.of.depth), 1 - probability
        start, length = self.remaining + 1, 1.0
        for row in rows[1:]:
            if unused < 1e-9:
                return value
            value += unused * row[layer] * DISCOUNT ** (start + layer)
            unused *= 1 - row[layer]
            length = sum(row) + 1
            start += length
        # The last row goes on for ever: a geometric series.
        last = rows[-1][layer]
        return value + unused * last * DISCOUNT ** (start + layer) / (1 - (1 - last) * DISCOUNT**length)

    def slot_for(self, layer: int, needed: bool = False) -> int | None:
        """The slot to overwrite: an empty one, else that of the layer of least value if it is less than `layer`'s own.

        With `needed` the one of least value in any case. None when there is none.
        """
        values = {slot: self._value_in(slot, layer) for slot in range(len(self.content)) if slot not in self.locked}
        if not values:
            return None
        slot = min(values, key=values.__getitem__)
        return slot if needed or values[slot] < self.value(layer) else None

    def _value_in(self, slot: int, layer: int) -> float:
        content = self.content[slot]
        if content is not None:
            return self.value(content)
        # Nothing is lost; a layer that the queue has already stays where it is.
        return -math.inf if (layer, slot) in self.waiting else -1e9

    def _started_slot(self) -> int | None:
        """The last slot that a copy runs into and no computation reads."""
        slots = [slot for _, slot in self.of.queue[: self.of.started] if slot not in self.of.in_use]
        return slots[-1] if slots else None

    def _add(self, layer: int, slot: int) -> None:
        self.free_s += self._copy_s(layer)
        self.fetches.append((layer, slot))
        self.content[slot] = layer
        self.locked.add(slot)

    def decision(self) -> Decision:
        """What to change in the queue: its front stays as long as it is what was planned."""
        same = 0
        while same < min(len(self.waiting), len(self.fetches)) and self.waiting[same] == self.fetches[same]:
            same += 1
        return Decision(tuple(self.fetches[same:]), tuple(self.waiting[same:]))
