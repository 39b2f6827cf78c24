"""What the operating system sets bounds to beside the container: locked memory, and what WSL takes away."""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass

from river_offload.memory.reading import Reading


@dataclass(frozen=True, slots=True)
class LockedMemory:
    """RLIMIT_MEMLOCK of this process: the bound now, and the one up to which it may raise it itself. Bytes."""

    soft: Reading
    hard: Reading


def locked_memory() -> LockedMemory:
    """The limit of memory that may be locked into RAM (`ulimit -l`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LockedMemory(_limit(soft), _limit(hard))


def wsl_version(release: str | None = None) -> int | None:
    """1 or 2 inside the Windows Subsystem for Linux, None elsewhere. `release` is the kernel's, this one's by default.

    WSL 2 names its kernel "5.15.90.1-microsoft-standard-WSL2", WSL 1 "4.4.0-19041-Microsoft".
    """
    name = platform.release() if release is None else release
    if "microsoft" not in name.lower():
        return None
    return 1 if name.endswith("Microsoft") else 2


def _limit(nbytes: int) -> Reading:
    return Reading.missing("unlimited") if nbytes == resource.RLIM_INFINITY else Reading(nbytes)
