"""What the checks of `check_gpu.py` stand on: checkpoints, a quantizer without hqq, links slowed down on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache

import river_offload
from river_offload.checkpoint.writing import write_tensors
from river_offload.errors import BudgetError
from river_offload.kv.cache import cache_argument
from river_offload.memory.probes import anonymous_bytes
from river_offload.planning.shapes import builtin_shape
from river_offload.progress import Silent
from river_offload.quant import hqq as hqq_module
from river_offload.store.slots import Slots
from river_offload.structure import Structure

LARGE = {"cuda": "llama-3.1-8b", "cpu": "llama-3.2-1b"}
LARGE_LAYERS = {"cuda": None, "cpu": 6}
LARGE_BUDGET = {"cuda": 8 << 30, "cpu": None}
"""None: as little as keeps two layers resident."""
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "num_hidden_layers": 8, "vocab_size": 512, "pad_token_id": None, "bos_token_id": 1,
         "eos_token_id": None, "max_position_embeddings": 512}  # fmt: skip
FAMILIES = ("llama-3.1-8b", "qwen3-8b", "mistral-7b")
STRETCH_CYCLES = 3_000_000
"""About 2 ms on a GPU, dozens of times the copy or the computation of a small layer."""
STRETCH_S = 0.002
ENOUGH_OVERLAP = 0.5
TABLE = (("backbone", None), ("quantized", None), ("exit", "fixed:3"), ("exit", "geometric:3,full=0.08"))
TOKENS = {"cuda": 48, "cpu": 6}

MODE_STEPS = 5

Result = dict[str, Any]
T = TypeVar("T")


class Failed(Exception):
    """A check that ran and found something wrong, with the figures that it has so far."""

    def __init__(self, reason: str, **figures: Any) -> None:
        super().__init__(reason)
        self.figures = figures


class Skipped(Exception):
    """A check that does not apply here; the message is the reason."""


@dataclasses.dataclass
class Rig:
    """Where the checks run and what they share."""

    device: torch.device
    folder: Path
    large: str
    deadline_s: float
    models: dict[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def load(self, model: Path, **options: Any) -> Any:
        fixed: dict[str, Any] = {"context": 512, "device": str(self.device), "cache_dir": self.folder / "cache"}
        return river_offload.load(model, **{"mode": "exit"} | fixed | options)

    def budget(self, model: Path, resident: int, **options: Any) -> int:
        """The smallest budget that keeps `resident` layers on the device and streams the others."""
        try:
            self.load(model, budget=1, **options).river.close()
        except BudgetError as error:
            return error.needed_bytes + resident * error.terms["slots"] // options.get("slots", 2)
        raise Failed("a budget of one byte was accepted")


def large_options(rig: Rig, folder: Path) -> dict[str, Any]:
    """Options that load the large checkpoint with a part of it streamed, for every mode."""
    options: dict[str, Any] = {"mode": "exit", "also_modes": ("backbone", "quantized")}
    budget = LARGE_BUDGET[rig.device.type] if "large" in rig.models else None
    return options | {"budget": budget or rig.budget(folder, 2, **options)}


def write_checkpoint(folder: Path, like: str, spread: float, **changes: Any) -> Path:
    """A checkpoint of random weights in the shape of a built-in model. One block of numbers serves all tensors, each
    from another place in it: their values do not matter, and a generator would take minutes for 8 billion."""
    fields = builtin_shape(like) | changes
    fields.pop("torch_dtype", None)
    config = AutoConfig.for_model(**{**fields, "dtype": torch.bfloat16})
    structure = Structure.of(config, torch.bfloat16)
    shapes = {name: shape for name, shape in structure.expected().items() if name not in structure.tied}
    generator = torch.Generator().manual_seed(1)
    block = torch.empty(1 << 24).normal_(0, spread, generator=generator).to(torch.bfloat16)

    def pieces(name: str) -> Iterator[Tensor]:
        left = math.prod(shapes[name])
        if "norm" in name:
            yield torch.ones(left, dtype=torch.bfloat16)
            return
        start = hash_of(name) % (block.numel() // 2)
        while left:
            piece = block[start : start + left]
            yield piece
            left, start = left - piece.numel(), 0

    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    write_tensors(folder / "model.safetensors", shapes, torch.bfloat16, pieces, Silent())
    return folder


def hash_of(name: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum(byte * 31**place for place, byte in enumerate(name.encode()))


def nearest(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero of rounding to nearest, in place of HQQ's: weight = (q - zero) * scale."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return scale, -low / scale


@contextlib.contextmanager
def stretched(rig: Rig, model: Any, *, copies: bool, computes: bool) -> Iterator[None]:
    """Copies that start late, computation that starts late. On a GPU on the streams themselves, where the host would
    not notice; on a CPU each read and each layer sleeps."""
    stream, preadv = torch.cuda.stream, os.preadv

    def slow_stream(wanted: Any) -> Any:
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with stream(wanted):
                torch.cuda._sleep(STRETCH_CYCLES)
                yield

        return entered()

    def slow_read(*given: Any) -> int:
        time.sleep(STRETCH_S)
        return preadv(*given)

    def late(*_: Any) -> None:
        if rig.cuda:
            torch.cuda._sleep(STRETCH_CYCLES)
        else:
            time.sleep(STRETCH_S)

    handles = []
    if computes:
        layers = model.get_decoder().layers
        handles = [layer.backbone.register_forward_pre_hook(late) for layer in layers if layer.backbone is not None]
    if copies and rig.cuda:
        torch.cuda.stream = slow_stream  # type: ignore[assignment]
    elif copies:
        os.preadv = slow_read
    try:
        yield
        if rig.cuda:
            torch.cuda.synchronize(rig.device)
    finally:
        torch.cuda.stream, os.preadv = stream, preadv
        for handle in handles:
            handle.remove()


def generated(model: Any, ids: Tensor, forced: list[int]) -> Tensor:
    """The logits of every passage, [passages, vocabulary], when they go as deep as `forced` says."""
    with model.river.using(depths=forced):
        return torch.stack(step_logits(model, ids, len(forced)))


def mode_logits(model: Any, ids: Tensor, mode: str) -> list[Tensor]:
    with model.river.using(mode=mode):
        return step_logits(model, ids, MODE_STEPS)


@torch.no_grad()
def step_logits(model: Any, ids: Tensor, passages: int) -> list[Tensor]:
    """A prompt and single tokens after it, the tokens given: two models are then fed the same."""
    prompt = ids.shape[1] - passages + 1
    kept = {cache_argument(model): DynamicCache()}
    pieces = [ids[:, :prompt], *(ids[:, i : i + 1] for i in range(prompt, ids.shape[1]))]
    return [model(piece, use_cache=True, **kept).logits[0, -1].clone() for piece in pieces]


def prompt_ids(rig: Rig, tokens: int) -> Tensor:
    return torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(4)).to(rig.device)


def elapsed_s(rig: Rig, call: Callable[[], object]) -> float:
    """Seconds of the faster of two calls; on a GPU between two events of its own clock."""
    seconds = []
    for _ in range(3):
        if rig.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(rig.device)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(rig.device)
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def held_bytes(rig: Rig) -> int:
    """Device memory in use now."""
    return torch.cuda.memory_allocated(rig.device) if rig.cuda else anonymous_bytes()


def highest_bytes(rig: Rig) -> int | None:
    """The most that was in use since the last `collect`; a CPU process does not know."""
    return torch.cuda.max_memory_allocated(rig.device) if rig.cuda else None


def pinned_by_torch() -> int:
    """Bytes of the blocks in use that torch's own pinned allocator gave out, its rounding included."""
    statistics: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(statistics.get("active_bytes.current", statistics.get("allocated_bytes.current", 0)))


