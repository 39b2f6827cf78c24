from __future__ import annotations

import json

import pytest

from river_offload.cli.app import app
from river_offload.trace import PassageRecord, Trace


@pytest.fixture
def file(tmp_path):
    def record(index, path, tokens, depth):
        return PassageRecord(index, tokens, 1, 8 * index, path, "exit", depth, [0.6], 0.25, 2**20, 1.0)

    records = [record(0, "prefill", 8, 4), record(1, "decode", 1, 2), record(2, "decode", 1, 4)]
    path = tmp_path / "trace.jsonl"
    Trace(4, {"model": "m", "tau": 0.5}, records).write_jsonl(path)
    return path


def test_figures_for_people(runner, file):
    done = runner.invoke(app, ["trace", str(file)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "1 prompts · 8 tokens in 1.0 s · 1.0 MiB streamed · 0.2 s stalled",
        "2 tokens in 2.0 s · 2.0 MiB streamed, 0 B of it in vain · 0.5 s stalled · 0 misses",
        "depth 3.0 of 4 on average, 2 to 4 · 50% at full depth",
    ]


def test_drafts_are_summed_up_by_the_token(runner, tmp_path):
    def record(path, tokens=1, depth=1, **more):
        return PassageRecord(0, tokens, 1, 8, path, "lossless", depth, [], 0.0, 2**20, 1.0, margin=0.5, **more)

    drafts = [record("draft")] * 3
    kept = [{"accepted": 2, "decided": 3, "added": 3}, {"accepted": 1, "decided": 2, "added": 2}]
    checks = [record("check", 4, 4, **figures) for figures in kept]
    path = tmp_path / "drafted.jsonl"
    Trace(4, {}, [record("prefill", 8, 4), *drafts, checks[0], *drafts, checks[1]]).write_jsonl(path)
    done = runner.invoke(app, ["trace", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1:] == [
        "5 tokens in 8.0 s · 8.0 MiB streamed, 0 B of it in vain · 0.0 s stalled · 0 misses",
        "2 checks, 2.50 tokens each · 1.20 draft steps a token, 50% of them accepted · 1.6 MiB a token · "
        "2.8 of 4 layers of the backbone a token",
    ]
    drafting = json.loads(runner.invoke(app, ["trace", str(path), "--json"]).stdout)["drafting"]
    assert (drafting["checks"], drafting["drafted"], drafting["accepted"]) == (2, 6, 3)
    Trace(4, {}, drafts).write_jsonl(path)
    assert runner.invoke(app, ["trace", str(path)]).stdout.endswith("3 tokens drafted, none checked\n")


def test_json_and_a_picture(runner, file):
    picture = file.with_suffix(".png")
    done = runner.invoke(app, ["trace", str(file), "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["file"], answer["plot"], answer["passages"]) == (str(file), str(picture), 3)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bad_trace_and_a_bad_picture_are_usage_errors(runner, file):
    for arguments, message in (
        (["absent.jsonl"], "cannot be read"),
        ([str(file), "--plot", str(file.with_suffix(".mp4"))], "use .png, .svg or .pdf"),
    ):
        done = runner.invoke(app, ["trace", *arguments])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
