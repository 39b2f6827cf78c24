"""`river-mem plan`: what a model needs, before anything of it is loaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import typer

from river_offload.cli.mem_options import PlanOptions
from river_offload.cli.mem_report import plan_report
from river_offload.cli.options import ModelOptions, ShowOptions, with_options
from river_offload.cli.report import print_json
from river_offload.cli.runtime import hush_libraries
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import RiverConfig
from river_offload.errors import BudgetError, UsageError


@with_options(ModelOptions, PlanOptions, ShowOptions)
def plan(model: str, options: ModelOptions, asked: PlanOptions, show: ShowOptions) -> None:
    """Plan a model's memory by running it on fake tensors. Exit code 0: it fits, 3: it does not."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
        require_stdout()
        config = RiverConfig.from_options(model=model, **options.load_arguments(), **asked.load_arguments())
        with _uncollected():
            found = _planned(config, asked, terminal)
        if show.as_json:
            print_json(found)
        else:
            plan_report(found)
    if not found["fits"]:
        raise typer.Exit(BudgetError.exit_code)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No search for garbage: importing torch and running dry make millions of objects that stay, and a tenth of the
    time would go into looking at them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _planned(config: RiverConfig, asked: PlanOptions, terminal: Terminal) -> dict[str, Any]:
    from policies.profiles import ProfileError, load_profile

    try:
        profile = None if asked.profile is None else load_profile(asked.profile)
    except ProfileError as error:
        raise UsageError(str(error)) from error
    progress = terminal.progress()
    progress.start("starting", 0, "")
    hush_libraries()
    from river_offload.planning.memory_plan import plan_memory  # brings torch

    progress.finish()
    found = plan_memory(config, profile=profile, mean_depth=asked.mean_depth, progress=progress)
    for note in found.facts.notes:
        terminal.note(f"note: {note}")
    return found.as_json()
