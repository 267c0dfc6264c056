"""Compressed sound of calls: few decoders are open at once, however many answers there are."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.call_sound import RATE, noise, tracks

from omni_ws.audio.codec import AudioEncoder
from omni_ws.calls.lines import CallLines
from omni_ws.calls.reading import MOST_OPEN, CompressedStreams
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.wire.recording import HeaderLine, SoundLine, encode_line

MP3 = AudioFormat(AudioEncoding.MP3, RATE)


def mp3(seconds: float) -> bytes:
    encoder = AudioEncoder(MP3, source_rate=RATE)
    return encoder.encode(noise(1, seconds)) + encoder.flush()


@pytest.mark.parametrize("more", [0, 1])
def test_the_stream_that_was_left_longest_is_given_up(more: int) -> None:
    data, before = mp3(1.0), threading.active_count()
    half = len(data) // 2
    streams = CompressedStreams(RATE)
    for number in range(MOST_OPEN + more):
        assert len(streams.decode(str(number), MP3, data[:half]))
        assert threading.active_count() <= before + MOST_OPEN
    assert len(streams.decode("1", MP3, data[half:]))
    assert bool(len(streams.decode("0", MP3, data[half:]))) is not bool(more)
    streams.close()
    assert not len(streams.decode("1", MP3, data))


def test_a_broken_stream_ends() -> None:
    streams = CompressedStreams(RATE)
    assert not len(streams.decode("a", MP3, b"no sound" * 100))
    assert not len(streams.decode("a", MP3, mp3(1.0)))
    assert len(streams.decode("b", MP3, mp3(1.0)))
    streams.close()


def test_more_compressed_answers_than_decoders(tmp_path: Path) -> None:
    data, count = mp3(0.5), 2 * MOST_OPEN
    header = HeaderLine(
        recording="omni_ws",
        version=1,
        kind="webrtc",
        id="sess_1",
        server="1",
        engine="e",
        model="m",
        started="2026-01-01T00:00:00.000+00:00",
        payloads=True,
    )
    path = tmp_path / "20260101T000000_sess_1.ndjson"
    sounds = [
        SoundLine(at=1000.0 * n, by="server", format="mp3", sample_rate=RATE, audio=data, request_id=f"req_{n}")
        for n in range(count)
    ]
    path.write_bytes(encode_line(header) + b"".join(map(encode_line, sounds)))
    _, right, rate = tracks(CallLines(path))
    loud = [np.abs(right[n * rate : n * rate + rate // 3]).mean() > 0.05 for n in range(count)]
    assert all(loud)
