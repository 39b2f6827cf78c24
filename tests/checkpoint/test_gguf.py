"""GGUF files unpacked to safetensors: the weights are those that transformers itself loads from the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from river_offload.checkpoint import gguf as ours
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.checkpoint.source import demo_file, resolve
from river_offload.errors import CacheError, CheckpointError, UnsupportedError, UsageError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY, LAYERS = 64, 4, 2, 32, 96, 70, 2
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path, *, tied: bool = True, rope_divisors: np.ndarray | None = None, skip: str = "", experts: bool = False
) -> Path:
    """A random llama of two layers, matrices in Q8_0, norms in F32; head_dim is not hidden / heads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<s>", "</s>", "a", "b", "ab"] + [f"<{i}>" for i in range(VOCABULARY - 5)]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCABULARY - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        if name != skip:
            values = random.normal(0, 0.02, (rows, columns)).astype(np.float32)
            writer.add_tensor(name, gguf.quantize(values, Q8_0), raw_dtype=Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(name, random.normal(1, 0.1, HIDDEN).astype(np.float32))

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        matrix(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        matrix(f"blk.{layer}.ffn_up.weight", MLP * (2 if experts else 1), HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, MLP)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", VOCABULARY, HIDDEN)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def assert_equal_to_transformers(path: Path, directory: Path, dtype: torch.dtype) -> None:
    """Every tensor of the unpacked model is what transformers dequantizes, cast; both name the same tensors."""
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    mine = AutoModelForCausalLM.from_pretrained(directory)
    assert type(mine) is type(theirs)
    assert mine.dtype == dtype
    found, expected = mine.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor.to(dtype), found[name])] == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_weights_are_those_of_transformers(
    tmp_path: Path, tied: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_BLOCK_ELEMENTS", 10 * HIDDEN)  # several blocks a matrix, the last one shorter
    file = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    directory = ours.unpack(file, cache_dir=tmp_path / "cache", dtype=dtype)
    assert_equal_to_transformers(file, directory, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    with Checkpoint.open(directory) as checkpoint:
        assert ("lm_head.weight" in checkpoint.entries) is not tied
        assert checkpoint.dtype == ("bfloat16" if dtype == "auto" else dtype)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is tied


def test_tokenizer_comes_along(file: Path, tmp_path: Path) -> None:
    directory = ours.unpack(file, cache_dir=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (
        tokenizer("abb")["input_ids"]
        == AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)("abb")["input_ids"]
    )
    assert tokenizer.eos_token == "</s>"


def test_second_time_nothing_is_written(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(file, cache_dir=tmp_path / "cache")
    assert (first.name, first.kind) == ("tiny", "gguf")
    monkeypatch.setattr(ours, "_plan", lambda _: pytest.fail("unpacked again"))
    assert resolve(file, cache_dir=tmp_path / "cache") == first


def test_another_file_or_dtype_gets_another_directory(file: Path, tmp_path: Path) -> None:
    first = ours.unpack(file, cache_dir=tmp_path / "cache")
    other = ours.unpack(file, cache_dir=tmp_path / "cache", dtype="float32")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    changed = ours.unpack(file, cache_dir=tmp_path / "cache")
    assert len({first, other, changed}) == 3


def test_damaged_directory_is_written_again(file: Path, tmp_path: Path) -> None:
    directory = ours.unpack(file, cache_dir=tmp_path / "cache")
    whole = (directory / "model.safetensors").read_bytes()
    os.truncate(directory / "model.safetensors", 1000)
    assert ours.unpack(file, cache_dir=tmp_path / "cache") == directory
    assert (directory / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.3, 0.6, 0.999])
def test_truncated_file(file: Path, tmp_path: Path, kept: float) -> None:
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: (damaged or cut short|starts with b'', expected b'GGUF')"):
        ours.unpack(file, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        ours.unpack(tmp_path / "x.gguf", cache_dir=tmp_path / "cache")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        ours.unpack(tmp_path / "y.gguf", cache_dir=tmp_path / "cache")


def test_missing_tensor(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", skip="blk.1.attn_k.weight")
    with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.1\.self_attn\.k_proj\.weight"):
        ours.unpack(file, cache_dir=tmp_path / "cache")


def test_tensor_of_another_shape(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", experts=True)
    with pytest.raises(
        UnsupportedError, match=r"blk\.0\.ffn_up\.weight has shape \[192, 64\], the model expects \[96, 64"
    ):
        ours.unpack(file, cache_dir=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "gguf") == []


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, ZeroDivisionError, StrictDataclassError])
def test_whatever_transformers_stumbles_on_names_the_file(
    fault: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")

    def stumbling(*_: Any, **__: Any) -> Any:
        raise fault("odd metadata")

    monkeypatch.setattr(ours.AutoConfig, "from_pretrained", stumbling)
    with pytest.raises(UnsupportedError, match=r"tiny\.gguf: transformers cannot read this GGUF: odd metadata"):
        ours.unpack(file, cache_dir=tmp_path / "cache")


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="transformers cannot read this GGUF"):
        ours.unpack(tmp_path / "x.gguf", cache_dir=tmp_path / "cache")


def test_wrong_dtype(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'int8': expected auto, float32"):
        ours.unpack(file, cache_dir=tmp_path / "cache", dtype="int8")


def llama3_divisors(factor: float, low: float = 1.0) -> np.ndarray:
    """What llama.cpp's converter stores for Llama 3 (convert_hf_to_gguf.py: generate_extra_tensors)."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / HEAD_DIM)
        smooth = np.clip((8192 / wavelength - low) / (4 - low), 0, 1)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_restored(tmp_path: Path, factor: float) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", rope_divisors=llama3_divisors(factor))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        directory = ours.unpack(file, cache_dir=tmp_path / "cache")
    assert AutoConfig.from_pretrained(directory).rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_unknown_rope_scaling_is_warned_about(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", rope_divisors=llama3_divisors(8.0, low=2.0))
    with pytest.warns(UserWarning, match="scales its rotary embedding"):
        directory = ours.unpack(file, cache_dir=tmp_path / "cache")
    assert AutoConfig.from_pretrained(directory).rope_parameters["rope_type"] == "default"


def test_no_room(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(CacheError, match=r"found 1 B free, expected [\d.]+ KiB for tiny\.gguf, unpacked"):
        ours.unpack(file, cache_dir=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "gguf") == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_full_while_writing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CacheError, match=r"cannot unpack tiny\.gguf there: No space left on device. Make room"):
            ours.unpack(file, cache_dir=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "gguf") == []
    assert ours.unpack(file, cache_dir=tmp_path / "cache").is_dir()


def test_a_cache_that_cannot_be_written_is_found_before_the_file_is_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_plan", lambda _: pytest.fail("read"))
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(CacheError, match=r"Not a directory\. Let it be written to, or choose another cache directory"):
        ours.unpack(file, cache_dir=tmp_path / "cache")


class Interrupt:
    """A progress during which the user presses Ctrl-C."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, label: str, total: int, unit: str) -> None:
        self.calls.append(f"{label}, {unit}")

    def advance(self, amount: int) -> None:
        if "bytes" in self.calls[-1]:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.calls.append("finish")


def test_ctrl_c_leaves_nothing_and_the_next_run_works(file: Path, tmp_path: Path) -> None:
    progress = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        ours.unpack(file, cache_dir=tmp_path / "cache", progress=progress)
    assert progress.calls == ["reading tiny.gguf, files", "finish", "unpacking tiny.gguf, bytes", "finish"]
    assert os.listdir(tmp_path / "cache" / "gguf") == []
    assert ours.unpack(file, cache_dir=tmp_path / "cache").is_dir()


@pytest.mark.demo
@pytest.mark.slow
def test_demo_model_is_that_of_transformers_and_writes_text(tmp_path: Path) -> None:
    source = resolve("demo", cache_dir=tmp_path)
    assert source.kind == "demo"
    assert_equal_to_transformers(demo_file(), source.directory, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    model = AutoModelForCausalLM.from_pretrained(source.directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
