"""Files that a command writes beside its output: checked before the long work, whole or not at all afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from river_offload.errors import UsageError


def require_writable(option: str, name: str) -> Path:
    """Where the file will be. Raises UsageError when it could not be written after minutes of work."""
    try:
        path = Path(name).expanduser().resolve()  # where a link leads is where it will be written
        why = "it is no regular file" if path.exists() and not path.is_file() else None
        if why is None:
            with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent):
                pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, no home directory
        why = getattr(error, "strerror", None) or str(error)
    if why is not None:
        raise UsageError(
            f"{option} {name} cannot be written: {why}. Name a file in a directory that exists and can be written to"
        )
    return path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file under another name, and give it its own when it is complete.

    Raises UsageError when the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
