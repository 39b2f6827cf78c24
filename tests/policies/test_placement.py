from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement import DEVICE_PER_LINK, place
from policies.types import Mode, ModelSizes, Placement, Refusal

SIZES = ModelSizes(
    backbone_bytes=(100, 100, 100, 100),
    river_bytes=(30, 30, 30, 30),
    norm_bytes=(1, 1, 1, 1),
    embed_bytes=50,
    head_bytes=50,
    head_can_shrink=True,
    other_bytes=5,
    kv_bytes=40,
    transient_bytes=20,
    staging_bytes=7,
)
EXIT = Mode("exit")
TERMS = {"backbone", "slots", "staging", "river", "norms", "embedding", "head", "other", "kv", "transient", "loading"}


def fits(sizes: ModelSizes, budget_bytes: int, mode: Mode = EXIT, min_exit: int = 1, **options: object) -> Placement:
    placement = place(sizes, mode=mode, min_exit=min_exit, budget_bytes=budget_bytes, **options)  # type: ignore[arg-type]
    assert isinstance(placement, Placement), placement
    return placement


def refused(sizes: ModelSizes, budget_bytes: int, mode: Mode = EXIT, min_exit: int = 1, **options: object) -> Refusal:
    refusal = place(sizes, mode=mode, min_exit=min_exit, budget_bytes=budget_bytes, **options)  # type: ignore[arg-type]
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_everything_fits_so_nothing_streams() -> None:
    placement = fits(SIZES, 10_000)
    assert placement.resident_layers == (0, 1, 2, 3)
    assert placement.streamed_layers == ()
    assert placement.river_layers == (1, 2, 3)
    assert (placement.slots, placement.slot_bytes) == (0, 0)
    assert placement.terms == {
        "backbone": 400,
        "slots": 0,
        "staging": 0,
        "river": 90,
        "norms": 4,
        "embedding": 50,
        "head": 50,
        "other": 5,
        "kv": 40,
        "transient": 20,
        "loading": 0,
    }


def test_deep_layers_stream_through_slots_while_their_norms_stay() -> None:
    everything = fits(SIZES, 10_000).planned_bytes
    # One byte less, and the slot takes the place of a layer that was resident.
    placement = fits(SIZES, everything - 1, slots=1)
    assert placement.resident_layers == (0, 1)
    assert placement.streamed_layers == (2, 3)
    assert (placement.slots, placement.slot_bytes) == (1, 100)
    assert placement.terms["norms"] == 4
    assert placement.terms["staging"] == 7


def test_a_slot_holds_the_largest_streamed_layer_only() -> None:
    sizes = replace(SIZES, backbone_bytes=(900, 100, 120, 100))
    placement = fits(sizes, fits(sizes, 10_000).planned_bytes - 1)
    assert placement.resident_layers == (0,)
    assert placement.slot_bytes == 120


@pytest.mark.parametrize(
    ("mode", "backbone", "river"),
    [
        ("exit", 4, (2, 3)),
        ("backbone", 4, ()),
        ("quantized", 0, (0, 1, 2, 3)),
        ("fixed:3", 3, (3,)),
        ("fixed:0", 0, (0, 1, 2, 3)),
        ("fixed:9", 4, ()),
    ],
)
def test_only_the_parts_of_the_mode_are_kept(mode: str, backbone: int, river: tuple[int, ...]) -> None:
    placement = fits(SIZES, 10_000, Mode.parse(mode), min_exit=2)
    assert placement.resident_layers == tuple(range(backbone))
    assert placement.river_layers == river
    assert placement.terms["norms"] == len({*range(backbone), *river})


def test_also_modes_keep_the_union() -> None:
    placement = fits(SIZES, 10_000, Mode("backbone"), also_modes=(Mode("fixed", 3), Mode("fixed", 1)))
    assert placement.mode == Mode("backbone")
    assert placement.resident_layers == (0, 1, 2, 3)
    assert placement.river_layers == (1, 2, 3)


