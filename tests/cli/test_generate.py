from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from river_offload.cli.app import app

FIELDS = [
    "text", "prompt_tokens", "new_tokens", "mode", "tau", "num_layers", "mean_depth", "depths", "prefill_depth",
    "prefill", "seconds", "tokens_per_s", "bytes_streamed", "backbone_passes", "drafted", "accepted",
    "tokens_per_backbone_pass", "bytes_per_token", "checked_share", "peak_device_bytes", "budget_bytes", "placement",
    "kernel",
]  # fmt: skip


def test_text_on_stdout_and_the_account_on_stderr(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "Blue light scatters.\n"
    assert done.stderr.splitlines() == [
        "21 tokens · 23.1 tok/s · mean depth 4.2 of 30 · 3.00 GiB streamed · peak 190.0 MiB of 200.0 MiB"
    ]
    assert stub.model.prompts == ["<|user|>Why?<|end|><|assistant|>"]
    assert stub.model.closed == 1


def test_json_is_one_object_with_the_promised_fields(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "--json", "--mode", "exit"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert list(answer) == FIELDS
    assert answer["text"] == "Blue light scatters."
    assert answer["seconds"] == {"load": 1.5, "prefill": 0.5, "decode": None}
    assert answer["placement"] == {
        "resident_layers": [0, 1], "streamed_layers": [2, 3], "slots": 2, "embed_tier": "device",
        "prefill_chunk": 512, "states_tier": "device",
    }  # fmt: skip
    assert (answer["mode"], answer["tau"]) == ("exit", 0.5)


def test_tau_is_null_where_nothing_looks_at_it(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "--json", "--mode", "fixed:3"])
    assert (json.loads(done.stdout)["mode"], json.loads(done.stdout)["tau"]) == ("fixed:3", None)


def test_a_mode_that_drafts_says_how_many_tokens_a_pass_gave(stub, runner):
    figures = {"drafted": 30, "accepted": 17, "backbone_passes": 3, "tokens_per_backbone_pass": 6.66}

    def prepare(model):
        plain = model.report
        model.report = lambda: plain() | figures

    stub.prepare = prepare
    options = ["--mode", "lossless", "--draft", "12"]
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", *options])
    assert "4.2 of 30 · 6.7 tokens a backbone pass · 3.00 GiB" in done.stderr
    assert (stub.loads[0]["mode"], stub.loads[0]["draft"]) == ("lossless", "12")
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "--json", "--mode", "gated", "--gate", "0.5"])
    assert figures.items() <= json.loads(done.stdout).items()
    assert stub.loads[1]["gate"] == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "exit", "--draft", "8"], "draft has no effect in mode exit"),
        (["--tau", "0.5", "--draft", "8"], "draft has no effect in mode exit"),
        (["--tau", "0.5", "--gate", "0.5"], "gate has no effect in mode exit"),
        (["--mode", "lossless", "--gate", "0.5"], "gate has no effect in mode lossless"),
        (["--mode", "gated", "--gate", "2"], "gate is 2.0: expected a probability from 0 to 1"),
        (["--mode", "lossless", "--draft", "0"], "unknown draft '0': expected adaptive or a number of tokens"),
        (["--mode", "lossless", "--tau", "0.5"], "--tau has no effect in mode lossless"),
        (["--gate", "0.5", "--mode", "lossless", "--min-exit", "2"], "--min-exit has no effect in mode lossless"),
    ],
)
def test_drafting_options_that_cannot_take_effect_are_refused(options, said, stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", *options])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not stub.loads


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([], "lossless"),
        (["--draft", "8"], "lossless"),
        (["--tau", "0.95"], "exit"),
        (["--min-exit", "2"], "exit"),
        (["--prefill", "auto"], "exit"),
        (["--on-miss", "exit"], "exit"),
        (["--prefetch", "predicted"], "exit"),
        (["--gate", "0.5"], "gated"),
        (["--mode", "backbone"], "backbone"),
    ],
)
def test_without_a_mode_it_is_lossless_or_that_of_the_options(options, mode, stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "--json", *options])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["mode"] == mode
    assert stub.loads[0].get("mode", "not named") == (mode if "--mode" in options else "not named")


