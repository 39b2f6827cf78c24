"""`river-mem doctor`: what this machine offers, and what to do about what could be better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from river_offload.cli.options import flag
from river_offload.cli.report import print_json
from river_offload.cli.runtime import hush_libraries
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.config import default_cache_dir, format_size
from river_offload.errors import UsageError

DEFAULT_SECONDS = 4.0
Line = tuple[str, str, str]
"""What it is about, what was found, what to do."""


def doctor(
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", show_default=False,
            help=f"Measure the rates for about so long; 0 measures none. [dim]Default: {DEFAULT_SECONDS:.0f}.[/dim]",
        ),
    ] = DEFAULT_SECONDS,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir", metavar="DIR", show_default=False,
            help="Measure the disk that this folder is on. [dim]Default: $RIVER_OFFLOAD_CACHE, else "
            "~/.cache/river-offload.[/dim]",
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", help="Print one JSON object instead of a table.")] = False,
    quiet: Annotated[bool, flag("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:  # fmt: skip
    """Tell what this machine offers: devices, limits, pinning, rates, kernels, and what could be better."""
    terminal = Terminal(quiet=quiet)
    with boundary(terminal):
        if not 0 <= seconds < math.inf:
            raise UsageError(f"--seconds is {seconds}: expected 0 or more")
        require_stdout()
        progress = terminal.progress()
        progress.start("starting", 0, "")
        hush_libraries()
        from river_offload.eval.machine import examine  # brings torch

        progress.finish()
        directory = default_cache_dir() if cache_dir is None else Path(cache_dir)
        facts = examine(directory, seconds=seconds, progress=progress)
        if as_json:
            print_json(facts)
        else:
            _print_table(list(lines(facts)))


def lines(facts: Mapping[str, Any]) -> Iterator[Line]:
    """The facts for people, each with the advice that concerns it."""
    advice = facts["advice"]
    yield from _gpu_lines(facts["gpus"], advice.get("gpus", ""))
    machine, host, limits = facts["machine"], facts["host"], facts["limits"]
    cores = f"{machine['processor']} · {machine['cores']} cores · {machine['threads']} threads"
    yield "processor", cores, advice.get("threads", "")
    yield (
        "memory",
        f"{format_size(host['total_bytes'])} · {format_size(host['usable_bytes'])} usable ({host['usable_source']})",
        "",
    )
    yield "container", _amount(limits["container"]["limit"]), advice.get("container", "")
    yield "locked memory", _amount(limits["memlock"]["soft"]), ""
    if limits["wsl_version"] is not None:
        yield "WSL", f"version {limits['wsl_version']}", advice.get("wsl", "")
    yield "pinning", _pinning(facts["pinning"]), advice.get("pinning", "")
    yield from _rate_lines(facts["rates"], advice)
    yield from _kernel_lines(facts["kernels"], advice.get("kernels", ""))
    yield "compiler", facts["compiler"] or "none", ""
    yield "software", f"river-offload {facts['version']} · torch {machine['torch']} · Python {machine['python']}", ""


def _gpu_lines(gpus: Mapping[str, Any], advice: str) -> Iterator[Line]:
    if not gpus["found"]:
        yield (
            "GPU",
            f"none · {gpus['torch_reason']} · {gpus['nvml_reason'] or 'NVML lists none for this process'}",
            advice,
        )
    for gpu in gpus["found"]:
        yield f"GPU {gpu['number']}", f"{gpu['name']} · {gpu['uuid'] or gpu['pci_bus_id']}", advice
        free, total = gpu["torch_free"], gpu["torch_total"]
        both = f"{_amount(free)} of {_amount(total)} free" if free["value"] is not None else free["reason"]
        yield "  torch", both, ""
        yield "  NVML", _nvml(gpu["card"]), ""
        advice = ""


def _nvml(card: Mapping[str, Any]) -> str:
    if card["total"]["value"] is None:
        return str(card["total"]["reason"])
    parts = [f"{_amount(card['free'])} of {_amount(card['total'])} free", f"{_amount(card['used'])} used"]
    if card["reserved"]["value"] is not None:
        parts.append(f"{_amount(card['reserved'])} reserved")
    return " · ".join(parts)


def _pinning(found: Mapping[str, Any]) -> str:
    if not found["needed"]:
        return f"not needed · {found['reason']}"
    return f"{format_size(found['tried_bytes'])} tried, works" if found["works"] else f"refused · {found['reason']}"


def _rate_lines(rates: Mapping[str, Any], advice: Mapping[str, str]) -> Iterator[Line]:
    disk = f"{_rate(rates['disk_read_bytes_per_s'])} · {rates['file_system'] or 'unknown'} · {rates['directory']}"
    yield "memory reads", _rate(rates["memory_read_bytes_per_s"]), ""
    yield "disk reads", disk, advice.get("disk", "")
    pinned, pageable = rates["pinned_copy_bytes_per_s"], rates["pageable_copy_bytes_per_s"]
    if pinned["value"] is None and pageable["value"] is None:
        yield "host to GPU", pinned["reason"], ""
    else:
        yield "host to GPU", f"{_rate(pinned)} pinned · {_rate(pageable)} pageable", advice.get("link", "")


def _kernel_lines(kernels: Sequence[Mapping[str, Any]], advice: str) -> Iterator[Line]:
    """One line for each device and kernel, with the widths that it serves."""
    for (device, kernel), served in groupby(kernels, key=lambda entry: (entry["device"], entry["kernel"])):
        entries = list(served)
        widths = ", ".join(str(entry["bits"]) for entry in entries)
        # That a kernel is made for another device is no news.
        declined = [
            f"{one['kernel']}: {one['reason']}" for one in entries[0]["declined"] if "runs on" not in one["reason"]
        ]
        yield f"kernel, {device}", " · ".join([f"{kernel} for {widths} bits", *declined]), advice
        advice = ""


def _amount(reading: Mapping[str, Any]) -> str:
    return str(reading["reason"]) if reading["value"] is None else format_size(reading["value"])


def _rate(reading: Mapping[str, Any]) -> str:
    return str(reading["reason"]) if reading["value"] is None else f"{reading['value'] / 1e9:.2f} GB/s"


def _print_table(found: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text, to_do in found:
        what = Text(text)
        if to_do:
            what.append(f"\n→ {to_do}", style="yellow")
        table.add_row(name, what)
    Console(highlight=False).print(table)
