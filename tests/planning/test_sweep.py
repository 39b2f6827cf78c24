"""Methods at contexts, by the same dry run as a plan; the paper's figures out of closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import _COMMON as TINY
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from policies.types import Mode, Refusal
from river_offload.config import QuantConfig, RiverConfig
from river_offload.errors import UsageError
from river_offload.planning import paper
from river_offload.planning.memory_plan import plan_for
from river_offload.planning.methods import Method
from river_offload.planning.model_facts import ModelFacts, find_model
from river_offload.planning.sweep import Row, Sweep, sweep
from river_offload.progress import Silent

GIB = 2**30
ALL = ("backbone", "quantized", "river", "river@3", "balcony", "ee-llm")
CONTEXT_16K, CONTEXT_64K = 16 * 1024, 64 * 1024


def facts_of(folder, config: PretrainedConfig | None = None, **options) -> ModelFacts:
    """A tiny model that is only a config.json."""
    config = config or LlamaConfig(**TINY, num_hidden_layers=5)
    config.architectures = [type(config).__name__.replace("TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    options = {"context": 1, "quant": QuantConfig(group_size=32), **options}
    return find_model(RiverConfig(model=str(folder), **options), Silent())


def rows_of(facts: ModelFacts, *names: str, contexts: tuple[int, ...] | None = (64,)) -> list[Row]:
    methods = [Method.parse(name) for name in names]
    return list(sweep(facts, "cuda", contexts=contexts, methods=methods, progress=Silent()).rows)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ModelFacts:
    return facts_of(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama() -> Sweep:
    """The sweep of the first acceptance line."""
    facts = find_model(RiverConfig(model="llama-3.1-8b", context=1), Silent())
    methods = [Method.parse(name) for name in ALL]
    return sweep(facts, "cuda", contexts=(CONTEXT_16K, CONTEXT_64K), methods=methods, progress=Silent())


def row_at(swept: Sweep, method: str, context: int) -> Row:
    (found,) = (row for row in swept.rows if (row.method, row.context) == (method, context))
    return found


def test_every_published_figure_is_reproduced_within_one_percent(llama):
    for method in ALL:
        for context in (CONTEXT_16K, CONTEXT_64K):
            row = row_at(llama, method, context)
            assert row.published_bytes is not None, (method, context)
            assert row.paper_accounting_bytes == pytest.approx(row.published_bytes, rel=0.01), (method, context)


def test_what_the_paper_does_not_say_is_said(llama):
    for method in ("river", "river@3", "ee-llm"):
        assert "not published; fitted" in row_at(llama, method, CONTEXT_16K).note
    assert "keep 3 layers" in row_at(llama, "river", CONTEXT_16K).note


def test_the_smallest_river_of_llama_fits_eight_gib_at_16k(llama):
    """With true bytes: scales and zeros, bfloat16 KV, a bfloat16 head, one buffer, working memory."""
    row = row_at(llama, "river", CONTEXT_16K)
    assert row.peak_device_bytes <= 8.0 * GIB
    assert row.categories["kv"] == 2 * GIB
    assert row.categories["head"] == 128256 * 4096 * 2
    assert row.categories["river_scales"] > 0 and row.categories["slots"] > 0


def test_a_row_is_what_a_plan_says(tiny):
    """River and everything-resident are placements that `plan` gives for the right budgets, and for no smaller one."""
    for row, mode in zip(rows_of(tiny, "river", "backbone"), ("exit", "backbone"), strict=True):
        config = replace(tiny.config, mode=mode, context=64, slots=1, budget=row.peak_device_bytes)
        planned = plan_for(replace(tiny, config=config), device_type="cuda")
        assert planned.fits
        assert row.placement.embed_tier == ("host" if mode == "exit" else "device")
        assert planned.categories == row.categories
        if mode == "exit":
            refused = planned.weighed.place(config, (Mode("exit"),), row.peak_device_bytes - 1)
            assert isinstance(refused, Refusal)


def test_categories_add_up_to_the_peak(tiny):
    for row in rows_of(tiny, "backbone", "quantized", "river", "river@2", "balcony", "ee-llm"):
        assert sum(row.categories.values()) == row.peak_device_bytes


def test_resident_layers_cost_their_weights(tiny):
    none, two, five = rows_of(tiny, "river", "river@2", "river@5")
    layer_bytes = two.categories["backbone"] // 2
    assert two.peak_device_bytes == none.peak_device_bytes + 2 * layer_bytes
    assert five.peak_device_bytes == none.peak_device_bytes + 5 * layer_bytes - none.categories["slots"]
    assert (two.placement.resident_layers, two.placement.slots, five.placement.slots) == ((0, 1), 1, 0)


def test_balcony_has_six_layers_more_each_with_its_cache(tiny):
    plain, deeper = rows_of(tiny, "backbone", "balcony")
    for name in ("backbone", "kv", "norms"):
        assert deeper.categories[name] * 5 == plain.categories[name] * 11
    assert deeper.categories["activations"] == plain.categories["activations"]


def test_balcony_of_a_model_with_windows_adds_layers_of_the_last_kind(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**TINY, num_hidden_layers=2, layer_types=kinds, sliding_window=16)
    plain, deeper = rows_of(facts_of(tmp_path, config), "backbone", "balcony", contexts=(128,))
    full_bytes = 128 * 2 * 2 * 32 * 2  # tokens, K and V, heads, head_dim, bfloat16
    assert deeper.categories["kv"] == plain.categories["kv"] + 6 * full_bytes


def test_ee_llm_is_a_fitted_multiple(tiny):
    plain, more = rows_of(tiny, "backbone", "ee-llm")
    extra = more.peak_device_bytes - plain.peak_device_bytes
    assert more.paper_accounting_bytes == round(paper.EE_LLM_RATIO * plain.paper_accounting_bytes)
    assert extra == more.paper_accounting_bytes - plain.paper_accounting_bytes


def test_nothing_is_published_for_another_model_length_or_batch(tiny):
    assert all(row.published_bytes is None for row in rows_of(tiny, *ALL[:3]))
    weights = paper.Weights((1,) * 32, 0, 0, paper._LLAMA_3_1_8B_PARAMETERS - 32)
    assert paper.published_bytes("river", CONTEXT_16K, weights) is not None
    assert paper.published_bytes("river", CONTEXT_16K + 1, weights) is None
    assert paper.published_bytes("river", CONTEXT_16K, weights, batch=2) is None
    assert paper.published_bytes("river@4", CONTEXT_16K, weights) is None


def test_tied_weights_are_counted_once(tmp_path):
    config = LlamaConfig(**{**TINY, "tie_word_embeddings": True}, num_hidden_layers=2)
    weights = paper.Weights.of(facts_of(tmp_path, config).structure)
    assert (weights.head, weights.embedding) == (0, 101 * 64)


def test_contexts_go_as_far_as_the_model_attends(tiny):
    facts = tiny  # attends to 256 tokens, fewer than any usual context
    assert [row.context for row in rows_of(facts, "river", contexts=None)] == [256]
    assert [row.context for row in rows_of(facts, "river", contexts=(128, 64, 128))] == [64, 128]
    with pytest.raises(UsageError, match="context 257 is more than the 256 tokens"):
        rows_of(facts, "river", contexts=(257,))


def test_methods_are_read_and_refused():
    assert Method.parse(" River@03 ") == Method("river@3", "river", 3)
    for text in ("balcon", "river@", "river@x", "backbone@3", ""):
        with pytest.raises(UsageError, match="no method"):
            Method.parse(text)
    with pytest.raises(UsageError, match="did you mean balcony"):
        Method.parse("balcon")


def test_more_resident_layers_than_there_are_is_an_error(tiny):
    with pytest.raises(UsageError, match="river@6 keeps 6 layers, the model has 5"):
        rows_of(tiny, "river@6")


def test_json_of_a_row(tmp_path):
    facts = facts_of(tmp_path, budget=10**9)
    swept = sweep(facts, "cuda", contexts=(64,), methods=[Method.parse("river@1")], progress=Silent())
    found = swept.as_json()
    assert (found["schema"], found["kind"], found["budget_bytes"], found["num_layers"]) == (1, "sweep", 10**9, 5)
    (row,) = found["rows"]
    names = ("method", "context", "peak_device_bytes", "paper_accounting_bytes", "published_bytes", "categories")
    assert set(names) <= row.keys()
    assert row["fits"] is True
    assert row["placement"]["resident_layers"] == [0] and row["placement"]["streamed_layers"] == [1, 2, 3, 4]
