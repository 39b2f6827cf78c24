"""A trace as figures and as a picture: depth, signals, stalls and bytes over the tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.depths import summary
from river_offload.errors import UsageError
from river_offload.trace import PassageRecord, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_WIDTH_INCHES = 11.0
_HEIGHT_INCHES = 8.2
_DPI = 120
_FEW = 60
"""Up to so many passages get a mark each."""
_INK, _GRID, _PREFILL = "#222222", "#dddddd", "#9aa0a6"
_BACKBONE, _STALL, _BYTES, _WASTED = "#1f6fb2", "#c0392b", "#2a9d6f", "#e0a030"


def trace_summary(trace: Trace) -> dict[str, Any]:
    """The trace in figures: bytes, seconds, counts. Passages after a prompt and prompts are counted apart."""
    decode = [record for record in trace.records if record.path != "prefill"]
    prefill = [record for record in trace.records if record.path == "prefill"]
    seconds = sum(record.seconds for record in decode)
    return {
        "num_layers": trace.num_layers,
        "about": trace.about,
        "passages": len(trace.records),
        "decode": {
            "tokens": sum(record.batch * record.text_tokens for record in decode),
            "seconds": seconds,
            "stall_s": sum(record.wait_s for record in decode),
            "bytes_streamed": sum(record.bytes_streamed for record in decode),
            "wasted_bytes": sum(record.wasted_bytes for record in decode),
            "misses": sum(record.misses for record in decode),
            "depths": summary([record.depth for record in decode], trace.num_layers),
        },
        "drafting": _drafting(trace),
        "prefill": {
            "passages": len(prefill),
            "tokens": sum(record.new_tokens * record.batch for record in prefill),
            "seconds": sum(record.seconds for record in prefill),
            "stall_s": sum(record.wait_s for record in prefill),
            "bytes_streamed": sum(record.bytes_streamed for record in prefill),
        },
    }


def _drafting(trace: Trace) -> dict[str, Any] | None:
    """What became of the drafts, tokens being those of a row; None where there are none, and for means of nothing."""
    drafts = [record for record in trace.records if record.path == "draft"]
    checks = [record for record in trace.records if record.path == "check"]
    if not drafts:
        return None
    both = (*drafts, *checks)
    accepted, tokens = sum(record.accepted for record in both), sum(record.text_tokens for record in both)
    nbytes = sum(record.bytes_streamed for record in both)
    return {
        "drafted": len(drafts),
        "accepted": accepted,
        "checks": len(checks),
        "tokens_per_check": tokens / len(checks) if checks else None,
        "drafts_per_token": len(drafts) / tokens if tokens else None,
        "accepted_share": accepted / len(drafts) if checks else None,
        "bytes_per_token": nbytes / tokens if tokens else None,
        "mean_depth": trace.mean_depth,
    }


def plot_trace(trace: Trace, path: Path, *, title: str = "") -> None:
    """Draw the trace into a picture file, its kind by the name's ending (png, svg, pdf); whole or not at all.

    Raises UsageError for a trace without passages, and for a file that cannot be written or of no known kind.
    """
    if not trace.records:
        raise UsageError("the trace has no passages: there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # seconds to import: only when something is drawn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in kinds:
        raise UsageError(f"{path}: no picture is drawn as {kind or 'a file without ending'}: use .png, .svg or .pdf")
    _draw(figure, trace, title)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=kind, dpi=_DPI)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def signal_map(records: Sequence[PassageRecord], num_layers: int) -> list[list[float]]:
    """[num_layers + 1][passages]: the signal after so many layers, NaN where none was measured or believed.

    A record does not say after which layer its first signal was measured; the last one is that of the exit, or, when it
    never left, that of the last layer but one.
    """
    table = [[math.nan] * len(records) for _ in range(num_layers + 1)]
    for column, record in enumerate(records):
        last = min(record.depth, num_layers - 1)
        first = last - len(record.signals) + 1
        for offset, signal in enumerate(record.signals):
            if 0 <= first + offset <= num_layers:
                table[first + offset][column] = signal
    return table


def _draw(figure: Figure, trace: Trace, title: str) -> None:
    records = trace.records
    positions = list(range(len(records)))
    table = signal_map(records, trace.num_layers)
    known = [value for row in table for value in row if math.isfinite(value)]
    # Forced depths and fixed modes have no signals: the other panels get their room.
    heights = (1.15, 1.25, 0.8, 0.8) if known else (1.15, 0.8, 0.8)
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    depth, stall, moved = panels[0], panels[-2], panels[-1]
    _depths(depth, positions, records, trace.num_layers)
    if known:
        _signals(figure, panels[1], table, known, trace)
    _stalls(stall, positions, records)
    _bytes(moved, positions, records)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.margins(x=0.01)
    moved.set_xlabel("passage (the prompt's is marked grey)", fontsize=10, color=_INK)
    moved.xaxis.set_major_locator(_whole_numbers())
    figure.suptitle(_headline(trace, title), fontsize=11, color=_INK)


def _depths(axes: Axes, positions: list[int], records: Sequence[PassageRecord], num_layers: int) -> None:
    _heading(axes, f"backbone layers run, of {num_layers}")
    depths = [record.depth for record in records]
    colors = [_PREFILL if record.path == "prefill" else _BACKBONE for record in records]
    axes.bar(positions, depths, width=1.0 if len(records) > _FEW else 0.8, color=colors)
    axes.axhline(num_layers, color=_INK, linewidth=0.8, linestyle=":")
    decode = [record.depth for record in records if record.path != "prefill"]
    if decode:
        mean = sum(decode) / len(decode)
        axes.axhline(mean, color=_INK, linewidth=0.9)
        axes.annotate(f"mean {mean:.1f}", (1.0, mean), xycoords=("axes fraction", "data"), fontsize=8, color=_INK,
                      xytext=(4, 0), textcoords="offset points", va="center", annotation_clip=False)  # fmt: skip
    axes.set_ylim(0, num_layers * 1.06)
    axes.yaxis.set_major_locator(_whole_numbers())


def _signals(figure: Figure, axes: Axes, table: list[list[float]], known: Sequence[float], trace: Trace) -> None:
    _heading(axes, "exit signal after each layer that was run, brighter is more settled")
    low, high = _quantile(known, 0.02), max(known)
    extent = (-0.5, len(table[0]) - 0.5, -0.5, trace.num_layers + 0.5)
    image = axes.imshow(table, origin="lower", aspect="auto", interpolation="nearest", cmap="viridis",
                        vmin=low, vmax=high, extent=extent)  # fmt: skip
    axes.set_ylim(0.5, trace.num_layers + 0.5)
    axes.yaxis.set_major_locator(_whole_numbers())
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.02, aspect=14)
    bar.ax.tick_params(labelsize=8)
    tau = trace.about.get("tau")
    if isinstance(tau, (int, float)) and low < tau < high:
        bar.ax.axhline(tau, color=_STALL, linewidth=1.5)
        bar.ax.set_title(f"τ {tau:g}", fontsize=8, color=_STALL)


def _stalls(axes: Axes, positions: list[int], records: Sequence[PassageRecord]) -> None:
    width = 1.0 if len(records) > _FEW else 0.8
    scale, unit = (1e3, "ms") if max(record.seconds for record in records) < 1 else (1.0, "s")
    waits = [scale * record.wait_s for record in records]
    rest = [scale * max(record.seconds - record.wait_s, 0.0) for record in records]
    axes.bar(positions, rest, width=width, color=_GRID, label="computing")
    axes.bar(positions, waits, width=width, bottom=rest, color=_STALL, label="stalled")
    # A prompt takes as long as many tokens: the scale is that of the tokens.
    limit = max((scale * record.seconds for record in records if record.path != "prefill"), default=0.0)
    if limit:
        axes.set_ylim(0, limit * 1.08)
    _heading(axes, f"time of each passage, {unit}")
    _legend(axes)


def _bytes(axes: Axes, positions: list[int], records: Sequence[PassageRecord]) -> None:
    width = 1.0 if len(records) > _FEW else 0.8
    largest = max(record.bytes_streamed for record in records)
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    wasted = [record.wasted_bytes / scale for record in records]
    used = [max(record.bytes_streamed / scale - lost, 0.0) for record, lost in zip(records, wasted, strict=True)]
    axes.bar(positions, used, width=width, color=_BYTES, label="streamed")
    if any(wasted):
        axes.bar(positions, wasted, width=width, bottom=used, color=_WASTED, label="in vain")
        _legend(axes)
    if not largest:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing was streamed", transform=axes.transAxes, ha="center", va="center", fontsize=9,
                  color=_PREFILL)  # fmt: skip
    _heading(axes, f"bytes streamed, {unit}")


def _whole_numbers() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins="auto", integer=True)


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9, color=_INK, pad=4)


def _legend(axes: Axes) -> None:
    """Above the panel, where no bar is."""
    axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1)


def _headline(trace: Trace, title: str) -> str:
    about = trace.about
    named = [title or str(about.get("model", ""))]
    named += [f"{name} {about[name]}" for name in ("mode", "depths") if about.get(name)]
    decode = trace_summary(trace)["decode"]
    figures = [f"{decode['tokens']} tokens", f"{decode['stall_s']:.2f} s stalled of {decode['seconds']:.2f} s",
               f"{decode['bytes_streamed'] / 2**30:.2f} GiB streamed"]  # fmt: skip
    return " · ".join(filter(None, named)) + "\n" + " · ".join(figures)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
