"""The line chart of a sweep as a picture file, and its rows as CSV."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from river_offload.errors import UsageError
from river_offload.planning.sweep import Row, Sweep
from river_offload.planning.sweep_groups import METHOD_COLORS, kind_of, number, spread, tokens, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_KINDS = ("png", "svg", "pdf")
_SIZE_INCHES = (9.6, 5.4)
_DPI = 130
_INK, _SOFT, _GRID, _BUDGET = "#1b2026", "#59636e", "#e4e7eb", "#b3261e"
_LABEL_POINTS = 12.5
_FIXED_COLUMNS = (
    *("method", "context", "peak_device_bytes", "paper_accounting_bytes", "published_bytes"),
    *("resident_layers", "slot_count", "embed_tier"),
)


def plot_kind(path: Path) -> str:
    """What the name's ending asks for. Raises UsageError for a kind that is not drawn."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in PLOT_KINDS:
        raise UsageError(f"{path}: no picture is drawn as {kind or 'a file without ending'}: use .png, .svg or .pdf")
    return kind


def draw(swept: Sweep, path: Path, kind: str) -> None:
    """Draw peak against context, a line a method, with the budget and the published figures. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # seconds to import: only when something is drawn
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit_bytes, unit = unit_for(max(row.peak_device_bytes for row in swept.rows))
    contexts = sorted({row.context for row in swept.rows})
    for name in dict.fromkeys(row.method for row in swept.rows):
        _line(axes, [row for row in swept.rows if row.method == name], unit_bytes)
    _dress(axes, contexts, unit)
    if swept.budget_bytes is not None:
        axes.axhline(swept.budget_bytes / unit_bytes, color=_BUDGET, linewidth=1.2, linestyle=(0, (5, 3)))
    _labels(axes, swept, contexts[-1], unit_bytes)
    stated = " · open diamonds: published" if any(row.published_bytes for row in swept.rows) else ""
    axes.set_title(f"{swept.model}: peak device memory, {unit}{stated}", loc="left", fontsize=11, color=_INK, pad=10)
    figure.savefig(path, format=kind, dpi=_DPI)


def write_csv(swept: Sweep, path: Path) -> None:
    """A line a row, bytes as whole numbers, a column for each category. Raises OSError."""
    categories = list(dict.fromkeys(name for row in swept.rows for name in row.categories))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*_FIXED_COLUMNS, *(f"{name}_bytes" for name in categories), "note"])
        for row in swept.rows:
            placed = row.placement
            published = "" if row.published_bytes is None else row.published_bytes
            figures = [row.method, row.context, row.peak_device_bytes, row.paper_accounting_bytes, published]
            where = [len(placed.resident_layers), placed.slots, placed.embed_tier]
            writer.writerow([*figures, *where, *(row.categories.get(name, 0) for name in categories), row.note])


def _line(axes: Axes, rows: list[Row], unit_bytes: int) -> None:
    name = rows[0].method
    color, dashes = METHOD_COLORS[kind_of(name)], (0, (4, 2)) if "@" in name else "-"
    planned = [row.peak_device_bytes / unit_bytes for row in rows]
    axes.plot([row.context for row in rows], planned, color=color, linestyle=dashes, marker="o", markersize=4,
              linewidth=2.4 if name == "river" else 1.6, zorder=3)  # fmt: skip
    stated = [(row.context, row.published_bytes / unit_bytes) for row in rows if row.published_bytes is not None]
    axes.plot([context for context, _ in stated], [height for _, height in stated], color=color, linestyle="none",
              marker="D", markersize=6, markerfacecolor="white", zorder=4)  # fmt: skip


def _dress(axes: Axes, contexts: list[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(contexts[0] / 1.1, contexts[-1] * 1.1)
    axes.set_xticks(contexts, [tokens(context) for context in contexts], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9, length=0)
    axes.set_xlabel("context, tokens", fontsize=9, color=_SOFT)


def _labels(axes: Axes, swept: Sweep, longest: int, unit_bytes: int) -> None:
    """The name of each method and of the budget at the end of its line, pushed apart where lines meet."""
    named = [(row.method, METHOD_COLORS[kind_of(row.method)], row.peak_device_bytes) for row in swept.rows
             if row.context == longest]  # fmt: skip
    named += [] if swept.budget_bytes is None else [("budget", _BUDGET, swept.budget_bytes)]
    heights = [size_bytes / unit_bytes for _, _, size_bytes in named]
    low, high = axes.get_ylim()
    points_per_unit = 72 * _SIZE_INCHES[1] * 0.8 / (high - low)
    placed = spread(heights, _LABEL_POINTS / points_per_unit, low, high)
    for (name, color, size_bytes), height, place in zip(named, heights, placed, strict=True):
        axes.annotate(f"{name} {number(size_bytes, unit_bytes)}", (1, height), xytext=(4, (place - height) *
                      points_per_unit), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
                      fontsize=9, color=color, annotation_clip=False)  # fmt: skip
