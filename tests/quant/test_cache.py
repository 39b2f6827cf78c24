from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from river_offload.errors import CacheError
from river_offload.quant import cache as cache_module
from river_offload.quant.cache import RiverCache

KEY = {"checkpoint": "abc", "bits": 4, "group_size": 64}


@pytest.fixture
def cache(tmp_path: Path) -> RiverCache:
    return RiverCache(tmp_path, KEY)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "q.packed": torch.randint(0, 256, (5, 33), dtype=torch.uint8),
        "q.scale": torch.randn(5, 3).bfloat16(),
        "odd.weight": torch.randn(3, 7),
        "odd.bias": torch.randn(3).half(),
    }


def _file(cache: RiverCache, layer: int) -> Path:
    return cache.directory / f"layer-{layer:03d}.safetensors"


def _same(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor]) -> bool:
    return a is not None and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def test_what_was_written_is_read(cache: RiverCache, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert not cache.has_layer(3)
    assert cache.read_layer(3) is None
    cache.write_layer(3, state)
    cache.write_layer(0, {"x": torch.zeros(2)})
    again = RiverCache(tmp_path, dict(reversed(KEY.items())))
    assert again.has_layer(3) and again.has_layer(0) and not again.has_layer(1)
    assert _same(again.read_layer(3), state)
    assert _same(load_file(_file(cache, 3)), state), "others must be able to read it"
    assert {path.name for path in cache.directory.iterdir()} == {
        "manifest.json",
        "layer-000.safetensors",
        "layer-003.safetensors",
    }


@pytest.mark.parametrize("where", ("header", "data", "end"))
def test_a_changed_byte_means_absent(cache: RiverCache, state: dict[str, torch.Tensor], where: str) -> None:
    cache.write_layer(1, state)
    data = bytearray(_file(cache, 1).read_bytes())
    data[{"header": 12, "data": len(data) // 2, "end": -1}[where]] ^= 1
    _file(cache, 1).write_bytes(data)
    assert cache.read_layer(1) is None
    assert not _file(cache, 1).exists(), "a damaged file is deleted"
    cache.write_layer(1, state)
    assert _same(cache.read_layer(1), state)


@pytest.mark.parametrize("content", (b"", b"\x00" * 7, b"\xff" * 40, b"\x02" + b"\x00" * 7 + b"[]"))
def test_garbage_means_absent(cache: RiverCache, state: dict[str, torch.Tensor], content: bytes) -> None:
    cache.write_layer(1, state)
    _file(cache, 1).write_bytes(content)
    assert not cache.has_layer(1)
    assert cache.read_layer(1) is None


def test_a_truncated_or_missing_file_means_absent(cache: RiverCache, state: dict[str, torch.Tensor]) -> None:
    cache.write_layer(1, state)
    _file(cache, 1).write_bytes(_file(cache, 1).read_bytes()[:-1])
    assert not cache.has_layer(1)
    assert cache.read_layer(1) is None
    assert cache.read_layer(1) is None, "the file is gone now"


def test_another_key_is_another_river(cache: RiverCache, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    cache.write_layer(1, state)
    other = RiverCache(tmp_path, KEY | {"bits": 3})
    assert not other.has_layer(1)
    shutil.copytree(cache.directory, other.directory)  # a foreign folder under our name
    assert not other.has_layer(1)
    assert other.read_layer(1) is None


@pytest.mark.parametrize("manifest", (b"", b"[]", b'{"key": 1}', b"\xff\xfe", b'{"key": KEY, "layers": {"1": {}}}'))
def test_a_damaged_manifest_is_rebuilt(cache: RiverCache, state: dict[str, torch.Tensor], manifest: bytes) -> None:
    cache.write_layer(1, state)
    manifest_file = cache.directory / "manifest.json"
    key = json.dumps(json.loads(manifest_file.read_bytes())["key"]).encode()
    manifest_file.write_bytes(manifest.replace(b"KEY", key))
    assert not cache.has_layer(1)
    assert cache.read_layer(1) is None
    cache.write_layer(1, state)
    assert _same(cache.read_layer(1), state)


def test_a_full_disk_is_refused_before_anything_is_written(
    cache: RiverCache, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
    with pytest.raises(CacheError, match=r"found 1.0 KiB free, expected .*for the river.*cache_dir"):
        cache.write_layer(2, state)
    assert not list(cache.directory.iterdir())


@pytest.mark.parametrize("error", (OSError(28, "No space left on device"), KeyboardInterrupt()), ids=("full", "ctrl-c"))
def test_an_interrupted_write_leaves_nothing_and_keeps_earlier_layers(
    cache: RiverCache, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cache.write_layer(0, state)

    def fail(_: int) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(cache_module.os, "fsync", fail)
        with pytest.raises(CacheError if isinstance(error, OSError) else KeyboardInterrupt):
            cache.write_layer(1, state)
    assert sorted(path.name for path in cache.directory.iterdir()) == ["layer-000.safetensors", "manifest.json"]
    assert _same(cache.read_layer(0), state)
    cache.write_layer(1, state)
    assert _same(cache.read_layer(1), state)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    (tmp_path / "river").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot be cached.*cache_dir"):
        RiverCache(tmp_path, KEY).write_layer(0, state)
