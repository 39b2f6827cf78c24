"""What the methods of a transformers model do on a loaded one: `generate` is accounted for, copies are refused.

Set on the instance; the class stays the one that the checkpoint names.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from river_offload.errors import ContextError, UsageError
from river_offload.handle import Account, River
from river_offload.kv.cache import SharedCache, cache_argument, cache_tensors
from river_offload.memory.storages import StorageMeter, storage_bytes

_DEFAULT_NEW_TOKENS = 20
"""What transformers generates when nobody says how much."""


def install_seams(model: PreTrainedModel, river: River) -> None:
    """Put `river` on the model and replace the methods that must know of it."""
    model.river = river
    model.forward = _metered_forward(model, river)
    model.generate = _accounted_generate(model, river)
    for name in ("state_dict", "save_pretrained", "push_to_hub", "half", "float", "double", "bfloat16", "cpu", "cuda"):
        setattr(model, name, _refusal(name))
    model.to = _move_nowhere(model)


def _metered_forward(model: PreTrainedModel, river: River) -> Any:
    """The model's forward, its allocations counted whenever a passage may rise higher than those before it.

    Counting costs microseconds for every operator. So a passage is metered only when no metered one had as many tokens
    and as many cached ones (to a power of two) and as dense a mask; else the least figure of those that had is taken.
    """
    plain = model.forward
    held_bytes = river.device_bytes()
    risen_bytes: dict[tuple[int, int, bool], int] = {}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        new_tokens = tokens.shape[0] * tokens.shape[1] if isinstance(tokens, torch.Tensor) else 0
        cached_bytes = storage_bytes(cache_tensors(cache)) if isinstance(cache, Cache) else 0
        cached = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
        size = (new_tokens, cached.bit_length(), _is_padded(kwargs.get("attention_mask")))
        covered = [rise for seen, rise in risen_bytes.items() if all(a <= b for a, b in zip(size, seen, strict=True))]
        if covered:
            rise_bytes = min(covered)
            output = plain(*args, **kwargs)
        else:
            with StorageMeter() as meter:
                output = plain(*args, **kwargs)
            rise_bytes = risen_bytes[size] = meter.peak_bytes
        peak_bytes = held_bytes + cached_bytes + rise_bytes
        river.account.peak_device_bytes = max(river.account.peak_device_bytes, peak_bytes)
        return output

    return forward


def _is_padded(mask: object) -> bool:
    """Whether transformers makes a dense mask of it. Reading a 2-d mask waits for the device, as transformers does."""
    return isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and (mask.ndim > 2 or not bool(mask.all())))


def _accounted_generate(model: PreTrainedModel, river: River) -> Any:
    plain = model.generate

    @functools.wraps(plain)
    def generate(inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        prompt = inputs if inputs is not None else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        config = _with_defaults(generation_config, model.generation_config)
        # Which way a passage goes is decided in Python: transformers must not compile the forward for a static cache.
        if generation_config is None:
            kwargs["disable_compile"] = True
        else:
            generation_config = copy.deepcopy(generation_config)
            generation_config.disable_compile = True
        if isinstance(prompt, torch.Tensor):
            _check_prompt(prompt)
            _give_cache(model, river, prompt, config, kwargs)
        river.ends_a_row(_token_ids(_option("pad_token_id", config, kwargs), _option("eos_token_id", config, kwargs)))
        river.account = Account(
            prompt_tokens=prompt.shape[1] if isinstance(prompt, torch.Tensor) else 0,
            first_record=len(river.trace.records),
            load_s=river.account.load_s,
        )
        started = time.perf_counter()
        try:
            output = plain(inputs, generation_config=generation_config, **kwargs)
        finally:
            river.account.seconds = time.perf_counter() - started
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        given = prompt.shape[1] if isinstance(prompt, torch.Tensor) and prompt.ndim == 2 else 0
        river.account.new_tokens = sequences.shape[1] - given
        return output

    return generate


def _check_prompt(prompt: torch.Tensor) -> None:
    if prompt.shape[1] == 0:
        raise UsageError("the prompt is empty: generation needs at least one token to start from")


def _give_cache(
    model: PreTrainedModel, river: River, prompt: torch.Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> None:
    """Check the call against the planned context, and hand it a cache of the right size unless it brings its own."""
    name = cache_argument(model)
    if "past_key_values" in kwargs:
        kwargs[name] = kwargs.pop("past_key_values")
    own: Cache | None = kwargs.get(name)
    rows, prompt_tokens = prompt.shape[0], prompt.shape[1]
    beams = max(_option("num_beams", config, kwargs) or 1, _option("num_return_sequences", config, kwargs) or 1)
    rows *= beams
    context, planned_rows = river.config.context, river.config.batch
    wanted = _option("max_new_tokens", config, kwargs)
    if wanted is None:
        max_length = _option("max_length", config, kwargs)
        wanted = _DEFAULT_NEW_TOKENS if max_length is None else max(max_length - prompt_tokens, 1)
    total = prompt_tokens + wanted
    if rows > planned_rows and _is_padded(kwargs.get("attention_mask")):
        raise ContextError(
            f"{rows} padded rows need attention masks that were planned for {planned_rows} of them: load with "
            f"batch={rows}, or generate rows of one length together"
        )
    if total * rows > context * planned_rows:
        each, planned = (f" in each of {n} rows" if n > 1 else "" for n in (rows, planned_rows))
        remedy = f"a larger context{' or batch' if rows > 1 else ''}"
        raise ContextError(
            f"{prompt_tokens} prompt tokens and up to {wanted} new ones{each} do not fit the planned context of "
            f"{context}{planned}: load with {remedy}, or ask for fewer new tokens"
        )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and prompt_tokens > limit:
        raise ContextError(f"the prompt has {prompt_tokens} tokens, the model attends to at most {limit}: shorten it")
    implementation = _option("cache_implementation", config, kwargs)
    if own is None and implementation is None and _option("use_cache", config, kwargs) is not False:
        kwargs[name] = SharedCache(model.config.get_text_config(decoder=True), total)


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


def _refusal(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(
            f"{name}() is not possible on a loaded river model: its layers rest on several tiers, in two precisions. "
            "Use the checkpoint it was loaded from, or load() again with other options"
        )

    return refuse


def _move_nowhere(model: PreTrainedModel) -> Any:
    """`to` accepts the device and dtype that the model has, which pipelines ask for, and refuses others."""

    def to(*args: Any, **kwargs: Any) -> PreTrainedModel:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        own = model.device
        elsewhere = device is not None and (device.type != own.type or device.index not in (None, own.index))
        if elsewhere or dtype not in (None, model.dtype):
            _refusal("to")()
        return model

    return to
