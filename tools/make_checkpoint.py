"""Write a checkpoint with random weights in the shape of a real model, for tests of memory and speed.

    python tools/make_checkpoint.py OUT --like llama-3.2-1b [--layers 4] [--width 64] [--tokenizer demo]

Weights are normal(0, 0.02), norms are ones. They are generated and written in pieces: 16 GB of weights take a few
hundred MB of memory. The same seed gives the same weights, however they are divided into files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from river_offload.checkpoint.source import demo_file
from river_offload.checkpoint.writing import write_tensors
from river_offload.config import format_size, parse_size
from river_offload.errors import CacheError, RiverError, UsageError
from river_offload.planning.shapes import builtin_names, builtin_shape

_PIECE_ELEMENTS = 1 << 22  # generated at a time in float32: 16 MiB, which stays near the processor's cache
_SPARE_BYTES = 64 << 20
_STANDARD_DEVIATION = 0.02
_STEP = 64
"""Widths are multiples of the usual group of weights."""

Shapes = dict[str, tuple[int, ...]]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the checkpoint, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory that is empty or does not exist yet")
    parser.add_argument("--like", required=True, choices=builtin_names(), help="the model whose shape to take")
    parser.add_argument("--layers", type=int, help="number of decoder layers, if not the model's own")
    parser.add_argument("--width", type=int, help="hidden size, if not the model's own; heads and MLP in proportion")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", default="4GiB", help="largest file, such as 4GiB")
    parser.add_argument("--tokenizer", choices=("demo",), help="add the demo model's tokenizer, so text can be written")
    options = parser.parse_args(arguments)
    try:
        total_bytes = make_checkpoint(
            options.out,
            like=options.like,
            layers=options.layers,
            width=options.width,
            dtype=getattr(torch, options.dtype),
            seed=options.seed,
            shard_bytes=parse_size(options.shard_size),
            tokenizer=options.tokenizer,
        )
    except RiverError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted, nothing written", file=sys.stderr)
        return 130
    print(f"{options.out}: {format_size(total_bytes)} of random weights like {options.like}")
    return 0


def make_checkpoint(
    out: Path,
    *,
    like: str,
    layers: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_bytes: int = 4 << 30,
    tokenizer: str | None = None,
) -> int:
    """Write the checkpoint into `out`, whole or not at all, and return the bytes of its tensors.

    Raises UsageError when `out` holds something or an option cannot be, CacheError for want of space.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: not empty; expected a new or an empty directory. Remove it or name another.")
    if layers is not None and layers < 1:
        raise UsageError(f"--layers {layers}: expected at least 1.")
    if width is not None and (width < _STEP or width % _STEP):
        raise UsageError(f"--width {width}: expected a multiple of {_STEP}.")
    config, shapes = _model(like, layers, width, dtype)
    shards = _divide(shapes, dtype, shard_bytes)
    total_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    out = out.resolve()
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    progress = _Line()
    try:
        temporary.mkdir(parents=True)
        free_bytes = shutil.disk_usage(temporary).free
        if free_bytes < total_bytes + _SPARE_BYTES:
            raise CacheError(f"{out}: {free_bytes:,} bytes free, the checkpoint takes {total_bytes:,}. Make room.")
        config.save_pretrained(temporary)
        GenerationConfig.from_model_config(config).save_pretrained(temporary)
        if tokenizer == "demo":
            _save_demo_tokenizer(temporary, config)
        progress.start(f"writing {out.name}", total_bytes, "bytes")
        for file, names in shards.items():
            part = {name: shapes[name] for name in names}
            write_tensors(
                temporary / file, part, dtype, lambda name: _random(name, shapes[name], dtype, seed), progress
            )
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        temporary.rename(out)
    except OSError as error:
        raise CacheError(f"{out}: cannot be written: {error.strerror or error}.") from error
    finally:
        progress.finish()
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when all went well
    return total_bytes


def _model(like: str, layers: int | None, width: int | None, dtype: torch.dtype) -> tuple[PretrainedConfig, Shapes]:
    """The configuration and the shapes of the tensors to write: a tied head is not written a second time."""
    fields = builtin_shape(like)
    if width is not None:
        fields |= _narrowed(fields, width)
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if "max_window_layers" in fields:
            fields["max_window_layers"] = layers
    fields.pop("torch_dtype", None)
    config = AutoConfig.for_model(**{**fields, "dtype": dtype})
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    output = {name for group in find_tied_parameters(model) for name in group if name.startswith("lm_head")}
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in output}


def _narrowed(fields: dict[str, Any], width: int) -> dict[str, int]:
    """The sizes of a layer of another hidden size. As many heads share one of keys and values as in the real model."""
    hidden, heads, kv_heads = (fields[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    share = width / hidden
    head_dim = fields.get("head_dim") or hidden // heads
    few_kv_heads = max(round(kv_heads * share), 1)
    few_heads = few_kv_heads * (heads // kv_heads)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if any(isinstance(value, list) for value in rope.values()):
        raise UsageError(
            f"--width {width}: not possible, the rotary factors of this model belong to the channels of its own heads. "
            "Take another model, or --layers."
        )
    return {
        "hidden_size": width,
        "intermediate_size": max(round(fields["intermediate_size"] * share / _STEP), 1) * _STEP,
        "num_attention_heads": few_heads,
        "num_key_value_heads": few_kv_heads,
        "head_dim": max(round(heads * head_dim * share / few_heads / 8), 1) * 8,
    }


def _divide(shapes: Shapes, dtype: torch.dtype, shard_bytes: int) -> dict[str, list[str]]:
    """{file name: tensor names}, in order; a tensor larger than `shard_bytes` gets a file of its own."""
    groups: list[list[str]] = [[]]
    room_bytes = shard_bytes
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and nbytes > room_bytes:
            groups.append([])
            room_bytes = shard_bytes
        groups[-1].append(name)
        room_bytes -= nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Iterator[torch.Tensor]:
    """The values of one tensor, in pieces; seeded by its name, so that they do not depend on what else is written."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # 32 bits are all it uses
    left = math.prod(shape)
    while left:
        count = min(left, _PIECE_ELEMENTS)
        if len(shape) == 1:
            yield torch.full((count,), 1.0 if name.endswith("weight") else 0.0, dtype=dtype)  # a norm, or a bias
        else:
            yield torch.empty(count).normal_(0, _STANDARD_DEVIATION, generator=generator).to(dtype)
        left -= count


def _save_demo_tokenizer(directory: Path, config: PretrainedConfig) -> None:
    file = demo_file()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"--tokenizer demo: it has {len(tokenizer)} tokens, the model {config.vocab_size}. Leave the option out."
        )
    tokenizer.save_pretrained(directory)


class _Line:
    """Progress as one line on standard error, redrawn twice a second."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._drawn_s = "", 0, 0, 0.0

    def start(self, label: str, total: int, unit: str) -> None:
        self._label, self._total = label, total
        self._draw()

    def advance(self, amount: int) -> None:
        self._done += amount
        if time.monotonic() - self._drawn_s > 0.5:
            self._draw()

    def finish(self) -> None:
        if self._label:
            self._draw()
            print(file=sys.stderr)

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        done, total = format_size(self._done), format_size(self._total)
        print(f"\r{self._label}: {done} of {total}  ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
