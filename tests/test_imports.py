"""Imports point one way. The order is that of DESIGN: what stands lower never imports what stands higher."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. Parts on one line are siblings that do not import each other.
LEVELS = [
    ["policies"],
    ["_version", "errors", "progress"],
    ["config", "trace"],
    ["checkpoint", "quant", "store", "kv", "memory"],
    ["attention", "call", "layer_kind", "phases", "structure"],
    ["chunks", "one_token"],
    ["passage"],
    ["layer", "parts", "settings"],
    ["assemble", "ledger"],
    ["planning", "report"],
    ["handle", "streaming"],
    ["metering", "decoding"],
    ["seams"],
    ["loading"],
    ["(package)"],
    ["eval"],
    ["cli"],
]
LEVEL = {part: number for number, level in enumerate(LEVELS) for part in level}


def part_of(module: str) -> str | None:
    """The part that a dotted module name belongs to; None for what is not ours."""
    names = module.split(".")
    if names[0] == "policies":
        return "policies"
    if names[0] != "river_offload":
        return None
    return names[1] if len(names) > 1 else "(package)"


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that a file imports anywhere, functions and type checking included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            # `from river_offload import config` imports the part config, not the package's public names.
            for alias in node.names:
                inside = base == "river_offload" and alias.name in LEVEL
                yield f"{base}.{alias.name}" if inside else base


def sources() -> list[Path]:
    return sorted([*ROOT.glob("policies/**/*.py"), *ROOT.glob("river_offload/**/*.py")])


def broken_arrows(source: str, module: str, package: str) -> list[str]:
    mine = part_of(module)
    found = []
    for target in imported_modules(ast.parse(source), package):
        theirs = part_of(target)
        if theirs is None or theirs == mine:
            continue
        assert theirs in LEVEL, f"{module} imports {target}: give {theirs} its place in LEVELS and in DESIGN"
        if LEVEL[theirs] >= LEVEL[mine]:
            found.append(f"{module} imports {target}")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    names = list(path.relative_to(ROOT).with_suffix("").parts)
    package = ".".join(names[:-1])
    module = package if names[-1] == "__init__" else ".".join(names)
    assert part_of(module) in LEVEL, f"{module} is new: give it its place in LEVELS and in DESIGN"
    assert broken_arrows(path.read_text(encoding="utf-8"), module, package) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import river_offload.quant.hqq", "river_offload.config"),
        ("def f():\n    from river_offload import load", "river_offload.store.store"),
        ("from ..store import slots", "river_offload.quant.linear"),
        ("from river_offload import assemble", "river_offload.layer"),
        ("from river_offload.errors import UsageError", "policies.placement"),
        ("from river_offload.cli import app", "river_offload.planning.plan"),
    ],
)
def test_a_turned_arrow_is_found(source, module):
    assert len(broken_arrows(source, module, module.rpartition(".")[0])) == 1


def test_allowed_arrows_pass():
    source = "import torch\nfrom river_offload import errors\nfrom .. import config\nfrom policies.types import Mode"
    assert broken_arrows(source, "river_offload.store.store", "river_offload.store") == []


def test_policies_need_only_the_standard_library():
    for path in ROOT.glob("policies/**/*.py"):
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")), package):
            top = module.split(".")[0]
            assert top == "policies" or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_policies_and_configuration_come_without_torch():
    modules = [f"policies.{path.stem}" for path in (ROOT / "policies").glob("*.py") if path.stem != "__init__"]
    everything = "import policies, " + ", ".join(modules)
    assert not loaded_by(everything) & {"torch", "numpy", "river_offload"}
    assert not loaded_by("import river_offload, river_offload.config, river_offload.trace") & {"torch", "transformers"}
