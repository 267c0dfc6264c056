"""What a load test makes of events and of recordings, without a server."""

from __future__ import annotations

import pytest

from omni_ws.bench import (
    LEAD_PIECES,
    AnswerWatch,
    Load,
    MeasuredValues,
    SpokenQuestion,
    Tally,
    TypedQuestion,
    as_json,
    as_text,
)
from omni_ws.caller.script import PIECE_SEC
from omni_ws.client import AudioChunk, ErrorEvent, Final, ResponseStarted, SpeechStarted, TextChunk
from omni_ws.client.audio import Pcm16
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.errors import EngineFailed, PayloadTooLarge

RATE = 16_000


def audio(milliseconds: int, request_id: str = "r1") -> AudioChunk:
    return AudioChunk(request_id, 0, bytes(2 * RATE * milliseconds // 1000), "pcm16", RATE)


def started(request_id: str = "r1") -> ResponseStarted:
    return ResponseStarted(request_id, "end_of_input", 0, "prompt")


def final(request_id: str = "r1", reason: FinishReason = FinishReason.STOP, usage: Usage | None = None) -> Final:
    return Final(request_id, 1, reason, usage)


def tone(seconds: float, level: int = 8000) -> bytes:
    return (level.to_bytes(2, "little") + (-level).to_bytes(2, "little", signed=True)) * round(seconds * RATE / 2)


def test_percentiles_are_values_that_were_measured() -> None:
    values = MeasuredValues()
    assert values.distribution() is None
    for value in range(100, 0, -1):
        values.add(value)
    assert values.distribution() == {"n": 100, "median": 50, "p90": 90, "p99": 99, "max": 100}
    only = MeasuredValues()
    only.add(7.0)
    assert only.distribution() == {"n": 1, "median": 7.0, "p90": 7.0, "p99": 7.0, "max": 7.0}


def test_many_values_take_bounded_memory_and_keep_their_number_and_maximum() -> None:
    values = MeasuredValues(kept=1000)
    for value in range(50_000):
        values.add(value)
    values.add(10**9)
    found = values.distribution()
    assert found is not None
    assert (found["n"], found["max"]) == (50_001, 10**9)
    assert len(values._values) == 1000
    assert found["median"] == pytest.approx(25_000, rel=0.1)


def test_times_count_from_the_end_of_the_input() -> None:
    watch, tally = AnswerWatch(open_microphone=False), Tally()
    watch.input_ended(10.0)
    watch.take(started(), 10.1)
    watch.take(TextChunk("r1", 0, "four"), 10.2)
    watch.take(audio(100), 10.3)
    watch.take(TextChunk("r1", 1, "teen"), 10.35)
    watch.take(final(usage=Usage(output_tokens=2)), 10.5)
    assert watch.is_over
    tally.finish(watch, 10.5)
    report = as_json(Load(url="ws://host/", question=TypedQuestion("?")), tally, interrupted=False)
    for name, milliseconds in (("first_text", 200.0), ("first_audio", 300.0), ("final", 500.0)):
        assert report["ms"][name]["median"] == milliseconds
    assert (report["output"]["characters"], report["output"]["tokens"]) == (8, 2)
    assert report["playback"] == {"answers_with_audio": 1, "with_underruns": 0}


def test_a_player_is_silent_where_audio_is_late() -> None:
    watch, tally = AnswerWatch(open_microphone=False), Tally()
    watch.input_ended(0.0)
    for now in (1.0, 1.05, 1.2, 1.25):  # 100 ms each: the third is on time, to the moment
        watch.take(audio(100), now)
    assert watch.player.gaps == []
    watch.take(audio(100), 1.5)
    assert watch.player.gaps == pytest.approx([0.1])
    assert watch.player.plays_until == pytest.approx(1.6)
    watch.take(final(), 1.6)
    tally.finish(watch, 1.6)
    assert (tally.audible, tally.with_underruns) == (1, 1)


@pytest.mark.parametrize(
    ("reason", "error", "code"),
    [
        (FinishReason.ERROR, EngineFailed("no"), "engine_failed"),
        (FinishReason.ERROR, None, "engine_failed"),
        (FinishReason.CANCELLED, None, "cancelled"),
        (FinishReason.STOP, PayloadTooLarge("no"), "payload_too_large"),
    ],
)
def test_an_error_makes_a_turn_fail_and_is_not_measured(
    reason: FinishReason, error: PayloadTooLarge | EngineFailed | None, code: str
) -> None:
    watch, tally = AnswerWatch(open_microphone=False), Tally(asked=1)
    watch.input_ended(0.0)
    watch.take(TextChunk("r1", 0, "so far"), 0.1)
    if error is not None:
        watch.take(ErrorEvent(error), 0.2)
    watch.take(final(reason=reason), 0.3)
    tally.finish(watch, 0.3)
    assert dict(tally.failed) == {code: 1}
    assert (tally.answered, tally.unfinished, tally.times["first_text"].distribution()) == (0, 0, None)


def test_a_refused_question_gets_no_final() -> None:
    watch = AnswerWatch(open_microphone=False)
    watch.take(ErrorEvent(PayloadTooLarge("no"), blocks_request=True), 0.1)
    assert (watch.is_over, watch.error_code) == (True, "payload_too_large")


def test_an_answer_to_the_first_half_of_a_recording_is_not_its_answer() -> None:
    """It is cut off when the speaker goes on, and its end comes behind the beginning of the speech."""
    watch = AnswerWatch(open_microphone=True)
    watch.take(SpeechStarted(0), 1.0)
    watch.take(started("r1"), 1.1)
    watch.take(audio(100, "r1"), 1.2)
    watch.take(SpeechStarted(1500), 1.5)
    watch.take(audio(100, "r1"), 1.55)
    watch.input_ended(1.8)
    watch.take(final("r1", FinishReason.CANCELLED), 1.9)
    assert (watch.is_over, watch.partial_answers, watch.answer.first_audio_at) == (False, 1, None)
    watch.take(started("r2"), 2.0)
    watch.take(audio(100, "r2"), 2.1)
    watch.take(final("r2"), 2.2)
    assert (watch.is_over, watch.answer.first_audio_at, watch.answer.final_at) == (True, 2.1, 2.2)
    assert watch.player.audio_sec == pytest.approx(0.1)


def test_the_end_of_what_never_began_is_of_the_speech_that_opened_it() -> None:
    """The speaker goes on before the first half is worked on: its request has nothing but an end."""
    watch = AnswerWatch(open_microphone=True)
    watch.take(SpeechStarted(0, "turn_a", "r1"), 1.0)
    watch.take(SpeechStarted(1500, "turn_b", "r2"), 1.5)
    watch.input_ended(1.8)
    watch.take(final("r1", FinishReason.CANCELLED), 1.9)
    assert (watch.is_over, watch.partial_answers, watch.error_code) == (False, 1, None)
    watch.take(audio(100, "r2"), 2.1)
    watch.take(final("r2"), 2.2)
    assert (watch.is_over, watch.answer.final_at) == (True, 2.2)


def test_an_answer_that_is_over_before_the_recording_is_not_its_answer() -> None:
    watch = AnswerWatch(open_microphone=True)
    watch.take(SpeechStarted(0), 1.0)
    watch.take(TextChunk("r1", 0, "early"), 1.1)
    watch.take(final("r1"), 1.2)
    assert (watch.is_over, watch.partial_answers, len(watch.answer.text)) == (False, 1, 0)


def test_the_speech_of_a_recording_ends_before_its_noise() -> None:
    spoken = tone(0.2) + tone(0.3) + tone(0.5, level=100)
    question = SpokenQuestion.of("a.wav", Pcm16(spoken, RATE), turn_detection="server_vad")
    assert (question.last_piece - LEAD_PIECES) * PIECE_SEC == pytest.approx(0.5)
    microphone = question.pieces
    sent = [next(microphone) for _ in range(question.last_piece)]
    assert b"".join(sent[LEAD_PIECES:]) == spoken[: 2 * RATE // 2]
    assert not any(b"".join(sent[:LEAD_PIECES]))
    rest = [next(microphone) for _ in range(100)]
    assert b"".join(rest)[:RATE] == spoken[RATE:]
    assert not any(b"".join(rest)[RATE:])
    assert question.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("samples", [b"", bytes(3200)])
def test_a_recording_without_sound_is_no_question(samples: bytes) -> None:
    with pytest.raises(ValueError, match="no sound"):
        SpokenQuestion.of("a.wav", Pcm16(samples, RATE), turn_detection=None)


def test_what_was_not_observed_is_null_or_absent() -> None:
    load = Load(url="wss://user:secret@host/v1/streaming_input?key=secret", question=TypedQuestion("?"))
    tally = Tally(opened=1, asked=1)
    report = as_json(load, tally, interrupted=True)
    assert set(report["ms"].values()) == {None}
    assert report["output"]["tokens"] is None
    assert report["output"]["tokens_per_second"] is None
    assert report["turns"]["unfinished"] == 1
    text = as_text(load, tally, interrupted=True)
    assert "1 unfinished" in text
    assert "→" not in text
    assert "output" not in text
    assert "secret" not in text + str(report)
