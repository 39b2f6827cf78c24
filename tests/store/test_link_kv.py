"""Keys and values over the link: both edges of a reused room, on reader threads and a copy stream; whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, queue_copies
from rigs import require_no_thread_but
from source_files import Gated, opened, span, until
from transformers import LlamaConfig

from policies import link_order
from river_offload.errors import LinkError
from river_offload.kv.cache import SharedCache
from river_offload.kv.kind import KvKind
from river_offload.kv.memory import plain_memory
from river_offload.kv.rest import PlainRest, QuantizedRest
from river_offload.store.link_kv import ReaderKvLink, StreamKvLink
from river_offload.store.reader import Reader, Ticket

CPU = torch.device("cpu")
CONTEXT, LAYERS, HEADS, HEAD_DIM = 120, 5, 2, 16


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_order, "AHEAD_FROM_BYTES", 1)


def cache_over(link: Any, bits: int = 16) -> SharedCache:
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=HEADS * HEAD_DIM)
    return SharedCache(config, CONTEXT, KvKind(bits, "host"), plain_memory, link=link)


def states(layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    whole = torch.randn(2, 1, HEADS, CONTEXT, HEAD_DIM, generator=generator)
    return whole[0, :, :, start:stop], whole[1, :, :, start:stop]


# On a copy stream, with a fake GPU.


class Stream:
    """A cache whose rooms the copy stream of a fake GPU fills, and attention that reads them in the order of its
    compute stream: at once where the fake is lazy, as late as possible where it is eager.

    New tokens are written at once by either. So late attention looks only at what rests, which is what was copied.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, eager: bool, link_type: type[StreamKvLink] = StreamKvLink) -> None:
        self.cuda = FakeCuda(eager=eager)
        queue_copies(self.cuda, patch)
        self.link = link_type(self.cuda.Stream(CPU), CPU, cuda=self.cuda)
        self.cache = cache_over(self.link)
        self.seen: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []

    def passage(self, count: int) -> None:
        start = self.cache.get_seq_length()
        for layer in range(LAYERS):
            keys, values = self.cache.update(*states(layer, start, start + count), layer)
            self._attend(layer, start, keys, values)
        self.cuda.drain()

    def _attend(self, layer: int, rested: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        def look() -> None:
            self.seen.append((layer, rested, keys[:, :, :rested].clone(), values[:, :, :rested].clone()))

        self.cuda.compute(look)

    def torn(self) -> int:
        """How many times attention read something else than what rests."""
        return sum(
            not torch.equal(torch.cat((keys, values)), torch.cat(states(layer, 0, rested)))
            for layer, rested, keys, values in self.seen
        )


@pytest.mark.parametrize("eager", [False, True])
def test_attention_reads_what_rests_in_the_order_of_the_streams(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch, eager=eager)
    for count in (40, 1, 1, 9, 1):
        stream.passage(count)
    assert stream.torn() == 0
    assert len(stream.seen) == 5 * LAYERS
    assert stream.cuda.synchronized == 0  # nothing waits for the device


class NoWaitOfCompute(StreamKvLink):
    def _let_compute_wait(self, copied: Any) -> None:
        """Torn: copies need not be done."""


class NoWaitOfCopies(StreamKvLink):
    def _let_copy_wait(self, fetch: Any) -> None:
        """Torn: computation may still read."""


@pytest.mark.parametrize(("link_type", "eager"), [(NoWaitOfCompute, False), (NoWaitOfCopies, True)])
def test_either_torn_edge_is_found(link_type: type[StreamKvLink], eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch, eager=eager, link_type=link_type)
    for _ in range(3):
        stream.passage(20)
    assert stream.torn() > 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_passage_given_up_leaves_no_copy_that_lands_later(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It broke off when the second layer's tokens were under way, and those of the third."""
    stream = Stream(monkeypatch, eager=eager)
    stream.passage(40)
    for layers in (1, 2):
        mark = stream.cache.mark()
        for layer in range(layers):
            stream.cache.update(*states(layer + 70, 40, 45), layer)
        stream.cache.back_to(mark)
        assert stream.cuda.synchronized == layers  # here what rests may change
    stream.passage(3)
    stream.passage(3)
    assert stream.torn() == 0


def test_copies_go_where_the_weights_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same stream they keep their turn: behind what was issued before them, ahead of what comes later."""
    stream = Stream(monkeypatch, eager=False)
    stream.passage(30)
    order: list[str] = []
    get = PlainRest.get

    def noted(rest: PlainRest, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        get(rest, start, out, wait=wait)
        if not wait:
            stream.cuda.current_stream().add(lambda: order.append("kv"))

    monkeypatch.setattr(PlainRest, "get", noted)
    copies = stream.cuda.copy_streams[0]
    copies.add(lambda: order.append("needed weights"))
    stream.cache.update(*states(0, 30, 31), 0)
    copies.add(lambda: order.append("foreseen weights"))
    stream.cuda.drain()
    assert order == ["needed weights", "kv", "kv", "foreseen weights"]


# On reader threads.


@pytest.fixture
def threads() -> Iterator[Reader]:
    before = set(threading.enumerate())
    reader = Reader(2, largest_bytes=0)
    yield reader
    reader.close()
    require_no_thread_but(before)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_reader_threads_bring_what_rests(threads: Reader, bits: int) -> None:
    ahead, alone = cache_over(ReaderKvLink(threads), bits), cache_over(None, bits)
    for count in (97, 1, 1, 9, 1):
        start = ahead.get_seq_length()
        for layer in range(LAYERS):
            found, expected = (cache.update(*states(layer, start, start + count), layer) for cache in (ahead, alone))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert threads.nbytes == 0
    assert threads.moved() == (0, 0.0)  # the rate of the link is that of weights


@pytest.mark.parametrize("rest", [PlainRest, QuantizedRest])
def test_the_pieces_are_the_whole(threads: Reader, rest: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("river_offload.store.link_kv._SERIAL_ELEMENTS", 2 * HEADS * HEAD_DIM * 33)
    like = torch.randn(2, HEADS, 96, HEAD_DIM)
    options = {} if rest is PlainRest else {"bits": 8, "over": "tokens"}
    resting = rest(like, 96, plain_memory, **options)
    resting.put(0, like)
    whole, out = torch.empty_like(like), torch.full_like(like, torch.nan)
    resting.get(0, whole)
    link = ReaderKvLink(threads)
    ticket = link.prepare([(resting, out)])
    pieces = list(ticket._spans[0].pieces(1))
    assert sum(piece.nbytes for piece in pieces) == ticket.nbytes == like.nbytes and len(pieces) == 3
    link.start(ticket)
    link.wait(ticket)
    assert torch.equal(out, whole)


class Held(PlainRest):
    """Gives its tokens when it is let."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__(like, like.shape[2], plain_memory)
        self.put(0, like)
        self.gate, self.asked = threading.Event(), threading.Event()

    def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
        self.asked.set()
        assert self.gate.wait(10)
        super().get(start, out)


def test_what_is_dropped_writes_no_more(threads: Reader) -> None:
    """Dropping waits for the piece under way, and only then."""
    like = torch.ones(1, 1, 4, 8)
    rest, out, link = Held(like), torch.zeros(1, 1, 4, 8), ReaderKvLink(threads)
    ticket = link.prepare([(rest, out)])
    link.start(ticket)
    assert rest.asked.wait(10)
    dropped = threading.Thread(target=link.drop, args=(ticket,), daemon=True)
    dropped.start()
    until(lambda: ticket.cancelled)
    assert dropped.is_alive()
    rest.gate.set()
    dropped.join(10)
    assert ticket.done and torch.equal(out, like)
    never = link.prepare([(rest, out)])
    link.drop(never)
    assert never.done


def test_needed_weights_then_keys_and_values_then_foreseen_weights(path: Path) -> None:
    reader, source = Reader(1), opened(path, Gated)
    order: list[str] = []

    class Noted(PlainRest):
        def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
            order.append(f"kv after {len(source.offsets)} reads")

    running, foreseen, needed = (Ticket([span(source, offset, 10)]) for offset in (0, 10_000, 20_000))
    reader.submit(running)
    until(lambda: source.offsets == [0])
    reader.submit(foreseen)
    link, place = ReaderKvLink(reader), torch.zeros(1, 1, 4, 8)
    kv = link.prepare([(Noted(place, 4, plain_memory), place)])
    link.start(kv)
    reader.submit(needed, urgent=True)
    source.gate.release(3)
    until(lambda: foreseen.done)
    assert source.offsets == [0, 20_000, 10_000] and order == ["kv after 2 reads"]
    reader.close()
    source.close()


def test_what_is_waited_for_overtakes_what_is_not(path: Path) -> None:
    """Weights that were foreseen and are needed now go before keys and values of the next layer."""
    reader, source = Reader(1), opened(path, Gated)
    order: list[int] = []

    class Noted(PlainRest):
        def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
            order.append(len(source.offsets))

    running, other, foreseen = (Ticket([span(source, offset, 10)]) for offset in (0, 10_000, 20_000))
    for ticket in (running, other, foreseen):
        reader.submit(ticket)
    until(lambda: source.offsets == [0])
    link, place = ReaderKvLink(reader), torch.zeros(1, 1, 4, 8)
    kv = link.prepare([(Noted(place, 4, plain_memory), place)])
    link.start(kv)
    waiting = threading.Thread(target=reader.wait, args=(foreseen,), daemon=True)
    waiting.start()
    until(lambda: foreseen in reader._lanes[0])
    source.gate.release(3)
    waiting.join(10)
    until(lambda: other.done)
    assert source.offsets == [0, 20_000, 10_000] and order == [2]
    reader.close()
    source.close()


def test_one_that_is_waited_for_takes_along_what_must_be_done_before_it(path: Path) -> None:
    reader, source = Reader(1), opened(path, Gated)
    running, other, first = (Ticket([span(source, offset, 10)]) for offset in (0, 10_000, 20_000))
    second = Ticket([span(source, 30_000, 10)], after=[first])
    for ticket in (running, other, first, second):
        reader.submit(ticket)
    until(lambda: source.offsets == [0])
    waiting = threading.Thread(target=reader.wait, args=(second,), daemon=True)
    waiting.start()
    until(lambda: second in reader._lanes[0])
    source.gate.release(4)
    waiting.join(10)
    until(lambda: other.done)
    assert source.offsets == [0, 20_000, 30_000, 10_000]
    reader.close()
    source.close()


def test_a_limit_holds_for_weights_alone(threads: Reader) -> None:
    threads.limit = 1  # a byte a second
    like = torch.randn(1, 1, 100, 8)
    rest, out, link = PlainRest(like, 100, plain_memory), torch.zeros_like(like), ReaderKvLink(threads)
    rest.put(0, like)
    ticket = link.prepare([(rest, out)])
    link.start(ticket)
    link.wait(ticket)
    assert torch.equal(out, like)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_said(threads: Reader) -> None:
    class Dying(PlainRest):
        def get(self, start: int, out: torch.Tensor, *, wait: bool = True) -> None:
            raise RuntimeError("a bug")

    place = torch.zeros(1, 1, 4, 8)
    link = ReaderKvLink(threads)
    ticket = link.prepare([(Dying(place, 4, plain_memory), place)])
    link.start(ticket)
    with pytest.raises(LinkError, match="keys and values: a reader thread died at token 0"):
        link.wait(ticket)


def test_a_closed_reader_closes_the_link() -> None:
    reader = Reader(1, largest_bytes=0)
    link = ReaderKvLink(reader)
    assert link.open
    link.close()
    link.close()
    assert not link.open
