"""The next layer's keys and values brought in while a layer computes: the same bits, and really ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from policies import link_order
from river_offload.errors import LinkError
from river_offload.kv.cache import SharedCache
from river_offload.kv.kind import KvKind
from river_offload.kv.memory import plain_memory
from river_offload.kv.rest import PlainRest, QuantizedRest, Rest

CONTEXT, LAYERS, HEADS, HEAD_DIM = 160, 4, 2, 32
KINDS = [KvKind(bits, "host") for bits in (16, 8, 4)]
Parts = Sequence[tuple[Rest, torch.Tensor]]
States = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny caches, too, are brought in ahead."""
    monkeypatch.setattr(link_order, "AHEAD_FROM_BYTES", 1)


class FakeLink:
    """A link whose copies land as unkindly as they may: at once when they are started, or when somebody waits, and
    those that nobody waits for when the next ones start.

    Until they land their place is full of NaN. `waited` and `dropped` count.
    """

    open = True

    def __init__(self, *, eager: bool = False) -> None:
        self.eager = eager
        self.started: list[Parts] = []
        self.waited = self.dropped = 0
        self._coming: list[Parts] = []

    def prepare(self, parts: Parts) -> Parts:
        return parts

    def start(self, fetch: Parts) -> None:
        for late in self._coming:
            land(late)
        self._coming.clear()
        self.started.append(fetch)
        for _, out in fetch:
            out.fill_(torch.nan)
        if self.eager:
            land(fetch)
        else:
            self._coming.append(fetch)

    def wait(self, fetch: Parts) -> None:
        self.waited += 1
        self._settle(fetch)

    def drop(self, fetch: Parts) -> None:
        self.dropped += 1
        self._settle(fetch)

    def _settle(self, fetch: Parts) -> None:
        if any(other is fetch for other in self._coming):
            land(fetch)
        self._coming = [other for other in self._coming if other is not fetch]

    def quiet(self) -> None:
        pass

    def close(self) -> None:
        self.open = False

    def __deepcopy__(self, memo: Any) -> FakeLink:
        return self


def land(fetch: Parts) -> None:
    for rest, out in fetch:
        rest.get(0, out)


class Forgetful(SharedCache):
    """What must be read: of each layer all that rests, brought in anew whenever it runs."""

    def update(self, *args: Any, **kwargs: Any) -> States:
        self.workspace.forget()
        return super().update(*args, **kwargs)


def cache_of(link: Any, kind: KvKind = KINDS[0], *, layers: int = LAYERS) -> SharedCache:
    """Without a link the one to compare with."""
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=HEADS, hidden_size=HEADS * HEAD_DIM)
    return (Forgetful if link is None else SharedCache)(config, CONTEXT, kind, plain_memory, link=link)


def given(layer: int, start: int, stop: int, *, rows: int = 1) -> States:
    """States of a layer's tokens: the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(layer)
    whole = torch.randn(2, rows, HEADS, CONTEXT, HEAD_DIM, generator=generator)
    return whole[0, :, :, start:stop], whole[1, :, :, start:stop]


def passage(cache: SharedCache, count: int, *, rows: int = 1, chunk: int | None = None) -> list[torch.Tensor]:
    """`count` new tokens through all layers, in chunks; what attention read of each, looked at when it was over."""
    start = cache.get_seq_length()
    seen = []
    for layer in range(len(cache.layers)):
        for at in range(start, start + count, chunk or count):
            stop = min(at + (chunk or count), start + count)
            shown = cache.update(*given(layer, at, stop, rows=rows), layer)
            seen.append(torch.cat(shown, dim=-1).clone())
    return seen


def assert_same(link: Any, kind: KvKind, layers: int = LAYERS) -> None:
    found, expected = (everything(cache_of(each, kind, layers=layers)) for each in (link, None))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def everything(cache: SharedCache) -> list[torch.Tensor]:
    """A prompt, tokens, a chunked prompt, tokens given back, rows chosen, a text given up, another text."""
    seen = passage(cache, 50)
    for _ in range(3):
        seen += passage(cache, 1)
    seen += passage(cache, 60, chunk=16)
    cache.crop(-9)
    seen += passage(cache, 5)
    cache.crop(-60)
    seen += passage(cache, 90, chunk=32)
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
    seen += passage(cache, 3, rows=2)
    cache.reorder_cache(torch.tensor([1, 1]))
    seen += passage(cache, 1, rows=2)
    mark = cache.mark()
    cut_off(cache, 7, rows=2)
    cache.back_to(mark)
    seen += passage(cache, 2, rows=2)
    cache.reset()
    return seen + passage(cache, 30, rows=2) + passage(cache, 1, rows=2)


def cut_off(cache: SharedCache, count: int, *, rows: int = 1) -> None:
    """A passage that is interrupted in the second layer."""
    start = cache.get_seq_length()
    for layer in range(min(2, len(cache.layers))):
        cache.update(*given(layer + 50, start, start + count, rows=rows), layer)


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_whatever_is_done_with_a_cache_it_reads_the_same(kind: KvKind, eager: bool, layers: int) -> None:
    """Copies that land as late as they may find a missing wait, those that land at once a room still in use. One layer,
    or two, stay in their rooms between passages."""
    assert_same(FakeLink(eager=eager), kind, layers)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_attention_reads_stays_until_it_has_read_it(kind: KvKind) -> None:
    """The next layer's tokens come into another room than that of the views that are out."""
    cache = cache_of(FakeLink(eager=True), kind)
    passage(cache, 100)
    for layer in range(LAYERS):
        shown = cache.update(*given(layer, 100, 101), layer)
        assert not any(part.isnan().any() for part in shown)
        if kind.bits == 16:
            for part, states in zip(shown, given(layer, 0, 101), strict=True):
                assert torch.equal(part, states)


