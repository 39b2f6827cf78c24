"""`river-offload chat`: several turns on one KV cache."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

from river_offload.cli import runtime
from river_offload.cli.generate import finish, write_trace
from river_offload.cli.interrupts import Terminated
from river_offload.cli.options import (
    CHAT_NEW_TOKENS,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    with_options,
)
from river_offload.cli.prompt_options import PromptOptions
from river_offload.cli.streams import require_stdin, require_stdout, unreadable
from river_offload.cli.terminal import Terminal, boundary
from river_offload.cli.transcript import Transcript, has_template
from river_offload.cli.turn import StopOnInterrupt, ToStdout, discard, run_turn, seed
from river_offload.cli.watch import Unwatched, Watch, WatchOptions, watching
from river_offload.errors import ContextError, UsageError

_PROMPT = "> "
_HELP = (
    "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer; "
    "a line that ends with \\ goes on in the next"
)


@with_options(PromptOptions, ModelOptions, SamplingOptions, OutputOptions, WatchOptions)
def chat(
    model: str,
    asked: PromptOptions,
    options: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    watch: WatchOptions,
) -> None:
    """Talk with a model: /reset starts over, /quit leaves. A prompt given here is the first turn."""
    terminal = Terminal(quiet=output.quiet)
    with boundary(terminal):
        asked.check()
        options.check()
        sampling.check(options.context)
        output.check()
        watch.check(output)
        require_stdout()
        require_stdin()
        if asked.prompt_file == "-":
            raise UsageError("--prompt-file - has no effect in chat, which reads its turns from there: pipe them in")
        first = asked.read()
        with runtime.opened(model, options.load_arguments(), terminal) as loaded:
            river, tokenizer = loaded.river, runtime.tokenizer_of(loaded)
            transcript = Transcript(tokenizer, river.new_cache, system=asked.system, raw=asked.raw)
            if not asked.raw and not has_template(tokenizer):
                terminal.note("this tokenizer has no chat template: turns are continued as plain text")
            seed(sampling)
            terminal.note(f"{model} · mode {river.mode} · context {river.config.context} · /help")
            watched = watching(watch, loaded, terminal)
            try:
                for text in _turns(first, transcript, terminal):
                    _answer(text, transcript, loaded, sampling, output, terminal, watched)
            finally:
                write_trace(loaded, output)


def _answer(
    text: str,
    transcript: Transcript,
    loaded: runtime.Loaded,
    sampling: SamplingOptions,
    output: OutputOptions,
    terminal: Terminal,
    watched: Watch | Unwatched,
) -> None:
    """One turn. What the user can mend (a full context, a refused message) is said and the conversation goes on."""
    try:
        prompt = transcript.ask(text)
        room = loaded.river.config.context - len(prompt)
        if room < 1:
            raise ContextError(
                f"the conversation takes {len(prompt)} of {loaded.river.config.context} tokens and leaves no room for "
                "an answer: /reset starts over, --context N plans for more"
            )
        limit = min(sampling.max_new_tokens or CHAT_NEW_TOKENS, room)
        with watched, ToStdout() as stdout, StopOnInterrupt() as stop:
            sink = discard if output.as_json else watched.beside(stdout)
            turn = run_turn(loaded, prompt, sampling, limit, sink, cache=transcript.cache, stop=stop)
    except Terminated:
        raise
    except (KeyboardInterrupt, UsageError) as error:
        if isinstance(error, KeyboardInterrupt):
            transcript.drop()
            terminal.note("stopped; this turn is forgotten")
        else:
            terminal.error(str(error))
        return
    transcript.keep(text, turn.text, turn.sequence)
    finish(turn, loaded, output, terminal)
    if turn.stopped:
        terminal.note("stopped here; the answer so far is kept")


def _turns(first: str | None, transcript: Transcript, terminal: Terminal) -> Iterator[str]:
    """What the user says, turn by turn; commands are carried out here. Ends with /quit or the end of input."""
    if first is not None:
        terminal.note(_PROMPT + first)
        yield first
    for line in _lines(terminal):
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            transcript.reset()
            terminal.note("the conversation starts over")
        elif text == "/help":
            terminal.note(_HELP)
        elif re.fullmatch(r"/[a-z]+", text):
            terminal.warning(f"unknown command {text}: {_HELP}")
        elif text:
            yield line


def _lines(terminal: Terminal) -> Iterator[str]:
    """Lines from standard input until its end, joined over trailing backslashes. With editing on a terminal."""
    interactive = _is_interactive()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (its import gives input() editing and history)
    while True:
        try:
            line = _read(interactive, _PROMPT)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + _read(interactive, ". ")
        except EOFError:
            if interactive:
                terminal.note("")  # the shell's prompt belongs on its own line
            return
        except KeyboardInterrupt as interrupt:
            if not interactive or isinstance(interrupt, Terminated):
                raise
            terminal.note(f"\n{_HELP}")
            continue
        yield line


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _read(interactive: bool, prompt: str) -> str:
    """One line without its end. Raises EOFError, UsageError. The prompt is shown only to someone who types."""
    try:
        if interactive and sys.stdout.isatty():
            return input(prompt)
        if interactive:  # the text goes to a file, and the prompt must not
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
    except OSError as error:
        raise unreadable(error) from error
    if not line:
        raise EOFError
    return line.removesuffix("\n")
