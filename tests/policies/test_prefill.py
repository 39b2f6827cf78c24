"""How a prompt is read: the chunk that costs no resident layer, and the length from which the backbone is cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import placement
from policies.exit import ExitRule, ForcedExit
from policies.prefill import PrefillRule, backbone_from_tokens, place_with_chunk, typical_profile
from policies.profiles import load_profile
from policies.types import Mode, ModelSizes, Placement, Refusal

LAYERS, LAYER_BYTES, TOKEN_BYTES = 8, 1000, 1


def place(budget_bytes: int, asked: list[int | None], context: int = 4096, states_bytes: int = 0):
    """Placements of a model that needs a byte of working memory a token, and `states_bytes` for those of a prompt."""

    def placed(chunk: int | None, rest_states: bool) -> Placement | Refusal:
        asked.append(chunk)
        transient_bytes = TOKEN_BYTES * (chunk or context) + (0 if rest_states else states_bytes)
        resident = min((budget_bytes - transient_bytes) // LAYER_BYTES, LAYERS)
        if resident < 0:
            return Refusal(budget_bytes, transient_bytes, {"transient": transient_bytes}, "transient")
        return Placement(
            mode=Mode("exit"), min_exit=1, resident_layers=tuple(range(resident)),
            streamed_layers=tuple(range(resident, LAYERS)), river_layers=(), slots=0,
            embed_tier="device", budget_bytes=budget_bytes, prefill_chunk=chunk, slot_bytes=LAYER_BYTES,
            states_host_bytes=states_bytes if rest_states else 0,
            terms={"layers": resident * LAYER_BYTES, "transient": transient_bytes},
        )  # fmt: skip

    return placed


@pytest.mark.parametrize(
    ("budget_bytes", "chunk"),
    [
        (20_000, None),  # all is resident: nothing to gain
        (10_900, 2048),
        (9_900, 1024),  # 2048 would cost the eighth layer
        (8_600, 512),
        (2_048, 1024),  # the longest with as many layers as 512
        (500, 256),  # nothing longer fits at all
        (200, 128),
        (64, 64),
    ],
)
def test_the_longest_chunk_that_costs_no_layer(budget_bytes: int, chunk: int | None) -> None:
    found = place_with_chunk(place(budget_bytes, []), 4096, 0)
    assert isinstance(found, Placement)
    assert found.prefill_chunk == chunk


def test_no_chunk_is_tried_that_no_prompt_needs() -> None:
    asked: list[int | None] = []
    place_with_chunk(place(20_000, asked), 4096, 0)
    assert asked == [None]
    asked.clear()
    place_with_chunk(place(700, asked, context=600), 600, 0)
    assert asked == [None, 512]
    asked.clear()
    place_with_chunk(place(60, asked, context=64), 64, 0)
    assert asked == [None]


def test_a_chunk_that_leaves_a_room_for_the_cache_goes_before_a_longer_one() -> None:
    """Even before a whole prompt with everything else on the device; a plain cache has no use for a room."""
    everything = Placement(
        mode=Mode("exit"), min_exit=1, resident_layers=tuple(range(LAYERS)), streamed_layers=(), river_layers=(),
        slots=0, slot_bytes=0, embed_tier="device", budget_bytes=1, kv_host_bytes=1,
    )  # fmt: skip
    roomy = replace(everything, kv_ahead=True, prefill_chunk=512)
    assert place_with_chunk(lambda chunk, _: roomy if chunk == 512 else everything, 4096, 0) is roomy
    plain = replace(everything, kv_host_bytes=0)
    assert place_with_chunk(lambda chunk, _: plain if chunk is None else pytest.fail("asked"), 4096, 0) is plain


def test_a_refusal_is_that_of_the_cheapest_chunk() -> None:
    refused = place_with_chunk(place(63, []), 4096, 0)
    assert isinstance(refused, Refusal)
    assert refused.needed_bytes == 64
    accepted = place_with_chunk(place(refused.needed_bytes, []), 4096, 0)
    assert isinstance(accepted, Placement)


@pytest.mark.parametrize("states_bytes", [0, 300, 700])
def test_more_budget_never_keeps_fewer_layers_at_full_speed(states_bytes: int) -> None:
    """A longer chunk that takes the room of the states, too, is no better than they are."""
    placed = [
        place_with_chunk(place(budget_bytes, [], states_bytes=states_bytes), 4096, states_bytes)
        for budget_bytes in range(64, 16_000, 97)
    ]
    resident = [len(p.resident_layers) for p in placed if isinstance(p, Placement) and (p.prefill_chunk or 512) >= 512]
    assert resident == sorted(resident)
    assert resident[-1] == LAYERS


@pytest.mark.parametrize("name", ["exit", "lossless"])
@pytest.mark.parametrize(("states_bytes", "room_bytes"), [(0, 0), (900, 0), (0, 500), (900, 500)])
def test_more_budget_never_leaves_more_to_wait_for(name: str, states_bytes: int, room_bytes: int) -> None:
    """With a room for the cache that is worth a layer, river layers and slots that are given back, and long chunks."""
    mode, context = Mode.parse(name), 4096

    def placed(budget_bytes: int) -> Placement | Refusal:
        def place_chunk(chunk: int | None, rest_states: bool) -> Placement | Refusal:
            sizes = ModelSizes(
                backbone_bytes=(2000,) * LAYERS, river_bytes=(600,) * LAYERS, norm_bytes=(0,) * LAYERS, embed_bytes=0,
                head_bytes=0, head_can_shrink=False, other_bytes=0, kv_bytes=100, staging_bytes=300,
                transient_bytes=(chunk or context) + (0 if rest_states else states_bytes),
                kv_host_bytes=20_000 if room_bytes else 0, kv_room_bytes=room_bytes,
                states_host_bytes=states_bytes if rest_states else 0,
            )  # fmt: skip
            return placement.place(
                sizes, mode=mode, min_exit=1, budget_bytes=budget_bytes, slots=2, prefill_chunk=chunk
            )

        return place_with_chunk(place_chunk, context, states_bytes)

    found = [one for one in map(placed, range(5_000, 30_000, 53)) if isinstance(one, Placement)]
    waited = [one.waited_bytes for one in found if (one.prefill_chunk or context) >= 512]
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] <= 0 < waited[0]


@pytest.mark.parametrize(
    ("budget_bytes", "chunk", "tier"),
    [
        (20_000, None, "device"),
        (10_000, 512, "host"),  # 3000 bytes of states are worth 3 layers
        (5_900, 512, "host"),
        (3_300, 512, "host"),  # on the device, nothing fits
        (300, 256, "host"),
        (64, 64, "host"),
    ],
)
def test_states_rest_on_the_host_where_that_keeps_a_layer(budget_bytes: int, chunk: int | None, tier: str) -> None:
    found = place_with_chunk(place(budget_bytes, [], states_bytes=3000), 4096, 3000)
    assert isinstance(found, Placement)
    assert (found.prefill_chunk, found.states_tier) == (chunk, tier)


def test_states_stay_where_they_cost_no_layer() -> None:
    asked: list[int | None] = []
    found = place_with_chunk(place(5_900, asked, states_bytes=300), 4096, 300)
    assert isinstance(found, Placement) and found.states_tier == "device"
    refused = place_with_chunk(place(63, [], states_bytes=300), 4096, 300)
    assert isinstance(refused, Refusal) and refused.needed_bytes == 64


def test_a_given_chunk_leaves_the_states_to_decide() -> None:
    for budget_bytes, tier in ((8_200, "host"), (8_700, "device")):
        asked: list[int | None] = []
        found = place_with_chunk(place(budget_bytes, asked, states_bytes=600), 4096, 600, 100)
        assert isinstance(found, Placement) and set(asked) == {100}
        assert found.states_tier == tier


def test_the_backbone_is_cheap_once_computing_takes_as_long_as_fetching() -> None:
    cpu = load_profile(typical_profile("cpu"))
    layer_bytes, weights = 416 * 2**20, 218_000_000
    tokens = backbone_from_tokens(32 * layer_bytes, 32 * weights, cpu)
    link_s = 32 * layer_bytes / cpu.disk_bytes_per_s
    compute_s = [2 * 32 * weights * count / cpu.compute_flops for count in (tokens - 1, tokens)]
    assert compute_s[0] < link_s <= compute_s[1]
    # Half as much to fetch, half as long a prompt; nothing to fetch, any prompt.
    assert backbone_from_tokens(16 * layer_bytes, 32 * weights, cpu) == pytest.approx(tokens / 2, abs=1)
    assert backbone_from_tokens(0, 32 * weights, cpu) == 0
    assert backbone_from_tokens(32 * layer_bytes, 32 * weights, load_profile(typical_profile("cuda"))) > tokens


@pytest.mark.parametrize(
    ("policy", "decisions"), [("exit", [False, False]), ("backbone", [True, True]), ("auto", [False, True])]
)
def test_only_auto_looks_at_the_length(policy, decisions) -> None:
    rule = PrefillRule(policy, backbone_from_tokens=100)
    assert [rule.on_backbone(tokens) for tokens in (99, 100)] == decisions


def test_what_a_mode_or_a_forced_depth_fixes_stays() -> None:
    rule = ExitRule(Mode("exit"), 0.5, 1, LAYERS)
    assert rule.on_backbone() == ExitRule(Mode("backbone"), 0.5, 1, LAYERS)
    for fixed in (ExitRule(Mode("fixed", 2), 0.5, 1, LAYERS), ForcedExit(Mode("exit"), 0.5, 1, LAYERS, 3)):
        assert fixed.on_backbone() is fixed
