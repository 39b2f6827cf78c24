"""`river-mem plan`: what a model needs, before anything of it is loaded."""

from __future__ import annotations

from river_offload.cli.options import ModelOptions, ShowOptions, with_options
from river_offload.cli.terminal import Terminal, boundary


@with_options(ModelOptions, ShowOptions)
def plan(model: str, options: ModelOptions, show: ShowOptions) -> None:
    """Plan a model's memory by running it on fake tensors. Exit code 0: it fits, 3: it does not."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
