"""Times one decoder layer shaped like Llama-3.1-8B's: river against backbone at one token, and at 64 rows.

    python tools/bench_layer.py [--dtype bfloat16] [--bits 4] [--group-size 64] [--cached 100 4000] [--rounds 20]

All are timed in turns within one run, so that a busy machine slows all. At one token, after so many cached ones, the
layer's weights (416 MiB) do not fit any cache, so memory traffic is the ceiling: the achieved rate is printed beside
the time. "in one call" is how a river layer takes a token where it can, "by operators" how it does where it cannot. At
64 rows the question is what dequantizing adds to the matmul, matrix by matrix.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from river_offload.kv.cache import SharedCache
from river_offload.one_token import OneToken
from river_offload.quant.linear import RiverLinear
from river_offload.quant.river import install, linear_names

WANTED_SPEEDUP = 4.0  # river against backbone, one token
WANTED_RATIO = 1.3  # dequantized matmul against dense matmul, 64 rows
ROWS = 64


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    with torch.inference_mode():
        layer, rope = _backbone(dtype)
        river = _river(layer, options.bits, options.group_size, dtype)
        result: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "dtype": options.dtype,
            "bits": options.bits,
            "group_size": options.group_size,
            "kernel": river.mlp.gate_proj.kernel.name,
            "one_token": {str(n): _one_token(layer, river, rope, dtype, n, options.rounds) for n in options.cached},
            "rows_64": _many_rows(layer, river, dtype, options.rounds),
        }
    print(json.dumps(result) if options.json else _table(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One decoder layer of 8B shape: river against backbone.")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--group-size", type=int, default=64, choices=(32, 64, 128))
    parser.add_argument("--cached", type=int, nargs="+", default=[100, 4000], help="tokens before the one token")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _backbone(dtype: torch.dtype) -> tuple[LlamaDecoderLayer, LlamaRotaryEmbedding]:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0).to(dtype)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.normal_(0, 0.02)
    return layer.eval(), LlamaRotaryEmbedding(config)


def _river(layer: LlamaDecoderLayer, bits: int, group: int, dtype: torch.dtype) -> LlamaDecoderLayer:
    """A copy whose linears are quantized; to random values, for HQQ would take half a minute and change no timing."""
    shared = {id(parameter): parameter for parameter in layer.parameters()}
    river = copy.deepcopy(layer, shared)
    state: dict[str, torch.Tensor] = {}
    for name in linear_names(river):
        rows, columns = river.get_submodule(name).weight.shape
        packed = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8)
        scale, offset = torch.rand(2, rows, columns // group).mul_(0.01).bfloat16()
        state |= {f"{name}.packed": packed, f"{name}.scale": scale.contiguous(), f"{name}.offset": offset.contiguous()}
    install(river, state, bits, dtype=dtype)
    return river


def _one_token(
    layer: LlamaDecoderLayer,
    river: LlamaDecoderLayer,
    rope: LlamaRotaryEmbedding,
    dtype: torch.dtype,
    cached: int,
    rounds: int,
) -> dict[str, Any]:
    config = layer.self_attn.config
    x = torch.randn(1, 1, config.hidden_size, dtype=dtype)
    cache = SharedCache(config, cached + 1)
    states = torch.randn(2, 1, config.num_key_value_heads, cached, config.head_dim).to(dtype)
    cache.update(*states, 0)
    arguments = {"position_embeddings": rope(x, torch.full((1, 1), cached)), "cache": cache}
    one_token = OneToken.of(river)

    def then_back(call: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            call()
            cache.crop(-1)

        return run

    calls = [then_back(partial(layer, x, **arguments)), then_back(partial(river, x, **arguments))]
    if isinstance(one_token, OneToken):
        calls.append(then_back(partial(one_token.run, x, (), arguments)))
    backbone_s, river_s, *rest = _in_turns(*calls, rounds=rounds)
    best_s = rest[0] if rest else river_s
    backbone_bytes = sum(parameter.nbytes for parameter in layer.parameters())
    river_bytes = sum(module.nbytes for module in river.modules() if isinstance(module, RiverLinear))
    return {
        "backbone_ms": 1e3 * backbone_s,
        "by_operators_ms": 1e3 * river_s,
        "in_one_call_ms": 1e3 * rest[0] if rest else None,
        "why_not": None if rest else one_token,
        "speedup": backbone_s / best_s,
        "backbone_gb_per_s": backbone_bytes / backbone_s / 1e9,
        "river_gb_per_s": river_bytes / best_s / 1e9,
    }


def _many_rows(
    layer: LlamaDecoderLayer, river: LlamaDecoderLayer, dtype: torch.dtype, rounds: int
) -> dict[str, dict[str, float]]:
    """By shape NxK: both times and their ratio; and all linears of the layer together."""
    result: dict[str, dict[str, float]] = {}
    totals = [0.0, 0.0]
    timed: dict[str, tuple[float, ...]] = {}
    for name in linear_names(layer):
        dense, quantized = layer.get_submodule(name), river.get_submodule(name)
        rows, columns = dense.weight.shape
        if (shape := f"{rows}x{columns}") not in timed:
            x = torch.randn(ROWS, columns, dtype=dtype)
            timed[shape] = _in_turns(partial(dense, x), partial(quantized, x), rounds=rounds)
            result[shape] = _ratio(*timed[shape])
        totals = [total + seconds for total, seconds in zip(totals, timed[shape], strict=True)]
    return result | {"layer": _ratio(*totals)}


def _ratio(dense_s: float, river_s: float) -> dict[str, float]:
    return {"dense_ms": 1e3 * dense_s, "river_ms": 1e3 * river_s, "ratio": river_s / dense_s}


def _in_turns(*calls: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """Median seconds of all calls, made in turns after one warm-up each."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return tuple(map(statistics.median, seconds))


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['bits']} bits, group {result['group_size']}, {result['dtype']}, kernel {result['kernel']}, "
        f"{result['threads']} threads"
    ]
    for cached, one in result["one_token"].items():
        call_ms = one["in_one_call_ms"]
        in_one_call = f"in one call {call_ms:6.2f} ms" if call_ms else f"not in one call: {one['why_not']}"
        lines.append(
            f"after {cached:>5} tokens   backbone {one['backbone_ms']:6.2f} ms ({one['backbone_gb_per_s']:.1f} GB/s)   "
            f"river by operators {one['by_operators_ms']:6.2f} ms, {in_one_call} ({one['river_gb_per_s']:.1f} GB/s)   "
            f"{one['speedup']:.2f}x faster (wanted {WANTED_SPEEDUP}x)"
        )
    lines += [
        f"{ROWS} rows  {shape:>11}   dense {times['dense_ms']:6.2f} ms   river {times['river_ms']:6.2f} ms   "
        f"{times['ratio']:.2f}x the time (at most {WANTED_RATIO}x)"
        for shape, times in result["rows_64"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
