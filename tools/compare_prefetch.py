"""The kinds of prefetch side by side on one loaded model, in turns: the same forced depths under each.

    python tools/compare_prefetch.py MODEL --budget 8GiB --context 256 --slots 4 --depths geometric:3,full=0.08
        --tokens 50 --rounds 2 [--link-limit 1GB] [--json]

A disk's rate drifts by more than prefetch can gain, so the kinds take turns, and `--link-limit` can hold the disk to a
rate that it always reaches. Every run begins with a prompt through all layers, which leaves the slots as they would be.
`recovered` is the share of the stall between `none` and `oracle` that a kind avoids.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policies.prefetch import KINDS
from river_offload.config import RiverConfig
from river_offload.errors import RiverError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as everywhere: 0, or that of the error, which is told on stderr."""
    options = _options(arguments)
    try:
        found = compare(options)
    except RiverError as error:
        print(f"compare_prefetch: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found) if options.json else "\n".join(_table(found)))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Load once, run every kind in every round. Raises UsageError and what `load` raises."""
    if options.rounds < 1:
        raise UsageError(f"rounds is {options.rounds}: expected a whole number of at least 1")
    config = RiverConfig.from_options(
        model=options.model, mode="exit", budget=options.budget, context=options.context, slots=options.slots,
        link_limit=options.link_limit, cache_dir=options.cache_dir,
    )  # fmt: skip
    from river_offload.eval.bench import measure  # brings torch
    from river_offload.eval.request import Request, forced_depths, read_depths
    from river_offload.loading import load_config
    from river_offload.streaming import make_prefetcher

    request = Request(tokens=options.tokens, depths=read_depths(options.depths), seed=options.seed)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    model = load_config(config)
    with model.river as river:
        if not river.placement.streamed_layers:
            raise UsageError("every layer fits the budget, there is nothing to fetch ahead: give a smaller --budget")
        forced = forced_depths(request, river.num_layers, config.min_exit)
        for _ in range(options.rounds):
            for kind in KINDS:
                river.store.prefetcher = make_prefetcher(replace(config, prefetch=kind), river.num_layers)
                run = measure(model, request, forced)
                runs[kind].append(_figures(run.records, run.seconds))
                if not options.json:
                    print(f"{kind:10} {runs[kind][-1]}", file=sys.stderr, flush=True)
    return _summed(runs)


def _figures(records: Sequence[Any], seconds: float) -> dict[str, float]:
    return {
        "tokens": len(records),
        "seconds": seconds,
        "stall_s": sum(record.wait_s for record in records),
        "misses": sum(record.misses for record in records),
        "moved_bytes": sum(record.bytes_streamed for record in records),
        "wasted_bytes": sum(record.wasted_bytes for record in records),
        "copy_s": sum(record.copy_s for record in records),
    }


def _summed(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """By kind the sums over the rounds, and what follows from them."""
    found: dict[str, Any] = {}
    for kind, several in runs.items():
        found[kind] = {name: sum(one[name] for one in several) for name in several[0]}
    none_s, oracle_s = found["none"]["stall_s"], found["oracle"]["stall_s"]
    for kind, figures in found.items():
        figures["tokens_per_s"] = figures["tokens"] / figures["seconds"]
        figures["recovered"] = (none_s - figures["stall_s"]) / (none_s - oracle_s) if none_s != oracle_s else None
        moved = figures["moved_bytes"]
        figures["wasted_share"] = figures["wasted_bytes"] / moved if moved else 0.0
        figures["stalls_of_rounds_s"] = [one["stall_s"] for one in runs[kind]]
    return found


def _table(found: dict[str, Any]) -> list[str]:
    lines = ["kind        tok/s   stall s  recovered  wasted   link bytes/s  stalls of the rounds"]
    for kind, of in found.items():
        rate = of["moved_bytes"] / of["copy_s"] if of["copy_s"] else 0.0
        recovered = "-" if of["recovered"] is None else f"{of['recovered']:.0%}"
        lines.append(
            f"{kind:10} {of['tokens_per_s']:6.2f}  {of['stall_s']:8.2f}  {recovered:>9}  {of['wasted_share']:6.1%}  "
            f"{rate:12.3g}  {', '.join(f'{stall_s:.2f}' for stall_s in of['stalls_of_rounds_s'])}"
        )
    return lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The kinds of prefetch side by side on one loaded model.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--depths", default="geometric:3,full=0.08")
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--link-limit", help="hold the link to so many bytes a second")
    parser.add_argument("--cache-dir")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
