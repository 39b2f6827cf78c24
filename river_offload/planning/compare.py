"""Two accounts of memory side by side: a plan or a measurement against another, category by category."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from river_offload.errors import UsageError

SCHEMA = 1
_FACTS = ("model", "context", "batch", "mode")
"""What two accounts may differ in, where their files say it."""


@dataclass(frozen=True)
class MemoryAccount:
    """What one file says of device memory."""

    file: str
    kind: str
    """"plan", or "run", of which the measured half counts."""
    facts: Mapping[str, Any]
    peak_device_bytes: int
    categories: Mapping[str, int]


@dataclass(frozen=True)
class Difference:
    """One category. `b_bytes - a_bytes` is what the second account has more."""

    category: str
    a_bytes: int
    b_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.b_bytes - self.a_bytes


@dataclass(frozen=True)
class Comparison:
    """Two accounts and their differences, the biggest first."""

    a: MemoryAccount
    b: MemoryAccount
    differences: tuple[Difference, ...]

    @property
    def peak(self) -> Difference:
        """The totals."""
        return Difference("peak", self.a.peak_device_bytes, self.b.peak_device_bytes)

    def changed_facts(self) -> dict[str, tuple[Any, Any]]:
        """What else the two accounts differ in: model, context, batch, mode."""
        pairs = {name: (self.a.facts.get(name), self.b.facts.get(name)) for name in _FACTS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def as_json(self) -> dict[str, Any]:
        """The object of `river-mem compare --json`."""
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "a": _side(self.a),
            "b": _side(self.b),
            "peak_device_bytes": _numbers(self.peak),
            "differences": [{"category": item.category, **_numbers(item)} for item in self.differences],
        }


def compare(a: MemoryAccount, b: MemoryAccount) -> Comparison:
    """Differences per category; a category that one account lacks counts as 0 there."""
    names = dict.fromkeys((*a.categories, *b.categories))
    found = [Difference(name, a.categories.get(name, 0), b.categories.get(name, 0)) for name in names]
    found.sort(key=lambda item: (-abs(item.difference_bytes), -max(item.a_bytes, item.b_bytes), item.category))
    return Comparison(a, b, tuple(found))


def read_account(file: str) -> MemoryAccount:
    """What `river-mem plan --json` or `river-mem measure --json` wrote. Raises UsageError for any other file."""
    try:
        found = json.loads(Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}): expected the output of river-mem plan or measure") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise UsageError(f"{file} is no account of river-mem: expected the output of river-mem plan --json or measure")
    kind = found["kind"]
    if found.get("schema") != SCHEMA:
        raise UsageError(
            f"{file} has schema {found.get('schema')!r}, this version reads {SCHEMA}: write it again with this version"
        )
    if kind not in ("plan", "run"):
        raise UsageError(f"{file} is a {kind}: compare takes what river-mem plan --json or measure --json wrote")
    counted = found if kind == "plan" else found.get("measured")
    peak_bytes, categories = _counts(file, counted)
    return MemoryAccount(file, kind, {name: found.get(name) for name in _FACTS}, peak_bytes, categories)


def _counts(file: str, counted: Any) -> tuple[int, dict[str, int]]:
    counted = counted if isinstance(counted, dict) else {}
    peak_bytes, categories = counted.get("peak_device_bytes"), counted.get("categories")
    if not _is_count(peak_bytes):
        raise UsageError(f"{file}: peak_device_bytes is {peak_bytes!r}, expected a whole number of bytes")
    if not isinstance(categories, dict) or not all(map(_is_count, categories.values())):
        raise UsageError(f"{file}: categories is {categories!r}, expected a whole number of bytes for each name")
    return peak_bytes, categories


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _side(account: MemoryAccount) -> dict[str, Any]:
    named = {"file": account.file, "kind": account.kind, **account.facts}
    return named | {"peak_device_bytes": account.peak_device_bytes}


def _numbers(item: Difference) -> dict[str, int]:
    return {"a_bytes": item.a_bytes, "b_bytes": item.b_bytes, "difference_bytes": item.difference_bytes}
