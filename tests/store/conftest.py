"""`make_rig(link, layers, slots, ...)`: a store over a link, closed when the test ends; a file and what reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs import Make, Rig, require_no_thread_but, write_layers
from source_files import SIZE

from river_offload.store.reader import Reader


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


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "bytes.bin"
    path.write_bytes(torch.randint(256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy())
    return path


@pytest.fixture
def reader() -> Iterator[Reader]:
    before = set(threading.enumerate())
    reader = Reader()
    yield reader
    reader.close()
    require_no_thread_but(before)
