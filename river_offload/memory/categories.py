"""The names that device bytes go by, the same ones in a plan and in a measurement."""

from __future__ import annotations

TRANSIENT = ("activations", "mask", "logits", "sampler", "dequantization")
"""Working memory by where a passage was when it was allocated."""

RIVER = ("river_packed", "river_scales", "river_zeros", "river_full_precision")
"""What river layers are made of (`quant.river.river_parts`)."""

CATEGORIES = (
    *("backbone", "slots", "staging"),
    *RIVER,
    *("norms", "embedding", "head", "other", "kv"),
    *TRANSIENT,
    "loading",
)
"""In the order in which reports list them."""
