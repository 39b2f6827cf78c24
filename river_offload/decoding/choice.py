"""Which token follows: the likeliest, or a sample that depends on the seed and its place alone."""

from __future__ import annotations

from typing import Protocol

import torch


class Choice(Protocol):
    """Picks tokens. The same scores at the same place give the same token, whoever asks and however often."""

    def pick(self, scores: torch.Tensor, place: int) -> torch.Tensor:
        """The next token of each row, int64 [rows].

        Args:
            scores: processed logits, float32 [rows, vocabulary].
            place: length of the text that the token comes after; goes up by one at most from the highest so far.
        """

    def settled(self, place: int) -> None:
        """The token at `place` stands: nobody will ask for it, or for an earlier one, again."""


class Likeliest:
    """Greedy."""

    def pick(self, scores: torch.Tensor, place: int) -> torch.Tensor:
        return scores.argmax(dim=-1)

    def settled(self, place: int) -> None:
        """Nothing is kept."""


class Sampled:
    """The sample that transformers would draw with the same seed.

    A token is drawn as argmax(probability / noise) with exponential noise, which is what `torch.multinomial` does. The
    noise belongs to the place in the text: the draft and the check of a place meet the same one. So the token that the
    backbone picks there is the one it would have picked without any draft, a draft is right if it is that token, and
    the text is the same for every length of drafts. (min(1, p/q) with a new sample after a rejection has the same
    distribution and accepts a little more often, but its text depends on where each draft happened to end.)

    The noise itself is not kept, only the state of torch's own generator before it. After a text that generator is
    where transformers would have left it.

    Args:
        device: of the scores, whose default generator (`torch.manual_seed`) is taken over.
    """

    def __init__(self, device: torch.device) -> None:
        self._source = _default_generator(device)
        self._generator = torch.Generator(device)
        self._states: dict[int, torch.Tensor] = {}
        self._next_state = self._source.get_state()

    def pick(self, scores: torch.Tensor, place: int) -> torch.Tensor:
        first_time = place not in self._states
        if first_time:
            self._states[place] = self._next_state
        self._generator.set_state(self._states[place])
        probabilities = torch.softmax(scores, dim=-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self._generator)
        if first_time:
            self._next_state = self._generator.get_state()
        return (probabilities / noise).argmax(dim=-1)

    def settled(self, place: int) -> None:
        self._source.set_state(self._states.get(place + 1, self._next_state))
        self._states = {later: state for later, state in self._states.items() if later > place}


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