def test_quiet_leaves_stderr_empty(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "-q"])
    assert (done.stdout, done.stderr) == ("Blue light scatters.\n", "")


def test_only_given_options_reach_load(stub, runner):
    runner.invoke(app, ["generate", "demo", "--prompt", "a"])
    assert set(stub.loads[0]) == {"model", "progress"}
    more = ["--mode", "exit", "--tau", "-1", "--min-exit", "3", "--bits", "8", "--group-size", "32", "--context", "99"]
    more += [
        "--head-bits",
        "8",
        "--slots",
        "1",
        "--prefetch",
        "predicted",
        "--on-miss",
        "exit",
        "--prefill",
        "auto",
        "--prefill-chunk",
        "32",
        "--budget",
        "200MiB",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--trust-remote-code",
        "--cache-dir",
        "/river/cache",
        "--kv-bits",
        "8",
        "--kv-tier",
        "host",
    ]
    stub.answers = ["ok"]
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", *more])
    assert done.exit_code == 0, done.output
    given = stub.loads[1]
    quant = given.pop("quant")
    given.pop("progress")
    assert (quant.bits, quant.group_size) == (8, 32)
    assert given == {
        "model": "demo", "mode": "exit", "tau": -1.0, "min_exit": 3, "head_bits": 8, "slots": 1, "context": 99,
        "prefetch": "predicted", "on_miss": "exit", "prefill": "auto", "prefill_chunk": 32,
        "budget": "200MiB", "device": "cpu", "dtype": "float32", "trust_remote_code": True,
        "cache_dir": "/river/cache", "kv_bits": 8, "kv_tier": "host",
    }  # fmt: skip


def test_greedy_unless_a_temperature_is_given(stub, runner):
    for given in ([], ["--temperature", "0"]):
        stub.answers = ["x"]
        runner.invoke(app, ["generate", "demo", "--prompt", "a", *given])
        assert stub.model.calls[0]["do_sample"] is False


