"""Device memory that no tensor of ours accounts for. Shown as constants, never mixed with what is counted."""

from __future__ import annotations

from policies.profiles import HardwareProfile

CUDA_CONTEXT_BYTES = 512 << 20
"""What a process holds on a card before its first tensor: context, kernels, cuBLAS workspaces. An estimate."""
ALLOCATOR_MARGIN_SHARE = 0.03
"""Of the card: what torch's caching allocator rounds up and cannot reuse. An estimate."""


def device_constants(device_type: str, profile: HardwareProfile | None) -> dict[str, int]:
    """`cuda_context` and `allocator_margin` in bytes on a GPU, nothing on a CPU.

    The margin is a share of the profile's memory; without a profile it is not known.
    """
    if device_type != "cuda":
        return {}
    margin_bytes = int(profile.device_memory_bytes * ALLOCATOR_MARGIN_SHARE) if profile else 0
    return {"cuda_context": CUDA_CONTEXT_BYTES, "allocator_margin": margin_bytes}
