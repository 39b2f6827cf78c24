"""Slots: flat device buffers, each holding one streamed backbone layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from river_offload.errors import RiverError
from river_offload.store.layout import Layout, aligned_empty


class Slots:
    """The buffers and the ready-made parameters that view them.

    Args:
        count: number of slots.
        layouts: one layout per layer of the model, None for a layer that is never streamed.
        device: where compute runs.
        poison: fill a slot with NaN when it is released, so that a read without its edge shows in the output (tests).

    Raises RiverError when the device has no memory for them.
    """

    def __init__(
        self, count: int, layouts: Sequence[Layout | None], device: torch.device, *, poison: bool = False
    ) -> None:
        self.slot_bytes = max((layout.nbytes for layout in layouts if layout), default=0)
        self.buffers: list[torch.Tensor] = []
        for index in range(count):
            try:
                self.buffers.append(aligned_empty(self.slot_bytes, device))
            except (RuntimeError, MemoryError) as error:  # torch has no error of its own for this on a CPU
                raise RiverError(
                    f"slot {index + 1} of {count} ({self.slot_bytes} bytes) cannot be allocated on {device}: something "
                    "else took the memory. Give a smaller budget, or fewer slots."
                ) from error
        self.poison_on_release = poison
        self._layouts = layouts
        self._parameters: dict[tuple[Layout, int], dict[str, torch.nn.Parameter]] = {}

    def __len__(self) -> int:
        return len(self.buffers)

    def parameters(self, layer: int, slot: int) -> dict[str, torch.nn.Parameter]:
        """The layer's tensors as frozen parameters over the slot's bytes. Layers of one layout share them."""
        layout = self._layouts[layer]
        assert layout is not None, f"layer {layer} is resident, it has no slot"
        key = (layout, slot)
        if key not in self._parameters:
            self._parameters[key] = {
                name: torch.nn.Parameter(view, requires_grad=False)
                for name, view in layout.views(self.buffers[slot]).items()
            }
        return self._parameters[key]

    def poison(self, slot: int) -> None:
        """All bits set: NaN in every floating dtype."""
        self.buffers[slot].fill_(0xFF)

    def clear(self) -> None:
        """Give the memory back: the buffers, and the parameters that view them."""
        self.buffers.clear()
        self._parameters.clear()
