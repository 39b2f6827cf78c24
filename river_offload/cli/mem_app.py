"""`river-mem`: the commands and nothing else. What a command does is in the module of its name."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer

    from river_offload._version import __version__
    from river_offload.cli.help import Command, Group
    from river_offload.cli.mem_compare import compare
    from river_offload.cli.mem_doctor import doctor
    from river_offload.cli.mem_measure import measure
    from river_offload.cli.mem_plan import plan
    from river_offload.cli.mem_sweep import sweep
    from river_offload.cli.options import flag
    from river_offload.cli.streams import OutputError, guard_standard_streams
    from river_offload.cli.terminal import INTERRUPTED, Terminal
except KeyboardInterrupt:
    # The installed script imports this module before it can guard anything: Ctrl-C in its first tenth of a second.
    sys.exit(130)

app = typer.Typer(
    cls=Group,
    name="river-mem",
    help="Say what a model needs before it is loaded, and where every byte went afterwards.",
    epilog="MODEL is a directory, a .gguf file, a hub id (org/name, of which only the configuration is fetched), demo, "
    "or a built-in shape: llama-3.1-8b, llama-3.2-1b, phi-4-mini, ministral-3-8b, mistral-7b, qwen3-8b.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback is for bugs; a plain one can be pasted into an issue.
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(plan)
app.command(cls=Command)(measure)
app.command(cls=Command)(sweep)
app.command(cls=Command)(compare)
app.command(cls=Command)(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"river-mem {__version__}", flush=True)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, flag("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the installed script. Exit codes: 0 fits, 1 other errors, 2 usage, 3 does not fit, 4 bad model."""
    try:
        guard_standard_streams()
        app()
    except OutputError as error:  # of --help and --version; commands say theirs
        Terminal(quiet=False).error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
