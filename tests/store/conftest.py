"""`make_rig(link, layers, slots, ...)`: a store over a link, closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs import Make, Rig, write_layers


@pytest.fixture(scope="session")
def layers_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("layers"))


@pytest.fixture
def make_rig(layers_directory: Path) -> Iterator[Make]:
    rigs: list[Rig] = []
    with pytest.MonkeyPatch.context() as patch:

        def make(*args: Any, **options: Any) -> Rig:
            patch.undo()
            rigs.append(Rig(layers_directory, *args, patch=patch, **options))
            return rigs[-1]

        yield make
        for rig in reversed(rigs):
            rig.close()
