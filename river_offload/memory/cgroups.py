"""The memory limit of the container this process runs in: control groups, version 1 and 2, however deeply nested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from river_offload.memory.reading import Reading

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62
"""Version 1 says "no limit" with the largest multiple of a page that a signed 64-bit number holds."""


@dataclass(frozen=True, slots=True)
class ContainerMemory:
    """What the control groups of this process say. Bytes.

    Attributes:
        version: 1 or 2, of the group that leaves least; None without a limit.
        group: that group's directory.
        limit, used, free: of that group. What `used` counts cannot be reclaimed: inactive file pages are left out.
    """

    version: int | None
    group: str | None
    limit: Reading
    used: Reading
    free: Reading


@dataclass(frozen=True, slots=True)
class _Group:
    directory: Path
    version: int

    @property
    def files(self) -> tuple[str, str]:
        """Names of the files that hold limit and usage."""
        if self.version == 2:
            return "memory.max", "memory.current"
        return "memory.limit_in_bytes", "memory.usage_in_bytes"


def container_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> ContainerMemory:
    """The group at or above this process that leaves least. A limit anywhere above a group binds it, too.

    psutil knows nothing of these limits: in a container it tells the memory of the whole machine.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError as error:
        return _unlimited(f"no control groups here: {membership} cannot be read ({error.strerror})")
    found: list[tuple[int, int, _Group]] = []
    reasons: list[str] = []
    seen = 0
    for group in _groups(root, lines):
        limit_name, used_name = group.files
        limit, used = _read(group.directory / limit_name), _read(group.directory / used_name)
        seen += limit is not _ABSENT
        if limit.value is not None and used.value is not None:
            found.append((limit.value, used.value - _reclaimable(group.directory), group))
        elif limit.value is not None:
            reasons.append(used.reason or "")
        elif limit.reason not in (_ABSENT.reason, _MAX.reason):
            reasons.append(limit.reason or "")
    if found:
        limit_bytes, used_bytes, group = min(found, key=lambda entry: entry[0] - entry[1])
        free_bytes = max(limit_bytes - used_bytes, 0)
        figures = (Reading(limit_bytes), Reading(used_bytes), Reading(free_bytes))
        return ContainerMemory(group.version, str(group.directory), *figures)
    if reasons:
        return _unlimited(reasons[0])
    return _unlimited(
        "no control group of this process limits memory" if seen else f"no memory control group is mounted at {root}"
    )


def _unlimited(reason: str) -> ContainerMemory:
    return ContainerMemory(None, None, *(Reading.missing(reason),) * 3)


def _groups(root: Path, lines: list[str]) -> Iterator[_Group]:
    """The groups at and above the process, innermost first; some may not be mounted here."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root, 2
        elif "memory" in controllers.split(","):
            base, version = root / "memory", 1
        else:
            continue
        # Inside a container the path may be the host's: then only the mount's own root exists, the container's group.
        directory = base / path.lstrip("/")
        while directory != base:
            yield _Group(directory, version)
            directory = directory.parent
        yield _Group(base, version)


_ABSENT = Reading.missing("there is no such file")
_MAX = Reading.missing("no limit is set")


def _read(path: Path) -> Reading:
    """The number in a control file; `_MAX` for no limit, `_ABSENT` for no file, or why it cannot be read."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        return Reading.missing(f"{path} cannot be read ({error.strerror})")
    if not text.isdecimal() or int(text) >= _NO_LIMIT:
        return _MAX
    return Reading(int(text))


def _reclaimable(group: Path) -> int:
    """Inactive file pages, which the kernel drops before anything fails; container tools leave them out as well."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines)
    # In version 1 only the total includes the groups below.
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
