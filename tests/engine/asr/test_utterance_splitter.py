from collections.abc import Iterator

import numpy as np
import pytest
from support.speech_clips import clip_samples, noises

from omni_ws.audio.pcm import Samples
from omni_ws.audio.vad import WINDOW_MS
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Utterance, UtteranceLimits
from omni_ws.engine.asr.recogniser_engine import (
    InterimText,
    UtteranceEnded,
    UtteranceEvent,
    UtterancePaused,
    UtteranceResumed,
    UtteranceSplitter,
)

LIMITS = UtteranceLimits(cut_after=12 * SAMPLE_RATE, longest=15 * SAMPLE_RATE)


class LengthReader:
    """A LiveText that tells how many tenths of a second it has read; ``held`` is 1 from the first to the end."""

    readings = 0

    def __init__(self) -> None:
        self.held = 0

    def read(self, utterance: Utterance) -> str | None:
        self.held = 1
        return f"{10 * utterance.length // SAMPLE_RATE}"

    def end(self) -> None:
        self.held = 0


def new_splitter() -> UtteranceSplitter:
    return UtteranceSplitter(LengthReader(), LIMITS)


@pytest.fixture
def reader() -> LengthReader:
    return LengthReader()


@pytest.fixture
def splitter(reader: LengthReader) -> Iterator[UtteranceSplitter]:
    splitter = UtteranceSplitter(reader, LIMITS)
    yield splitter
    splitter.close()
    splitter.close()
    assert reader.held == 0


def heard(
    splitter: UtteranceSplitter, samples: Samples, length: int = 1600, *, live: bool = True
) -> list[UtteranceEvent]:
    events: list[UtteranceEvent] = []
    for start in range(0, len(samples), length):
        splitter.feed(samples[start : start + length], live=live)
        while (event := splitter.advance()) is not None:
            events.append(event)
    ended = splitter.end()
    return events if ended is None else [*events, ended]


def utterances(events: list[UtteranceEvent]) -> list[tuple[int, bytes]]:
    return [(event.start_ms, event.pcm.tobytes()) for event in events if isinstance(event, UtteranceEnded)]


def quiet(seconds: float) -> Samples:
    return np.zeros(int(seconds * 16_000), np.float32)


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum"])
def test_noise_is_no_utterance(splitter: UtteranceSplitter, name: str) -> None:
    assert heard(splitter, noises()[name]) == []


def test_an_utterance_is_told_paused_and_ended(splitter: UtteranceSplitter) -> None:
    events = heard(splitter, np.concatenate((clip_samples("goforward"), quiet(1))))
    assert isinstance(events[0], InterimText)
    paused, ended = (event for event in events if not isinstance(event, InterimText))
    assert isinstance(paused, UtterancePaused)
    assert isinstance(ended, UtteranceEnded)
    assert np.array_equal(paused.pcm, ended.pcm)


def test_the_cuts_of_the_audio_do_not_move_the_utterances() -> None:
    speech = np.concatenate((quiet(0.7), clip_samples("cards_005"), quiet(0.9), clip_samples("cards_001"), quiet(0.1)))
    found = []
    for length in (320, 1600, 7777, len(speech)):
        splitter = new_splitter()
        found.append(utterances(heard(splitter, speech, length, live=False)))
        splitter.close()
    assert len(found[0]) == 2
    assert all(each == found[0] for each in found)


def test_live_recognition_does_not_move_the_utterances() -> None:
    speech = np.concatenate((clip_samples("goforward"), quiet(0.6)))
    found = []
    for live in (True, False):
        splitter = new_splitter()
        events = heard(splitter, speech, live=live)
        assert any(isinstance(event, InterimText) for event in events) is live
        found.append(utterances(events))
        splitter.close()
    assert found[0] == found[1]


def test_audio_that_breaks_off_ends_the_utterance(splitter: UtteranceSplitter) -> None:
    speech = clip_samples("goforward")[:30_001]
    ((start_ms, pcm),) = utterances(heard(splitter, speech))
    assert start_ms * 16 + len(pcm) // 2 == len(speech)


def test_a_short_pause_is_taken_back(splitter: UtteranceSplitter) -> None:
    word = clip_samples("cards_001")[2400:14_000]
    events = heard(splitter, np.concatenate((word, quiet(0.25), word, quiet(1))))
    kinds = [type(event) for event in events if not isinstance(event, InterimText)]
    assert kinds == [UtterancePaused, UtteranceResumed, UtterancePaused, UtteranceEnded]


def test_the_reader_is_only_held_during_speech(splitter: UtteranceSplitter, reader: LengthReader) -> None:
    splitter.feed(quiet(1))
    assert splitter.advance() is None
    assert reader.held == 0
    splitter.feed(clip_samples("goforward"))
    assert isinstance(splitter.advance(), InterimText)
    assert reader.held == 1
    splitter.feed(quiet(1))
    while splitter.advance() is not None:
        pass
    assert reader.held == 0


def test_there_is_work_for_whole_windows_and_for_what_is_to_be_told(splitter: UtteranceSplitter) -> None:
    ready = [splitter.ready]
    splitter.feed(quiet(WINDOW_MS / 1000)[:-1])
    ready.append(splitter.ready)
    splitter.feed(quiet(1)[:1])
    ready.append(splitter.ready)
    assert splitter.advance() is None
    assert [*ready, splitter.ready] == [False, False, True, False]
    for sample in np.array_split(clip_samples("goforward"), 70):
        splitter.feed(sample)
        while splitter.ready:
            splitter.advance()
        assert splitter.advance() is None


def test_live_recognition_that_was_given_up_stays_away_for_the_utterance(splitter: UtteranceSplitter) -> None:
    speech = clip_samples("librivox_ss_0870")
    splitter.feed(speech[:40_000])
    assert isinstance(splitter.advance(), InterimText)
    splitter.feed(speech[:0], live=False)
    while splitter.advance() is not None:
        pass
    splitter.feed(speech[40_000:90_000])
    assert not isinstance(splitter.advance(), InterimText)


@pytest.mark.slow
def test_endless_speech_is_cut(splitter: UtteranceSplitter) -> None:
    speech = np.tile(clip_samples("librivox_ss_0870")[3000:-3000], 6)
    found = utterances(heard(splitter, np.concatenate((speech, quiet(1))), 16_000, live=False))
    assert len(found) >= 3
    assert all(len(pcm) <= 2 * LIMITS.longest for _, pcm in found)
    ends = [start_ms + len(pcm) // 32 for start_ms, pcm in found]
    # What was cut goes on where it was cut: no sample is lost in between.
    assert all(abs(end - start) <= 600 for end, (start, _) in zip(ends, found[1:], strict=False))
