"""What the model is asked: the options of `generate` and `chat` that bring a prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from river_offload.cli.options import flag, option
from river_offload.cli.streams import reason
from river_offload.errors import UsageError


@dataclass(frozen=True)
class PromptOptions:
    """What the model is asked."""

    prompt: Annotated[str | None, option("--prompt", "TEXT", "Prompt", "The prompt.")] = None
    prompt_file: Annotated[
        str | None,
        option("--prompt-file", "FILE", "Prompt", "Read the prompt from a UTF-8 file; - is standard input."),
    ] = None
    system: Annotated[str | None, option("--system", "TEXT", "Prompt", "A system message for the chat template.")] = (
        None
    )
    raw: Annotated[bool, flag("--raw", panel="Prompt", help="Continue plain text: no chat template.")] = False

    def check(self) -> None:
        """Raises UsageError for options that exclude each other."""
        if self.prompt is not None and self.prompt_file is not None:
            raise UsageError("--prompt and --prompt-file are both given: keep one")
        if self.system is not None and self.raw:
            raise UsageError("--system needs the chat template that --raw leaves out: drop one of them")
        for name, text in (("--prompt", self.prompt), ("--system", self.system)):
            if text is not None:
                _require_utf8(name, text)

    def read(self) -> str | None:
        """The prompt, or None when none was given. Raises UsageError for an unreadable file or an empty prompt."""
        text = self.prompt
        if self.prompt_file is not None:
            text = _read_prompt_file(self.prompt_file)
            if not self.raw:
                text = text.removesuffix("\n")  # editors end a file with one; plain text is kept to the letter
        if text is not None and (not text if self.raw else not text.strip()):
            source = "--prompt" if self.prompt_file is None else f"--prompt-file {self.prompt_file}"
            raise UsageError(f"{source} is empty: the model needs at least one token to start from")
        return text


def _read_prompt_file(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file {name} cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {name} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _require_utf8(name: str, text: str) -> None:
    # Bytes that are not UTF-8 reach Python's arguments as lone surrogates, which no tokenizer accepts.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (at character {error.start})") from error
