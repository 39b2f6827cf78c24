"""`river-offload bench`: how fast a model runs here, beside what the machine would allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from river_offload.cli.options import BenchOptions, ModelOptions, OutputOptions, with_options
from river_offload.cli.progress import duration
from river_offload.cli.report import print_json
from river_offload.cli.runtime import hush_libraries
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import RiverConfig, format_size
from river_offload.errors import UsageError


@with_options(ModelOptions, BenchOptions, OutputOptions)
def bench(model: str, options: ModelOptions, asked: BenchOptions, output: OutputOptions) -> None:
    """Measure the machine, then the model on it: random tokens in, no tokenizer needed."""
    terminal = Terminal(quiet=output.quiet)
    with boundary(terminal):
        options = asked.applied_to(options)
        options.check(depths_forced=asked.depths is not None)
        asked.check(options)
        output.check()
        require_stdout()
        config = RiverConfig.from_options(model=model, **options.load_arguments())
        figures = _run(config, asked, output, terminal)
        if asked.acceptance is None and _never_right(figures):
            terminal.note(
                "note: hardly any drafted token was right, as with random weights: --acceptance TRACE gives drafts the "
                "luck of a trained model"
            )
        if output.as_json:
            print_json(figures)
        else:
            print("\n".join(lines(figures)))


def _run(config: RiverConfig, asked: BenchOptions, output: OutputOptions, terminal: Terminal) -> dict[str, Any]:
    progress = terminal.progress()
    progress.start("starting", 0, "")
    hush_libraries()
    from river_offload.eval import bench as measuring  # brings torch
    from river_offload.eval import request as asking

    progress.finish()
    default = asking.Request()
    request = asking.Request(
        tokens=asked.tokens,
        prompt_tokens=default.prompt_tokens if asked.prompt_tokens is None else asked.prompt_tokens,
        depths=None if asked.depths is None else asking.read_depths(asked.depths),
        acceptance=None if asked.acceptance is None else asking.read_acceptance(asked.acceptance),
        seed=asked.seed or default.seed,
    )
    total = request.prompt_tokens + request.new_tokens()
    if total > config.context:
        raise UsageError(
            f"{request.prompt_tokens} prompt tokens and {request.new_tokens()} new ones (the first ones are not "
            f"counted) do not fit a context of {config.context}: raise --context or ask for fewer"
        )
    trace = None if output.trace is None else Path(output.trace)
    return measuring.bench(config, request, progress=progress, trace=trace)


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for people."""
    ceilings, config, depths = figures["ceilings"], figures["config"], figures["depths"]
    link = ceilings["link_bytes_per_s"]
    rows = [
        ("model", f"{config['model']} · mode {config['mode']} · {config['device']} {config['dtype']}"),
        (
            "layers",
            f"{config['resident_layers']} resident, {config['streamed_layers']} streamed through "
            f"{config['slots']} slots of {format_size(config['slot_bytes'])}"
            if config["streamed_layers"]
            else f"{config['resident_layers']} resident, none streamed",
        ),
        ("memory reads", f"at most {_rate(ceilings['memory_read_bytes_per_s'])}"),
        ("link", f"at most {_rate(link)} ({ceilings['link']})" if link else "not needed"),
        (
            "speed",
            f"{figures['tokens_per_s']:.2f} tok/s · {figures['tokens']} tokens in "
            f"{duration(figures['seconds']['run'])} · median {1e3 * figures['token_s']['median']:.1f} ms, "
            f"longest {1e3 * figures['token_s']['max']:.1f} ms",
        ),
        ("depth", f"mean {depths['mean']:.1f} of {config['num_layers']} · {depths['full_share']:.0%} at full depth"),
        *([("drafts", _drafts(figures))] if figures.get("drafted") else []),
        ("streamed", _streamed(figures)),
        ("peak", f"{format_size(figures['peak_device_bytes'])} of {format_size(figures['budget_bytes'])}"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _never_right(figures: Mapping[str, Any]) -> bool:
    checked = figures.get("tokens_per_backbone_pass") is not None
    return checked and bool(figures["drafted"]) and figures["accepted"] < figures["drafted"] / 20


def _drafts(figures: Mapping[str, Any]) -> str:
    passes, source = figures["tokens_per_backbone_pass"], figures["config"].get("acceptance")
    checked = "no checks" if passes is None else f"{passes:.2f} tokens a backbone pass"
    return (
        f"{checked} · {figures['drafted']} drafted, {figures['accepted']} accepted"
        f"{'' if source is None else f' by {source}'}"
    )


def _streamed(figures: Mapping[str, Any]) -> str:
    if figures["link_over_ceiling"] is None:
        return "nothing"
    hidden = figures["hidden_copy_share"]
    return (
        f"{format_size(round(figures['bytes_per_token']))} a token · {figures['link_over_ceiling']:.0%} of the link's "
        f"rate · {hidden:.0%} of the copying hidden · {duration(figures['stall_s'])} of stalls · "
        f"{format_size(figures['wasted_bytes'])} in vain"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
