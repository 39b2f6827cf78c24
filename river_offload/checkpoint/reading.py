"""Files beside the weights that transformers reads: their faults become errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from river_offload.errors import CheckpointError

FAULTS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError, RuntimeError),
    StrictDataclassError,
)
"""What transformers raises over a file it cannot make sense of: whatever it happened to stumble on."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside, where transformers reads `path`, into a CheckpointError that names it."""
    try:
        yield
    except FAULTS as error:
        raise CheckpointError(
            f"{path}: transformers cannot read it ({type(error).__name__}: {error}). Download it again, or correct it."
        ) from error


def require_json(directory: Path) -> None:
    """Every JSON file beside the weights is well-formed. Raises CheckpointError naming the first that is not.

    Checked by us because the tokenizers library raises a bare Exception for such a file.
    """
    for path in sorted(directory.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: no readable JSON ({error}). Download it again.") from error
