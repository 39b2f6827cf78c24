"""SIGTERM and SIGHUP take the way of Ctrl-C: everything is closed, and the exit code says which it was."""

from __future__ import annotations

import os
import signal

import pytest

from river_offload.cli.app import app
from river_offload.cli.interrupts import Terminated, terminated_by_signals
from river_offload.cli.streams import OutputError
from river_offload.cli.turn import ToStdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_generation_is_closed_and_its_trace_written(stub, runner, tmp_path, number, code):
    def end(index: int) -> None:
        if index == 4:
            os.kill(os.getpid(), number)

    stub.prepare = lambda model: setattr(model, "on_token", end)
    trace = tmp_path / "trace.jsonl"
    done = runner.invoke(app, ["generate", "demo", "--prompt", "a", "--trace", str(trace)])
    assert (done.exit_code, done.stdout, stub.model.closed) == (code, "Blue\n", 1)
    assert len(done.stderr.splitlines()) == 1
    assert trace.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_what_loading_began_is_undone(stub, runner):
    undone = []

    def load(model):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            undone.append(True)

    stub.prepare = load
    done = runner.invoke(app, ["prepare", "demo"])
    assert (done.exit_code, done.stdout, done.stderr, undone) == (143, "", "ended by SIGTERM\n", [True])


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    try:
        with terminated_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    except Terminated:  # which would end pytest, not fail the test
        pytest.fail("SIGHUP was not ignored")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_has_gone_does_not_hide_how_the_command_ended(monkeypatch):
    stdout = ToStdout()
    with pytest.raises(Terminated), stdout:
        stdout("half a line")
        monkeypatch.setattr("sys.stdout", Gone())
        raise Terminated(signal.SIGHUP)


def test_the_last_line_of_a_text_must_be_written(monkeypatch):
    stdout = ToStdout()
    with pytest.raises(OutputError), stdout:
        stdout("half a line")
        monkeypatch.setattr("sys.stdout", Gone())


class Gone:
    def write(self, text):
        raise OutputError("standard output cannot be written: Input/output error")
