"""Draft lengths side by side: tokens per check, draft steps and bytes per token, speed, and whether the text is right.

    python tools/draft_table.py demo --prompts questions.jsonl --field question --count 20 --budget 500MiB --context 512

Every prompt is written once in mode backbone and once for each draft length in mode lossless (or gated), greedily, by
one loaded model, so all have the same layers on the device; with --plain by transformers itself before them. `same
text` counts those that are like the first of them. Bytes are those after the prompt. Each finished prompt is one JSON
line on standard output; the table of all so far follows at the end, or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from prompts import add_prompt_options, chat_inputs, read_prompts
from transformers import AutoModelForCausalLM

import river_offload
from river_offload.checkpoint.source import resolve
from river_offload.config import default_cache_dir
from river_offload.errors import RiverError
from river_offload.progress import Silent

DRAFTS = ("backbone", "2", "4", "8", "16", "adaptive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as everywhere: 0, or that of the error, which is told on stderr."""
    try:
        compare(_arguments(arguments))
    except RiverError as error:
        print(f"draft_table: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def compare(asked: argparse.Namespace) -> None:
    """Run the prompts, print a line for each and the table. Raises UsageError and what `load` raises."""
    prompts = read_prompts(asked)
    mode = "lossless" if asked.gate is None else "gated"
    options = {"budget": asked.budget, "context": asked.context, "dtype": asked.dtype, "slots": asked.slots}
    options["link_limit"] = asked.link_limit
    if asked.gate is not None:
        options["gate"] = asked.gate
    plain = _plain_model(asked) if asked.plain else None
    model = river_offload.load(asked.model, mode=mode, also_modes=("backbone",), **options)
    with model.river:
        placement = model.river.placement
        print(
            f"resident {len(placement.resident_layers)}, streamed {len(placement.streamed_layers)} layers", flush=True
        )
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        try:
            for number, text in enumerate(prompts):
                for name, row in _one_prompt(model, plain, text, asked):
                    rows[name].append(row)
                    print(json.dumps({"prompt": number, "draft": name, **row}), flush=True)
        except KeyboardInterrupt:
            pass
        print("\n".join(table(rows)))


def table(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Markdown, one line for each way of drafting."""
    lines = [
        "| draft | prompts | same text | tokens per check | draft steps per token | MiB per token | tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        tokens, checks = sum(row["tokens"] for row in found), sum(row["checks"] for row in found)
        after_first = tokens - len(found)  # the prompt gives the first
        seconds = sum(row["seconds"] for row in found)
        lines.append(
            f"| {name} | {len(found)} | {sum(row['same'] for row in found)} | {after_first / max(checks, 1):.2f} "
            f"| {sum(row['drafted'] for row in found) / after_first:.2f} "
            f"| {sum(row['bytes'] for row in found) / after_first / 2**20:.2f} | {tokens / seconds:.2f} |"
        )
    return lines


def _plain_model(asked: argparse.Namespace) -> Any:
    """The same weights without us."""
    found = resolve(asked.model, cache_dir=default_cache_dir(), dtype=asked.dtype, progress=Silent())
    return AutoModelForCausalLM.from_pretrained(found.directory, dtype=asked.dtype)


def _one_prompt(model: Any, plain: Any, text: str, asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    inputs = chat_inputs(model.river.tokenizer, text)
    expected = None
    if plain is not None:
        expected = plain.generate(**inputs, max_new_tokens=asked.tokens, do_sample=False)[0].tolist()
    for name in asked.drafts:
        setting = {"mode": "backbone"} if name == "backbone" else {"draft": name}
        with model.river.using(**setting):
            started_s = time.perf_counter()
            ids = model.generate(**inputs, max_new_tokens=asked.tokens, do_sample=False)[0].tolist()
            seconds = time.perf_counter() - started_s
        expected = ids if expected is None else expected
        records = model.river.account.records
        yield (
            name,
            {
                "tokens": len(ids) - inputs["input_ids"].shape[1],
                "same": ids == expected,
                "checks": sum(record.path in ("check", "decode") for record in records),
                "drafted": sum(record.path == "draft" for record in records),
                "bytes": sum(record.bytes_streamed for record in records if record.path != "prefill"),
                "seconds": seconds,
                "draft_s": sum(record.seconds for record in records if record.path == "draft"),
                "check_s": sum(record.seconds for record in records if record.path == "check"),
            },
        )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for river-offload")
    add_prompt_options(parser, count=20, required=True)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="lengths, adaptive, or backbone for no drafts")
    parser.add_argument("--gate", type=float, help="mode gated with this gate instead of lossless")
    parser.add_argument("--plain", action="store_true", help="hold all texts against those of transformers itself")
    parser.add_argument("--link-limit", help="hold the link to so many bytes a second")
    parser.add_argument("--budget", default="500MiB")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="float32: text of two ways to compute is comparable")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
