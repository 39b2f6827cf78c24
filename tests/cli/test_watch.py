"""`--watch`: what is held, while it runs, and the one warning when that is more than planned."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from river_offload.cli.app import app
from river_offload.cli.terminal import Terminal
from river_offload.cli.watch import Watch, in_few_words
from river_offload.memory.categories import CATEGORIES

MIB = 2**20


def test_what_was_held_at_most_is_said_at_the_end(stub, runner) -> None:
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?", "--watch"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "Blue light scatters.\n"
    assert done.stderr.splitlines()[0] == "held at most: kv 20.0 MiB · backbone 70.0 MiB"
    assert "warning" not in done.stderr


def test_without_it_nothing_is_said_and_no_thread_started(stub, runner) -> None:
    threads = threading.active_count()
    stub.prepare = lambda model: setattr(model, "on_token", lambda index: seen.append(threading.active_count()))
    seen: list[int] = []
    done = runner.invoke(app, ["generate", "demo", "--prompt", "Why?"])
    assert "held" not in done.stderr
    assert set(seen) == {threads}


def test_more_than_planned_is_a_warning_once(stub, runner) -> None:
    """The stub plans 100 MiB; a chat has several turns and one warning."""
    stub.answers = ["One.", "Two."]
    stub.prepare = lambda model: setattr(model, "held_kv_bytes", 80 * MIB)
    done = runner.invoke(app, ["chat", "demo", "--watch"], input="a\nb\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("held at most") == 2
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert "held 150.0 MiB, 50.0 MiB more than the 100.0 MiB planned" in warnings[0]


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["chat"]])
def test_what_quiet_leaves_out_cannot_be_watched(stub, runner, command: list[str]) -> None:
    done = runner.invoke(app, [command[0], "demo", *command[1:], "--watch", "--quiet"])
    assert (done.exit_code, stub.loads) == (2, [])
    assert "--watch shows on stderr what --quiet leaves out" in done.stderr


class Lines:
    """Stands in for the line: keeps what it was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.closed = 0

    def show(self, text) -> None:
        self.texts.append(str(text))
        self.styles.append(str(text.style))

    def beside(self, write):
        return lambda piece: (self.texts.append(piece), write(piece))

    def close(self) -> None:
        self.closed += 1


def watch(lines: Lines, held: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Watch:
    terminal = Terminal(quiet=False)
    monkeypatch.setattr(terminal, "live_line", lambda: lines)
    return Watch(terminal, lambda: held, 100 * MIB, every_s=0.002)


def until(condition) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_the_line_follows_and_turns_yellow_at_once(monkeypatch, capsys) -> None:
    lines, held = Lines(), {"weights": 60 * MIB}
    with watch(lines, held, monkeypatch):
        until(lambda: lines.texts)
        held["kv"] = 50 * MIB
        until(lambda: "kv" in lines.texts[-1])
        held["kv"] = 10 * MIB
        until(lambda: "kv 10.0" in lines.texts[-1])
    assert lines.texts[0] == "60.0 MiB of 100.0 MiB planned · weights 60.0 MiB"
    assert "110.0 MiB of 100.0 MiB planned · kv 50.0 MiB · weights 60.0 MiB" in lines.texts
    assert lines.styles[0] == lines.styles[-1] == "dim" and "yellow" in lines.styles
    assert lines.closed == 1
    said = capsys.readouterr().err
    assert "held at most: kv 50.0 MiB · weights 60.0 MiB" in said
    assert "held 110.0 MiB, 10.0 MiB more" in " ".join(said.split())


def test_parts_of_one_thing_are_one_word() -> None:
    held = dict.fromkeys(CATEGORIES, 1)
    found = in_few_words(held)
    assert list(found) == ["backbone", "slots", "river", "other", "embedding", "head", "kv", "working"]
    assert sum(found.values()) == len(CATEGORIES)
    assert in_few_words({"unclaimed": 7}) == {"unclaimed": 7}


def test_what_changes_comes_first_since_the_end_is_cut(monkeypatch, capsys) -> None:
    held = {"head": 3 * MIB, "river": 20 * MIB, "other": 0, "kv": MIB}
    with watch(Lines(), held, monkeypatch):
        pass
    assert capsys.readouterr().err == "held at most: kv 1.0 MiB · river 20.0 MiB · head 3.0 MiB\n"


def test_it_ends_with_the_work_however_that_ends(monkeypatch, capsys) -> None:
    lines = Lines()
    with pytest.raises(KeyboardInterrupt), watch(lines, {"weights": MIB}, monkeypatch):
        raise KeyboardInterrupt
    assert lines.closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_text_goes_past_the_line_only_on_a_terminal(monkeypatch, capsys) -> None:
    lines, written = Lines(), []
    with watch(lines, {}, monkeypatch) as watched:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
        watched.beside(written.append)("to a file")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        watched.beside(written.append)("to the terminal")
    assert written == ["to a file", "to the terminal"]
    assert "to the terminal" in lines.texts and "to a file" not in lines.texts
