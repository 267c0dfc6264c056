"""The playback position of an answer, and the part of its text that was heard."""

from __future__ import annotations

import sys

import pytest

from omni_ws.core.chunks import Word
from omni_ws.service.conversation.playback import MAX_MEASURED_CHARACTERS, Playback, heard_part


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def playing(*, sent_ms: float, clock: Clock | None = None) -> tuple[Playback, Clock]:
    clock = clock or Clock()
    playback = Playback(clock)
    playback.sending(7, 0, sent_ms)
    return playback, clock


def test_nothing_plays_before_the_first_audio() -> None:
    playback = Playback(Clock())
    assert (playback.position_ms, playback.playing, playback.heard_ms) == (0, False, 0)


def test_without_reports_the_clock_counts_from_the_first_audio() -> None:
    playback, clock = playing(sent_ms=1000)
    clock.now += 0.4
    assert playback.position_ms == pytest.approx(400)
    assert playback.position_ms < playback.sent_ms
    clock.now += 0.6
    assert not playback.playing
    clock.now += 10
    assert playback.position_ms == 1000
    assert playback.heard_ms == 1000


def test_the_position_stands_still_in_an_underrun() -> None:
    playback, clock = playing(sent_ms=100)
    clock.now += 5
    playback.sending(8, 100, 600)
    assert playback.position_ms == pytest.approx(100)
    assert playback.first_sequence_id == 7


def test_reports_set_the_position_and_what_was_heard() -> None:
    playback, clock = playing(sent_ms=1000)
    clock.now += 0.5
    playback.report(300)
    assert playback.position_ms == pytest.approx(300)
    clock.now += 0.1
    assert playback.position_ms == pytest.approx(400)
    assert playback.heard_ms == 300
    playback.report(1e9)
    assert playback.heard_ms == 1000


def test_withdrawn_audio_was_not_sent() -> None:
    playback, _ = playing(sent_ms=1000)
    playback.report(900)
    playback.withdraw(400)
    assert (playback.sent_ms, playback.heard_ms) == (400, 400)
    playback.stop()
    assert not playback.playing


TEXT = "It is 9 o'clock, sir. Time for tea!"
WORDS = [
    Word("It", 0, 100),
    Word("is", 100, 200),
    Word("nine", 200, 400),  # spelled out: not to be found
    Word("o'clock", 400, 700),
    Word("sir", 700, 900),
    Word("Time", 1000, 1200),
]


@pytest.mark.parametrize(
    ("played_ms", "heard"),
    [(0, ""), (50, "It"), (300, "It is"), (401, "It is 9 o'clock,"), (900, "It is 9 o'clock, sir."), (1200, TEXT[:26])],
)
def test_words_that_had_begun_were_heard(played_ms: float, heard: str) -> None:
    playback, _ = playing(sent_ms=1200)
    playback.report(played_ms)
    assert heard_part(TEXT, WORDS, playback) == heard


def test_words_without_a_report_are_those_that_were_sent() -> None:
    playback, _ = playing(sent_ms=500)
    assert heard_part(TEXT, WORDS, playback) == "It is 9 o'clock,"


@pytest.mark.parametrize(("played_ms", "heard"), [(0, ""), (400, "one"), (600, "one two"), (1000, "one two three")])
def test_without_words_text_is_cut_in_proportion(played_ms: float, heard: str) -> None:
    playback, _ = playing(sent_ms=1000)
    playback.report(played_ms)
    assert heard_part("one two three", [], playback) == heard


WITH_CODE = "Pay **$20** now:\n```\ntwenty now\n```\nNow."


