"""Long prompts in chunks: what comes out is what comes out at once, each streamed layer is fetched once, and working
memory is that of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, budget_for, poison_slots, tokens
from transformers import DynamicCache, StaticCache

from river_offload.errors import ContextError, UsageError

CONTEXT = 256
TOLERANCE = 1e-5
CHUNKS = (1, 7, 64)


def prompts(chunk: int) -> list[int]:
    return sorted({1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5} - {0})


@pytest.fixture
def chunked(checkpoint: Callable[..., Path], open_river: Callable[..., Any]) -> Callable[..., Any]:
    """`chunked("llama", 7)`: a model in mode backbone that reads prompts in chunks, one layer resident."""

    def opened(family: str, chunk: int, **options: Any) -> Any:
        defaults: dict[str, Any] = {"mode": "backbone", "context": CONTEXT, "prefill_chunk": chunk, "prefetch": "none"}
        options = defaults | options
        model = open_river(family, budget=budget_for(checkpoint(family), 1, **options), **options)
        assert model.river.report()["placement"]["prefill_chunk"] == chunk
        poison_slots(model)
        return model

    return opened


def run(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache, **options).logits
    return logits


def assert_same_cache(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length()
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_in_chunks_is_the_prompt_at_once(
    family: str, chunk: int, chunked: Callable[..., Any], plain: Callable[[str], Any]
) -> None:
    model = chunked(family, chunk)
    streamed_bytes = len(model.river.placement.streamed_layers) * model.river.placement.slot_bytes
    for length in prompts(chunk):
        ids = tokens(length + 1, seed=length)
        cache, expected_cache = model.river.new_cache(), DynamicCache(config=model.config)
        found = run(model, ids[:, :length], cache)
        expected = run(plain(family), ids[:, :length], expected_cache)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(found, expected) or length > chunk  # at once it stays what transformers computes
        assert_same_cache(cache, expected_cache)
        record = model.river.trace.records[-1]
        assert (record.new_tokens, record.bytes_streamed) == (length, streamed_bytes)
        found = run(model, ids[:, length:], cache)
        torch.testing.assert_close(found, run(plain(family), ids[:, length:], expected_cache), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", ["tokens", "states"])
def test_states_on_the_host_are_the_same_to_the_bit(
    family: str, given: str, checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    """The least budget that will do puts them there, a roomy one does not. `given`: what the caller hands in."""
    options: dict[str, Any] = {"mode": "backbone", "context": CONTEXT, "prefill_chunk": 16}
    found = []
    for tier, budget in (("device", "1GiB"), ("host", budget_for(checkpoint(family), 0, **options))):
        model = open_river(family, budget=budget, **options)
        assert model.river.report()["placement"]["states_tier"] == tier
        ids, cache = tokens(200), model.river.new_cache()
        embedded = model.get_input_embeddings()(ids).detach()
        prompt = {"input_ids": ids} if given == "tokens" else {"inputs_embeds": embedded}
        untouched = embedded.clone()
        with torch.no_grad():
            logits = [model(**prompt, past_key_values=cache).logits]
            logits.append(model(tokens(30, seed=5), past_key_values=cache).logits)
            logits.append(model(tokens(1, seed=6), past_key_values=cache).logits)
        assert torch.equal(embedded, untouched)
        found.append((torch.cat(logits, dim=1), cache))
    (all_logits, cache), (other_logits, other_cache) = found
    assert torch.equal(all_logits, other_logits)
    for mine, theirs in zip(cache.layers, other_cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)


def test_what_is_no_longer_than_a_chunk_keeps_its_states_on_the_device(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of drafts and short turns: on the host they would pay two copies a layer, and a file, for nothing."""
    options: dict[str, Any] = {"mode": "lossless", "context": CONTEXT, "prefill_chunk": 16}
    model = open_river("llama", budget=budget_for(checkpoint("llama"), 0, **options), **options)
    flow, on_the_host = model.river._flow, []
    plain = flow.states_memory
    assert plain is not None

    def counted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        on_the_host.append(shape[1])
        return plain(shape, dtype)

    monkeypatch.setattr(flow, "states_memory", counted)
    model.generate(tokens(40), max_new_tokens=12, do_sample=False)
    assert any(record.path == "check" for record in model.river.account.records)
    assert on_the_host == [40]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("chunk", [3, 8, 9])
