"""`river-offload`: the commands and nothing else. What a command does is in the module of its name."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer

    from river_offload._version import __version__
    from river_offload.cli.bench import bench
    from river_offload.cli.chat import chat
    from river_offload.cli.generate import generate
    from river_offload.cli.help import Command, Group
    from river_offload.cli.options import flag
    from river_offload.cli.prepare import prepare
    from river_offload.cli.streams import OutputError, guard_standard_streams
    from river_offload.cli.terminal import INTERRUPTED, Terminal
    from river_offload.cli.trace import trace
except KeyboardInterrupt:
    # The installed script imports this module before it can guard anything: Ctrl-C in its first tenth of a second.
    sys.exit(130)

app = typer.Typer(
    cls=Group,
    name="river-offload",
    help="Run decoder-only transformers models under a memory budget: a 4-bit exit river rests on the device, "
    "full-precision layers are streamed only for the tokens that need them.",
    epilog="MODEL is a directory of safetensors, a .gguf file, a hub id (org/name) or demo.\n\n"
    "Built rivers and unpacked GGUF files are kept in --cache-dir, else in the folder that the environment variable "
    "RIVER_OFFLOAD_CACHE names, else in ~/.cache/river-offload.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback is for bugs; a plain one can be pasted into an issue.
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(prepare)
app.command(cls=Command)(bench)
app.command(cls=Command)(trace)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"river-offload {__version__}", flush=True)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, flag("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the installed script. Exit codes: 0, 1 other errors, 2 usage, 3 does not fit, 4 bad checkpoint."""
    try:
        guard_standard_streams()
        app()
    except OutputError as error:  # of --help and --version; commands say theirs
        Terminal(quiet=False).error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
