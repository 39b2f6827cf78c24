"""Our writer against the safetensors library's reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from river_offload.checkpoint.writing import write_tensors


class Counter:
    """A progress that adds up."""

    total = 0

    def start(self, label: str, total: int, unit: str) -> None: ...

    def advance(self, amount: int) -> None:
        self.total += amount

    def finish(self) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_in_pieces(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(7, 3).to(dtype), "b": torch.randn(5).to(dtype), "c": torch.tensor(2.0, dtype=dtype)}
    progress = Counter()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    file = tmp_path / "model.safetensors"
    write_tensors(file, shapes, dtype, lambda name: tensors[name].reshape(-1).split(4), progress)
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert progress.total == sum(tensor.nbytes for tensor in tensors.values())


def test_pieces_that_do_not_add_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-4 bytes off"):
        write_tensors(tmp_path / "x", {"a": (3,)}, torch.float32, lambda _: [torch.ones(2)], Counter())
    with pytest.raises(ValueError, match="contiguous"):
        write_tensors(tmp_path / "y", {"a": (3,)}, torch.float32, lambda _: [torch.ones(3).half()], Counter())


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {}, torch.float32, lambda _: [], Counter())
