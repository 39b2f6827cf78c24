"""Agreement and KL against the backbone over backbone layers a token: tau swept, gate swept, lossless.

    python tools/fidelity.py demo --prompts questions.jsonl --count 20 --out points.json --plot curves.svg
    python tools/fidelity.py --read points.json other.json --plot both.svg

Points are written after each prompt, so a run that is stopped has said something.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prompts import add_prompt_options, chat_inputs, read_prompts

import river_offload
from river_offload.errors import RiverError, UsageError
from river_offload.eval.fidelity import (
    Point,
    Scored,
    drafted_blocks,
    free_running,
    gated,
    point,
    reference,
    teacher_forced_exit,
)
from river_offload.eval.fidelity_plot import draw

Key = tuple[str, float | None, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as everywhere: 0, or that of the error, which is told on stderr."""
    asked = _arguments(arguments)
    try:
        points = _read(asked.read) if asked.read else measure(asked)
        show(points)
        if asked.plot:
            draw(points, Path(asked.plot), asked.title)
    except RiverError as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def show(points: Sequence[Point]) -> None:
    """Print a table."""
    print("| curve | setting | text | layers a token | agreement | KL | tokens |\n|---|---|---|---|---|---|---|")
    for one in points:
        setting = "" if one.setting is None else f"{one.setting:g}"
        print(
            f"| {one.curve} | {setting} | {one.forcing} | {one.layers_per_token:.1f} | {one.agreement:.3f} "
            f"| {one.kl:.3f} | {one.tokens} |"
        )


def measure(asked: argparse.Namespace) -> list[Point]:
    """Run every setting on every prompt. Raises UsageError and what `load` raises."""
    if not asked.prompts:
        raise UsageError("give --prompts to measure, or --read to draw points of earlier runs")
    prompts = read_prompts(asked)
    model = river_offload.load(
        asked.model,
        mode="lossless",
        also_modes=("exit", "gated", "backbone"),
        budget=asked.budget,
        context=asked.context,
        min_exit=asked.min_exit,
    )
    scored: dict[Key, list[Scored]] = defaultdict(list)
    points: list[Point] = []
    with model.river:
        for number, text in enumerate(prompts):
            for key, one in _one_prompt(model, text, asked):
                scored[key].append(one)
            points = [point(curve, setting, forcing, found) for (curve, setting, forcing), found in scored.items()]
            if asked.out:
                Path(asked.out).write_text(json.dumps([asdict(one) for one in points]), encoding="utf-8")
            print(f"prompt {number + 1} of {asked.count}", flush=True)
    return points


def _one_prompt(model: Any, text: str, asked: argparse.Namespace) -> Iterator[tuple[Key, Scored]]:
    river = model.river
    prompt = chat_inputs(river.tokenizer, text)["input_ids"]
    whole = reference(model, prompt, asked.tokens)
    blocks = drafted_blocks(model, whole, prompt.shape[1], asked.block)
    walk = (asked.block, river.draft_depth, river.num_layers)
    yield ("lossless", None, "teacher"), gated(blocks, None, *walk)
    for gate in asked.gates:
        yield ("gate", gate, "teacher"), gated(blocks, gate, *walk)
    for tau in asked.taus:
        yield ("tau", tau, "teacher"), teacher_forced_exit(model, whole, prompt.shape[1], tau)
    if asked.teacher_only:
        return
    free: list[tuple[str, float | None, dict[str, Any]]] = [("lossless", None, {"mode": "lossless"})]
    free += [("gate", gate, {"mode": "gated", "gate": gate}) for gate in asked.gates]
    free += [("tau", tau, {"mode": "exit", "tau": tau}) for tau in asked.taus]
    for curve, setting, options in free:
        drafts = {} if curve == "tau" else {"draft": asked.block}
        yield (curve, setting, "free"), free_running(model, prompt, asked.tokens, **options, **drafts)


def _read(paths: Sequence[str]) -> list[Point]:
    """Points of earlier runs. Raises UsageError for files that hold none."""
    points = []
    for path in paths:
        try:
            points += [Point(**values) for values in json.loads(Path(path).read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"--read {path}: expected points that --out has written: {error}") from error
    return points


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="as for river-offload")
    parser.add_argument("--read", nargs="+", help="draw points of earlier runs instead of measuring")
    add_prompt_options(parser, count=20)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--block", type=int, default=16, help="tokens drafted before a check")
    parser.add_argument("--taus", type=float, nargs="*", default=(0.5, 0.9, 0.95, 0.97, 0.975, 0.98, 0.985))
    parser.add_argument("--gates", type=float, nargs="*", default=(0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8))
    parser.add_argument("--min-exit", type=int, default=2)
    parser.add_argument("--teacher-only", action="store_true", help="only on the backbone's text")
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", help="write the points here, JSON")
    parser.add_argument("--plot", help="write the picture here")
    parser.add_argument("--title", default="agreement with the backbone", help="of the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
