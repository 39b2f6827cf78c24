"""A sweep as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from river_offload.config import format_size

if TYPE_CHECKING:
    from river_offload.planning.sweep import Row, Sweep


def print_table(swept: Sweep) -> None:
    """Print the rows, then what has to be known of each method."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    for heading in ("context", "peak", "paper's way", "published"):
        table.add_column(heading, justify="right", no_wrap=True)
    if swept.budget_bytes is not None:
        table.add_column(f"in {format_size(swept.budget_bytes)}", no_wrap=True)
    previous = ""
    for row in swept.rows:
        if previous and row.method != previous:
            table.add_section()
        table.add_row(*_cells(row, swept.budget_bytes, named=row.method != previous))
        previous = row.method
    console = Console(highlight=False)
    console.print(table)
    console.print()
    for method, text in {row.method: row.note for row in swept.rows}.items():
        console.print(f"{method}: {text}", style="dim", soft_wrap=True)


def _cells(row: Row, budget_bytes: int | None, *, named: bool) -> list[str]:
    published = "" if row.published_bytes is None else format_size(row.published_bytes)
    fits = [] if budget_bytes is None else ["yes" if row.peak_device_bytes <= budget_bytes else "no"]
    return [
        row.method if named else "",
        f"{row.context}",
        format_size(row.peak_device_bytes),
        format_size(row.paper_accounting_bytes),
        published,
        *fits,
    ]
