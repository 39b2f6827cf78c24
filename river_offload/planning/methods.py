"""The methods that a sweep compares: how each one places a model, and what the paper's accounting says of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from policies.placement import smallest
from policies.types import Mode, ModelSizes, Placement
from river_offload.errors import UsageError
from river_offload.planning import paper

METHODS = ("backbone", "quantized", "river", "balcony", "ee-llm")
"""Names of the methods; `river@N` keeps N layers resident."""


@dataclass(frozen=True)
class Method:
    """One way to run a model: River-LLM with its layers offloaded, its two ends, or a peer of the paper."""

    name: str
    kind: str
    """One of METHODS."""
    resident_layers: int | None = None
    """Of `river@N`; None for the other methods, and for `river`, which keeps none."""

    @classmethod
    def parse(cls, text: str) -> Method:
        """Raises UsageError for a name that is none of METHODS or `river@N`."""
        kind, at, count = text.strip().lower().partition("@")
        if kind == "river" and at and count.isdecimal():
            return cls(f"river@{int(count)}", kind, int(count))
        if kind in METHODS and not at:
            return cls(kind, kind)
        near = difflib.get_close_matches(kind, METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "expected"
        raise UsageError(f"no method {text!r}: {hint} {', '.join(METHODS)}, or river@N (river@3, say)")

    @property
    def mode(self) -> Mode:
        """What its passages do, as far as memory goes."""
        return Mode({"quantized": "quantized", "river": "exit"}.get(self.kind, "backbone"))  # type: ignore[arg-type]

    @property
    def extra_layers(self) -> int:
        """Decoder layers that it adds to the model."""
        return paper.BALCONY_EXTRA_LAYERS if self.kind == "balcony" else 0

    @property
    def keeps_least(self) -> bool:
        """Is everything off the device that can be? Then the states of a long prompt are, too."""
        return self.kind == "river" and self.resident_layers is None

    def place(self, sizes: ModelSizes) -> Placement:
        """Everything on the device, or for River the least that runs. Raises UsageError for too many layers."""
        if self.kind != "river":
            resident = len(self.mode.backbone_layers(sizes.num_layers))
            held = replace(sizes, embed_away_tier=None)
            return smallest(held, mode=self.mode, min_exit=1, resident_layers=resident)
        resident = self.resident_layers or 0
        if resident > sizes.num_layers:
            raise UsageError(f"{self.name} keeps {resident} layers, the model has {sizes.num_layers}")
        return smallest(sizes, mode=self.mode, min_exit=1, resident_layers=resident)

    def paper_bytes(self, weights: paper.Weights, kv_bytes: int) -> int:
        """Its memory as the paper counts. `weights` are the model's own; `kv_bytes` counts layers it adds, too."""
        if self.kind == "river":
            resident = paper.RIVER_RESIDENT_LAYERS if self.resident_layers is None else self.resident_layers
            return paper.river_bytes(weights, kv_bytes, resident)
        forms = {
            "backbone": paper.backbone_bytes,
            "balcony": paper.balcony_bytes,
            "ee-llm": paper.ee_llm_bytes,
            "quantized": paper.quantized_bytes,
        }
        return forms[self.kind](weights, kv_bytes)


def note(method: Method, placement: Placement, *, published: bool) -> str:
    """What a reader of the method's figures has to know: what is counted, and what nobody has published."""
    if method.kind == "balcony":
        return f"{method.extra_layers} more full-precision layers, each with its own KV"
    if method.kind == "ee-llm":
        return (
            f"what it adds is not published; fitted: {paper.EE_LLM_RATIO} times the weights and KV of the backbone "
            "gives both of the paper's figures"
        )
    if method.kind == "quantized":
        return "paper: 4.00 bits a weight without scales, LM head included; here: scales counted, 16-bit LM head"
    if method.kind == "backbone":
        return "paper: weights and KV alone"
    where = "" if placement.embed_tier == "device" else f", embedding on the {placement.embed_tier}"
    where += "" if placement.states_tier == "device" else ", states of the prompt on the host"
    held = f"{len(placement.resident_layers)} resident layers, {placement.slots} streaming buffer{where}"
    if method.resident_layers is None:
        held += f"; the paper's figures keep {paper.RIVER_RESIDENT_LAYERS} layers"
    if not published:
        return held
    return (
        f"{held}; what makes up the paper's figure is not published; fitted: {paper.RIVER_RESIDENT_LAYERS} layers, one "
        "buffer for a streamed layer, embedding and LM head at 16 bits, the exit layers after the first at 4.00"
    )
