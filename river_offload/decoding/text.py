"""The text of a generation as it grows: tokens, what the model is told of them, who has finished, what is returned."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from river_offload.decoding.choice import Choice, Likeliest, Sampled


class Text:
    """What has been accepted, and nothing else: no token of it is ever taken back.

    Does for one token what a step of transformers' own sampling loop does after its forward pass.

    Attributes:
        ids: int64 [rows, tokens], the prompt included.
        kwargs: of the model for a text of this length: masks and positions as long as `ids`, the cache.
        unfinished: bool [rows].
        pads: whether finished rows get padding. Where nothing does, they go on until all have finished.
        processes: whether scores are anything but logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        kwargs: dict[str, Any],
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ) -> None:
        self.model = model
        self.ids = ids
        self.kwargs = kwargs
        self.unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self._config = config
        self._processors = processors
        self._criteria = criteria
        self._streamer = streamer
        self._choice: Choice = Sampled(ids.device) if config.do_sample else Likeliest()
        ends = [criterion.eos_token_id.flatten() for criterion in criteria if hasattr(criterion, "eos_token_id")]
        self.pads = bool(ends)
        self._ends = torch.cat([ids.new_empty(0), *(end.to(ids.device) for end in ends)])
        self.processes = bool(processors)
        wanted = bool(config.return_dict_in_generate)
        self._scores: tuple[torch.Tensor, ...] | None = () if wanted and config.output_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if wanted and config.output_logits else None

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return int(self._config.max_length) - self.ids.shape[1]

    @property
    def done(self) -> bool:
        """Are all rows finished? Waits for the device."""
        return not bool(self.unfinished.any())

    @property
    def writing(self) -> torch.Tensor:
        """bool [rows]: those whose next token is one of their own, and may not be got wrong."""
        return self.unfinished if self.pads else torch.ones_like(self.unfinished)

    def padded(self, token: torch.Tensor, writing: torch.Tensor) -> torch.Tensor:
        """`token`, [rows], with padding for those rows that are not `writing`."""
        return torch.where(writing, token, self._config._pad_token_tensor.to(token.device)) if self.pads else token

    def ends(self, token: torch.Tensor) -> torch.Tensor:
        """Which rows are at their end with `token`, [rows], bool [rows]: as far as a token tells. Padding does not: a
        row may well write that token."""
        return torch.isin(token, self._ends)

    def extended(self, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """`ids` and `kwargs` of the text with more tokens, [rows] each, after it. The text stays as it is."""
        if not tokens:
            return self.ids, self.kwargs
        ids = torch.cat([self.ids, torch.stack(tokens, dim=1)], dim=1)
        return ids, grown(self.model, self.kwargs, len(tokens))

    def pick(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after `ids`, [rows], and the processed scores it was picked by, from logits [rows, vocabulary]."""
        scores = self._processors(ids, logits.to(copy=True, dtype=torch.float32, device=ids.device))
        return self._choice.pick(scores, ids.shape[1]), scores

    def add(self, token: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """The text goes on with `token`, [rows]; finished rows get padding."""
        token = self.padded(token, self.unfinished)
        self._choice.settled(self.ids.shape[1])
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        self.kwargs = grown(self.model, self.kwargs, 1)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits.to(copy=True, dtype=torch.float32),)
        self.unfinished &= ~self._criteria(self.ids, self._scores)
        if self._streamer is not None:
            self._streamer.put(token.cpu())

    def end(self, cache_name: str) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        kept = {cache_name: self.kwargs.get(cache_name)}
        return GenerateDecoderOnlyOutput(sequences=self.ids, scores=self._scores, logits=self._logits, **kept)


def grown(model: PreTrainedModel, kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The model's keyword arguments for a text that is longer by so many tokens."""
    grown: dict[str, Any] = model._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=tokens)
    return grown