def poison(model: Any) -> None:
    slots = find(model.river._flow, Slots)
    assert slots is not None, "the store has no Slots"
    slots.poison_on_release = True


def link_of(model: Any) -> Any:
    """Whatever fetches, waits and releases below the store."""
    link = find(
        model.river._flow, object, lambda item: all(hasattr(item, name) for name in ("fetch", "wait", "release"))
    )
    assert link is not None, "the store has no link"
    return link


def find(root: object, kind: type[T], fits: Callable[[Any], bool] = lambda _: True) -> T | None:
    """The first object of a kind among the attributes of our own objects below `root`, nearest first."""
    queue, seen = [root], {id(root)}
    while queue:
        item = queue.pop(0)
        if isinstance(item, kind) and item is not root and fits(item):
            return item
        if type(item).__module__.startswith("river_offload"):
            for child in vars(item).values() if hasattr(item, "__dict__") else ():
                if id(child) not in seen and not isinstance(child, (nn.Module, Tensor)):
                    seen.add(id(child))
                    queue.append(child)
    return None


@contextlib.contextmanager
def closing(model: Any) -> Iterator[Any]:
    try:
        yield model
    finally:
        model.river.close()


def collect(rig: Rig) -> None:
    gc.collect()
    if rig.cuda:
        torch.cuda.synchronize(rig.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(rig.device)


@contextlib.contextmanager
def nearest_rounding() -> Iterator[None]:
    """The river's quantizer replaced, for this program only and with a cache folder of its own."""
    with mock.patch.multiple(hqq_module, _hqq=nearest, _native=lambda *_: None):
        yield
