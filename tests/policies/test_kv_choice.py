"""Which kind of KV cache: numbers in, an order out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.kv_choice import KvNeeds, kv_seconds, weigh_kinds
from policies.profiles import load_profile
from policies.simulate import Step
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
STEPS = [Step(depth=LAYERS)] * 5


def weighed(budget_bytes: int, kinds: list[KvNeeds] = KINDS, mode: str = "backbone") -> list[tuple[int, str]]:
    found = weigh_kinds(SIZES, kinds, CARD, STEPS, mode=Mode.parse(mode), min_exit=1, budget_bytes=budget_bytes)
    return [(each.needs.bits, each.needs.tier) for each in found]


def test_with_room_for_all_full_precision_on_the_device_is_fastest() -> None:
    assert weighed(10_000 * MB)[0] == (16, "device")


def test_short_of_room_fewer_bits_pay_for_layers_that_need_not_be_streamed() -> None:
    order = weighed(3_600 * MB)
    assert order[0][0] == 4
    assert order.index((8, "device")) < order.index((16, "device"))


def test_what_does_not_fit_comes_last_and_says_what_it_would_need() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, STEPS, mode=Mode("backbone"), min_exit=1, budget_bytes=1_100 * MB)
    fits = [isinstance(each.placement, Placement) for each in found]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    refused = [each for each in found if isinstance(each.placement, Refusal)]
    assert all(each.seconds_per_token is None for each in refused)
    assert {each.placement.needed_bytes for each in refused if each.needs.bits == 16} == {800 * MB + FULL + MB}


def test_each_alternative_is_placed_with_its_own_bytes() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, STEPS, mode=Mode("exit"), min_exit=1, budget_bytes=9_000 * MB)
    for each in found:
        assert isinstance(each.placement, Placement)
        assert each.placement.terms["kv"] == each.needs.kv_bytes
        assert each.placement.terms["transient"] == each.needs.transient_bytes
        assert each.placement.kv_host_bytes == each.needs.kv_host_bytes
        assert each.seconds_per_token == pytest.approx((each.layers_s or 0) + (each.kv_s or 0))


def test_more_resident_layers_never_cost_more() -> None:
    found = weigh_kinds(SIZES, KINDS, CARD, STEPS, mode=Mode("backbone"), min_exit=1, budget_bytes=3_600 * MB)
    by_residents = sorted(found, key=lambda each: len(each.placement.resident_layers))  # type: ignore[union-attr]
    layers_s = [each.layers_s for each in by_residents]
    assert layers_s == sorted(layers_s, reverse=True) and len(set(layers_s)) > 1


def test_of_equal_ones_more_bits_come_first() -> None:
    alike = [replace(KINDS[3], bits=bits, kv_host_bytes=0) for bits in (4, 8, 16)]
    assert weighed(9_000 * MB, alike) == [(16, "host"), (8, "host"), (4, "host")]


def test_what_a_cache_costs_a_token() -> None:
    read_s, link_s = FULL / CARD.memory_bytes_per_s, FULL / CARD.pinned_bytes_per_s
    found = [kv_seconds(each, CARD) for each in KINDS]
    expected = [read_s, 2.5 * read_s, 2.25 * read_s, 2 * read_s + link_s, 2 * read_s + link_s / 4]
    assert found == pytest.approx(expected)
    disk = kv_seconds(KINDS[3], load_profile("cpu-ddr5-nvme"), "disk")
    assert disk > FULL / load_profile("cpu-ddr5-nvme").disk_bytes_per_s
