"""What the methods of a transformers model do on a loaded one: `generate` is accounted for, copies are refused.

Set on the instance; the class stays the one that the checkpoint names.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from river_offload.decoding.handover import take_over
from river_offload.errors import ContextError, UsageError, not_possible
from river_offload.handle import River
from river_offload.kv.cache import SharedCache, cache_argument
from river_offload.kv.kind import KvKind
from river_offload.metering import meter_forward
from river_offload.structure import attended_tokens

_REFUSED = {
    "state_dict": "state_dict()",
    "load_state_dict": "load_state_dict()",
    "save_pretrained": "save_pretrained()",
    "push_to_hub": "push_to_hub()",
    "resize_token_embeddings": "resize_token_embeddings()",
    "_apply": "moving or converting",  # half, float, cuda, to_empty, share_memory all end there
    "__reduce_ex__": "copying or pickling",
    "__deepcopy__": "copying",
}

_DEFAULT_NEW_TOKENS = 20
"""What transformers generates when nobody says how much."""


def install_seams(model: PreTrainedModel, river: River) -> None:
    """Put `river` on the model and replace the methods that must know of it."""
    model.river = river
    meter_forward(model, river)
    model.generate = _accounted_generate(model, river)
    for part in (model, model.get_decoder()):
        for name, what in _REFUSED.items():
            setattr(part, name, _refusal(what))
        part.to = _move_nowhere(model)


def _accounted_generate(model: PreTrainedModel, river: River) -> Any:
    plain = model.generate

    @functools.wraps(plain)
    def generate(inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        config = _with_defaults(generation_config, model.generation_config)
        # Which way a passage goes is decided in Python: transformers must not compile the forward for a static cache.
        if generation_config is None:
            kwargs["disable_compile"] = True
        else:
            generation_config = copy.deepcopy(generation_config)
            generation_config.disable_compile = True
        if inputs is None:
            inputs = kwargs.pop("input_ids", None)
        if river.drafts:
            generation_config = take_over(river, config, generation_config, kwargs, cache_argument(model))
        prompt = inputs if inputs is not None else kwargs.get("inputs_embeds")
        if not isinstance(prompt, torch.Tensor) or prompt.ndim < 2:
            raise UsageError(f"the prompt is a {type(prompt).__name__}: expected a tensor of ids [rows, tokens]")
        if prompt.shape[1] == 0:
            raise UsageError("the prompt is empty: generation needs at least one token to start from")
        _refuse_pieces(_option("prefill_chunk_size", config, kwargs))
        padding = _take_padding(inputs, kwargs)
        prompt = prompt[:, padding:]
        _give_cache(model, river, prompt, config, kwargs)
        closing = _token_ids(_option("pad_token_id", config, kwargs), _option("eos_token_id", config, kwargs))
        with river.accounting(prompt.shape[1], closing):
            ids = None if inputs is None else inputs[:, padding:]
            output = plain(ids, generation_config=generation_config, **kwargs)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            river.account.new_tokens = sequences.shape[1] - (prompt.shape[1] if inputs is not None else 0)
        if padding and inputs is not None:
            sequences = torch.cat([inputs[:, :padding].expand(len(sequences), -1), sequences], dim=1)
            if isinstance(output, torch.Tensor):
                return sequences
            output.sequences = sequences
        return output

    return generate


def _refuse_pieces(tokens: int | None) -> None:
    if tokens is not None:
        raise UsageError(
            f"prefill_chunk_size={tokens} is not possible: each piece of the prompt would get a depth of its own. Load "
            f"with prefill_chunk={tokens}, which cuts the prompt inside the layers and keeps one depth for all of it"
        )


def _take_padding(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> int:
    """Columns of padding at the left of a single row, taken off its mask: nothing in the row attends to them.

    With them transformers would build a dense mask of the prompt's length squared, which no plan holds.
    """
    mask = kwargs.get("attention_mask")
    if inputs is None or inputs.shape[0] > 1 or not isinstance(mask, torch.Tensor) or mask.shape != inputs.shape:
        return 0
    padding = int((mask[0] != 0).int().argmax())
    kwargs["attention_mask"] = mask[:, padding:]
    return padding


def _give_cache(
    model: PreTrainedModel, river: River, prompt: torch.Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> None:
    """Check the call against the planned context, and hand it a cache of the right size unless it brings its own."""
    name = cache_argument(model)
    if "past_key_values" in kwargs:
        kwargs[name] = kwargs.pop("past_key_values")
    own: Cache | None = kwargs.get(name)
    sequences = max(_option("num_beams", config, kwargs) or 1, _option("num_return_sequences", config, kwargs) or 1)
    rows, prompt_tokens = prompt.shape[0] * sequences, prompt.shape[1]
    wanted = _option("max_new_tokens", config, kwargs)
    if wanted is None:
        max_length = _option("max_length", config, kwargs)
        wanted = _DEFAULT_NEW_TOKENS if max_length is None else max(max_length - prompt_tokens, 1)
    total = prompt_tokens + wanted
    context, planned_rows = river.config.context, river.config.batch
    asked = f"{prompt_tokens} prompt tokens and up to {wanted} new ones"
    limit = attended_tokens(model.config.get_text_config(decoder=True))
    if limit is not None and total > limit:
        raise ContextError(
            f"{asked} are more than the {limit} that this model attends to: shorten the prompt, or ask for fewer new "
            "tokens"
        )
    if total > context:
        raise ContextError(
            f"{asked} do not fit the planned context of {context}: load with a larger context, or ask for fewer new "
            "tokens"
        )
    if rows > planned_rows:
        raise ContextError(
            f"{rows} rows (prompts times beams or returned sequences) do not fit the {planned_rows} that memory was "
            f"planned for: load with batch={rows}"
        )
    held = own.get_max_length() if isinstance(own, StaticCache) else 0
    if held > context:
        raise ContextError(f"a static cache of {held} tokens is more than the planned context of {context}: shorten it")
    _check_kind(river, own, config, kwargs)
    transformers_own = _option("cache_implementation", config, kwargs) or _option("use_cache", config, kwargs) is False
    if own is None and not transformers_own:
        kwargs[name] = river.new_cache(total)


def _check_kind(river: River, own: Cache | None, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Raises UsageError where a cache of transformers' own would take the place of the kind that was asked for."""
    kind = KvKind.of(river.config)
    if kind.is_plain:
        return
    found = None
    if own is not None:
        found = None if isinstance(own, SharedCache) and own.kind == kind else f"a {type(own).__name__} of another kind"
    elif implementation := _option("cache_implementation", config, kwargs):
        found = f"cache_implementation={implementation!r}"
    elif _option("use_cache", config, kwargs) is False:
        found = "use_cache=False"
    if found is not None:
        raise UsageError(
            f"{found} does not go with {kind}, which this model was loaded with: leave it out, keep a cache of "
            "model.river.new_cache(), or load without kv_bits and kv_tier"
        )


def _with_defaults(given: GenerationConfig | None, defaults: GenerationConfig) -> GenerationConfig:
    """What transformers makes of a generation config: fields that were not set are the model's own."""
    merged = GenerationConfig() if given is None else copy.deepcopy(given)
    merged.update(**defaults.to_dict(), defaults_only=True)
    return merged


def _option(name: str, config: GenerationConfig, kwargs: dict[str, Any]) -> Any:
    given = kwargs.get(name)
    return getattr(config, name, None) if given is None else given


def _token_ids(*options: Any) -> frozenset[int]:
    """The ids in options that hold one, a list of them, or nothing."""
    flat = (torch.as_tensor(option).flatten().tolist() for option in options if option is not None)
    return frozenset(token for tokens in flat for token in tokens)


def _refusal(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise not_possible(what)

    return refuse


def _move_nowhere(model: PreTrainedModel) -> Any:
    """`to` accepts the device and dtype that the model has, which pipelines ask for, and refuses others."""

    def to(*args: Any, **kwargs: Any) -> PreTrainedModel:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        own = model.device
        elsewhere = device is not None and (device.type != own.type or device.index not in (None, own.index))
        if elsewhere or dtype not in (None, model.dtype):
            raise not_possible("to()")
        return model

    return to
