"""START HERE: `RiverLayer`, the two ways through one depth of the model.

The decoder-layer list of a transformers model holds one of these per depth; everything else of the model is untouched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from river_offload.chunks import ChunkedCall, only_state
from river_offload.errors import not_possible
from river_offload.one_token import OneToken
from river_offload.passage import Flow


class RiverLayer(nn.Module):
    """One depth: the model's own decoder layer (backbone) and its 4-bit copy (river), on one place in the KV cache.

    Args:
        depth: 0-based place in the model, the `layer_idx` of both copies.
        backbone: the model's own layer; None where no mode that was built reaches it.
        river: its quantized copy, sharing the norms; None where no mode that was built reaches it.
        flow: the open passage and the store that lends backbone layers.
        one_token: the river for one token in one call, or why there is no such thing.
    """

    def __init__(
        self,
        depth: int,
        backbone: nn.Module | None,
        river: nn.Module | None,
        flow: Flow,
        one_token: OneToken | str,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.backbone = backbone
        self.river = river
        self.one_token = one_token
        self._flow = flow

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [batch, tokens, hidden]; all else passes through untouched to whichever copy runs."""
        run = self._chunk_by_chunk if self._flow.passage.in_chunks else self._at_once
        if self._flow.takes_river(self.depth):
            assert self.river is not None
            if not isinstance(self.one_token, str):
                state = self.one_token.run(hidden_states, args, kwargs)
                if state is not None:
                    return state
            return run(self.river, hidden_states, args, kwargs, looking=False)
        with self._flow.store.hold(self.depth) as backbone:
            output = run(backbone, hidden_states, args, kwargs, looking=True)
        self._flow.ran(self.depth + 1)
        return output

    def _at_once(self, layer: nn.Module, hidden_states: torch.Tensor, args: Any, kwargs: Any, *, looking: bool) -> Any:
        output = layer(hidden_states, *args, **kwargs)
        if looking:
            self._flow.passage.look(self.depth + 1, hidden_states, _state(output))
        return output

    def _chunk_by_chunk(
        self, layer: nn.Module, hidden_states: torch.Tensor, args: Any, kwargs: Any, *, looking: bool
    ) -> torch.Tensor:
        """A long prompt. Each chunk's new state takes the place of the old one, which nobody needs any more."""
        passage, tokens = self._flow.passage, hidden_states.shape[1]
        call = ChunkedCall(self.depth, tokens, args, kwargs)
        states = hidden_states if passage.owns(hidden_states) else self._flow.states_like(hidden_states)
        for span in self._flow.spans(self.depth, tokens):
            entering = self._flow.on_device(hidden_states[:, span])
            leaving = only_state(layer(entering, **call.at(span)))
            if looking:
                passage.look(self.depth + 1, entering, leaving, span)
            states[:, span] = leaving
            del entering, leaving  # or they would be there during the next chunk
            self._flow.progress.advance(1)
        return states

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are refused: they would share, or lack, what the store lends."""
        raise not_possible("copying or pickling")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise not_possible("moving or converting")

    def _save_to_state_dict(self, *_: Any, **__: Any) -> None:
        raise not_possible("state_dict()")

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise not_possible("load_state_dict()")

    def __getattr__(self, name: str) -> Any:
        """Model code may read a layer's attributes (`attention_type`): both copies have the same."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            layer = modules.get("backbone") or modules.get("river")
            if layer is None:
                raise
            return getattr(layer, name)


def _state(output: Any) -> torch.Tensor:
    """A decoder layer returns its state, older ones a tuple that starts with it."""
    return output[0] if isinstance(output, tuple) else output
