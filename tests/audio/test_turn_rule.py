"""The rule of when speech begins and ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.audio.pcm import Samples
from omni_ws.audio.sound_levels import SpeechLasts
from omni_ws.audio.speech_watch import (
    BARGE_IN_BAR,
    MAX_START_SPAN,
    ORDINARY_BAR,
    PauseWords,
    PrefixPadding,
    SpeechOffset,
    SpeechOnset,
    SpeechPause,
    StartBar,
    TurnDetector,
    TurnEvent,
    Unfinished,
)
from omni_ws.audio.vad import WINDOW_MS


def events(detector: TurnDetector, probabilities: list[float]) -> list[TurnEvent]:
    return [event for probability in probabilities if (event := detector.feed(probability)) is not None]


def test_three_of_four_windows_start_a_turn() -> None:
    assert events(TurnDetector(), [0.0, 0.9, 0.1, 0.9, 0.9]) == [SpeechOnset(1 * WINDOW_MS, 5 * WINDOW_MS)]


def test_two_of_four_windows_start_nothing() -> None:
    assert events(TurnDetector(), [0.9, 0.9, 0.1, 0.1, 0.9, 0.9, 0.1, 0.1] * 5) == []


def test_a_probability_at_the_threshold_is_not_speech() -> None:
    assert events(TurnDetector(0.5), [0.5] * 20) == []
    assert len(events(TurnDetector(0.5), [0.51] * 20)) == 1


def test_a_turn_ends_after_the_silence_and_not_before() -> None:
    detector = TurnDetector(silence_duration_ms=480)
    assert len(events(detector, [0.9] * 10)) == 1
    assert events(detector, [0.1] * 14) == []
    assert detector.silent_windows == 14
    assert events(detector, [0.1]) == [SpeechOffset(10 * WINDOW_MS, 25 * WINDOW_MS)]
    assert not detector.speaking


@pytest.mark.parametrize(("silence_ms", "windows"), [(0, 1), (1, 1), (63, 1), (64, 2), (500, 15), (512, 16)])
def test_silence_is_rounded_down_to_windows_but_never_to_none(silence_ms: float, windows: int) -> None:
    detector = TurnDetector(silence_duration_ms=silence_ms)
    events(detector, [0.9] * 3)
    assert events(detector, [0.0] * (windows - 1)) == []
    assert [type(event) for event in events(detector, [0.0])] == [SpeechOffset]


def test_a_voice_that_sinks_goes_on() -> None:
    detector = TurnDetector(silence_duration_ms=320)
    events(detector, [0.9] * 4)
    assert events(detector, [0.4] * 40) == []
    assert detector.silent_windows == 0


def test_a_breath_does_not_undo_silence_but_a_voice_does() -> None:
    detector = TurnDetector(silence_duration_ms=4 * WINDOW_MS)
    events(detector, [0.9] * 4 + [0.1])
    assert events(detector, [0.4]) == []
    assert detector.silent_windows == 2
    assert events(detector, [0.9]) == []
    assert detector.silent_windows == 0


def test_a_turn_can_be_ended_from_outside() -> None:
    detector = TurnDetector()
    events(detector, [0.9] * 5)
    detector.end_turn()
    assert events(detector, [0.9, 0.9]) == []
    assert len(events(detector, [0.9])) == 1


def test_a_higher_bar_to_start() -> None:
    detector = TurnDetector(bar=StartBar(windows=6, span=8))
    assert events(detector, [0.9] * 5 + [0.1] * 3) == []
    assert len(events(detector, [0.9] * 6)) == 1


def test_the_bar_while_the_server_speaks_wants_a_clear_and_lasting_voice() -> None:
    detector = TurnDetector(bar=BARGE_IN_BAR)
    assert events(detector, [0.6] * 20) == []
    assert events(detector, [0.9] * 5 + [0.2] * 8) == []
    assert events(detector, [0.9] * 6) == [SpeechOnset(33 * WINDOW_MS, 39 * WINDOW_MS)]


def test_a_raised_threshold_can_still_be_reached() -> None:
    detector = TurnDetector(0.9, bar=BARGE_IN_BAR)
    assert events(detector, [0.94] * 8) == []
    assert len(events(detector, [0.96] * 6)) == 1


def test_the_bar_may_be_lowered_in_the_middle_of_speech() -> None:
    detector = TurnDetector(bar=BARGE_IN_BAR)
    assert events(detector, [0.9] * 4) == []
    detector.demand(ORDINARY_BAR)
    assert events(detector, [0.9]) == [SpeechOnset(1 * WINDOW_MS, 5 * WINDOW_MS)]


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_threshold_that_makes_no_sense_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="must be between"):
        TurnDetector(threshold)


@pytest.mark.parametrize("bar", [(0, 4), (5, 4), (3, MAX_START_SPAN + 1)])
def test_a_bar_that_makes_no_sense_is_refused(bar: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be between"):
        StartBar(*bar)


@given(st.lists(st.floats(0, 1), max_size=300), st.integers(0, 1000))
def test_starts_and_stops_alternate_and_time_only_grows(probabilities: list[float], silence_ms: int) -> None:
    detector = TurnDetector(silence_duration_ms=silence_ms)
    last, expected = 0, SpeechOnset
    for number, probability in enumerate(probabilities, 1):
        event = detector.feed(probability)
        if event is None:
            continue
        assert type(event) is expected
        assert last <= event.audio_ms <= event.detected_ms == number * WINDOW_MS
        last = event.audio_ms
        expected = SpeechOffset if expected is SpeechOnset else SpeechOnset  # type: ignore[assignment]


@given(st.lists(st.integers(0, 700), max_size=20), st.integers(0, 60))
def test_the_padding_is_the_newest_audio(lengths: list[int], padding_ms: int) -> None:
    stream: Samples = np.arange(sum(lengths), dtype=np.float32)
    padding = PrefixPadding(padding_ms)
    position = 0
    for length in lengths:
        padding.push(stream[position : position + length])
        position += length
    capacity = padding_ms * 16
    assert np.array_equal(padding.take(), stream[max(0, len(stream) - capacity) :])
    assert len(padding.take()) == 0


# judged pauses


def judged(*, silence_ms: float = 1504) -> TurnDetector:
    detector = TurnDetector(silence_duration_ms=silence_ms, sure=0.9)
    assert len(events(detector, [0.9] * 10)) == 1
    return detector


def test_a_pause_is_told_once() -> None:
    detector = judged()
    assert events(detector, [0.1] * 2) == []
    assert events(detector, [0.1]) == [SpeechPause(13 * WINDOW_MS)]
    assert events(detector, [0.1] * 2) == []
    assert events(detector, [0.9] * 2) == []
    assert events(detector, [0.1] * 3) == [SpeechPause(20 * WINDOW_MS)]


@pytest.mark.parametrize(
    ("probability", "silent_windows"),
    [(1.0, 6), (math.nextafter(0.9, 1), 6), (0.9, 18), (math.nextafter(0.5, 1), 18), (0.5, 47), (0.0, 47)],
)
def test_the_more_probable_the_end_is_the_sooner_the_turn_ends(probability: float, silent_windows: int) -> None:
    detector = judged()
    events(detector, [0.1] * 3)
    detector.answer(probability)
    assert events(detector, [0.1] * (silent_windows - 4)) == []
    assert events(detector, [0.1]) == [SpeechOffset(10 * WINDOW_MS, (10 + silent_windows) * WINDOW_MS)]


def test_no_answer_keeps_a_turn_open_longer_than_silence_does() -> None:
    detector = judged(silence_ms=320)
    events(detector, [0.1] * 3)
    detector.answer(0.7)
    assert events(detector, [0.1] * 7) == [SpeechOffset(10 * WINDOW_MS, 20 * WINDOW_MS)]


def test_who_goes_on_is_asked_about_anew() -> None:
    detector = judged()
    events(detector, [0.1] * 3)
    detector.answer(1)
    assert events(detector, [0.9]) == []
    assert [type(event) for event in events(detector, [0.1] * 5)] == [SpeechPause]


def test_only_the_window_that_may_end_a_turn_needs_the_answer() -> None:
    detector = judged()
    for _ in range(5):
        assert not detector.needs_answer(0.1)
        events(detector, [0.1])
    assert [detector.needs_answer(probability) for probability in (0.1, 0.9)] == [True, False]
    detector.answer(0)
    assert [detector.needs_answer(probability) for probability in (0.1, 0.9)] == [False, False]
    assert not TurnDetector(silence_duration_ms=1504).needs_answer(0.1)


@pytest.mark.parametrize(("silence_ms", "asked"), [(0, False), (192, False), (223, False), (224, True)])
def test_nobody_is_asked_where_silence_ends_the_turn_as_soon(silence_ms: float, asked: bool) -> None:
    detector = judged(silence_ms=silence_ms)
    found = []
    while detector.speaking:
        assert asked or not detector.needs_answer(0.1)
        found += events(detector, [0.1])
    assert [type(event) for event in found] == [SpeechPause] * asked + [SpeechOffset]
    assert detector.windows == 10 + max(1, int(silence_ms // WINDOW_MS))


# pauses in which the words count as well


class Words(PauseWords):
    """What a recogniser tells in pauses."""

    expected = True

    def tell(self, unfinished: Unfinished) -> None:
        self.told, self.unfinished = self.told + 1, unfinished


def worded(*, silence_ms: float = 1504) -> tuple[TurnDetector, Words]:
    words = Words()
    detector = TurnDetector(silence_duration_ms=silence_ms, sure=0.9, words=words, whole_silence_ms=1024)
    events(detector, [0.9] * 10)
    return detector, words


def silent_windows_of(detector: TurnDetector) -> int:
    """How many windows of silence end the turn, those before included."""
    windows = 0
    while detector.speaking:
        windows = detector.silent_windows + 1
        detector.feed(0.1)
    return windows


@pytest.mark.parametrize(
    ("unfinished", "probability", "silent_windows"),
    [
        # They go on: the longest silence, whatever the sound says.
        (Unfinished.YES, 1.0, 47),
        (Unfinished.YES, 0.0, 47),
        # They are whole, and so is the sound, likely or not.
        (Unfinished.NO, 0.91, 6),
        (Unfinished.NO, 0.9, 11),
        (Unfinished.NO, 0.51, 11),
        (Unfinished.NO, 0.5, 32),
        # They do not tell: the sound does.
        (Unfinished.PERHAPS, 0.91, 6),
        (Unfinished.PERHAPS, 0.9, 18),
        (Unfinished.PERHAPS, 0.5, 47),
        # They are not known.
        (None, 0.91, 33),
        (None, 0.9, 33),
        (None, 0.5, 47),
    ],
)
def test_the_words_and_the_sound_end_a_turn(
    unfinished: Unfinished | None, probability: float, silent_windows: int
) -> None:
    detector, words = worded()
    events(detector, [0.1] * 3)
    detector.answer(probability)
    if unfinished is not None:
        words.tell(unfinished)
    assert silent_windows_of(detector) == silent_windows


@pytest.mark.parametrize(("told_at", "silent_windows"), [(5, 6), (6, 7), (31, 32), (32, 33), (40, 33)])
def test_words_that_come_late_are_asked_as_they_come(told_at: int, silent_windows: int) -> None:
    detector, words = worded()
    detector.answer(1)
    while detector.speaking:
        events(detector, [0.1])
        if detector.silent_windows == told_at:
            words.tell(Unfinished.NO)
    assert detector.windows == 10 + silent_windows


@pytest.mark.parametrize(("told_at", "ended"), [(0, False), (5, False), (6, True), (32, True)])
def test_words_that_come_late_end_a_turn_without_another_window(told_at: int, ended: bool) -> None:
    """No earlier than words that were known."""
    detector, words = worded()
    events(detector, [0.1] * told_at)
    detector.answer(1)
    assert detector.words_told() is None
    words.tell(Unfinished.NO)
    windows = 10 + told_at
    assert detector.words_told() == (SpeechOffset(10 * WINDOW_MS, windows * WINDOW_MS) if ended else None)
    assert detector.speaking is not ended
    assert not ended or detector.words_told() is None


@pytest.mark.parametrize(("told_at", "silent_windows"), [(32, 47), (0, 33)])
def test_words_that_go_on_keep_a_turn_open_if_they_come_in_time(told_at: int, silent_windows: int) -> None:
    detector, words = worded()
    detector.answer(1)
    while detector.speaking:
        events(detector, [0.1])
        if detector.silent_windows == told_at:
            words.tell(Unfinished.YES)
    assert detector.windows == 10 + silent_windows


def test_words_of_an_earlier_pause_do_not_count() -> None:
    detector, words = worded()
    events(detector, [0.1] * 4)
    words.tell(Unfinished.NO)
    events(detector, [0.9] * 3)
    detector.answer(1)
    assert silent_windows_of(detector) == 33


@pytest.mark.parametrize(("pause", "dictates", "silent_windows"), [(11, True, 32), (10, True, 6), (11, False, 6)])
def test_who_dictates_and_has_paused_has_time_for_each_group(pause: int, dictates: bool, silent_windows: int) -> None:
    detector, words = worded()
    words.in_groups = dictates
    words.tell(Unfinished.YES)
    events(detector, [0.1] * pause + [0.9] * 3)
    events(detector, [0.1] * 3)
    detector.answer(1)
    words.tell(Unfinished.NO)
    assert silent_windows_of(detector) == silent_windows


def test_a_recogniser_that_tells_nothing_in_pauses_changes_nothing() -> None:
    detector, words = worded()
    words.expected = False
    events(detector, [0.1] * 3)
    detector.answer(1)
    words.tell(Unfinished.YES)
    assert silent_windows_of(detector) == 6


def test_no_words_keep_a_turn_open_longer_than_silence_does() -> None:
    detector, words = worded(silence_ms=320)
    events(detector, [0.1] * 3)
    detector.answer(0)
    words.tell(Unfinished.NO)
    assert silent_windows_of(detector) == 10


@pytest.mark.parametrize(
    ("pause", "unfinished", "probability", "silent_windows"),
    [
        # 416 ms with the detector's lag, and a window less.
        (11, Unfinished.NO, 0.9, 16),
        (10, Unfinished.NO, 0.9, 11),
        (20, Unfinished.NO, 0.9, 30),
        (20, Unfinished.PERHAPS, 0.9, 30),
        (40, None, 1.0, 47),
        # The sound is sure.
        (20, Unfinished.NO, 1.0, 6),
        (20, Unfinished.PERHAPS, 1.0, 6),
    ],
)
def test_who_has_paused_in_the_turn_may_pause_for_half_as_long_again(
    pause: int, unfinished: Unfinished | None, probability: float, silent_windows: int
) -> None:
    detector, words = worded()
    events(detector, [0.1] * 3)
    detector.answer(probability)
    words.tell(Unfinished.YES)
    events(detector, [0.1] * (pause - 3))
    events(detector, [0.9] * 10)
    events(detector, [0.1] * 3)
    detector.answer(probability)
    if unfinished is not None:
        words.tell(unfinished)
    assert silent_windows_of(detector) == silent_windows


@pytest.mark.parametrize(("beside", "silent_windows"), [(30, 16), (7, 47)])
def test_in_front_of_somebody_else_neither_the_sound_nor_the_words_count(beside: int, silent_windows: int) -> None:
    detector, words = worded()
    for _ in range(beside):
        detector.feed(0.0, beside=True)
        if detector.silent_windows == 3:
            detector.answer(0.1)
            words.tell(Unfinished.YES)
        if not detector.speaking:
            break
    while detector.speaking:
        detector.feed(0.0)
    assert detector.windows == 10 + silent_windows


@pytest.mark.parametrize("soft", [False, True])
def test_a_soft_turn_is_never_clear(soft: bool) -> None:
    detector = TurnDetector(bar=StartBar(measured=True))
    found = [event for _ in range(40) if (event := detector.feed(0.9, soft=soft)) is not None]
    assert [one.clear for one in found if isinstance(one, SpeechLasts)][:1] == [not soft]
    assert detector.speaking is not soft or len(found) > 2
