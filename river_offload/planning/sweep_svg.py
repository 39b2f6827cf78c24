"""The line chart of a sweep as SVG: peak memory against context, for a page that says what the colours are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from river_offload.planning.sweep import Row, Sweep
from river_offload.planning.sweep_groups import kind_of, number, spread, ticks, tokens, unit_for

_LABEL_GAP = 17.0
_LABEL_START = 12
_CHARACTER = 7.4
"""Pixels that a character of a label takes at most, on average."""
_MARK = 4.5


@dataclass(frozen=True)
class Frame:
    """Size of a picture and the room around what is drawn, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int = 26
    bottom: int = 40

    @property
    def x_range(self) -> tuple[float, float]:
        return self.left, self.width - self.right

    @property
    def y_range(self) -> tuple[float, float]:
        return self.height - self.bottom, self.top


WIDE = Frame(width=1040, height=440, left=48, right=0)
NARROW = Frame(width=358, height=400, left=36, right=0)
"""The room on the right is what the labels take."""


@dataclass(frozen=True)
class _Label:
    css: str
    name: str
    value: str
    size_bytes: int


def line_chart(swept: Sweep, frame: Frame) -> str:
    """One line a method, a diamond for each published figure, and the budget."""
    most_bytes = max(_heights(swept))
    unit_bytes, unit = unit_for(most_bytes)
    marks = ticks(most_bytes / unit_bytes, 6)
    labels = _labels(swept, unit_bytes)
    longest = max(len(f"{label.name} {label.value}") for label in labels)
    frame = replace(frame, right=round(_LABEL_START + _CHARACTER * longest))
    y = _linear(0, marks[-1] * unit_bytes, *frame.y_range)
    contexts = sorted({row.context for row in swept.rows})
    x = _logarithmic(contexts, frame)
    svg = picture(frame.width, frame.height, f"Peak device memory of {swept.model} against context")
    _axes(svg, frame, marks, unit_bytes, unit, y, contexts, x)
    if swept.budget_bytes is not None:
        line(svg, frame.x_range[0], y(swept.budget_bytes), frame.x_range[1], y(swept.budget_bytes), "budget")
    methods = list(dict.fromkeys(row.method for row in swept.rows))
    by_method = {name: [row for row in swept.rows if row.method == name] for name in methods}
    for name in reversed(methods):  # the first is drawn last, above the others
        _method(svg, name, by_method[name], x, y, unit_bytes, unit)
    places = spread([y(label.size_bytes) for label in labels], _LABEL_GAP, frame.top, frame.y_range[0])
    for label, place in zip(labels, places, strict=True):
        _write(svg, frame, label, y(label.size_bytes), place)
    return as_text(svg)


def picture(width: int, height: float, title: str) -> Element:
    """An empty SVG that says what it shows."""
    size = {"viewBox": f"0 0 {width} {height:g}", "width": f"{width}", "height": f"{height:g}"}
    svg = Element("svg", {"role": "img", "aria-label": title, **size})
    return svg


def text(parent: Element, x: float, y: float, content: str, css: str, anchor: str = "start") -> Element:
    """Text whose baseline is at (x, y)."""
    made = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": css, "text-anchor": anchor})
    made.text = content
    return made


def line(parent: Element, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
    """A straight line."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(parent, "line", {**{name: f"{value:.1f}" for name, value in ends.items()}, "class": css})


def hint(parent: Element, content: str) -> None:
    """What a pointer that rests on `parent` is told."""
    SubElement(parent, "title").text = content


def as_text(svg: Element) -> str:
    """The element as it stands in a page."""
    return ElementTree.tostring(svg, encoding="unicode")


def css_of(method: str) -> str:
    """The classes that give a method its colour, and river@N a dash of its own."""
    return f"m-{kind_of(method)}" + (" variant" if "@" in method else "")


def _heights(swept: Sweep) -> list[int]:
    found = [row.peak_device_bytes for row in swept.rows]
    found += [row.published_bytes for row in swept.rows if row.published_bytes is not None]
    return found + ([] if swept.budget_bytes is None else [swept.budget_bytes])


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _logarithmic(contexts: list[int], frame: Frame) -> Callable[[int], float]:
    start, end = frame.x_range
    inset = 14
    if len(contexts) == 1:
        return lambda context: (start + end) / 2
    scale = _linear(math.log2(contexts[0]), math.log2(contexts[-1]), start + inset, end - inset)
    return lambda context: scale(math.log2(context))


def _axes(
    svg: Element,
    frame: Frame,
    marks: list[float],
    unit_bytes: int,
    unit: str,
    y: Callable[[float], float],
    contexts: list[int],
    x: Callable[[int], float],
) -> None:
    start, end = frame.x_range
    for mark in marks:
        height = y(mark * unit_bytes)
        line(svg, start, height, end, height, "axis" if mark == 0 else "grid")
        text(svg, start - 8, height + 4, f"{mark:g}", "tick", "end")
    text(svg, 0, 12, unit, "tick")
    written = -math.inf
    for context in contexts:
        if x(context) - written >= 34:
            text(svg, x(context), frame.y_range[0] + 18, tokens(context), "tick", "middle")
            written = x(context)
    text(svg, (start + end) / 2, frame.height - 4, "context, tokens", "tick", "middle")


def _method(
    svg: Element,
    name: str,
    rows: list[Row],
    x: Callable[[int], float],
    y: Callable[[float], float],
    unit_bytes: int,
    unit: str,
) -> None:
    group = SubElement(svg, "g", {"class": css_of(name)})
    points = " ".join(f"{x(row.context):.1f},{y(row.peak_device_bytes):.1f}" for row in rows)
    SubElement(group, "polyline", {"points": points, "class": "line"})
    for row in rows:
        centre = {"cx": f"{x(row.context):.1f}", "cy": f"{y(row.peak_device_bytes):.1f}"}
        dot = SubElement(group, "circle", {**centre, "r": "3.5", "class": "dot"})
        hint(dot, f"{name}, {tokens(row.context)}: {number(row.peak_device_bytes, unit_bytes)} {unit}")
        if row.published_bytes is not None:
            mark = SubElement(group, "path", {"d": _diamond(x(row.context), y(row.published_bytes)), "class": "stated"})
            hint(mark, f"{name}, {tokens(row.context)}, published: {number(row.published_bytes, unit_bytes)} {unit}")


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - _MARK:.1f}l{_MARK} {_MARK}l-{_MARK} {_MARK}l-{_MARK} -{_MARK}z"


def _labels(swept: Sweep, unit_bytes: int) -> list[_Label]:
    """What is written beside the ends of the lines."""
    last = {row.method: row for row in sorted(swept.rows, key=lambda row: row.context)}
    sizes = [(css_of(name), name, row.peak_device_bytes) for name, row in last.items()]
    sizes += [] if swept.budget_bytes is None else [("limit", "budget", swept.budget_bytes)]
    return [_Label(css, name, number(size_bytes, unit_bytes), size_bytes) for css, name, size_bytes in sizes]


def _write(svg: Element, frame: Frame, label: _Label, wanted: float, place: float) -> None:
    """A label beside the end of its line, led there where others push it away."""
    group = SubElement(svg, "g", {"class": label.css})
    end = frame.x_range[1]
    line(group, end - (0 if label.css == "limit" else 9), wanted, end + _LABEL_START - 4, place, "leader")
    written = text(group, end + _LABEL_START, place + 4, f"{label.name} ", "label")
    SubElement(written, "tspan", {"class": "value"}).text = label.value
