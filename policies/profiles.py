"""What a machine can do, as far as speed depends on it: figures from data sheets, or measured.

The profiles that ship are TOML files in `policies/profiles/`, each figure with its source in a comment.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from policies.simulate import LayerCost, Setup

LinkTier = Literal["host", "pageable", "disk"]
"""Where layers come from."""

_FOLDER = resources.files("policies") / "profiles"


class ProfileError(ValueError):
    """A profile that is not there or does not say what it must; the message names the file and the key."""


@dataclass(frozen=True)
class HardwareProfile:
    """Rates in bytes and operations per second. A figure that a machine has no use for is 0."""

    name: str
    device_memory_bytes: int
    """Memory that computes: of the card, or of the machine for a CPU."""
    memory_bytes_per_s: float
    """Peak read rate of that memory."""
    compute_flops: float
    """Dense 16-bit matrix products with 32-bit accumulation (CPU: its best matrix rate)."""
    backbone_read_efficiency: float
    """Share of the memory's peak at which one token runs through 16-bit weights."""
    river_read_efficiency: float
    """The same for 4-bit weights, whose kernels are further from the peak."""
    pinned_bytes_per_s: float
    """Host to device from pinned memory; 0 on a CPU."""
    pageable_bytes_per_s: float
    """Host to device from ordinary memory; 0 on a CPU."""
    disk_bytes_per_s: float
    """Disk to host, large sequential reads."""
    link_latency_s: float = 0.0
    """What one fetch takes beyond its bytes."""

    def link_bytes_per_s(self, tier: LinkTier) -> float:
        """The rate at which layers come from `tier` to where they compute: disk to a card is as slow as the slower
        half of its way. Raises ProfileError when the machine has no such way."""
        rate = {"host": self.pinned_bytes_per_s, "pageable": self.pageable_bytes_per_s, "disk": self.disk_bytes_per_s}[
            tier
        ]
        if tier == "disk" and self.pinned_bytes_per_s:
            rate = min(rate, self.pinned_bytes_per_s)
        if not rate:
            raise ProfileError(f"profile {self.name}: layers cannot come from tier {tier}, its rate is 0")
        return rate


def profile_names() -> tuple[str, ...]:
    """The profiles that ship, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """A profile that ships, by name, or any TOML file. Raises ProfileError that names the file and the key."""
    text = str(name_or_path)
    if text in profile_names():
        where, content = f"{text}.toml", (_FOLDER / f"{text}.toml").read_text(encoding="utf-8")
    elif text.endswith(".toml"):
        where = text
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"profile {text} cannot be read: {error}") from error
    else:
        raise ProfileError(f"no profile {text!r}: name a .toml file or one of {', '.join(profile_names())}")
    try:
        values = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"profile {where} is no TOML: {error}") from error
    return _checked(values, where)


def setup_on(
    profile: HardwareProfile,
    *,
    num_layers: int,
    layer_bytes: int,
    river_bytes: int,
    resident: int,
    slots: int,
    tier: LinkTier = "host",
    tau: float = 0.5,
    min_exit: int = 1,
    link_abortable: bool = False,
) -> Setup:
    """A model of equal layers on a machine, the first `resident` backbone layers on the device.

    `layer_bytes` are those of a backbone layer in 16 bits, `river_bytes` of its quantized copy. One token takes as long
    as reading the weights, many as long as their products.
    """
    token_s = layer_bytes / profile.compute_flops  # 2 operations a weight of 2 bytes
    rate = profile.memory_bytes_per_s
    return Setup(
        num_layers=num_layers,
        streamed=dict.fromkeys(range(resident, num_layers), layer_bytes),
        slots=min(slots, num_layers - resident),
        link_bytes_per_s=profile.link_bytes_per_s(tier),
        link_latency_s=profile.link_latency_s,
        link_abortable=link_abortable,
        backbone=LayerCost(layer_bytes / (rate * profile.backbone_read_efficiency), token_s),
        river=LayerCost(river_bytes / (rate * profile.river_read_efficiency), token_s),
        tau=tau,
        min_exit=min_exit,
    )


def to_toml(profile: HardwareProfile, sources: Mapping[str, str]) -> str:
    """The file of a profile, with the source of each figure above it. Raises ProfileError for a figure without one."""
    lines = [f"name = {json.dumps(profile.name)}"]
    for item in fields(profile):
        if item.name == "name":
            continue
        source = " ".join(sources.get(item.name, "").split())
        if not source:
            raise ProfileError(f"profile {profile.name}: {item.name} needs its source")
        lines += ["", f"# {source}", f"{item.name} = {getattr(profile, item.name)!r}"]
    return "\n".join(lines) + "\n"


def _checked(values: Mapping[str, Any], where: str) -> HardwareProfile:
    known = {item.name: item for item in fields(HardwareProfile)}
    for key in values:
        if key not in known:
            raise ProfileError(f"profile {where}: unknown key {key}: expected {', '.join(known)}")
    for key, item in known.items():
        if key not in values:
            if item.default is MISSING:
                raise ProfileError(f"profile {where}: {key} is missing")
            continue
        if complaint := _complaint(key, values[key]):
            raise ProfileError(f"profile {where}: {key} is {values[key]!r}: expected {complaint}")
    return HardwareProfile(**values)


def _complaint(key: str, value: object) -> str | None:
    """What was expected of the value; None when it is right."""
    if key == "name":
        return None if isinstance(value, str) and value else "a name"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "a number"
    if key == "device_memory_bytes" and not isinstance(value, int):
        return "a whole number of bytes"
    if key.endswith("_efficiency"):
        return None if 0 < value <= 1 else "a share above 0, at most 1"
    if key in ("pinned_bytes_per_s", "pageable_bytes_per_s", "link_latency_s"):
        return None if value >= 0 else "0 or more"
    return None if value > 0 else "more than 0"
