"""The memory that the River-LLM paper states for its methods, and closed forms that give its figures.

arXiv 2604.18396 states peak memory for Llama-3.1-8B at 16K and 64K tokens. What it counts is not written down; the
forms below are the simplest that were found to give its figures. They count weights at exactly 16 or 4 bits and the
KV cache, and nothing that a run needs besides: no scales, no activations, no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from river_offload.structure import Structure

GIB = 2**30
BALCONY_EXTRA_LAYERS = 6
"""Balcony adds this many full-precision decoder layers, each with a KV cache of its own."""
RIVER_RESIDENT_LAYERS = 3
"""Shallow full-precision layers that the paper's offloading keeps on the device."""
EE_LLM_RATIO = 1.1528
"""Both figures for EE-LLM are this many times those of the backbone. Fitted: what it adds is not published."""

_TOKENS_16K, _TOKENS_64K = 16 * 1024, 64 * 1024
_LLAMA_3_1_8B_PARAMETERS = 8_030_261_248
_PUBLISHED_GIB: dict[str, dict[int, float]] = {
    "backbone": {_TOKENS_16K: 16.96, _TOKENS_64K: 22.96},
    "balcony": {_TOKENS_16K: 19.77, _TOKENS_64K: 26.90},
    "ee-llm": {_TOKENS_16K: 19.55, _TOKENS_64K: 26.47},
    "quantized": {_TOKENS_16K: 6.47, _TOKENS_64K: 12.47},
    "river": {_TOKENS_16K: 8.73, _TOKENS_64K: 14.73},
}


@dataclass(frozen=True)
class Weights:
    """Parameters of a model by where they are: what the closed forms start from."""

    layers: tuple[int, ...]
    """One entry per decoder layer, norms included."""
    embedding: int
    head: int
    """0 when the head is tied to the embedding."""
    other: int

    @classmethod
    def of(cls, structure: Structure) -> Weights:
        """Count the parameters of a model without weights."""
        outside = {name: prod(shape) for name, shape in structure.outside().items() if name not in structure.tied}
        embedding = outside.pop(structure.embedding_name)
        head = outside.pop(structure.head_name, 0)
        layers = tuple(
            sum(prod(shape) for shape in (structure.weight_shapes(i) | structure.norm_shapes(i)).values())
            for i in range(structure.num_layers)
        )
        return cls(layers, embedding, head, sum(outside.values()))

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head + self.other


def backbone_bytes(weights: Weights, kv_bytes: int) -> int:
    """All weights at 16 bits, and the cache."""
    return _at_16_bits(weights.total) + kv_bytes


def balcony_bytes(weights: Weights, kv_bytes: int) -> int:
    """The backbone and six more of its layers. `kv_bytes`: of all layers, the six included."""
    return _at_16_bits(weights.total + BALCONY_EXTRA_LAYERS * weights.layers[-1]) + kv_bytes


def ee_llm_bytes(weights: Weights, kv_bytes: int) -> int:
    """The backbone, times a fitted number."""
    return round(EE_LLM_RATIO * backbone_bytes(weights, kv_bytes))


def quantized_bytes(weights: Weights, kv_bytes: int) -> int:
    """The embedding at 16 bits, everything else, the LM head included, at exactly 4."""
    return _at_16_bits(weights.embedding) + _at_4_bits(weights.total - weights.embedding) + kv_bytes


def river_bytes(weights: Weights, kv_bytes: int, resident_layers: int = RIVER_RESIDENT_LAYERS) -> int:
    """Some layers and one buffer for a streamed one at 16 bits, as are embedding and head; the exit layers at 4.

    The first layer has no exit layer: a token leaves after one layer at the earliest.
    """
    buffer = max(weights.layers[resident_layers:], default=0)
    full = sum(weights.layers[:resident_layers]) + buffer + weights.embedding + weights.head + weights.other
    return _at_16_bits(full) + _at_4_bits(sum(weights.layers[1:])) + kv_bytes


def is_the_papers(weights: Weights) -> bool:
    """Whether this is the model whose figures are published: Llama-3.1-8B, by whatever name."""
    return weights.total == _LLAMA_3_1_8B_PARAMETERS


def published_bytes(method: str, context: int, weights: Weights, *, batch: int = 1) -> int | None:
    """What the paper states, None where it states nothing: for another model, another length, another batch."""
    if not is_the_papers(weights) or batch != 1:
        return None
    stated_gib = _PUBLISHED_GIB.get(method, {}).get(context)
    return None if stated_gib is None else round(stated_gib * GIB)


def _at_16_bits(parameters: int) -> int:
    return 2 * parameters


def _at_4_bits(parameters: int) -> int:
    return (parameters + 1) // 2
