"""How the keys, or the values, of one layer rest between passes: in full precision off the device, or in few bits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch._subclasses.fake_tensor import FakeTensor

from river_offload.kv.kind import BLOCK_TOKENS
from river_offload.kv.memory import Allocate

_CHUNK_TOKENS = 1024
"""Tokens that are converted at once: bounds the copies of a long context."""
_GROUP = 32
"""Channels of a value that share a scale, where they divide the head."""


def send(held: torch.Tensor, out: torch.Tensor) -> None:
    """Copy [rows, heads, ...] head by head: each is in one piece on both sides, so that a GPU's copy engine takes it
    straight from pinned memory, without another copy in between, and this thread does not wait."""
    for row in range(len(held)):
        for head in range(held.shape[1]):
            out[row, head].copy_(held[row, head], non_blocking=True)


def sent(held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on `device`: itself where it is there already."""
    if held.device == device:
        return held
    out = torch.empty(held.shape, dtype=held.dtype, device=device)
    send(held, out)
    return out


class Rest(ABC):
    """States [rows, heads, tokens, head_dim] of one layer, filled from the front, a whole number of blocks.

    Attributes:
        block: tokens that are put together.
        buffers: the memory, first dimension the rows; allocated once.
    """

    block: int

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.buffers: list[torch.Tensor] = []

    @abstractmethod
    def put(self, start: int, states: torch.Tensor) -> None:
        """Keep the states of tokens start..start + tokens, both multiples of the block."""

    @abstractmethod
    def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        """Fill `out` with the states of as many tokens from `start` on, whole blocks, on whatever device it is.

        Without `wait` a GPU may do so later, in the order of its current stream: until then nothing is put here.
        """

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes old row rows[i], in place where their number stays."""
        for index, buffer in enumerate(self.buffers):
            chosen = buffer.index_select(0, rows.to(buffer.device))
            if len(rows) != len(buffer):
                self.buffers[index] = self._allocate(tuple(chosen.shape), chosen.dtype)
            self.buffers[index].copy_(chosen)


class PlainRest(Rest):
    """Full precision: what is got is what was put, to the bit."""

    block = 1

    def __init__(self, like: torch.Tensor, capacity: int, allocate: Allocate) -> None:
        super().__init__(allocate)
        rows, heads, _, head_dim = like.shape
        self.buffers = [allocate((rows, heads, capacity, head_dim), like.dtype)]

    def put(self, start: int, states: torch.Tensor) -> None:
        self.buffers[0][:, :, start : start + states.shape[2]].copy_(states)

    def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        held = self.buffers[0][:, :, start : start + out.shape[2]]
        if wait:
            out.copy_(held)
        else:
            send(held, out)


class QuantizedRest(Rest):
    """8 or 4 bits a number, from the least to the greatest of its group in equal steps.

    Keys have channels that are large in every token, so a group is one channel of a block of tokens (`over="tokens"`);
    values have not, and a group is part of one token (`over="channels"`): KIVI, arXiv 2402.02750. Codes of 4 bits are
    packed in pairs, the token of the first half of a block in the low bits.
    """

    block = BLOCK_TOKENS

    def __init__(self, like: torch.Tensor, capacity: int, allocate: Allocate, *, bits: int, over: str) -> None:
        super().__init__(allocate)
        rows, heads, _, head_dim = like.shape
        group = _GROUP if head_dim % _GROUP == 0 else head_dim
        self._bits = bits
        self._shared_dim = 3 if over == "tokens" else 5
        self._split = (head_dim // group, group)
        whole = [rows, heads, capacity // self.block, self.block, *self._split]
        codes, scales = list(whole), list(whole)
        codes[3] = self.block * bits // 8
        scales[self._shared_dim] = 1
        self.buffers = [
            allocate(tuple(codes), torch.uint8),
            allocate(tuple(scales), like.dtype),
            allocate(tuple(scales), like.dtype),
        ]

    def put(self, start: int, states: torch.Tensor) -> None:
        for at, chunk in self._chunks(start, states):
            for buffer, part in zip(self.buffers, self._quantized(chunk), strict=True):
                buffer[:, :, at : at + chunk.shape[2]] = part

    def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        half = self.block // 2
        for at, chunk in self._chunks(start, out):
            held = (buffer[:, :, at : at + chunk.shape[2]] for buffer in self.buffers)
            codes, scale, least = (each.to(out.device) if wait else sent(each, out.device) for each in held)
            if self._bits == 8:
                torch.addcmul(least, codes.to(out.dtype), scale, out=chunk)
                continue
            for tokens, part in ((slice(half), codes & 15), (slice(half, None), codes >> 4)):
                shared = slice(None) if self._shared_dim == 3 else tokens
                torch.addcmul(
                    least[:, :, :, shared], part.to(out.dtype), scale[:, :, :, shared], out=chunk[:, :, :, tokens]
                )

    def _chunks(self, start: int, states: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(first block, view [rows, heads, blocks, block, groups, group]) of a few blocks each.

        Of fake tensors the first ones only: the others allocate alike.
        """
        whole = states.unflatten(3, self._split).unflatten(2, (-1, self.block)) if states.shape[2] else None
        if whole is None:
            return []
        step = _CHUNK_TOKENS // self.block
        blocks = min(step, whole.shape[2]) if isinstance(states, FakeTensor) else whole.shape[2]
        return [(start // self.block + at, whole[:, :, at : at + step]) for at in range(0, blocks, step)]

    def _quantized(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and least of [rows, heads, blocks, block, groups, group]."""
        levels = 2**self._bits - 1
        least, greatest = torch.aminmax(states, dim=self._shared_dim, keepdim=True)
        smallest = torch.finfo(states.dtype).tiny
        scale = ((greatest.float() - least.float()) / levels).to(states.dtype).clamp(min=smallest)
        # By the scale as it is kept, so that its rounding does not add up over the levels.
        codes = ((states.float() - least.float()) / scale.float()).round_().clamp_(0, levels).to(torch.uint8)
        if self._bits == 4:
            low, high = codes.split(self.block // 2, dim=3)
            codes = low | (high << 4)
        return codes, scale, least
