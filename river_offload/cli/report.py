"""The account of a generation: one line for people, one object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from river_offload.config import format_size

CHECKING = (
    "backbone_passes",
    "drafted",
    "accepted",
    "tokens_per_backbone_pass",
    "bytes_per_token",
    "checked_share",
)
"""Figures of the report that tell how the backbone was asked."""


def closing_line(report: Mapping[str, Any], num_layers: int) -> str:
    """`64 tokens · 23.1 tok/s · mean depth 4.2 of 30 · 1.20 GiB streamed · peak 198.3 MiB of 200.0 MiB`."""
    parts = [f"{report['new_tokens']} token{'' if report['new_tokens'] == 1 else 's'}"]
    if _known(report["tokens_per_s"]):
        parts.append(f"{report['tokens_per_s']:.1f} tok/s")
    if _known(report["mean_depth"]):
        parts.append(f"mean depth {report['mean_depth']:.1f} of {num_layers}")
    if report.get("drafted") and _known(report["tokens_per_backbone_pass"]):
        parts.append(f"{report['tokens_per_backbone_pass']:.1f} tokens a backbone pass")
    parts.append(f"{format_size(report['bytes_streamed'])} streamed")
    parts.append(f"peak {format_size(report['peak_device_bytes'])} of {format_size(report['budget_bytes'])}")
    return " · ".join(parts)


def json_object(text: str, report: Mapping[str, Any], *, mode: str, tau: float, num_layers: int) -> dict[str, Any]:
    """The object of `--json`. `tau` is null in the modes that do not look at it, a figure nobody measured is null."""
    placement, seconds = report["placement"], report["seconds"]
    return {
        "text": text,
        "prompt_tokens": report["prompt_tokens"],
        "new_tokens": report["new_tokens"],
        "mode": mode,
        "tau": tau if mode == "exit" else None,
        "num_layers": num_layers,
        "mean_depth": _number(report["mean_depth"]),
        "depths": list(report["depths"]),
        "prefill_depth": report["prefill_depth"],
        "prefill": report["prefill"],
        "seconds": {name: _number(seconds[name]) for name in ("load", "prefill", "decode")},
        "tokens_per_s": _number(report["tokens_per_s"]),
        "bytes_streamed": report["bytes_streamed"],
        **{name: report.get(name) for name in CHECKING},
        "peak_device_bytes": report["peak_device_bytes"],
        "budget_bytes": report["budget_bytes"],
        "placement": {
            name: list(placement[name]) if isinstance(placement[name], tuple) else placement[name]
            for name in ("resident_layers", "streamed_layers", "slots", "embed_tier", "prefill_chunk", "states_tier")
        },
        "kernel": report["kernel"],
    }


def print_json(value: Mapping[str, Any]) -> None:
    """One line on standard output."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None) -> float | None:
    return value if _known(value) else None
