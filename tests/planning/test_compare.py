from __future__ import annotations

import json

import pytest

from river_offload.errors import UsageError
from river_offload.planning.compare import compare, read_account


def account(kind="plan", schema=1, peak=60, **categories):
    counted = {"peak_device_bytes": peak, "categories": categories}
    facts = {"schema": schema, "kind": kind, "model": "m", "context": 64, "batch": 1, "mode": "exit"}
    if kind == "plan":
        return facts | counted
    return facts | {"planned": {"peak_device_bytes": 1, "categories": {"kv": 1}}, "measured": counted}


@pytest.fixture
def write(tmp_path):
    def write(name, value):
        file = tmp_path / name
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(file)

    return write


def test_the_biggest_difference_comes_first_whatever_its_sign(write):
    a = read_account(write("a", account(kv=10, head=20, mask=30)))
    b = read_account(write("b", account(kv=12, head=5, logits=9, peak=26)))
    found = compare(a, b)
    assert [(item.category, item.difference_bytes) for item in found.differences] == [
        ("mask", -30), ("head", -15), ("logits", 9), ("kv", 2),
    ]  # fmt: skip
    assert found.peak.difference_bytes == 26 - 60
    assert found.as_json()["differences"][0] == {
        "category": "mask", "a_bytes": 30, "b_bytes": 0, "difference_bytes": -30,
    }  # fmt: skip


def test_of_a_measurement_the_measured_half_counts(write):
    plan, run = read_account(write("a", account(kv=10))), read_account(write("b", account("run", kv=11, peak=70)))
    assert compare(plan, run).differences[0].difference_bytes == 1
    assert compare(run, run).peak.difference_bytes == 0
    assert run.peak_device_bytes == 70


def test_one_file_twice_differs_in_nothing(write):
    a = read_account(write("a", account(kv=10, head=20)))
    found = compare(a, a)
    assert not any(item.difference_bytes for item in found.differences)
    assert found.changed_facts() == {}


def test_other_models_and_contexts_are_told(write):
    a = read_account(write("a", account(kv=10)))
    b = read_account(write("b", account(kv=10) | {"context": 128, "model": "n"}))
    assert compare(a, b).changed_facts() == {"model": ("m", "n"), "context": (64, 128)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("not JSON", "is no JSON"),
        ("[1]", "is no account of river-mem"),
        ({"tokens_per_s": 3}, "is no account of river-mem"),
        (account(schema=2, kv=1), "has schema 2, this version reads 1"),
        ({"schema": 1, "kind": "sweep", "rows": []}, "is a sweep: compare takes"),
        (account(peak=1.5, kv=1), "peak_device_bytes is 1.5"),
        (account(kv="much"), "categories is"),
        ({"schema": 1, "kind": "run", "planned": {}}, "peak_device_bytes is None"),
    ],
)
def test_wrong_files_are_refused(write, value, message):
    with pytest.raises(UsageError, match=message):
        read_account(write("a", value))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_account(str(tmp_path / "absent"))
