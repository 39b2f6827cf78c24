"""What would make a machine serve better: what `machine.examine` found in, sentences that say what to do out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from river_offload.config import format_size

Facts = Mapping[str, Any]

SLOW_DISK_BYTES_PER_S = 1e9
"""Half of what any NVMe drive reads: a layer of an 8B model (416 MiB) then takes half a second."""
_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph")


def advice(facts: Facts) -> dict[str, str]:
    """By the part of the machine it is about: what to do. Nothing for what is as good as it gets."""
    parts: dict[str, Callable[[Facts], str | None]] = {
        "gpus": _gpus,
        "container": _container,
        "wsl": _wsl,
        "pinning": _pinning,
        "disk": _disk,
        "link": _link,
        "kernels": _kernels,
        "threads": _threads,
    }
    found = {name: part(facts) for name, part in parts.items()}
    return {name: text for name, text in found.items() if text is not None}


def _gpus(facts: Facts) -> str | None:
    gpus = facts["gpus"]
    if gpus["remark"] is not None:
        return str(gpus["remark"])
    if gpus["torch_reason"] is None:
        return None
    if gpus["found"]:
        if facts["machine"]["cuda"] is None:
            return "there is a GPU, and this torch cannot use one: install a build of torch for CUDA"
        return "there is a GPU, and torch cannot use it: update the driver, or install a torch for an older CUDA"
    return None


def _container(facts: Facts) -> str | None:
    container, host = facts["limits"]["container"], facts["host"]
    limit_bytes = container["limit"]["value"]
    if limit_bytes is None or limit_bytes >= host["total_bytes"]:
        return None
    return (
        f"the container is held to {format_size(limit_bytes)} of {format_size(host['total_bytes'])}: give it more "
        "(docker run --memory, resources.limits.memory) for a larger budget"
    )


def _wsl(facts: Facts) -> str | None:
    version = facts["limits"]["wsl_version"]
    if version is None:
        return None
    if version == 1:
        return "WSL 1 knows no GPU and no direct disk reads: convert to version 2 (wsl --set-version NAME 2)"
    return (
        "WSL gives Linux half of the memory and pins only part of it: raise memory= in .wslconfig, and keep models on "
        "the Linux side, not below /mnt"
    )


def _pinning(facts: Facts) -> str | None:
    if facts["pinning"]["works"] is not False:
        return None
    soft_bytes = facts["limits"]["memlock"]["soft"]["value"]
    if soft_bytes is None:
        return "copies to the GPU take about twice as long: ask the driver or the container why it refuses to pin"
    return (
        f"copies to the GPU take about twice as long: raise the limit of locked memory, {format_size(soft_bytes)} now "
        "(ulimit -l unlimited, docker run --ulimit memlock=-1)"
    )


def _disk(facts: Facts) -> str | None:
    rates = facts["rates"]
    kind, rate = rates["file_system"], rates["disk_read_bytes_per_s"]["value"]
    if kind in _IN_MEMORY:
        return f"{kind} is memory: what is kept there is missing for the model. Give --cache-dir a place on a disk"
    if kind in _OVER_NETWORK:
        return f"{kind} is read over a network: keep models and the cache on a local disk"
    if rate is not None and rate < SLOW_DISK_BYTES_PER_S:
        return "slow for streaming: keep the checkpoint on NVMe, or give a budget at which no layer is streamed"
    if rate is None and rates["seconds"]:
        return "give --cache-dir a directory that can be written to"
    return None


def _link(facts: Facts) -> str | None:
    rates = facts["rates"]
    pinned, pageable = (rates[f"{kind}_copy_bytes_per_s"]["value"] for kind in ("pinned", "pageable"))
    if pinned is None or pageable is None or pinned > 1.2 * pageable:
        return None
    return "pinned memory is no faster than other memory: look at the PCIe width and generation (nvidia-smi -q)"


def _kernels(facts: Facts) -> str | None:
    serving = next((entry for entry in facts["kernels"] if entry["device"] == "cuda"), facts["kernels"][0])
    reasons = {refusal["kernel"]: refusal["reason"] for refusal in serving["declined"]}
    if serving["device"] == "cuda":
        return "pip install gemlite for faster kernels" if "not installed" in reasons.get("gemlite", "") else None
    if facts["compiler"] is None:
        return "install gcc: the fastest kernel is compiled on first use"
    if serving["kernel"] != "native-int4":
        return f"the fastest kernel does not serve here: {reasons.get('native-int4', 'it was not asked')}"
    return None


def _threads(facts: Facts) -> str | None:
    machine = facts["machine"]
    wanted = min(machine["cores"], machine["usable_cpus"])
    if facts["gpus"]["torch_reason"] is None or machine["threads"] >= wanted:
        return None
    return f"torch computes with {machine['threads']} of {wanted} cores: set OMP_NUM_THREADS={wanted}, or unset it"
