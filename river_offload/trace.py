"""The only account of a run: one record per passage. Reports, fitting, simulation and plots read it.

On disk a trace is JSON lines: a header `{"version": 1, "num_layers": L, ...}`, then one object per passage.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from river_offload.errors import UsageError

VERSION = 1
PATHS = ("prefill", "decode", "draft", "check")


@dataclass(slots=True)
class PassageRecord:
    """What is known of one forward pass."""

    index: int
    """Counts the passages of a trace from 0."""
    new_tokens: int
    """Tokens a row that this passage processed, padding included."""
    batch: int
    cached_tokens: int
    """Tokens a row in the KV cache before this passage."""
    path: str
    """`prefill`, `decode`, `draft` (one token on the river, to be checked) or `check` (a block of them)."""
    mode: str
    depth: int
    """Backbone layers that ran before the exit; the number of layers when it never left."""
    signals: list[float]
    """Exit signals in the order in which they were measured, the last of them that of the exit if there was one."""
    wait_s: float
    """Seconds the passage stood still for layers that were not there yet."""
    bytes_streamed: int
    """That arrived during the passage, whichever passage they are for."""
    seconds: float
    margin: float | None = None
    """Top-1 minus top-2 probability of the token it continues from, the least over the rows; None where not known.
    So that of a drafted token stands in the passage after its draft."""
    misses: int = 0
    """Layers that were needed and not there: waited for, or left for the river."""
    wasted_bytes: int = 0
    """Bytes known by now to have come in vain: overwritten unused, or called off half-way."""
    copy_s: float | None = None
    """Seconds in which the link was copying since the passage before; None in traces that do not know."""
    accepted: int = 0
    """Drafted tokens a row that this check kept, of the new_tokens - 1 that it looked at; of a draft that is kept
    without a check, its one."""
    decided: int = 0
    """New tokens a row that this check decided or confirmed, the one after the last accepted included."""
    added: int | None = None
    """Tokens a row that the text grew by in this check; None for other passages, which do not say it."""

    @property
    def text_tokens(self) -> int:
        """Tokens a row that came of this passage: a draft's come of the check that keeps them, or, where nobody checks,
        of the draft itself."""
        if self.path == "draft":
            return self.accepted
        return 1 if self.added is None else self.added

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a signal that is not finite becomes null, since JSON knows no NaN."""
        return asdict(self) | {"signals": [signal if math.isfinite(signal) else None for signal in self.signals]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PassageRecord:
        """Inverse of `to_dict`. Raises UsageError that names a missing, unknown or wrong field."""
        names = [item.name for item in fields(cls)]
        for item in fields(cls):
            if (name := item.name) not in values and item.default is MISSING:
                raise UsageError(f"{name} is missing")
        for name, value in values.items():
            if name not in names:
                raise UsageError(f"unknown field {name}: expected {', '.join(names)}")
            _require(name, value)
        if values["path"] == "check" and values.get("added") is None:
            raise UsageError("added is missing: a check says by how many tokens the text grew")
        signals = [math.nan if signal is None else float(signal) for signal in values["signals"]]
        return cls(**{**values, "signals": signals})


@dataclass(slots=True)
class Trace:
    """The records of a run, oldest first."""

    num_layers: int
    about: dict[str, Any] = field(default_factory=dict)
    """Whatever else the header should say (model, tau, budget): JSON values."""
    records: list[PassageRecord] = field(default_factory=list)

    def append(self, record: PassageRecord) -> None:
        self.records.append(record)

    def _checked(self, record: PassageRecord) -> PassageRecord:
        if record.depth > self.num_layers:
            raise UsageError(f"depth is {record.depth}: expected at most {self.num_layers}, the layers of the header")
        return record

    def clear(self) -> None:
        """Forget the records; the header stays."""
        self.records.clear()

    @property
    def mean_depth(self) -> float | None:
        """Backbone layers that ran for a token after the prompts, drafts and checks included; None before the first."""
        later = [record for record in self.records if record.path != "prefill"]
        tokens = sum(record.text_tokens for record in later)
        return sum(record.depth for record in later) / tokens if tokens else None

    def write_jsonl(self, path: str | Path) -> None:
        """Write the whole trace, or nothing: an older file stays as it was when this fails.

        Raises UsageError when the file cannot be written.
        """
        header = {**self.about, "version": VERSION, "num_layers": self.num_layers}
        lines = [json.dumps(line) for line in (header, *(record.to_dict() for record in self.records))]
        try:
            _replace_file(Path(path), "\n".join(lines) + "\n")
        except OSError as error:
            raise UsageError(
                f"trace {path} cannot be written: {error.strerror or error}. Name a file in a directory that exists, "
                "can be written to and has space"
            ) from error

    @classmethod
    def read_jsonl(cls, path: str | Path) -> Trace:
        """Inverse of `write_jsonl`. Raises UsageError that names the file and the first line that is wrong."""
        trace: Trace | None = None
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        if trace is None:
                            trace = cls._from_header(_parse_object(line))
                        else:
                            trace.append(trace._checked(PassageRecord.from_dict(_parse_object(line))))
                    except UsageError as error:
                        raise UsageError(f"trace {path}, line {number}: {error}") from error
        except OSError as error:
            raise UsageError(f"trace {path} cannot be read: {error.strerror or error}") from error
        if trace is None:
            raise UsageError(f"trace {path} is empty: expected a header line")
        return trace

    @classmethod
    def _from_header(cls, header: dict[str, Any]) -> Trace:
        if header.get("version") != VERSION:
            raise UsageError(f"version is {header.get('version')!r}: this release reads version {VERSION}")
        _require("num_layers", header.get("num_layers"))
        about = {name: value for name, value in header.items() if name not in ("version", "num_layers")}
        return cls(header["num_layers"], about)


@dataclass
class Account:
    """What the last generate did, filled while it runs. Times in seconds."""

    mode: str = ""
    tau: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    records: list[PassageRecord] = field(default_factory=list)
    seconds: float = 0.0
    peak_device_bytes: int = 0
    peak_categories: dict[str, int] = field(default_factory=dict)
    """Those bytes by the names of a plan."""
    held: dict[str, int] = field(default_factory=dict)
    """Device bytes by category in the passage under way, or in the last one. Replaced, never changed."""


def checking_figures(records: Sequence[PassageRecord], num_layers: int, new_tokens: int) -> dict[str, Any]:
    """What one generation asked of the backbone after its prompt; shares and means are None where there is nothing.

    All count the tokens after the first, which is the prompt's. `backbone_passes` ran every backbone layer;
    `bytes_per_token` leaves out what was streamed for the prompt, as the account of a trace does; `checked_share` is
    the share of the tokens that the backbone decided or confirmed: 1 in mode lossless.
    """
    after_prompt = [record for record in records if record.path != "prefill"]
    passes = sum(record.depth == num_layers for record in after_prompt if record.path != "draft")
    drafted = sum(record.path == "draft" for record in after_prompt)
    later_tokens = max(new_tokens - 1, 0)
    checked = sum(record.decided for record in after_prompt)
    nbytes = sum(record.bytes_streamed for record in after_prompt)
    return {
        "backbone_passes": passes,
        "drafted": drafted,
        "accepted": sum(record.accepted for record in after_prompt),
        "tokens_per_backbone_pass": later_tokens / passes if passes else None,
        "bytes_per_token": nbytes / later_tokens if later_tokens else None,
        "checked_share": checked / later_tokens if later_tokens and drafted else None,
    }


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise UsageError(f"not JSON ({error}); the file may have been cut short") from error
    if not isinstance(values, dict):
        raise UsageError(f"found {type(values).__name__}, expected a JSON object")
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_signals(value: object) -> bool:
    return isinstance(value, list) and all(signal is None or _is_number(signal) for signal in value)


def _require(name: str, value: object) -> None:
    expected, fits = _EXPECTED.get(name, ("a whole number of at least 0", _is_count))
    if not fits(value):
        raise UsageError(f"{name} is {value!r}: expected {expected}")


_EXPECTED: dict[str, tuple[str, Callable[[object], bool]]] = {
    "path": (f"one of {', '.join(PATHS)}", lambda value: value in PATHS),
    "added": ("a whole number of at least 0 or nothing", lambda value: value is None or _is_count(value)),
    "margin": ("a number or nothing", lambda value: value is None or _is_number(value)),
    "mode": ("the name of a mode", lambda value: isinstance(value, str)),
    "signals": ("a list of numbers", _is_signals),
    "wait_s": ("a number of seconds", _is_number),
    "copy_s": ("a number of seconds or nothing", lambda value: value is None or _is_number(value)),
    "seconds": ("a number of seconds", _is_number),
}
"""What a field of a record holds, where it is no count."""


def _replace_file(path: Path, text: str) -> None:
    """Put `text` at `path` in one step: temporary name beside it, synced, renamed, removed on any failure."""
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")  # renaming over /dev/null would replace the device
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
