"""What is told of the moments of an answer: parts that sum up, and nothing that is not known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest

from omni_ws.core.chunks import (
    MOMENTS,
    PARTS,
)
from omni_ws.engine.base import TurnTimes

#: Of an ordinary spoken turn, in seconds.
WHOLE = {
    "speech_ended": 10.0,
    "turn_decided": 10.3,
    "input_ended": 10.3,
    "engine_started": 8.5,
    "transcript_settled": 10.4,
    "llm_asked": 10.4,
    "first_token": 10.6,
    "first_clause": 10.65,
    "first_audio_made": 10.8,
    "first_audio_sent": 10.81,
    "first_audio_played": 10.9,
}


def times_of(moments: Mapping[str, float], *, awaits_transcript: bool = True) -> TurnTimes:
    times = TurnTimes()
    for name, when in moments.items():
        assert name in MOMENTS
        setattr(times, name, when)
    times.awaits_transcript = awaits_transcript
    return times


def told(times: TurnTimes) -> dict[str, int]:
    return {part.name: round(part.seconds * 1000) for part in times.parts()}


def test_an_ordinary_turn() -> None:
    times = times_of(WHOLE)
    assert told(times) == {
        "turn_decision": 300,
        "queue": 0,
        "recognition": 100,
        "llm_first_token": 200,
        "first_clause": 50,
        "voice": 150,
        "sending": 10,
        "playing": 90,
    }
    assert times.mouth_to_ear == pytest.approx(0.9)
    assert times.in_ms() == {
        "speech_ended": 0,
        "input_ended": 300,
        "turn_decided": 300,
        "engine_started": -1500,
        "transcript_settled": 400,
        "llm_asked": 400,
        "first_token": 600,
        "first_clause": 650,
        "first_audio_made": 800,
        "first_audio_sent": 810,
        "first_audio_played": 900,
    }


def test_what_was_ready_before_it_was_waited_for_took_no_time() -> None:
    begun_at_a_pause = {"llm_asked": 10.1, "first_token": 10.2, "first_clause": 10.22, "first_audio_made": 10.35}
    times = times_of({**WHOLE, **begun_at_a_pause, "transcript_settled": 10.31, "first_audio_sent": 10.36})
    assert told(times) == {
        "turn_decision": 300,
        "queue": 0,
        "recognition": 10,
        "llm_first_token": 0,
        "first_clause": 0,
        "voice": 40,
        "sending": 10,
        "playing": 540,
    }


def test_an_llm_that_hears_by_itself_waits_for_no_transcript() -> None:
    times = times_of({**WHOLE, "transcript_settled": 11.5}, awaits_transcript=False)
    assert "recognition" not in told(times)
    assert told(times)["llm_first_token"] == 300
    assert times.in_ms()["transcript_settled"] == 1500


def test_a_part_whose_end_is_not_known_is_in_the_next() -> None:
    times = times_of({name: when for name, when in WHOLE.items() if name not in ("first_token", "first_clause")})
    assert "llm_first_token" not in told(times)
    assert told(times)["voice"] == 400


def test_without_speech_the_end_of_the_input_counts() -> None:
    spoken = ("speech_ended", "turn_decided", "transcript_settled")
    times = times_of({name: when for name, when in WHOLE.items() if name not in spoken})
    assert times.origin == 10.3
    assert times.mouth_to_ear is None
    assert next(iter(told(times))) == "queue"
    assert times.in_ms()["input_ended"] == 0


def test_without_an_end_nothing_is_told() -> None:
    times = times_of({"first_token": 1.0, "first_audio_sent": 2.0})
    assert (times.in_ms(), times.parts(), times.mouth_to_ear) == ({}, [], None)


def test_a_request_that_came_from_another_server_tells_nothing() -> None:
    times = times_of(WHOLE)
    times.moved = True
    assert (times.in_ms(), times.parts(), times.mouth_to_ear) == ({}, [], None)


def test_counts_are_told_where_there_are_any() -> None:
    times = times_of({"speech_ended": 1.0})
    assert times.in_ms() == {"speech_ended": 0}
    times.turn_decided_audio_ms = 0
    times.discard(0.25, 0)
    assert times.in_ms() == {"speech_ended": 0, "turn_decided_audio_ms": 0, "discarded_ms": 250}
    times.discard(0.25, 7)
    assert times.in_ms()["discarded_ms"] == 500
    assert times.in_ms()["discarded_tokens"] == 7


def test_parts_join_and_sum_up_whatever_is_known_in_whatever_order() -> None:
    generator = random.Random(41)
    names = [name for name in MOMENTS if name != "speech_ended"]
    for _ in range(2000):
        known = {name: 10 + 2 * generator.random() - 0.5 for name in names if generator.random() < 0.7}
        times = times_of({"speech_ended": 10.0, **known}, awaits_transcript=generator.random() < 0.5)
        parts = times.parts()
        assert all(one.ended == other.began for one, other in itertools.pairwise(parts))
        assert all(part.seconds >= 0 for part in parts)
        if parts:
            assert parts[0].began == 10.0
            assert parts[-1].ended == max(10.0, *(getattr(times, dict(PARTS)[part.name]) for part in parts))
