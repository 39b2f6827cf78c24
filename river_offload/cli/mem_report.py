"""Plans and measurements as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from river_offload.config import format_size


def plan_report(plan: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the object of `MemoryPlan.as_json`."""
    console = console or Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, nbytes in plan["categories"].items():
        if nbytes:
            table.add_row(name, format_size(nbytes))
    table.add_row(Text("peak on the device", "bold"), Text(format_size(plan["peak_device_bytes"]), "bold"))
    fits = "fits" if plan["fits"] else "does not fit"
    console.print(
        Text.assemble(
            f"{plan['model']} · context {plan['context']} · batch {plan['batch']} · mode {plan['mode']}: ",
            (fits, "bold green" if plan["fits"] else "bold red"),
            f" {format_size(plan['budget_bytes'])} ({plan['budget_source']})",
        ),
        soft_wrap=True,
    )
    console.print(table)
    for line in (layers_line(plan["placement"]), *_rest(plan)):
        console.print(line, soft_wrap=True)
    if plan["kv_alternatives"] is not None:
        console.print(cache_table(plan))


def layers_line(placement: Mapping[str, Any]) -> Text:
    """One character a layer: where its full-precision weights rest. Underlined where the river has a copy."""
    marks = {"device": ("█", "green"), "host": ("▒", "yellow"), "disk": ("░", "red"), None: ("·", "dim")}
    river, line = set(placement["river_layers"]), Text("layers  ")
    for layer, tier in enumerate(placement["backbone"]):
        mark, style = marks[tier]
        line.append(mark, f"{style} underline" if layer in river else style)
    shown = {tier: placement["backbone"].count(tier) for tier in marks}
    words = {"device": "on the device", "host": "in host memory", "disk": "on disk", None: "not needed"}
    counts = ", ".join(f"{marks[tier][0]} {count} {words[tier]}" for tier, count in shown.items() if count)
    line.append(f"  {counts}; river of {len(river)}")
    return line


def _rest(plan: Mapping[str, Any]) -> list[str]:
    speed, host = plan["seconds_per_token"], plan["host"]
    away = {name.removesuffix("_bytes").replace("_", "-"): nbytes for name, nbytes in host.items() if nbytes}
    lines = [
        *_prompts(plan["placement"]),
        f"host    {', '.join(f'{format_size(nbytes)} {name}' for name, nbytes in away.items()) or 'nothing'} · disk "
        f"{format_size(plan['disk_bytes'])} · {format_size(plan['load_peak_bytes'])} while it loads",
        f"speed   {1 / speed['simulated']:.1f} tok/s simulated on {speed['profile']}"
        f"{' (assumed)' if speed['profile_assumed'] else ''}{_course(plan['mode'], speed)}",
    ]
    if plan["constants"]:
        shown = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in plan["constants"].items() if nbytes)
        lines.append(f"beside  {shown}: estimates, not part of the peak")
    if plan["refusal"] is not None:
        lines += refusal_lines(plan["refusal"], plan)
    return lines


def _course(mode: str, speed: Mapping[str, Any]) -> str:
    """What a speed is of, where the mode alone does not say it."""
    if mode == "exit":
        return f" at a mean depth of {speed['mean_depth']:.1f}"
    return f" at {speed['tokens_per_check']} tokens a check of {speed['draft']} drafted" if speed["draft"] else ""


def _prompts(placement: Mapping[str, Any]) -> list[str]:
    """How long ones are read, where that is not at once."""
    if placement["prefill_chunk"] is None:
        return []
    where = "" if placement["states_tier"] == "device" else ", their states on the host between the layers"
    return [f"prompts in chunks of {placement['prefill_chunk']} tokens{where}"]


def cache_table(plan: Mapping[str, Any]) -> Table:
    """Every kind of KV cache against resident layers, the fastest first."""
    table = Table(box=None, pad_edge=False, title="kinds of KV cache, full, and what each leaves room for")
    for heading in ("--kv-bits", "--kv-tier", "kv on the device", "elsewhere", "resident layers", "s a token"):
        table.add_column(heading, justify="right")
    for kind in plan["kv_alternatives"]:
        seconds = kind["seconds_per_token"]
        table.add_row(
            str(kind["kv_bits"]),
            kind["kv_tier"],
            format_size(kind["kv_bytes"]),
            format_size(kind["kv_host_bytes"]),
            str(kind["resident_layers"]) if kind["fits"] else "does not fit",
            "" if seconds is None else f"{seconds:.3f}",
        )
    return table


def refusal_lines(refusal: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """What would fit."""
    remedies = [f"a budget of {format_size(refusal['needed_bytes'])} ({refusal['needed_bytes']} bytes)"]
    if refusal["largest_context"]:
        remedies.append(f"--context {refusal['largest_context']}")
    for name in ("bits", "head_bits", "kv_bits", "kv_tier"):
        if refusal[name]:
            remedies.append(f"--{name.replace('_', '-')} {refusal[name]}")
    return [
        f"The largest part that an option moves is {refusal['largest_term']}, "
        f"{format_size(refusal['largest_term_bytes'])}. Any of these would fit: {'; '.join(remedies)}"
    ]


def run_report(run: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the object of `measure_memory`: plan and measurement side by side."""
    console = console or Console(highlight=False)
    planned, measured = run["planned"], run["measured"]
    table = Table(box=None, pad_edge=False)
    for heading in ("", "planned", "measured", "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in {**planned["categories"], **measured["categories"]}:
        pair = planned["categories"].get(name, 0), measured["categories"].get(name, 0)
        if any(pair):
            table.add_row(name, *_compared(*pair))
    table.add_row("peak on the device", *_compared(planned["peak_device_bytes"], measured["peak_device_bytes"]))
    if planned["kv_host_bytes"]:
        table.add_row("kv on the host", *_compared(planned["kv_host_bytes"], measured["kv_host_bytes"]))
    console.print(
        f"{run['model']} · context {run['context']} · batch {run['batch']} · mode {run['mode']}", soft_wrap=True
    )
    console.print(table)
    for name, reading in run["unattributed"].items():
        if isinstance(reading, Mapping) and reading["value"] is not None:
            words = name.removesuffix("_bytes").replace("_", " ")
            console.print(f"unattributed: {words} {_signed(reading['value'])}", soft_wrap=True)


def _signed(nbytes: int) -> str:
    return f"-{format_size(-nbytes)}" if nbytes < 0 else format_size(nbytes)


def _compared(planned_bytes: int, measured_bytes: int) -> tuple[str, str, str]:
    difference = measured_bytes - planned_bytes
    share = f" ({difference / planned_bytes:+.1%})" if planned_bytes else ""
    return format_size(planned_bytes), format_size(measured_bytes), f"{difference:+d} B{share}"
