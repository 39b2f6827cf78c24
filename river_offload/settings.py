"""The mode in force on a loaded model, and what belongs to it: to be changed for good, or for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from policies.acceptance import Acceptance, Replayed
from policies.drafting import GATED_DRAFT, Drafting, drafting_of
from policies.exit import ExitRule, ForcedExits
from policies.types import Mode, Placement
from river_offload.config import DEFAULT_GATE, RiverConfig, check_mode, check_option
from river_offload.errors import ModeError, UsageError
from river_offload.passage import Flow


class Settings:
    """What `model.river` lets its user set.

    Attributes:
        config: the options that the model was loaded with.
        placement: what rests where.
    """

    def __init__(self, flow: Flow, config: RiverConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self._flow = flow
        self._gate = DEFAULT_GATE if config.gate is None else config.gate
        self._draft = config.draft
        self._policies: dict[tuple[str, str | int], Drafting] = {}
        self._acceptance: Replayed | None = None

    @property
    def num_layers(self) -> int:
        return self._flow.rule.num_layers

    @property
    def drafts(self) -> bool:
        """Does a generation in this mode draft and check?"""
        return self._flow.rule.mode.drafts

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
    ) -> Iterator[Self]:
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
            Mode("exit"), rule.tau, rule.min_exit, layers, depths, first_passage=len(self._flow.trace.records)
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
