from __future__ import annotations

import contextlib
import io
import struct
import wave
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.audio.container import WavHeader, WavHeaderReader, wav_header
from omni_ws.audio.pcm import SampleLayout
from omni_ws.errors import UnsupportedFormat

GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) & 1)


def fmt(code: int, bits: int, *, channels: int = 1, rate: int = 16000, extra: bytes = b"") -> bytes:
    block = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits) + extra)


def riff(*chunks: bytes, magic: bytes = b"RIFF") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return magic + struct.pack("<I", len(body)) + body


def read(data: bytes) -> tuple[WavHeader | None, bytes]:
    reader = WavHeaderReader()
    reader.feed(data)
    return reader.header, reader.rest


@pytest.mark.parametrize(
    ("code", "bits", "layout"),
    [
        (1, 8, SampleLayout.U8),
        (1, 16, SampleLayout.S16),
        (1, 24, SampleLayout.S24),
        (1, 32, SampleLayout.S32),
        (3, 32, SampleLayout.F32),
        (3, 64, SampleLayout.F64),
        (6, 8, SampleLayout.A_LAW),
        (7, 8, SampleLayout.MU_LAW),
    ],
)
@pytest.mark.parametrize("extensible", [False, True])
def test_every_kind(code: int, bits: int, layout: SampleLayout, extensible: bool) -> None:
    extra = struct.pack("<HHIH", 22, bits, 0, code) + GUID_TAIL if extensible else b""
    header = fmt(0xFFFE if extensible else code, bits, channels=2, rate=48000, extra=extra)
    assert read(riff(header, chunk(b"data", b"1234"))) == (WavHeader(layout, 48000, 2, 4), b"1234")


@given(cuts=st.lists(st.integers(0, 200), max_size=10))
def test_the_header_may_be_cut_anywhere(cuts: list[int]) -> None:
    data = riff(
        chunk(b"JUNK", b"x" * 29), fmt(1, 24, channels=3), chunk(b"LIST", b"fmt data"), chunk(b"data", b"ab" * 20)
    )
    reader = WavHeaderReader()
    rest = b""
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(borders):
        if reader.header is None:
            reader.feed(data[start:end])
            rest += reader.rest
        else:
            rest += data[start:end]
    assert reader.header == WavHeader(SampleLayout.S24, 16000, 3, 40)
    assert rest == b"ab" * 20


def test_byte_by_byte() -> None:
    data = riff(chunk(b"odd ", b"123"), fmt(1, 16), chunk(b"data", b""))
    reader = WavHeaderReader()
    for position in range(len(data)):
        assert reader.header is None
        reader.feed(data[position : position + 1])
    assert reader.header == WavHeader(SampleLayout.S16, 16000, 1, None)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_an_unknown_size_is_no_size(size: int) -> None:
    header, rest = read(riff(fmt(1, 16)) + b"data" + struct.pack("<I", size) + b"abcd")
    assert header is not None
    assert header.data_bytes is None
    assert rest == b"abcd"


def test_rf64_has_its_size_elsewhere() -> None:
    sizes = chunk(b"ds64", struct.pack("<QQQI", 1000, 5_000_000_000, 0, 0))
    header, _ = read(riff(sizes, fmt(1, 16), magic=b"RF64") + b"data" + b"\xff" * 4)
    assert header is not None
    assert header.data_bytes == 5_000_000_000


def test_a_huge_unknown_chunk_is_skipped_without_being_kept() -> None:
    reader = WavHeaderReader()
    reader.feed(riff() + b"blob" + struct.pack("<I", 50_000_000))
    for _ in range(50):
        reader.feed(bytes(1_000_000))
        assert len(reader._buffer) < 16
    reader.feed(fmt(1, 16) + chunk(b"data", b"12"))
    assert reader.header == WavHeader(SampleLayout.S16, 16000, 1, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x", "RIFF"),
        (b"RIFX\0\0\0\0WAVE", "RIFF"),
        (b"RIFF\0\0\0\0AVI ", "not WAVE"),
        (riff(chunk(b"data", b"1234")), "data chunk precedes"),
        (riff(chunk(b"fmt ", b"1234")), "too short"),
        (riff() + b"fmt \0\0\0\x7f", "bytes"),
        (riff(fmt(2, 8)), "0x0002"),
        (riff(fmt(0x55, 8)), "0x0055"),
        (riff(fmt(1, 12)), "unsupported wav format"),
        (riff(fmt(1, 16, rate=7999)), "got 7999"),
        (riff(fmt(1, 16, rate=192_001)), "got 192001"),
        (riff(fmt(1, 16, channels=0)), "channels must be .* got 0"),
        (riff(fmt(1, 16, channels=33)), "channels must be .* got 33"),
        (riff(fmt(0xFFFE, 16)), "extensible"),
        (riff(fmt(0xFFFE, 16, extra=bytes(24))), "extensible"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        read(data)


@given(st.binary(max_size=200), st.sampled_from([b"", riff(), riff(fmt(1, 16)), riff()[:8]]))
def test_anything_is_read_or_refused(garbage: bytes, beginning: bytes) -> None:
    with contextlib.suppress(UnsupportedFormat):
        read(beginning + garbage)


def test_written_headers_are_read_by_others() -> None:
    data = wav_header(sample_rate=24000, channels=2, data_bytes=8) + b"12345678"
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (24000, 2, 2, 2)
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8


@pytest.mark.parametrize("data_bytes", [None, 2**32])
def test_a_stream_has_no_length(data_bytes: int | None) -> None:
    header = wav_header(sample_rate=24000, channels=1, data_bytes=data_bytes)
    assert header[4:8] == header[40:44] == b"\xff" * 4
    assert read(header)[0] == WavHeader(SampleLayout.S16, 24000, 1, None)
