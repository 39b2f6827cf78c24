"""The configurations of six models that users ask for, built in: enough to plan for a model without its weights."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from river_offload.errors import UsageError

_FOLDER = resources.files(__package__) / "shapes"


def builtin_names() -> tuple[str, ...]:
    """The names that `builtin_shape` knows, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def builtin_shape(name: str) -> dict[str, Any]:
    """The config.json of a built-in model, such as "llama-3.1-8b", as its authors published it (text part only).

    Raises UsageError, listing the names there are, for any other name.
    """
    if name not in builtin_names():
        raise UsageError(f"no built-in model {name!r}; there are {', '.join(builtin_names())}.")
    shape: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return shape
