"""`model.generate` and what else a transformers model can be asked for, on a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import both, tokens
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from river_offload.errors import ContextError, UsageError

NEW = 10


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "gemma3"])
def test_greedy_is_transformers_greedy(family: str, pair: Callable[..., Any]) -> None:
    found, expected = both(pair(family), tokens(9), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, expected)
    assert found.shape == (1, 29)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": True, "top_p": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": False, "use_cache": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_way_to_pick_tokens_is_that_of_transformers(
    family: str, options: dict[str, Any], pair: Callable[..., Any]
) -> None:
    found, expected = both(pair(family, batch=3), tokens(9), max_new_tokens=NEW, pad_token_id=0, **options)
    assert torch.equal(found, expected)


def test_a_seed_repeats_a_sample_and_another_gives_another(pair: Callable[..., Any]) -> None:
    model, _ = pair(mode="exit")
    samples = []
    for seed in (1, 1, 2):
        set_seed(seed)
        samples.append(model.generate(tokens(9), max_new_tokens=NEW, do_sample=True))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_beams_on_the_river_keep_their_own_caches(open_river: Callable[..., Any]) -> None:
    """What beam search finds has the likelihood that a fresh forward pass gives it."""
    model = open_river("llama", mode="fixed:2", batch=3)
    output = model.generate(
        tokens(9),
        max_new_tokens=NEW,
        num_beams=3,
        do_sample=False,
        pad_token_id=0,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.no_grad():
        logits = model(output.sequences).logits[0, 8:-1]
    likelihood = logits.log_softmax(-1).gather(1, output.sequences[0, 9:, None]).sum()
    assert output.sequences_scores[0].item() == pytest.approx(likelihood.item(), abs=1e-4)


class Collect(BaseStreamer):
    """Puts down what arrives, and when it ends."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_is_given_every_token(open_river: Callable[..., Any]) -> None:
    model, streamer = open_river("llama"), Collect()
    output = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert streamer.ids == output[0].tolist()
    assert streamer.ended


class AfterTokens(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stopping_criteria_stop(open_river: Callable[..., Any]) -> None:
    model = open_river("llama")
    criteria = StoppingCriteriaList([AfterTokens(13)])
    output = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False, stopping_criteria=criteria)
    assert output.shape == (1, 13)
    assert model.river.report()["new_tokens"] == 4


def test_any_id_of_an_eos_list_ends_the_text(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="backbone")
    free = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    ends = [free[4], 100 if free[4] != 100 else 99]
    output = model.generate(tokens(9), max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert output[0, 9:].tolist() == free[: free.index(free[4]) + 1]


def test_an_eos_list_of_the_checkpoint_is_heeded(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], tmp_path: Path
) -> None:
    free = open_river("llama", mode="backbone").generate(tokens(9), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    GenerationConfig(eos_token_id=[free[3], 2], pad_token_id=0, do_sample=False).save_pretrained(tmp_path)
    output = open_river(tmp_path, mode="backbone").generate(tokens(9), max_new_tokens=NEW)
    assert output[0, 9:].tolist() == free[: free.index(free[3]) + 1]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_hidden_states_are_those_of_transformers(family: str, pair: Callable[..., Any]) -> None:
    model, plain = pair(family)
    ids = tokens(12)
    with torch.no_grad():
        found, expected = (each(ids, output_hidden_states=True).hidden_states for each in (model, plain))
    assert len(found) == model.river.num_layers + 1
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_hidden_states_are_complete_on_the_river(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", mode="exit", also_modes=("quantized",))
    ids = tokens(12)
    states = {}
    for mode in ("backbone", "fixed:2", "quantized"):
        with torch.no_grad(), model.river.using(mode=mode):
            states[mode] = model(ids, output_hidden_states=True).hidden_states
        assert len(states[mode]) == 6
    shared = [torch.equal(a, b) for a, b in zip(states["backbone"], states["fixed:2"], strict=True)]
    assert shared == [True, True, True, False, False, False]


def test_generate_returns_hidden_states_and_logits(pair: Callable[..., Any]) -> None:
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    found, expected = both(pair(), tokens(9), max_new_tokens=4, do_sample=False, **wanted)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))


