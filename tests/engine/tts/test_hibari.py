"""hibari with its real weights: what it says, when each word is said, and what becomes of odd texts.

How well it is understood is in test_read_back.py.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from support.real_models import fetched
from support.speech_clips import ODD_TEXTS

from omni_ws.audio.pcm import resampled
from omni_ws.engine.asr.whisper import WhisperModel
from omni_ws.engine.tts.neural import (
    SAMPLE_RATE,
    Hibari,
)
from omni_ws.engine.tts.synthesiser import NoVoice, Speak, SpokenWord

pytestmark = [pytest.mark.slow]

pytest.importorskip("hibari")

SENTENCES = (
    "Go forward ten meters, please.",
    "Hello there.",
    "She sells sea shells by the sea shore, and he has five of them!",
    "Four hundred people came; five of them left before it ended.",
)
#: -40 dB: what nobody calls silence.
HEARD = 0.01


@dataclass
class Listening:
    """Takes what is spoken; hangs up after ``patience`` pieces."""

    patience: int = 1 << 30
    pcm: bytes = b""
    told: list[SpokenWord] = field(default_factory=list)
    pieces: int = 0

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        assert sample_rate == SAMPLE_RATE
        self.pieces += 1
        self.pcm += pcm16
        return self.pieces < self.patience

    def words(self, words: list[SpokenWord]) -> None:
        self.told += words

    @property
    def samples(self) -> np.ndarray:
        return np.frombuffer(self.pcm, "<i2").astype(np.float32) / np.float32(32768)

    @property
    def ms(self) -> float:
        return len(self.pcm) / 2 * 1000 / SAMPLE_RATE


@pytest.fixture(scope="module")
def file() -> Path:
    return fetched("hibari") / "hibari.onnx"


@pytest.fixture(scope="module")
def hibari(file: Path) -> Hibari:
    return Hibari(file)


@pytest.fixture(scope="module")
def whisper() -> WhisperModel:
    pytest.importorskip("ctranslate2")
    return WhisperModel(fetched("whisper-tiny-en"))


def spoken(hibari: Hibari, text: str, *, speed: float = 1.0, patience: int = 1 << 30) -> Listening:
    listening = Listening(patience)
    hibari.speak(Speak(0, "heart", speed, text), listening)
    return listening


def test_its_voice_has_a_name_and_a_language(hibari: Hibari) -> None:
    assert hibari.facts.voices == ("heart",)
    assert hibari.facts.languages == {"heart": "en-us"}
    assert hibari.facts.synthesiser == "hibari 0.2.1"
    assert "without" not in hibari.facts.source
    assert hibari.facts.latin_only


@pytest.mark.parametrize(("text", "speed"), [*zip(SENTENCES, (1.0, 0.5, 2.0, 1.0), strict=True)])
def test_speech_is_loud_and_its_words_are_those_of_the_text(hibari: Hibari, text: str, speed: float) -> None:
    heard = spoken(hibari, text, speed=speed)
    samples = heard.samples
    assert np.abs(samples).max() > 0.15
    assert np.sqrt(np.mean(samples**2)) > 0.02
    loud = np.flatnonzero(np.abs(samples) > HEARD)
    assert loud[0] <= 0.06 * SAMPLE_RATE
    assert [word.text for word in heard.told] == re.findall(r"[\w']+", text)
    assert all(0 <= word.start_ms < word.end_ms for word in heard.told)
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(heard.told))
    assert heard.told[0].start_ms <= 60
    # The last one ends where it is no longer heard, before the end of the audio.
    sounding = loud[-1] * 1000 / SAMPLE_RATE
    assert sounding - 150 < heard.told[-1].end_ms <= heard.ms
    assert heard.told[-1].end_ms < sounding + 100


def test_each_word_is_heard_at_its_time(hibari: Hibari, whisper: WhisperModel) -> None:
    """Whisper, which places words by itself, agrees to a quarter of a second."""
    heard = spoken(hibari, "Bring seven red apples, nine green bottles, and a yellow umbrella to the garden.")
    found = {_plain(word.text): word for word in whisper.transcribe(at_16_khz(heard)).words}
    told = [word for word in heard.told if word.text.lower() in found]
    assert len(told) >= 10
    for word in told:
        middle = (found[word.text.lower()].start_ms + found[word.text.lower()].end_ms) / 2
        assert word.start_ms - 250 < middle < word.end_ms + 250, word


def test_words_that_are_read_otherwise_are_told_as_they_are_written(hibari: Hibari) -> None:
    text = "Count 21, 22, 1,234 and 3.5 km at 7:30 (it's Dr. Smith's – “the best”)."
    assert [word.text for word in spoken(hibari, text).told] == [
        *("Count", "21", "22", "1,234", "and", "3.5", "km", "at", "7:30", "it's", "Dr", "Smith's", "the", "best")
    ]


def test_the_same_text_gives_the_same_samples(hibari: Hibari, file: Path) -> None:
    first = spoken(hibari, SENTENCES[0])
    assert spoken(hibari, SENTENCES[2]).pcm != first.pcm
    assert spoken(hibari, SENTENCES[0]) == first
    assert spoken(Hibari(file), SENTENCES[0]) == first


@pytest.mark.parametrize("speed", [0.8, 2.0])
def test_speed_changes_the_length_and_the_times_of_words(hibari: Hibari, speed: float) -> None:
    usual, other = spoken(hibari, SENTENCES[2]), spoken(hibari, SENTENCES[2], speed=speed)
    assert usual.ms / other.ms == pytest.approx(speed, rel=0.05)
    for before, after in zip(usual.told, other.told, strict=True):
        assert after.end_ms * speed == pytest.approx(before.end_ms, rel=0.1, abs=60)


def test_a_listener_who_hangs_up_hears_no_more(hibari: Hibari) -> None:
    assert spoken(hibari, SENTENCES[2], patience=3).pieces == 3


def test_what_has_no_words_is_silent(hibari: Hibari) -> None:
    for text in ("", " ", "...", "?!", "\0", "🎉🎉", "—", "你好", "\x07", "\u200d"):
        heard = spoken(hibari, text)
        assert (heard.pcm, heard.told) == (b"", []), text


@pytest.mark.parametrize("text", [ODD_TEXTS[0][:300], *ODD_TEXTS[-4:-2]], ids=["one word", "alphabets", "no words"])
def test_odd_texts_break_nothing(hibari: Hibari, text: str) -> None:
    """What all of them are to the reader is in test_hibari_reading.py."""
    heard = spoken(hibari, text, speed=2.0)
    assert len(heard.pcm) > 0
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(heard.told))
    assert all(word.end_ms <= heard.ms for word in heard.told)
    assert spoken(hibari, SENTENCES[1]).ms > 500


def test_a_file_that_tells_no_times_speaks_without_them(file: Path, hibari: Hibari, tmp_path: Path) -> None:
    renamed = tmp_path / "other.onnx"
    renamed.write_bytes(file.read_bytes().replace(b"/CumSum_output_0", b"/CumSum_output_x"))
    other = Hibari(renamed)
    assert other.facts.source == "other.onnx, without word times"
    assert other.facts.voices == ("other",)
    heard = spoken(other, SENTENCES[0])
    assert heard.told == []
    assert heard.pcm == spoken(hibari, SENTENCES[0]).pcm


def test_files_that_are_no_voice_are_refused(file: Path, tmp_path: Path) -> None:
    oov = file.read_bytes()[:100_000]
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(oov)
    with pytest.raises(NoVoice, match=r"broken\.onnx is no voice of hibari: "):
        Hibari(broken)
    with pytest.raises(NoVoice, match="cannot be read"):
        Hibari(tmp_path / "nothing.onnx")


def at_16_khz(heard: Listening) -> np.ndarray:
    return resampled(heard.samples, SAMPLE_RATE, 16_000)


def _plain(text: str) -> str:
    """Small letters and no punctuation."""
    return re.sub(r"[^a-z' ]", "", text.lower()).strip()
