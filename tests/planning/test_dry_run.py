"""What a dry run leaves out, since it cannot be the highest moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import config_of_family

from policies.types import Mode
from river_offload.kv.kind import KvKind
from river_offload.planning import dry_run as subject
from river_offload.quant.kernels import ordered
from river_offload.quant.precision import Precision
from river_offload.structure import Structure


@pytest.mark.parametrize("kind", [KvKind(16, "device"), KvKind(4, "host")], ids=str)
@pytest.mark.parametrize(("context", "chunk"), [(300, 64), (1000, 499)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_that_are_left_out_hold_no_more(
    family: str, context: int, chunk: int, kind: KvKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one chunk, and a second turn."""
    model = Structure.of(config_of_family(family, max_position_embeddings=4096), torch.float32)
    precision = Precision(
        dtype=torch.float32, bits=4, group=32, head_bits=16, device_type="cpu", kernels=ordered(tmp_path)
    )
    options: dict[str, Any] = {"context": context, "batch": 2, "modes": (Mode("exit"),), "kv_kind": kind}
    short = subject.dry_run(model, precision, prefill_chunk=chunk, **options)
    half = context // 2
    every = [(0, chunk), (half, context - half), (0, context - 1), (context - 1, 1)]
    monkeypatch.setattr(subject, "_steps", lambda *_, **__: every)
    assert short == subject.dry_run(model, precision, prefill_chunk=chunk, **options)


def test_a_prompt_of_one_chunk_is_not_left_out_where_longer_ones_rest_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own states are on the device: that is more than the last chunk of a long prompt has there."""
    wide = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = config_of_family("llama", **wide, head_dim=8, max_position_embeddings=4096)
    model = Structure.of(config, torch.float32)
    precision = Precision(
        dtype=torch.float32, bits=4, group=32, head_bits=16, device_type="cpu", kernels=ordered(tmp_path)
    )
    options: dict[str, Any] = {"context": 1000, "batch": 1, "modes": (Mode("backbone"),), "rest_states": True}
    planned = subject.dry_run(model, precision, prefill_chunk=256, **options)
    for step in ((0, 256), (744, 256), (500, 500), (0, 999), (999, 1)):
        monkeypatch.setattr(subject, "_steps", lambda *_, step=step, **__: [step])
        needed = subject.dry_run(model, precision, prefill_chunk=256, **options)
        assert needed.transient_bytes <= planned.transient_bytes


@pytest.mark.parametrize(("context", "planned"), [(512, False), (4096, True)])
def test_a_second_room_is_planned_where_a_full_layer_comes_ahead(context: int, planned: bool, tmp_path: Path) -> None:
    """A layer brings in less than a mebibyte by itself: 512 tokens of 2 heads of 32 numbers are 256 KiB."""
    model = Structure.of(config_of_family("llama", max_position_embeddings=4096), torch.float32)
    precision = Precision(
        dtype=torch.float32, bits=4, group=32, head_bits=16, device_type="cpu", kernels=ordered(tmp_path)
    )
    kind = KvKind(16, "host")
    needs = subject.dry_run(
        model, precision, context=context, batch=1, modes=(Mode("backbone"),), prefill_chunk=64, kv_kind=kind
    )
    assert needs.kv_room_bytes == (2 * 2 * 32 * 4 * context if planned else 0)