def test_logits_to_keep(pair: Callable[..., Any]) -> None:
    model, plain = pair()
    with torch.no_grad():
        kept = model(tokens(12), logits_to_keep=3).logits
        assert torch.equal(kept, plain(tokens(12), logits_to_keep=3).logits)
        assert kept.shape == (1, 3, 101)
        torch.testing.assert_close(kept, model(tokens(12)).logits[:, -3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_static_cache_gives_the_same_and_compiles_nothing(
    family: str, pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", lambda *_: pytest.fail("compiled"))
    # transformers compiles only for an accelerator: claim that there is one.
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", valid_but_for_the_device)
    model, _ = pair(family, mode="exit", tau=0.6)
    outputs, depths = [], []
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, cache_implementation="static")
    for options in (
        {"max_new_tokens": NEW, "do_sample": False},
        {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"},
        {"generation_config": config},
    ):
        outputs.append(model.generate(tokens(9), **options))
        depths.append(model.river.report()["depths"])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert depths[0] == depths[1] == depths[2]
    assert not config.disable_compile  # the caller's own object is left alone


def valid_but_for_the_device(_: Any, __: Any, generation_config: GenerationConfig) -> bool:
    return not generation_config.disable_compile


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w0 .. w100."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(101)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")


def test_the_pipeline_of_transformers_works(
    checkpoint: Callable[..., Path], open_river: Callable[..., Any], plain: Callable[[str], Any], tmp_path: Path
) -> None:
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make_tokenizer().save_pretrained(tmp_path)
    model = open_river(tmp_path, mode="backbone", batch=2)
    texts = ["w4 w9 w77", "w5 w6 w7 w8 w20"]
    options = {"max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    found = pipeline("text-generation", model=model, tokenizer=model.river.tokenizer)(texts, **options)
    expected = pipeline("text-generation", model=plain("llama"), tokenizer=make_tokenizer())(texts, **options)
    assert found == expected
    assert found[0][0]["generated_text"].startswith("w4 w9 w77")
    assert open_river("llama").river.tokenizer is None


def test_more_tokens_than_the_context_are_refused_before_any_work(open_river: Callable[..., Any]) -> None:
    model = open_river("llama", context=20)
    assert model.generate(tokens(9), max_new_tokens=11, do_sample=False).shape == (1, 20)
    model.river.trace.clear()
    with pytest.raises(ContextError, match=r"9 prompt tokens and up to 12 new ones do not fit .* context of 20"):
        model.generate(tokens(9), max_new_tokens=12)
    with pytest.raises(ContextError, match=r"2 rows .* do not fit the 1 .* load with batch=2"):
        model.generate(tokens(9, rows=2), max_new_tokens=1)
    with pytest.raises(ContextError, match="3 rows"):
        model.generate(tokens(9), max_new_tokens=1, num_beams=3)
    with pytest.raises(ContextError, match="9 prompt tokens and up to 12 new ones"):
        model.generate(inputs_embeds=model.get_input_embeddings()(tokens(9)), max_new_tokens=12)
    with pytest.raises(ContextError, match="up to 22 new ones"):
        model.generate(tokens(9), max_length=31)
    with pytest.raises(ContextError, match="up to 12 new ones"):
        model.generate(tokens(9), GenerationConfig(max_new_tokens=12))
    assert model.river.trace.records == []
    model = open_river("llama", context=400)  # the model attends to 256 tokens, and for those it is planned
    with pytest.raises(ContextError, match=r"250 prompt tokens .* are more than the 256 that this model"):
        model.generate(tokens(250), max_new_tokens=7)


def test_without_a_length_it_generates_what_transformers_does(pair: Callable[..., Any]) -> None:
    models = pair()
    found, expected = both(models, tokens(9), do_sample=False)
    assert torch.equal(found, expected)
    assert found.shape[1] == 9 + 20
    for model in models:
        model.generation_config.max_new_tokens = 30
    try:
        # A config of the call leaves what it does not say to the model's own.
        found, expected = both(models, tokens(9), generation_config=GenerationConfig(do_sample=False))
        assert torch.equal(found, expected)
        assert found.shape[1] == 9 + 30
    finally:
        models[1].generation_config.max_new_tokens = None


def test_an_empty_prompt_is_refused(open_river: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        open_river("llama").generate(torch.zeros((1, 0), dtype=torch.long), max_new_tokens=3)


def test_embedded_tokens_are_a_prompt_too(pair: Callable[..., Any]) -> None:
    model, plain = pair(mode="exit", tau=2.0)
    embedded = plain.get_input_embeddings()(tokens(9))
    found, expected = both((model, plain), inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)
    report = model.river.report()
    assert (report["prompt_tokens"], report["new_tokens"]) == (9, NEW)
    assert len(model.river.trace.records[0].signals) == 4


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_model_writes_through_a_pipeline_under_a_budget(river_cache: Path) -> None:
    import river_offload

    model = river_offload.load(
        "demo", mode="backbone", budget="200MiB", context=256, cache_dir=river_cache, device="cpu"
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    writer = pipeline("text-generation", model=model, tokenizer=model.river.tokenizer)
    answer = writer(chat, max_new_tokens=12, do_sample=False)[0]["generated_text"][-1]["content"]
    assert "Paris" in answer
    report = model.river.report()
    assert report["peak_device_bytes"] <= report["budget_bytes"]
    assert report["bytes_streamed"] > 0
    model.river.close()
