from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, Modality, StartTrigger
from omni_ws.core.request_input import by_timestamp
from omni_ws.core.start_policy import DEFAULT_MIN_LENGTH, ON_END_ONLY, ON_FIRST_CHUNK, InputSummary, StartPolicy


def on_modality(modality: Modality, min_audio_ms: float | None = None) -> StartPolicy:
    return StartPolicy(trigger=StartTrigger.MODALITY, modality=modality, min_audio_ms=min_audio_ms)


def test_on_first_chunk_waits_for_one_that_holds_something() -> None:
    assert not ON_FIRST_CHUNK.should_start(InputSummary())
    assert ON_FIRST_CHUNK.should_start(InputSummary(chunks=1))


def test_on_end_only_never_starts() -> None:
    full = InputSummary(chunks=9, bytes=9, audio_ms=9e9, text_chars=9, closed_parts=set(Modality))
    assert not ON_END_ONLY.should_start(full)


@pytest.mark.parametrize(
    ("minimum", "value", "received"),
    [
        ("min_audio_ms", 250, "audio_ms"),
        ("min_text_chars", 3, "text_chars"),
        ("min_bytes", 100, "bytes"),
        ("min_chunks", 2, "chunks"),
        ("min_video_frames", 2, "images"),
        ("min_video_frames", 2, "video_chunks"),
    ],
)
def test_each_minimum_fires_at_its_value_and_not_below(minimum: str, value: int, received: str) -> None:
    minimums: dict[str, Any] = {minimum: value}
    policy = StartPolicy(**minimums)
    others = {"chunks": 0, "bytes": 0, "audio_ms": 0, "text_chars": 0, "images": 0, "video_chunks": 0}
    below: dict[str, Any] = {**others, received: value - 1}
    at: dict[str, Any] = {**others, received: value}
    assert not policy.should_start(InputSummary(**below))
    assert policy.should_start(InputSummary(**at))


def test_images_and_video_count_together() -> None:
    assert StartPolicy(min_video_frames=2).should_start(InputSummary(images=1, video_chunks=1))


def test_any_minimum_is_enough() -> None:
    policy = StartPolicy(min_audio_ms=1000, min_text_chars=5)
    assert policy.should_start(InputSummary(text_chars=5))
    assert policy.should_start(InputSummary(audio_ms=1000))
    assert not policy.should_start(InputSummary(text_chars=4, audio_ms=999))


def test_no_minimum_never_fires() -> None:
    assert not StartPolicy().should_start(InputSummary(chunks=9, bytes=9, audio_ms=9, text_chars=9, images=9))


@pytest.mark.parametrize(
    ("received", "starts"),
    [
        (InputSummary(audio_ms=399.9), False),
        (InputSummary(audio_ms=400), True),
        (InputSummary(text_chars=1), True),
        (InputSummary(images=1), True),
        (InputSummary(video_chunks=1), True),
        (InputSummary(chunks=5, bytes=5), False),
    ],
)
def test_default_minimums(received: InputSummary, starts: bool) -> None:
    assert DEFAULT_MIN_LENGTH.should_start(received) is starts


def test_on_modality_waits_for_a_closed_part() -> None:
    policy = on_modality(Modality.IMAGE)
    assert not policy.should_start(InputSummary(open_part=Modality.IMAGE, images=1))
    assert not policy.should_start(InputSummary(open_part=Modality.IMAGE, closed_parts={Modality.TEXT}))
    assert policy.should_start(InputSummary(open_part=Modality.TEXT, closed_parts={Modality.IMAGE}))


