"""Two more pictures of a sweep as SVG: what the memory is made of, and where the layers rest."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement

from policies.types import Placement
from river_offload.planning.sweep import Row, Sweep
from river_offload.planning.sweep_groups import GROUPS, grouped, number, ticks, tokens, unit_for
from river_offload.planning.sweep_svg import as_text, hint, line, picture, text

_BAR, _PITCH = 18, 27
_GAP = 1.0
_NAME_WIDTH = 82
_TOTAL_WIDTH = 52
_CELL_HEIGHT = 15


def stacked_bars(swept: Sweep, context: int, width: int) -> str:
    """One bar a method at one context, all contexts on one scale; `width` in pixels."""
    rows = [row for row in swept.rows if row.context == context]
    most_bytes = max(max(row.peak_device_bytes for row in swept.rows), swept.budget_bytes or 0)
    unit_bytes, unit = unit_for(most_bytes)
    scale = (width - _NAME_WIDTH - _TOTAL_WIDTH) / most_bytes
    height = _PITCH * len(rows) + 22
    svg = picture(width, height, f"What the memory is made of at a context of {tokens(context)}")
    bottom = _PITCH * len(rows) + 2
    for mark in ticks(most_bytes / unit_bytes, 6 if width > 600 else 4):
        x = _NAME_WIDTH + mark * unit_bytes * scale
        if mark * unit_bytes <= most_bytes:
            line(svg, x, 0, x, bottom, "axis" if mark == 0 else "grid")
            text(svg, x, bottom + 15, f"{mark:g}", "tick", "middle")
    text(svg, width, bottom + 15, unit, "tick", "end")
    ends = [_bar(svg, row, _PITCH * place + 4, scale, unit_bytes, unit) for place, row in enumerate(rows)]
    if swept.budget_bytes is not None:
        x = _NAME_WIDTH + swept.budget_bytes * scale
        line(svg, x, 0, x, bottom, "budget")
    for place, (end, row) in enumerate(zip(ends, rows, strict=True)):
        text(svg, end + 5, _PITCH * place + 17, number(row.peak_device_bytes, unit_bytes), "value halo")
    return as_text(svg)


def layer_map(placement: Placement, num_layers: int, width: int) -> str:
    """A column a layer: above where its full-precision copy rests, below whether it has an exit layer."""
    left = _NAME_WIDTH if width > 600 else 0
    pitch = (width - left) / num_layers
    gap = 2 if pitch >= 8 else 0.5
    svg = picture(width, 2 * _CELL_HEIGHT + 22, "Where each layer rests")
    if left:
        text(svg, 0, 12, "full precision", "tick")
        text(svg, 0, _CELL_HEIGHT + 15, "exit layer", "tick")
    resident, streamed = set(placement.resident_layers), set(placement.streamed_layers)
    river = set(placement.river_layers)
    for layer in range(num_layers):
        x = left + layer * pitch
        where = "resident" if layer in resident else "streamed" if layer in streamed else "absent"
        _cell(svg, x, 0.5, pitch - gap, where, f"layer {layer}, full precision: {where}")
        here = "exit" if layer in river else "absent"
        _cell(svg, x, _CELL_HEIGHT + 3.5, pitch - gap, here, f"layer {layer}, exit layer: {here != 'absent'}")
        if layer in _numbered(num_layers, pitch):
            middle = x + (pitch - gap) / 2
            text(svg, middle, 2 * _CELL_HEIGHT + 18, f"{layer}", "tick", "middle")
    return as_text(svg)


def _numbered(num_layers: int, pitch: float) -> set[int]:
    """Which layers carry their number: every so many, and the last."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, num_layers) if step * pitch >= 26)
    last = num_layers - 1
    return {layer for layer in range(0, num_layers, step) if (last - layer) * pitch >= 22} | {last}


def _cell(svg: Element, x: float, y: float, width: float, css: str, told: str) -> None:
    size = {"x": x, "y": y, "width": width, "height": _CELL_HEIGHT - 1}
    cell = SubElement(svg, "rect", {**{name: f"{value:.1f}" for name, value in size.items()}, "class": f"cell {css}"})
    hint(cell, told)


def _bar(svg: Element, row: Row, y: float, scale: float, unit_bytes: int, unit: str) -> float:
    """Draw the bar of one row; returns where it ends."""
    text(svg, 0, y + 13, row.method, "label")
    x = float(_NAME_WIDTH)
    sizes = grouped(row.categories)
    for key, name, _ in GROUPS:
        wide = sizes[key] * scale
        if wide > 0:
            drawn = max(wide - _GAP, 0.4)
            place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{drawn:.1f}", "height": f"{_BAR}"}
            part = SubElement(svg, "rect", {**place, "class": f"g-{key}"})
            hint(part, f"{row.method}, {tokens(row.context)}: {name} {number(sizes[key], unit_bytes)} {unit}")
        x += wide
    return x
