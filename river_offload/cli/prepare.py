"""`river-offload prepare`: build and cache the river, so that the next start takes no quantization."""

from __future__ import annotations

from river_offload.cli import runtime
from river_offload.cli.options import ModelOptions, ShowOptions, with_options
from river_offload.cli.progress import duration
from river_offload.cli.report import print_json
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import default_cache_dir, format_size
from river_offload.errors import UsageError


@with_options(ModelOptions, ShowOptions)
def prepare(model: str, options: ModelOptions, show: ShowOptions) -> None:
    """Build the river of a model and keep it on disk. Takes the options of generate that concern loading."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
        if options.parsed_mode().kind == "backbone":
            raise UsageError("prepare builds the river, and mode backbone has none: leave --mode out")
        if options.tau is not None:
            raise UsageError("--tau has no effect on prepare, which writes no text: give it to generate or chat")
        if show.as_json:
            require_stdout()
        with runtime.opened(model, options.load_arguments(), terminal) as loaded:
            river = loaded.river
            placement, quant = river.placement, river.config.quant
            cache_dir = river.config.cache_dir or default_cache_dir()
            load_s = river.report()["seconds"]["load"]
            terminal.note(
                f"{model}: {len(placement.river_layers)} of {river.num_layers} layers have their river at "
                f"{quant.bits} bits, group {quant.group_size}, in {cache_dir} · {duration(load_s)} · "
                f"needs {format_size(placement.planned_bytes)} of {format_size(placement.budget_bytes)}"
            )
            if show.as_json:
                print_json(
                    {
                        "model": model,
                        "num_layers": river.num_layers,
                        "river_layers": list(placement.river_layers),
                        "bits": quant.bits,
                        "group_size": quant.group_size,
                        "cache_dir": str(cache_dir),
                        "seconds": {"load": load_s},
                        "planned_bytes": placement.planned_bytes,
                        "budget_bytes": placement.budget_bytes,
                    }
                )
