"""`river-mem measure`: a run of the model, and its bytes beside those that were planned."""

from __future__ import annotations

from typing import Any

from river_offload.cli.mem_options import MeasureOptions
from river_offload.cli.mem_report import run_report
from river_offload.cli.options import ModelOptions, ShowOptions, with_options
from river_offload.cli.report import print_json
from river_offload.cli.runtime import hush_libraries
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.cli.watch import WatchOptions, watching
from river_offload.config import RiverConfig


@with_options(ModelOptions, MeasureOptions, WatchOptions, ShowOptions)
def measure(model: str, options: ModelOptions, asked: MeasureOptions, watch: WatchOptions, show: ShowOptions) -> None:
    """Run a model on random tokens that fill the context, and set the plan and the measurement side by side."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
        asked.check(options.context)
        watch.check(show)
        require_stdout()
        config = RiverConfig.from_options(model=model, **options.load_arguments(), **asked.load_arguments())
        found = _measured(config, asked, watch, terminal)
        if show.as_json:
            print_json(found)
        else:
            run_report(found)


def _measured(config: RiverConfig, asked: MeasureOptions, watch: WatchOptions, terminal: Terminal) -> dict[str, Any]:
    progress = terminal.progress()
    progress.start("starting", 0, "")
    hush_libraries()
    from river_offload.eval.memory_run import NEW_TOKENS, measure_memory  # brings torch

    progress.finish()
    new_tokens = min(NEW_TOKENS, config.context - 1) if asked.new_tokens is None else asked.new_tokens
    return measure_memory(
        config,
        new_tokens=new_tokens,
        seed=asked.seed or 0,
        progress=progress,
        watched=(lambda model: watching(watch, model, terminal)) if watch.watch else None,
    )
