"""What every kind of KV cache would take for a model: the alternatives that `policies.kv_choice` weighs."""

from __future__ import annotations

from policies.kv_choice import KvNeeds
from policies.types import Mode
from river_offload.kv.cache import only_windows
from river_offload.kv.kind import PLAIN, KvKind
from river_offload.planning.dry_run import dry_run
from river_offload.quant.precision import Precision
from river_offload.structure import Structure

KINDS = tuple(KvKind(bits, tier) for tier in ("device", "host") for bits in (16, 8, 4))
"""Full precision on the device first: it needs nothing but memory."""


def kv_needs(
    structure: Structure,
    precision: Precision,
    *,
    context: int,
    batch: int,
    modes: tuple[Mode, ...],
    prefill_chunk: int | None = None,
    give_back: int = 0,
    rest_states: bool = False,
    trust_remote_code: bool = False,
) -> list[KvNeeds]:
    """Each kind that has an effect on the model, measured by a dry run of its own (a second or so each).

    Args:
        structure: the model.
        context, batch: tokens per row, rows.
        prefill_chunk: tokens of a prompt that a layer reads at once; None for all of them.
        give_back, rest_states: see `dry_run`.
    """
    found: list[KvNeeds] = []
    for kind in (PLAIN,) if only_windows(structure.model.config, context) else KINDS:
        needs = dry_run(
            structure,
            precision,
            context=context,
            batch=batch,
            modes=modes,
            prefill_chunk=prefill_chunk,
            kv_kind=kind,
            give_back=give_back,
            rest_states=rest_states,
            trust_remote_code=trust_remote_code,
        )
        full_bytes = found[0].full_bytes if found else needs.kv_bytes
        found.append(
            KvNeeds(
                kind.bits,
                kind.tier,
                needs.kv_bytes,
                needs.kv_host_bytes,
                needs.transient_bytes,
                full_bytes,
                needs.kv_room_bytes,
            )
        )
    return found