def test_sampling_options_and_seed(stub, runner, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    runner.invoke(app, ["generate", "demo", "--prompt", "a", "--temperature", "0.7", "--top-p", "0.9", "--seed", "7"])
    call = stub.model.calls[0]
    assert (call["do_sample"], call["temperature"], call["top_p"], call["top_k"]) == (True, 0.7, 0.9, 0)
    assert seeds == [7]


def test_missing_pad_token_is_replaced_by_the_first_end_token(stub, runner):
    runner.invoke(app, ["generate", "demo", "--prompt", "a"])
    assert stub.model.calls[0]["pad_token_id"] == stub.model.generation_config.eos_token_id[0]


def test_raw_and_system(stub, runner):
    runner.invoke(app, ["generate", "demo", "--prompt", "Once", "--raw"])
    assert stub.model.prompts == ["Once"]
    runner.invoke(app, ["generate", "demo", "--prompt", "Hi", "--system", "Be brief."])
    assert stub.model.prompts == ["<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"]


def without_template(model):
    model.tokenizer.chat_template = None


def test_without_a_template_the_prompt_is_plain_text_and_a_system_message_an_error(stub, runner):
    stub.prepare = without_template
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Once"])
    assert stub.model.prompts == ["Once"]
    assert "no chat template" in done.stderr
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Once", "--system", "x"])
    assert done.exit_code == 2
    assert "--system needs a chat template" in done.stderr
    assert stub.model.closed == 1


def test_a_checkpoint_without_a_tokenizer(stub, runner):
    stub.prepare = lambda model: setattr(model, "tokenizer", None)
    for command in (["generate", "demo", "--prompt", "a"], ["chat", "demo"]):
        done = runner.invoke(app, command)
        assert done.exit_code == 4
        assert "has no tokenizer" in done.stderr
        assert stub.model.closed == 1


def test_a_template_that_refuses_system_messages(stub, runner):
    def refuse(model):
        model.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"

    stub.prepare = refuse
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Hi", "--system", "x"])
    assert done.exit_code == 2
    assert "System role not supported" in done.stderr and "--system" in done.stderr


def test_prompt_from_a_file_and_from_standard_input(stub, runner, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    runner.invoke(app, ["generate", "demo", "--prompt-file", str(file)])
    assert stub.model.prompts == ["<|user|>Grüße<|end|><|assistant|>"]
    runner.invoke(app, ["generate", "demo", "--prompt-file", "-", "--raw"], input="to the letter\n")
    assert stub.model.prompts == ["to the letter\n"]


def test_default_length_shrinks_to_the_context(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--context", "60"])
    assert done.exit_code == 0, done.output
    assert stub.model.calls[0]["max_new_tokens"] == 60 - 4


def test_interrupt_ends_the_line_writes_the_trace_and_closes(stub, runner, tmp_path):
    def interrupt(index: int) -> None:
        if index == 4:
            os.kill(os.getpid(), signal.SIGINT)

    stub.prepare = lambda model: setattr(model, "on_token", interrupt)
    trace = tmp_path / "trace.jsonl"
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--trace", str(trace)])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "Blue\n", "interrupted\n")
    assert trace.exists()
    assert stub.model.closed == 1


def test_trace_is_written(stub, runner, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    assert runner.invoke(app, ["generate", "demo", "--prompt", "a", "--trace", str(trace)]).exit_code == 0
    assert trace.read_text() == '{"version": 1}\n'


def test_a_trace_that_can_be_written_leaves_no_sign_of_the_trial(stub, runner, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("older")
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--trace", str(trace), "--raw", "--system", "b"])
    assert (done.exit_code, stub.loads) == (2, [])
    done = runner.invoke(app, ["generate", "demo", "--prompt", "", "--trace", str(trace)])
    assert (done.exit_code, stub.loads) == (2, [])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    assert trace.read_text() == "older"


def test_a_trace_behind_links_in_a_circle_is_refused(stub, runner, tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--trace", str(tmp_path / "a" / "trace")])
    assert (done.exit_code, stub.loads) == (2, [])
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["chat", "--prompt", "a"], ["prepare"]])
def test_remarks_on_the_checkpoint_are_said_before_the_text_unless_quiet(stub, runner, command):
    stub.prepare = lambda model: model.notes.extend(["stray.safetensors is ignored", "2 tensors are not used"])
    arguments = [command[0], "demo", *command[1:]]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[:2] == ["note: stray.safetensors is ignored", "note: 2 tensors are not used"]
    stub.answers = ["x"]
    assert runner.invoke(app, [*arguments, "--quiet"]).stderr == ""


def test_warnings_become_lines(stub, runner):
    import logging
    import warnings

    def warn(model):
        warnings.warn("layer 3 k_proj stays in full precision", UserWarning, stacklevel=1)
        warnings.warn("for programmers", FutureWarning, stacklevel=1)
        logging.getLogger("river_offload.quant").warning("the cache is %s", "foreign")

    stub.prepare = warn
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a"])
    assert done.stderr.splitlines()[:2] == [
        "warning: layer 3 k_proj stays in full precision",
        "warning: the cache is foreign",
    ]
    assert "programmers" not in done.stderr
    stub.answers = ["x"]
    assert runner.invoke(app, ["generate", "demo", "--prompt", "a", "--quiet"]).stderr == ""


def test_closing_line_leaves_out_what_nobody_measured():
    from river_offload.cli.report import closing_line

    report = SimpleNamespace(tokens_per_s=None, mean_depth=float("nan"))
    figures = {"new_tokens": 1, "bytes_streamed": 0, "peak_device_bytes": 2**20, "budget_bytes": 2**30}
    assert closing_line(figures | vars(report), 30) == "1 token · 0 B streamed · peak 1.0 MiB of 1.00 GiB"


def test_streaming_options_that_cannot_take_effect_are_refused(stub, runner):
    for given, words in (
        (["--mode", "quantized", "--prefetch", "next"], "--prefetch has no effect in mode quantized"),
        (["--mode", "backbone", "--on-miss", "exit"], "--on-miss exit has no effect in mode backbone"),
        (["--mode", "quantized", "--link-limit", "1GB"], "--link-limit has no effect in mode quantized"),
        (["--prefetch", "all"], "none or next or predicted or oracle"),
        (["--prefetch", "oracle"], "--prefetch oracle knows forced exits alone"),
    ):
        done = runner.invoke(app, ["generate", "demo", "--prompt", "a", *given])
        assert done.exit_code == 2
        assert words in " ".join(done.stderr.split()), done.stderr
    assert stub.loads == []