def test_embedding_leaves_the_device_to_make_room_for_layers() -> None:
    sizes = replace(SIZES, embed_bytes=150, embed_away_tier="host", embed_away_bytes=3)
    everything = fits(replace(sizes, embed_away_tier=None), 10_000).planned_bytes
    assert fits(sizes, everything).embed_tier == "device"
    placement = fits(sizes, everything - 1)
    assert placement.embed_tier == "host"
    assert placement.terms["embedding"] == 3
    assert placement.resident_layers == (0, 1, 2, 3)
    smallest = refused(replace(sizes, embed_away_tier=None), 0).needed_bytes
    assert refused(sizes, 0).needed_bytes == smallest - 147


def test_a_second_room_is_there_where_it_costs_no_layer() -> None:
    sizes = replace(SIZES, kv_room_bytes=60)
    everything = fits(SIZES, 10_000).planned_bytes
    roomy = fits(sizes, everything + 60)
    assert roomy.kv_ahead and len(roomy.resident_layers) == 4
    assert roomy.terms["kv"] == SIZES.kv_bytes + 60
    assert fits(replace(sizes, load_bytes=130), 10_000).terms["loading"] == 130 - 100 - 20
    assert not fits(sizes, everything + 59).kv_ahead  # not in place of a layer
    assert not fits(SIZES, 10_000).kv_ahead
    # It is in no budget that is quoted as the smallest.
    least = refused(sizes, 0).needed_bytes
    assert least == refused(SIZES, 0).needed_bytes
    assert [fits(sizes, least + more).kv_ahead for more in (0, 59, 60)] == [False, False, True]


@pytest.mark.parametrize(("kv_host_bytes", "taken"), [(100, False), (2_930, False), (2_940, True), (90_000, True)])
def test_a_room_takes_the_place_of_layers_where_it_hides_more_than_they_stream(kv_host_bytes: int, taken: bool) -> None:
    """300 bytes more are streamed. In their time a token reads 20 times as much: weights, and the cache twice."""
    sizes = replace(SIZES, backbone_bytes=(150,) * 4, kv_room_bytes=60, kv_host_bytes=kv_host_bytes)
    everything = fits(sizes, 10_000).planned_bytes - 60
    placement = fits(sizes, everything, slots=1)
    assert placement.kv_ahead == taken
    assert len(placement.resident_layers) == (2 if taken else 4)


def test_refusal_names_the_largest_term_and_what_would_change_it() -> None:
    refusal = refused(replace(SIZES, kv_bytes=1_000), 300)
    assert refusal.budget_bytes == 300
    assert refusal.largest_term == "kv"
    assert "context" in refusal.advice[0]
    assert any("bits for the river" in line for line in refusal.advice)
    assert any("head on 8 bits" in line for line in refusal.advice)
    assert any("single slot" in line for line in refusal.advice)


def test_a_refusal_names_the_modes_that_would_fit_and_no_others() -> None:
    needed_bytes = refused(SIZES, 0).needed_bytes
    alone = {kind: refused(SIZES, 0, Mode(kind)).needed_bytes for kind in ("backbone", "quantized")}
    assert max(alone.values()) < needed_bytes
    for budget_bytes in (needed_bytes - 1, *alone.values(), 0):
        advice = refused(SIZES, budget_bytes).advice
        for kind, least_bytes in alone.items():
            assert any(line.startswith(f"mode {kind} alone") for line in advice) == (least_bytes <= budget_bytes)


def test_advice_leaves_out_what_would_not_help() -> None:
    advice = refused(replace(SIZES, head_bytes=0), 0, Mode("quantized"), slots=1).advice
    assert not any(word in line for line in advice for word in ("head", "slot", "mode quantized"))


def test_a_streamed_layer_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        place(SIZES, mode=EXIT, min_exit=1, budget_bytes=10_000, slots=0)


def test_sizes_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3, 4\)"):
        replace(SIZES, river_bytes=(1, 2, 3))


