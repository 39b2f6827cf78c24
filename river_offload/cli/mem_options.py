"""The options of `river-mem plan` and `river-mem measure` beyond those of a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from river_offload.cli.options import option
from river_offload.config import RiverConfig
from river_offload.errors import UsageError


@dataclass(frozen=True)
class PlanOptions:
    """What a plan asks beyond `load`."""

    profile: Annotated[
        str | None,
        option("--profile", "NAME", "Machine", "Plan for this machine: a built-in name or a .toml file."),
    ] = None
    host_budget: Annotated[
        str | None,
        option("--host-budget", "SIZE", "Machine", "Main memory for layers that wait there, beside a GPU."),
    ] = None
    batch: Annotated[int | None, option("--batch", "B", "Machine", "Rows to plan for.", RiverConfig.batch)] = None
    mean_depth: Annotated[
        float | None,
        option("--mean-depth", "D", "Machine", "Backbone layers of a token, for the speed of mode exit.", 3),
    ] = None

    def load_arguments(self) -> dict[str, Any]:
        """Those that `load` takes, too."""
        given = {"host_budget": self.host_budget, "batch": self.batch}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class MeasureOptions:
    """What a measurement runs."""

    new_tokens: Annotated[int | None, option("--new-tokens", "N", "Run", "Tokens to generate.", 8)] = None
    batch: Annotated[int | None, option("--batch", "B", "Run", "Rows to run.", RiverConfig.batch)] = None
    seed: Annotated[int | None, option("--seed", "S", "Run", "Of the random tokens.", 0)] = None

    def check(self, context: int | None) -> None:
        """Raises UsageError for a value out of range."""
        planned = RiverConfig.context if context is None else context
        if planned == 1:
            raise UsageError("--context is 1: expected at least 2, a prompt and what follows it")
        if self.new_tokens is not None and not 1 <= self.new_tokens < planned:
            raise UsageError(
                f"--new-tokens is {self.new_tokens}: expected 1 to {planned - 1}, so that a prompt fits beside them "
                f"in a context of {planned}"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: expected a whole number from 0 to 2^63 - 1")

    def load_arguments(self) -> dict[str, Any]:
        """Those that `load` takes, too."""
        return {} if self.batch is None else {"batch": self.batch}
