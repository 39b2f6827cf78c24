"""Tiny random models of every supported family, as real checkpoints: the tests compare with transformers itself.

Dimensions suit groups of 32; `head_dim` is never hidden / heads. Weights are large enough for the layers to disagree.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)

import river_offload
from river_offload import QuantConfig
from river_offload.errors import BudgetError
from river_offload.quant.kernels import Reference as ReferenceKernel
from river_offload.quant.linear import RiverLinear

VOCAB = 101
SEED = 20240711
QUANT = QuantConfig(group_size=32)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def _configs() -> dict[str, PretrainedConfig]:
    def config(kind: type[PretrainedConfig], **own: Any) -> PretrainedConfig:
        return kind(**_COMMON | own)

    gemma_layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return {
        "llama": config(LlamaConfig, num_hidden_layers=5, rope_parameters=_LLAMA3_ROPE),
        "mistral": config(MistralConfig, num_hidden_layers=4, sliding_window=8, intermediate_size=128),
        "qwen2": config(Qwen2Config, num_hidden_layers=4, use_sliding_window=False),
        "qwen3": config(Qwen3Config, num_hidden_layers=5, tie_word_embeddings=True),
        "phi3": config(Phi3Config, num_hidden_layers=5, rope_parameters=_PARTIAL_ROPE, sliding_window=None),
        "gemma3": config(
            Gemma3TextConfig,
            num_hidden_layers=6,
            sliding_window=8,
            layer_types=gemma_layers,
            tie_word_embeddings=True,
            query_pre_attn_scalar=32,
        ),
        "ministral3": config(Ministral3Config, num_hidden_layers=4, rope_parameters=_YARN_ROPE),
    }


FAMILIES = tuple(_configs())


def config_of_family(name: str, **changes: Any) -> PretrainedConfig:
    """The config of family `name`, of which `changes` override some."""
    config = _configs()[name]
    for field, value in changes.items():
        setattr(config, field, value)
    return config


def write_family(name: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save the model of family `name` in `directory` as safetensors; `changes` override its config."""
    config = config_of_family(name, **changes)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for key, parameter in model.named_parameters():
        if "norm" in key:
            torch.nn.init.normal_(parameter, 0.0 if name == "gemma3" else 1.0, 0.2)  # gemma3 adds one by itself
        elif key.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(directory)
    return directory


def plain_model(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers loads it, in memory of torch's own.

    Transformers maps float32 weights from the file, at addresses that are no multiple of 64 bytes, and then the BLAS
    takes another path for a single token: the last bit differs between two plain models, too.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def load_tiny(directory: Path, **options: Any) -> Any:
    """`river_offload.load` with options that suit a tiny model: everything resident unless `budget` says otherwise, and
    in mode exit, which has both ways through every layer."""
    defaults: dict[str, Any] = {"mode": "exit", "budget": "1GiB", "context": 64, "quant": QUANT, "device": "cpu"}
    return river_offload.load(directory, **defaults | options)


def budget_for(directory: Path, resident: int, **options: Any) -> int:
    """The smallest budget, in bytes, that keeps `resident` backbone layers on the device and streams the others."""
    refused = _refusal(directory, tuple(options.items()))
    return refused.needed_bytes + resident * refused.terms["slots"] // options.get("slots", 2)


@cache
def _refusal(directory: Path, options: tuple[tuple[str, Any], ...]) -> BudgetError:
    with pytest.raises(BudgetError) as refused:
        load_tiny(directory, **dict(options) | {"budget": 1})
    return refused.value.with_traceback(None)  # or the frames would keep the models


def poison_slots(model: Any) -> None:
    """From now on a released slot is full of NaN: compute that reads it too early or too late shows."""
    model.river._flow.store._slots.poison_on_release = True


def both(models: tuple[Any, Any], *inputs: Any, **options: Any) -> list[Any]:
    """The same call of generate on the two, with the same seed."""
    results = []
    for model in models:
        set_seed(7)
        results.append(model.generate(*inputs, **options))
    return results


class Reference:
    """What `fixed:D` must compute, out of plain transformers modules alone: dense layers below D, above D layers whose
    matrices were replaced by their dequantized selves."""

    def __init__(self, directory: Path) -> None:
        self.model = plain_model(directory)
        self._dense: list[dict[str, torch.Tensor]] = []
        self._dequantized: list[dict[str, torch.Tensor]] = []
        for layer in self.model.model.layers:
            linears = {name: child for name, child in layer.named_modules() if isinstance(child, torch.nn.Linear)}
            self._dense.append({name: linear.weight.data for name, linear in linears.items()})
            self._dequantized.append(
                {
                    name: RiverLinear.quantize(
                        linear.weight.data, bits=QUANT.bits, group=QUANT.group_size, kernel=ReferenceKernel()
                    ).dequantize()
                    for name, linear in linears.items()
                }
            )

    def at(self, depth: int) -> PreTrainedModel:
        """The model with `depth` dense layers."""
        for index, layer in enumerate(self.model.model.layers):
            weights = (self._dense if index < depth else self._dequantized)[index]
            for name, weight in weights.items():
                layer.get_submodule(name).weight.data = weight
        return self.model


def tokens(count: int, *, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids, int64 [rows, count], none of them a special one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, count), generator=generator)


@torch.no_grad()
def logits_of_steps(model: PreTrainedModel, ids: torch.Tensor, prompt: int, cache: Any) -> list[torch.Tensor]:
    """Logits of a prefill of the first `prompt` tokens of `ids` and of one step for each of the rest."""
    steps = [ids[:, :prompt], *(ids[:, i : i + 1] for i in range(prompt, ids.shape[1]))]
    return [model(step, past_key_values=cache, use_cache=True).logits for step in steps]
