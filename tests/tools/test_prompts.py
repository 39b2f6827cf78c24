"""The prompts of the tools: which lines are used, and what is said of a file that has none."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from types import ModuleType

import pytest

from river_offload.errors import UsageError

LINES = '{"question": "a", "other": "x"}\n\n{"question": "b"}\n{"question": "c"}\n'


def _asked(tool: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tool.add_prompt_options(parser, count=2)
    return parser.parse_args(arguments)


def test_lines_are_counted_without_empty_ones_and_may_be_compressed(tool: ModuleType, tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.jsonl", tmp_path / "any-name"
    plain.write_text(LINES)
    packed.write_bytes(gzip.compress(LINES.encode()))
    for path in (plain, packed):
        assert tool.read_prompts(_asked(tool, "--prompts", str(path))) == ["a", "b"]
        assert tool.read_prompts(_asked(tool, "--prompts", str(path), "--skip", "1")) == ["b", "c"]
    assert tool.read_prompts(_asked(tool, "--prompts", str(plain), "--field", "other", "--count", "1")) == ["x"]


@pytest.mark.parametrize(
    ("data", "more", "message"),
    (
        (None, [], "cannot be read"),
        (gzip.compress(LINES.encode(), mtime=0)[:-9], [], "cannot be read"),
        (b"why?\n", [], "expected JSON lines"),
        (b"\xff\xfe\n", [], "expected JSON lines"),
        (b'"text"\n', [], "no field 'question'"),
        (LINES.encode(), ["--field", "answer"], "no field 'answer'"),
        (LINES.encode(), ["--count", "4"], "found 3, which cannot give 4 after 0"),
        (LINES.encode(), ["--skip", "2"], "found 3, which cannot give 2 after 2"),
        (LINES.encode(), ["--count", "0"], "cannot give 0"),
        (LINES.encode(), ["--skip", "-1", "--count", "1"], "after -1"),
    ),
)
def test_what_is_wrong_with_the_file_is_said(
    data: bytes | None, more: list[str], message: str, tool: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        tool.read_prompts(_asked(tool, "--prompts", str(path), *more))
