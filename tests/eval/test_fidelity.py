"""How near a mode comes to the backbone: the walk of a gate through a record, and records made by real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import budget_for, tokens

from river_offload.eval.fidelity import (
    Drafted,
    Point,
    drafted_blocks,
    free_running,
    gated,
    point,
    reference,
    teacher_forced_exit,
)
from river_offload.eval.fidelity_plot import draw

RIGHT, WRONG, UNSURE_RIGHT, UNSURE_WRONG = (
    Drafted(0.9, True, 0.1),
    Drafted(0.9, False, 2.0),
    Drafted(0.1, True, 0.3),
    Drafted(0.1, False, 1.0),
)
CHAIN = [[RIGHT, UNSURE_RIGHT, WRONG, UNSURE_WRONG], [RIGHT, RIGHT, RIGHT, RIGHT]]
LAYERS = 30


def walked(gate: float | None) -> Any:
    return gated(CHAIN, gate, 4, 2, LAYERS)


def test_a_gate_asks_about_unsure_tokens_and_a_wrong_one_ends_the_block() -> None:
    found = walked(0.5)
    # Four drafted, the last of them wrong and unsure; then four right ones.
    assert found.agrees == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found.kl == [0.1, 0.0, 2.0, 0.0, 0.1, 0.1, 0.1, 0.1]
    assert found.layers == 2 * (4 * 2 + LAYERS)


def test_lossless_agrees_everywhere_and_the_river_costs_no_backbone_pass() -> None:
    lossless, river = walked(None), walked(0.0)
    assert set(lossless.agrees) == {1.0}
    assert set(lossless.kl) == {0.0}
    # Ends at the sure wrong token, then at the unsure one; the four right ones are a full block.
    assert lossless.layers == 2 * (4 + 4 + 4) + 3 * LAYERS
    assert river.agrees == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert river.layers == 2 * 8


def test_a_point_is_the_mean_over_all_tokens_of_all_prompts() -> None:
    one, other = walked(0.0), gated([[RIGHT, RIGHT]], 0.0, 4, 2, LAYERS)
    found = point("gate", 0.0, "teacher", [one, other])
    assert found == Point("gate", 0.0, "teacher", 2.0, 8 / 10, pytest.approx(0.4), 10)


def test_records_and_texts_of_a_real_model(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mode": "lossless", "also_modes": ("exit", "gated"), "slots": 1}
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 1, **options), **options)
    text = reference(model, tokens(6), 18)
    blocks = drafted_blocks(model, text, 6, 4)
    assert [len(block) for block in blocks] == [4, 4, 4, 4, 2]
    deep = teacher_forced_exit(model, text, 6, 2.0)
    assert (deep.layers, set(deep.agrees)) == (17 * 5, {1.0})
    assert deep.kl == pytest.approx([0.0] * 17, abs=1e-5)
    shallow = teacher_forced_exit(model, text, 6, -2.0)
    assert (shallow.layers, sum(shallow.kl) > 1e-3) == (17, True)
    free = free_running(model, tokens(6), 18, mode="lossless", draft=4)
    assert free.agrees == [1.0] * 17
    report = model.river.report()
    assert free.layers == 5 * report["backbone_passes"] + model.river.draft_depth * report["drafted"]
    assert torch.equal(text, reference(model, tokens(6), 18))
    picture = tmp_path / "curves.svg"
    points = [
        point(curve, 0.5, forcing, [free]) for curve in ("tau", "gate", "lossless") for forcing in ("teacher", "free")
    ]
    draw(points, picture, "tiny")
    assert picture.stat().st_size > 1000
