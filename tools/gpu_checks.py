"""The checks of `check_gpu.py`. Each returns its figures, or raises Failed, Skipped or whatever goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from gpu_ground import (
    ENOUGH_OVERLAP,
    FAMILIES,
    MODE_STEPS,
    SMALL,
    TABLE,
    TOKENS,
    Failed,
    Result,
    Rig,
    Skipped,
    closing,
    collect,
    elapsed_s,
    find,
    generated,
    held_bytes,
    highest_bytes,
    large_options,
    link_of,
    mode_logits,
    pinned_by_torch,
    poison,
    prompt_ids,
    step_logits,
    stretched,
    write_checkpoint,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

import river_offload
from policies.depths import parse_depths
from river_offload.errors import RiverError
from river_offload.eval.bench import measure
from river_offload.eval.ceilings import Span, disk_read_rate, host_to_device_rate, memory_read_rate
from river_offload.eval.request import Request, forced_depths
from river_offload.quant.hqq import quantize_matrix
from river_offload.quant.packing import dequantize
from river_offload.store.tiers import HostTier

EDGES = {"copy done before compute reads": "wait", "compute done before copy overwrites": "release"}
"""Each edge of a slot's reuse, and the method of the link that keeps it."""


def ceilings(rig: Rig) -> Result:
    """Rates of the machine, before anything else runs."""
    file = rig.models["small"] / "model.safetensors"
    large = rig.models.get("large")
    if large is not None:
        file = large / "model.safetensors"
    disk = disk_read_rate([Span(file, 0, file.stat().st_size)], max_bytes=4 << 30, max_s=5.0)
    rates: Result = {
        "memory_read_bytes_per_s": memory_read_rate(rig.device),
        "disk_bytes_per_s": disk.bytes_per_s,
        "disk_direct": disk.direct,
    }
    if rig.cuda:
        rates["pinned_bytes_per_s"] = host_to_device_rate(rig.device, pinned=True)
        rates["pageable_bytes_per_s"] = host_to_device_rate(rig.device, pinned=False)
    return rates


def quantization(rig: Rig) -> Result:
    """HQQ on this device, and each kernel's product against the dequantized one."""
    from river_offload.quant.kernels import MatrixSpec, choose
    from river_offload.quant.linear import RiverLinear

    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(2)).to(rig.device, torch.bfloat16)
    matrix = quantize_matrix(weight, 4, 64)
    choice = choose(MatrixSpec(256, 512, 4, 64, torch.bfloat16, rig.device.type))
    linear = RiverLinear.from_matrix(matrix, dtype=torch.bfloat16, device=rig.device, kernel=choice.kernel)
    errors = {}
    for rows in (1, 5, 64):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3)).to(rig.device, torch.bfloat16)
        wanted = x.float() @ dequantize(matrix).to(rig.device).T
        errors[str(rows)] = ((linear(x).float() - wanted).abs().max() / wanted.abs().max()).item()
    found: Result = {"kernel": choice.kernel.name, "declined": dict(choice.declined), "relative_error": errors}
    found["hqq"] = "installed" if find_spec("hqq") else "not installed: rounding to nearest everywhere"
    if max(errors.values()) > 0.02:
        raise Failed("the kernel's product is off the dequantized one by more than 2 %", **found)
    return found


def bit_equality(rig: Rig) -> Result:
    """Streamed against resident in every mode, and mode backbone against transformers, bit for bit."""
    ids = prompt_ids(rig, 12)
    found: Result = {}
    for name in FAMILIES:
        folder = rig.models["small"] if name == FAMILIES[0] else None
        if folder is None:
            folder = write_checkpoint(rig.folder / name, name, 0.08, **SMALL)
        options = {"mode": "exit", "tau": 0.6, "also_modes": ("backbone", "quantized")}
        budget = rig.budget(folder, 2, **options)
        with (
            closing(rig.load(folder, budget=budget, **options)) as streamed,
            closing(rig.load(folder, budget="1GiB", **options)) as resident,
        ):
            layers = len(streamed.river.placement.streamed_layers)
            for mode in ("backbone", "exit", "fixed:3", "quantized"):
                pair = [mode_logits(model, ids, mode) for model in (streamed, resident)]
                if not all(torch.equal(*steps) for steps in zip(*pair, strict=True)):
                    raise Failed(f"{name}: streamed and resident differ in mode {mode}", **found)
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(rig.device).eval()
            own = mode_logits(resident, ids, "backbone")
            difference = max(
                (a - b).abs().max().item() for a, b in zip(own, step_logits(plain, ids, MODE_STEPS), strict=True)
            )
            found[name] = {"streamed_layers": layers, "resident_layers": 8 - layers, "modes": 4, "steps": len(own),
                           "largest_difference_to_transformers": difference}  # fmt: skip
            # A GPU's matrix library may choose another algorithm for weights that start elsewhere in memory.
            if difference > (0.05 if rig.cuda else 0.0):
                raise Failed(f"{name}: mode backbone is not what transformers computes", **found)
            del plain
    return found


