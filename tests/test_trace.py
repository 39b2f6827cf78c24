from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from river_offload.errors import UsageError
from river_offload.trace import PassageRecord, Trace

PREFILL = PassageRecord(
    index=0,
    new_tokens=7,
    batch=1,
    cached_tokens=0,
    path="prefill",
    mode="exit",
    depth=4,
    signals=[0.1, 0.2, 0.3],
    wait_s=0.5,
    bytes_streamed=1000,
    seconds=2.0,
)
DECODE = replace(PREFILL, index=1, new_tokens=1, cached_tokens=7, path="decode", depth=1, signals=[0.9])


def a_trace() -> Trace:
    return Trace(4, about={"model": "demo", "tau": 0.5}, records=[PREFILL, DECODE, replace(DECODE, index=2, depth=2)])


def test_mean_depth_counts_decode_passages_only() -> None:
    trace = Trace(4)
    assert trace.mean_depth is None
    trace.append(PREFILL)
    assert trace.mean_depth is None
    trace.append(DECODE)
    trace.append(replace(DECODE, depth=2))
    assert trace.mean_depth == 1.5
    trace.clear()
    assert trace == Trace(4)


def test_mean_depth_of_drafts_counts_the_tokens_that_were_kept() -> None:
    draft = replace(DECODE, path="draft", mode="lossless", depth=1)
    check = replace(DECODE, path="check", mode="lossless", depth=4, new_tokens=3, accepted=1, decided=2, added=2)
    assert Trace(4, records=[PREFILL, draft, draft, check]).mean_depth == 6 / 2
    at_the_end = replace(check, accepted=2)  # the text ended with the second drafted token
    assert Trace(4, records=[PREFILL, draft, draft, at_the_end]).mean_depth == 6 / 2
    gated = replace(check, mode="gated", accepted=2, decided=1, added=3)
    assert Trace(4, records=[PREFILL, draft, draft, gated]).mean_depth == 6 / 3
    assert Trace(4, records=[PREFILL, draft]).mean_depth is None


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    a_trace().write_jsonl(path)
    header, *records = map(json.loads, path.read_text().splitlines())
    assert header == {"version": 1, "num_layers": 4, "model": "demo", "tau": 0.5}
    assert records[0]["signals"] == [0.1, 0.2, 0.3]
    assert Trace.read_jsonl(path) == a_trace()
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_a_signal_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    Trace(4, records=[replace(DECODE, signals=[0.5, math.nan])]).write_jsonl(path)
    assert "NaN" not in path.read_text()
    first, second = Trace.read_jsonl(path).records[0].signals
    assert first == 0.5
    assert math.isnan(second)


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_older_file_and_nothing_else(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("older")

    def fail(descriptor: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        a_trace().write_jsonl(path)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent/trace.jsonl cannot be written: No such file"):
        a_trace().write_jsonl(tmp_path / "absent" / "trace.jsonl")


def test_a_device_is_not_replaced_and_a_link_stays_a_link(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="no regular file"):
        a_trace().write_jsonl(fifo)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    a_trace().write_jsonl(link)
    assert link.is_symlink()
    assert Trace.read_jsonl(tmp_path / "target") == a_trace()


def line(**changes: object) -> bytes:
    return json.dumps(DECODE.to_dict() | changes).encode()


HEADER = b'{"version": 1, "num_layers": 4}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty: expected a header line"),
        ([b'{"num_layers": 4}'], "line 1: version is None: this release reads version 1"),
        ([b'{"version": 2, "num_layers": 4}'], "line 1: version is 2"),
        ([b'{"version": 1}'], "line 1: num_layers is None"),
        ([line()], "line 1: version is None"),
        ([HEADER, line(), line()[:40]], r"line 3: not JSON .*; the file may have been cut short"),
        ([HEADER, b"\xff"], "line 2: not JSON"),
        ([HEADER, b"[1]"], "line 2: found list, expected a JSON object"),
        ([HEADER, b'{"index": 0}'], "line 2: new_tokens is missing"),
        ([HEADER, line(speed=1)], "line 2: unknown field speed: expected index, "),
        ([HEADER, line(depth=-1)], "line 2: depth is -1: expected a whole number of at least 0"),
        ([HEADER, line(depth=True)], "line 2: depth is True"),
        ([HEADER, line(path="rough")], "line 2: path is 'rough': expected one of prefill, decode, draft, check"),
        ([HEADER, line(mode=1)], "line 2: mode is 1"),
        ([HEADER, line(signals=["x"])], r"line 2: signals is \['x'\]"),
        ([HEADER, line(seconds="1")], "line 2: seconds is '1'"),
        ([HEADER, line(wait_s=None)], "line 2: wait_s is None"),
    ],
)
def test_a_bad_line_is_named(lines: list[bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match=f"trace.jsonl,? {message}"):
        Trace.read_jsonl(path)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.jsonl cannot be read"):
        Trace.read_jsonl(tmp_path / "absent.jsonl")
