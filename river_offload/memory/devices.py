"""The GPUs that this process may use, as torch numbers them, with what NVML says of each: the right card each time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from river_offload.memory.nvml import Card, CardMemory, card_memory, cards
from river_offload.memory.process import card_names, pci_bus_id
from river_offload.memory.reading import Reading
from river_offload.memory.visible import ORDER, VARIABLE, visible


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of it.

    Attributes:
        number: CUDA's: what `cuda:N` means in this process.
        torch_total, torch_free: bytes, as torch has them from CUDA.
        card: bytes, as NVML has them.
    """

    number: int
    name: str
    uuid: str | None
    pci_bus_id: str | None
    torch_total: Reading
    torch_free: Reading
    card: CardMemory


@dataclass(frozen=True, slots=True)
class Gpus:
    """Attributes:
    found: in CUDA's order.
    torch_reason: why torch uses none; None when it does.
    nvml_reason: why NVML lists none; None when it does.
    remark: what is to be said about the choice of cards: one hidden, an order that is not certain.
    """

    found: tuple[Gpu, ...]
    torch_reason: str | None
    nvml_reason: str | None
    remark: str | None


def gpus(*, cuda: Any = torch.cuda, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs of this process. Where torch uses none, those that it would use if it could, from the environment.

    Args:
        cuda: the `torch.cuda` namespace, or a fake one.
        nvml: pynvml, or a fake one.
    """
    listed, nvml_reason = cards(nvml)
    torch_reason = _torch_reason(cuda)
    seen = visible(listed, environ.get(VARIABLE), environ.get(ORDER))
    if torch_reason is None:
        known = {uuid for card in listed for uuid in (card.uuid, *card.instances)}
        found = tuple(_of_torch(cuda, number, nvml, known) for number in range(cuda.device_count()))
        # CUDA has decided on the order: there is nothing to doubt, but what it left out is worth a word.
        remark = seen.remark if len(found) < len(listed) else None
    else:
        found = tuple(_of_nvml(listed, uuid, i, torch_reason, nvml) for i, uuid in enumerate(seen.uuids))
        remark = seen.remark
    return Gpus(found, torch_reason, nvml_reason, remark)


def _torch_reason(cuda: Any) -> str | None:
    if cuda.is_available() and cuda.device_count():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no GPU that it can use"


def _of_torch(cuda: Any, number: int, nvml: Any, known: Set[str]) -> Gpu:
    """`known`: what NVML lists; it tells whether torch's UUID, without a prefix, is of a card or of an instance."""
    properties = cuda.get_device_properties(number)
    names = card_names(properties)
    uuids = [name for name in names if name.startswith(("GPU-", "MIG-"))]
    try:
        free_bytes, total_bytes = cuda.mem_get_info(number)
        free, total = Reading(int(free_bytes)), Reading(int(total_bytes))
    except RuntimeError as error:  # the GPU is full, lost or taken exclusively by another process
        free = total = Reading.missing(f"CUDA: {str(error).splitlines()[0]}")
    return Gpu(
        number=number,
        name=str(properties.name),
        uuid=next((name for name in uuids if name in known), uuids[0] if uuids else None),
        pci_bus_id=pci_bus_id(properties),
        torch_total=total,
        torch_free=free,
        card=card_memory(*names, module=nvml),
    )


def _of_nvml(listed: Sequence[Card], uuid: str, number: int, torch_reason: str, nvml: Any) -> Gpu:
    card = next(card for card in listed if uuid == card.uuid or uuid in card.instances)
    return Gpu(
        number=number,
        name=card.name,
        uuid=uuid,
        pci_bus_id=card.pci_bus_id,
        torch_total=Reading.missing(torch_reason),
        torch_free=Reading.missing(torch_reason),
        card=card_memory(uuid, module=nvml),
    )
