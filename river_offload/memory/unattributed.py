"""What nobody claims: the memory that the machine counts and the ledger does not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from river_offload.memory.process import ProcessMemory
from river_offload.memory.reading import Reading

_ON_GPU = "the model is on a GPU, where the allocator is asked"
_ON_CPU = "the model is on the CPU, where the process's own memory is asked"


def unattributed(ledger_bytes: int, before: ProcessMemory, after: ProcessMemory) -> dict[str, Any]:
    """The rests, each a `Reading` as a dict: {"value": bytes or None, "reason": None or words}. Negative when the
    ledger claims more than there is: pages of a tensor that were never touched, for one.

    Args:
        ledger_bytes: what the ledger counts on the device at the moment of `after`.
        before: read before the model was loaded, on the same device.
        after: read while all that the ledger counts is held.

    Returns:
        allocator_minus_ledger_bytes: what torch's allocator handed out since `before` and the ledger does not know.
        allocator_spare_bytes: what the allocator took from the driver and has not handed out.
        nvml_minus_allocator_bytes: what the GPU holds beyond the allocator: the CUDA context, libraries, other
            allocators. Of this process where NVML tells it, else what the whole card rose by since `before`.
        nvml_counts: "process" or "device", whichever that is; None without NVML.
        anonymous_growth_minus_ledger_bytes: on a CPU, what the process grew by since `before` (without pages of
            files) and the ledger does not know.

    Raises ValueError when the readings are of two devices.
    """
    if before.device != after.device:
        raise ValueError(f"readings of {before.device} and {after.device} cannot be compared: read one device twice")
    if after.device is None:
        gone, grown = Reading.missing(_ON_CPU), after.host.anonymous.minus(before.host.anonymous).minus(ledger_bytes)
        return _as_dict(gone, gone, gone, None, grown)
    allocated = after.allocator.current.minus(before.allocator.current).minus(ledger_bytes)
    spare = after.allocator.reserved.minus(after.allocator.current)
    beyond, counts = _beyond_allocator(before, after)
    return _as_dict(allocated, spare, beyond, counts, Reading.missing(_ON_GPU))


def _beyond_allocator(before: ProcessMemory, after: ProcessMemory) -> tuple[Reading, str | None]:
    if after.card.process.value is not None:
        return after.card.process.minus(after.allocator.reserved), "process"
    risen = after.card.used.minus(before.card.used)
    taken = after.allocator.reserved.minus(before.allocator.reserved)
    return (rest := risen.minus(taken)), None if rest.value is None else "device"


def _as_dict(allocated: Reading, spare: Reading, beyond: Reading, counts: str | None, grown: Reading) -> dict[str, Any]:
    return {
        "allocator_minus_ledger_bytes": asdict(allocated),
        "allocator_spare_bytes": asdict(spare),
        "nvml_minus_allocator_bytes": asdict(beyond),
        "nvml_counts": counts,
        "anonymous_growth_minus_ledger_bytes": asdict(grown),
    }
