"""What would make a model fit that does not: each figure found by asking the planner again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from policies.types import Mode, Refusal
from river_offload.config import RiverConfig
from river_offload.planning.dry_run import Needs
from river_offload.planning.model_facts import ModelFacts
from river_offload.planning.sizes import Weighed

Weigh = Callable[[ModelFacts, Needs | None], tuple[Weighed, tuple[Mode, ...]]]
"""Weighs a model; with needs that are known already it is not run dry."""

_SURE = 0.98
"""An estimate that leaves so much of the budget needs no dry run to confirm it."""
_RECENT_TOKENS = 128
"""That a cache of few bits keeps in full precision, at most."""
_CONTEXT_STEPS = 64
"""The largest context is found to within this share of the one that was asked for."""


@dataclass(frozen=True)
class Remedies:
    """Why it does not fit, and what would. None: nothing of that kind would do."""

    needed_bytes: int
    """The smallest budget that would do; loading with exactly that succeeds."""
    largest_term: str
    """Of the terms that an option moves: kv, transient, river, head or slots."""
    largest_term_bytes: int
    largest_context: int | None
    bits: int | None
    """Of the river: the most that fit, fewer than were asked for."""
    head_bits: int | None
    """The most that fit, fewer than were asked for."""
    kv_bits: int | None
    """The same for keys and values."""
    kv_tier: str | None
    """ "host" where keys and values off the device would do."""
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"advice": list(self.advice)}


def find_remedies(facts: ModelFacts, weighed: Weighed, refusal: Refusal, weigh: Weigh) -> Remedies:
    """One remedy of each kind, the others left as they are.

    Args:
        weighed, refusal: of `facts` as they are.
        weigh: weighs the model under other options.
    """

    def settled_by(least_bytes: float, most_bytes: float) -> bool | None:
        """Does an estimate say whether it fits? None where only a dry run can tell."""
        if least_bytes > refusal.budget_bytes:
            return False
        return True if most_bytes <= _SURE * refusal.budget_bytes else None

    def fits(config: RiverConfig) -> bool:
        other = replace(facts, config=config)
        # The working memory hardly depends on bits: a first look without a dry run settles most cases.
        first_bytes = _needed_bytes(other, weigh, weighed.needs)
        if (settled := settled_by(first_bytes, first_bytes)) is not None:
            return settled
        return _needed_bytes(other, weigh) <= refusal.budget_bytes

    def fits_with_another_cache(config: RiverConfig) -> bool:
        # Codes and scales, a bit a number or two; then the workspace of a layer, and recent tokens, old and new.
        kv_bytes, share = refusal.terms["kv"], (config.kv_bits + 1) / facts.config.kv_bits
        least_bytes = refusal.needed_bytes - kv_bytes * (1 - share)
        more = 1 / 16 + 1 / weighed.sizes.num_layers + 2 * _RECENT_TOKENS / config.context
        if (settled := settled_by(least_bytes, least_bytes + more * kv_bytes)) is not None:
            return settled
        return _needed_bytes(replace(facts, config=config), weigh) <= refusal.budget_bytes

    def fits_off_the_device() -> bool:
        # One layer's keys and values stay, as attention reads them. Windows stay, too: then a dry run tells.
        kv_bytes = refusal.terms["kv"]
        least_bytes = refusal.needed_bytes - kv_bytes * (1 - 1 / weighed.sizes.num_layers)
        if (settled := settled_by(least_bytes, refusal.budget_bytes + 1)) is not None:
            return settled
        return (
            _needed_bytes(replace(facts, config=replace(facts.config, kv_tier="host")), weigh) <= refusal.budget_bytes
        )

    movable = {name: refusal.terms[name] for name in _movable(facts, weighed, refusal)}
    largest = max(movable, key=movable.__getitem__, default="")
    config = facts.config
    return Remedies(
        needed_bytes=refusal.needed_bytes,
        largest_term=largest,
        largest_term_bytes=movable.get(largest, 0),
        largest_context=_largest_context(facts, refusal, weigh),
        bits=next((bits for bits, other in _fewer_bits(config, refusal) if fits(other)), None),
        head_bits=next((bits for bits, other in _fewer_head_bits(config, weighed) if fits(other)), None),
        kv_bits=next((bits for bits, other in _fewer_kv_bits(config, refusal) if fits_with_another_cache(other)), None),
        kv_tier="host" if config.kv_tier == "device" and fits_off_the_device() else None,
        advice=refusal.advice,
    )


def _movable(facts: ModelFacts, weighed: Weighed, refusal: Refusal) -> Iterator[str]:
    yield from ("kv", "transient")
    if refusal.terms["river"]:
        yield "river"
    if weighed.sizes.head_can_shrink:
        yield "head"
    if facts.config.slots > 1:
        yield "slots"


def _needed_bytes(facts: ModelFacts, weigh: Weigh, needs: Needs | None = None) -> int:
    """The smallest budget that would do."""
    weighed, modes = weigh(facts, needs)
    refused = weighed.place(facts.config, modes, 0)
    assert isinstance(refused, Refusal), "a model fits into nothing"
    return refused.needed_bytes


def _largest_context(facts: ModelFacts, refusal: Refusal, weigh: Weigh) -> int | None:
    """A multiple of a `_CONTEXT_STEPS`th of the context. What is needed grows nearly straight with the context, so
    that a line through both ends of the range hits the place in a few steps."""
    step = max(facts.config.context // _CONTEXT_STEPS, 1)

    budget_bytes = refusal.budget_bytes
    low, low_bytes = 0, refusal.needed_bytes - refusal.terms["kv"] - refusal.terms["transient"]
    high, high_bytes = -(-facts.config.context // step), refusal.needed_bytes
    while high - low > 1 and low_bytes < budget_bytes:
        if low and low_bytes + (high_bytes - low_bytes) / (high - low) > budget_bytes:
            break  # one step more would be too much
        share = (budget_bytes - low_bytes) / (high_bytes - low_bytes)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        shorter = replace(facts, config=replace(facts.config, context=middle * step))
        if (needed_bytes := _needed_bytes(shorter, weigh)) <= budget_bytes:
            low, low_bytes = middle, needed_bytes
        else:
            high, high_bytes = middle, needed_bytes
    return low * step if low else None


def _fewer_bits(config: RiverConfig, refusal: Refusal) -> Iterator[tuple[int, RiverConfig]]:
    """Only where the river is large enough: at best it vanishes."""
    if refusal.terms["river"] <= refusal.needed_bytes - refusal.budget_bytes:
        return
    for bits in (4, 3, 2):
        if bits < config.quant.bits:
            yield bits, replace(config, quant=replace(config.quant, bits=bits))


def _fewer_kv_bits(config: RiverConfig, refusal: Refusal) -> Iterator[tuple[int, RiverConfig]]:
    """Only where the cache is large enough: at best it vanishes."""
    if refusal.terms["kv"] <= refusal.needed_bytes - refusal.budget_bytes:
        return
    for bits in (8, 4):
        if bits < config.kv_bits:
            yield bits, replace(config, kv_bits=bits)


def _fewer_head_bits(config: RiverConfig, weighed: Weighed) -> Iterator[tuple[int, RiverConfig]]:
    if weighed.sizes.head_can_shrink:
        for bits in (8, 4):
            yield bits, replace(config, head_bits=bits)
