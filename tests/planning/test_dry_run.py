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