def link_conformance(rig: Rig) -> Result:
    """Copies and computation stretched on purpose, released slots poisoned: the output must stay that of the resident
    model. Then each edge is taken away: the output must change, or the check could not have found anything."""
    folder, ids = rig.models["small"], prompt_ids(rig, 8)
    options: dict[str, Any] = {"mode": "exit", "also_modes": ("backbone",)}
    depths = ([8, 2, 8, 1, 5, 8], [3, 8, 8, 4, 7, 8], [1, 1, 8, 2, 6, 3])
    with closing(rig.load(folder, budget="1GiB", **options)) as resident:
        wanted = [generated(resident, ids, forced) for forced in depths]
    runs = 0
    found: Result = {"slots": [], "changed_without": {}}
    for slots in (1, 2, 3, 5):
        budget = rig.budget(folder, 1, slots=slots, **options)
        with closing(rig.load(folder, budget=budget, slots=slots, **options)) as model:
            poison(model)
            streamed = len(model.river.placement.streamed_layers)
            found["link"] = type(link_of(model)).__name__
            found["slots"].append({"slots": model.river.placement.slots, "streamed_layers": streamed})
            for copies, computes in ((True, False), (False, True), (True, True)):
                for forced, answer in zip(depths, wanted, strict=True):
                    with stretched(rig, model, copies=copies, computes=computes):
                        same = torch.equal(generated(model, ids, forced), answer)
                    runs += 1
                    if not same:
                        raise Failed(f"{slots} slots, copies {copies}, computation {computes}, {forced}: other logits")
    found["runs"] = runs
    for edge, method in EDGES.items():
        found["changed_without"][edge] = _without_edge(rig, method, ids, depths[0], wanted[0], options)
    unseen = [edge for edge in _edges_that_show(rig, found["link"]) if not found["changed_without"][edge]]
    if unseen:
        raise Failed(f"without the edge {unseen[0]!r} nothing changed: this check could not have found it", **found)
    return found


def pinned_exactness(rig: Rig) -> Result:
    """Host copies of the layers: page-locked, and no byte more than the layers have, up to a page each."""
    if not rig.cuda:
        raise Skipped("pinned memory needs a GPU")
    folder = rig.models["small"]
    before = pinned_by_torch()
    with closing(rig.load(folder, budget=rig.budget(folder, 1), mode="exit")) as model:
        host = find(model.river._flow, HostTier)
        if host is None:
            raise Skipped("the store keeps no HostTier")
        streamed = model.river.placement.streamed_layers
        # With a host budget some layers stay on disk and have no buffer.
        buffers = [buffer for layer in streamed if (buffer := host.buffer(layer)) is not None]
        wanted = sum(buffer.nbytes for buffer in buffers)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffers}
        held = sum(storages.values())
        found = {"layers": len(streamed), "layer_bytes": wanted, "held_bytes": held,
                 "pinned": sum(buffer.is_pinned() for buffer in buffers),
                 "rounded_by_torch_bytes": max(pinned_by_torch() - before - wanted, 0)}  # fmt: skip
        if found["pinned"] < len(buffers):
            raise Failed("not every host copy is page-locked", **found)
        if max(held - wanted, found["rounded_by_torch_bytes"]) > 4096 * len(buffers):
            raise Failed("host copies take more than their bytes", **found)
        return found


def overlap(rig: Rig) -> Result:
    """Copies beside computation, measured with events on a GPU: the share of the shorter of the two that was hidden."""
    folder = rig.models.get("large", rig.models["small"])
    options = large_options(rig, folder)
    with closing(rig.load(folder, **options)) as model:
        link = link_of(model)
        streamed = list(model.river.placement.streamed_layers)[:8]
        slots = model.river.placement.slots
        if len(streamed) < 3 or slots < 2:
            raise Skipped(f"{len(streamed)} streamed layers and {slots} slots: two copies cannot be in flight")
        size = 4096 if rig.cuda else 512
        matrix, product = torch.ones(2, size, size, dtype=torch.bfloat16, device=rig.device)

        def copies() -> None:
            for index, layer in enumerate(streamed):
                link.fetch(layer, index % 2)
                link.wait(index % 2)
                link.release(index % 2)

        copy_s = elapsed_s(rig, copies)
        one_s = elapsed_s(rig, lambda: [torch.mm(matrix, matrix, out=product) for _ in range(8)]) / 8
        products = max(round(copy_s / len(streamed) / one_s), 1)  # computation of a layer takes as long as its copy

        def computes() -> Any:
            return [torch.mm(matrix, matrix, out=product) for _ in range(products)]

        def both() -> None:
            link.fetch(streamed[0], 0)
            for index in range(len(streamed)):
                if index + 1 < len(streamed):
                    link.fetch(streamed[index + 1], (index + 1) % 2)
                link.wait(index % 2)
                computes()
                link.release(index % 2)

        compute_s = elapsed_s(rig, lambda: [computes() for _ in streamed])
        both_s = elapsed_s(rig, both)
        hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
        layer_bytes = model.river.placement.slot_bytes
        found = {"layers": len(streamed), "copy_s": copy_s, "compute_s": compute_s, "both_s": both_s,
                 "hidden_share": hidden, "copy_bytes_per_s": len(streamed) * layer_bytes / copy_s}  # fmt: skip
        if rig.cuda and hidden < ENOUGH_OVERLAP:
            raise Failed(f"less than {ENOUGH_OVERLAP:.0%} of the shorter one was hidden", **found)
        return found


