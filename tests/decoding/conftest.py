"""Fixtures of the modes that draft: models that stream, all windows poisoned, and how to see what they did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import budget_for, poison_slots

PLACES = ("resident", "streamed")


@pytest.fixture
def drafter(checkpoint: Callable[..., Path], open_river: Callable[..., Any]) -> Callable[..., Any]:
    """`drafter("llama", "streamed", **options of load)`: in mode lossless; streamed keeps two layers on the device."""

    def made(family: str = "llama", place: str = "streamed", **options: Any) -> Any:
        options = {"mode": "lossless", "context": 96, "slots": 1} | options
        if place == "resident":
            return open_river(family, **options)
        model = open_river(family, budget=budget_for(checkpoint(family), 1, **options), **options)
        assert model.river.placement.streamed_layers
        poison_slots(model)
        return model

    return made
