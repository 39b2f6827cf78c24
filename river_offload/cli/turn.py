"""One prompt in, text out as it is written: what `generate` does once and `chat` once a turn."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from river_offload.cli.interrupts import Terminated
from river_offload.cli.options import SamplingOptions
from river_offload.cli.runtime import Loaded
from river_offload.cli.streams import OutputError

Sink = Callable[[str], None]
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Turn:
    """What one generation gave."""

    text: str
    sequence: list[int]
    """Prompt and new tokens."""
    stopped: bool
    """Whether the user stopped it before its end."""


class TextStream:
    """A transformers streamer: hands text to `sink` as soon as its tokens make whole characters.

    The pieces add up to what decoding all new tokens at once gives. Each new token is decoded together with the
    last piece that was shown, since many tokenizers write a space only between tokens.
    """

    def __init__(self, tokenizer: Any, sink: Sink) -> None:
        self._tokenizer = tokenizer
        self._sink = sink
        self._prompt_seen = False
        self._ids: list[int] = []
        self._shown_from = 0
        self._shown_to = 0
        self._pieces: list[str] = []

    def put(self, value: Any) -> None:
        """First the prompt, [1, tokens], which is not shown; then new tokens, [1]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids.extend(value.flatten().tolist())
        self._show(at_end=False)

    def end(self) -> None:
        """Show what is left, half a character included."""
        self._show(at_end=True)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _show(self, *, at_end: bool) -> None:
        shown = self._decode(self._ids[self._shown_from : self._shown_to])
        text = self._decode(self._ids[self._shown_from :])
        if len(text) > len(shown) and (at_end or not text.endswith(_INCOMPLETE)):
            piece = text[len(shown) :]
            self._pieces.append(piece)
            self._sink(piece)
            self._shown_from, self._shown_to = self._shown_to, len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded


class StopOnInterrupt:
    """While it is active the first Ctrl-C asks for a stop at the next token, where every layer's cache has the same
    length; a second one, or one while the prompt is read or nothing is being generated, is a KeyboardInterrupt as ever.

    Also a stopping criterion of transformers.
    """

    def __init__(self) -> None:
        self.asked = False
        self._begun = False

    def __enter__(self) -> StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        self._begun = True
        return torch.full((input_ids.shape[0],), self.asked, dtype=torch.bool, device=input_ids.device)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked or not self._begun:
            raise KeyboardInterrupt
        self.asked = True


class ToStdout:
    """The sink of a command that streams: standard output. As a context it ends the line that is open at its end."""

    def __init__(self) -> None:
        self._open = False

    def __enter__(self) -> ToStdout:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After SIGHUP the terminal has gone, too, and how the command ended matters more than its last line.
        with contextlib.suppress(*((OutputError, BrokenPipeError) if kind is Terminated else ())):
            self._end_line()

    def __call__(self, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()
        self._open = not piece.endswith("\n")

    def _end_line(self) -> None:
        if self._open:
            self("\n")


def discard(_piece: str) -> None:
    """The sink of a command that prints JSON."""


def seed(sampling: SamplingOptions) -> None:
    """Seed every generator of torch if a seed was given."""
    if sampling.seed is not None:
        import torch

        torch.manual_seed(sampling.seed)


def run_turn(
    model: Loaded,
    prompt: Sequence[int],
    sampling: SamplingOptions,
    max_new_tokens: int,
    sink: Sink,
    *,
    cache: Any = None,
    stop: StopOnInterrupt | None = None,
) -> Turn:
    """Generate from the token ids `prompt`; with a `cache`, what it holds must be the beginning of `prompt`.

    Raises ContextError and whatever else `model.generate` raises.
    """
    import torch

    stream = TextStream(model.river.tokenizer, sink)
    input_ids = torch.tensor([list(prompt)], dtype=torch.long, device=model.device)
    arguments = _sampling_arguments(sampling) | _padding_arguments(model)
    if cache is not None:
        arguments["past_key_values"] = cache
    if stop is not None:
        arguments["stopping_criteria"] = [stop]
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        streamer=stream,
        **arguments,
    )
    return Turn(stream.text, output[0].tolist(), stopped=stop is not None and stop.asked)


def _sampling_arguments(sampling: SamplingOptions) -> dict[str, Any]:
    """All of them, always: a checkpoint's generation config must not turn greedy into sampling or narrow what it
    samples from. Its other habits (stop tokens, a repetition penalty) stay."""
    if sampling.greedy:
        return {"do_sample": False, "num_beams": 1}
    return {
        "do_sample": True,
        "num_beams": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": 0 if sampling.top_k is None else sampling.top_k,
    }


def _padding_arguments(model: Loaded) -> dict[str, Any]:
    """A pad token for checkpoints without one: generate wants one, a batch of one never shows it."""
    if model.generation_config.pad_token_id is not None:
        return {}
    end = model.generation_config.eos_token_id
    first = end[0] if isinstance(end, (list, tuple)) and end else end
    return {} if first is None or isinstance(first, (list, tuple)) else {"pad_token_id": int(first)}
