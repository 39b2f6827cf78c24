"""The parts of a model out of a checkpoint, one layer at a time: read, quantize into the river, place, drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from policies.types import Placement
from river_offload.checkpoint.safetensors_files import Checkpoint
from river_offload.progress import Progress
from river_offload.quant import native
from river_offload.quant.cache import RiverCache
from river_offload.quant.precision import Precision
from river_offload.quant.river import State, linear_names, quantize_layer
from river_offload.store.layout import Layout, aligned_empty
from river_offload.store.tiers import DiskTier
from river_offload.structure import Structure


class CheckpointParts:
    """`assemble.Parts` from files.

    Args:
        keys: the model's names -> the checkpoint's.
        disk: reads a layer's linears into one flat buffer.
        native_dir: where our C code is built, which quantizes where it can be had.
        cache, head_cache: the river and the quantized LM head built before; what is missing there is built and written.
    """

    def __init__(
        self,
        structure: Structure,
        placement: Placement,
        checkpoint: Checkpoint,
        keys: Mapping[str, str],
        disk: DiskTier,
        cache: RiverCache,
        head_cache: RiverCache,
        precision: Precision,
        *,
        native_dir: Path,
        device: torch.device,
        progress: Progress,
        label: str,
    ) -> None:
        self._structure = structure
        self._placement = placement
        self._checkpoint = checkpoint
        self._keys = keys
        self._disk = disk
        self._cache = cache
        self._head_cache = head_cache
        self._precision = precision
        self._native_dir = native_dir
        self._device = device
        self._progress = progress
        progress.start(label, structure.num_layers, "layers")

    def outside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.read(self._keys[name]).to(self._device, self._precision.dtype)

    def away_embedding(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Mapped from its file: the kernel keeps the rows in use, and none of it is ours."""
        return self._checkpoint.mmap_tensor(self._keys[name])

    def quantized_head(self, head: nn.Linear) -> nn.Module | None:
        if self._precision.head_bits == 16:
            return None
        state = self._head_cache.read_layer(0)
        if state is None:
            name = self._structure.head_name.removesuffix(".weight")
            tensors = {
                f"head.{leaf}": self._checkpoint.read(self._keys[f"{name}.{leaf}"])
                for leaf, _ in head.named_parameters()
            }
            state = self._quantized(tensors, ["head"], self._precision.head_bits)
            self._head_cache.write_layer(0, state)
        return self._precision.quantized_head(head, state, self._device)

    def norms(self, layer: int) -> Mapping[str, torch.Tensor]:
        return {
            name: self.outside(self._structure.full_name(layer, name), shape)
            for name, shape in self._structure.norm_shapes(layer).items()
        }

    def linears(self, layer: int, *, resident: bool, river: nn.Module | None) -> Mapping[str, torch.Tensor]:
        state = self._cache.read_layer(layer) if river is not None else None
        if river is not None and state is None:
            # From the dtype on disk and on the CPU: one river whatever the model computes in, and where.
            names = linear_names(river)
            state = self._quantized(self._stored(layer), names, self._precision.bits)
            self._cache.write_layer(layer, state)
        if river is not None and state is not None:
            self._precision.install(river, state, self._device)
        weights = self._resident(layer) if resident else {}
        self._progress.advance(1)
        if layer == self._structure.num_layers - 1:
            self._progress.finish()
        return weights

    def _quantized(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], bits: int) -> State:
        """Only here is the C code asked for: a river that is built already needs no compiler."""
        return quantize_layer(tensors, names, bits, self._precision.group, native.load(self._native_dir))

    def _stored(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's linears as the checkpoint has them."""
        names = self._structure.weight_shapes(layer)
        return {name: self._checkpoint.read(self._keys[self._structure.full_name(layer, name)]) for name in names}

    def _resident(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's linears on the compute device, as views of one buffer laid out like a slot."""
        layout = Layout.of(self._structure.weight_shapes(layer), self._precision.dtype)
        buffer = aligned_empty(layout.nbytes, "cpu")
        self._disk.read(layer, buffer)
        return layout.views(buffer.to(self._device))
