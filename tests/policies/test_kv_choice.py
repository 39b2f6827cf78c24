"""Which kind of KV cache: numbers in, an order out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.course import Course, one_by_one
from policies.kv_choice import KvNeeds, bringing_seconds, reading_seconds, weigh_kinds
from policies.profiles import load_profile
from policies.types import Mode, ModelSizes, Placement, Refusal

CARD = load_profile("rtx-4060-8gb")
LAYERS, MB = 8, 10**6
SIZES = ModelSizes(
    backbone_bytes=(400 * MB,) * LAYERS,
    river_bytes=(100 * MB,) * LAYERS,
    norm_bytes=(0,) * LAYERS,
    embed_bytes=0,
    head_bytes=0,
    head_can_shrink=False,
    other_bytes=0,
    kv_bytes=1,
    transient_bytes=1,
)
FULL = 2000 * MB
KINDS = [
    KvNeeds(16, "device", FULL, 0, MB, FULL),
    KvNeeds(8, "device", FULL // 2 + FULL // LAYERS, 0, 2 * MB, FULL),
    KvNeeds(4, "device", FULL // 4 + FULL // LAYERS, 0, 2 * MB, FULL),
    KvNeeds(16, "host", FULL // LAYERS, FULL, MB, FULL),
    KvNeeds(4, "host", FULL // LAYERS, FULL // 4, 2 * MB, FULL),
]


def whole(_: Placement) -> Course:
    return one_by_one([LAYERS] * 5, known=False)


def weighed(budget_bytes: int, kinds: list[KvNeeds] = KINDS, mode: str = "backbone") -> list[tuple[int, str]]:
    found = weigh_kinds(SIZES, kinds, CARD, whole, mode=Mode.parse(mode), min_exit=1, budget_bytes=budget_bytes)
    return [(each.needs.bits, each.needs.tier) for each in found]


def test_with_room_for_all_full_precision_on_the_device_is_fastest() -> None:
    assert weighed(10_000 * MB)[0] == (16, "device")


def test_short_of_room_fewer_bits_pay_for_layers_that_need_not_be_streamed() -> None:
    order = weighed(3_600 * MB)
    assert order[0][0] == 4
    assert order.index((8, "device")) < order.index((16, "device"))


def test_what_does_not_fit_comes_last_and_says_what_it_would_need() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, whole, mode=Mode("backbone"), min_exit=1, budget_bytes=1_100 * MB)
    fits = [isinstance(each.placement, Placement) for each in found]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    refused = [each for each in found if isinstance(each.placement, Refusal)]
    assert all(each.seconds_per_token is None for each in refused)
    assert {each.placement.needed_bytes for each in refused if each.needs.bits == 16} == {800 * MB + FULL + MB}


def test_each_alternative_is_placed_with_its_own_bytes() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, whole, mode=Mode("exit"), min_exit=1, budget_bytes=9_000 * MB)
    for each in found:
        assert isinstance(each.placement, Placement)
        assert each.placement.terms["kv"] == each.needs.kv_bytes
        assert each.placement.terms["transient"] == each.needs.transient_bytes
        assert each.placement.kv_host_bytes == each.needs.kv_host_bytes
        assert each.seconds_per_token == pytest.approx((each.layers_s or 0) + (each.kv_s or 0))


def test_more_resident_layers_never_cost_more() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, whole, mode=Mode("backbone"), min_exit=1, budget_bytes=3_600 * MB)
    by_residents = sorted(found, key=lambda each: len(each.placement.resident_layers))  # type: ignore[union-attr]
    layers_s = [each.layers_s for each in by_residents]
    assert layers_s == sorted(layers_s, reverse=True) and len(set(layers_s)) > 1


def test_of_equal_ones_more_bits_come_first() -> None:
    alike = [replace(KINDS[3], bits=bits, kv_host_bytes=0) for bits in (4, 8, 16)]
    assert weighed(9_000 * MB, alike) == [(16, "host"), (8, "host"), (4, "host")]


def test_what_a_cache_costs_a_token() -> None:
    read_s, link_s = FULL / CARD.memory_bytes_per_s, FULL / CARD.pinned_bytes_per_s
    reading = [reading_seconds(each, CARD) for each in KINDS]
    assert reading == pytest.approx([read_s, 2.5 * read_s, 2.25 * read_s, 2 * read_s, 2 * read_s])
    bringing = [bringing_seconds(each, CARD) for each in KINDS]
    assert bringing == pytest.approx([0, 0, 0, link_s, link_s / 4])
    machine = load_profile("cpu-ddr5-nvme")
    assert bringing_seconds(KINDS[3], machine, "disk") == pytest.approx(FULL / machine.disk_bytes_per_s)


def test_with_a_second_room_a_cache_comes_beside_the_computation() -> None:
    """The token takes what the link takes, or what all else takes and one layer's share: whichever is longer."""
    host = replace(KINDS[3], room_bytes=FULL // LAYERS)
    link_s = FULL / CARD.pinned_bytes_per_s
    for beside_s, weights_s in ((0.0, 0.0), (link_s / 2, 0.0), (3 * link_s, 0.0), (3 * link_s, 2.5 * link_s)):
        extra_s = bringing_seconds(host, CARD, ahead=True, beside_s=beside_s, weights_s=weights_s)
        assert beside_s + extra_s == pytest.approx(max(weights_s + link_s, beside_s + link_s / LAYERS))
        assert extra_s <= bringing_seconds(host, CARD) or weights_s > beside_s
    assert bringing_seconds(KINDS[0], CARD, ahead=True, beside_s=1.0, weights_s=2.0) == 0


def test_the_second_room_is_placed_and_makes_a_cache_on_the_host_faster() -> None:
    plain, roomy = KINDS[3], replace(KINDS[3], room_bytes=FULL // LAYERS)
    found = {}
    for needs in (plain, roomy):
        (one,) = weigh_kinds(SIZES, [needs], CARD, whole, mode=Mode("backbone"), min_exit=1, budget_bytes=3_750 * MB)
        assert isinstance(one.placement, Placement) and one.seconds_per_token is not None
        assert one.placement.kv_ahead == (needs is roomy)
        assert one.placement.terms["kv"] == needs.kv_bytes + needs.room_bytes
        found[needs] = one.seconds_per_token
    assert found[roomy] < found[plain]