@pytest.mark.parametrize(
    ("policy", "open_part", "length", "starts"),
    [
        (
            on_modality(Modality.AUDIO, min_audio_ms=500),
            Modality.AUDIO,
            499,
            False,
        ),
        (
            on_modality(Modality.AUDIO, min_audio_ms=500),
            Modality.AUDIO,
            500,
            True,
        ),
        (on_modality(Modality.AUDIO), Modality.AUDIO, 500, False),
        (
            on_modality(Modality.TEXT, min_audio_ms=500),
            Modality.AUDIO,
            500,
            False,
        ),
        (
            on_modality(Modality.AUDIO, min_audio_ms=500),
            Modality.TEXT,
            500,
            False,
        ),
    ],
)
def test_a_segment_of_audio_may_be_closed_by_its_length(
    policy: StartPolicy, open_part: Modality, length: float, starts: bool
) -> None:
    assert policy.should_start(InputSummary(open_part=open_part, open_part_audio_ms=length)) is starts


@pytest.mark.parametrize(
    ("policy", "trigger"),
    [
        (ON_FIRST_CHUNK, StartTrigger.FIRST_CHUNK),
        (ON_END_ONLY, StartTrigger.END_OF_INPUT),
        (StartPolicy(), StartTrigger.MIN_LENGTH),
        (on_modality(Modality.TEXT), StartTrigger.MODALITY),
    ],
)
def test_each_policy_names_its_trigger(policy: StartPolicy, trigger: StartTrigger) -> None:
    assert policy.trigger is trigger


# The totals, and the order before the start.

#: 16-bit samples at 16 kHz.
BYTES_PER_MS = 32


def audio(milliseconds: int) -> InputChunk:
    return InputChunk(Modality.AUDIO, bytes(BYTES_PER_MS * milliseconds))


def text(content: str, *, timestamp_ms: int | None = None) -> InputChunk:
    return InputChunk(Modality.TEXT, content.encode(), timestamp_ms=timestamp_ms)


def test_counts_chunks_of_each_modality() -> None:
    summary = InputSummary()
    chunks = (
        audio(20),
        audio(30),
        text("naïve 日本 😀"),
        InputChunk(Modality.IMAGE, b"png"),
        InputChunk(Modality.VIDEO, b"webm"),
    )
    for chunk in chunks:
        summary.add(chunk, BYTES_PER_MS)
    assert summary.chunks == 5
    assert summary.bytes == sum(len(chunk.payload) for chunk in chunks)
    assert summary.audio_ms == pytest.approx(50)
    assert summary.text_chars == len("naïve 日本 😀")
    assert (summary.images, summary.video_chunks) == (1, 1)


@given(st.text(), st.integers(0, 40))
def test_characters_are_counted_however_the_text_is_cut(content: str, cut: int) -> None:
    summary = InputSummary()
    data = content.encode()
    for payload in (data[:cut], data[cut:]):
        summary.add(InputChunk(Modality.TEXT, payload), BYTES_PER_MS)
    assert summary.text_chars == len(content)


def test_parts_are_runs_of_one_modality() -> None:
    summary = InputSummary()
    summary.add(audio(100), BYTES_PER_MS)
    summary.add(audio(100), BYTES_PER_MS)
    assert summary.open_part_audio_ms == pytest.approx(200)
    assert summary.closed_parts == set()
    summary.add(text("a"), BYTES_PER_MS)
    assert summary.open_part is Modality.TEXT
    assert summary.closed_parts == {Modality.AUDIO}
    summary.add(audio(50), BYTES_PER_MS)
    assert summary.open_part_audio_ms == pytest.approx(50)
    assert summary.audio_ms == pytest.approx(250)
    assert summary.closed_parts == {Modality.AUDIO, Modality.TEXT}


def test_a_chunk_without_timestamp_stays_behind_the_one_it_followed() -> None:
    first, second, third = text("1"), text("2", timestamp_ms=50), text("3")
    early = text("0", timestamp_ms=10)
    assert by_timestamp([first, second, third, early]) == (first, early, second, third)


@given(st.lists(st.integers(0, 5)))
def test_equal_timestamps_keep_their_order(stamps: list[int]) -> None:
    chunks = [InputChunk(Modality.TEXT, bytes([i]), i, timestamp_ms=stamp) for i, stamp in enumerate(stamps)]
    order = [(chunk.timestamp_ms, chunk.sequence_id) for chunk in by_timestamp(chunks)]
    assert order == sorted((stamp, i) for i, stamp in enumerate(stamps))
