"""The prompts that the tools of this folder work through: a field of JSON lines, gzipped or not."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from river_offload.errors import UsageError


def add_prompt_options(parser: argparse.ArgumentParser, *, count: int, required: bool = False) -> None:
    """--prompts (`required` or not), --field, --count and --skip; `count` is the default of --count."""
    parser.add_argument("--prompts", metavar="FILE", required=required, help="JSON lines, may be gzipped")
    parser.add_argument("--field", default="question", help="where a line has its prompt")
    parser.add_argument("--count", type=int, default=count, help="prompts to use")
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out at the beginning")


def read_prompts(asked: argparse.Namespace) -> list[str]:
    """The prompts that the options of `add_prompt_options` ask for.

    Raises:
        UsageError: no such file, no JSON lines, no such field, or fewer prompts than asked for.
    """
    path = Path(asked.prompts)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        lines = [line for line in text.splitlines() if line.strip()]
        wanted = lines[asked.skip : asked.skip + asked.count]
        prompts = [json.loads(line)[asked.field] for line in wanted]
    except (OSError, EOFError) as error:
        raise UsageError(f"--prompts {path}: cannot be read: {error}") from error
    except ValueError as error:
        raise UsageError(f"--prompts {path}: expected JSON lines: {error}") from error
    except (KeyError, TypeError) as error:
        raise UsageError(f"--prompts {path}: a line has no field {asked.field!r}: name it with --field") from error
    if asked.count < 1 or asked.skip < 0 or len(prompts) < asked.count:
        raise UsageError(f"--prompts {path}: found {len(lines)}, which cannot give {asked.count} after {asked.skip}")
    return prompts


def chat_inputs(tokenizer: Any, prompt: str) -> Any:
    """What `generate` takes for `prompt` as the first message of a chat: ids and mask, int64 [1, tokens]."""
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
