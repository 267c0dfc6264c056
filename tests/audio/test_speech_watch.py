"""Speech detection on a stream, in every format that a microphone may have."""

from __future__ import annotations

import numpy as np
import pytest
from support.speech_clips import SAMPLE_RATE as CLIP_RATE
from support.speech_clips import clip_samples, noises

from omni_ws.audio.encoder import AudioEncoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.speech_watch import SpeechWatch
from omni_ws.audio.turn_rule import ORDINARY_BAR, SpeechOffset, SpeechOnset, TurnEvent
from omni_ws.audio.vad import SpeechDetector
from omni_ws.core.audio_format import AudioEncoding, AudioFormat

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
