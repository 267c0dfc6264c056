"""The echo canceller of `omni-ws talk`, in simulated rooms: whether the server would be interrupted by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import soxr
from support.speech_clips import SAMPLE_RATE, as_pcm16, clip_samples

from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import BARGE_IN_BAR, SpeechOnset, TurnDetector
from omni_ws.audio.vad import SpeechDetector
from omni_ws.talk.sound_devices import (
    MOST_LAG_MS,
    EchoBetween,
    NoEchoCanceller,
)


@dataclass(frozen=True, slots=True)
class Room:
    """``delay_ms`` lie between the buffers of the devices; the echo is louder than what is played by ``gain_db``.

    The sound is 60 dB weaker after ``reverberation_sec``. ``distortion`` is how hard a small loudspeaker is driven; one
    at 0 is perfect.
    """

    delay_ms: int
    gain_db: float
    reverberation_sec: float
    distortion: float = 0.0

    def echo(self, played: Samples) -> Samples:
        """What the microphone hears of ``played``, both at 16 kHz, as long as that."""
        driven = np.tanh(self.distortion * played) / self.distortion if self.distortion else played
        response = self._response()
        length = len(played) + len(response)
        spectrum = np.fft.rfft(driven, length) * np.fft.rfft(response, length)
        echo = np.fft.irfft(spectrum * _loudspeaker(length), length)[: len(played)]
        delay = self.delay_ms * SAMPLE_RATE // 1000
        late = np.concatenate((np.zeros(delay), echo))[: len(played)]
        return np.asarray(late * 10 ** (self.gain_db / 20), np.float32)

    def _response(self) -> Samples:
        """The direct sound, and reflections that carry half as much of the energy."""
        generator = np.random.default_rng(11)
        time = np.arange(int(self.reverberation_sec * SAMPLE_RATE)) / SAMPLE_RATE
        reflections = generator.normal(0, 1, len(time)) * 10 ** (-3 * time / self.reverberation_sec)
        reflections[: SAMPLE_RATE // 500] = 0
        reflections *= np.sqrt(0.5 / np.sum(reflections**2))
        reflections[0] = 1
        return np.asarray(reflections, np.float32)


def _loudspeaker(length: int) -> Samples:
    """The response of a small one: weak below 200 Hz and above 6 kHz."""
    frequency = np.fft.rfftfreq(length, 1 / SAMPLE_RATE)
    low = (frequency / 200) ** 2
    return np.asarray(low / (1 + low) / (1 + (frequency / 6000) ** 4), np.float32)


LOUDSPEAKER_RATE = 24_000
#: Of the answers and of the person, as root mean squares.
PLAYED, SAID = 0.1, 0.05
ROOMS = {
    "laptop": Room(delay_ms=40, gain_db=-12, reverberation_sec=0.2),
    "overdriven": Room(delay_ms=90, gain_db=-12, reverberation_sec=0.3, distortion=3),
    "living room": Room(delay_ms=160, gain_db=-15, reverberation_sec=0.6),
    "wireless": Room(delay_ms=320, gain_db=-12, reverberation_sec=0.4),
}
ANSWERS = ("librivox_ss_0870", "cards_005")
WORDS = ("goforward", "cards_001")
#: When the person begins to speak, in milliseconds after the first answer of the conversation has.
BEGINS_MS = (1000, 4000)
ANSWER_SEC = 8


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("pywebrtc_audio")


def at_level(samples: Samples, level: float) -> Samples:
    return np.asarray(samples * (level / np.sqrt(np.mean(samples**2))), np.float32)


def answer(clip: str) -> Samples:
    return np.resize(at_level(clip_samples(clip), PLAYED), ANSWER_SEC * SAMPLE_RATE)


def over_it(clip: str, begin_ms: int) -> Samples:
    speech = at_level(clip_samples(clip), SAID)
    heard = np.zeros(ANSWER_SEC * SAMPLE_RATE, np.float32)
    begin = begin_ms * SAMPLE_RATE // 1000
    heard[begin : begin + len(speech)] = speech[: len(heard) - begin]
    return heard


def recorded(room: Room, played: Samples, said: Samples | float = 0.0) -> Samples:
    """What the microphone hears, with its own noise at -66 dBFS."""
    noise = np.random.default_rng(3).normal(0, 5e-4, len(played))
    return np.asarray(room.echo(played) + said + noise, np.float32)


def without_echo(heard: Samples, played: Samples) -> Iterator[Samples]:
    """What the client sends, as it comes; the devices take turns, 20 ms each."""
    canceller = EchoBetween(microphone_rate=SAMPLE_RATE, loudspeaker_rate=LOUDSPEAKER_RATE)
    given = as_pcm16(soxr.resample(played, SAMPLE_RATE, LOUDSPEAKER_RATE))
    taken = as_pcm16(heard)
    for piece in range(len(taken) // 640):
        canceller.played(given[960 * piece : 960 * (piece + 1)])
        sent = canceller.heard(taken[640 * piece : 640 * (piece + 1)])
        yield np.frombuffer(sent, "<i2").astype(np.float32) / np.float32(32768)


def interrupted_at(heard: Iterable[Samples]) -> int | None:
    """Milliseconds after which a speaking server detects an onset of speech; None without one. Stops reading there."""
    detector, turns = SpeechDetector(), TurnDetector(bar=BARGE_IN_BAR)
    for piece in heard:
        for probability in detector.process(piece):
            if isinstance(event := turns.feed(probability), SpeechOnset):
                return event.audio_ms
    return None


@pytest.mark.parametrize("gain_db", [0, 15])
@pytest.mark.parametrize("clip", ANSWERS)
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_an_echo_alone_does_not_interrupt(room: Room, clip: str, gain_db: float) -> None:
    """Neither a faint one nor one that is louder than any person."""
    room, played = replace(room, gain_db=room.gain_db + gain_db), answer(clip)
    heard = recorded(room, played)
    assert interrupted_at(np.split(heard, ANSWER_SEC)) is not None
    assert interrupted_at(without_echo(heard, played)) is None


@pytest.mark.parametrize("begin_ms", BEGINS_MS)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("clip", ANSWERS)
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_a_person_over_the_echo_does(room: Room, clip: str, words: str, begin_ms: int) -> None:
    played, said = answer(clip), over_it(words, begin_ms)
    place = interrupted_at(without_echo(recorded(room, played, said), played))
    assert place is not None
    assert begin_ms - 100 <= place <= begin_ms + len(clip_samples(words)) * 1000 // SAMPLE_RATE


def test_hum_is_no_echo() -> None:
    """A person is heard over an answer in headphones, with a microphone that hums."""
    said = over_it("goforward", 1000)
    hum = 0.3 * np.sin(2 * np.pi * 20 * np.arange(len(said)) / SAMPLE_RATE) + 0.2
    sent = without_echo(np.asarray(said + hum, np.float32), answer("cards_005"))
    place = interrupted_at(sent)
    assert place is not None
    assert 900 <= place <= 4000


def test_speech_while_nothing_plays_stays_as_it_is() -> None:
    said = over_it("goforward", 1000)
    sent = np.concatenate([*without_echo(said, np.zeros_like(said))])
    speaking = slice(SAMPLE_RATE, SAMPLE_RATE + len(clip_samples("goforward")))
    loudness = np.sqrt(np.mean(sent[speaking] ** 2)) / np.sqrt(np.mean(said[speaking] ** 2))
    assert loudness == pytest.approx(1, abs=0.1)


def test_what_is_played_while_nobody_listens_is_not_kept() -> None:
    canceller = EchoBetween(microphone_rate=16_000, loudspeaker_rate=16_000)
    second = bytes(2 * 16_000)
    canceller.played(second)
    canceller.heard(bytes(640))
    assert canceller._played.buffered_bytes == 0
    for _ in range(10):
        canceller.played(second)
    assert canceller._played.buffered_bytes <= len(second) + MOST_LAG_MS * 32


def test_rates_that_it_cannot_work_at() -> None:
    with pytest.raises(NoEchoCanceller, match="22050 Hz"):
        EchoBetween(microphone_rate=22_050, loudspeaker_rate=44_100)


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pywebrtc_audio", None)
    with pytest.raises(NoEchoCanceller, match="pip install"):
        EchoBetween(microphone_rate=16_000, loudspeaker_rate=24_000)
