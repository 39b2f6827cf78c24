"""What cannot work is refused before any work is done, with the reason."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import load_tiny
from transformers import (
    BartConfig,
    CLIPConfig,
    GPT2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from river_offload import RiverConfig, load_config
from river_offload.errors import BudgetError, CacheError, CheckpointError, UnsupportedError, UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_exit": 6}, "min_exit is 6, the model has 5 layers"),
        ({"mode": "fixed:99"}, r"fixed:99 leaves after 99 layers, the model has 5: use 0\.\.5"),
        ({"also_modes": ("fixed:6",)}, "fixed:6 leaves after 6 layers"),
        ({"mode": "fastest"}, "unknown mode 'fastest'"),
        ({"device": "cuda:3"}, "no GPU"),
        ({"host_budget": "1GiB"}, "host_budget has no effect on CPU"),
        ({"budget": "8G"}, "ambiguous"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_an_option_that_cannot_work_is_refused(
    options: dict[str, Any], message: str, open_river: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        open_river("llama", **options)


def test_an_unknown_option_names_the_nearest(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(TypeError, match="bugdet"):
        load_tiny(checkpoint("llama"), bugdet=1)
    toml = tmp_path / "river.toml"
    toml.write_text(f'model = "{checkpoint("llama")}"\nbugdet = "1GiB"\n')
    with pytest.raises(UsageError, match=r"river\.toml: unknown key bugdet: did you mean budget\?"):
        RiverConfig.from_toml(toml)


def test_a_model_is_loaded_as_a_toml_file_says(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    toml = tmp_path / "river.toml"
    toml.write_text(
        f'model = "{checkpoint("llama")}"\nbudget = "1GiB"\ncontext = 32\nmode = "fixed:2"\ndevice = "cpu"\n'
        "[quant]\nbits = 8\ngroup_size = 32\n"
    )
    model = load_config(RiverConfig.from_toml(toml))
    assert (model.river.mode, model.river.config.context) == ("fixed:2", 32)
    assert model.model.layers[3].river.mlp.up_proj.spec.bits == 8
    model.river.close()


SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4), "encoder-decoder"),
        (
            BartConfig(
                vocab_size=101, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64
            ),
            "encoder-decoder",
        ),
        (MixtralConfig(**SMALL, num_local_experts=4), "4 experts"),
        (Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=32), "4 experts"),
        (CLIPConfig(), "clip"),
        (GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4), r"no nn\.Linear"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_a_model_of_another_kind_is_refused(
    config: PretrainedConfig, message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoint("llama") / "model.safetensors", tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        load_tiny(tmp_path)


def test_a_config_that_cannot_be_read_is_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copy(checkpoint("llama") / "model.safetensors", tmp_path)
    for text in ('{"model_type": "never-heard-of"}', "{", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_tiny(tmp_path)


def test_weights_of_another_model_are_refused_before_any_work(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copy(checkpoint("llama") / "model.safetensors", tmp_path)
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    with pytest.raises(CheckpointError, match=r"missing tensor 'model\.layers\.5"):
        load_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match=r"has shape \[101, 64\], the config expects \[100, 64\]"):
        load_tiny(tmp_path)


def test_a_failed_load_closes_the_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for options, error in (
        ({"budget": 1}, BudgetError),
        ({"mode": "fixed:9"}, UsageError),
        ({"cache_dir": blocked}, CacheError),
    ):
        with pytest.raises(error):
            load_tiny(directory, **options)
    gc.collect()
    still_open = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not any(path.startswith(str(directory)) for path in still_open)
