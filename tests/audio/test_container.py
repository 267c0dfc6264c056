"""The alternation of parser and caller, with parsers that do not need libav."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from omni_ws.audio.container import ByteSource, ContainerReader, PacketTally
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
    source.push(b"abcdef")
    assert list(source.pieces()) == [b"abcd"]
    assert list(source.pieces()) == []
    source.push(b"gh")
    assert list(source.pieces()) == [b"efgh"]
    source.push(b"i")
    source.end_input()
    assert list(source.pieces()) == [b"i"]
    assert list(source.pieces()) == []
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
    source.push(b"start")
    pieces = source.pieces()
    for _ in range(35):
        next(pieces)
    assert produced <= 50
    source.close()
    assert not threads()


def test_good_results_come_before_the_error() -> None:
    source = reader(failing)
    source.push(b"12345678")
    pieces = source.pieces()
    assert next(pieces) == b"1234"
    with pytest.raises(UnsupportedFormat, match="enough"):
        next(pieces)
    source.push(b"ignored")
    with pytest.raises(UnsupportedFormat, match="enough"):
        next(source.pieces())
    source.close()


def test_a_foreign_error_is_not_swallowed() -> None:
    def broken(source: ByteSource) -> Iterator[bytes]:
        yield bytes(1 // len(source.read(1)[1:]))

    source = reader(broken)
    source.push(b"x")
    with pytest.raises(ZeroDivisionError):
        list(source.pieces())
    source.close()


def test_a_dropped_reader_takes_its_thread_along() -> None:
    source = reader()
    source.push(b"abcdef")
    assert list(source.pieces())
    (thread,) = threads()
    del source
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_close_before_the_first_byte_and_use_after() -> None:
    source = reader()
    source.close()
    source.close()
    source.push(b"abcd")
    assert list(source.pieces()) == []
    assert not threads()


def test_many_at_a_time() -> None:
    readers = [reader() for _ in range(50)]
    for round_ in range(20):
        for source in readers:
            source.push(b"%04d" % round_)
            assert list(source.pieces()) == [b"%04d" % round_]
    for source in readers:
        source.close()
    assert not threads()


def test_a_tally_forgives_a_few_broken_packets() -> None:
    tally = PacketTally("thing")
    for _ in range(7):
        tally.count_broken(ValueError())
    with pytest.raises(UnsupportedFormat):
        tally.check_at_end()
    with pytest.raises(UnsupportedFormat, match="data is corrupt"):
        tally.count_broken(ValueError())


def test_a_tally_of_mostly_good_packets() -> None:
    tally = PacketTally("thing")
    with pytest.raises(UnsupportedFormat, match="no usable packet"):
        tally.check_at_end()
    for _ in range(20):
        tally.count_good()
    for _ in range(20):
        tally.count_broken(ValueError())
    tally.check_at_end()
    with pytest.raises(UnsupportedFormat):
        tally.count_broken(ValueError())
