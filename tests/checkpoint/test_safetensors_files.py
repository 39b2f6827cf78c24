"""Opening and reading checkpoints, whole and damaged. Files are written by the safetensors library, not by us."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.errors import CheckpointError, LinkError

INDEX = "model.safetensors.index.json"


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (8, 16), "b.weight": (300, 70), "c.bias": (5,), "d.scalar": (), "e.empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = list(tensors())
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors()[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def reindex(directory: Path, change: dict[str, Any]) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= change
    (directory / INDEX).write_text(json.dumps(index))


def write_raw(directory: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("way", ["read", "out", "mmap"])
def test_every_tensor_comes_back_bit_for_bit(layout: str, way: str, request: pytest.FixtureRequest) -> None:
    with Checkpoint.open(request.getfixturevalue(layout)) as checkpoint:
        assert set(checkpoint.entries) == set(tensors())
        for name, expected in tensors().items():
            out = torch.full_like(expected, float("nan"))
            found = {
                "read": lambda name=name: checkpoint.read(name),
                "out": lambda name=name, out=out: checkpoint.read(name, out),
                "mmap": lambda name=name: checkpoint.mmap_tensor(name),
            }[way]()
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype
        assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors().values())
        assert checkpoint.dtype == "bfloat16"
        assert checkpoint.notes == []


def test_entries_point_at_the_bytes(sharded: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        entry = checkpoint.entries["b.weight"]
    raw = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert raw == bytes(tensors()["b.weight"].view(torch.uint8).numpy())
    assert (entry.shape, entry.dtype) == ((300, 70), "bfloat16")


def test_read_into_part_of_a_larger_buffer(single: Path) -> None:
    slot = torch.zeros(1000, dtype=torch.bfloat16)
    with Checkpoint.open(single) as checkpoint:
        checkpoint.read("a.weight", slot[100 : 100 + 128].view(8, 16))
    assert torch.equal(slot[100:228].view(8, 16), tensors()["a.weight"])
    assert not slot[:100].any() and not slot[228:].any()


@pytest.mark.parametrize(
    "out", [torch.empty(8, 15, dtype=torch.bfloat16), torch.empty(8, 16), torch.empty(16, 8, dtype=torch.bfloat16).T]
)
def test_read_refuses_an_unfit_buffer(single: Path, out: torch.Tensor) -> None:
    with Checkpoint.open(single) as checkpoint, pytest.raises(ValueError, match="contiguous CPU tensor"):
        checkpoint.read("a.weight", out)


def test_short_reads_are_continued(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:1000]], offset))
    monkeypatch.setattr("river_offload.checkpoint.safetensors_files._SAMPLE_BYTES", 16)
    with Checkpoint.open(single) as checkpoint:
        assert torch.equal(checkpoint.read("b.weight"), tensors()["b.weight"])


def test_file_cut_while_in_use(single: Path) -> None:
    with Checkpoint.open(single) as checkpoint:
        entry = checkpoint.entries["b.weight"]
        os.truncate(entry.file, entry.offset + 1000)
        with pytest.raises(LinkError, match=f"ends at byte {entry.offset + 1000}, expected bytes up to"):
            checkpoint.read("b.weight")


def test_failing_disk(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(single) as checkpoint:

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(LinkError, match=r"model\.safetensors: reading at byte \d+ failed: Input/output error"):
            checkpoint.read("a.weight")


def test_closed(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    mapped = checkpoint.mmap_tensor("b.weight")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(LinkError, match="closed"):
        checkpoint.read("a.weight")
    assert torch.equal(mapped, tensors()["b.weight"])


def test_files_are_closed_and_not_inherited(sharded: Path) -> None:
    def opened() -> list[int]:
        return [file.fd for file in psutil.Process().open_files() if Path(file.path).parent == sharded]

    with Checkpoint.open(sharded):
        assert len(opened()) == 2
        assert not any(os.get_inheritable(fd) for fd in opened())
    assert opened() == []
    os.truncate(sharded / "model-00002-of-00002.safetensors", 100)
    with pytest.raises(CheckpointError):
        Checkpoint.open(sharded)
    assert opened() == []


def test_a_write_to_a_mapped_tensor_never_reaches_the_file(single: Path) -> None:
    before = (single / "model.safetensors").read_bytes()
    with Checkpoint.open(single) as checkpoint:
        checkpoint.mmap_tensor("b.weight").zero_()
    assert (single / "model.safetensors").read_bytes() == before


def test_threads_read_at_once(single: Path) -> None:
    wrong: list[int] = []
    with Checkpoint.open(single) as checkpoint:

        def work(number: int) -> None:
            for _ in range(50):
                if not torch.equal(checkpoint.read("b.weight"), tensors()["b.weight"]):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_stray_files_are_ignored_and_mentioned(sharded: Path) -> None:
    save_file({"stray": torch.ones(3)}, sharded / "consolidated.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"\x80")
    (sharded / "broken.safetensors").write_bytes(b"no")
    with Checkpoint.open(sharded) as checkpoint:
        assert "stray" not in checkpoint.entries
        assert [note.partition(":")[0] for note in checkpoint.notes] == [
            "broken.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
        ]


def test_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["a.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with Checkpoint.open(sharded) as checkpoint:
        assert "a.weight" not in checkpoint.entries
        assert "1 tensors that the index does not list" in checkpoint.notes[0]


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: missing shard; .* expects 3 tensors"
    ):
        Checkpoint.open(sharded)


def test_missing_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files .* but no model\.safetensors\.index\.json"):
        Checkpoint.open(sharded)


def test_shards_of_different_downloads(sharded: Path) -> None:
    reindex(sharded, {"z.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001.*index expects tensor 'z\.weight'"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd"])
def test_index_that_leaves_the_directory(sharded: Path, shard: str) -> None:
    reindex(sharded, {"z.weight": shard})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_garbage_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint.open(sharded)


def test_truncated_and_grown_files(single: Path) -> None:
    file = single / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(CheckpointError, match=f"cut short: the header describes {size} bytes, the file has {size - 1}"):
        Checkpoint.open(single)
    os.truncate(file, size + 1)
    with pytest.raises(CheckpointError, match="longer than its header says"):
        Checkpoint.open(single)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe{}", "header is not JSON"),
        (b"not json", "header is not JSON"),
        ([1, 2], "expected an object"),
        ({"a": 3}, "needs dtype, shape, data_offsets"),
        ({"a": {**ENTRY, "shape": [-2]}}, "needs dtype, shape, data_offsets"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "needs dtype, shape, data_offsets"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "unknown dtype 'F33'"),
        ({"a": {**ENTRY, "shape": [3]}}, "takes 12 bytes; its offsets leave 8"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "a gap or overlap"),
        ({"a": ENTRY, "b": ENTRY}, "a gap or overlap"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}}, "cut short"),
        ({}, "longer than its header says"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(write_raw(tmp_path, header, bytes(8)))


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\xff" * 100, (50).to_bytes(8, "little") + b"{}"])
def test_no_header_at_all(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint.open(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_none(tmp_path: Path, data: st.DataObject) -> None:
    """One byte changed anywhere never ends in another exception; a cut anywhere is always refused."""
    raw = bytearray(save({"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}))
    cut = data.draw(st.booleans())
    position = data.draw(st.integers(0, len(raw) - 1))
    if cut:
        del raw[position:]
    else:
        raw[position] ^= data.draw(st.integers(1, 255))
    (tmp_path / "model.safetensors").write_bytes(raw)
    try:
        Checkpoint.open(tmp_path).close()
    except CheckpointError as error:
        assert "model.safetensors" in str(error) or "no tensor in F32" in str(error)
    else:
        assert not cut


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"only pickle weights .*save_pretrained"):
        Checkpoint.open(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")


def test_mixed_dtypes_are_noted_and_quantized_ones_cannot_be_read(tmp_path: Path) -> None:
    save_file(
        {"half": torch.ones(8, dtype=torch.float16), "full": torch.ones(9), "int": torch.ones(99, dtype=torch.int32)},
        tmp_path / "model.safetensors",
    )
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.dtype == "float32"
        assert checkpoint.notes == ["mixed dtypes: mostly float32, also float16"]
        with pytest.raises(CheckpointError, match="'int' has dtype I32; expected F32, BF16 or F16"):
            checkpoint.read("int")


def test_no_floating_point_at_all(tmp_path: Path) -> None:
    save_file({"int": torch.ones(9, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor in F32, BF16 or F16"):
        Checkpoint.open(tmp_path)


def test_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    def fingerprint(folder: str, weights: dict[str, torch.Tensor]) -> str:
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors")
        with Checkpoint.open(tmp_path / folder) as checkpoint:
            return checkpoint.fingerprint

    tuned = tensors() | {"b.weight": tensors()["b.weight"] + 1}
    renamed = {name.replace("a.", "z."): tensor for name, tensor in tensors().items()}
    first = fingerprint("first", tensors())
    assert fingerprint("copy", tensors()) == first
    assert len({first, fingerprint("tuned", tuned), fingerprint("renamed", renamed)}) == 3
