"""What a generation is expected to run: passages for the simulator to replay, and how many tokens come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.drafting import TYPICAL_DRAFT, TYPICAL_TOKENS_A_CHECK
from policies.simulate import Step


@dataclass(frozen=True)
class Course:
    """Passages of a generation, its prompt left out."""

    steps: Sequence[Step]
    tokens: float
    """That come of all of them."""
    draft: int | None = None
    """Tokens that are drafted before each check; None where nothing is checked."""

    @property
    def mean_depth(self) -> float:
        """Backbone layers that are run a token."""
        return sum(step.depth for step in self.steps) / self.tokens


def one_by_one(depths: Sequence[int], *, known: bool) -> Course:
    """A token a passage, of these depths. `known`: the mode fixes them."""
    return Course([Step(depth, known=known) for depth in depths], len(depths))


def in_rounds(rounds: int, draft_depth: int, num_layers: int) -> Course:
    """Drafts through `draft_depth` backbone layers and checks through all of them, as long and as lucky as typical."""
    draft, check = Step(draft_depth, known=True), Step(num_layers, new_tokens=TYPICAL_DRAFT + 1, known=True)
    return Course([*[draft] * TYPICAL_DRAFT, check] * rounds, rounds * TYPICAL_TOKENS_A_CHECK, TYPICAL_DRAFT)
