from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.core.start_policy import Alignment, InputAccumulator, by_timestamp

#: 32 bytes per millisecond.
AUDIO = AudioFormat(AudioEncoding.PCM16, 16_000, 1)


def audio(milliseconds: int, *, timestamp_ms: int | None = None) -> InputChunk:
    return InputChunk(Modality.AUDIO, bytes(32 * milliseconds), timestamp_ms=timestamp_ms)


def text(content: str, *, timestamp_ms: int | None = None) -> InputChunk:
    return InputChunk(Modality.TEXT, content.encode(), timestamp_ms=timestamp_ms)


def test_counts_what_it_keeps() -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    chunks = (
        audio(20),
        audio(30),
        text("naïve 日本 😀"),
        InputChunk(Modality.IMAGE, b"png"),
        InputChunk(Modality.VIDEO, b"webm"),
    )
    for chunk in chunks:
        accumulator.append(chunk)
    summary = accumulator.summary
    assert summary.chunks == 5
    assert summary.bytes == sum(len(chunk.payload) for chunk in chunks)
    assert summary.audio_ms == pytest.approx(50)
    assert summary.text_chars == len("naïve 日本 😀")
    assert (summary.images, summary.video_chunks) == (1, 1)
    assert accumulator.take() == chunks
    assert accumulator.take() == ()


@given(st.text(), st.integers(0, 40))
def test_characters_are_counted_however_the_text_is_cut(content: str, cut: int) -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    data = content.encode()
    for payload in (data[:cut], data[cut:]):
        accumulator.append(InputChunk(Modality.TEXT, payload))
    assert accumulator.summary.text_chars == len(content)


def test_parts_are_runs_of_one_modality() -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    accumulator.append(audio(100))
    accumulator.append(audio(100))
    assert accumulator.summary.open_part_audio_ms == pytest.approx(200)
    assert accumulator.summary.closed_parts == set()
    accumulator.append(text("a"))
    assert accumulator.summary.open_part is Modality.TEXT
    assert accumulator.summary.closed_parts == {Modality.AUDIO}
    accumulator.append(audio(50))
    assert accumulator.summary.open_part_audio_ms == pytest.approx(50)
    assert accumulator.summary.audio_ms == pytest.approx(250)
    assert accumulator.summary.closed_parts == {Modality.AUDIO, Modality.TEXT}


def test_an_empty_chunk_counts_for_nothing() -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    accumulator.append(text("a"))
    accumulator.append(InputChunk(Modality.AUDIO, b""), keep=False)
    assert accumulator.summary.chunks == 1
    assert accumulator.summary.open_part is Modality.TEXT


def test_counting_keeps_nothing() -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    accumulator.append(audio(40), keep=False)
    assert accumulator.summary.audio_ms == pytest.approx(40)
    assert accumulator.take() == ()


def test_arrival_keeps_the_order_of_the_sequence() -> None:
    accumulator = InputAccumulator(audio=AUDIO)
    chunks = (audio(1, timestamp_ms=200), text("a", timestamp_ms=100))
    for chunk in chunks:
        accumulator.append(chunk)
    assert accumulator.take() == chunks


def test_timestamps_interleave_modalities() -> None:
    accumulator = InputAccumulator(audio=AUDIO, alignment=Alignment.TIMESTAMP)
    late, early = audio(1, timestamp_ms=200), text("a", timestamp_ms=100)
    for chunk in (late, early):
        accumulator.append(chunk)
    assert accumulator.take() == (early, late)


def test_a_chunk_without_timestamp_stays_behind_the_one_it_followed() -> None:
    first, second, third = text("1"), text("2", timestamp_ms=50), text("3")
    early = text("0", timestamp_ms=10)
    assert by_timestamp([first, second, third, early]) == (first, early, second, third)


@given(st.lists(st.integers(0, 5)))
def test_equal_timestamps_keep_their_order(stamps: list[int]) -> None:
    chunks = [InputChunk(Modality.TEXT, bytes([i]), i, timestamp_ms=stamp) for i, stamp in enumerate(stamps)]
    order = [(chunk.timestamp_ms, chunk.sequence_id) for chunk in by_timestamp(chunks)]
    assert order == sorted((stamp, i) for i, stamp in enumerate(stamps))