def test_windows_slide_over_every_boundary(
    family: str, chunk: int, chunked: Callable[..., Any], plain: Callable[[str], Any]
) -> None:
    model = chunked(family, chunk)
    for length in range(chunk + 1, 3 * chunk + 9):  # the window is 8
        ids = tokens(length, seed=length)
        cache, expected_cache = model.river.new_cache(), DynamicCache(config=model.config)
        found, expected = run(model, ids, cache), run(plain(family), ids, expected_cache)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        assert_same_cache(cache, expected_cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_chunks_of_a_prompt_leave_at_one_depth(family: str, open_river: Callable[..., Any]) -> None:
    ids = tokens(40)
    whole = open_river(family, mode="exit", tau=2.0, context=CONTEXT, prefill_chunk=CONTEXT)
    cut = open_river(family, mode="exit", tau=2.0, context=CONTEXT, prefill_chunk=7)
    for model in (whole, cut):
        run(model, ids, model.river.new_cache())
    (expected,), (found,) = whole.river.trace.records, cut.river.trace.records
    assert found.signals == pytest.approx(expected.signals, abs=TOLERANCE)
    highest = max(expected.signals)
    for tau in {highest - 1e-3, sorted(expected.signals)[0] - 1e-3}:
        outputs = []
        for model in (whole, cut):
            with model.river.using(tau=tau):
                outputs.append(run(model, ids, model.river.new_cache()))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=TOLERANCE)
        assert cut.river.trace.records[-1].depth == whole.river.trace.records[-1].depth < whole.river.num_layers


