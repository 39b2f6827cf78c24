"""`river-offload`: the commands and nothing else. What a command does is in the module of its name."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from river_offload._version import __version__
from river_offload.cli.bench import bench
from river_offload.cli.chat import chat
from river_offload.cli.generate import generate
from river_offload.cli.prepare import prepare
from river_offload.cli.trace import trace

app = typer.Typer(
    name="river-offload",
    help="Run decoder-only transformers models under a memory budget: a 4-bit exit river rests on the device, "
    "full-precision layers are streamed only for the tokens that need them.",
    epilog="MODEL is a directory of safetensors, a .gguf file, a hub id (org/name) or demo.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback is for bugs; a plain one can be pasted into an issue.
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(prepare)
app.command()(bench)
app.command()(trace)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"river-offload {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the installed script. Exit codes: 0, 1 other errors, 2 usage, 3 does not fit, 4 bad checkpoint."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a replacement; text a model wrote must not end in a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
