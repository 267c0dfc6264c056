"""Files one behind the other in one stream: where they end, whatever the pieces, and what stands behind them."""

from __future__ import annotations

import io
import random
import struct
from functools import cache
from itertools import pairwise
from typing import Any

import av
import numpy as np
import pytest

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import wav_header
from omni_ws.audio.files import (
    MAX_FLAC_LOOKS,
    FileCutter,
    FileEvent,
    FileMark,
    frame_ends,
)
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.core.file_heads import FileKind

CONTAINERS = {
    FileKind.OGG: ("ogg", "libopus", AudioEncoding.OGG),
    FileKind.FLAC: ("flac", "flac", AudioEncoding.FLAC),
    FileKind.MP3: ("mp3", "libmp3lame", AudioEncoding.MP3),
    FileKind.ADTS: ("adts", "aac", AudioEncoding.AAC),
    FileKind.MATROSKA: ("webm", "libopus", AudioEncoding.WEBM),
    FileKind.ISO: ("mp4", "aac", AudioEncoding.MP4),
}
KINDS = [FileKind.WAV, *CONTAINERS]
ID3V1 = b"TAG".ljust(128, b"x")
APE = b"APETAGEX" + struct.pack("<IIII8x", 2000, 40, 1, 0xA0000000) + bytes(8) + b"APETAGEX".ljust(32, b"\1")
LYRICS = b"LYRICSBEGINLYR00005hello000023LYRICS200"
STRAY = b"\x01\x02these bytes are nothing" * 5


def wav(samples: int = 800, *, size: int | None = None, rate: int = 16_000) -> bytes:
    pcm = (np.arange(samples) % 900 + 1).astype("<i2").tobytes()
    header = wav_header(sample_rate=rate, channels=1, data_bytes=len(pcm))
    return (header if size is None else header[:-4] + struct.pack("<I", size)) + pcm


@cache
def file_of(kind: FileKind, *, live: bool = False) -> bytes:
    if kind is FileKind.WAV:
        return wav()
    name, codec, _ = CONTAINERS[kind]
    out = io.BytesIO()
    with av.open(out, "w", format=name, options={"live": "1"} if live else {}) as container:
        stream: Any = container.add_stream(codec, rate=48_000, layout="mono")
        tone = (9000 * np.sin(np.arange(48_000) / 17)).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(tone[None, :], format="s16", layout="mono")
        frame.sample_rate = 48_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return out.getvalue()


def summary(events: list[FileEvent]) -> list[object]:
    """Kinds, lengths and ends."""
    found: list[object] = []
    for event in events:
        match event:
            case FileKind() | FileMark.BEGINS:
                found += [None if event is FileMark.BEGINS else event, 0]
            case bytes():
                assert isinstance(found[-1], int)
                found[-1] += len(event)
            case FileMark.ENDS:
                found.append("end")
            case FileMark.STRAY:
                found.append("stray")
    return found


