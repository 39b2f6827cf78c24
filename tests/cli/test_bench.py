from __future__ import annotations

import json

import pytest

from river_offload.cli.app import app
from river_offload.cli.bench import lines
from river_offload.eval import bench as measuring
from river_offload.trace import PassageRecord, Trace


@pytest.fixture
def command(checkpoint):
    from families import budget_for

    budget = budget_for(checkpoint("llama"), 1)
    options = ["--budget", str(budget), "--context", "64", "--device", "cpu", "--tokens", "4", "--prompt-tokens", "3"]
    return ["bench", str(checkpoint("llama")), *options]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "memory_read_rate", lambda device: 30e9)


def test_json_has_the_promised_figures(runner, command, tmp_path):
    trace = tmp_path / "trace.jsonl"
    done = runner.invoke(app, [*command, "--depths", "geometric:2,full=0.5", "--json", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["ceilings"]["memory_read_bytes_per_s"] == 30e9
    assert answer["ceilings"]["link_bytes_per_s"] > 0
    for name in ("tokens_per_s", "bytes_per_token", "link_over_ceiling"):
        assert answer[name] > 0, name
    assert 0 <= answer["hidden_copy_share"] <= 1 and answer["wasted_bytes"] >= 0 and answer["stall_s"] >= 0
    assert answer["depths"]["full_share"] == 0.5
    assert (answer["config"]["depths"], answer["config"]["prompt_tokens"]) == ("geometric:2,full=0.5", 3)
    again = runner.invoke(app, [*command[:-4], "--depths", str(trace), "--json", "-q"])
    assert again.exit_code == 0, again.output
    assert (json.loads(again.stdout)["depths"], again.stderr) == (answer["depths"], "")


def test_text_for_people(runner, command):
    done = runner.invoke(app, [*command, "--mode", "backbone", "-q"])
    assert done.exit_code == 0, done.output
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names == ["model", "layers", "memory reads", "link", "speed", "depth", "streamed", "peak"]
    assert "100% at full depth" in done.stdout and "4 tokens in" in done.stdout


@pytest.fixture
def accepted(tmp_path):
    """A trace of one check in mode lossless that kept one of two tokens."""
    parts = [("draft", 1, 0), ("draft", 1, 0), ("check", 3, 1)]
    records = [
        PassageRecord(
            index,
            tokens,
            1,
            4,
            path,
            "lossless",
            5,
            [],
            0.0,
            0,
            1.0,
            0.9,
            accepted=kept,
            decided=kept + 1,
            added=kept + 1,
        )
        for index, (path, tokens, kept) in enumerate(parts)
    ]  # fmt: skip
    path = tmp_path / "accepted.jsonl"
    Trace(5, {}, records).write_jsonl(path)
    return str(path)


@pytest.mark.parametrize("mode", [["--mode", "lossless"], ["--mode", "gated", "--gate", "0.95"]])
def test_drafts_are_accepted_as_in_a_trace(mode, runner, command, accepted):
    command = [*command, *mode, "--draft", "2", "--acceptance", accepted, "-q"]
    done = runner.invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["config"]["acceptance"] == accepted
    # Every block loses its second token: 2, 2, and one place that is left has no room for a draft.
    assert (answer["backbone_passes"], answer["drafted"], answer["accepted"]) == (3, 4, 2)
    done = runner.invoke(app, command)
    assert f"1.67 tokens a backbone pass · 4 drafted, 2 accepted by {accepted}" in done.stdout


@pytest.mark.parametrize(("right", "noted"), [(0, True), (1, True), (2, False), (20, False)])
def test_drafts_that_are_hardly_ever_right_are_remarked_on(right, noted, runner, command, accepted, monkeypatch):
    drafts = {"drafted": 40, "accepted": right, "tokens_per_backbone_pass": 1 + right / 20}
    monkeypatch.setattr(measuring, "bench", lambda *_, **__: FIGURES | drafts)
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    assert ("as with random weights: --acceptance TRACE" in " ".join(done.stderr.split())) == noted
    assert runner.invoke(app, [*command, "--quiet"]).stderr == ""
    assert runner.invoke(app, [*command, "--acceptance", accepted]).stderr == ""


def test_the_default_mode_of_a_bench_drafts_and_forced_depths_do_not(runner, command):
    for options, mode in (([], "lossless"), (["--depths", "fixed:2"], "exit"), (["--tau", "-1"], "exit")):
        done = runner.invoke(app, [*command, *options, "--json"])
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        assert (answer["config"]["mode"], answer["drafted"] > 0) == (mode, mode == "lossless")


def test_a_trace_without_checks_is_no_acceptance(runner, command, tmp_path):
    path = tmp_path / "exits.jsonl"
    Trace(5, {}, [PassageRecord(0, 1, 1, 4, "decode", "exit", 5, [], 0.0, 0, 1.0)]).write_jsonl(path)
    done = runner.invoke(app, [*command, "--mode", "lossless", "--acceptance", str(path)])
    assert done.exit_code == 2, done.output
    assert "no drafted token was checked in mode lossless: the trace has 1 passages of mode exit" in done.stderr


FIGURES = {
    "ceilings": {"memory_read_bytes_per_s": 3e10, "link_bytes_per_s": None, "link": None},
    "config": {"model": "m", "mode": "exit", "device": "cpu", "dtype": "bfloat16", "resident_layers": 4,
               "streamed_layers": 0, "slots": 0, "slot_bytes": 0, "num_layers": 4},
    "depths": {"mean": 3.0, "full_share": 0.0}, "tokens_per_s": 2.0, "tokens": 4, "link_over_ceiling": None,
    "seconds": {"run": 2.0}, "token_s": {"median": 0.5, "max": 0.6}, "peak_device_bytes": 2**20,
    "budget_bytes": 2**21,
}  # fmt: skip


def test_a_run_that_streams_nothing_says_so():
    assert lines(FIGURES) == [
        "model         m · mode exit · cpu bfloat16",
        "layers        4 resident, none streamed",
        "memory reads  at most 30.00 GB/s",
        "link          not needed",
        "speed         2.00 tok/s · 4 tokens in 2.0 s · median 500.0 ms, longest 600.0 ms",
        "depth         mean 3.0 of 4 · 0% at full depth",
        "streamed      nothing",
        "peak          1.0 MiB of 2.0 MiB",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens is 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--depths", "uniform:3"], "cannot be read"),
        (["--depths", "geometric:x"], "unknown depths 'geometric:x'"),
        (["--depths", "fixed:3", "--mode", "backbone"], "--depths has no effect in mode backbone"),
        (["--depths", "fixed:3", "--tau", "0.7"], "--tau has no effect with --depths"),
        (["--depths", "fixed:9"], "passage 0 is to leave after 9 layers: expected 1..5"),
        (["--acceptance", "t", "--mode", "exit"], "--acceptance has no effect in mode exit: nothing is checked there"),
        (["--acceptance", "t", "--depths", "fixed:3"], "--acceptance has no effect in mode exit"),
        (["--gate", "0.5", "--depths", "fixed:3"], "gate has no effect in mode exit"),
        (["--acceptance", "t", "--mode", "gated", "--gate", "0"], "--acceptance has no effect with --gate 0"),
        (["--acceptance", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--tokens", "100"], "do not fit a context of 64"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_loaded(runner, command, options, message, monkeypatch):
    monkeypatch.setattr(measuring, "load_config", lambda *_: pytest.fail("loaded"))
    done = runner.invoke(app, [*command, *options])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
