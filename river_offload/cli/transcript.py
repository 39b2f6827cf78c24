"""A conversation as token ids, and how much of it a KV cache already holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from river_offload.errors import UsageError

Message = dict[str, str]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` under the chat template, ready for the answer. Raises UsageError when it refuses them."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        hint = " Leave out --system, or use --raw." if messages[0]["role"] == "system" else " Use --raw."
        raise UsageError(f"the chat template of this model refuses the conversation: {error}.{hint}") from error
    # The template has written the special tokens that start a text; a second one would shift every position.
    return _ids(tokenizer, text, special=False)


def encode_text(tokenizer: Any, text: str, *, first: bool = True) -> list[int]:
    """Token ids of plain text, with the tokens that start a text if it is the `first`. Raises UsageError for none."""
    ids = _ids(tokenizer, text, special=first)
    if not ids:
        raise UsageError("the prompt gives no token at all: write some text")
    return ids


def encode_prompt(tokenizer: Any, prompt: str, *, system: str | None, raw: bool) -> list[int]:
    """Token ids of one prompt. Raises UsageError for a system message without a template, and for no token at all."""
    if raw or not has_template(tokenizer):
        if system is not None:
            raise UsageError("--system needs a chat template, and this tokenizer has none: leave it out")
        return encode_text(tokenizer, prompt)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(tokenizer, [*opening, {"role": "user", "content": prompt}])


class Transcript:
    """What was said so far. A turn is `ask`, generate with `cache`, then `keep` or `drop`.

    The cache is used again only when its tokens are, one by one, the beginning of the next prompt. A template may
    write earlier turns differently from how they were generated (it trims them, or leaves out what was thought
    aloud); then the next prompt starts on a new cache, and the answer is that of the whole transcript either way.
    """

    def __init__(self, tokenizer: Any, new_cache: Callable[[], Any], *, system: str | None, raw: bool) -> None:
        self._tokenizer = tokenizer
        self._new_cache = new_cache
        self._raw = raw or not has_template(tokenizer)
        if self._raw and system is not None:
            raise UsageError("--system needs a chat template, and this tokenizer has none: leave it out")
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)
        self._sequence: list[int] = []
        self._cached: list[int] = []
        self.cache: Any = None

    def ask(self, text: str) -> list[int]:
        """Token ids of the transcript with `text` as the next thing the user says; `cache` is ready for them.

        Nothing is remembered before `keep`. Raises UsageError when it is no text or the template refuses it.
        """
        if self._raw:
            prompt = self._sequence + encode_text(self._tokenizer, text, first=not self._sequence)
        else:
            prompt = encode_chat(self._tokenizer, [*self._messages, {"role": "user", "content": text}])
        held = len(self._cached)
        # Shorter, not as long: there must be a token left to feed.
        fits = held < len(prompt) and prompt[:held] == self._cached
        if self.cache is None or not fits or int(self.cache.get_seq_length()) != held:
            self.drop()  # first let go of the old one: there is memory for one
            self.cache = self._new_cache()
        return prompt

    def keep(self, text: str, answer: str, sequence: Sequence[int]) -> None:
        """Remember the turn: what was asked and answered, and the tokens it was generated from and with."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self._sequence = list(sequence)
        held = int(self.cache.get_seq_length())
        # The last token is chosen but not fed, so the cache is shorter than the sequence, by how much is its business.
        if held <= len(sequence):
            self._cached = list(sequence[:held])
        else:
            self.drop()

    def drop(self) -> None:
        """Forget the cache. After a turn that failed its layers may differ in length."""
        self.cache, self._cached = None, []


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids; every text takes this way. Raises UsageError for bytes that are not UTF-8, read as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("this text has bytes that are not UTF-8: write it again in UTF-8") from error
    return [int(token) for token in tokenizer(text, add_special_tokens=special)["input_ids"]]
