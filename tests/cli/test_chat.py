from __future__ import annotations

import json
import os
import signal

import pytest

from river_offload.cli import chat
from river_offload.cli.app import app
from river_offload.cli.interrupts import Terminated
from river_offload.errors import UsageError

FIRST = "<|user|>Hi<|end|><|assistant|>"
SECOND = f"{FIRST}Hello.<|end|><|user|>And you?<|end|><|assistant|>"


def test_later_turns_feed_only_new_tokens(stub, runner):
    stub.answers = ["Hello.", "Fine."]
    done = runner.invoke(app, ["chat", "demo"], input="Hi\nAnd you?\n/quit\nnever\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == "Hello.\nFine.\n"
    assert stub.model.prompts == [FIRST, SECOND]
    # Of the second prompt all is cached but the end mark (chosen, not fed) and what came after it.
    assert stub.model.fed == [5, 1 + 1 + len("And you?") + 2]
    assert stub.model.closed == 1


def test_end_of_input_leaves(stub, runner):
    done = runner.invoke(app, ["chat", "demo", "-q"], input="Hi\n")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Blue light scatters.\n", "")


def test_reset_keeps_the_system_message_and_nothing_else(stub, runner):
    stub.answers = ["Hello.", "Hello."]
    runner.invoke(app, ["chat", "demo", "--system", "S"], input="Hi\n/reset\nHi\n")
    assert stub.model.prompts == [f"<|system|>S<|end|>{FIRST}"] * 2
    assert stub.model.fed[0] == stub.model.fed[1]


def test_a_template_that_rewrites_earlier_turns_costs_the_cache_not_the_answer(stub, runner):
    stub.answers = ["  Hello.", "Fine."]

    def trim(model):
        model.tokenizer.chat_template = model.tokenizer.chat_template.replace("m.content", "m.content | trim")

    stub.prepare = trim
    runner.invoke(app, ["chat", "demo"], input="Hi\nAnd you?\n")
    assert stub.model.prompts == [FIRST, SECOND]
    assert stub.model.fed == [5, len(stub.model.tokenizer(SECOND)["input_ids"])]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(stub, runner):
    stub.answers = ["Hello.", "Fine."]

    def interrupt(index: int) -> None:
        if index == 2 and len(stub.model.calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    stub.prepare = lambda model: setattr(model, "on_token", interrupt)
    done = runner.invoke(app, ["chat", "demo"], input="Hi\nAnd you?\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == "Hel\nFine.\n"
    assert "stopped here" in done.stderr
    assert stub.model.prompts[1] == f"{FIRST}Hel<|end|><|user|>And you?<|end|><|assistant|>"
    assert stub.model.fed[1] < len(stub.model.prompts[1]) // 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_forgets_the_turn_and_its_cache(stub, runner):
    stub.answers = ["Hello.", "Fine.", "Well."]

    def interrupt(index: int) -> None:
        if index == 2 and len(stub.model.calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    stub.prepare = lambda model: setattr(model, "on_token", interrupt)
    done = runner.invoke(app, ["chat", "demo"], input="Hi\nWhat?\nAnd you?\n")
    assert done.stdout == "Hello.\nFi\nWell.\n"
    assert stub.model.prompts[2] == SECOND
    assert stub.model.fed[2] == len(stub.model.tokenizer(SECOND)["input_ids"])


def test_a_full_context_is_said_and_reset_helps(stub, runner):
    stub.answers = ["Hello.", "Fine.", "Hello."]
    turns = f"Hi\n{'x' * 40}\nSo\n/reset\nHi\n"
    done = runner.invoke(app, ["chat", "demo", "--context", "30"], input=turns)
    assert done.exit_code == 0
    assert done.stdout == "Hello.\nFine.\nHello.\n"
    # The turn that was refused is forgotten, the cache is not.
    assert stub.model.fed == [5, 6, 5]
    assert "leaves no room for an answer: /reset" in done.stderr
    assert stub.model.calls[0]["max_new_tokens"] == 25


def test_json_is_one_object_a_turn(stub, runner):
    stub.answers = ["Hello.", "Fine."]
    done = runner.invoke(app, ["chat", "demo", "--json"], input="Hi\nAnd you?\n")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["Hello.", "Fine."]


def test_raw_turns_continue_one_text(stub, runner):
    stub.answers = [" upon", " there"]
    runner.invoke(app, ["chat", "demo", "--raw"], input="Once\n a time\n")
    assert stub.model.prompts == ["Once", "Once upon<|end|> a time"]


def test_first_turn_from_the_command_line_joined_lines_and_commands(stub, runner):
    stub.answers = ["Hello.", "Fine."]
    done = runner.invoke(app, ["chat", "demo", "--prompt", "Hi"], input="/help\n/what\n\nAnd\\\nyou?\n")
    assert done.stdout == "Hello.\nFine.\n"
    assert "/reset forgets" in done.stderr and "unknown command /what" in done.stderr
    assert stub.model.prompts[1].endswith("<|user|>And\nyou?<|end|><|assistant|>")


def test_standard_input_cannot_be_both_prompt_and_turns(stub, runner):
    done = runner.invoke(app, ["chat", "demo", "--prompt-file", "-"], input="x")
    assert (done.exit_code, stub.loads) == (2, [])


def test_a_line_that_is_not_utf_8_is_refused_and_the_chat_goes_on(stub, runner, monkeypatch):
    typed = iter(["h\udcff", "Hi", EOFError()])
    monkeypatch.setattr(chat, "_read", scripted(typed))
    done = runner.invoke(app, ["chat", "demo"])
    assert (done.exit_code, done.stdout) == (0, "Blue light scatters.\n")
    assert "error: this text has bytes that are not UTF-8" in done.stderr
    assert stub.model.prompts == [FIRST]


def test_standard_input_that_cannot_be_read_is_an_error_of_one_line(stub, runner, monkeypatch):
    class Unreadable:
        def readline(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(chat.sys, "stdin", Unreadable())
    with pytest.raises(UsageError, match="standard input cannot be read: Input/output error"):
        chat._read(False, "> ")


def test_sigterm_during_an_answer_ends_the_chat(stub, runner):
    stub.answers = ["Hello.", "Fine."]

    def terminate(index: int) -> None:
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    stub.prepare = lambda model: setattr(model, "on_token", terminate)
    done = runner.invoke(app, ["chat", "demo"], input="Hi\nAnd you?\n")
    assert (done.exit_code, done.stdout, stub.model.closed) == (143, "He\n", 1)


def test_sighup_at_the_prompt_ends_the_chat(stub, runner, monkeypatch):
    monkeypatch.setattr(chat, "_is_interactive", lambda: True)
    monkeypatch.setattr(chat, "_read", scripted(iter(["Hi", Terminated(signal.SIGHUP), "And you?"])))
    done = runner.invoke(app, ["chat", "demo"])
    assert (done.exit_code, done.stdout, stub.model.closed) == (129, "Blue light scatters.\n", 1)


def scripted(typed):
    def read(interactive: bool, prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def test_ctrl_c_at_the_prompt_shows_help_and_goes_on(stub, runner, monkeypatch):
    monkeypatch.setattr(chat, "_is_interactive", lambda: True)
    monkeypatch.setattr(chat, "_read", scripted(iter(["Hi", KeyboardInterrupt(), EOFError()])))
    done = runner.invoke(app, ["chat", "demo"])
    assert (done.exit_code, done.stdout) == (0, "Blue light scatters.\n")
    assert "/quit or Ctrl-D leaves" in done.stderr
