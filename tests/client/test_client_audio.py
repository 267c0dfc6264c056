"""Audio in the client: WAV files, pacing, playback, standard input."""

from __future__ import annotations

import asyncio
import struct
import threading
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.client import AudioChunk
from omni_ws.client.audio import (
    AnswerBuffer,
    Pcm16,
    PlaybackBuffer,
    UnreadableAudio,
    paced,
    pieces,
    read_ahead,
    read_wav,
    write_wav,
)


@pytest.mark.parametrize(
    ("width", "data", "samples"),
    [
        (1, bytes([128, 255, 0]), (0, 0x7F00, -0x8000)),
        (2, struct.pack("<3h", 0, 32767, -32768), (0, 32767, -32768)),
        (3, b"\0\0\0\xff\xff\x7f\0\0\x80", (0, 32767, -32768)),
        (4, struct.pack("<3i", 0, 2**31 - 1, -(2**31)), (0, 32767, -32768)),
    ],
)
def test_every_width_becomes_16_bit(tmp_path: Path, width: int, data: bytes, samples: tuple[int, ...]) -> None:
    path = tmp_path / "x.wav"
    with wave.open(str(path), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(width)
        writer.setframerate(8000)
        writer.writeframes(data)
    audio = read_wav(path)
    assert struct.unpack("<3h", audio.samples) == samples
    assert (audio.sample_rate, audio.channels) == (8000, 1)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    audio = Pcm16(bytes(range(200)), 44_100, 2)
    write_wav(tmp_path / "x.wav", audio)
    assert read_wav(tmp_path / "x.wav") == audio
    assert audio.duration_ms == pytest.approx(50 / 44.1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"RIFF",
        b"hello, I am no WAV file at all, whatever they say",
        b"RIFF\0\0\0\0WAVE",
        struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 236, b"WAVE", b"fmt ", 0x7000_0010, 1, 1, 16_000, 32_000, 2, 16)
        + bytes(200),
    ],
)
def test_a_file_that_is_no_wav(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(content)
    with pytest.raises(UnreadableAudio):
        read_wav(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_wav(tmp_path / "x.wav")


def test_pieces_hold_whole_frames() -> None:
    audio = Pcm16(bytes(4 * 700), 16_000, 2)
    cut = list(pieces(audio, piece_ms=20))
    assert [len(piece) for piece in cut] == [4 * 320, 4 * 320, 4 * 60]
    assert b"".join(cut) == audio.samples
    assert list(pieces(Pcm16(b"", 8000))) == []


@pytest.mark.virtual_clock
async def test_pacing_does_not_drift() -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    seen: list[float] = []
    async for _ in paced([b""] * 100, interval=0.02):
        seen.append(loop.time() - start)
        if len(seen) == 50:
            await asyncio.sleep(0.05)  # virtual: a hold-up
    assert seen[0] == pytest.approx(0.02)
    assert seen[49] == pytest.approx(1.0)
    assert seen[50] == seen[51] == pytest.approx(1.05)
    assert seen[99] == pytest.approx(2.0)


def test_playing_waits_for_the_prefill_and_has_no_gap() -> None:
    buffer = PlaybackBuffer(prefill_bytes=6)
    buffer.write(b"abcde")
    assert buffer.read(2) == b"\0\0"
    buffer.write(b"f")
    assert [buffer.read(4), buffer.read(1)] == [b"abcd", b"e"]
    buffer.write(b"gh")
    assert buffer.read(3) == b"fgh"
    assert (buffer.played_bytes, buffer.underruns, buffer.buffered_bytes) == (8, 0, 0)
    assert not buffer.idle


def test_the_end_plays_what_is_there() -> None:
    buffer = PlaybackBuffer(prefill_bytes=100)
    buffer.write(b"ab")
    buffer.end()
    assert [buffer.idle, buffer.read(4), buffer.idle] == [False, b"ab\0\0", True]
    assert buffer.underruns == 0


def test_an_underrun_fills_up_again() -> None:
    buffer = PlaybackBuffer(prefill_bytes=2)
    buffer.write(b"abc")
    assert buffer.read(4) == b"abc\0"
    assert buffer.underruns == 1
    buffer.write(b"d")
    assert buffer.read(1) == b"\0"
    buffer.write(b"e")
    assert buffer.read(2) == b"de"


def test_a_buffer_that_is_drained_exactly_goes_on() -> None:
    buffer = PlaybackBuffer(prefill_bytes=4)
    buffer.write(b"abcd")
    assert [buffer.read(2), buffer.read(2)] == [b"ab", b"cd"]
    buffer.write(b"ef")
    assert [buffer.read(2), buffer.underruns, buffer.read(2), buffer.underruns] == [b"ef", 0, b"\0\0", 1]


def test_silence_at_once() -> None:
    buffer = PlaybackBuffer(prefill_bytes=0)
    buffer.write(b"abc")
    assert buffer.read(1) == b"a"
    buffer.clear()
    assert (buffer.read(2), buffer.idle, buffer.played_bytes) == (b"\0\0", True, 0)


def test_a_thread_reads_what_another_writes() -> None:
    buffer = PlaybackBuffer(prefill_bytes=0)
    heard = bytearray()

    def play() -> None:
        while len(heard) < 100_000:
            heard.extend(buffer.read(max(1, min(buffer.buffered_bytes, 333))) if buffer.buffered_bytes else b"")

    card = threading.Thread(target=play)
    card.start()
    said = bytes(1 + number % 255 for number in range(100_000))
    for start in range(0, len(said), 100):
        buffer.write(said[start : start + 100])
    card.join(PATIENCE_SEC)
    assert bytes(heard) == said


async def test_standard_input_is_read_ahead_but_not_far() -> None:
    reads: list[int] = []
    supply: Iterator[bytes] = iter([*(bytes([number]) for number in range(100)), b""])

    def read() -> bytes:
        reads.append(1)
        return next(supply)

    stream = read_ahead(read)
    assert await anext(stream) == b"\0"
    assert len(reads) <= 10
    rest = [data async for data in stream]
    assert rest == [bytes([number]) for number in range(1, 100)]


async def test_a_read_that_fails_is_told() -> None:
    def read() -> bytes:
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        [data async for data in read_ahead(read)]


async def test_a_read_that_never_returns_holds_up_nobody() -> None:
    released = threading.Event()

    def read() -> bytes:
        released.wait(PATIENCE_SEC)
        return b""

    stream = read_ahead(read)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await stream.aclose()
    released.set()


def test_it_is_known_what_was_heard_of_which_answer() -> None:
    """At 1 kHz a millisecond has two bytes. The second answer goes on behind its first 50 ms."""
    buffer = AnswerBuffer(1000, prefill_ms=0)
    found = [buffer.heard]
    buffer.play(AudioChunk("a", 0, bytes(100), "pcm16", 1000, 0))
    buffer.play(AudioChunk("a", 1, bytes(100), "pcm16", 1000, 50))
    buffer.play(AudioChunk("b", 2, bytes(100), "pcm16", 1000, 50))
    for size in (198, 22):
        buffer.read(size)
        found.append(buffer.heard)
    assert buffer.answers == ["b"]
    buffer.clear()
    assert [*found, buffer.heard] == [None, ("a", 99.0), ("b", 60.0), None]
    assert not buffer.answers
