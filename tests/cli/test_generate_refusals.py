"""What `generate` refuses, how it says so, and with which exit code."""

from __future__ import annotations

import pytest

from river_offload.cli.app import app
from river_offload.errors import BudgetError, CheckpointError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt: give --prompt"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", " \n"], "--prompt is empty"),
        (["--prompt", "", "--raw"], "--prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "both given"),
        (["--prompt-file", "/no/such/file"], "cannot be read: No such file"),
        (["--prompt", "a", "--raw", "--system", "b"], "--raw leaves out"),
        (["--prompt", "a", "--mode", "backbone", "--tau", "0.5"], "--tau has no effect in mode backbone"),
        (["--prompt", "a", "--mode", "fixed:2", "--min-exit", "1"], "--min-exit has no effect in mode fixed:2"),
        (["--prompt", "a", "--mode", "backbone", "--bits", "4"], "--bits has no effect"),
        (["--prompt", "a", "--mode", "fixed"], "expected exit, backbone, quantized, lossless, gated or fixed:D"),
        (["--prompt", "a", "--tau", "nan"], "tau is nan"),
        (["--prompt", "a", "--min-exit", "0"], "--min-exit is 0"),
        (["--prompt", "a", "--bits", "5"], "error: --bits is 5"),
        (["--prompt", "a", "--group-size", "48"], "error: --group-size is 48"),
        (["--prompt", "a", "--budget", "8G"], "ambiguous"),
        (["--prompt", "a", "--context", "0"], "context is 0"),
        (["--prompt", "a", "--device", "tpu"], "device is 'tpu'"),
        (["--prompt", "a", "--dtype", "int8"], "dtype is 'int8'"),
        (["--prompt", "a", "--top-p", "0.9"], "--top-p has no effect without sampling"),
        (["--prompt", "a", "--top-k", "5", "--temperature", "0"], "--top-k has no effect without sampling"),
        (["--prompt", "a", "--seed", "5"], "--seed has no effect without sampling"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature is nan"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "1.5"], "--top-p is 1.5"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "0"], "--top-k is 0"),
        (["--prompt", "a", "--temperature", "1", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "a", "--max-new-tokens", "4096"], "do not fit a context of 4096"),
        (["--prompt", "a", "--max-new-tokens", "64", "--context", "64"], "do not fit a context of 64"),
        (["--prompt", "a", "--trace", "/no/such/dir/trace"], "--trace /no/such/dir/trace cannot be written"),
        (["--prompt", "a", "--trace", "/proc/trace"], "--trace /proc/trace cannot be written: No such file"),
        (["--prompt", "a", "--trace", "/dev/full"], "--trace /dev/full cannot be written: it is no regular file"),
        (["--prompt", "a", "--trace", f"/tmp/{'x' * 250}"], "File name too long"),
        (["--prompt", "a", "--cache-dir", ""], "--cache-dir is ''"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_loading(stub, runner, options, message):
    done = runner.invoke(app, ["generate", "demo", *options])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert stub.loads == []


def test_a_prompt_file_that_is_not_text(stub, runner, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"ab\xff")
    done = runner.invoke(app, ["generate", "demo", "--prompt-file", str(file)])
    assert (done.exit_code, stub.loads) == (2, [])
    assert "is not UTF-8 text" in done.stderr and "at byte 2" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetError("needs 3 bytes", needed_bytes=3, budget_bytes=1), 3),
        (CheckpointError("model.safetensors is [truncated]"), 4),
    ],
)
def test_errors_of_load_keep_their_exit_code(stub, runner, monkeypatch, error, code):
    def fail(model, **arguments):
        raise error

    monkeypatch.setattr("river_offload.cli.runtime.load", fail)
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--quiet"])
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"error: {error}\n")


def test_a_bug_is_not_hidden(stub, runner):
    stub.answers = []
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a"])
    assert isinstance(done.exception, IndexError)
    assert stub.model.closed == 1


def test_prompt_longer_than_the_context(stub, runner):
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a" * 50, "--context", "20"])
    assert (done.exit_code, done.stdout, stub.model.closed) == (2, "", 1)
    assert "more than the context" in done.stderr