def peak_memory(rig: Rig) -> Result:
    """What the plan promised against what the allocator saw, while loading and while generating."""
    folder = rig.models.get("large", rig.models["small"])
    options = large_options(rig, folder)
    collect(rig)
    before = held_bytes(rig)
    with closing(rig.load(folder, **options)) as model:
        placement, loaded = model.river.placement, highest_bytes(rig)
        if rig.cuda:
            torch.cuda.reset_peak_memory_stats(rig.device)
        model.generate(prompt_ids(rig, 384), max_new_tokens=8, do_sample=False)
        found = {
            "budget_bytes": placement.budget_bytes,
            "planned_bytes": placement.planned_bytes,
            "terms": dict(placement.terms),
            "counted_peak_bytes": model.river.report()["peak_device_bytes"],
            "held_bytes": held_bytes(rig) - before,
            "load_peak_bytes": None if loaded is None else loaded - before,
            "generate_peak_bytes": None if (highest := highest_bytes(rig)) is None else highest - before,
            "measured": "allocated by torch on the GPU" if rig.cuda else "anonymous memory of the process, no peaks",
        }
        if found["counted_peak_bytes"] > placement.budget_bytes:
            raise Failed("the storages held more than the budget", **found)
        if rig.cuda and found["generate_peak_bytes"] > placement.budget_bytes:
            raise Failed("the allocator held more than the budget", **found)
        return found


def tokens_per_s(rig: Rig) -> Result:
    """A table of speed: modes and forced depths, for each kind of prefetch that this version has."""
    folder = rig.models.get("large", rig.models["small"])
    rows: list[Result] = []
    kinds: tuple[str | None, ...] = (None,)
    if "prefetch" in inspect.signature(river_offload.load).parameters:
        kinds = ("next", "none", "predicted")
    found: Result = {"model": folder.name if folder.name == "small" else rig.large, "rows": rows}
    for kind in kinds:
        if rows and rig.left_s() < 60:
            found["left_out"] = f"no time for prefetch {kind}"
            break
        extra = {} if kind is None else {"prefetch": kind}
        with closing(rig.load(folder, **large_options(rig, folder), **extra)) as model:
            found["placement"] = {"resident_layers": len(model.river.placement.resident_layers),
                                  "streamed_layers": len(model.river.placement.streamed_layers),
                                  "slots": model.river.placement.slots}  # fmt: skip
            rows += [_row(rig, model, mode, depths) | {"prefetch": kind} for mode, depths in TABLE]
    return found


def _row(rig: Rig, model: Any, mode: str, depths: str | None) -> Result:
    request = Request(
        TOKENS[rig.device.type], prompt_tokens=32, depths=None if depths is None else parse_depths(depths)
    )
    forced = forced_depths(request, model.river.num_layers, model.river.min_exit)
    with model.river.using() if forced is not None else model.river.using(mode=mode):
        run = measure(model, request, forced)
    nbytes = sum(record.bytes_streamed for record in run.records)
    return {
        "mode": mode,
        "depths": depths,
        "tokens_per_s": len(run.records) / run.seconds,
        "mean_depth": sum(record.depth for record in run.records) / len(run.records),
        "bytes_per_token": nbytes / len(run.records),
        "link_bytes_per_s": nbytes / run.seconds,
        "stall_s": sum(record.wait_s for record in run.records),
        "prefill_s": run.prefill_s,
    }


def _edges_that_show(rig: Rig, link: str) -> tuple[str, ...]:
    """The edges that a link needs calls for: on a CPU compute is done when its call returns, and a link that does not
    read ahead in threads waits as it fetches."""
    copied, computed = EDGES
    if rig.cuda:
        return copied, computed
    return (copied,) if find_spec("river_offload.store.reader") and link == "CpuLink" else ()


def _without_edge(
    rig: Rig, method: str, ids: Tensor, forced: list[int], wanted: Tensor, options: dict[str, Any]
) -> bool:
    """Whether the output shows that the link does not keep this edge any more."""
    folder = rig.models["small"]
    with closing(rig.load(folder, budget=rig.budget(folder, 1, **options), **options)) as model:
        poison(model)
        setattr(link_of(model), method, lambda *_, **__: 0.0)
        try:
            with stretched(rig, model, copies=method == "wait", computes=method == "release"):
                return not torch.equal(generated(model, ids, forced), wanted)
        except (RiverError, RuntimeError, AssertionError):
            return True  # garbage in the states may show as an error first


CHECKS: tuple[Callable[[Rig], Result], ...] = (
    ceilings, quantization, bit_equality, link_conformance, pinned_exactness, overlap, peak_memory, tokens_per_s,
)  # fmt: skip
