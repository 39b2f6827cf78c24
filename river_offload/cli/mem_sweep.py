"""`river-mem sweep`: the memory of several methods against the length of the context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from policies.prefill import FULL_SPEED_TOKENS
from river_offload.cli.files import require_writable, write_whole
from river_offload.cli.options import ShowOptions, flag, with_options
from river_offload.cli.report import print_json
from river_offload.cli.runtime import hush_libraries
from river_offload.cli.streams import require_stdout
from river_offload.cli.sweep_text import print_table
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import QuantConfig, RiverConfig
from river_offload.errors import UsageError

if TYPE_CHECKING:
    from river_offload.planning.sweep import Sweep

Writer = Callable[["Sweep", Path], None]
DEFAULT_METHODS = "backbone,quantized,river,river@3,balcony,ee-llm"


def _option(name: str, metavar: str, panel: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, rich_help_panel=panel, help=help, show_default=False)


@dataclass(frozen=True)
class SweepOptions:
    """What is compared."""

    contexts: Annotated[
        str | None,
        _option("--contexts", "LIST", "Sweep", "Tokens, as 4k,16k,65536. [dim]Default: 4k to 64k, as far as the "
                "model attends.[/dim]"),
    ] = None  # fmt: skip
    methods: Annotated[
        str,
        _option("--methods", "LIST", "Sweep", "backbone, quantized, river, river@N (N layers resident), balcony, "
                f"ee-llm. [dim]Default: {DEFAULT_METHODS}.[/dim]"),
    ] = DEFAULT_METHODS  # fmt: skip
    budget: Annotated[
        str | None, _option("--budget", "SIZE", "Sweep", "Mark what fits this much device memory: 8GiB.")
    ] = None
    batch: Annotated[int, _option("--batch", "B", "Sweep", "Rows. [dim]Default: 1.[/dim]")] = 1
    bits: Annotated[
        int, _option("--bits", "N", "Sweep", "Bits of a river weight: 2, 3, 4 or 8. [dim]Default: 4.[/dim]")
    ] = QuantConfig.bits
    group_size: Annotated[
        int, _option("--group-size", "N", "Sweep", "Weights that share a scale. [dim]Default: 64.[/dim]")
    ] = QuantConfig.group_size
    head_bits: Annotated[
        int, _option("--head-bits", "N", "Sweep", "Bits of an untied LM head. [dim]Default: 16.[/dim]")
    ] = RiverConfig.head_bits
    kv_bits: Annotated[
        int, _option("--kv-bits", "N", "Sweep", "Bits of a cached key or value: 16, 8 or 4. [dim]Default: 16.[/dim]")
    ] = RiverConfig.kv_bits
    kv_tier: Annotated[
        str, _option("--kv-tier", "TIER", "Sweep", "Where the KV cache rests: device or host. [dim]Default: "
                     f"{RiverConfig.kv_tier}.[/dim]")
    ] = RiverConfig.kv_tier  # fmt: skip
    prefill_chunk: Annotated[
        int | None,
        _option("--prefill-chunk", "N", "Sweep", "Prompt tokens that a layer reads at once. [dim]Default: "
                f"{FULL_SPEED_TOKENS}.[/dim]"),
    ] = None  # fmt: skip
    device: Annotated[
        str, _option("--device", "D", "Sweep", "Plan for cuda or cpu, there or not. [dim]Default: cuda.[/dim]")
    ] = "cuda"
    trust_remote_code: Annotated[
        bool, flag("--trust-remote-code", panel="Sweep", help="Run code that the checkpoint brings along.")
    ] = False

    csv: Annotated[str | None, _option("--csv", "FILE", "Output", "Write the rows as CSV.")] = None
    plot: Annotated[
        str | None, _option("--plot", "FILE", "Output", "Draw peak against context: a .png, .svg or .pdf file.")
    ] = None
    html: Annotated[
        str | None, _option("--html", "FILE", "Output", "Write a report that a browser shows, offline.")
    ] = None

    def check(self) -> None:
        """Raises UsageError for a value that a plan could not be made with."""
        self.config("demo")
        if self.device not in ("cuda", "cpu"):
            raise UsageError(f"--device {self.device}: a sweep plans for cuda or cpu")
        self.parsed_contexts()

    def config(self, model: str) -> RiverConfig:
        """The options that all rows share. Raises UsageError."""
        return RiverConfig.from_options(
            model=model,
            budget=self.budget,
            batch=self.batch,
            context=1,  # each row has its own; this one suits every model
            kv_bits=self.kv_bits,
            kv_tier=self.kv_tier,
            prefill_chunk=self.prefill_chunk,
            head_bits=self.head_bits,
            quant=QuantConfig(bits=self.bits, group_size=self.group_size),
            trust_remote_code=self.trust_remote_code,
        )

    def parsed_contexts(self) -> tuple[int, ...] | None:
        """Tokens, None when none were given. Raises UsageError."""
        return None if self.contexts is None else tuple(parse_tokens(text) for text in self.contexts.split(","))

    def writers(self) -> list[tuple[Path, Writer]]:
        """Each file that is asked for, and what writes it. Raises UsageError for one that could not be written."""
        from river_offload.planning import sweep_html, sweep_plot

        found: list[tuple[Path, Writer]] = []
        if self.csv is not None:
            found.append((require_writable("--csv", self.csv), sweep_plot.write_csv))
        if self.plot is not None:
            path = require_writable("--plot", self.plot)
            found.append((path, functools.partial(sweep_plot.draw, kind=sweep_plot.plot_kind(path))))
        if self.html is not None:
            found.append((require_writable("--html", self.html), sweep_html.write_page))
        if len({path for path, _ in found}) < len(found):
            raise UsageError("--csv, --plot and --html name one file twice: give each a name of its own")
        return found


def parse_tokens(text: str) -> int:
    """`4k` is 4096. Raises UsageError for anything but a number of tokens that can be planned for."""
    number = text.strip().lower()
    factor = 1024 if number.endswith("k") else 1
    number = number.removesuffix("k")
    if not number.isdecimal() or not number.isascii():
        raise UsageError(f"--contexts: {text!r} is no number of tokens: write 4k (4096), 16k or 65536")
    return RiverConfig(model="demo", context=int(number) * factor).context


@with_options(SweepOptions, ShowOptions)
def sweep(model: str, options: SweepOptions, show: ShowOptions) -> None:
    """Plan several methods at several context lengths, beside what the River-LLM paper states."""
    terminal = Terminal(quiet=show.quiet)
    with boundary(terminal):
        options.check()
        require_stdout()
        writers = options.writers()
        swept = _run(model, options, terminal)
        for path, write in writers:
            write_whole(path, functools.partial(write, swept))
            terminal.note(f"written: {path}")
        if show.as_json:
            print_json(swept.as_json())
        else:
            print_table(swept)


def _run(model: str, options: SweepOptions, terminal: Terminal) -> Sweep:
    progress = terminal.progress()
    progress.start("starting", 0, "")
    hush_libraries()
    from river_offload.planning.methods import Method  # these bring torch, and --help must answer without
    from river_offload.planning.model_facts import find_model
    from river_offload.planning.sweep import sweep

    progress.finish()
    methods = tuple(dict.fromkeys(Method.parse(text) for text in options.methods.split(",")))
    facts = find_model(options.config(model), progress)
    for remark in facts.notes:
        terminal.note(f"note: {remark}")
    return sweep(facts, options.device, contexts=options.parsed_contexts(), methods=methods, progress=progress)