@pytest.mark.parametrize(
    ("played_ms", "heard"), [(50, ""), (150, "Pay **$20**"), (350, "Pay **$20** now:"), (450, WITH_CODE.rstrip())]
)
def test_words_that_know_their_place_cut_there(played_ms: float, heard: str) -> None:
    playback, _ = playing(sent_ms=500)
    playback.report(played_ms)
    words = [
        Word("Pay", 60, 100, 3),
        Word("$20", 100, 200, 11),
        Word("now", 200, 300, 16),
        Word("code", 300, 350, 17),
        Word("Now", 400, 500, len(WITH_CODE)),
    ]
    assert heard_part(WITH_CODE, words, playback) == heard


def test_without_words_what_is_not_read_takes_no_time() -> None:
    playback, _ = playing(sent_ms=1000)
    playback.report(600)
    assert heard_part(f"one\n```\n{'code ' * 200}\n```\ntwo three", [], playback).endswith("\ntwo")
    long = "word " * MAX_MEASURED_CHARACTERS
    assert len(heard_part(long, [], playback)) == pytest.approx(len(long) * 0.6, abs=5)


def test_without_audio_or_a_report_what_was_sent_counts() -> None:
    assert heard_part("one two", [], Playback(Clock())) == "one two"
    assert heard_part("one two", [], playing(sent_ms=100)[0]) == "one two"


def test_reports_count_underruns_and_the_least_lead() -> None:
    playback, clock = playing(sent_ms=1000)
    clock.now += 0.4
    playback.report(400)
    clock.now += 0.5
    playback.report(900)
    assert playback.least_lead_ms == pytest.approx(100)
    clock.now += 0.3
    playback.sending(8, 1000, 2000)
    assert playback.underruns == 1
    assert playback.underrun_sec == pytest.approx(0.2)
    clock.now += 0.1
    playback.sending(9, 2000, 3000)
    playback.report(100)
    assert playback.underruns == 1
    assert playback.least_lead_ms == pytest.approx(100)


def test_without_reports_there_are_no_statistics() -> None:
    playback, clock = playing(sent_ms=100)
    clock.now += 5
    playback.sending(8, 100, 200)
    assert (playback.underruns, playback.least_lead_ms) == (0, None)


@pytest.mark.parametrize("reports", [True, False])
def test_an_answer_that_is_held_goes_on_where_it_was_heard_to(reports: bool) -> None:
    playback, clock = playing(sent_ms=1000)
    clock.now += 0.4
    if reports:
        playback.report(350)
    playback.hold()
    playback.withdraw(800)
    clock.now += 5
    plays = [playback.playing]
    assert playback.resume_ms == pytest.approx(350 if reports else 400)
    if reports:
        playback.report(380)  # what had been heard when it was held
    playback.go_on()
    plays.append(playback.playing)
    assert playback.sent_ms == 1000
    assert playback.position_ms == pytest.approx(380 if reports else 400)
    clock.now += 0.1
    assert playback.position_ms == pytest.approx(480 if reports else 500)
    assert plays == [False, True]
    assert playback.underruns == 0


def test_an_assumed_position_is_what_was_heard_once_it_is_stopped() -> None:
    times = iter([0.0, 1.0, 1.0, 1.0])
    playback = Playback(lambda: next(times, 9.0), assumed=True)
    playback.sending(0, 0, 3000)
    assert playback.heard_ms == 3000
    playback.stop()
    assert playback.heard_ms == 1000
    playback.report(2000)
    assert playback.heard_ms == 2000
    assert not playback.playing


def test_words_are_found_where_lower_case_is_longer() -> None:
    playback, _ = playing(sent_ms=2000)
    playback.report(900)
    text = "İİİ: İstanbul'a İzmir'den gel dedim"
    words = [Word("İstanbul'a", 0, 400), Word("izmir'den", 400, 800), Word("gel", 1000, 1400)]
    assert heard_part(text, words, playback) == "İİİ: İstanbul'a İzmir'den"


def test_only_one_character_has_a_lower_case_of_another_length() -> None:
    assert [one for one in map(chr, range(sys.maxunicode + 1)) if len(one.lower()) != 1] == ["İ"]
