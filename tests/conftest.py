"""Fixtures of every test: checkpoints of the tiny models written once, rivers opened and closed, a cache of our own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Before torch is imported: tiny matrices gain nothing from threads, which on a busy machine wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are tiny: more threads only wait for each other, for ever so long when the machine is busy."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """A job that was started in the background inherits Ctrl-C as ignored, and so would every process of a test."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def river_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where rivers and native code are built, for the whole session: never the user's own cache."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIVER_OFFLOAD_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama", **changes_of_config)`: the directory of a tiny model, written when first asked for."""
    from families import write_family

    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def written(name: str, **changes: Any) -> Path:
        label = "-".join([name, *(f"{field}={value}" for field, value in changes.items())]).replace("torch.", "")
        return write_family(name, root / label, **changes)

    return written


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[..., Path]) -> Callable[[str], PreTrainedModel]:
    """`plain("llama")`: the model as transformers loads it. Shared: do not change it."""
    from families import plain_model

    return cache(lambda name: plain_model(checkpoint(name)))


@pytest.fixture
def open_river(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """`open_river("llama" or a directory, **options of load)`: a loaded model, closed when the test ends."""
    from families import load_tiny

    models = []

    def opened(model: str | Path, **options: Any) -> Any:
        directory = checkpoint(model) if isinstance(model, str) else model
        models.append(load_tiny(directory, **options))
        return models[-1]

    yield opened
    for model in models:
        model.river.close()


@pytest.fixture
def pair(
    plain: Callable[[str], PreTrainedModel], checkpoint: Callable[..., Path], open_river: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """`pair("llama")`: the model in mode backbone with one resident layer, and the model as transformers has it."""

    from families import budget_for, poison_slots

    def made(family: str = "llama", **options: Any) -> tuple[Any, Any]:
        options = {"mode": "backbone"} | options
        model = open_river(family, budget=budget_for(checkpoint(family), 1, **options), **options)
        poison_slots(model)
        return model, plain(family)

    return made
