"""The store: knows where every backbone layer is, and lends it for as long as it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from river_offload.errors import RiverError
from river_offload.store.link import Link
from river_offload.store.pace import Pace
from river_offload.store.prefetcher import Prefetcher
from river_offload.store.slots import Slots
from river_offload.store.transfers import Transfers


class Store:
    """Resident layers are handed out as they are, streamed ones after their bytes came into a slot.

    A streamed layer that is still in a slot is not read again; what the other slots hold, and what comes next, the
    prefetcher sees to at every acquire.

    Args:
        backbone: the backbone layer modules by depth. A streamed one arrives without its weights.
        streamed: bytes that a fetch of each layer moves that rests off the device, by depth.
        slots: buffers for streamed layers; may be empty when nothing is streamed.
        link: fills slots; None when nothing is streamed.
        prefetcher: decides what the link does; None when nothing is streamed.

    Attributes:
        prefetcher: as given; another may take its place between passages.
        wait_s: seconds that computation stood still for layers.
        misses: layers that were asked for and not there.
        closed: no streamed layer can be had any more.
    """

    def __init__(
        self,
        backbone: Mapping[int, nn.Module],
        streamed: Mapping[int, int],
        slots: Slots,
        link: Link | None,
        prefetcher: Prefetcher | None,
    ) -> None:
        self._backbone = backbone
        self._streamed = streamed
        self._slots = slots
        self._link = link
        self._transfers = None if link is None else Transfers(streamed, len(slots), link)
        self.prefetcher = prefetcher
        self._lent: dict[int, int] = {}
        self.wait_s = 0.0
        self.misses = 0
        self.closed = False

    @property
    def bytes_streamed(self) -> int:
        """Bytes that arrived in slots, or got half-way."""
        return 0 if self._transfers is None else self._transfers.bytes_streamed

    @property
    def wasted_bytes(self) -> int:
        """Of those, what was overwritten before it was used, or called off half-way."""
        return 0 if self._transfers is None else self._transfers.wasted_bytes

    @property
    def copy_s(self) -> float:
        """Seconds in which the link was copying, whether or not anybody waited for it."""
        return 0.0 if self._link is None else self._link.moved()[1]

    @property
    def pace(self) -> Pace | None:
        """How long things take here, as learned so far; None when nothing is streamed."""
        return None if self.prefetcher is None else self.prefetcher.pace

    @property
    def abortable(self) -> bool:
        """Can a fetch that has started still be called off?"""
        return self._link is not None and self._link.abortable

    def present(self, depth: int) -> bool:
        """Can the layer at `depth` be had at once?"""
        return depth not in self._streamed or (self._transfers is not None and self._transfers.present(depth))

    @contextmanager
    def hold(self, depth: int) -> Iterator[nn.Module]:
        """The backbone layer at `depth`, its weights on the device until the block ends."""
        layer = self.acquire(depth)
        try:
            yield layer
        finally:
            self.release(depth)

    def acquire(self, depth: int) -> nn.Module:
        """Bring the layer in if it is not there and lend it. Raises LinkError when its bytes cannot be read."""
        layer = self._backbone[depth]
        if self._transfers is None or self.prefetcher is None:
            return layer
        if depth in self._streamed:
            if self.closed:
                raise RiverError(f"backbone layer {depth} was asked for after close(): load the model again")
            self.misses += not self.present(depth)
        if not self.closed:
            self.prefetcher.acquiring(depth, self._transfers)
        if depth in self._streamed:
            slot, waited_s = self._transfers.take(depth)
            self.wait_s += waited_s
            self._lent[depth] = slot
            _bind(layer, self._slots.parameters(depth, slot))
        self.prefetcher.acquired()
        return layer

    def release(self, depth: int) -> None:
        """The computation with the layer has been issued; its slot may be used anew."""
        if self._transfers is None or depth not in self._lent:
            return
        slot = self._lent[depth]
        unbind(self._backbone[depth], self._slots.parameters(depth, slot))
        if self._slots.poison_on_release:
            self._slots.poison(slot)
        self._transfers.release(slot, forget=self._slots.poison_on_release)
        del self._lent[depth]  # last: what an interrupt cuts short is done again by broken_off

    def foretell(self, depths: Sequence[int] | None) -> None:
        """The depths of the coming passages, where they are forced; None when they no longer are."""
        if self.prefetcher is not None:
            self.prefetcher.foretell(depths)

    def opened(self, new_tokens: int, margin: float | None, known_depth: int | None, tau: float | None) -> None:
        """A passage begins: its new tokens a row, the last token's margin, its depth if its mode fixes that, and the
        exit threshold, None where drafts and checks take turns."""
        if self.prefetcher is not None:
            self.prefetcher.opened(new_tokens, margin, known_depth, tau)

    def observed(self, layers_run: int, signal: float) -> None:
        """The exit signal after `layers_run` layers."""
        if self.prefetcher is not None:
            self.prefetcher.observed(layers_run, signal)

    def left(self, depth: int, *, censored: bool = False) -> None:
        """The passage ran `depth` backbone layers and needs no more; `censored`: it would have, had they been there."""
        if self.prefetcher is not None and self._transfers is not None and not self.closed:
            self.prefetcher.left(depth, self._transfers, censored=censored)

    def passed(self, river_layers: int) -> None:
        """The passage is over, after so many layers on the river."""
        if self.prefetcher is not None:
            self.prefetcher.closed(river_layers)

    @property
    def lends(self) -> bool:
        """Is a streamed layer lent, or its slot taken? Between passages none is."""
        return bool(self._lent) or (self._transfers is not None and bool(self._transfers.in_use))

    def broken_off(self) -> None:
        """The passage failed or was interrupted, at any point: take back what is lent, call off what is on its way."""
        for depth in tuple(self._lent):
            self.release(depth)
        if self._transfers is not None and not self.closed:
            self._transfers.reset()
        if self.prefetcher is not None:
            self.prefetcher.broken_off()

    def close(self) -> None:
        """Stop the link and forget the slots. May be called twice."""
        self.closed = True
        if self._link is not None:
            self._link.close()
        self._slots.clear()


def _bind(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        layer.get_submodule(module)._parameters[leaf] = parameter


def unbind(layer: nn.Module, names: Mapping[str, object]) -> None:
    """Off the device a layer has no weights at all: nobody can be handed another layer's bytes, or empty ones."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        layer.get_submodule(module)._parameters[leaf] = None
