"""Layers whose old tokens rest elsewhere or in fewer bits: against plain tensors, one operation at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from river_offload.errors import CacheError, ContextError
from river_offload.kv import memory, rest
from river_offload.kv.kind import KvKind
from river_offload.kv.memory import file_memory, plain_memory, require_space
from river_offload.kv.rest import QuantizedRest
from river_offload.kv.resting import RestingLayer
from river_offload.kv.workspace import Workspace

KINDS = [KvKind(16, "host"), KvKind(8, "device"), KvKind(4, "device"), KvKind(8, "host"), KvKind(4, "host")]
QUANTIZED = [kind for kind in KINDS if kind.bits < 16]
CAPACITY, HEADS, HEAD_DIM = 300, 2, 64
TOLERANCE = {16: 0.0, 8: 0.02, 4: 0.3}
"""Half a step of states that reach from about -4 to 4."""

States = tuple[torch.Tensor, torch.Tensor]
Made = Callable[..., RestingLayer]


def states(count: int, *, rows: int = 1, seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, HEADS, count, HEAD_DIM, generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def new(kind: KvKind, capacity: int = CAPACITY) -> RestingLayer:
        return RestingLayer(
            capacity, kind, Workspace(capacity), lambda shape, dtype: file_memory(tmp_path, shape, dtype)
        )

    return new


def fed(layer: RestingLayer, given: States, *counts: int, start: int = 0) -> States:
    """Feed tokens from `start` on in passages of `counts`; what the last update returned, copied."""
    for count in counts:
        shown = layer.update(*(part[:, :, start : start + count] for part in given))
        start += count
    return shown[0].clone(), shown[1].clone()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("counts", [(1,), (64,), (96,), (97, 1), (150, 1, 1, 1, 40, 31, 60), (7,) * 40])
def test_what_comes_back_is_what_was_put(kind: KvKind, counts: tuple[int, ...], made: Made) -> None:
    layer, given = made(kind), states(sum(counts))
    shown = fed(layer, given, *counts)
    assert layer.get_seq_length() == sum(counts)
    for found, expected in zip(shown, given, strict=True):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= TOLERANCE[kind.bits]
        assert torch.equal(found[:, :, -min(64, sum(counts)) :], expected[:, :, -64:])


@pytest.mark.parametrize("kind", QUANTIZED, ids=str)
def test_old_tokens_do_lose_bits_and_lose_them_once(kind: KvKind, made: Made) -> None:
    given = states(290)
    layer = made(kind)
    early = fed(layer, given, 120, 1)[0][:, :, :32]
    late = fed(layer, given, 100, 69, start=121)[0][:, :, :32]
    assert not torch.equal(early, given[0][:, :, :32])
    assert torch.equal(early, late)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("counts", [(10,), (200, 32), (95, 1), (127, 1, 31), (255,)])
def test_tokens_given_back_and_written_anew_leave_no_trace(kind: KvKind, counts: tuple[int, ...], made: Made) -> None:
    given, refused = states(280), states(280, seed=5)
    layer, never = made(kind), made(kind)
    start = sum(counts)
    fed(layer, given, *counts)
    fed(never, given, *counts)
    for count in (32, 1, 5):
        fed(layer, refused, count)
        layer.crop(-count)
    assert layer.get_seq_length() == start
    for found, expected in zip(
        fed(layer, given, 20, 5, start=start), fed(never, given, 20, 5, start=start), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("left", [0, 1, 31, 32, 100, 131, 159, 250])
def test_any_number_of_tokens_can_be_given_back(kind: KvKind, left: int, made: Made) -> None:
    given, more = states(260), states(300, seed=3)
    layer = made(kind)
    fed(layer, given, 255, 5)
    layer.crop(left - 260)
    assert layer.get_seq_length() == left
    shown = fed(layer, more, 33, 7)
    for found, old, new in zip(shown, given, more, strict=True):
        expected = torch.cat((old[:, :, :left], new[:, :, :40]), dim=2)
        assert (found - expected).abs().max() <= 2 * TOLERANCE[kind.bits]  # rounded twice where a block was cut
        assert torch.equal(found[:, :, left:], expected[:, :, left:])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mark_holds_over_passages_of_any_length(kind: KvKind, made: Made) -> None:
    """What an interrupted passage wrote is forgotten, however many chunks it came in."""
    given, lost = states(280), states(280, seed=5)
    layer, never = made(kind), made(kind)
    fed(layer, given, 110)
    fed(never, given, 110)
    before = dict(vars(layer))
    fed(layer, lost, 64, 64, 32)
    vars(layer).clear()
    vars(layer).update(before)
    for found, expected in zip(fed(layer, given, 60, start=110), fed(never, given, 60, start=110), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_are_reordered_selected_and_repeated(kind: KvKind, made: Made) -> None:
    given, more = states(150, rows=3), states(2, rows=2, seed=4)
    layer, plain = made(kind), made(kind)
    fed(layer, given, 150)
    layer.reorder_cache(torch.tensor([2, 0, 2]))
    layer.batch_select_indices(torch.tensor([1]))
    layer.batch_repeat_interleave(2)
    fed(plain, (given[0][[0, 0]], given[1][[0, 0]]), 150)
    for found, expected in zip(fed(layer, more, 2), fed(plain, more, 2), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_memory_is_allocated_once(kind: KvKind, made: Made) -> None:
    layer, given = made(kind), states(300)
    fed(layer, given, 1)
    assert layer._rests is not None
    pointers = [buffer.data_ptr() for part in layer._rests for buffer in part.buffers]
    shown, _ = layer.update(*(part[:, :, 1:200] for part in given))
    again, _ = layer.update(*(part[:, :, 200:] for part in given))
    layer.reset()
    fed(layer, given, 300)
    assert [buffer.data_ptr() for part in layer._rests for buffer in part.buffers] == pointers
    assert shown.data_ptr() == again.data_ptr()


def test_layers_of_a_cache_share_one_workspace() -> None:
    workspace, kind = Workspace(CAPACITY), KvKind(16, "host")
    layers = [RestingLayer(CAPACITY, kind, workspace, plain_memory) for _ in range(2)]
    shown = [layer.update(*states(5, seed=seed))[0] for seed, layer in enumerate(layers)]
    assert shown[0].data_ptr() == shown[1].data_ptr()
    assert torch.equal(shown[1], states(5, seed=1)[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_refuses_what_does_not_fit_and_stays_as_it_was(kind: KvKind, made: Made) -> None:
    layer, given = made(kind, 100), states(101)
    layer.crop(-2)
    layer.reset()
    fed(layer, given, 99)
    with pytest.raises(ContextError, match="101 tokens in a KV cache made for 100"):
        fed(layer, given, 2)
    with pytest.raises(ContextError, match="2 rows for a KV cache that holds 1"):
        layer.update(*states(1, rows=2))
    with pytest.raises(ValueError, match="negative"):
        layer.crop(3)
    assert layer.get_seq_length() == 99


def test_few_bits_take_few_bytes(made: Made) -> None:
    held = {}
    for kind in KINDS:
        layer = made(kind)
        layer.update(*(part.bfloat16() for part in states(1)))
        held[kind.bits] = sum(buffer.nbytes for part in layer._held()[0] for buffer in part.buffers)
    assert held[8] < 0.6 * held[16] and held[4] < 0.35 * held[16]


def test_a_group_of_equal_states_is_kept(made: Made) -> None:
    layer = made(KvKind(4, "device"))
    same = (torch.full((1, HEADS, 200, HEAD_DIM), 3.0), torch.zeros(1, HEADS, 200, HEAD_DIM))
    for found, expected in zip(fed(layer, same, 199, 1), same, strict=True):
        assert torch.equal(found, expected)


def test_an_odd_head_is_one_group() -> None:
    like = torch.randn(1, 1, 64, 7)
    for over in ("tokens", "channels"):
        quantized = QuantizedRest(like, 64, plain_memory, bits=4, over=over)
        quantized.put(0, like)
        out = torch.empty_like(like)
        quantized.get(0, out)
        assert (out - like).abs().max() < 0.4


def test_a_long_context_is_converted_in_chunks(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    given = states(290)
    whole = fed(made(KvKind(4, "device")), given, 290, *())
    monkeypatch.setattr(rest, "_CHUNK_TOKENS", 64)
    for found, expected in zip(fed(made(KvKind(4, "device")), given, 290), whole, strict=True):
        assert torch.equal(found, expected)


def test_a_file_has_no_name_and_keeps_what_is_written(tmp_path: Path) -> None:
    tensor = file_memory(tmp_path, (2, 3, 5), torch.bfloat16)
    tensor.copy_(torch.arange(30).view(2, 3, 5))
    assert torch.equal(tensor.float(), torch.arange(30.0).view(2, 3, 5))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory, "_reserve", full)
    with pytest.raises(CacheError, match=r"120 bytes for keys.*cannot be had in .*No space left.*cache_dir"):
        file_memory(tmp_path, (2, 3, 5), torch.float32)
    with pytest.raises(CacheError, match="are free"):
        require_space(tmp_path, 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file"):
        require_space(tmp_path / "file" / "folder", 1)


def test_reserving_without_the_system_call_writes_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.os, "posix_fallocate", raising=False)
    count = (1 << 20) + 5
    with (tmp_path / "file").open("w+b") as file:
        memory._reserve(file, count)
    assert (tmp_path / "file").stat().st_size == count
