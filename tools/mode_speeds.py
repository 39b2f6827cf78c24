"""The modes side by side on one loaded model, from a disk that is read anew for every pass, and accelerate after them.

    python tools/mode_speeds.py demo --budget 190MiB --prompts questions.jsonl --count 3 --tokens 64 --traces runs
    python tools/mode_speeds.py DIR --budget 8GiB --tokens 24 --replay runs

The first writes text. The second measures a checkpoint of random weights, whose exits and drafts mean nothing: they are
those that the first has written to its folder. All modes share one load, so all have the same layers on the device, and
no prompt is timed. `expected` is the arithmetic: the tokens of a round by the seconds of its check and its drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prompts import add_prompt_options, chat_inputs, read_prompts

import river_offload
from policies.acceptance import Acceptance
from policies.depths import Depths
from river_offload.checkpoint.source import resolve
from river_offload.config import default_cache_dir, parse_size
from river_offload.errors import RiverError, UsageError
from river_offload.eval.request import read_acceptance, read_depths
from river_offload.progress import Silent
from river_offload.trace import PassageRecord, Trace

SETTINGS: dict[str, dict[str, Any]] = {
    "backbone": {"mode": "backbone"},
    "exit, tau .5": {"mode": "exit", "tau": 0.5},
    "exit, tau .95": {"mode": "exit", "tau": 0.95},
    "gated, gate .2": {"mode": "gated", "gate": 0.2},
    "gated, gate .5": {"mode": "gated", "gate": 0.5},
    "lossless": {"mode": "lossless"},
    "quantized": {"mode": "quantized"},
}
_BACKBONE_TOKENS = 12
"""Of mode backbone and of accelerate on a replay, where every token takes as long as the one before."""


@dataclass(frozen=True)
class Speed:
    """What one setting did after its prompts."""

    name: str
    tokens: int
    seconds: float
    bytes_streamed: int
    layers: int
    """Backbone layers run."""
    drafts: int = 0
    draft_s: float = 0.0
    checks: int = 0
    check_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def expected_tokens_per_s(self) -> float | None:
        """By the seconds inside the layers alone: what choosing tokens takes is left out."""
        return self.tokens / (self.draft_s + self.check_s) if self.checks else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as everywhere: 0, or that of the error, which is told on stderr."""
    asked = _arguments(arguments)
    try:
        if asked.only_accelerate:
            print(json.dumps(asdict(_accelerate(asked))))
            return 0
        found = list(measure(asked))
    except RiverError as error:
        print(f"mode_speeds: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps([asdict(one) for one in found]) if asked.json else "\n".join(table(found)))
    return 0


def measure(asked: argparse.Namespace) -> Iterator[Speed]:
    """One setting after the other. Raises UsageError and what `load` raises."""
    source = _Source.of(asked)
    model = river_offload.load(
        asked.model, mode="lossless", also_modes=("exit", "gated", "backbone", "quantized"), budget=asked.budget,
        context=asked.context, slots=asked.slots, draft=asked.draft, dtype=asked.dtype, link_limit=asked.link_limit,
        cache_dir=asked.cache_dir,
    )  # fmt: skip
    with model.river as river:
        placement = river.placement
        resident, streamed = len(placement.resident_layers), len(placement.streamed_layers)
        print(f"resident {resident}, streamed {streamed} layers of {placement.slot_bytes} bytes", file=sys.stderr)
        for name in asked.settings:
            runs = _replayed(model, name, source, asked) if asked.replay else _written(model, name, source, asked)
            speed = _sum(name, runs)
            print(f"{name}: {speed.tokens_per_s:.3g} tok/s", file=sys.stderr, flush=True)
            yield speed
    if asked.accelerate:
        yield _in_a_process_of_its_own(asked)


@dataclass(frozen=True)
class _Source:
    """What is run, all read before anything is loaded."""

    prompts: Sequence[str]
    depths: Mapping[str, Depths]
    acceptance: Acceptance | None

    @classmethod
    def of(cls, asked: argparse.Namespace) -> _Source:
        """Raises UsageError for what is missing, or has no effect."""
        if (asked.prompts is None) == (asked.replay is None):
            raise UsageError("give --prompts for a trained model, or --replay for one of random weights")
        if asked.tokens < 2:
            raise UsageError(f"--tokens {asked.tokens}: expected at least 2, the first is not timed")
        if asked.replay is None:
            return cls(read_prompts(asked), {}, None)
        if asked.traces is not None:
            raise UsageError("--traces has no effect with --replay: leave it out")
        modes = {name: SETTINGS[name]["mode"] for name in asked.settings}
        folder = Path(asked.replay)
        exits = {name: read_depths(str(folder / _file(name))) for name, mode in modes.items() if mode == "exit"}
        drafts = any(mode in ("lossless", "gated") for mode in modes.values())
        # A gate leaves some drafts unjudged: the chain is that of lossless.
        return cls((), exits, read_acceptance(str(folder / _file("lossless"))) if drafts else None)


def table(found: Sequence[Speed]) -> list[str]:
    """Markdown, one line for each setting."""
    base = next((one.tokens_per_s for one in found if one.name == "backbone"), None)
    lines = [
        "| setting | tok/s | of backbone | layers a token | MiB a token | tokens a check | s a check | s a draft "
        "| expected tok/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        checks = one.checks or None
        cells = [
            one.name,
            f"{one.tokens_per_s:.3g}",
            "" if base is None else f"{one.tokens_per_s / base:.2f}",
            f"{one.layers / one.tokens:.1f}",
            f"{one.bytes_streamed / one.tokens / 2**20:.1f}",
            "" if checks is None else f"{one.tokens / checks:.2f}",
            "" if checks is None else f"{one.check_s / checks:.3g}",
            f"{one.draft_s / one.drafts:.3g}" if one.drafts else "",
            "" if one.expected_tokens_per_s is None else f"{one.expected_tokens_per_s:.3g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _written(model: Any, name: str, source: _Source, asked: argparse.Namespace) -> Iterator[Speed]:
    """Text of prompts in their chat template, greedily; with --traces the passages of all of them are kept."""
    river, records = model.river, []
    for text in source.prompts:
        inputs = chat_inputs(river.tokenizer, text)
        with river.using(**SETTINGS[name]):
            yield _run(model, name, inputs, asked.tokens)
        records += river.account.records
    if asked.traces:
        folder = Path(asked.traces)
        folder.mkdir(parents=True, exist_ok=True)
        Trace(river.num_layers, {"setting": name}, records).write_jsonl(folder / _file(name))


def _replayed(model: Any, name: str, source: _Source, asked: argparse.Namespace) -> Iterator[Speed]:
    """Random tokens, with the exits and the luck of a trace."""
    import torch

    river, setting = model.river, SETTINGS[name]
    slow = name == "backbone"
    tokens = min(asked.tokens, _BACKBONE_TOKENS) if slow else asked.tokens
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    inputs = {"input_ids": torch.randint(0, vocabulary, (1, 32), generator=generator).to(model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if setting["mode"] == "exit":
        try:
            depths = source.depths[name].draw(tokens, river.num_layers, lowest=1)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
        with river.using(depths=depths):
            yield _run(model, name, inputs, tokens)
        return
    acceptance = source.acceptance if setting["mode"] in ("lossless", "gated") else None
    with river.using(**setting, acceptance=acceptance):
        yield _run(model, name, inputs, tokens)


def _run(model: Any, name: str, inputs: Any, tokens: int) -> Speed:
    river = model.river
    model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    account, records = river.account, river.account.records
    later = [record for record in records if record.path != "prefill"]
    prefill_s = sum(record.seconds for record in records if record.path == "prefill")

    def of(path: str) -> list[PassageRecord]:
        return [record for record in later if record.path == path]

    return Speed(
        name,
        account.new_tokens - 1,
        account.seconds - prefill_s,
        sum(record.bytes_streamed for record in later),
        sum(record.depth for record in later),
        len(of("draft")),
        sum(record.seconds for record in of("draft")),
        len(of("check")),
        sum(record.seconds for record in of("check")),
    )


def _sum(name: str, runs: Iterator[Speed]) -> Speed:
    values = [list(asdict(run).values())[1:] for run in runs]
    return Speed(name, *(sum(column) for column in zip(*values, strict=True)))


def _in_a_process_of_its_own(asked: argparse.Namespace) -> Speed:
    """Accelerate, after our own model has gone."""
    command = [sys.executable, __file__, *asked.given, "--only-accelerate"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"accelerate ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return Speed(**json.loads(done.stdout.splitlines()[-1]))


def _accelerate(asked: argparse.Namespace) -> Speed:
    """What transformers does with `device_map="auto"` and as much memory. It keeps what it reads in the page cache,
    which is emptied before; a control group around this program limits both alike."""
    import torch
    from transformers import AutoModelForCausalLM

    cache_dir = Path(asked.cache_dir) if asked.cache_dir else default_cache_dir()
    directory = resolve(asked.model, cache_dir=cache_dir, dtype="auto", progress=Silent()).directory
    for file in directory.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", device_map="auto", offload_folder=folder,
            max_memory={"cpu": parse_size(asked.budget)},
        )  # fmt: skip
        ids = torch.randint(0, model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
        tokens = min(asked.tokens, _BACKBONE_TOKENS)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        seconds = []
        for count in (1, tokens + 1):
            started_s = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
            seconds.append(time.perf_counter() - started_s)
    return Speed("accelerate", tokens, seconds[1] - seconds[0], 0, tokens * model.config.num_hidden_layers)


def _file(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "") + ".jsonl"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for river-offload")
    parser.add_argument("--budget", required=True)
    add_prompt_options(parser, count=3)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each")
    parser.add_argument("--traces", help="a folder: keep what the modes did, for --replay")
    parser.add_argument("--replay", help="a folder that --traces has written")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="NAME")
    parser.add_argument("--accelerate", action="store_true", help="measure accelerate's disk offload, too")
    parser.add_argument("--draft", default="adaptive")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--link-limit", help="hold the link to so many bytes a second")
    parser.add_argument("--cache-dir")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-accelerate", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    asked.given = given
    return asked


if __name__ == "__main__":
    sys.exit(main())
