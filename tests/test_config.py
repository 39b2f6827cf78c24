from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from river_offload.config import QuantConfig, RiverConfig, default_cache_dir, format_size, parse_size
from river_offload.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("600MiB", 600 * 2**20),
        ("7.5GB", 7_500_000_000),
        (" 7.5 gib ", 15 * 2**29),
        ("0.1TB", 10**11),
        ("12B", 12),
        ("1", 1),
        (4096, 4096),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1.5", "-1GiB", "8 apples", "1e9", "1,5GB", "8GiB8", "٨GiB", -1, True, 8e9, None]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(UsageError, match="cannot be read: write it like 8GiB"):
        parse_size(text)  # type: ignore[arg-type]


def test_a_bare_prefix_is_ambiguous() -> None:
    with pytest.raises(UsageError, match=r"write 8GiB \(powers of 1024\) or 8GB"):
        parse_size("8g")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (8 * 2**30, "8.00 GiB"),
        (200 * 2**20, "200.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (1536, "1.5 KiB"),
        (12, "12 B"),
        (0, "0 B"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**50))
@example(973)
@example(2**20 - 1)
def test_a_printed_size_reads_back_within_its_rounding(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= 0.051 * size_bytes


def test_defaults() -> None:
    config = RiverConfig("demo")
    assert config == RiverConfig(
        model="demo",
        budget=None,
        host_budget=None,
        context=4096,
        batch=1,
        kv_bits=16,
        kv_tier="device",
        mode="lossless",
        tau=0.5,
        min_exit=1,
        quant=QuantConfig(bits=4, group_size=64, axis=1),
        device="auto",
        dtype="auto",
        cache_dir=None,
        slots=2,
        also_modes=(),
        trust_remote_code=False,
    )
    assert RiverConfig.from_options(model="demo") == config


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "lossless"),
        ({"tau": 0.5}, "exit"),
        ({"min_exit": 1}, "exit"),
        ({"on_miss": "exit"}, "exit"),
        ({"prefill": "backbone"}, "exit"),
        ({"prefill": "exit"}, "exit"),
        ({"prefetch": "predicted"}, "exit"),
        ({"prefetch": "oracle"}, "exit"),
        ({"gate": 0.1}, "gated"),
        ({"gate": 0.1, "draft": 4}, "gated"),
        ({"prefetch": "none", "draft": 4}, "lossless"),
        ({"tau": 0.5, "also_modes": ["backbone"]}, "exit"),
        ({"tau": 0.5, "also_modes": ["exit"]}, "lossless"),
        ({"gate": 0.1, "also_modes": ("gated",)}, "lossless"),
        ({"gate": 0.1, "tau": 0.5, "also_modes": ("gated",)}, "exit"),
        ({"mode": "backbone", "tau": 0.5}, "backbone"),
        (dict.fromkeys(("mode", "tau", "min_exit", "on_miss", "prefill", "gate")), "lossless"),
    ],
)
def test_without_a_mode_an_option_of_one_mode_asks_for_it(options: dict[str, object], mode: str) -> None:
    config = RiverConfig.from_options(model="demo", **options)
    assert config.mode == mode
    for name, value in options.items():  # and what was given is there
        assert value is None or getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lossless", "prefill": "auto"}, "prefill=auto has no effect in mode lossless"),
        ({"mode": "lossless", "on_miss": "exit"}, "on_miss=exit has no effect in mode lossless"),
        ({"mode": "lossless", "gate": 0.5}, "gate has no effect in mode lossless"),
        ({"tau": 0.5, "gate": 0.5}, "gate has no effect in mode exit"),
        ({"tau": 0.5, "draft": 4}, "draft has no effect in mode exit"),
        ({"gate": 0.5, "on_miss": "exit", "also_modes": ["exit"], "mode": "backbone"}, "gate has no effect in mode"),
    ],
)
def test_options_of_two_modes_exclude_each_other(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RiverConfig.from_options(model="demo", **options)


def test_options_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = RiverConfig.from_options(
        model=Path("some/model"),
        budget="600MiB",
        host_budget=None,
        quant={"bits": 8},
        cache_dir="~/rivers",
        also_modes=["backbone", "fixed:3"],
    )
    assert config.model == "some/model"
    assert config.budget == 600 * 2**20
    assert config.quant == QuantConfig(bits=8)
    assert config.cache_dir == tmp_path / "rivers"
    assert config.also_modes == ("backbone", "fixed:3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buget": 1}, "unknown key buget: did you mean budget?"),
        ({"min-exit": 1}, "unknown key min-exit: did you mean min_exit?"),
        ({"bits": 4}, "unknown key bits: did you mean quant.bits?"),
        ({"quant": {"group": 64}}, "unknown key quant.group: did you mean quant.group_size?"),
        ({"quant": {"context": 64}}, "unknown key quant.context: did you mean context?"),
        ({"zzz": 1}, "unknown key zzz: expected one of model, budget"),
        ({"cls": 1}, "unknown key cls: "),
        ({"budget": "8G"}, "budget: size '8G' is ambiguous"),
        ({"budget": 0}, "budget is 0: expected a whole number of at least 1"),
        ({"context": 0}, "context is 0"),
        ({"context": 4096.0}, "context is 4096.0"),
        ({"batch": True}, "batch is True"),
        ({"min_exit": 0}, "min_exit is 0"),
        ({"slots": "2"}, "slots is '2'"),
        ({"host_budget": -1}, "host_budget: size -1"),
        ({"prefetch": "all"}, "prefetch is 'all': expected none or next or predicted or oracle"),
        ({"link_limit": 0}, "link_limit is 0"),
        ({"kv_bits": 3}, "kv_bits is 3: expected 16 or 8 or 4"),
        ({"kv_tier": "disk"}, "kv_tier is 'disk': expected device or host"),
        ({"on_miss": "leave"}, "on_miss is 'leave': expected wait or exit"),
        ({"on_miss": "exit", "mode": "backbone"}, "on_miss=exit has no effect in mode backbone"),
        ({"tau": float("nan")}, "tau is nan: expected a finite number"),
        ({"tau": "0.5"}, "tau is '0.5'"),
        ({"mode": "fixed"}, "mode: unknown mode 'fixed': expected exit, backbone"),
        ({"mode": 3}, "mode: unknown mode '3'"),
        ({"also_modes": ["exit", "slow"]}, "also_modes: unknown mode 'slow'"),
        ({"also_modes": "exit"}, "also_modes is 'exit': expected a list"),
        ({"quant": 4}, "quant is 4"),
        ({"quant": {"bits": 5}}, "quant.bits is 5: expected 2 or 3 or 4 or 8"),
        ({"quant": {"bits": 4.0}}, "quant.bits is 4.0"),
        ({"quant": {"group_size": 100}}, "quant.group_size is 100"),
        ({"quant": {"axis": 0}}, "quant.axis is 0: expected 1"),
        ({"device": "gpu"}, "device is 'gpu': expected auto, cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, "dtype is 'int8': expected auto or float32"),
        ({"cache_dir": ""}, "cache_dir is ''"),
        ({"trust_remote_code": "yes"}, "trust_remote_code is 'yes': expected true or false"),
        ({"model": ""}, "model is ''"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        RiverConfig._from_mapping({"model": "demo", **options})
    assert str(refusal.value).startswith(message)


def test_the_model_must_be_named() -> None:
    with pytest.raises(UsageError, match="model is missing"):
        RiverConfig.from_options(budget="8GiB")


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "river.toml"
    path.write_text('model = "demo"\nbudget = "200MiB"\ntau = 0.95\nalso_modes = ["backbone"]\n[quant]\nbits = 3\n')
    assert RiverConfig.from_toml(path) == RiverConfig(
        "demo", budget=200 * 2**20, mode="exit", tau=0.95, also_modes=("backbone",), quant=QuantConfig(bits=3)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'model = "demo"\ncontxt = 8\n', "unknown key contxt: did you mean context?"),
        (b"model = \n", "not valid TOML.*line 1"),
        (b"\xff\xfe", "not valid TOML"),
        (b'model = "demo"\ncls = 8\n', "unknown key cls"),
        (None, "cannot be read: No such file"),
    ],
)
def test_toml_errors_name_the_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "river.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"river.toml.*{message}"):
        RiverConfig.from_toml(path)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RIVER_OFFLOAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache/river-offload"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / ".cache/river-offload"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/river-offload")
    monkeypatch.setenv("RIVER_OFFLOAD_CACHE", "~/mine")
    assert default_cache_dir() == tmp_path / "mine"


def test_a_cache_dir_of_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="no home directory for ~no-such-user/x"):
        RiverConfig.from_options(model="demo", cache_dir="~no-such-user/x")


def test_policies_and_options_do_not_import_torch() -> None:
    program = (
        "import sys, policies.placement, policies.exit\n"
        "assert 'torch' not in sys.modules and 'river_offload' not in sys.modules\n"
        "import river_offload.config, river_offload.trace\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
