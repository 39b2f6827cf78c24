"""The names a model expects against the names a checkpoint uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.errors import CheckpointError

EXPECTED = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.1.self_attn.q_proj.weight": (4, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def match(
    directory: Path, names: dict[str, tuple[int, ...]], tied: dict[str, str], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, str], list[str]]:
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in names.items()}, directory / "model.safetensors")
    with Checkpoint.open(directory) as checkpoint:
        return checkpoint.check_keys(EXPECTED, tied), checkpoint.notes


def test_names_as_they_are(tmp_path: Path) -> None:
    assert match(tmp_path, EXPECTED, {}) == ({name: name for name in EXPECTED}, [])


@pytest.mark.parametrize(
    ("ours", "theirs", "head"),
    [
        ("model.", "", "lm_head.weight"),
        ("model.", "model.language_model.", "lm_head.weight"),
        ("model.", "language_model.model.", "language_model.lm_head.weight"),
        ("model.", "language_model.", "lm_head.weight"),
    ],
)
def test_other_prefixes(tmp_path: Path, ours: str, theirs: str, head: str) -> None:
    expected = {name: theirs + name.removeprefix(ours) for name in EXPECTED} | {"lm_head.weight": head}
    found, _ = match(tmp_path, {expected[name]: shape for name, shape in EXPECTED.items()}, {})
    assert found == expected


def test_base_model_from_a_full_checkpoint(tmp_path: Path) -> None:
    save_file({name: torch.zeros(shape) for name, shape in EXPECTED.items()}, tmp_path / "model.safetensors")
    base = {name.removeprefix("model."): shape for name, shape in EXPECTED.items() if name.startswith("model.")}
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.check_keys(base, {}) == {name: f"model.{name}" for name in base}


def test_two_prefixes_at_once(tmp_path: Path) -> None:
    names = {
        f"{prefix}.{name.removeprefix('model.')}": shape
        for prefix in ("language_model", "model.language_model")
        for name, shape in EXPECTED.items()
        if name.startswith("model.")
    }
    with pytest.raises(CheckpointError, match="under two prefixes"):
        match(tmp_path, names, TIED)


def test_tied_head_may_be_missing_only_when_tied(tmp_path: Path) -> None:
    names = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    assert match(tmp_path, names, TIED)[0] == {name: name for name in names}
    with pytest.raises(CheckpointError, match=r"missing tensor 'lm_head\.weight' \[10, 4\]"):
        match(tmp_path, names, {})


def test_shared_tensor_kept_under_the_head_only(tmp_path: Path) -> None:
    names = {name: shape for name, shape in EXPECTED.items() if name != "model.embed_tokens.weight"}
    assert match(tmp_path, names, TIED)[0]["model.embed_tokens.weight"] == "lm_head.weight"


def test_both_halves_of_a_tie_missing(tmp_path: Path) -> None:
    names = {name: shape for name, shape in EXPECTED.items() if shape != (10, 4)}
    with pytest.raises(CheckpointError, match=r"missing tensor 'model\.embed_tokens\.weight' \[10, 4\] and 1 more"):
        match(tmp_path, names, TIED)


def test_missing_tensor_names_the_nearest(tmp_path: Path) -> None:
    names = {name.replace("1.self_attn.q_proj.weight", "1.self_attn.q_proj.qweight"): s for name, s in EXPECTED.items()}
    with pytest.raises(CheckpointError) as caught:
        match(tmp_path, names, {})
    assert "missing tensor 'model.layers.1.self_attn.q_proj.weight' [4, 4];" in str(caught.value)
    assert "nearest found is 'model.layers.1.self_attn.q_proj.qweight' [4, 4] in model.safetensors" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_other_shape(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[5\], the config expects \[4\]"):
        match(tmp_path, EXPECTED | {"model.norm.weight": (5,)}, {})


def test_quantized_dtype(tmp_path: Path) -> None:
    save_file(
        {name: torch.zeros(shape).to(torch.float8_e4m3fn) for name, shape in EXPECTED.items()}
        | {"scale": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="has dtype F8_E4M3; expected F"):
        checkpoint.check_keys(EXPECTED, {})


def test_surplus_tensors_are_noted(tmp_path: Path) -> None:
    found, notes = match(tmp_path, EXPECTED | {"vision_tower.x": (3,), "rotary.inv_freq": (2,)}, {})
    assert set(found) == set(EXPECTED)
    assert notes == ["2 tensors the model does not use are ignored (rotary.inv_freq, ...)"]
