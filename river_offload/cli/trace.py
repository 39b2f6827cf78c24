"""`river-offload trace`: what a trace says, in figures and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from river_offload.cli.progress import duration
from river_offload.cli.report import print_json
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import format_size
from river_offload.eval.trace_plot import plot_trace, trace_summary
from river_offload.trace import Trace


def trace(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A trace: what --trace wrote.", show_default=False)],
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="PICTURE", show_default=False,
            help="Draw depth, signals, stalls and bytes over the tokens: a .png, .svg or .pdf file.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print one JSON object instead of text.", show_default=False)
    ] = False,
) -> None:  # fmt: skip
    """Sum up a trace, and draw it."""
    terminal = Terminal(quiet=False)
    with boundary(terminal):
        require_stdout()
        read = Trace.read_jsonl(file)
        figures = trace_summary(read)
        if plot is not None:
            plot_trace(read, Path(plot), title=str(read.about.get("model", Path(file).name)))
        if as_json:
            print_json({"file": file, "plot": plot, **figures})
        else:
            print("\n".join(lines(figures)))


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for people."""
    decode, prefill, drafting = figures["decode"], figures["prefill"], figures["drafting"]
    found = [
        f"{prefill['passages']} prompts · {prefill['tokens']} tokens in {duration(prefill['seconds'])} · "
        f"{format_size(prefill['bytes_streamed'])} streamed · {duration(prefill['stall_s'])} stalled"
    ]
    if decode["tokens"]:
        found.append(
            f"{decode['tokens']} tokens in {duration(decode['seconds'])} · "
            f"{format_size(decode['bytes_streamed'])} streamed, {format_size(decode['wasted_bytes'])} of it in vain · "
            f"{duration(decode['stall_s'])} stalled · {decode['misses']} misses"
        )
    if drafting is not None:
        found.append(_drafting(drafting, figures["num_layers"]))
    elif decode["tokens"]:
        depths = decode["depths"]
        found.append(
            f"depth {depths['mean']:.1f} of {figures['num_layers']} on average, {depths['min']} to {depths['max']} · "
            f"{depths['full_share']:.0%} at full depth"
        )
    return found


def _drafting(figures: Mapping[str, Any], num_layers: int) -> str:
    if not figures["checks"]:
        return f"{figures['drafted']} tokens drafted, none checked"
    return (
        f"{figures['checks']} checks, {figures['tokens_per_check']:.2f} tokens each · "
        f"{figures['drafts_per_token']:.2f} draft steps a token, {figures['accepted_share']:.0%} of them accepted · "
        f"{format_size(round(figures['bytes_per_token']))} a token · "
        f"{figures['mean_depth']:.1f} of {num_layers} layers of the backbone a token"
    )
