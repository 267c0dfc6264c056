"""The alternation of parser and caller, with parsers that do not need libav."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import av.error
import pytest
from support.patience import PATIENCE_SEC

from omni_ws.audio.compressed import usable_frames
from omni_ws.audio.container import ByteSource, ContainerReader
from omni_ws.errors import UnsupportedFormat

NAME = "decode-test"


def blocks_of_four(source: ByteSource) -> Iterator[bytes]:
    while block := source.read(4):
        yield block


def failing(source: ByteSource) -> Iterator[bytes]:
    yield source.read(4)
    raise UnsupportedFormat("enough")


def reader(parse: object = blocks_of_four, burst: int = 1000) -> ContainerReader[bytes]:
    return ContainerReader(parse, cost=len, burst=burst, block_bytes=4, name=NAME)  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_everything_so_far_is_parsed_when_pieces_returns() -> None:
    source = reader()
    assert list(source.feed(b"abcdef")) == [b"abcd"]
    assert list(source.feed(b"")) == []
    assert list(source.feed(b"gh")) == [b"efgh"]
    assert list(source.feed(b"i")) == []
    assert list(source.finish()) == [b"i"]
    assert list(source.finish()) == []
    source.close()
    assert not threads()


def test_a_parser_that_runs_ahead_is_halted() -> None:
    produced = 0

    def endless(source: ByteSource) -> Iterator[bytes]:
        nonlocal produced
        source.read(1)
        while True:
            produced += 1
            yield bytes(10)

    source = reader(endless, burst=100)
    pieces = source.feed(b"start")
    for _ in range(35):
        next(pieces)
    assert produced <= 50
    source.close()
    assert not threads()


def test_good_results_come_before_the_error() -> None:
    source = reader(failing)
    pieces = source.feed(b"12345678")
    assert next(pieces) == b"1234"
    with pytest.raises(UnsupportedFormat, match="enough"):
        next(pieces)
    with pytest.raises(UnsupportedFormat, match="enough"):
        next(source.feed(b"ignored"))
    source.close()


def test_a_foreign_error_is_not_swallowed() -> None:
    def broken(source: ByteSource) -> Iterator[bytes]:
        yield bytes(1 // len(source.read(1)[1:]))

    source = reader(broken)
    with pytest.raises(ZeroDivisionError):
        list(source.feed(b"x"))
    source.close()


def test_a_dropped_reader_takes_its_thread_along() -> None:
    source = reader()
    assert list(source.feed(b"abcdef"))
    (thread,) = threads()
    del source
    gc.collect()
    thread.join(PATIENCE_SEC)
    assert not thread.is_alive()


def test_close_before_the_first_byte_and_use_after() -> None:
    source = reader()
    source.close()
    source.close()
    assert list(source.feed(b"abcd")) == []
    assert not threads()


def test_many_at_a_time() -> None:
    readers = [reader() for _ in range(50)]
    for round_ in range(20):
        for source in readers:
            assert list(source.feed(b"%04d" % round_)) == [b"%04d" % round_]
    for source in readers:
        source.close()
    assert not threads()


def frames_of(packets: str) -> list[str]:
    """Decode packets that are good or, where they are ``x``, cannot be decoded."""

    def decode(packet: str) -> list[str]:
        if packet == "x":
            raise av.error.InvalidDataError(1, "broken")
        return [packet]

    return list(usable_frames(packets, decode, "thing"))


def test_a_few_broken_packets_are_forgiven_if_others_are_good() -> None:
    assert frames_of("x" * 7 + "g" * 7) == ["g"] * 7
    with pytest.raises(UnsupportedFormat, match="no usable packet"):
        frames_of("x" * 7 + "g" * 6)
    with pytest.raises(UnsupportedFormat, match="data is corrupt"):
        frames_of("x" * 8 + "g" * 100)


def test_of_many_packets_as_many_may_be_broken_as_are_good() -> None:
    with pytest.raises(UnsupportedFormat, match="no usable packet"):
        frames_of("")
    assert len(frames_of("g" * 20 + "x" * 20)) == 20
    with pytest.raises(UnsupportedFormat, match="data is corrupt"):
        frames_of("g" * 20 + "x" * 21)
