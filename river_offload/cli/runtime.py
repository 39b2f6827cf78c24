"""The seam between the command line and the library: the few names of a loaded model that commands use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from policies.types import Placement
from river_offload.cli.terminal import Terminal
from river_offload.errors import CheckpointError
from river_offload.progress import Progress


class TraceLike(Protocol):
    def write_jsonl(self, path: str | Path) -> None: ...


class Handle(Protocol):
    """`model.river`."""

    tokenizer: Any
    num_layers: int
    trace: TraceLike
    config: Any
    placement: Placement
    notes: Sequence[str]
    progress: Progress

    @property
    def mode(self) -> str: ...
    @property
    def tau(self) -> float: ...
    def report(self) -> dict[str, Any]: ...
    def held(self) -> dict[str, int]: ...
    def held_at_most(self) -> dict[str, int]: ...
    def new_cache(self) -> Any: ...
    def close(self) -> None: ...


class Loaded(Protocol):
    """A transformers model that `river_offload.load` returned."""

    river: Handle
    device: Any
    generation_config: Any

    def generate(self, input_ids: Any, **arguments: Any) -> Any: ...


def load(model: str, **arguments: Any) -> Loaded:
    """`river_offload.load`, imported here since it brings torch. Tests put their own function in its place."""
    import river_offload

    loaded: Loaded = river_offload.load(model, **arguments)
    return loaded


@contextlib.contextmanager
def opened(model: str, arguments: dict[str, Any], terminal: Terminal) -> Iterator[Loaded]:
    """A loaded model that is closed however the block ends. Says the remarks on its checkpoint.

    Raises what `load` raises.
    """
    progress = terminal.progress()
    try:
        progress.start("starting", 0, "")
        hush_libraries()
        progress.finish()
        loaded = load(model, progress=progress, **arguments)
    finally:
        progress.finish()
    try:
        loaded.river.progress = progress
        for remark in loaded.river.notes:
            terminal.note(f"note: {remark}")
        yield loaded
    finally:
        loaded.river.close()


def tokenizer_of(loaded: Loaded) -> Any:
    """The tokenizer. Raises CheckpointError when the checkpoint came without one."""
    if loaded.river.tokenizer is None:
        raise CheckpointError(
            "this checkpoint has no tokenizer (no tokenizer.json, tokenizer.model or tokenizer_config.json), and text "
            "cannot be read or written without: put the files of the model's tokenizer beside its weights"
        )
    return loaded.river.tokenizer


def hush_libraries() -> None:
    """Silence the libraries that a load brings in."""
    # Their warnings name Python arguments that a command line does not have; their bars would fight with ours.
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
