"""Ctrl-C and faults in the middle of a passage: the next call works, on the kept cache too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tokens

from river_offload.quant.native import Library
from river_offload.store import store as store_module


def lengths(cache: Any) -> list[int]:
    return [cache.get_seq_length(layer) for layer in range(len(cache.layers))]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("point", ["layer", "bind", "release"])
def test_an_interrupt_inside_a_passage_leaves_cache_and_slots_as_they_were(
    family: str, point: str, pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = pair(family, slots=1)
    cache = model.river.new_cache()
    first = model.generate(tokens(12), past_key_values=cache, max_new_tokens=3, do_sample=False)
    before = lengths(cache)
    turn = torch.cat([first, tokens(5, seed=9)], dim=1)

    calls = []

    def interrupted(*arguments: Any, **_: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return unbind(*arguments)  # what takes the slot back afterwards is not interrupted again

    unbind = store_module.unbind
    with monkeypatch.context() as patch:
        if point == "layer":
            patch.setattr(model.get_decoder().layers[2].backbone.mlp, "forward", interrupted)
        else:
            patch.setattr(store_module, {"bind": "_bind", "release": "unbind"}[point], interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert lengths(cache) == before
    assert model.river.report()["new_tokens"] == 0
    found = model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
    expected = plain.generate(turn, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, expected)


def test_the_report_is_of_the_last_generate_alone(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=2.0, also_modes=("fixed:1",))
    model.generate(tokens(5), max_new_tokens=2, do_sample=False)
    with model.river.using(mode="fixed:1"):
        model.generate(tokens(6), max_new_tokens=3, do_sample=False)
    model(tokens(4))
    model.river.trace.clear()
    report = model.river.report()
    assert (report["mode"], report["depths"], report["new_tokens"]) == ("fixed:1", [1, 1, 1], 3)
    assert report["prompt_tokens"] == 6


def test_a_turn_of_one_new_token_is_still_a_prefill(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="backbone")
    cache = model.river.new_cache()
    first = model.generate(tokens(5), past_key_values=cache, max_new_tokens=2, do_sample=False)
    model.generate(first, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert [record.path for record in model.river.account.records] == ["prefill", "decode"]
    assert model.river.report()["prefill_depth"] == model.river.num_layers


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_shortest_contexts_load_and_run(context: int, open_river: Callable[..., Any]) -> None:
    model = open_river("gemma3", context=context)
    if context > 1:
        assert model.generate(tokens(1), max_new_tokens=context - 1, do_sample=False).shape == (1, context)
    assert model(tokens(1)).logits.shape[:2] == (1, 1)


def test_an_interrupt_while_the_river_is_built_keeps_whole_layers_and_no_thread(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize, calls = Library.quantize, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return quantize(*arguments)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # blocks of rows go to threads only where there are several
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Library, "quantize", interrupted)
            with pytest.raises(KeyboardInterrupt):
                open_river("llama", mode="quantized", cache_dir=tmp_path)
        with ThreadPoolExecutor(1) as pool:  # torch keeps the number for each thread, and one for those to come
            assert [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [2, 2]
    finally:
        torch.set_num_threads(threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("river-quantize")]
    left = {path.name for path in tmp_path.glob("river/*/*")}
    assert "layer-000.safetensors" in left
    assert all(name == "manifest.json" or name.startswith("layer-") for name in left)
    model = open_river("llama", mode="quantized", cache_dir=tmp_path)
    assert torch.equal(model(tokens(5)).logits, open_river("llama", mode="quantized")(tokens(5)).logits)
