"""`river-offload generate`: one prompt, one text."""

from __future__ import annotations

from river_offload.cli import runtime
from river_offload.cli.options import (
    GENERATE_NEW_TOKENS,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    with_options,
)
from river_offload.cli.prompt_options import PromptOptions
from river_offload.cli.report import closing_line, json_object, print_json
from river_offload.cli.streams import require_stdout
from river_offload.cli.terminal import Terminal, boundary
from river_offload.cli.transcript import encode_prompt, has_template
from river_offload.cli.turn import ToStdout, Turn, discard, run_turn, seed
from river_offload.cli.watch import WatchOptions, watching
from river_offload.errors import UsageError


@with_options(PromptOptions, ModelOptions, SamplingOptions, OutputOptions, WatchOptions)
def generate(
    model: str,
    asked: PromptOptions,
    options: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    watch: WatchOptions,
) -> None:
    """Write text after a prompt. Text goes to stdout as it is written, everything else to stderr."""
    terminal = Terminal(quiet=output.quiet)
    with boundary(terminal):
        watch.check(output)
        prompt = _check(asked, options, sampling, output)
        with runtime.opened(model, options.load_arguments(), terminal) as loaded:
            tokenizer = runtime.tokenizer_of(loaded)
            ids = encode_prompt(tokenizer, prompt, system=asked.system, raw=asked.raw)
            if not asked.raw and not has_template(tokenizer):
                terminal.note("this tokenizer has no chat template: the prompt is continued as plain text")
            seed(sampling)
            limit = sampling.max_new_tokens or min(GENERATE_NEW_TOKENS, max(1, loaded.river.config.context - len(ids)))
            with watching(watch, loaded, terminal) as watched, ToStdout() as stdout:
                try:
                    sink = discard if output.as_json else watched.beside(stdout)
                    turn = run_turn(loaded, ids, sampling, limit, sink)
                finally:
                    write_trace(loaded, output)
            finish(turn, loaded, output, terminal)


def _check(asked: PromptOptions, options: ModelOptions, sampling: SamplingOptions, output: OutputOptions) -> str:
    """The prompt, once all that can be refused before loading has been looked at. Raises UsageError, OutputError."""
    asked.check()
    options.check()
    sampling.check(options.context)
    output.check()
    require_stdout()
    prompt = asked.read()
    if prompt is None:
        raise UsageError("no prompt: give --prompt TEXT or --prompt-file FILE (- reads standard input)")
    return prompt


def write_trace(loaded: runtime.Loaded, output: OutputOptions) -> None:
    """Write the trace if it was asked for: also that of a run that failed or was interrupted."""
    if output.trace is not None:
        loaded.river.trace.write_jsonl(output.trace)


def finish(turn: Turn, loaded: runtime.Loaded, output: OutputOptions, terminal: Terminal) -> None:
    """Print the JSON object if it was asked for, and say the closing line."""
    river, report = loaded.river, loaded.river.report()
    if output.as_json:
        print_json(json_object(turn.text, report, mode=river.mode, tau=river.tau, num_layers=river.num_layers))
    terminal.note(closing_line(report, river.num_layers))
