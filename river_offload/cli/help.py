"""How `--help` looks: one way of naming what an option takes, whatever the version of typer."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

NOTHING = " "
"""The metavar of a flag. An empty one would be replaced by the type's name."""


class Command(TyperCommand):
    """A command whose --help stands with its output options."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = _uniform(super().get_params(ctx))
        if (own := self.get_help_option(ctx)) is not None:
            own.rich_help_panel = "Output"
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """MODEL, not {MODEL}."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """The program."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _uniform(super().get_params(ctx))


def _uniform(params: list[Any]) -> list[Any]:
    """Without the Python types that typer writes beside names that say it: <str> after MODEL, <bool> after a flag."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.metavar is None:
            param.metavar = NOTHING
    return params
