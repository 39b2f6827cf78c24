"""What a user may ask for: sizes, quantization, one dataclass with the fields of `load`.

Never imports torch, so the command line can check its options before anything heavy is loaded.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from policies.drafting import MOST_DRAFTED, parse_draft
from policies.types import Mode
from river_offload.errors import UsageError

_MOST_TOKENS = 1 << 24
_LOOKED_AT_BY = {"tau": "exit", "min_exit": "exit", "on_miss": "exit", "prefill": "exit", "gate": "gated"}
"""Options that are of one mode: given without a mode, they ask for it."""
DEFAULT_GATE = 0.3
_MOST_TAU = 1e9  # far outside what a cosine can be; NaN compares as outside, too

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)")


def parse_size(size: str | int) -> int:
    """Bytes of a size as people write it: `8GiB`, `600 MiB`, `7.5GB`, or plain bytes. Rounds down to a whole byte.

    Raises UsageError for anything else, also for `8G`, which some read as 10^9 and others as 2^30.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str) and (found := _SIZE.fullmatch(size.strip().lower())):
        number, unit = found.groups()
        if unit in ("k", "m", "g", "t"):
            binary, decimal = f"{number}{unit.upper()}iB", f"{number}{unit.upper()}B"
            raise UsageError(f"size {size!r} is ambiguous: write {binary} (powers of 1024) or {decimal} (of 1000)")
        if unit in _UNIT_BYTES and (unit or "." not in number):
            return int(Fraction(number) * _UNIT_BYTES[unit])
    raise UsageError(f"size {size!r} cannot be read: write it like 8GiB, 600MiB, 7.5GB or as a whole number of bytes")


def format_size(size_bytes: int) -> str:
    """`8.00 GiB`, `200.0 MiB`, `12 B`: rounded, for people. Quote a budget to be typed again in plain bytes."""
    for unit, power, digits in (("GiB", 3, 2), ("MiB", 2, 1), ("KiB", 1, 1)):
        value = size_bytes / 1024**power
        if value >= 1 - 0.05 / 1024:  # else the next smaller unit says it without 1024.0 of it
            return f"{value:.{digits}f} {unit}"
    return f"{size_bytes} B"


def default_cache_dir() -> Path:
    """Where built rivers rest: $RIVER_OFFLOAD_CACHE, else river-offload below $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("RIVER_OFFLOAD_CACHE"):
        return _expand_home(chosen)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is invalid and must be ignored.
    return (xdg if xdg.is_absolute() else _expand_home("~/.cache")) / "river-offload"


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"no home directory for {path}: write it in full, or set RIVER_OFFLOAD_CACHE") from error


@dataclass(frozen=True)
class QuantConfig:
    """How river layers are quantized. Raises UsageError for a value outside the lists below."""

    bits: int = 4
    """2, 3, 4 or 8 bits a weight."""
    group_size: int = 64
    """32, 64 or 128 weights share one scale and offset."""
    axis: int = 1
    """1: groups run along the inputs of a matrix. HQQ's axis 0 has no kernel here."""

    def __post_init__(self) -> None:
        _require_one_of("quant.bits", self.bits, (2, 3, 4, 8))
        _require_one_of("quant.group_size", self.group_size, (32, 64, 128))
        _require_one_of("quant.axis", self.axis, (1,))


