"""One figure that the machine gave, or why it gave none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure, or the reason why there is none; never both. `dataclasses.asdict` makes it ready for JSON.

    Raises ValueError for both or neither: a gap that nobody explains is what this class is there to prevent.
    """

    value: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError(f"value {self.value!r} with reason {self.reason!r}: expected one of them")

    @classmethod
    def missing(cls, reason: str) -> Reading:
        """No figure, and why."""
        return cls(None, reason)

    def minus(self, other: Reading | int) -> Reading:
        """The difference; without one of the two figures its reason."""
        if self.value is None:
            return self
        if isinstance(other, Reading):
            return other if other.value is None else Reading(self.value - other.value)
        return Reading(self.value - other)
