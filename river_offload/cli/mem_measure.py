"""`river-mem measure`: a run of the model, and its bytes beside those that were planned."""

from __future__ import annotations

from river_offload.cli.options import ModelOptions, ShowOptions, with_options
from river_offload.cli.terminal import Terminal, boundary


@with_options(ModelOptions, ShowOptions)
def measure(model: str, options: ModelOptions, show: ShowOptions) -> None:
    """Run a model on random tokens that fill the context, and set the plan and the measurement side by side."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
