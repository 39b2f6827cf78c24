"""The account of a generation, and of what rests where, as plain values: what `model.river.report()` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.prefill import PrefillRule
from policies.types import Placement
from river_offload.config import RiverConfig
from river_offload.trace import Account, PassageRecord, checking_figures


def generation_report(account: Account, num_layers: int) -> dict[str, Any]:
    """What the passages of a generation did. Byte counts are bytes, times are seconds."""
    records = account.records
    later = [record.depth for record in records if record.path != "prefill"]
    new_tokens = account.new_tokens or _text_tokens(records)
    drafted = any(record.path in ("draft", "check") for record in records)
    later_tokens = max(new_tokens - 1, 1) if drafted else len(later)
    prefill_depth = next((record.depth for record in records if record.path == "prefill"), None)
    return {
        "prompt_tokens": account.prompt_tokens,
        "new_tokens": new_tokens,
        "mean_depth": sum(later) / later_tokens if later else prefill_depth,
        **checking_figures(records, num_layers, new_tokens),
        "depths": [record.depth for record in records],
        "prefill_depth": prefill_depth,
        "tokens_per_s": new_tokens / account.seconds if account.seconds else None,
        "bytes_streamed": sum(record.bytes_streamed for record in records),
        "wait_s": sum(record.wait_s for record in records),
        "misses": sum(record.misses for record in records),
        "wasted_bytes": sum(record.wasted_bytes for record in records),
        "peak_device_bytes": account.peak_device_bytes,
    }


def _text_tokens(records: Sequence[PassageRecord]) -> int:
    """Tokens a row of a text that was broken off. The last piece of a prompt gives one, however many pieces it has."""
    later = sum(record.text_tokens for record in records if record.path != "prefill")
    return later + any(record.path == "prefill" for record in records)


def generation_seconds(account: Account) -> dict[str, float]:
    """Of reading the prompt, and of all the rest."""
    prefill_s = sum(record.seconds for record in account.records if record.path == "prefill")
    return {"prefill": prefill_s, "decode": max(account.seconds - prefill_s, 0.0)}


def prefill_report(records: Sequence[PassageRecord], rule: PrefillRule) -> dict[str, Any]:
    """By which policy prompts were read, and what it made of the one that these records begin with."""
    return {
        "policy": rule.policy,
        "backbone_from_tokens": rule.backbone_from_tokens if rule.policy == "auto" else None,
        "mode": next((record.mode for record in records if record.path == "prefill"), None),
    }


def placement_report(placement: Placement, config: RiverConfig) -> dict[str, Any]:
    """What rests where, and what was planned for it."""
    return {
        "budget_bytes": placement.budget_bytes,
        "placement": {
            "resident_layers": len(placement.resident_layers),
            "streamed_layers": len(placement.streamed_layers),
            "slots": placement.slots,
            "embed_tier": placement.embed_tier,
            "prefill_chunk": placement.prefill_chunk,
            "states_tier": placement.states_tier,
        },
        "kv": {
            "bits": config.kv_bits,
            "tier": config.kv_tier,
            "planned_host_bytes": placement.kv_host_bytes,
            "ahead": placement.kv_ahead,
        },
        "planned_bytes": dict(placement.terms),
    }
