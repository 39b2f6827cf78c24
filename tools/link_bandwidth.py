"""Measures the machine at hand and writes its profile for the simulator (policies/profiles.py).

    python tools/link_bandwidth.py [--file WEIGHTS] [--device auto] [--name NAME] [--out mine.toml]

Disk reads go past the page cache, through the file given (a large one, on the disk that holds the models) or one of
2 GiB that is written for the purpose and removed. Nothing else should be running: what is measured is the best of
several rounds, but a busy machine has no good round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn

from policies.profiles import HardwareProfile, to_toml
from river_offload.errors import RiverError, UsageError
from river_offload.eval.ceilings import READERS, Span, disk_read_rate, host_to_device_rate, memory_read_rate
from river_offload.quant.kernels import MatrixSpec
from river_offload.quant.linear import RiverLinear

SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
"""The matrices [outputs, inputs] of a Llama-3.1-8B layer: 416 MiB in 16 bits, beyond any cache."""
ROWS = {"cpu": 256, "cuda": 4096}
"""Tokens of the product that measures operations per second: enough for the weights not to count."""
ROUNDS = 9
SMALL_READS = 32
SCRATCH_BYTES = 2 << 30

Measured = tuple[HardwareProfile, dict[str, str]]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, write the profile, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--file", type=Path, help="a large file on the disk to be measured, such as a checkpoint's")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--name", help="of the profile; else that of the processor or GPU")
    parser.add_argument("--out", type=Path, help="a new .toml file; else the profile is printed")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None and (options.out.exists() or options.out.suffix != ".toml"):
            raise UsageError(f"--out {options.out}: expected the name of a new .toml file")
        busy, cores = os.getloadavg()[0], os.cpu_count() or 1
        if busy > cores / 4:
            print(f"a load of {busy:.1f} on {cores} cores: the rates will come out low", file=sys.stderr)
        with torch.inference_mode():
            profile, sources = measure(_device(options.device), options.file, options.name)
        text = to_toml(profile, sources)
        if options.out is None:
            print(text, end="")
        else:
            _write_new(options.out, text)
            print(options.out)
    except RiverError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


def measure(
    device: torch.device,
    file: Path | None = None,
    name: str | None = None,
    *,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Measured:
    """The profile of this machine with `device` computing, and where each figure comes from."""
    cuda = device.type == "cuda"
    memory = memory_read_rate(device)
    with _disk_file(file, scratch_bytes) as path:
        disk = disk_read_rate([Span(path, 0, path.stat().st_size)], max_bytes=scratch_bytes)
        latency_s = _small_read_s(path)
    backbone, backbone_kernel = _one_token_rate(_dense(shapes, device), device)
    river, river_kernel = _one_token_rate(_quantized(shapes, device), device)
    rows = ROWS[device.type]
    flops = _flops(shapes[-1], rows, device)
    pinned = pageable = 0.0
    if cuda:
        pinned, pageable = (host_to_device_rate(device, pinned=kind) for kind in (True, False))
        latency_s = _small_copy_s(device)
    way = "O_DIRECT" if disk.direct else "page cache dropped"
    measured = f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads"
    profile = HardwareProfile(
        name=name or _machine(device),
        device_memory_bytes=_memory_bytes(device),
        memory_bytes_per_s=round(memory),
        compute_flops=float(f"{flops:.3g}"),
        backbone_read_efficiency=_share(backbone, memory),
        river_read_efficiency=_share(river, memory),
        pinned_bytes_per_s=round(pinned),
        pageable_bytes_per_s=round(pageable),
        disk_bytes_per_s=round(disk.bytes_per_s),
        link_latency_s=float(f"{latency_s:.2g}"),
    )
    no_way = "the CPU computes where the bytes are read to"
    sources = {
        "device_memory_bytes": "as the driver says" if cuda else "as the system says",
        "memory_bytes_per_s": f"{measured}: the best of several reads of 512 MiB in order",
        "compute_flops": f"{measured}: {rows} rows by {shapes[-1][0]}x{shapes[-1][1]} in bfloat16",
        "backbone_read_efficiency": f"{measured}: one token through {_names(shapes)}, {backbone_kernel}, "
        f"{backbone / 1e9:.1f} GB/s",
        "river_read_efficiency": f"{measured}: the same in 4 bits, groups of 64, {river_kernel}, "
        f"{river / 1e9:.1f} GB/s",
        "pinned_bytes_per_s": f"{measured}: copies of 256 MiB" if cuda else no_way,
        "pageable_bytes_per_s": f"{measured}: the same from ordinary memory" if cuda else no_way,
        "disk_bytes_per_s": f"measured: {disk.nbytes} bytes in order, {READERS} readers, {way}",
        "link_latency_s": "measured: median of small copies, one at a time"
        if cuda
        else f"measured: median of {SMALL_READS} reads of a sector, one at a time",
    }
    return profile, sources


@contextmanager
def _disk_file(file: Path | None, scratch_bytes: int) -> Iterator[Path]:
    """The file given, or one of random bytes that goes away again."""
    if file is not None:
        if not file.is_file():
            raise UsageError(f"--file {file}: expected a file, a large one")
        yield file
        return
    block = os.urandom(16 << 20)
    with tempfile.NamedTemporaryFile(prefix="link-bandwidth-", dir=Path.cwd()) as scratch:
        for _ in range(max(scratch_bytes // len(block), 1)):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        yield Path(scratch.name)


def _small_read_s(path: Path) -> float:
    """Median seconds of one sector, at places spread over the file: threads, request and answer included."""
    size = path.stat().st_size
    places = (size // SMALL_READS * index // 4096 * 4096 for index in range(SMALL_READS))
    return statistics.median(disk_read_rate([Span(path, place, 4096)], readers=1).seconds for place in places)


def _small_copy_s(device: torch.device) -> float:
    host = torch.ones(4096, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(4096, dtype=torch.uint8, device=device)
    return _median_s(lambda: target.copy_(host, non_blocking=True), device)


def _dense(shapes: tuple[tuple[int, int], ...], device: torch.device) -> list[nn.Module]:
    """Linears in bfloat16 full of ones: values do not matter, but untouched memory would be one page of zeros."""
    linears: list[nn.Module] = []
    for rows, columns in shapes:
        linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.bfloat16)
        linear.weight = nn.Parameter(
            torch.ones(rows, columns, dtype=torch.bfloat16, device=device), requires_grad=False
        )
        linears.append(linear)
    return linears


def _quantized(shapes: tuple[tuple[int, int], ...], device: torch.device) -> list[nn.Module]:
    linears: list[nn.Module] = []
    for rows, columns in shapes:
        spec = MatrixSpec(rows, columns, 4, 64, torch.bfloat16, device.type)
        linear = RiverLinear.empty(spec, device=device)
        for part in linear.buffers():
            part.fill_(1)
        linears.append(linear)
    return linears


def _one_token_rate(linears: list[nn.Module], device: torch.device) -> tuple[float, str]:
    """Bytes of weights per second that one token runs through, and what multiplied them."""
    inputs = {
        linear.in_features: torch.ones(1, int(linear.in_features), dtype=torch.bfloat16, device=device)  # type: ignore[arg-type]
        for linear in linears
    }

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    nbytes = sum(tensor.nbytes for linear in linears for tensor in (*linear.parameters(), *linear.buffers()))
    first = linears[0]
    kernel = f"kernel {first.kernel.name}" if isinstance(first, RiverLinear) else "torch's linear in bfloat16"
    return nbytes / _best_s(run, device), kernel


def _flops(shape: tuple[int, int], rows: int, device: torch.device) -> float:
    outputs, inputs = shape
    weight = torch.ones(outputs, inputs, dtype=torch.bfloat16, device=device)
    x = torch.ones(rows, inputs, dtype=torch.bfloat16, device=device)
    return 2 * rows * outputs * inputs / _best_s(lambda: nn.functional.linear(x, weight), device)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    return min(_timed(call, device))


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    return statistics.median(_timed(call, device))


def _timed(call: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of some calls after two that warm up; on a GPU until it has done what was asked."""
    seconds = []
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def _share(rate: float, memory: float) -> float:
    """At most 1: weights that a large cache keeps come faster than memory reads."""
    return max(min(round(rate / memory, 3), 1.0), 0.001)


def _names(shapes: tuple[tuple[int, int], ...]) -> str:
    return f"{len(shapes)} matrices of {sum(rows * columns for rows, columns in shapes) * 2 >> 20} MiB"


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: this torch has no GPU ({torch.__version__}); use --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _write_new(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
