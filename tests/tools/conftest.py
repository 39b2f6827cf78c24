"""Tools are programs, not a package: each test file gets the one that it is named after."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool(request: pytest.FixtureRequest) -> ModuleType:
    """The module of `tools/NAME.py`, for `test_NAME.py`. What it imports beside it is found, as when it is run."""
    name = request.path.stem.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        spec.loader.exec_module(module)
    return module
