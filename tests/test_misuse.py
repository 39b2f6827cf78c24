"""What one may try on a loaded model and must not get away with silently."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tokens

from river_offload.errors import CheckpointError, ContextError, UsageError

REFUSED: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "deepcopy of a layer": lambda model: copy.deepcopy(model.get_decoder().layers[1]),
    "half": lambda model: model.half(),
    "half of the decoder": lambda model: model.get_decoder().half(),
    "half of a layer": lambda model: model.get_decoder().layers[0].half(),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of the decoder": lambda model: model.get_decoder().state_dict(),
    "state_dict of the layers": lambda model: model.get_decoder().layers.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}),
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(200),
    "save_pretrained": lambda model: model.save_pretrained("/nowhere"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_done_right_is_refused_and_harms_nothing(how: str, pair: Callable[..., Any]) -> None:
    model, plain = pair()
    with pytest.raises(UsageError, match="not possible on a loaded river model"):
        REFUSED[how](model)
    assert torch.equal(model(tokens(6)).logits, plain(tokens(6)).logits)


def test_two_threads_cannot_run_one_model(open_river: Callable[..., Any]) -> None:
    model = open_river("llama")
    expected = model.generate(tokens(5), max_new_tokens=4, do_sample=False)
    inside, go_on = threading.Event(), threading.Event()
    plain = model.get_decoder().layers[0].backbone.mlp.forward

    def waiting(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return plain(*arguments)

    model.get_decoder().layers[0].backbone.mlp.forward = waiting
    found: list[torch.Tensor] = []
    worker = threading.Thread(target=lambda: found.append(model.generate(tokens(5), max_new_tokens=4, do_sample=False)))
    worker.start()
    assert inside.wait(30)
    with pytest.raises(UsageError, match="another thread"):
        model.generate(tokens(5), max_new_tokens=1)
    with pytest.raises(UsageError, match="another thread"):
        model(tokens(5))
    go_on.set()
    worker.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("mode", ["backbone", "fixed:1", "fixed:3"])
def test_attentions_come_from_every_layer(mode: str, open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode=mode)
    model.set_attn_implementation("eager")
    assert len(model(tokens(5), output_attentions=True).attentions) == model.river.num_layers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tau", value) for value in (float("nan"), float("inf"), None, True, "x", 10**400)),
        *(("mode", value) for value in (None, 3, "slow")),
    ],
)
def test_a_setting_that_is_none_is_refused(name: str, value: Any, open_river: Callable[..., Any]) -> None:
    model = open_river("llama")
    with pytest.raises(UsageError, match=name):
        setattr(model.river, name, value)
    assert (model.river.mode, model.river.tau) == ("exit", 0.5)


def test_caches_beyond_the_plan_are_refused(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", context=40, batch=2)
    for count in (0, -1, 41):
        with pytest.raises(ContextError, match="the plan holds 1 to 40"):
            model.river.new_cache(count)
    cache = model.river.new_cache()
    model.generate(tokens(5), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ContextError, match="2 rows for a KV cache that holds 1"):
        model(tokens(3, rows=2), past_key_values=cache)
    for wrong in (tokens(5)[0], [[1, 2]]):
        with pytest.raises(UsageError, match="expected a tensor of ids"):
            model.generate(wrong)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "abc"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}'),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": 0}'),
        ("config.json", "{"),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "{}"),
    ],
)
def test_a_damaged_file_beside_the_weights_is_named_before_any_work(
    file: str, text: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any], tmp_path: Path
) -> None:
    for source in checkpoint("llama").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).write_text(text)
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=file.split("_config")[0].split(".")[0]):
        open_river(tmp_path, cache_dir=cache)
    assert not (cache / "river").exists()


def test_a_context_beyond_the_model_is_planned_for_the_model(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", context=100_000)
    assert model.river.config.context == 256 == json.loads(model.config.to_json_string())["max_position_embeddings"]
    assert any("context 100000" in note for note in model.river.notes)
