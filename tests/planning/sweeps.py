"""Sweeps made by hand, for what shows them: nothing is run dry."""

from __future__ import annotations

from policies.types import Mode, Placement
from river_offload.planning.sweep import Row, Sweep

MIB, GIB = 2**20, 2**30


def placement(layers: int, resident: int, river_from: int, chunk: int | None = 512) -> Placement:
    streamed = tuple(range(resident, layers))
    return Placement(
        mode=Mode("exit"), min_exit=1, resident_layers=tuple(range(resident)), streamed_layers=streamed,
        river_layers=tuple(range(river_from, layers)), slots=min(1, len(streamed)), slot_bytes=0,
        embed_tier="host" if streamed else "device", budget_bytes=0, prefill_chunk=chunk,
    )  # fmt: skip


def row(method: str, context: int, scale: float = 1.0, published: int | None = None, layers: int = 4) -> Row:
    categories = {"backbone": 3 * GIB, "river_packed": GIB, "kv": context * 65536, "mask": 5 * MIB, "logits": 7 * MIB}
    categories = {name: round(scale * size) for name, size in categories.items()}
    resident = {"backbone": layers, "balcony": layers, "river": 0}.get(method, 3)
    return Row(
        method=method, context=context, peak_device_bytes=sum(categories.values()),
        paper_accounting_bytes=round(5.5 * GIB), published_bytes=published, categories=categories,
        placement=placement(layers, resident, 1), note=f"what <{method}> & its kin hold",
    )  # fmt: skip


def a_sweep(budget_bytes: int | None = 6 * GIB, contexts: tuple[int, ...] = (1000, 16384)) -> Sweep:
    methods = {"backbone": 1.9, "river": 1.0, "river@3": 1.02, "balcony": 2.4}
    rows = [
        row(method, context, scale, published=round(scale * 5.25 * GIB) if context == 16384 else None)
        for method, scale in methods.items()
        for context in contexts
    ]
    return Sweep("a <model> & more", 4, 1, "cuda", budget_bytes, tuple(rows))
