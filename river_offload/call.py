"""One call of a transformers model, read in one place: what was handed to it, by position or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Call:
    """The arguments of a forward pass (of the whole model or of its decoder) that matter here."""

    tokens: torch.Tensor
    """Ids [batch, tokens], or embedded tokens [batch, tokens, hidden]."""
    mask: object
    """What was given as attention_mask: None, a tensor, or a dict of tensors by attention type."""
    cache: Cache | None

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Read a call. Raises ValueError when it brings no tokens."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor):
            raise ValueError("the model was called without input_ids and without inputs_embeds: it needs one of them")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        return cls(tokens, mask, kwargs.get("cache", kwargs.get("past_key_values")))

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def new_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def cached_tokens(self) -> int:
        """Tokens per row that the cache holds already. For a static cache this waits for the device."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def is_padded(self) -> bool:
        """Whether transformers makes a dense mask for it. Reading a 2-d mask waits for the device, as it does there."""
        if isinstance(self.mask, torch.Tensor):
            return self.mask.ndim > 2 or not bool(self.mask.all())
        return isinstance(self.mask, dict)

    def real_tokens(self, closing_tokens: frozenset[int] = frozenset()) -> torch.Tensor | None:
        """Which of the new tokens have a say in the exit: bool [batch, new_tokens], or None when all have.

        Padding has none, nor has a row that is finished: one that is fed with one of `closing_tokens`.
        """
        cached_tokens = self.cached_tokens
        if self.new_tokens == 1 and cached_tokens:  # a token that was generated is no padding
            if self.rows == 1 or not closing_tokens or self.tokens.is_floating_point():
                return None
            closing = torch.tensor(sorted(closing_tokens), dtype=self.tokens.dtype, device=self.tokens.device)
            return ~torch.isin(self.tokens, closing)
        mask = self.mask
        if isinstance(mask, dict):
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if not isinstance(mask, torch.Tensor):
            return None
        if mask.ndim == 2:
            return mask[:, -self.new_tokens :].bool()
        # A real token sees itself, whatever the window; a padding token is hidden from every query. The first new token
        # stands after the cached ones, or, where a window has dropped some of those, before the end of the keys.
        allowed = mask if mask.dtype == torch.bool else mask >= 0
        first = min(cached_tokens, allowed.shape[-1] - self.new_tokens)
        return torch.diagonal(allowed[:, 0], offset=first, dim1=-2, dim2=-1)[:, : self.new_tokens]
