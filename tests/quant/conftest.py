from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def native_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where native code is built, once a session."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(autouse=True)
def _cache_of_tests(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a test lands in the user's cache."""
    monkeypatch.setenv("RIVER_OFFLOAD_CACHE", str(native_dir))
