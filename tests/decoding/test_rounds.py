"""What a round leaves behind, and all that may end a text or run along with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, both, tokens
from test_generate import AfterTokens, Collect
from test_padding import padded, rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from river_offload.decoding import loop
from river_offload.errors import UsageError

NEW = 24


@pytest.fixture
def pairs(plain: Callable[[str], Any], drafter: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """`pairs("llama", **options)`: the model in mode lossless, four tokens a draft, and the one of transformers."""

    def made(family: str = "llama", **options: Any) -> tuple[Any, Any]:
        return drafter(family, **{"draft": 4} | options), plain(family)

    return made


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_after_each_check_the_cache_is_that_of_the_backbone(
    family: str, drafter: Callable[..., Any], plain: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checks = drafter(family, draft=5), []
    honest = loop._Rounds.run

    def run(rounds: Any) -> None:
        honest(rounds)
        text = rounds.text.ids[:, :-1]
        expected = DynamicCache(config=plain(family).config)
        plain(family)(text, past_key_values=expected, use_cache=True)
        for mine, theirs in zip(rounds.cache.layers, expected.layers, strict=True):
            assert mine.get_seq_length() == text.shape[1]
            held = theirs.keys.shape[-2]
            torch.testing.assert_close(mine.keys[:, :, -held:], theirs.keys, rtol=0, atol=1e-5)
            torch.testing.assert_close(mine.values[:, :, -held:], theirs.values, rtol=0, atol=1e-5)
        checks.append(rounds.flow.trace.records[-1].path)

    monkeypatch.setattr(loop._Rounds, "run", run)
    model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
    assert len(checks) > 2
    assert set(checks) == {"check"}


@pytest.mark.parametrize("place", range(6))
def test_an_end_anywhere_in_a_block_ends_the_text(place: int, pairs: Callable[..., Any]) -> None:
    model, plain = pairs()
    free = plain.generate(tokens(9), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    cache = model.river.new_cache()
    streamer = Collect()
    options = {"eos_token_id": free[place], "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
    found = model.generate(tokens(9), past_key_values=cache, streamer=streamer, **options)
    assert torch.equal(found, plain.generate(tokens(9), **options))
    assert {layer.get_seq_length() for layer in cache.layers} == {found.shape[1] - 1}
    assert streamer.ids == found[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_the_last_block_is_as_long_as_there_is_room(new_tokens: int, pairs: Callable[..., Any]) -> None:
    found, expected = both(pairs(), tokens(9), max_new_tokens=new_tokens, do_sample=False)
    assert torch.equal(found, expected)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 0 to 93 are the visible characters of ASCII."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:101]
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings_and_criteria_stop(pairs: Callable[..., Any]) -> None:
    model, plain = pairs()
    free = plain.generate(tokens(9), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    options = {"max_new_tokens": NEW, "do_sample": False}
    tokenizer = byte_tokenizer()
    place = next(place for place in range(4, NEW) if free[place] < 94)  # one that is text by itself
    stop = {"stop_strings": tokenizer.decode(free[place]), "tokenizer": tokenizer}
    found, expected = both((model, plain), tokens(9), **options, **stop)
    assert torch.equal(found, expected)
    assert found.shape[1] < 9 + NEW
    criteria = StoppingCriteriaList([AfterTokens(15)])
    assert model.generate(tokens(9), stopping_criteria=criteria, **options).shape == (1, 15)
    with pytest.raises(UsageError, match="stop_strings need a tokenizer"):
        model.generate(tokens(9), stop_strings="w1", **options)


def test_stop_strings_bring_no_warning_of_transformers(pairs: Callable[..., Any]) -> None:
    model, _ = pairs()
    logging.warning_once.cache_clear()
    with CaptureLogger(logging.get_logger("transformers.generation.utils")) as captured:
        model.generate(tokens(9), max_new_tokens=4, do_sample=False, stop_strings="z", tokenizer=byte_tokenizer())
    assert captured.out == ""


class NoneTwice(LogitsProcessor):
    """Looks at the whole text so far: a wrong prefix shows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, -1e9)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"processor": True}])