amounts = st.integers(0, 300)
modes = st.sampled_from(["exit", "backbone", "quantized", "fixed:0", "fixed:2", "fixed:9"]).map(Mode.parse)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelSizes, dict[str, object]]:
    layers = draw(st.integers(1, 6))
    per_layer = st.lists(amounts, min_size=layers, max_size=layers).map(tuple)
    sizes = ModelSizes(
        backbone_bytes=draw(per_layer),
        river_bytes=draw(per_layer),
        norm_bytes=draw(per_layer),
        embed_bytes=draw(amounts),
        head_bytes=draw(amounts),
        head_can_shrink=draw(st.booleans()),
        other_bytes=draw(amounts),
        kv_bytes=draw(amounts),
        transient_bytes=draw(amounts),
        embed_away_tier=draw(st.sampled_from([None, "host", "disk"])),
        embed_away_bytes=draw(st.integers(0, 20)),
        staging_bytes=draw(amounts),
        load_bytes=draw(st.integers(0, 900)),
        kv_host_bytes=draw(st.sampled_from([0, 500, 20_000])),
        kv_room_bytes=draw(st.sampled_from([0, 1, 90, 250])),
    )
    options = {
        "mode": draw(modes),
        "min_exit": draw(st.integers(1, 7)),
        "also_modes": draw(st.lists(modes, max_size=2)),
        "slots": draw(st.integers(1, 4)),
    }
    return sizes, options


@given(problems())
def test_needed_bytes_is_the_smallest_budget_that_works(problem: tuple[ModelSizes, dict[str, object]]) -> None:
    sizes, options = problem
    refusal = place(sizes, budget_bytes=-1, **options)  # type: ignore[arg-type]
    assert isinstance(refusal, Refusal)
    assert set(refusal.terms) == TERMS
    assert sum(refusal.terms.values()) == refusal.needed_bytes
    assert refusal.terms[refusal.largest_term] == max(refusal.terms.values())
    exact = place(sizes, budget_bytes=refusal.needed_bytes, **options)  # type: ignore[arg-type]
    short = place(sizes, budget_bytes=refusal.needed_bytes - 1, **options)  # type: ignore[arg-type]
    assert isinstance(exact, Placement)
    assert isinstance(short, Refusal)
    assert short.needed_bytes == refusal.needed_bytes


@given(problems(), st.integers(0, 5_000), st.integers(0, 5_000))
def test_more_budget_is_never_worse_and_never_exceeded(
    problem: tuple[ModelSizes, dict[str, object]], one_bytes: int, other_bytes: int
) -> None:
    sizes, options = problem
    small, large = (
        place(sizes, budget_bytes=budget_bytes, **options)  # type: ignore[arg-type]
        for budget_bytes in sorted((one_bytes, other_bytes))
    )
    for placement in (small, large):
        if isinstance(placement, Placement):
            assert set(placement.terms) == TERMS
            assert placement.planned_bytes <= placement.budget_bytes
            assert placement.resident_layers == tuple(range(len(placement.resident_layers)))
            # As many slots as streamed layers would hold them all, and then they are resident.
            assert 0 < placement.slots < len(placement.streamed_layers) or not placement.slots
            assert bool(placement.slots) == bool(placement.streamed_layers)
    if isinstance(small, Placement):
        assert isinstance(large, Placement)
        assert small.resident_layers + small.streamed_layers == large.resident_layers + large.streamed_layers
        if small.kv_ahead == large.kv_ahead:
            assert rank(small) <= rank(large)
        read_bytes = sum(map(min, sizes.backbone_bytes, sizes.river_bytes)) + 2 * sizes.kv_host_bytes
        hidden_bytes = min(read_bytes // DEVICE_PER_LINK, sizes.kv_host_bytes)
        waits = [
            sum(sizes.backbone_bytes[layer] for layer in placement.streamed_layers) - placement.kv_ahead * hidden_bytes
            for placement in (small, large)
        ]
        assert waits[0] >= waits[1]


def rank(placement: Placement) -> tuple[int, bool]:
    return len(placement.resident_layers), placement.embed_tier == "device"