def cut(data: bytes, named: FileKind, *, at: list[int] | None = None, chunks: bool = False) -> list[object]:
    """Feed ``data`` in pieces, which are chunks of the client or not."""
    cutter, events = FileCutter(named), list[FileEvent]()
    for start, end in pairwise([0, *(at or []), len(data)]):
        events += cutter.feed(data[start:end], begins_chunk=chunks or not start)
    return summary([*events, *cutter.finish()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", [b"", bytes(77), ID3V1, LYRICS + ID3V1, APE], ids=["", "0", "v1", "lyrics", "ape"])
def test_a_second_file_begins_behind_the_first(kind: FileKind, between: bytes) -> None:
    data = file_of(kind)
    for second in KINDS:
        first = [kind, len(data) + (len(between) if kind is FileKind.FLAC else 0), "end"]
        whole = data + between + file_of(second)
        wanted = [*first, second, len(file_of(second)), "end"]
        if kind is FileKind.FLAC and second is FileKind.ADTS:
            continue  # bits that its frames contain by chance: such a head has to begin a chunk
        if kind is second is FileKind.ADTS or (kind is second is FileKind.MP3 and not data.startswith(b"ID3")):
            if between:
                continue
            wanted = [kind, len(whole), "end"]  # a frame behind another is no head
        assert cut(whole, kind) == wanted
        dice = random.Random(len(whole))
        for _ in range(3):
            assert cut(whole, kind, at=sorted(dice.randrange(len(whole)) for _ in range(9))) == wanted


def test_false_heads_within_flac_cost_a_bounded_number_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def has_stray_bytes(tail: bytes) -> bool:
        nonlocal looks
        looks += 1
        return True

    monkeypatch.setattr("omni_ws.audio.files._has_stray_bytes", has_stray_bytes)
    data = file_of(FileKind.FLAC) + b"fLaC\0\0\0\x22" * 1000
    assert cut(data, FileKind.FLAC)[:2] == [FileKind.FLAC, len(data)]
    assert looks == MAX_FLAC_LOOKS + 1  # and one at the end of the file


@pytest.mark.parametrize("kind", KINDS)
def test_other_bytes_are_told_once(kind: FileKind) -> None:
    data = file_of(kind)
    events = cut(data + STRAY, kind)
    assert events[0] == kind
    assert events[-1] == "stray"
    # They do not hide what begins with a chunk, and are told once.
    whole = data + STRAY + data + STRAY
    events = cut(whole, kind, at=[len(data + STRAY), len(data + STRAY + data)], chunks=True)
    assert [event for event in events if not isinstance(event, int)] == [kind, "end", "stray", kind, "end"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [b"", bytes(1), bytes(500), ID3V1, APE + ID3V1], ids=["", "0", "zeros", "v1", "ape"])
def test_padding_and_tags_are_no_stray_bytes(kind: FileKind, end: bytes) -> None:
    assert "stray" not in cut(file_of(kind) + end, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_single_bytes_that_are_chunks(kind: FileKind) -> None:
    data = file_of(kind)[:2_500]
    twice = file_of(kind) + data
    assert cut(data, kind, at=list(range(1, len(data))), chunks=True)[:2] == [kind, len(data)]
    begun = len(file_of(kind))
    assert cut(twice, kind, at=list(range(begun - 40, begun + 60)), chunks=True)[0] == kind


@pytest.mark.parametrize("size", [0, 0x7FFF_F000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_wav_without_a_length_ends_with_a_chunk(size: int) -> None:
    one = wav(size=size)
    whole = one + one
    assert cut(whole, FileKind.WAV, at=[len(one)], chunks=True) == [FileKind.WAV, len(one), "end"] * 2
    assert cut(whole, FileKind.WAV, at=[len(one), len(one) + 3], chunks=True) == [FileKind.WAV, len(one), "end"] * 2
    assert cut(whole, FileKind.WAV, at=[len(one) - 1], chunks=True) == [FileKind.WAV, len(whole), "end"]
    assert cut(whole, FileKind.WAV, at=[len(one)]) == [FileKind.WAV, len(whole), "end"]


def test_a_long_wav_has_its_length() -> None:
    long = wav(size=0x7FFF_EFFE)
    assert cut(long + long, FileKind.WAV, at=[len(long)], chunks=True) == [FileKind.WAV, 2 * len(long), "end"]


@pytest.mark.parametrize("padded", [False, True])
def test_an_odd_number_of_bytes_with_and_without_padding(padded: bool) -> None:
    odd = wav_header(sample_rate=8_000, channels=1, data_bytes=5) + b"\x01" * 5 + b"\0" * padded
    assert cut(odd + wav(), FileKind.WAV) == [FileKind.WAV, len(odd), "end", FileKind.WAV, len(wav()), "end"]


def test_chunks_behind_the_samples_belong_to_the_file() -> None:
    behind = b"LIST" + struct.pack("<I", 10) + b"INFOISFT\0\0"
    inside = wav()[:4] + struct.pack("<I", len(wav()) - 8 + 14) + wav()[8:] + b"abcd" + struct.pack("<I", 6) + b"abcdef"
    for file in (wav() + behind, inside):
        assert cut(file + wav(), FileKind.WAV) == [FileKind.WAV, len(file), "end", FileKind.WAV, len(wav()), "end"]


def test_an_empty_wav_is_a_file() -> None:
    empty = wav(0)
    assert cut(empty + wav(), FileKind.WAV) == [FileKind.WAV, 44, "end", FileKind.WAV, len(wav()), "end"]


def test_a_page_that_begins_no_stream_is_no_head() -> None:
    data = file_of(FileKind.OGG)
    second = data.index(b"OggS", 4)
    assert cut(data + data[second:], FileKind.OGG)[-2:] == ["end", "stray"]


@pytest.mark.parametrize("kind", [FileKind.OGG, FileKind.MATROSKA, FileKind.MP3, FileKind.FLAC])
def test_a_recording_that_was_cut_short_ends_where_another_begins_with_a_chunk(kind: FileKind) -> None:
    data = file_of(kind, live=kind is FileKind.MATROSKA)
    part = data[: len(data) // 2]
    wanted = [kind, len(part), "end", kind, len(data), "end"]
    assert cut(part + data, kind, at=[len(part)], chunks=True) == wanted
    single = list(range(len(part) - 5, len(part) + 20))
    assert cut(part + data, kind, at=single, chunks=True) == wanted


def test_heads_inside_of_frames_are_none() -> None:
    """FLAC whose frames happen to contain the bytes of a head."""
    data = file_of(FileKind.FLAC)
    middle = len(data) // 2
    inside = data[:middle] + b"fLaC\0\0\0\x22" + data[middle:]
    assert cut(inside, FileKind.FLAC)[:2] == [FileKind.FLAC, len(inside)]


def test_damage_inside_of_mp3_does_not_end_it() -> None:
    data = file_of(FileKind.MP3)
    middle = len(data) // 2
    assert cut(data[:middle] + b"\x01" * 50 + data[middle:], FileKind.MP3) == [FileKind.MP3, len(data) + 50, "end"]
    assert cut(data[100:], FileKind.MP3) == [None, len(data) - 100, "end"]  # it may begin anywhere


def test_where_frames_of_flac_end() -> None:
    data = file_of(FileKind.FLAC)
    assert len(data) in frame_ends(data)
    assert len(data) in frame_ends(data + STRAY)
    assert frame_ends(b"") == frame_ends(STRAY) == []


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_both_files_is_heard(kind: FileKind) -> None:
    encoding = AudioEncoding.WAV if kind is FileKind.WAV else CONTAINERS[kind][2]
    data = file_of(kind)
    for named in AudioEncoding.WAV, encoding:  # the bytes decide
        lengths = []
        for whole in (data, data + data):
            with AudioDecoder(AudioFormat(named), sample_rate=16_000) as decoder:
                lengths.append(len(decoder.decode(whole)) + len(decoder.flush()))
                assert decoder.take_stray() is None
        assert lengths[1] == pytest.approx(2 * lengths[0], abs=1_000)


def test_wav_in_pieces_sounds_like_one() -> None:
    """Neither a click nor a missing sample at the borders, whatever the rates."""
    tone = (9000 * np.sin(np.arange(44_100) / 17)).astype("<i2").tobytes()
    header = wav_header(sample_rate=44_100, channels=1, data_bytes=14_700)
    whole = wav_header(sample_rate=44_100, channels=1, data_bytes=len(tone)) + tone
    pieces = [header + tone[start : start + 14_700] for start in range(0, len(tone), 14_700)]
    heard = []
    for chunks in ([whole], pieces, [b"".join(pieces)]):
        decoder = AudioDecoder(AudioFormat(AudioEncoding.WAV), sample_rate=16_000)
        heard.append(np.concatenate([*(decoder.decode(chunk) for chunk in chunks), decoder.flush()]))
    assert np.allclose(heard[0], heard[1], atol=1e-6)
    assert np.allclose(heard[0], heard[2], atol=1e-6)


def test_stray_bytes_are_an_error_to_tell() -> None:
    decoder = AudioDecoder(AudioFormat(AudioEncoding.WAV), sample_rate=16_000)
    assert len(decoder.decode(wav() + STRAY)) == 800
    stray = decoder.take_stray()
    assert stray is not None
    assert stray.message == "wav: bytes behind the end of a file are no audio, and were dropped"
    assert decoder.take_stray() is None
    assert len(decoder.decode(wav())) == 800
    assert decoder.take_stray() is None
