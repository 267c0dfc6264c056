"""Speech detection on a stream, in every format that a microphone may have."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support.inline_workers import MS, LoudnessDetector, ScriptedJudge, loud, quiet
from support.speech_clips import SAMPLE_RATE as CLIP_RATE
from support.speech_clips import clip_samples, noises

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import (
    BARGE_IN_BAR,
    DETECTOR_LAG_MS,
    NEAR_BAR,
    ORDINARY_BAR,
    SpeechOffset,
    SpeechOnset,
    SpeechPause,
    SpeechWatch,
    StartBar,
    TurnEvent,
)
from omni_ws.audio.vad import SpeechDetector
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.engine.base import TranscriptOutput
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.service.conversation.turn_words import TurnWords

RATES = [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000]
#: The tolerance for starts and ends of speech: two windows.
TOLERANCE_MS = 64


def spoken(gain: float = 1.0) -> Samples:
    quiet = np.zeros(CLIP_RATE, np.float32)
    return np.concatenate([quiet, np.clip(clip_samples("goforward") * gain, -1, 1).astype(np.float32), quiet])


def watch() -> SpeechWatch:
    return SpeechWatch(SpeechDetector(), threshold=0.5, silence_duration_ms=500)


def turns(samples: Samples, audio: AudioFormat, *, piece_bytes: int = 1 << 20) -> list[TurnEvent]:
    encoder = AudioEncoder(audio, source_rate=CLIP_RATE)
    data = encoder.encode(samples) + encoder.flush()
    watched = watch()
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    events = [event for piece in pieces for event in watched.hear(piece, audio, ORDINARY_BAR).events]
    watched.close()
    return events


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("encoding", [AudioEncoding.PCM16, AudioEncoding.F32])
def test_a_turn_is_found_at_every_rate(rate: int, encoding: AudioEncoding) -> None:
    started, stopped = turns(spoken(), AudioFormat(encoding, rate))
    expected_start, expected_stop = turns(spoken(), AudioFormat())
    assert isinstance(started, SpeechOnset)
    assert isinstance(stopped, SpeechOffset)
    assert isinstance(expected_start, SpeechOnset)
    assert isinstance(expected_stop, SpeechOffset)
    assert abs(started.audio_ms - expected_start.audio_ms) <= TOLERANCE_MS
    assert abs(stopped.audio_ms - expected_stop.audio_ms) <= TOLERANCE_MS


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.05, 40])
@pytest.mark.parametrize("encoding", [AudioEncoding.PCMU, AudioEncoding.PCM16])
def test_a_whisper_and_a_clipped_voice_are_turns(gain: float, encoding: AudioEncoding) -> None:
    assert [type(event) for event in turns(spoken(gain), AudioFormat(encoding, 8000))] == [SpeechOnset, SpeechOffset]


@pytest.mark.parametrize("piece_bytes", [33, 641, 4096])
def test_how_the_bytes_are_cut_changes_nothing(piece_bytes: int) -> None:
    assert turns(spoken()[:40_000], AudioFormat(), piece_bytes=piece_bytes) == turns(spoken()[:40_000], AudioFormat())


@pytest.mark.slow
@pytest.mark.parametrize("rate", [8000, 48_000])
@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum", "music"])
def test_no_turn_in_what_is_no_speech(name: str, rate: int) -> None:
    assert turns(noises()[name], AudioFormat(AudioEncoding.PCM16, rate)) == []
    assert turns(np.clip(noises()[name] * 20, -1, 1).astype(np.float32), AudioFormat(AudioEncoding.PCM16, rate)) == []


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_are_no_numbers_do_not_deafen(nonsense: float) -> None:
    audio = AudioFormat(AudioEncoding.F32)
    watched = watch()
    watched.hear(np.full(CLIP_RATE, nonsense, np.float32).tobytes(), audio, ORDINARY_BAR)
    heard = watched.hear(spoken().tobytes(), audio, ORDINARY_BAR)
    watched.close()
    assert [type(event) for event in heard.events] == [SpeechOnset, SpeechOffset]
    assert np.isfinite(heard.samples).all()


# judged pauses


def judged_watch(judge: ScriptedJudge, *, silence_ms: float = 1500) -> SpeechWatch:
    return SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=silence_ms, judge=judge.ask)


def heard(watched: SpeechWatch, data: bytes, *, piece_ms: int = 1000) -> list[TurnEvent]:
    """What it hears, with judges that answer at once."""
    found: list[TurnEvent] = []
    for start in range(0, len(data), piece_ms * MS):
        piece = watched.hear(data[start : start + piece_ms * MS], AudioFormat(), ORDINARY_BAR)
        assert piece.question is None
        found += piece.events
    return found


def test_the_judge_hears_the_turn_up_to_the_pause() -> None:
    judge = ScriptedJudge([False])
    heard(judged_watch(judge), quiet(960) + loud(640) + quiet(640))
    (turn,) = judge.heard
    # From 300 ms before the onset, to the 96 ms of silence after which it is asked.
    assert as_pcm(turn) == quiet(960)[-300 * MS :] + loud(640) + quiet(96)


def test_the_judge_hears_no_more_than_eight_seconds() -> None:
    judge = ScriptedJudge([False] * 2)
    watched = judged_watch(judge)
    heard(watched, quiet(960) + loud(20_000) + quiet(320) + loud(640) + quiet(320))
    assert [len(turn) for turn in judge.heard] == [8 * CLIP_RATE] * 2
    assert as_pcm(judge.heard[1]).endswith(quiet(320) + loud(640) + quiet(96))


@pytest.mark.parametrize("piece_ms", [10, 32, 100, 5000])
def test_turns_end_at_the_same_places_however_the_audio_comes(piece_ms: int) -> None:
    audio = quiet(320) + (loud(320) + quiet(2560)) * 3
    judge = ScriptedJudge([True, False, True])
    found = heard(judged_watch(judge), audio, piece_ms=piece_ms)
    offsets = [event for event in found if isinstance(event, SpeechOffset)]
    assert [one.audio_ms for one in offsets] == [640, 3520, 6400]
    silences = [one.detected_ms - one.audio_ms + DETECTOR_LAG_MS for one in offsets]
    assert silences == [256, 1472, 256]
    assert len([event for event in found if isinstance(event, SpeechPause)]) == 3


def test_what_depends_on_an_answer_waits_for_it() -> None:
    judge = ScriptedJudge()
    watched = judged_watch(judge)
    piece = watched.hear(quiet(320) + loud(320) + quiet(960) + loud(320), AudioFormat(), ORDINARY_BAR)
    assert [type(event) for event in piece.events] == [SpeechOnset, SpeechPause]
    assert (piece.question, piece.judged_ms, piece.pausing) == (judge.questions[0], 640 + 160, True)
    judge.questions[0].set_result(True)
    rest = watched.go_on()
    assert [type(event) for event in rest.events] == [SpeechOffset, SpeechOnset]
    assert (rest.question, rest.judged_ms, rest.rest_ms) == (None, 1920, 0)


def test_speech_that_goes_on_waits_for_no_answer() -> None:
    judge = ScriptedJudge()
    watched = judged_watch(judge)
    piece = watched.hear(quiet(320) + loud(320) + quiet(160) + loud(320), AudioFormat(), ORDINARY_BAR)
    assert piece.question is None
    assert [type(event) for event in piece.events] == [SpeechOnset, SpeechPause]
    assert judge.questions[0].cancelled()


def test_a_judge_that_fails_ends_no_turn() -> None:
    judge = ScriptedJudge()
    watched = judged_watch(judge)
    piece = watched.hear(quiet(320) + loud(320) + quiet(1600), AudioFormat(), ORDINARY_BAR)
    assert piece.question is judge.questions[0]
    judge.questions[0].set_exception(RuntimeError("broken"))
    (end,) = watched.go_on().events
    assert isinstance(end, SpeechOffset)
    assert end.detected_ms - end.audio_ms > 1400


def test_silence_is_not_kept() -> None:
    watched = judged_watch(ScriptedJudge())
    tracemalloc.start()
    for _ in range(30):
        watched.hear(quiet(10_000), AudioFormat(), ORDINARY_BAR)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20


def as_pcm(samples: Samples) -> bytes:
    return np.rint(samples * 32768).astype("<i2").tobytes()


# the near voice, and words that no longer come


def at_level(ms: int, level: float) -> bytes:
    """What LoudnessDetector takes for speech, at this share of full scale."""
    return np.full(ms * 16, round(level * 32768), "<i2").tobytes()


@pytest.mark.parametrize(
    ("level", "bar", "starts"),
    [
        (0.06, ORDINARY_BAR, True),
        (0.06, NEAR_BAR, False),  # 14 dB below
        (0.06, BARGE_IN_BAR, False),
        (0.1, NEAR_BAR, True),  # 9.5 dB below
        (0.1, BARGE_IN_BAR, True),
    ],
)
def test_a_far_sound_opens_no_turn_over_an_answer(level: float, bar: StartBar, starts: bool) -> None:
    watched = SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=500)
    watched.hear(at_level(1600, 0.3) + quiet(960), AudioFormat(), ORDINARY_BAR)
    found = watched.hear(at_level(6400, level), AudioFormat(), bar).events
    assert [type(event) for event in found] == [SpeechOnset] * starts


@pytest.mark.parametrize(("name", "end_ms"), [("goforward", 2272), ("cards_005", 3296), ("librivox_ss_0870", 6880)])
def test_a_client_whose_gain_settles_cuts_nobody_off(name: str, end_ms: int) -> None:
    """For 0.6 s the voice is 6 dB louder than after that."""
    samples = clip_samples(name)
    begins = np.flatnonzero(abs(samples) > 0.1 * abs(samples).max())[0]
    later_sec = np.clip((np.arange(len(samples)) - begins) / CLIP_RATE - 0.6, 0, None)
    settling = (samples * 2 ** np.exp(-later_sec / 0.4)).clip(-1, 1)
    padded = np.concatenate([settling, np.zeros(CLIP_RATE)]).astype(np.float32)
    (ended,) = [event for event in turns(padded, AudioFormat()) if isinstance(event, SpeechOffset)]
    assert ended.audio_ms == pytest.approx(end_ms, abs=TOLERANCE_MS)


@pytest.mark.parametrize(("level", "ends"), [(0.06, True), (0.1, False)])
def test_a_far_sound_keeps_no_turn_open(level: float, ends: bool) -> None:
    watched = SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=500)
    found = watched.hear(at_level(1600, 0.3) + at_level(1600, level), AudioFormat(), NEAR_BAR).events
    assert [type(event) for event in found] == [SpeechOnset] + [SpeechOffset] * ends


def test_a_turn_ends_where_no_words_come_any_more() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    words = TurnWords(lambda: CAPABILITIES, now=lambda: next(times))
    watched = SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=500, words=words)
    words.begin()
    assert len(watched.hear(at_level(3200, 0.1), AudioFormat(), ORDINARY_BAR).events) == 1
    for _ in range(3):
        words.hear(TranscriptOutput("", interim=True), language=None)
    (end,) = watched.hear(at_level(3200, 0.1), AudioFormat(), ORDINARY_BAR).events
    assert end == SpeechOffset(3232, 3232)
    # What goes on is background; what is louder is a turn.
    words.begin()
    assert watched.hear(at_level(3200, 0.1), AudioFormat(), ORDINARY_BAR).events == ()
    (onset,) = watched.hear(at_level(640, 0.3), AudioFormat(), ORDINARY_BAR).events
    assert isinstance(onset, SpeechOnset)


def test_the_turn_behind_one_without_words_goes_on_before_the_loop_knows_of_it() -> None:
    time = 0.0
    words = TurnWords(lambda: CAPABILITIES, now=lambda: time)
    watched = SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=500, words=words)
    for _ in range(2):
        words.begin()
        watched.hear(at_level(960, 0.1) + quiet(960) + at_level(960, 0.2), AudioFormat(), ORDINARY_BAR)
        time += 9
        for _ in range(3):
            words.hear(TranscriptOutput("", interim=True), language=None)
        # The words that have stalled are those of the turn before.
        found = watched.hear(at_level(640, 0.1) + quiet(960) + at_level(960, 0.3), AudioFormat(), ORDINARY_BAR).events
        assert [type(event) for event in found] == [SpeechOffset, SpeechOnset]
        watched.hear(quiet(960), AudioFormat(), ORDINARY_BAR)


def test_words_that_have_stalled_before_the_first_turn_end_none() -> None:
    time = 0.0
    words = TurnWords(lambda: CAPABILITIES, now=lambda: time)
    words.begin()
    time = 9.0
    for _ in range(3):
        words.hear(TranscriptOutput("", interim=True), language=None)
    watched = SpeechWatch(LoudnessDetector(), threshold=0.5, silence_duration_ms=500, words=words)
    (onset,) = watched.hear(at_level(960, 0.1), AudioFormat(), ORDINARY_BAR).events
    assert isinstance(onset, SpeechOnset)
