"""`generate` in the modes that draft: what of it works, and how it is given the loop."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from policies.drafting import GATED_DRAFT, FixedLength
from river_offload.decoding.loop import DraftPlan, decoding_method
from river_offload.errors import UsageError
from river_offload.handle import River

_NAMES = {
    "num_beams": "beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "assisted decoding",
    "assistant_model": "assisted decoding",
    "use_mtp": "assisted decoding",
    "custom_generate": "another decoding loop",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}
"""Other ways to decode, by the option that asks for them."""
_PROCESSORS = {
    "guidance_scale": "it runs the model itself, token by token",
    "watermarking_config": "it may keep account of every token it is asked about, and here it is asked of some twice",
}
"""Logits processors that count on being asked once a token."""
_KEPT = ("output_hidden_states", "output_attentions")


def take_over(
    river: River,
    config: GenerationConfig,
    own_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    cache_name: str,
) -> GenerationConfig | None:
    """Make a call of `generate` one that drafts and checks. Changes `kwargs`.

    Args:
        config: what transformers will make of the caller's config.
        own_config: the caller's, a copy; None when there is none.

    Returns:
        The config to hand on. Raises UsageError for what cannot be had in these modes.
    """
    _require_supported(river, config, kwargs)
    stops = kwargs.pop("stop_strings", None) or config.stop_strings
    if stops:
        _stop_at(stops, river, kwargs)
    if config.stop_strings:
        own_config = copy.deepcopy(config if own_config is None else own_config)
        own_config.stop_strings = None
    gate = river.gate if river.mode == "gated" else None
    # Without checks there is nothing to adapt to, and a draft of no tokens would go on for ever.
    adapts = river.draft == "adaptive"
    drafting = FixedLength(GATED_DRAFT) if gate == 0 and adapts else river.drafting
    plan = DraftPlan(river.draft_depth, drafting, gate, river.acceptance)
    kwargs["custom_generate"] = decoding_method(river.flow, plan, cache_name, kwargs.get("streamer"))
    return own_config


def _stop_at(stops: Any, river: River, kwargs: dict[str, Any]) -> None:
    """Transformers forgets the tokenizer when it is given a loop, so the criterion is made here."""
    tokenizer = kwargs.pop("tokenizer", None) or river.tokenizer
    if tokenizer is None:
        raise UsageError("stop_strings need a tokenizer and the checkpoint has none: hand one to generate")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stops))
    kwargs["stopping_criteria"] = criteria


def _require_supported(river: River, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    mode = river.mode
    merged = copy.deepcopy(config)
    options = dict(kwargs)
    merged.update(**{name: value for name, value in options.items() if hasattr(merged, name)})
    asked = merged.get_generation_mode(options.get("assistant_model"))
    others = (name for name in _NAMES if options.get(name) is not None and (name, options[name]) != ("num_beams", 1))
    other = next(others, None)
    if asked not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or other in ("custom_generate", "use_mtp"):
        what = _NAMES.get(other or "", str(getattr(asked, "value", asked)).replace("_", " "))
        raise _refused(mode, what, "greedy search and sampling")
    if merged.use_cache is False:
        raise _refused(mode, "use_cache=False", "a cache")
    for name in _KEPT:
        if getattr(merged, name, None):
            raise _refused(mode, name, "scores and logits, which can be had")
    for name, why in _PROCESSORS.items():
        value = getattr(merged, name, None)
        if value is not None and not (name == "guidance_scale" and value == 1):
            raise _refused(mode, f"{name} ({why})", "other logits processors")


def _refused(mode: str, what: str, instead: str) -> UsageError:
    return UsageError(
        f"mode {mode} does not go together with {what}: it works with {instead}. Use mode backbone for it, with "
        "model.river.using(mode='backbone'), or load the model with mode='exit'"
    )
