"""The one place where everything is wired: a model's structure and a Placement become a running model.

The same code runs on real tensors (`load`) and on fake ones (the dry run of the plan): only the parts differ.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from policies.exit import ExitRule
from policies.prefill import PrefillRule
from policies.types import Placement
from river_offload.attention import deferred_masks
from river_offload.call import Call
from river_offload.chunks import token_wise
from river_offload.errors import UsageError
from river_offload.kv.cache import SharedCache
from river_offload.kv.memory import Allocate
from river_offload.layer import RiverLayer
from river_offload.one_token import OneToken
from river_offload.passage import Flow, OnMiss
from river_offload.store.link import Link
from river_offload.store.prefetcher import Prefetcher
from river_offload.store.slots import Slots
from river_offload.store.store import Store, unbind
from river_offload.structure import Structure
from river_offload.trace import Trace


class Parts(Protocol):
    """Where the tensors come from: a checkpoint, or thin air. All are asked for in the order of the layers."""

    def outside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor outside the layers, by its full name, on the compute device."""

    def away_embedding(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The input embedding's weight where it rests off the device: a CPU tensor."""

    def quantized_head(self, head: nn.Linear) -> nn.Module | None:
        """What takes the place of an LM head that is to be quantized; None when it stays as it is."""

    def norms(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Norms and the rest of a layer, by name inside it, on the compute device: both copies share them."""

    def linears(self, layer: int, *, resident: bool, river: nn.Module | None) -> Mapping[str, torch.Tensor]:
        """Full-precision weights of the layer's linears, by name inside it, on the compute device, if `resident`.

        `river` is a copy of the layer without weights: its linears are replaced by quantized ones here, so that a
        layer's bytes are read once, used for both, and dropped.
        """


def assemble(
    structure: Structure,
    placement: Placement,
    parts: Parts,
    *,
    rule: ExitRule,
    trace: Trace,
    device: torch.device,
    slots: Slots,
    link: Link | None,
    streamed_bytes: Mapping[int, int],
    prefetcher: Prefetcher | None,
    on_miss: OnMiss = "wait",
    prefill: PrefillRule | None = None,
    states_memory: Allocate | None = None,
) -> Flow:
    """Fill `structure.model` in place and put a RiverLayer at every depth; returns the flow its passages go through.

    Args:
        streamed_bytes: bytes that a fetch of each streamed layer moves.
        slots, link: what streamed layers come through; an empty Slots and None when nothing is streamed.
        prefetcher: decides what the link does; None when nothing is streamed.
        on_miss: what a passage does about a layer that is not there.
        prefill: whether prompts may leave the backbone in mode `exit`; they may when not given.
        states_memory: where the states of long prompts rest between the layers; None for the device.
    """
    _place_outside(structure, placement, parts, device)
    backbone: dict[int, nn.Module] = {}
    river: dict[int, nn.Module] = {}
    needed = {*placement.resident_layers, *placement.streamed_layers}
    for depth in range(structure.num_layers):
        layer = structure.layers[depth]
        _set_tensors(layer, parts.norms(depth))
        _move_buffers(layer, device)
        river_layer = _copy_sharing_norms(layer) if depth in placement.river_layers else None
        weights = parts.linears(depth, resident=depth in placement.resident_layers, river=river_layer)
        unbind(layer, structure.weight_shapes(depth))
        _set_tensors(layer, weights)
        if river_layer is not None:
            river[depth] = river_layer
        if depth in needed:
            backbone[depth] = layer
    store = Store(backbone, streamed_bytes, slots, link, prefetcher)
    flow = Flow(
        rule,
        store,
        trace,
        on_miss=on_miss,
        prefill=prefill,
        prefill_chunk=placement.prefill_chunk,
        device=device,
        states_memory=states_memory,
    )
    for depth in range(structure.num_layers):
        river_layer = river.get(depth)
        one_token = "there is no river" if river_layer is None else OneToken.of(river_layer)
        structure.layers[depth] = RiverLayer(depth, backbone.get(depth), river_layer, flow, one_token)
    _connect(structure, flow)
    return flow


def _connect(structure: Structure, flow: Flow) -> None:
    """Have everything of the model outside its layers go by the passages of `flow`, too."""
    _follow_passages(structure, flow)
    _read_in_chunks(structure, flow)
    if flow.device.type != "cpu" and flow.states_memory is not None:
        _show_what_is_on_the_device(structure, flow.device)
    _pack_head_input(structure.model, flow.device)
    _hear_the_head(structure.model, flow)


class AwayEmbedding(nn.Module):
    """An input embedding that rests off the device: rows are looked up where they are and sent over.

    The table may be in the checkpoint's dtype; only the rows in use are converted. The wrapped module, which may scale
    them, is no registered child, so `model.device` stays the device of everything else.
    """

    def __init__(self, embedding: nn.Embedding, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._held = (embedding,)
        self._device = device
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [batch, tokens] on any device -> states [batch, tokens, hidden] on the compute device."""
        embedding = self._held[0]
        used, places = input_ids.cpu().unique(return_inverse=True)
        rows = {"weight": embedding.weight[used].to(self._dtype)}
        states: torch.Tensor = torch.func.functional_call(embedding, rows, (places,))
        return states.to(self._device, non_blocking=True)

    @property
    def weight(self) -> torch.Tensor:
        """The table, on the tier where it rests."""
        return self._held[0].weight


def _place_outside(structure: Structure, placement: Placement, parts: Parts, device: torch.device) -> None:
    """Embedding, final norm, head and buffers. A tied name gets the very parameter it is tied to."""
    model, away = structure.model, placement.embed_tier != "device"
    dtype = model.dtype  # before an embedding that rests in the checkpoint's dtype answers for the model
    quantized_head = parts.quantized_head(structure.head)
    for name, shape in structure.outside().items():
        if name in structure.tied or (quantized_head is not None and name == structure.head_name):
            continue
        if away and name == structure.embedding_name:
            _set_tensors(model, {name: parts.away_embedding(name, shape)})
        else:
            _set_tensors(model, {name: parts.outside(name, shape)})
    for name, target in structure.tied.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._parameters[leaf] = model.get_parameter(target)
    embedding = model.get_input_embeddings()
    for module in structure.model.modules():
        inside_layers = any(module is layer for layer in structure.layers)
        if not inside_layers and not (away and module is embedding):
            _move_buffers(module, device, recurse=False)
    if away:
        embedding.padding_idx = None  # means nothing without training, and counts rows of the whole table
        model.set_input_embeddings(AwayEmbedding(embedding, device, dtype))
    if quantized_head is not None:
        model.set_output_embeddings(quantized_head)


def _copy_sharing_norms(layer: nn.Module) -> nn.Module:
    """A copy of the layer that has the very same parameters and config: norms stay shared, linears will be replaced."""
    shared = [*layer.parameters(), *layer.buffers(), *(m.config for m in layer.modules() if hasattr(m, "config"))]
    return copy.deepcopy(layer, memo={id(thing): thing for thing in shared})


def _set_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give parameters and buffers their tensors, by name below `module`."""
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor
        else:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _move_buffers(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Buffers that no checkpoint stores were computed on the CPU when the structure was built."""
    for child in module.modules() if recurse else [module]:
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)


def _follow_passages(structure: Structure, flow: Flow) -> None:
    """Make every call of the decoder one passage, closed whichever way the call ends.

    A call that fails or is interrupted leaves the shared cache as it found it: else its layers would differ in length.
    """
    decoder = structure.decoder
    plain = decoder.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        before = call.cache.mark() if isinstance(call.cache, SharedCache) else None
        completed = False
        if not flow.lock.acquire(blocking=False):
            raise UsageError("this model runs in another thread: one forward pass, and one generate, at a time")
        try:
            passage = flow.open(call)
            with _cut(structure.decoder, kwargs) if passage.in_chunks else contextlib.nullcontext():
                output = plain(*args, **kwargs)
            completed = True
            return output
        finally:
            if not completed and before is not None:
                assert isinstance(call.cache, SharedCache)
                call.cache.back_to(before)
            flow.close(completed=completed)
            flow.lock.release()

    decoder.forward = forward


def _cut(decoder: PreTrainedModel, kwargs: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """What a passage in chunks runs in. Raises UsageError for outputs that would come in pieces."""
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name) or getattr(decoder.config, name, False):
            raise UsageError(f"{name} is not possible for a prompt that is read in chunks: give a shorter one")
    return deferred_masks(decoder)


def _read_in_chunks(structure: Structure, flow: Flow) -> None:
    """Of a long prompt the embedding and the final norm, too, work on one chunk of tokens at a time."""
    model = structure.model
    _make_token_wise(model.get_input_embeddings(), flow, in_place=False)
    shapes = structure.outside()
    for name in shapes:
        owner = model.get_submodule(name.rpartition(".")[0])
        dimensions = {parameter.ndim for parameter in owner.parameters()}
        if dimensions == {1}:  # a norm
            _make_token_wise(owner, flow, in_place=True)


def _make_token_wise(module: nn.Module, flow: Flow, *, in_place: bool) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if not flow.in_chunks:
            return plain(tokens)
        spans = flow.spans(None, tokens.shape[1])
        if in_place:
            return token_wise(lambda part: plain(flow.on_device(part)), tokens, spans, tokens)
        return token_wise(plain, tokens, spans, allocate=flow.resting)

    module.forward = forward


def _show_what_is_on_the_device(structure: Structure, device: torch.device) -> None:
    """Rotary tables ask the states of a prompt where they are and of what kind, no more: with states that rest on the
    host they are shown a stand-in of a single number on the device, and positions that were made beside them are sent.
    """
    embedding = structure.model.get_input_embeddings()

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return value.new_empty((), device=device).expand(value.shape) if value.is_floating_point() else value.to(device)

    def show(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(moved, args), tree_map(moved, kwargs)

    for child in structure.decoder.children():
        if not isinstance(child, nn.ModuleList) and child is not embedding and not list(child.parameters()):
            child.register_forward_pre_hook(show, with_kwargs=True)


def _pack_head_input(model: nn.Module, device: torch.device) -> None:
    """Give the head states with ordinary strides.

    Transformers hands it the last position as a slice. For that, oneDNN copies the whole bfloat16 weight into another
    order first: a gibibyte of hidden working memory for the head of an 8B model.
    """

    def pack(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].to(device, copy=True, memory_format=torch.contiguous_format), *args[1:])

    model.get_output_embeddings().register_forward_pre_hook(pack)  # type: ignore[operator]


def _hear_the_head(model: nn.Module, flow: Flow) -> None:
    """Tell the flow how sure the model is of its next token: what the next passage's depth is guessed from."""

    def spoke(_: nn.Module, __: object, logits: torch.Tensor) -> None:
        flow.spoke(logits)

    model.get_output_embeddings().register_forward_hook(spoke)  # type: ignore[operator]
