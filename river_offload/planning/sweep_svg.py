"""The line chart of a sweep as SVG: peak memory against context, for a page that says what the colours are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from river_offload.planning.sweep import Row, Sweep
from river_offload.planning.sweep_groups import kind_of, number, spread, ticks, tokens, unit_for

_LABEL_GAP = 17.0
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


WIDE = Frame(width=1040, height=440, left=48, right=150)
NARROW = Frame(width=358, height=400, left=36, right=104)


def line_chart(swept: Sweep, frame: Frame) -> str:
    """One line a method, a diamond for each published figure, and the budget."""
    most_bytes = max(_heights(swept))
    unit_bytes, unit = unit_for(most_bytes)
    marks = ticks(most_bytes / unit_bytes, 6)
    y = _linear(0, marks[-1] * unit_bytes, *frame.y_range)
    contexts = sorted({row.context for row in swept.rows})
    x = _logarithmic(contexts, frame)
    svg = picture(frame.width, frame.height, f"Peak device memory of {swept.model} against context")
    _axes(svg, frame, marks, unit_bytes, unit, y, contexts, x)
    if swept.budget_bytes is not None:
        _budget(svg, frame, y(swept.budget_bytes), f"budget {number(swept.budget_bytes, unit_bytes)} {unit}")
    methods = list(dict.fromkeys(row.method for row in swept.rows))
    by_method = {name: [row for row in swept.rows if row.method == name] for name in methods}
    for name in reversed(methods):  # the first is drawn last, above the others
        _method(svg, name, by_method[name], x, y, unit_bytes, unit)
    last = {name: rows[-1] for name, rows in by_method.items()}
    places = spread([y(row.peak_device_bytes) for row in last.values()], _LABEL_GAP, frame.top, frame.y_range[0])
    for (name, row), place in zip(last.items(), places, strict=True):
        _label(svg, frame, name, y(row.peak_device_bytes), place, number(row.peak_device_bytes, unit_bytes))
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


def _budget(svg: Element, frame: Frame, height: float, label: str) -> None:
    start, end = frame.x_range
    line(svg, start, height, end, height, "budget")
    text(svg, start + 6, height - 6, label, "budget-label halo")


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


def _label(svg: Element, frame: Frame, name: str, wanted: float, place: float, value: str) -> None:
    """The method's name beside the end of its line, led there where others push it away."""
    group = SubElement(svg, "g", {"class": css_of(name)})
    end = frame.x_range[1]
    line(group, end - 9, wanted, end + 8, place, "leader")
    label = text(group, end + 12, place + 4, f"{name} ", "label")
    SubElement(label, "tspan", {"class": "value"}).text = value
