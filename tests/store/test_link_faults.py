"""What goes wrong under a link: an error for the passage that meets it, no hang, and a store that works afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from rigs import LINKS, Make, Rig, drive, require_no_thread_but

from river_offload.errors import LinkError, RiverError
from river_offload.store.files import SourceFile
from river_offload.store.link_cuda import CudaLink


def break_reads(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def read(self: SourceFile, buffer: memoryview, offset: int, nbytes: int) -> int:
        raise error

    monkeypatch.setattr(SourceFile, "read", read)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [LinkError("model.safetensors: the disk is gone"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("link", ["cpu", "ring-lazy", "ring-eager"])
def test_a_read_that_fails_breaks_one_passage(
    link: str, error: Exception, make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(link, 5, 2, kind="next")
    drive(rig, passages=2)
    with monkeypatch.context() as patch:
        break_reads(patch, error)
        for _ in range(2):
            with pytest.raises(LinkError, match=r"the disk is gone|reader thread"):
                rig.passage(5)
            rig.store.broken_off()
    drive(rig)


@pytest.mark.parametrize("link", ["cuda-lazy", "ring-eager"])
def test_a_copy_that_fails_breaks_one_passage(link: str, make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(link, 5, 2, kind="next")
    drive(rig, passages=2)
    assert rig.cuda is not None
    with monkeypatch.context() as patch:
        plain = rig.cuda.stream

        def broken(stream: Any) -> Any:
            raise RuntimeError("CUDA error: unspecified launch failure")

        patch.setattr(rig.cuda, "stream", broken)
        with pytest.raises(LinkError, match=r"layer . could not be copied to cpu: CUDA error"):
            rig.passage(5)
        rig.store.broken_off()
        assert plain
    drive(rig)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_thread_that_dies_leaves_nobody_waiting_and_is_replaced(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("cuda-lazy", 5, 2, kind="next")
    with monkeypatch.context() as patch:
        patch.setattr(CudaLink, "_issue", lambda *_: {}["a bug"])
        with pytest.raises(LinkError, match=r"the link thread (died|ended)"):
            rig.passage(5)
        rig.store.broken_off()
    drive(rig)


@pytest.mark.parametrize("broken", [0, 2, 4])
def test_a_null_link_can_fail_half_way(broken: int, make_rig: Make) -> None:
    rig = make_rig("null", 5, 2, null={"choices": iter([1] * 500), "broken": frozenset([broken])})
    with pytest.raises(LinkError, match=f"layer {broken} cannot be read"):
        rig.passage(5)
    rig.store.broken_off()
    rig.link.broken = frozenset()  # type: ignore[attr-defined]
    drive(rig)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("depth", [0, 2, 5])
def test_closing_in_flight_ends_everything(link: str, depth: int, make_rig: Make) -> None:
    rig = make_rig(link, 5, 3, kind="next")
    rig.passage(depth)
    rig.link.fetch(4, 0)
    rig.check()
    before = rig.threads_before
    rig.close()
    rig.close()
    require_no_thread_but(before)
    with pytest.raises(RiverError, match=r"after close\(\)"):
        rig.store.acquire(4)


@pytest.mark.parametrize("link", LINKS)
def test_an_interrupt_anywhere_leaves_a_store_that_works(
    link: str, make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the n-th call of the link, for every n: the next passages compute what they should."""
    for stop_at in range(1, 16):
        rig = make_rig(link, 4, 2, kind="next", poison=bool(stop_at % 2))
        calls = 0

        def interrupting(name: str, rig: Rig = rig, stop_at: int = stop_at) -> Any:
            plain = getattr(rig.link, name)

            def call(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                early = calls == stop_at and stop_at % 3 == 0
                result = None if early else plain(*args, **options)
                if calls == stop_at:
                    raise KeyboardInterrupt
                return result

            return call

        with monkeypatch.context() as patch:
            for name in ("fetch", "wait", "release", "cancel", "ready"):
                patch.setattr(rig.link, name, interrupting(name))
            with pytest.raises(KeyboardInterrupt):
                for _ in range(9):
                    rig.passage(4)
        if rig.cuda:
            rig.cuda.drain()
        rig.seen.clear()  # the broken passage has no result
        rig.store.broken_off()
        drive(rig)
        rig.close()
