"""A safetensors file written front to back, a piece at a time: no tensor needs to be whole in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from river_offload.checkpoint.headers import DTYPE_NAMES
from river_offload.progress import Progress

_SHORT_NAMES = {name: short for short, name in DTYPE_NAMES.items()}

Pieces = Callable[[str], Iterable[torch.Tensor]]


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, pieces: Pieces, progress: Progress
) -> None:
    """Write a new safetensors file with the tensors of `shapes`, all of `dtype`, in that order, and sync it.

    Args:
        pieces: given a name, the tensor's consecutive pieces (leading rows first) as contiguous CPU tensors of `dtype`.
        progress: advanced by bytes as they are written.

    The file is left unfinished when anything raises: write into a temporary directory, rename it at the end.
    Raises ValueError when the pieces of a tensor do not add up to its size, OSError as the file system does.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SHORT_NAMES[dtype_name(dtype)], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8, as the reference implementation has it
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            missing_bytes = math.prod(shape) * dtype.itemsize
            for piece in pieces(name):
                if piece.dtype != dtype or not piece.is_contiguous():
                    raise ValueError(f"{name}: pieces must be contiguous {dtype}, got {piece.dtype}")
                stream.write(piece.reshape(-1).view(torch.uint8).numpy().data)
                missing_bytes -= piece.nbytes
                progress.advance(piece.nbytes)
            if missing_bytes:
                raise ValueError(f"{name}: pieces are {-missing_bytes:+d} bytes off what shape {shape} takes")
        stream.flush()
        os.fsync(stream.fileno())


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
