"""The tool that writes random checkpoints, and the built-in shapes it takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.errors import CacheError, UsageError
from river_offload.planning import shapes
from river_offload.planning.shapes import builtin_names, builtin_shape

# Parameters as published with each model, billions.
PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "ministral-3-8b": 8.5,
    "mistral-7b": 7.25,
    "phi-4-mini": 3.84,
    "qwen3-8b": 8.19,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tool: ModuleType) -> None:
    """Every built-in shape made small, in proportion."""

    def shape(name: str) -> dict[str, object]:
        small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "num_attention_heads": 4}
        return builtin_shape(name) | small | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}

    monkeypatch.setattr(tool, "builtin_shape", shape)


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_shapes_have_the_published_size(name: str, tool: ModuleType) -> None:
    _, tensors = tool._model(name, None, None, torch.bfloat16)
    assert sum(torch.Size(shape).numel() for shape in tensors.values()) / 1e9 == pytest.approx(
        PARAMETERS[name], rel=0.01
    )


def test_unknown_shape() -> None:
    with pytest.raises(UsageError, match=r"no built-in model 'gpt-5'; there are llama-3\.1-8b, llama-3\.2-1b,"):
        builtin_shape("gpt-5")
    assert set(builtin_names()) == set(PARAMETERS) and shapes.__doc__


@pytest.mark.parametrize("name", ["llama-3.2-1b", "mistral-7b", "qwen3-8b"])
def test_checkpoint_loads(name: str, tiny: None, tool: ModuleType, tmp_path: Path) -> None:
    tool.make_checkpoint(tmp_path / "out", like=name, layers=2, dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_hidden_layers == 2
    assert model.dtype == torch.float32
    assert type(model).__name__ == builtin_shape(name)["architectures"][0]
    state = model.state_dict()
    assert torch.equal(state["model.norm.weight"], torch.ones(64))
    assert state["model.layers.1.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])
    assert not list(tmp_path.glob(".out*"))


def test_same_weights_however_divided(tiny: None, tool: ModuleType, tmp_path: Path) -> None:
    total = tool.make_checkpoint(tmp_path / "one", like="llama-3.1-8b", layers=2)
    tool.make_checkpoint(tmp_path / "many", like="llama-3.1-8b", layers=2, shard_bytes=20_000)
    tool.make_checkpoint(tmp_path / "other", like="llama-3.1-8b", layers=2, seed=1)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert all(path.stat().st_size < 22_000 for path in (tmp_path / "many").glob("*.safetensors"))
    opened = [Checkpoint.open(tmp_path / folder) for folder in ("one", "many", "other")]
    one, many, other = opened
    assert one.entries.keys() == many.entries.keys()
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.entries)
    assert not torch.equal(one.read("lm_head.weight"), other.read("lm_head.weight"))
    assert one.total_bytes == total
    for checkpoint in opened:
        checkpoint.close()


def test_folder_in_use(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert tool.main([str(tmp_path), "--like", "llama-3.2-1b"]) == 2
    assert "not empty; expected a new or an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_failures_leave_nothing(tiny: None, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tool, "_random", interrupt)
        assert tool.main([str(tmp_path / "out"), "--like", "llama-3.2-1b", "--layers", "1"]) == 130
    with monkeypatch.context() as patch:
        patch.setattr(tool, "_SPARE_BYTES", 1 << 60)
        with pytest.raises(CacheError, match="bytes free, the checkpoint takes"):
            tool.make_checkpoint(tmp_path / "out", like="llama-3.2-1b", layers=1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="--layers 0: expected at least 1"):
        tool.make_checkpoint(tmp_path / "out", like="llama-3.2-1b", layers=0)
    with pytest.raises(UsageError, match="--width 100: expected a multiple of 64"):
        tool.make_checkpoint(tmp_path / "out", like="llama-3.2-1b", width=100)


@pytest.mark.parametrize("name", sorted(set(builtin_names()) - {"phi-4-mini"}))
@pytest.mark.parametrize("width", [64, 256])
def test_a_narrow_model_shares_its_heads_like_the_real_one(name: str, width: int, tool: ModuleType) -> None:
    config, tensors = tool._model(name, None, width, torch.bfloat16)
    real, _ = tool._model(name, None, None, torch.bfloat16)
    assert config.hidden_size == width and config.num_hidden_layers == real.num_hidden_layers
    groups = [c.num_attention_heads / c.num_key_value_heads for c in (config, real)]
    assert groups[0] == groups[1] and config.intermediate_size % 64 == 0
    shares = [c.intermediate_size / c.hidden_size for c in (config, real)]
    assert shares[0] == pytest.approx(shares[1], rel=0.2)
    assert any(width in shape for shape in tensors.values())


def test_rotary_factors_that_belong_to_a_width(tool: ModuleType) -> None:
    with pytest.raises(UsageError, match="--width 64: not possible, the rotary factors"):
        tool._model("phi-4-mini", None, 64, torch.bfloat16)


@pytest.mark.demo
@pytest.mark.slow
def test_tokenizer_of_the_demo_model(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="49152 tokens, the model 32768"):
        tool.make_checkpoint(tmp_path / "out", like="mistral-7b", layers=1, tokenizer="demo")
    assert list(tmp_path.iterdir()) == []
