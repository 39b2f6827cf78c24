"""A prompt in chunks: what one chunk of it hands to a decoder layer, and what is outside the layers, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from river_offload.attention import DeferredMask
from river_offload.errors import UsageError
from river_offload.kv.memory import Allocate

Spans = Callable[[int | None, int], Iterable[slice]]
"""(depth, tokens) -> the chunks of a prompt in order; depth is None outside the layers."""


def spans_of(chunk_tokens: int) -> Spans:
    """Chunks of `chunk_tokens`, the last one shorter."""

    def spans(_depth: int | None, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, chunk_tokens):
            yield slice(start, min(start + chunk_tokens, tokens))

    return spans


class ChunkedCall:
    """One call of a decoder layer with the states of a whole prompt, to be made chunk by chunk.

    Args:
        depth: `layer_idx` of the layer, its place in the cache.
        tokens: of the prompt.
        args: what was given by position beside the states. Nothing may be.
        kwargs: what was given by name.

    Raises UsageError for what cannot be cut.
    """

    def __init__(self, depth: int, tokens: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if args:
            raise _cannot_cut(f"its model hands {len(args)} arguments to a layer without their names")
        self._depth = depth
        self._tokens = tokens
        self._kwargs = kwargs
        caches = [value for value in kwargs.values() if isinstance(value, Cache)]
        if not caches:
            raise _cannot_cut("the chunks meet in the KV cache, and there is none: leave use_cache on")
        self._cache = caches[0]
        self._cached_tokens = int(self._cache.get_seq_length(depth))

    def at(self, span: slice) -> dict[str, Any]:
        """Keyword arguments of the chunk `span`, which must come right after the chunks that ran before."""
        return {name: self._cut(name, value, span) for name, value in self._kwargs.items()}

    def _cut(self, name: str, value: Any, span: slice) -> Any:
        if name == "attention_mask":
            return self._mask(value, span)
        if name == "position_embeddings" and isinstance(value, tuple):
            return tuple(part[:, span] for part in value)
        if name in ("position_ids", "cache_position"):
            return None if value is None else value[..., span]
        if isinstance(value, torch.Tensor) and self._tokens in value.shape:
            raise _cannot_cut(f"its layers take {name}, and how that belongs to the tokens is not known")
        return value

    def _mask(self, mask: Any, span: slice) -> torch.Tensor | None:
        count = span.stop - span.start
        keys, first_key = self._cache.get_mask_sizes(count, self._depth)
        if isinstance(mask, DeferredMask):
            return mask.of_chunk(count, self._cached_tokens + span.start, keys, first_key)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            raise _cannot_cut(f"its layers take a {type(mask).__name__} as attention_mask")
        # Its last column is the prompt's last token; a static cache has columns for tokens to come, and starts at 0.
        before = max(self._cached_tokens + self._tokens - mask.shape[-1], 0)
        return mask[:, :, span, first_key - before : first_key - before + keys]


def only_state(output: Any) -> torch.Tensor:
    """What a decoder layer returns for a chunk: its state. Raises UsageError when there is more to put together."""
    if isinstance(output, tuple):
        if any(isinstance(more, torch.Tensor) for more in output[1:]):
            raise _cannot_cut("its layers return more than their state")
        output = output[0]
    state: torch.Tensor = output
    return state


def token_wise(
    forward: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    spans: Iterable[slice],
    into: torch.Tensor | None = None,
    allocate: Allocate | None = None,
) -> torch.Tensor:
    """`forward` of tokens that do not look at each other, [batch, tokens, ...], chunk by chunk.

    Args:
        into: where the result goes, which may be `tokens`; None for memory of its own.
        allocate: gives that memory; None for the device.
    """
    for span in spans:
        part = forward(tokens[:, span])
        if into is None:
            shape = (*tokens.shape[:2], *part.shape[2:])
            into = part.new_empty(shape) if allocate is None else allocate(shape, part.dtype)
        into[:, span] = part
    assert into is not None
    return into


def _cannot_cut(why: str) -> UsageError:
    return UsageError(f"this prompt is longer than a chunk and cannot be read in chunks: {why}")
