"""Every kernel that runs here against the reference, for shapes that do not suit it too."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from river_offload.quant import native
from river_offload.quant.kernels import Kernel, MatrixSpec, Reference, choose, ordered, torch_cpu
from river_offload.quant.kernels.cuda import Gemlite, TorchInt4Cuda
from river_offload.quant.linear import RiverLinear
from river_offload.quant.packing import QuantizedMatrix, dequantize, pack

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def _matrix(rows: int, columns: int, bits: int, group: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(rows + columns + bits)
    q = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(rows, columns // group, generator=generator) * 0.01).bfloat16()
    offset = (torch.randn(rows, columns // group, generator=generator) * 0.01).bfloat16()
    return QuantizedMatrix(pack(q, bits), scale, offset, bits)


def _serving(spec: MatrixSpec, native_dir: Path) -> list[Kernel]:
    return [kernel for kernel in ordered(native_dir) if kernel.declines(spec) is None]


def _check(kernel: Kernel, matrix: QuantizedMatrix, spec: MatrixSpec, counts: tuple[int, ...]) -> None:
    parts = kernel.prepare(matrix, spec, torch.device("cpu"))
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == kernel.layout(spec)
    assert sum(t.untyped_storage().nbytes() for t in parts.values()) == kernel.nbytes(spec)
    assert torch.equal(kernel.dequantize(parts, spec), dequantize(matrix, spec.dtype))
    exact = dequantize(matrix)
    for count in counts:
        x = torch.randn(count, spec.columns, generator=torch.Generator().manual_seed(count)).to(spec.dtype)
        expected = x.float() @ exact.T
        y = kernel.matmul(x, parts, spec)
        assert (y.dtype, y.shape) == (spec.dtype, expected.shape)
        assert (y.float() - expected).norm() <= TOLERANCE[spec.dtype] * expected.norm(), (kernel.name, count)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize(
    ("rows", "columns", "group"), ((64, 128, 64), (176, 384, 128), (16, 96, 32), (40, 64, 64), (33, 160, 32))
)
def test_every_kernel_that_serves_agrees_with_the_oracle(
    dtype: torch.dtype, bits: int, rows: int, columns: int, group: int, native_dir: Path
) -> None:
    matrix = _matrix(rows, columns, bits, group)
    spec = MatrixSpec(rows, columns, bits, group, dtype, "cpu")
    for kernel in _serving(spec, native_dir):
        _check(kernel, matrix, spec, (0, 1, 2, 5, 13, 64, 130))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_large_matrix_crosses_blocks_and_tiles(dtype: torch.dtype, native_dir: Path) -> None:
    spec = MatrixSpec(1936, 2048, 4, 64, dtype, "cpu")
    for kernel in _serving(spec, native_dir):
        _check(kernel, _matrix(1936, 2048, 4, 64), spec, (100,))


@pytest.mark.parametrize(
    ("rows", "bits", "dtype", "expected"),
    (
        (64, 4, torch.bfloat16, {"torch-int4", "dequantize-blocks"}),
        (64, 4, torch.float32, {"dequantize-blocks"}),
        (40, 4, torch.bfloat16, {"dequantize-blocks"}),
        (64, 3, torch.bfloat16, {"dequantize-blocks"}),
        (64, 4, torch.float64, {"dequantize-blocks"}),
    ),
)
def test_kernels_that_need_no_compiler_serve_what_suits_them(
    rows: int, bits: int, dtype: torch.dtype, expected: set[str], native_dir: Path
) -> None:
    serving = _serving(MatrixSpec(rows, 64, bits, 64, dtype, "cpu"), native_dir)
    assert {kernel.name for kernel in serving} - {"native", "native-int4"} == expected


def test_probe_finds_the_layout_of_this_torch() -> None:
    layout = torch_cpu.probe()
    assert layout is not None
    assert sum(count * height for _, count, height in layout.tiles(208)) == 208


def test_an_unknown_layout_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu, "probe", lambda: None)
    spec = MatrixSpec(64, 64, 4, 64, torch.bfloat16, "cpu")
    assert "unknown order" in (torch_cpu.TorchInt4Cpu().declines(spec) or "")


def test_a_wrong_layout_is_noticed() -> None:
    layout = torch_cpu.probe()
    assert layout is not None
    height = layout.tile_rows
    order = layout.order | {height: layout.order[height][::-1]}
    assert not torch_cpu._describes(torch_cpu.TileLayout(height, order))


def test_choice_keeps_the_reasons(native_dir: Path) -> None:
    choice = choose(MatrixSpec(33, 64, 2, 64, torch.float32, "cpu"), ordered(native_dir))
    reasons = dict(choice.declined)
    assert reasons["gemlite"] == "runs on cuda, not cpu"
    assert "not 2" in reasons["native-int4"]
    assert choice.kernel.name in ("native", "dequantize-blocks")


def test_without_a_compiler_torch_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    choice = choose(MatrixSpec(64, 64, 4, 64, torch.bfloat16, "cpu"), ordered(tmp_path))
    assert choice.kernel.name == "torch-int4"
    assert dict(choice.declined)["native-int4"] == "no C compiler (gcc or cc) was found"


def test_a_failing_compiler_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FLAGS", ["--no-such-option"])
    assert isinstance(native.load(tmp_path), native.Unavailable)
    assert not list((tmp_path / "native").iterdir())


@pytest.mark.parametrize("left", ("nothing", "half", "text"))
def test_a_damaged_library_is_built_anew(left: str, tmp_path: Path) -> None:
    """Loading half of one would end the process: SIGBUS."""
    assert isinstance(native.load(tmp_path), native.Library)
    (path,) = (tmp_path / "native").glob("*.so")
    whole = path.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.write_bytes({"nothing": b"", "half": whole[: len(whole) // 2], "text": b"#!/bin/sh\n"}[left])
    damaged.replace(path)  # another file under its name: this process has the first one in use
    native.load.cache_clear()
    assert isinstance(native.load(tmp_path), native.Library)
    assert path.stat().st_size == len(whole)


def test_a_compiler_that_hangs_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "find_compiler", lambda: str(compiler))
    monkeypatch.setattr(native, "_BUILD_LIMIT_S", 0.2)
    assert "took longer than 0.2 s" in str(native.load(tmp_path / "cache"))


def test_an_unwritable_folder_is_a_reason_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("a file where the folder should be")
    assert "cannot be built" in str(native.load(tmp_path))


def test_native_code_is_built_once(native_dir: Path) -> None:
    reason = native.load(native_dir)
    if not any(map(shutil.which, ("gcc", "cc"))):
        assert isinstance(reason, native.Unavailable)  # and says so, instead of building
        return
    assert not isinstance(reason, native.Unavailable), reason  # a compiler that is there must do
    (built,) = (native_dir / "native").glob("*.so")
    before = built.stat().st_mtime_ns
    native.load.cache_clear()
    native.load(native_dir)
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize("spec", [MatrixSpec(64, 128, bits, 64, torch.bfloat16, "cpu") for bits in (3, 4)], ids=str)
def test_fake_tensors_allocate_what_real_ones_do(spec: MatrixSpec, native_dir: Path) -> None:
    for kernel in (*ordered(native_dir), Reference()):
        if kernel.declines(spec) is not None:
            continue
        with FakeTensorMode():
            linear = RiverLinear.empty(spec, bias=True, kernel=kernel)
            for count in (1, 200):
                y = linear(torch.empty(2, count, 128, dtype=torch.bfloat16))
                assert (y.shape, y.dtype) == ((2, count, 64), torch.bfloat16)
            assert linear.nbytes == kernel.nbytes(spec) + 64 * 2


@pytest.mark.parametrize("kernel", (Gemlite(), TorchInt4Cuda()), ids=lambda kernel: kernel.name)
def test_cuda_is_planned_on_fake_cpu_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MatrixSpec(64, 256, 4, 64, torch.bfloat16, "cuda")
    with FakeTensorMode():
        linear = RiverLinear.empty(spec, device="cpu", kernel=kernel)
        assert linear(torch.empty(5, 256, dtype=torch.bfloat16)).shape == (5, 64)
    assert linear.nbytes == kernel.nbytes(spec) == 64 * 256 // 2 + 64 * 4 * 2 * 2
    assert "cuda" in (kernel.declines(MatrixSpec(64, 256, 4, 64, torch.bfloat16, "cpu")) or "")


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_gemlite_form_stands_for_the_same_weights(bits: int) -> None:
    """Its preparation and dequantization are plain torch; only its matmul needs a GPU."""
    matrix = _matrix(300, 128, bits, 64)
    spec = MatrixSpec(300, 128, bits, 64, torch.float16, "cuda")
    parts = Gemlite().prepare(matrix, spec, torch.device("cpu"))
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == Gemlite().layout(spec)
    step = matrix.scale.float().max() * 2 ** (bits - 1)
    assert (Gemlite().dequantize(parts, spec).float() - dequantize(matrix)).abs().max() < step / 256


def test_a_linear_can_be_copied_and_pickled(native_dir: Path) -> None:
    kernel = choose(MatrixSpec(64, 64, 4, 64, torch.bfloat16, "cpu"), ordered(native_dir)).kernel
    linear = RiverLinear.from_matrix(_matrix(64, 64, 4, 64), dtype=torch.bfloat16, kernel=kernel)
    x = torch.randn(3, 64).bfloat16()
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(other(x), linear(x))