def test_logits_processors_see_the_text_before_each_token(options: dict[str, Any], pairs: Callable[..., Any]) -> None:
    if options.pop("processor", False):
        options["logits_processor"] = LogitsProcessorList([NoneTwice()])
    found, expected = both(pairs(), tokens(9), max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_rows_of_a_batch_end_when_they_end(family: str, pairs: Callable[..., Any]) -> None:
    model, plain = pairs(family, batch=3)
    free = plain.generate(**padded(rows()), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[:, 12:]
    options = {"eos_token_id": [int(free[0, 6]), int(free[1, 11])], "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    found, expected = both((model, plain), **padded(rows()), max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(found.sequences, expected.sequences)
    mine, theirs = torch.stack(found.scores), torch.stack(expected.scores)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)  # those of finished rows, too


class RowsEnd(StoppingCriteria):
    """Each row has its length, and nothing pads it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= 13, input_ids.shape[1] >= 30])


def test_finished_rows_that_nothing_pads_are_those_of_transformers(pairs: Callable[..., Any]) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": StoppingCriteriaList([RowsEnd()])}
    prompt = tokens(9, rows=2)
    found, expected = both(pairs(batch=2), prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_transformers_own_caches_work_where_they_can(family: str, kind: str, pairs: Callable[..., Any]) -> None:
    model, plain = pairs(family)
    expected = plain.generate(tokens(9), max_new_tokens=NEW, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if kind == "dynamic":
        options["past_key_values"] = DynamicCache(config=plain.config)
    else:
        options["cache_implementation"] = "static"
    if kind == "static" and family == "gemma3":
        with pytest.raises(UsageError, match=r"StaticCache that cannot give back tokens.*'backbone' or mode='exit'"):
            model.generate(tokens(9), **options)
        return
    assert torch.equal(model.generate(tokens(9), **options), expected)


def test_a_second_turn_goes_on_on_the_same_cache(pairs: Callable[..., Any]) -> None:
    model, plain = pairs("gemma3")
    cache, text = model.river.new_cache(), tokens(9)
    for more in (tokens(3, seed=2), tokens(1, seed=3)):
        text = model.generate(text, max_new_tokens=7, do_sample=False, past_key_values=cache)
        text = torch.cat([text, more], dim=1)
    found = model.generate(text, max_new_tokens=7, do_sample=False, past_key_values=cache)
    assert torch.equal(found, plain.generate(text, max_new_tokens=7, do_sample=False))


def test_scores_and_logits_are_those_of_the_backbone(pairs: Callable[..., Any]) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    found, expected = both(pairs(), tokens(9), max_new_tokens=9, do_sample=False, **wanted)
    for mine, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=0, atol=1e-4)


def test_embedded_prompts_work(pairs: Callable[..., Any]) -> None:
    model, plain = pairs()
    embedded = plain.get_input_embeddings()(tokens(9))
    found, expected = both((model, plain), inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("draft", "asked"), [(4, 10), (32, 33)], ids=["between two tokens", "before the first of 32"])
def test_an_interrupt_leaves_the_cache_with_the_text(draft: int, asked: int, pairs: Callable[..., Any]) -> None:
    """`asked`: processors were asked so often before, the prompt's token included."""
    model, plain = pairs("gemma3", draft=draft)
    cache, streamer = model.river.new_cache(), Collect()
    calls = iter(range(asked + 1))

    class Interrupt(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(calls) == asked:
                raise KeyboardInterrupt
            return scores

    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "past_key_values": cache}
    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens(9), logits_processor=LogitsProcessorList([Interrupt()]), streamer=streamer, **options)
    text = torch.tensor([streamer.ids])
    assert {layer.get_seq_length() for layer in cache.layers} == {text.shape[1] - 1}
    report = model.river.report()
    assert report["new_tokens"] == text.shape[1] - 9
    assert report["checked_share"] == (1.0 if text.shape[1] > 10 else None)
    assert report["tokens_per_s"] == pytest.approx((text.shape[1] - 9) / model.river.account.seconds)
    found = model.generate(text, **options | {"max_new_tokens": 7})
    assert torch.equal(found, plain.generate(text, max_new_tokens=7, do_sample=False))


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_a_check_that_breaks_off_inside_a_layer_leaves_the_cache_with_the_text(
    kind: str, pairs: Callable[..., Any]
) -> None:
    model, plain = pairs()
    cache = model.river.new_cache() if kind == "ours" else DynamicCache(config=plain.config)
    mlp, calls = model.get_decoder().layers[3].backbone.mlp, iter(range(3))
    honest = mlp.forward

    def interrupted(*args: Any) -> Any:
        if next(calls) == 2:  # the second check, after the prompt and the first
            raise KeyboardInterrupt
        return honest(*args)

    mlp.forward, streamer = interrupted, Collect()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens(9), streamer=streamer, **options)
    mlp.forward = honest
    text = torch.tensor([streamer.ids])
    assert [layer.get_seq_length() for layer in cache.layers] == [text.shape[1] - 1] * model.river.num_layers
    found = model.generate(text, **options | {"max_new_tokens": 7})
    assert torch.equal(found, plain.generate(text, max_new_tokens=7, do_sample=False))


def test_the_check_finds_its_first_layers_there_or_coming(
    drafter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drafter("llama", slots=2, draft=4)
    store, ready = model.river.flow.store, []
    plain = store.opened

    def opened(new_tokens: int, *rest: Any) -> None:
        if new_tokens > 1:
            ready.append([store._transfers.has(layer) for layer in sorted(store._streamed)[:2]])
        plain(new_tokens, *rest)

    store._slots.poison_on_release = False  # it empties the slots that would stay full
    # By measured times the policy may find the link busy until after the next decision, and leave the second layer out.
    monkeypatch.setattr(store.pace, "_link_s", 1e-9)
    monkeypatch.setattr(store.pace, "linked", lambda *_: None)
    monkeypatch.setattr(store, "opened", opened)
    model.generate(tokens(1), max_new_tokens=NEW, do_sample=False)
    assert len(ready) > 2
    assert all(all(layers) for layers in ready)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt lookup"),
        ({"prompt_lookup_num_tokens": 3, "num_beams": 1}, "prompt lookup"),
        ({"dola_layers": "low"}, "DoLa"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"custom_generate": lambda *_: None}, "another decoding loop"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(options: dict[str, Any], named: str, pairs: Callable[..., Any]) -> None:
    model, _ = pairs(batch=2)
    with pytest.raises(UsageError, match=f"mode lossless does not go together with {named}.*'backbone'.*mode='exit'"):
        model.generate(tokens(9), max_new_tokens=4, **{"do_sample": False} | options)
    assert not model.river.trace.records
