"""Fits the predictor of exits to traces and says how far its probabilities can be trusted.

    river-offload generate MODEL ... --trace run.jsonl
    python tools/fit_predictor.py run.jsonl [more.jsonl ...] [--out coefficients.json] [--json]

or, for many prompts at once, it writes the traces' passages itself:

    python tools/fit_predictor.py --model demo --prompts questions.jsonl --count 20 --tokens 100 --tau 0.97

The predictor learns as it goes, as it does at run time: each passage is first predicted, then learned from. The Brier
score stands beside that of the running base rate (what share of the passages so far ran that layer), the reliability
beside what happened, by tenths of the probability. Traces of one call share num_layers, tau and min_exit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prompts import add_prompt_options, chat_inputs, read_prompts

from policies.calibration import Calibration
from policies.predictor import DepthPredictor, Moment
from policies.simulate import steps_of
from river_offload.errors import RiverError, UsageError
from river_offload.trace import PassageRecord, Trace

ENOUGH_SAMPLES = 50
"""In a decile, for its error to be told."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as everywhere: 0, or that of the error, which is told on stderr."""
    options = _options(arguments)
    try:
        traces = [_generated(options)] if options.model else [Trace.read_jsonl(path) for path in options.traces]
        predictor = fit(traces)
        if options.out:
            Path(options.out).write_text(predictor.to_json() + "\n", encoding="utf-8")
    except RiverError as error:
        print(f"fit_predictor: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"fit_predictor: {options.out} cannot be written: {error.strerror}", file=sys.stderr)
        return UsageError("").exit_code
    found = {"passages": sum(len(trace.records) for trace in traces), **figures(predictor)}
    print(json.dumps(found) if options.json else "\n".join(lines(found)))
    return 0


def fit(traces: Iterable[Trace]) -> DepthPredictor:
    """A predictor that went through all passages whose depth was free. Raises UsageError for traces that do not belong
    together, or hold none."""
    predictor, settings = None, None
    for trace in traces:
        mine = {name: trace.about.get(name) for name in ("tau", "min_exit")} | {"num_layers": trace.num_layers}
        if settings not in (None, mine):
            raise UsageError(f"traces of different runs: {settings} and {mine}; fit those of one kind at a time")
        if predictor is None:
            tau, min_exit = mine["tau"], mine["min_exit"]
            if tau is None or min_exit is None:
                raise UsageError("a trace without tau and min_exit in its head: write it again with this version")
            predictor, settings = DepthPredictor(trace.num_layers, float(tau), int(min_exit)), mine
        _learn(predictor, trace.records)
    if predictor is None or not predictor.calibration().samples:
        raise UsageError("no passage with a free exit: expected traces of mode exit without forced depths")
    return predictor


def figures(predictor: DepthPredictor) -> dict[str, Any]:
    """The calibration at both moments, as plain values."""
    moments: tuple[Moment, ...] = ("begin", "signal")
    return {moment: _calibration(predictor.calibration(moment)) for moment in moments}


def lines(found: dict[str, Any]) -> list[str]:
    """The figures for people."""
    said = [f"{found['passages']} passages"]
    names = {"begin": "before the first layer", "signal": "after each signal"}
    for moment, name in names.items():
        one = found[moment]
        worst = "too few samples in every decile to tell the reliability"
        if any(decile["count"] >= ENOUGH_SAMPLES for decile in one["deciles"]):
            worst = f"worst decile of {ENOUGH_SAMPLES} samples or more off by {one['worst_decile']:.3f}"
        said.append(
            f"{name}: Brier {one['brier']:.4f}, that of the base rate {one['base_rate_brier']:.4f} "
            f"({one['samples']} samples); {worst}"
        )
        for tenth, decile in enumerate(one["deciles"]):
            if decile["count"]:
                said.append(
                    f"  {tenth / 10:.1f}-{tenth / 10 + 0.1:.1f}: {decile['count']:6} samples, "
                    f"said {decile['mean_probability']:.3f}, happened {decile['observed_rate']:.3f}"
                )
    return said


def _learn(predictor: DepthPredictor, records: Sequence[PassageRecord]) -> None:
    for step in steps_of(records):
        if step.known or any(signal != signal for signal in step.signals):
            continue  # the depth was fixed or forced: nothing to predict
        predictor.begin(step.new_tokens, step.margin)
        for layers_run, signal in enumerate(step.signals, start=max(predictor.min_exit, 1)):
            if layers_run < predictor.num_layers:
                predictor.observe_signal(layers_run, signal)
        predictor.end(step.depth)


def _calibration(found: Calibration) -> dict[str, Any]:
    return {
        "samples": found.samples,
        "brier": found.brier,
        "base_rate_brier": found.base_rate_brier,
        "worst_decile": found.worst_decile(ENOUGH_SAMPLES),
        "deciles": [asdict(decile) for decile in found.deciles],
    }


def _generated(options: argparse.Namespace) -> Trace:
    """The trace of the model answering the prompts, greedily."""
    import river_offload  # brings torch

    prompts = read_prompts(options)
    model = river_offload.load(options.model, mode="exit", tau=options.tau, context=options.context)
    with model.river as river:
        for number, prompt in enumerate(prompts, start=1):
            inputs = chat_inputs(river.tokenizer, prompt)
            model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
            print(f"\r{number} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        trace: Trace = river.trace
        return trace


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit the predictor of exits to traces, and score it.")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="what --trace wrote")
    parser.add_argument("--out", metavar="FILE", help="write the coefficients as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", help="generate the passages with this model instead of reading traces")
    add_prompt_options(parser, count=20)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens for each")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tau", type=float, default=0.5)
    options = parser.parse_args(arguments)
    if bool(options.traces) == bool(options.model) or bool(options.model) != bool(options.prompts):
        parser.error("give traces, or --model and --prompts")
    return options


if __name__ == "__main__":
    sys.exit(main())
