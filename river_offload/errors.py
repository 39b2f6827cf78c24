"""Every error a user can meet. Each message says what was found, what was expected and what to do."""

from __future__ import annotations


class RiverError(Exception):
    """Base class: an error with a message written for the user. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(RiverError):
    """An option, argument or configuration value that cannot be used as given."""

    exit_code = 2


class ContextError(UsageError):
    """More tokens than the context that was planned for (or than the model can attend to)."""


class ModeError(UsageError):
    """A mode whose parts were not built when the model was loaded."""


def not_possible(what: str) -> UsageError:
    """The refusal of what would hand out, overwrite or move tensors that are not all there."""
    return UsageError(
        f"{what} is not possible on a loaded river model: its layers rest on several tiers, in two precisions. Use the "
        "checkpoint it was loaded from, or load() again with other options"
    )


class BudgetError(RiverError):
    """The model does not fit.

    Attributes:
        needed_bytes: the smallest budget that works; loading with exactly that succeeds.
        budget_bytes: the budget that was refused.
        terms: device bytes by category of that smallest placement.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, needed_bytes: int, budget_bytes: int, terms: dict[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.terms = terms or {}


class CheckpointError(RiverError):
    """A checkpoint that is missing, damaged or not of a kind that can be loaded."""

    exit_code = 4


class UnsupportedError(CheckpointError):
    """A sound checkpoint of a model that this runtime does not support (mixture of experts, encoder-decoder)."""


class CacheError(RiverError):
    """The cache folder cannot be written, for a river or for keys and values: no permission, no space."""


class LinkError(RiverError):
    """A layer could not be brought in: the read or the copy failed."""