@dataclass(frozen=True)
class RiverConfig:
    """The arguments of `river_offload.load`, checked.

    Build it with `from_options` or `from_toml`, which also read sizes, paths and the quant table as people write
    them; the constructor takes the types below. All three raise UsageError that names the field. The first two also
    find the mode where none is given (`mode_of`); the constructor then has the default, whatever else it is given.
    """

    model: str
    budget: int | None = None
    """Device bytes; None for what the device has free."""
    host_budget: int | None = None
    """Bytes of main memory for layers that wait there, the others stay on disk, and for keys and values of kv_tier
    host; None for what the machine has free."""
    context: int = 4096
    """Tokens the KV cache is planned for, prompt and new ones together."""
    batch: int = 1
    prefill_chunk: int | None = None
    """Prompt tokens that a layer reads at once, the context or more for any prompt whole; None for what fits best."""
    kv_bits: int = 16
    """16 keeps keys and values as they are; 8 or 4 quantizes all but the recent tokens, in layers without a window."""
    kv_tier: str = "device"
    """Where keys and values rest between passes: `device`, or `host` (pinned memory of a GPU, a file of a CPU)."""
    mode: str = "lossless"
    tau: float = 0.5
    min_exit: int = 1
    quant: QuantConfig = field(default_factory=QuantConfig)
    head_bits: int = 16
    """16 keeps the LM head at full precision; 8 or 4 quantizes an untied one, in groups of `quant.group_size`."""
    device: str = "auto"
    dtype: str = "auto"
    cache_dir: Path | None = None
    """None for `default_cache_dir()`."""
    slots: int = 2
    prefetch: str = "next"
    """What the link does ahead of need: nothing (`none`), the coming layers in order (`next`), those that a predictor
    of the exit holds for likely (`predicted`), or the right ones (`oracle`: where exits are forced)."""
    link_limit: int | None = None
    """Bytes a second that streamed layers come at most: what a slower disk would do. CPU only; None for no limit."""
    on_miss: str = "wait"
    """What a passage does about a layer that is not there: `wait`, or `exit` to the river, in mode exit."""
    prefill: str = "exit"
    """Whether a prompt may leave the backbone in mode exit (`exit`) or runs all of it (`backbone`); `auto` decides by
    its length."""
    draft: str | int | None = None
    """Tokens that modes lossless and gated draft before a check, or `adaptive`. None for what suits the mode."""
    gate: float | None = None
    """The margin up to which mode gated asks the backbone, 0..1. None for DEFAULT_GATE."""
    also_modes: tuple[str, ...] = ()
    """Further modes whose parts are kept, so that the loaded model can switch to them."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise _wrong("model", self.model, "a directory, a .gguf file, a hub id or demo")
        for name in ("context", "batch", "min_exit", "slots"):
            _require_positive(name, getattr(self, name))
        if self.context > _MOST_TOKENS:
            raise _wrong("context", self.context, f"at most {_MOST_TOKENS} tokens")
        for name in ("budget", "prefill_chunk"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.host_budget not in (None, 0):  # 0: all of them on disk
            _require_positive("host_budget", self.host_budget)
        check_option("tau", self.tau)
        if not isinstance(self.also_modes, tuple):
            raise _wrong("also_modes", self.also_modes, "a list of modes")
        for name, mode in (("mode", self.mode), *(("also_modes", mode) for mode in self.also_modes)):
            check_option(name, mode)
        if not isinstance(self.quant, QuantConfig):
            raise _wrong("quant", self.quant, "a QuantConfig or a table")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise _wrong("device", self.device, "auto, cpu, cuda or cuda:N")
        _require_one_of("prefetch", self.prefetch, ("none", "next", "predicted", "oracle"))
        if self.link_limit is not None:
            _require_positive("link_limit", self.link_limit)
        _require_one_of("on_miss", self.on_miss, ("wait", "exit"))
        if self.on_miss == "exit" and "exit" not in (self.mode, *self.also_modes):
            raise UsageError(f"on_miss=exit has no effect in mode {self.mode}: only mode exit may leave earlier")
        _require_one_of("prefill", self.prefill, ("auto", "exit", "backbone"))
        if self.prefill != "exit" and "exit" not in (self.mode, *self.also_modes):
            raise UsageError(f"prefill={self.prefill} has no effect in mode {self.mode}: only mode exit has a choice")
        self._check_drafting()
        _require_one_of("head_bits", self.head_bits, (16, 8, 4))
        _require_one_of("kv_bits", self.kv_bits, (16, 8, 4))
        _require_one_of("kv_tier", self.kv_tier, ("device", "host"))
        _require_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.cache_dir is not None and not isinstance(self.cache_dir, Path):
            raise _wrong("cache_dir", self.cache_dir, "a path")
        if not isinstance(self.trust_remote_code, bool):
            raise _wrong("trust_remote_code", self.trust_remote_code, "true or false")

    def _check_drafting(self) -> None:
        kinds = {Mode.parse(mode).kind for mode in (self.mode, *self.also_modes)}
        if self.draft is not None:
            check_option("draft", self.draft)
            if not kinds & {"lossless", "gated"}:
                raise UsageError(f"draft has no effect in mode {self.mode}: only modes lossless and gated draft")
        if self.gate is not None:
            check_option("gate", self.gate)
            if "gated" not in kinds:
                raise UsageError(f"gate has no effect in mode {self.mode}: only mode gated looks at it")
        if self.prefetch in ("predicted", "oracle") and kinds <= {"lossless", "gated"}:
            raise UsageError(
                f"prefetch={self.prefetch} has no effect in mode {self.mode}: what comes is known, use next"
            )

    @property
    def give_back(self) -> int:
        """The most tokens that a KV cache must be able to give back: a whole draft, where a mode drafts."""
        drafts = any(Mode.parse(mode).drafts for mode in (self.mode, *self.also_modes))
        return MOST_DRAFTED + 1 if drafts else 0

    @classmethod
    def from_options(cls, **options: Any) -> RiverConfig:
        """A config from values as they come from a command line, a TOML file or a caller of `load`.

        Sizes may be text (`8GiB`), `model` and `cache_dir` text or paths, `quant` a mapping, `also_modes` any list.
        Without a mode, the options of one mode ask for it (`mode_of`); None of them, or as mode, is not given.
        """
        return cls._from_mapping(options)

    @classmethod
    def from_toml(cls, path: str | Path) -> RiverConfig:
        """A config from a TOML file: the fields above, quantization in a table `[quant]`. Errors name the file."""
        try:
            return cls._from_mapping(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageError(f"configuration {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
            raise UsageError(f"configuration {path} is not valid TOML: {error}") from error
        except UsageError as error:
            raise UsageError(f"configuration {path}: {error}") from error

    @classmethod
    def _from_mapping(cls, options: Mapping[str, Any]) -> RiverConfig:
        _require_known(options, cls)
        if "model" not in options:
            raise UsageError("model is missing: name a directory, a .gguf file, a hub id or demo")
        readers: dict[str, Callable[[Any], Any]] = {
            "model": lambda value: str(value) if isinstance(value, Path) else value,
            "budget": lambda value: _read_size("budget", value),
            "host_budget": lambda value: _read_size("host_budget", value),
            "link_limit": lambda value: _read_size("link_limit", value),
            "quant": _read_quant,
            "cache_dir": lambda value: _expand_home(value) if isinstance(value, str) and value else value,
            "draft": lambda value: value if value is None else check_option("draft", value),
            "also_modes": lambda value: tuple(value) if isinstance(value, list) else value,
        }
        named = {name: readers[name](value) if name in readers else value for name, value in options.items()}
        given = {name: value for name, value in named.items() if value is not None or name not in _LOOKED_AT_BY}
        return cls(**given | {"mode": mode_of(given)})


def mode_of(given: Mapping[str, Any]) -> Any:
    """The mode that is given, else the one that the other options ask for, else the default: `lossless`.

    `tau`, `min_exit`, `on_miss`, `prefill`, and a `prefetch` that foresees exits (`predicted`, `oracle`), are of mode
    `exit`, and `gate` is of mode `gated`. They ask for it unless `also_modes` names it, where they take effect, too.
    What is None is not given.
    """
    if given.get("mode") is not None:
        return given["mode"]
    asked = [mode for name, mode in _LOOKED_AT_BY.items() if given.get(name) is not None]
    if given.get("prefetch") in ("predicted", "oracle"):
        asked.insert(0, "exit")
    also = given.get("also_modes")
    left = [mode for mode in asked if not isinstance(also, (list, tuple)) or mode not in also]
    return left[0] if left else RiverConfig.mode


def check_option(name: str, value: Any) -> Any:
    """The value of `tau`, `gate`, `draft`, `mode` or one of `also_modes`, if it can be one. Raises UsageError."""
    if name == "tau":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST_TAU <= value <= _MOST_TAU:
            raise _wrong("tau", value, "a finite number")
    elif name == "gate":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise _wrong("gate", value, "a probability from 0 to 1")
    elif name == "draft":
        try:
            return parse_draft(value)
        except ValueError as error:
            raise UsageError(f"draft: {error}") from error
    else:
        _require_mode(name, value)
    return value


def check_mode(text: str, num_layers: int) -> Mode:
    """Parse a mode and hold its depth against the model. Raises UsageError."""
    try:
        mode = Mode.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if mode.depth is not None and mode.depth > num_layers:
        raise UsageError(
            f"mode {text} leaves after {mode.depth} layers, the model has {num_layers}: use 0..{num_layers}"
        )
    return mode


def _read_size(name: str, value: str | int | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error


def _read_quant(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    _require_known(value, QuantConfig, prefix="quant.")
    return QuantConfig(**value)


def _require_known(keys: Iterable[str], owner: type[RiverConfig] | type[QuantConfig], prefix: str = "") -> None:
    """Raises UsageError for the first key that `owner` lacks, with the nearest of all fields of both classes."""
    own = [item.name for item in fields(owner)]
    written = {item.name: f"quant.{item.name}" for item in fields(QuantConfig)}
    written |= {item.name: item.name for item in fields(RiverConfig)}
    for key in keys:
        if key not in own:
            near = difflib.get_close_matches(str(key), written, n=1, cutoff=0.5)
            hint = f"did you mean {written[near[0]]}?" if near else f"expected one of {', '.join(own)}"
            raise UsageError(f"unknown key {prefix}{key}: {hint}")


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "a whole number of at least 1")


def _require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # True == 1 and 4.0 == 4, and neither is what was meant.
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise _wrong(name, value, " or ".join(map(str, allowed)))


def _require_mode(name: str, value: object) -> None:
    try:
        Mode.parse(value if isinstance(value, str) else repr(value))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def _wrong(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {value!r}: expected {expected}")
