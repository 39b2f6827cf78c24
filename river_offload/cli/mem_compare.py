"""`river-mem compare`: two plans, a plan and a run, or two runs, category by category."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from river_offload.cli.options import flag
from river_offload.cli.report import print_json
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import format_size
from river_offload.planning.compare import Comparison, Difference, MemoryAccount, read_account
from river_offload.planning.compare import compare as compare_accounts

_KINDS = {"plan": "planned", "run": "measured"}


def _file(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def compare(
    a: Annotated[str, _file("A", "What plan --json or measure --json wrote.")],
    b: Annotated[str, _file("B", "Another such file, or the same.")],
    as_json: Annotated[bool, flag("--json", panel="Output", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Set two accounts of memory side by side, the biggest difference first."""
    terminal = Terminal(quiet=False)
    with boundary(terminal):
        require_stdout()
        found = compare_accounts(read_account(a), read_account(b))
        for name, (left, right) in found.changed_facts().items():
            terminal.note(f"note: {name} is {left} in A and {right} in B")
        if as_json:
            print_json(found.as_json())
        else:
            _print_table(found)


def _print_table(found: Comparison) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("category", no_wrap=True)
    for heading in (_heading("A", found.a), _heading("B", found.b), "B - A", "of A"):
        table.add_column(heading, justify="right")
    shown = [item for item in found.differences if item.a_bytes or item.b_bytes]
    for item in shown:
        table.add_row(*_cells(item))
    table.add_section()
    table.add_row(*_cells(found.peak), style="bold")
    Console(highlight=False).print(table)


def _heading(letter: str, account: MemoryAccount) -> str:
    return f"{letter}: {Path(account.file).name}, {_KINDS[account.kind]}"


def _cells(item: Difference) -> list[str]:
    more = item.difference_bytes
    share = f"{more / item.a_bytes:+.1%}" if item.a_bytes and more else ""
    signed = "=" if not more else ("+" if more > 0 else "-") + format_size(abs(more))
    return [item.category, format_size(item.a_bytes), format_size(item.b_bytes), signed, share]
