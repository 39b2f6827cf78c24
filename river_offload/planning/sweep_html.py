"""The report of a sweep: one page that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from river_offload._version import __version__
from river_offload.planning.sweep import Row, Sweep
from river_offload.planning.sweep_bars import layer_map, stacked_bars
from river_offload.planning.sweep_groups import GROUPS, grouped, kind_of, number, tokens, unit_for
from river_offload.planning.sweep_svg import NARROW, WIDE, line_chart

_PAPER = "arXiv 2604.18396"


def page(swept: Sweep) -> str:
    """The whole HTML. Every picture is there twice, for wide and for narrow windows; the style shows one."""
    unit_bytes, unit = unit_for(max(row.peak_device_bytes for row in swept.rows))
    template = Template((resources.files(__package__) / "sweep_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"Memory of {swept.model}"),
        facts=escape(_facts(swept)),
        lead=escape(_lead(swept, unit_bytes, unit)),
        unit=unit,
        line_key=_line_key(swept),
        lines=_both(line_chart(swept, WIDE), line_chart(swept, NARROW)),
        bars_key=_key(f'<span class="swatch g-{key}"></span>{escape(name)}' for key, name in _shown_groups(swept)),
        bars="\n".join(_bars(swept)),
        maps_key=_key(
            f'<svg width="12" height="12" aria-hidden="true"><rect x="1" y="1" width="10" height="10" '
            f'class="cell {css}"/></svg>{name}'
            for css, name in (
                ("resident", "resident"),
                ("streamed", "streamed when needed"),
                ("exit", "exit layer, resident"),
                ("absent", "not there"),
            )
        ),
        maps="\n".join(_maps(swept)),
        table=_table(swept, unit_bytes),
        footer=escape(
            f"Planned by river-mem {__version__}: the model was run on tensors without data and its storages counted. "
            f"Published figures: {_PAPER}."
        ),
    )


def write_page(swept: Sweep, path: Path) -> None:
    """Write the page. Raises OSError."""
    path.write_text(page(swept), encoding="utf-8")


def _facts(swept: Sweep) -> str:
    parts = [f"{swept.num_layers} layers", f"batch {swept.batch}", f"planned for {swept.device_type}"]
    chunks = {row.placement.prefill_chunk for row in swept.rows} - {None}
    parts += [f"prompts in chunks of {', '.join(f'{chunk}' for chunk in chunks)}"] if chunks else []
    if swept.budget_bytes is not None:
        unit_bytes, unit = unit_for(swept.budget_bytes)
        parts.append(f"budget {number(swept.budget_bytes, unit_bytes)} {unit}")
    return " · ".join(parts)


def _lead(swept: Sweep, unit_bytes: int, unit: str) -> str:
    """The one thing to take away: which method needs least at the longest context, and what that is."""
    longest = max(row.context for row in swept.rows)
    rows = sorted((row for row in swept.rows if row.context == longest), key=lambda row: row.peak_device_bytes)
    least, most = rows[0], rows[-1]
    said = f"At {tokens(longest)}, {least.method} needs {number(least.peak_device_bytes, unit_bytes)} {unit}"
    if most is not least:
        said += f" and {most.method} {number(most.peak_device_bytes, unit_bytes)} {unit}"
    return said + "."


def _both(wide: str, narrow: str) -> str:
    return f'<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>'


def _key(entries: Iterator[str]) -> str:
    return '<ul class="key">' + "".join(f"<li>{entry}</li>" for entry in entries) + "</ul>"


def _line_key(swept: Sweep) -> str:
    entries = [
        '<svg width="26" height="10" class="m-backbone" aria-hidden="true"><path d="M0 5h26" class="line"/>'
        '<circle cx="13" cy="5" r="3.5" class="dot"/></svg>planned here'
    ]
    if any(row.published_bytes is not None for row in swept.rows):
        entries.append(
            '<svg width="12" height="12" class="m-backbone" aria-hidden="true">'
            '<path d="M6 1.5l4.5 4.5l-4.5 4.5l-4.5 -4.5z" class="stated"/></svg>published by the paper'
        )
    return _key(iter(entries))


def _shown_groups(swept: Sweep) -> Iterator[tuple[str, str]]:
    totals = [grouped(row.categories) for row in swept.rows]
    return ((key, name) for key, name, _ in GROUPS if any(sizes[key] for sizes in totals))


def _bars(swept: Sweep) -> Iterator[str]:
    for context in sorted({row.context for row in swept.rows}):
        pictures = _both(stacked_bars(swept, context, WIDE.width), stacked_bars(swept, context, NARROW.width))
        yield f"<h3>{tokens(context)} tokens</h3>\n{pictures}"


def _maps(swept: Sweep) -> Iterator[str]:
    """One picture for each placement; the contexts that share it in its heading."""
    found: dict[tuple[str, tuple[object, ...]], list[Row]] = {}
    for row in swept.rows:
        placed = row.placement
        key = (placed.resident_layers, placed.streamed_layers, placed.river_layers, placed.slots, placed.embed_tier)
        found.setdefault((row.method, key), []).append(row)
    shared = {method: sum(method == other for other, _ in found) == 1 for method, _ in found}
    for (method, _), rows in found.items():
        placed, layers = rows[0].placement, swept.num_layers
        layers = max((layers, *(i + 1 for i in (*placed.resident_layers, *placed.streamed_layers))))
        heading = method if shared[method] else f"{method} at {', '.join(tokens(row.context) for row in rows)}"
        extras = [f"{placed.slots} streaming buffer{'' if placed.slots == 1 else 's'}"] if placed.slots else []
        extras += [] if placed.embed_tier == "device" else [f"embedding on the {placed.embed_tier}"]
        extras += [] if placed.states_tier == "device" else ["states of the prompt on the host"]
        told = f" <span>· {escape(' · '.join(extras))}</span>" if extras else ""
        pictures = _both(layer_map(placed, layers, WIDE.width), layer_map(placed, layers, NARROW.width))
        yield f"<h3>{escape(heading)}{told}</h3>\n{pictures}"


def _table(swept: Sweep, unit_bytes: int) -> str:
    headings = ("context", "peak", "paper’s way", "published", "paper’s way off by")
    lines = ["<table>", "<thead><tr>", *(f'<th scope="col">{name}</th>' for name in headings), "</tr></thead>"]
    previous = ""
    for row in swept.rows:
        if row.method != previous:
            lines += ["</tbody>"] if previous else []
            lines.append(
                f'<tbody><tr><th scope="rowgroup" colspan="5" class="method m-{kind_of(row.method)}">'
                f"<b>{escape(row.method)}</b><span>{escape(row.note)}</span></th></tr>"
            )
        previous = row.method
        lines.append(_table_row(row, swept.budget_bytes, unit_bytes))
    return "\n".join([*lines, "</tbody>", "</table>"])


def _table_row(row: Row, budget_bytes: int | None, unit_bytes: int) -> str:
    over = budget_bytes is not None and row.peak_device_bytes > budget_bytes
    published, ratio = "–", "–"
    if row.published_bytes is not None:
        published = number(row.published_bytes, unit_bytes)
        ratio = f"{row.paper_accounting_bytes / row.published_bytes - 1:+.2%}".replace("-", "−")
    peak = number(row.peak_device_bytes, unit_bytes)
    return (
        f'<tr><th scope="row">{tokens(row.context)}</th><td{" class=over" if over else ""}>{peak}</td>'
        f"<td>{number(row.paper_accounting_bytes, unit_bytes)}</td><td>{published}</td><td>{ratio}</td></tr>"
    )
