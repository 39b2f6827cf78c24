"""The options that several commands share, each written once, and the checks that need nothing but the options.

A group is a dataclass whose fields carry their `typer.Option`; `with_options` gives a command the options of its
groups and hands it one object per group. None means "not given", so that an option that cannot take effect can be
refused, and so that defaults stay where they belong: in `RiverConfig`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from policies.types import Mode
from river_offload.cli.help import NOTHING
from river_offload.config import DEFAULT_GATE, QuantConfig, RiverConfig, mode_of
from river_offload.errors import UsageError

GENERATE_NEW_TOKENS = 256
CHAT_NEW_TOKENS = 1024
"""What --max-new-tokens is when it is not given, or less where the context leaves less room."""
_NEW_TOKENS = f"{GENERATE_NEW_TOKENS}, chat {CHAT_NEW_TOKENS}"

_MODE_DEFAULT = f"{RiverConfig.mode}; exit where --tau is given, gated where --gate is"

_MODEL = typer.Argument(
    metavar="MODEL", help="A directory of safetensors, a .gguf file, a hub id (org/name), or demo.", show_default=False
)


def option(name: str, metavar: str, panel: str, help: str, default: object = None, **more: Any) -> Any:
    """A `typer.Option` that takes a value; `default` is what the help says it is, `more` goes to it as it is."""
    shown = help if default is None else f"{help} [dim]Default: {default}.[/dim]"
    return typer.Option(name, help=shown, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


def parse_tokens(text: str) -> int:
    """A number of tokens as people write it: `4096`, or `4k` for the same."""
    number, k = str(text).strip().lower(), 1
    if number.endswith("k"):
        number, k = number[:-1], 1024
    if not re.fullmatch(r"[+-]?[0-9]+", number):
        raise typer.BadParameter(f"{text!r} is no number of tokens: write it like 16384 or 16k")
    return int(number) * k


def flag(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """A `typer.Option` that takes no value; `more` goes to it as it is."""
    return typer.Option(*names, help=help, metavar=NOTHING, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True)
class ModelOptions:
    """What `river_offload.load` is asked."""

    mode: Annotated[
        str | None,
        option("--mode", "MODE", "River", "lossless, exit, backbone, gated, quantized or fixed:D.", _MODE_DEFAULT),
    ] = None
    tau: Annotated[
        float | None,
        option("--tau", "T", "River", "Mode exit: leave the backbone when the signal passes this.", RiverConfig.tau),
    ] = None
    draft: Annotated[
        str | None,
        option("--draft", "N", "River", "Tokens drafted a check, 1 to 32, or adaptive.", "adaptive; gated 16"),
    ] = None
    gate: Annotated[
        float | None, option("--gate", "G", "River", "Mode gated: margin up to which to ask.", DEFAULT_GATE)
    ] = None
    min_exit: Annotated[
        int | None,
        option("--min-exit", "N", "River", "Mode exit: backbone layers before the first exit.", RiverConfig.min_exit),
    ] = None
    bits: Annotated[
        int | None, option("--bits", "N", "River", "Bits of a river weight: 2, 3, 4 or 8.", QuantConfig.bits)
    ] = None
    group_size: Annotated[
        int | None,
        option("--group-size", "N", "River", "Weights that share a scale: 32, 64 or 128.", QuantConfig.group_size),
    ] = None
    head_bits: Annotated[
        int | None,
        option("--head-bits", "N", "River", "Bits of an untied LM head: 16, 8 or 4.", RiverConfig.head_bits),
    ] = None
    budget: Annotated[
        str | None,
        option("--budget", "SIZE", "Memory", "Device memory to stay within: 8GiB, 600MiB.", "what is free"),
    ] = None
    context: Annotated[
        int | None,
        option(
            "--context",
            "N",
            "Memory",
            "Tokens to plan for, prompt and new; 16k is 16384.",
            RiverConfig.context,
            parser=parse_tokens,
        ),
    ] = None
    kv_bits: Annotated[
        int | None,
        option("--kv-bits", "N", "Memory", "Bits of a cached key or value: 16, 8 or 4.", RiverConfig.kv_bits),
    ] = None
    kv_tier: Annotated[
        str | None,
        option("--kv-tier", "TIER", "Memory", "Where the KV cache rests: device or host.", RiverConfig.kv_tier),
    ] = None
    slots: Annotated[
        int | None, option("--slots", "N", "Memory", "Buffers that streamed layers pass through.", RiverConfig.slots)
    ] = None
    prefetch: Annotated[
        str | None,
        option("--prefetch", "KIND", "Memory", "Ahead of need: none, next, predicted, oracle.", RiverConfig.prefetch),
    ] = None
    link_limit: Annotated[
        str | None,
        option("--link-limit", "SIZE", "Memory", "Bytes a second from disk at most: act a slower disk.", "no limit"),
    ] = None
    on_miss: Annotated[
        str | None,
        option("--on-miss", "WHAT", "Memory", "Mode exit: for a missing layer wait, or exit.", RiverConfig.on_miss),
    ] = None
    prefill: Annotated[
        str | None,
        option("--prefill", "HOW", "River", "Mode exit: a prompt may exit, or backbone, or auto.", RiverConfig.prefill),
    ] = None
    prefill_chunk: Annotated[
        int | None, option("--prefill-chunk", "N", "Memory", "Prompt tokens a layer reads at once.", "what fits best")
    ] = None
    device: Annotated[
        str | None, option("--device", "D", "Memory", "auto, cpu, cuda or cuda:N.", RiverConfig.device)
    ] = None
    dtype: Annotated[
        str | None,
        option("--dtype", "D", "Memory", "auto, float32, bfloat16 or float16.", RiverConfig.dtype),
    ] = None
    cache_dir: Annotated[
        str | None,
        option(
            "--cache-dir",
            "DIR",
            "River",
            "Keep built rivers and unpacked GGUF files here.",
            "$RIVER_OFFLOAD_CACHE, else ~/.cache/river-offload",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        flag("--trust-remote-code", panel="Memory", help="Run code that the checkpoint brings along."),
    ] = False

    def check(self, *, depths_forced: bool = False) -> None:
        """Raises UsageError for a value that `load` would refuse and for an option that cannot take effect."""
        mode = self.parsed_mode()
        for name, value in (("--tau", self.tau), ("--min-exit", self.min_exit)):
            if value is not None and mode.kind != "exit":
                raise UsageError(f"{name} has no effect in mode {mode}: leave it out or use --mode exit")
        for name, value in (("--bits", self.bits), ("--group-size", self.group_size)):
            if value is not None and mode.kind == "backbone":
                raise UsageError(f"{name} has no effect in mode backbone, which has no river: leave it out")
        streaming = (("--prefetch", self.prefetch), ("--link-limit", self.link_limit), ("--slots", self.slots))
        for name, given in streaming:
            if given is not None and mode.kind == "quantized":
                raise UsageError(f"{name} has no effect in mode quantized, which streams nothing: leave it out")
        if self.prefetch == "oracle" and mode.kind == "exit" and not depths_forced:
            raise UsageError("--prefetch oracle knows forced exits alone: give it bench --depths, or use predicted")
        RiverConfig.from_options(model="demo", **self.load_arguments())

    def parsed_mode(self) -> Mode:
        """The mode that is given, that the other options ask for, or the default one. Raises UsageError."""
        try:
            return Mode.parse(mode_of(vars(self)))
        except ValueError as error:
            raise UsageError(f"--mode: {error}") from error

    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `river_offload.load`: what was given, nothing else. Raises UsageError."""
        quant = {name: getattr(self, name) for name in ("bits", "group_size") if getattr(self, name) is not None}
        apart = ("bits", "group_size", "trust_remote_code")
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in apart}
        given = {name: value for name, value in values.items() if value is not None}
        if quant:
            given["quant"] = QuantConfig(**quant)
        if self.trust_remote_code:
            given["trust_remote_code"] = True
        return given


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and how many."""

    max_new_tokens: Annotated[
        int | None, option("--max-new-tokens", "N", "Sampling", "Tokens to write at most.", _NEW_TOKENS)
    ] = None
    temperature: Annotated[
        float | None, option("--temperature", "T", "Sampling", "0 takes the likeliest token.", 0)
    ] = None
    top_p: Annotated[float | None, option("--top-p", "P", "Sampling", "Sample from this share of probability.")] = None
    top_k: Annotated[int | None, option("--top-k", "K", "Sampling", "Sample from the K likeliest tokens.")] = None
    seed: Annotated[int | None, option("--seed", "S", "Sampling", "Make sampling repeatable.")] = None

    @property
    def greedy(self) -> bool:
        return not self.temperature

    def check(self, context: int | None) -> None:
        """Raises UsageError for a value out of range and for an option that cannot take effect."""
        for name, value in (("--top-p", self.top_p), ("--top-k", self.top_k), ("--seed", self.seed)):
            if value is not None and self.greedy:
                raise UsageError(f"{name} has no effect without sampling: give --temperature above 0 or leave it out")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature is {self.temperature}: expected 0 (greedy) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}: expected more than 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k is {self.top_k}: expected a whole number of at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: expected a whole number from 0 to 2^63 - 1")
        if self.max_new_tokens is not None:
            planned = RiverConfig.context if context is None else context
            if self.max_new_tokens < 1:
                raise UsageError(f"--max-new-tokens is {self.max_new_tokens}: expected a whole number of at least 1")
            if self.max_new_tokens >= planned:
                raise UsageError(
                    f"--max-new-tokens {self.max_new_tokens} and a prompt do not fit a context of {planned} tokens: "
                    "raise --context or ask for fewer"
                )


@dataclass(frozen=True)
class BenchOptions:
    """What a bench runs."""

    depths: Annotated[
        str | None,
        option("--depths", "DEPTHS", "Bench", "Force the exits: fixed:D, geometric:MEAN[,full=SHARE] or a trace file."),
    ] = None
    acceptance: Annotated[
        str | None,
        option("--acceptance", "TRACE", "Bench", "Modes lossless and gated: checks find what those of a trace did."),
    ] = None
    tokens: Annotated[int | None, option("--tokens", "N", "Bench", "Tokens to count.", 64)] = None
    prompt_tokens: Annotated[
        int | None, option("--prompt-tokens", "N", "Bench", "Random tokens to start from.", 32)
    ] = None
    seed: Annotated[int | None, option("--seed", "S", "Bench", "Of the prompt and of drawn depths.", 0)] = None

    def applied_to(self, model: ModelOptions) -> ModelOptions:
        """The options of a load with forced exits: mode exit, where no mode is given."""
        return replace(model, mode="exit") if self.depths is not None and model.mode is None else model

    def check(self, model: ModelOptions) -> None:
        """Raises UsageError for a value out of range and for options that exclude each other."""
        for name, value in (("--tokens", self.tokens), ("--prompt-tokens", self.prompt_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: expected a whole number of at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: expected a whole number from 0 to 2^63 - 1")
        if self.depths is not None:
            mode = model.parsed_mode()
            if mode.kind != "exit":
                raise UsageError(f"--depths has no effect in mode {mode}, which fixes them: leave --mode out")
            if model.tau is not None:
                raise UsageError("--tau has no effect with --depths, which forces every exit: leave one of them out")
        if self.acceptance is not None and (not model.parsed_mode().drafts or model.gate == 0):
            where = "with --gate 0" if model.gate == 0 else f"in mode {model.parsed_mode()}"
            raise UsageError(
                f"--acceptance has no effect {where}: nothing is checked there. Use --mode lossless, or gated with a "
                "gate above 0"
            )


@dataclass(frozen=True)
class ShowOptions:
    """What is shown."""

    as_json: Annotated[bool, flag("--json", panel="Output", help="Print one JSON object instead of text.")] = False
    quiet: Annotated[bool, flag("--quiet", "-q", panel="Output", help="Nothing on stderr but errors.")] = False


@dataclass(frozen=True)
class OutputOptions(ShowOptions):
    """What is shown and kept besides the text."""

    trace: Annotated[
        str | None,
        option("--trace", "FILE", "Output", "Write one JSON line per forward pass to a file."),
    ] = None

    def check(self) -> None:
        """Raises UsageError when the trace could not be written later, after minutes of work."""
        if self.trace is None:
            return
        try:
            path = Path(self.trace).resolve()  # where a link leads is where it will be written
            why = "it is no regular file" if path.exists() and not path.is_file() else None
            if why is None:
                # As the trace itself: under a longer name beside it first.
                with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent):
                    pass
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            why = getattr(error, "strerror", None) or str(error)
        if why is not None:
            raise UsageError(
                f"--trace {self.trace} cannot be written: {why}. Name a file in a directory that exists and can be "
                "written to"
            )


def with_options(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(model, group, group, ...)` a typer command that has MODEL and every option of `groups`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(model: str, **values: Any) -> None:
            command(model, *(group(**{item.name: values[item.name] for item in fields(group)}) for group in groups))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("model", keyword, annotation=Annotated[str, _MODEL])]
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            for item in fields(group):
                parameters.append(
                    inspect.Parameter(item.name, keyword, default=item.default, annotation=hints[item.name])
                )
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        # typer also resolves annotations by name; those of the command itself are not its options.
        wrapper.__annotations__ = {}
        return wrapper

    return decorate
