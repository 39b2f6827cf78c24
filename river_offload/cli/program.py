"""What both programs are made of: a typer application with our help, `--version`, and an entry point that ends well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from river_offload._version import __version__
from river_offload.cli.help import Command, Group
from river_offload.cli.options import flag
from river_offload.cli.streams import OutputError, guard_standard_streams
from river_offload.cli.terminal import INTERRUPTED, Terminal


def program(name: str, commands: Iterable[Callable[..., Any]], *, help: str, epilog: str) -> typer.Typer:
    """The application `name` with its commands, in the order in which its help lists them."""
    app = typer.Typer(
        cls=Group,
        name=name,
        help=help,
        epilog=epilog,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        # A traceback is for bugs; a plain one can be pasted into an issue.
        pretty_exceptions_enable=False,
    )
    for command in commands:
        app.command(cls=Command)(command)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"{name} {__version__}", flush=True)
            raise typer.Exit()

    def root(version: bool = False) -> None:
        pass

    option = flag("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    root.__annotations__["version"] = Annotated[bool, option]  # resolved here: it knows the program's name
    app.callback()(root)
    return app


def run(app: typer.Typer) -> None:
    """Run a program from its entry point. Exit codes: 0, 1 other errors, 2 usage, 3 does not fit, 4 bad checkpoint."""
    try:
        guard_standard_streams()
        app()
    except OutputError as error:  # of --help and --version; commands say theirs
        Terminal(quiet=False).error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