class Counted:
    """Counts what a passage brings in by itself, while computation stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        self._inside = False
        for kind in (PlainRest, QuantizedRest):
            self._count(kind, monkeypatch)

    def _count(self, kind: type[Rest], monkeypatch: pytest.MonkeyPatch) -> None:
        plain = kind.get

        def get(rest: Any, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
            self.tokens += 0 if self._inside else out.shape[2]
            plain(rest, start, out, wait=wait)

        monkeypatch.setattr(kind, "get", get)

    def ahead(self, link: FakeLink) -> FakeLink:
        """What the link does is not counted."""
        for name in ("start", "wait", "drop"):
            setattr(link, name, self._uncounted(getattr(link, name)))
        return link

    def _uncounted(self, plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def inside(fetch: Any) -> None:
            self._inside = True
            try:
                plain(fetch)
            finally:
                self._inside = False

        return inside


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_of_a_passage_only_the_first_layer_is_brought_in_by_itself(
    kind: KvKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, link = Counted(monkeypatch), FakeLink()
    cache, without = cache_of(counted.ahead(link), kind), cache_of(None, kind)
    for each in (cache, without):
        passage(each, 128)
    rested = 128 if kind.bits == 16 else 64
    for count in (1, 1, 5):
        found = []
        for each in (cache, without):
            counted.tokens = 0
            passage(each, count)
            found.append(counted.tokens)
        assert found == [2 * rested, 2 * rested * LAYERS]  # keys and values
        rested += count if kind.bits == 16 else 0
    assert link.waited == 3 * (LAYERS - 1) and link.dropped == 0


def test_a_prompt_in_chunks_is_brought_in_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, link = Counted(monkeypatch), FakeLink()
    cache = cache_of(counted.ahead(link))
    passage(cache, 100)
    link.started.clear()
    counted.tokens = 0
    passage(cache, 50, chunk=10)
    assert counted.tokens == 2 * 100
    assert [fetch[0][1].shape[2] for fetch in link.started] == [100] * (LAYERS - 1)


def test_a_few_tokens_are_not_worth_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_order, "AHEAD_FROM_BYTES", 2 * 100 * HEADS * HEAD_DIM * 4)
    link = FakeLink()
    cache = cache_of(link)
    passage(cache, 99)
    passage(cache, 1)
    assert link.started == []
    passage(cache, 1)
    assert len(link.started) == LAYERS - 1


def test_two_layers_have_a_room_each_and_fetch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, link = Counted(monkeypatch), FakeLink()
    cache = cache_of(counted.ahead(link), layers=2)
    passage(cache, 100)
    passage(cache, 1)
    assert counted.tokens == 0 and link.started == []


def test_a_closed_link_leaves_every_layer_to_bring_in_its_own() -> None:
    link = FakeLink()
    cache = cache_of(link)
    passage(cache, 20)
    link.close()
    assert_same(link, KINDS[0])
    passage(cache, 1)
    assert link.started == []


def test_a_fetch_that_fails_is_said_and_tried_anew_by_the_layer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()
    cache, expected = cache_of(link), cache_of(None)
    for each in (cache, expected):
        passage(each, 30)
    mark = cache.mark()

    def broken(_: Parts) -> None:
        raise LinkError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(link, "wait", broken)
        with pytest.raises(LinkError, match="gone"):
            passage(cache, 1)
    cache.back_to(mark)
    for found, other in zip(passage(cache, 2), passage(expected, 2), strict=True):
        assert torch.equal(found, other)


def test_a_copied_cache_goes_its_own_way() -> None:
    link = FakeLink()
    cache = cache_of(link)
    passage(cache, 40)
    other, expected = copy.deepcopy(cache), cache_of(None)
    passage(cache, 3)
    passage(expected, 40)
    for found, plain in zip(passage(other, 2), passage(expected, 2), strict=True):
        assert torch.equal(found, plain)
    rooms = {tensor.data_ptr() for tensor in cache.workspace.tensors()}
    assert rooms.isdisjoint(tensor.data_ptr() for tensor in other.workspace.tensors())
