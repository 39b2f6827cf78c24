"""One KV cache for backbone and river: the same length at every depth, whatever way the passages took."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Reference, budget_for, poison_slots, tokens
from transformers import DynamicCache

from river_offload import passage
from river_offload.errors import ContextError
from river_offload.kv.cache import SharedCache, SharedLayer, WindowLayer


def lengths(cache: Any) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


def scripted_signals(depth: int) -> Iterator[float]:
    """Signals after layer 1, 2, ... under which a passage with tau 0.5 and min_exit 1 leaves at `depth`."""
    yield from (1.0 if layer == depth else 0.0 for layer in range(1, 100))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_every_layer_has_one_length_after_every_step(
    family: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_river(family, mode="exit", tau=0.5, budget=budget_for(checkpoint(family), 1, mode="exit"))
    poison_slots(model)
    reference = Reference(checkpoint(family))
    cache, expected_cache = model.river.new_cache(), DynamicCache(config=model.config)
    script, layers = random.Random(5), model.river.num_layers
    ids, position, depths = tokens(40), 0, []
    for step in range(18):
        count = 7 if step == 0 else script.choice([1, 1, 1, 3])
        depth = script.randint(1, layers)
        signals = scripted_signals(depth)
        monkeypatch.setattr(passage, "exit_signal", lambda *_, signals=signals: next(signals))
        chunk = ids[:, position : position + count]
        with torch.no_grad():
            found = model(chunk, past_key_values=cache, use_cache=True).logits
            expected = reference.at(depth)(chunk, past_key_values=expected_cache, use_cache=True).logits
        position += count
        depths.append(depth)
        assert lengths(cache) == [position] * layers
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [record.depth for record in model.river.trace.records] == depths
    assert set(depths) == set(range(1, layers + 1))
    cached = [record.cached_tokens for record in model.river.trace.records]
    assert cached[:2] == [0, 7] and cached == sorted(cached)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", ["backbone", "exit"])
def test_a_second_generate_on_the_kept_cache_equals_one_long_run(
    family: str, mode: str, open_river: Callable[..., Any]
) -> None:
    model = open_river(family, mode=mode, tau=0.6)
    prompt = tokens(9)
    long = model.generate(prompt, max_new_tokens=14, do_sample=False)
    long_depths = model.river.report()["depths"]
    cache = model.river.new_cache()
    first = model.generate(prompt, max_new_tokens=6, do_sample=False, past_key_values=cache)
    depths = model.river.report()["depths"]
    assert lengths(cache) == [9 + 5] * model.river.num_layers  # the last token was never fed
    second = model.generate(first, max_new_tokens=8, do_sample=False, past_key_values=cache)
    assert torch.equal(second, long)
    assert depths + model.river.report()["depths"] == long_depths
    assert lengths(cache) == [9 + 13] * model.river.num_layers
    # Only the one token that was not cached was run, not the whole prompt again.
    assert model.river.trace.records[-8].new_tokens == 1


def test_a_second_turn_on_the_kept_cache_equals_transformers(
    plain: Callable[[str], Any], open_river: Callable[..., Any]
) -> None:
    model = open_river("llama", mode="backbone")
    outputs = []
    for each, cache in ((model, model.river.new_cache()), (plain("llama"), DynamicCache())):
        first = each.generate(tokens(8), max_new_tokens=5, do_sample=False, past_key_values=cache)
        turn = torch.cat((first, tokens(6, seed=2)), dim=1)
        outputs.append(each.generate(turn, max_new_tokens=5, do_sample=False, past_key_values=cache))
    assert torch.equal(*outputs)


def test_a_cache_gives_back_its_last_tokens(open_river: Callable[..., Any]) -> None:
    """What drafting needs: tokens that were refused are forgotten, and what follows is as if they had never been."""
    model = open_river("llama", mode="exit", tau=0.6)
    ids, refused = tokens(12), tokens(3, seed=9)
    with torch.no_grad():
        cache = model.river.new_cache()
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        model(refused, past_key_values=cache, use_cache=True)
        cache.crop(-3)
        assert lengths(cache) == [8] * model.river.num_layers
        found = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits
        cache = model.river.new_cache()
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        expected = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits
    assert torch.equal(found, expected)


def test_a_kept_cache_that_is_too_small_names_both_sizes(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="backbone")
    with pytest.raises(ContextError, match=r"11 tokens in a KV cache made for 10"):
        model.generate(tokens(8), max_new_tokens=8, do_sample=False, past_key_values=model.river.new_cache(10))
    # The model is as good as before.
    assert model.generate(tokens(8), max_new_tokens=2, do_sample=False).shape == (1, 10)


def states(rows: int, count: int, start: float = 0.0) -> torch.Tensor:
    """[rows, 2 heads, count, 4], every number different."""
    return (torch.arange(rows * 2 * count * 4, dtype=torch.float32) + start).view(rows, 2, count, 4)


@pytest.fixture
def layer() -> SharedLayer:
    """Capacity 6, three rows, four tokens filled; values are the negative keys."""
    layer = SharedLayer(6)
    layer.update(states(3, 4), -states(3, 4))
    return layer


def test_a_layer_appends_in_place(layer: SharedLayer) -> None:
    memory = layer.keys.data_ptr()
    more = states(3, 2, 1000)
    keys, values = layer.update(more, -more)
    assert torch.equal(keys, torch.cat((states(3, 4), more), dim=2))
    assert torch.equal(values, -keys)
    assert (keys.data_ptr(), layer.get_seq_length()) == (memory, 6)


def test_a_full_layer_refuses_and_stays_as_it_was(layer: SharedLayer) -> None:
    with pytest.raises(ContextError, match="7 tokens in a KV cache made for 6"):
        layer.update(states(3, 3), states(3, 3))
    assert layer.get_seq_length() == 4
    assert torch.equal(layer.keys, states(3, 4))


def test_a_layer_is_cropped_and_filled_again(layer: SharedLayer) -> None:
    layer.crop(0)
    assert layer.get_seq_length() == 4
    layer.crop(-3)
    more = states(3, 2, 1000)
    keys, _ = layer.update(more, -more)
    assert torch.equal(keys, torch.cat((states(3, 4)[:, :, :1], more), dim=2))
    layer.crop(-100)
    assert layer.get_seq_length() == 0


def test_a_positive_crop_is_refused_like_transformers_does(layer: SharedLayer) -> None:
    """It was a final length once, and is a count now: guessing would lose tokens."""
    with pytest.raises(ValueError, match="negative"):
        layer.crop(3)
    assert layer.get_seq_length() == 4


def test_a_layer_is_reset_and_keeps_its_memory(layer: SharedLayer) -> None:
    memory = layer.keys.data_ptr()
    layer.reset()
    assert layer.get_seq_length() == 0
    keys, _ = layer.update(states(3, 1, 7), states(3, 1, 7))
    assert torch.equal(keys, states(3, 1, 7))
    assert keys.data_ptr() == memory


def test_beams_are_reordered_in_place(layer: SharedLayer) -> None:
    memory = layer.keys.data_ptr()
    layer.reorder_cache(torch.tensor([2, 0, 2]))
    assert torch.equal(layer.keys, states(3, 4)[[2, 0, 2]])
    assert torch.equal(layer.values, -layer.keys)
    assert layer.keys.data_ptr() == memory


def test_rows_are_selected_and_repeated(layer: SharedLayer) -> None:
    layer.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.keys, states(3, 4)[1:2])
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, states(3, 4)[[1, 1]])
    more = states(2, 2, 1000)
    keys, values = layer.update(more, -more)
    assert torch.equal(keys, torch.cat((states(3, 4)[[1, 1]], more), dim=2))
    assert torch.equal(values, -keys)


def test_a_layer_that_holds_nothing_yet_can_be_told_everything() -> None:
    layer = SharedLayer(6)
    layer.crop(-2)
    layer.reset()
    layer.batch_select_indices(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize(("context", "slides"), [(8, False), (9, True)])
def test_a_window_as_long_as_the_context_never_slides(
    context: int, slides: bool, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    """Else its layer would copy its states at every step, and hold them twice meanwhile. The window has 8 tokens."""
    model = open_river("mistral", context=context, mode="backbone")
    layers = model.river.new_cache().layers
    assert [isinstance(layer, WindowLayer) for layer in layers] == [slides] * len(layers)


def test_sliding_layers_stay_bounded(checkpoint: Callable[..., Path], open_river: Callable[..., Any]) -> None:
    model = open_river("gemma3", mode="backbone")
    cache = model.river.new_cache()
    assert isinstance(cache, SharedCache)
    model.generate(tokens(20), max_new_tokens=4, do_sample=False, past_key_values=cache)
    held = [layer.keys.shape[-2] for layer in cache.layers]
    assert held == [7, 7, 23, 7, 7, 23]
    assert lengths(cache) == [23] * 6