@pytest.mark.parametrize("kind", ["2-d", "4-d", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_with_padding_are_cut_too(
    family: str, kind: str, chunked: Callable[..., Any], plain: Callable[[str], Any]
) -> None:
    model = chunked(family, 7, batch=2)
    length, padding = 20, 9
    ids, mask = tokens(length, rows=2), torch.ones(2, length, dtype=torch.long)
    ids[0, :padding] = mask[0, :padding] = 0
    given = mask
    if kind == "4-d":
        places = torch.arange(length)
        window = 8 if family == "mistral" else length
        seen = (places <= places[:, None]) & (places > places[:, None] - window)
        given = seen[None, None] & mask[:, None, None].bool()
    outputs = []
    for each in (model, plain(family)):
        cache = StaticCache(each.config, max_cache_len=64) if kind == "static" else DynamicCache(config=each.config)
        outputs.append(run(each, ids, cache, attention_mask=given))
    real = mask.bool()
    torch.testing.assert_close(outputs[0][real], outputs[1][real], rtol=0, atol=TOLERANCE)
    assert model.river.trace.records[-1].bytes_streamed == (
        len(model.river.placement.streamed_layers) * model.river.placement.slot_bytes
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_second_turn_on_the_kept_cache_is_cut_as_well(
    family: str, chunked: Callable[..., Any], plain: Callable[[str], Any]
) -> None:
    model = chunked(family, 7)
    cache = model.river.new_cache()
    turn = tokens(16)
    for seed, length in enumerate((4, 23)):  # after cached tokens a piece of fewer than a chunk is one chunk
        turn = torch.cat([turn, tokens(length, seed=seed)], dim=1)
        found = model.generate(turn, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, plain(family).generate(turn, max_new_tokens=4, do_sample=False))
        turn = found
    records = [record for record in model.river.trace.records if record.path == "prefill"]
    assert [(record.cached_tokens, record.new_tokens) for record in records] == [(0, 20), (23, 24)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_an_interrupt_in_the_middle_of_a_chunk_leaves_the_cache_as_it_was(
    family: str, chunked: Callable[..., Any], plain: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chunked(family, 7)
    cache = model.river.new_cache()
    first = model.generate(tokens(20), past_key_values=cache, max_new_tokens=3, do_sample=False)
    before = [(layer.get_seq_length(), layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    turn = torch.cat([first, tokens(30, seed=9)], dim=1)
    mlp = model.get_decoder().layers[2].backbone.mlp
    forward, calls = mlp.forward, []

    def interrupted(states: torch.Tensor) -> Any:
        calls.append(states.shape[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(states)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert calls == [7, 7, 7]
    for layer, (length, keys, values) in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == length
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert model.config._attn_implementation == "sdpa"
    found = model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, plain(family).generate(turn, max_new_tokens=3, do_sample=False))


def test_embedded_tokens_of_the_caller_are_not_written_over(
    chunked: Callable[..., Any], plain: Callable[[str], Any]
) -> None:
    model, ids = chunked("llama", 7), tokens(30)
    with torch.no_grad():
        states = plain("llama").get_input_embeddings()(ids)
        kept = states.clone()
        found = model(inputs_embeds=states, use_cache=True).logits
        expected = plain("llama")(ids).logits
    assert torch.equal(states, kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


class Steps:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, label: str, total: int, unit: str) -> None:
        self.said.append((label, total, unit))

    def advance(self, amount: int) -> None:
        self.said.append(amount)

    def finish(self) -> None:
        self.said.append("done")


def test_progress_counts_the_chunks_of_every_layer_on_both_ways(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="fixed:2", context=CONTEXT, prefill_chunk=7)
    model.river.progress = steps = Steps()
    run(model, tokens(7), model.river.new_cache())
    assert steps.said == ["done"]
    steps.said.clear()
    run(model, tokens(22), model.river.new_cache())
    assert steps.said == [("reading 22 tokens", 4 * model.river.num_layers, "steps"), *[1] * 20, "done"]


@pytest.mark.parametrize(
    ("policy", "modes"), [("exit", ["exit"]), ("backbone", ["backbone"]), ("auto", ["exit", "backbone"])]
)
def test_a_prompt_runs_the_backbone_where_the_policy_says_so(
    policy: str, modes: list[str], checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> None:
    directory = checkpoint("llama", max_position_embeddings=512)
    options: dict[str, Any] = {"mode": "exit", "tau": -2.0, "prefill": policy, "context": 400, "prefill_chunk": 64}
    model = open_river(directory, budget=budget_for(directory, 1, **options), **options)
    assert len(model.river.placement.streamed_layers) == 4
    first = model.river.report()["prefill"]["backbone_from_tokens"] or 20
    for length, mode in zip((first - 1, first), modes, strict=False):
        model.generate(tokens(length), max_new_tokens=3, do_sample=False)
        report = model.river.report()
        assert report["prefill"]["mode"] == mode
        assert report["prefill_depth"] == (model.river.num_layers if mode == "backbone" else 1)
        assert report["depths"][1:] == [1, 1]
    with model.river.using(depths=[2, 1]):  # forced depths stay
        model.generate(tokens(5), max_new_tokens=2, do_sample=False)
    assert model.river.report()["depths"] == [2, 1]
    said = [note for note in model.river.notes if "run the whole backbone" in note]
    assert len(said) == (policy == "auto")


def test_with_nothing_to_stream_auto_runs_the_backbone(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", tau=-2.0, prefill="auto")
    model.generate(tokens(5), max_new_tokens=2, do_sample=False)
    assert model.river.report()["depths"] == [model.river.num_layers, 1]


def test_prompts_beyond_the_model_are_refused_with_the_number(open_river: Callable[..., Any]) -> None:
    model = open_river("ministral3", mode="backbone", context=1000)  # stretched from 64 to 256
    assert model.river.config.context == 256
    for total in (65, 256):
        assert model.generate(tokens(total - 1), max_new_tokens=1, do_sample=False).shape[1] == total
    with pytest.raises(ContextError, match="256 prompt tokens and up to 1 new ones are more than the 256 that this"):
        model.generate(tokens(256), max_new_tokens=1, do_sample=False)


def test_what_cannot_be_cut_is_refused_by_name(chunked: Callable[..., Any]) -> None:
    model = chunked("llama", 7)
    for message, option in (("output_hidden_states", "output_hidden_states"), ("leave use_cache on", "use_cache")):
        with pytest.raises(UsageError, match=message):
            model(tokens(8), **{option: option != "use_cache"})
    assert model(tokens(7), use_cache=False).logits.shape[1] == 7
    with pytest.raises(UsageError, match=r"prefill_chunk_size=3 .* Load with prefill_chunk=3"):
        model.generate(tokens(9), max_new_tokens=1, prefill_chunk_size=3)
    model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match="its attention is 'eager'"):
        model(tokens(8))
