from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from policies import profiles
from policies.profiles import HardwareProfile, ProfileError, load_profile, profile_names, setup_on, to_toml
from policies.simulate import Step, simulate

FOLDER = Path(profiles.__file__).with_name("profiles")
GIB = 2**30
CARD = HardwareProfile(
    name="card",
    device_memory_bytes=8 * GIB,
    memory_bytes_per_s=200e9,
    compute_flops=20e12,
    backbone_read_efficiency=0.5,
    river_read_efficiency=0.25,
    pinned_bytes_per_s=10e9,
    pageable_bytes_per_s=5e9,
    disk_bytes_per_s=2e9,
    link_latency_s=0.001,
)
SOURCES = {item.name: "measured" for item in fields(HardwareProfile)}


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_loads_and_names_the_source_of_every_figure(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    above = ""
    figures = 0
    for line in (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "name ")):
            assert above.startswith("# "), f"{line} has no source"
            figures += 1
        above = line
    assert figures == len(fields(HardwareProfile)) - 1


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_runs_an_8b_model_at_a_believable_pace(name: str) -> None:
    profile = load_profile(name)
    tier = "host" if profile.pinned_bytes_per_s else "disk"
    setup = setup_on(
        profile, num_layers=32, layer_bytes=436_000_000, river_bytes=123_000_000, resident=3, slots=4, tier=tier
    )
    full = simulate([Step(32, known=True)] * 3, setup, "next").tokens_per_s
    early = simulate([Step(3, known=True)] * 3, setup, "next").tokens_per_s
    assert 0.03 < full < 5 < 10 * early
    assert early > 5 * full


def test_the_shipped_profiles_span_what_people_have() -> None:
    loaded = [load_profile(name) for name in profile_names()]
    cards = [profile for profile in loaded if profile.pinned_bytes_per_s]
    assert len(cards) >= 12
    assert {profile.device_memory_bytes // GIB for profile in cards} >= {6, 8, 12, 16, 24}
    rates = [profile.pinned_bytes_per_s for profile in cards]
    assert min(rates) < 6.5e9  # PCIe 3 x8
    assert max(rates) > 50e9  # PCIe 5 x16
    assert any("laptop" in profile.name for profile in cards)
    assert {profile.disk_bytes_per_s < 1e9 for profile in loaded if profile not in cards} == {True, False}
    assert all(profile.pageable_bytes_per_s < profile.pinned_bytes_per_s for profile in cards)


def test_a_setup_by_hand() -> None:
    setup = setup_on(CARD, num_layers=4, layer_bytes=10**9, river_bytes=10**8, resident=2, slots=8)
    assert setup.streamed == {2: 10**9, 3: 10**9}
    assert setup.slots == 2
    assert setup.link_s(2) == pytest.approx(0.101)
    assert setup.backbone.seconds(1) == pytest.approx(0.01)  # 1e9 bytes at half of 200e9
    assert setup.river.seconds(1) == pytest.approx(0.002)
    assert setup.backbone.seconds(1000) == pytest.approx(0.05)  # 1e9 operations a token at 20e12


def test_the_link_is_as_slow_as_the_slower_half_of_its_way() -> None:
    assert CARD.link_bytes_per_s("host") == 10e9
    assert CARD.link_bytes_per_s("pageable") == 5e9
    assert CARD.link_bytes_per_s("disk") == 2e9
    assert replace(CARD, disk_bytes_per_s=20e9).link_bytes_per_s("disk") == 10e9
    cpu = replace(CARD, pinned_bytes_per_s=0, pageable_bytes_per_s=0)
    assert cpu.link_bytes_per_s("disk") == 2e9
    with pytest.raises(ProfileError, match="card: layers cannot come from tier host"):
        cpu.link_bytes_per_s("host")


def test_a_written_profile_reads_back(tmp_path: Path) -> None:
    profile = replace(CARD, name='my "card"\\')
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(profile, SOURCES), encoding="utf-8")
    assert load_profile(path) == load_profile(str(path)) == profile
    assert path.read_text(encoding="utf-8").count("# measured\n") == len(fields(HardwareProfile)) - 1


def test_a_figure_without_a_source_is_not_written() -> None:
    with pytest.raises(ProfileError, match="disk_bytes_per_s needs its source"):
        to_toml(CARD, SOURCES | {"disk_bytes_per_s": " "})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disk_bytes_per_s": None}, "disk_bytes_per_s is missing"),
        ({"tensor_cores": "1"}, "unknown key tensor_cores"),
        ({"disk_bytes_per_s": "0"}, "disk_bytes_per_s is 0: expected more than 0"),
        ({"pinned_bytes_per_s": "-1"}, "pinned_bytes_per_s is -1: expected 0 or more"),
        ({"compute_flops": "true"}, "compute_flops is True: expected a number"),
        ({"compute_flops": "inf"}, "compute_flops is inf: expected a number"),
        ({"compute_flops": '"1e12"'}, "compute_flops is '1e12': expected a number"),
        ({"device_memory_bytes": "1.5"}, "device_memory_bytes is 1.5: expected a whole number"),
        ({"river_read_efficiency": "1.1"}, "river_read_efficiency is 1.1: expected a share"),
        ({"name": '""'}, "name is '': expected a name"),
        ({"link_latency_s": "= 3"}, "is no TOML"),
    ],
)
def test_a_broken_profile_is_refused_by_file_and_key(
    changes: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    values = tomllib.loads(to_toml(CARD, SOURCES))
    lines = {key: f'"{value}"' if isinstance(value, str) else repr(value) for key, value in values.items()} | changes
    path = tmp_path / "broken.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in lines.items() if value is not None))
    with pytest.raises(ProfileError, match=f"broken.toml.*{message}"):
        load_profile(path)


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no profile .rtx-9090..*rtx-4060-8gb"):
        load_profile("rtx-9090")
    with pytest.raises(ProfileError, match=r"nowhere\.toml cannot be read"):
        load_profile(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match=r"binary\.toml cannot be read"):
        load_profile(tmp_path / "binary.toml")


def test_latency_may_be_left_out(tmp_path: Path) -> None:
    text = "".join(line + "\n" for line in to_toml(CARD, SOURCES).splitlines() if "latency" not in line)
    (tmp_path / "plain.toml").write_text(text)
    assert load_profile(tmp_path / "plain.toml").link_latency_s == 0
