"""Whisper tiny.en on CTranslate2: its words, their times, and how sure it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.real_models import fetched
from support.speech_clips import SAMPLE_RATE, WORDS, clip_pcm, clip_samples, noises

from omni_ws.engine.asr import whisper
from omni_ws.engine.asr.whisper import (
    _BYTES,
    LONGEST_SEC,
    WhisperModel,
    WhisperTranscript,
    prompt_tokens,
    without_repeats,
)
from omni_ws.errors import EngineFailed
from omni_ws.scenarios.speech import word_errors

pytestmark = [pytest.mark.slow]

pytest.importorskip("ctranslate2")


#: Where another recogniser found the middles of words of a recording, in milliseconds.
MIDDLES = {
    "john": 805,
    "dashwood": 1280,
    "had": 1710,
    "then": 2025,
    "leisure": 2475,
    "consider": 3165,
    "how": 3695,
    "much": 4175,
    "there": 4425,
    "might": 4655,
    "be": 4860,
    "in": 5510,
    "his": 5650,
    "power": 5890,
    "do": 6235,
}
NUMBERS = {"4": "four", "7": "seven", "8": "eight", "10": "ten"}


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetched("whisper-tiny-en")


@pytest.fixture(scope="module")
def model(folder: Path) -> WhisperModel:
    return WhisperModel(folder, workers=2)


@pytest.fixture(scope="module")
def transcripts(model: WhisperModel) -> dict[str, WhisperTranscript]:
    """With a beam of 5, and words."""
    return {name: model.transcribe(clip_samples(name)) for name in WORDS}


def spoken(text: str) -> str:
    """As WORDS are written: small letters, numbers in words, no punctuation."""
    words = re.sub(r"[^a-z0-9' ]", "", text.lower()).split()
    return " ".join(NUMBERS.get(word, word) for word in words)


def said_once(heard: WhisperTranscript) -> str:
    """As the recogniser tells it. On some processors the greedy reading of a clip goes on to repeat itself."""
    return " ".join(word.text for word in without_repeats(heard.words)) or heard.text


@pytest.mark.parametrize("beam", [1, 5])
def test_it_hears_what_is_said(model: WhisperModel, transcripts: Mapping[str, WhisperTranscript], beam: int) -> None:
    """Of 38 words, two "clubs" are heard wrong."""
    if beam == 1:
        transcripts = {name: model.transcribe(clip_samples(name), beam=1, words=False) for name in WORDS}
    heard = {name: spoken(said_once(transcript)) for name, transcript in transcripts.items()}
    wrong = {name: word_errors(words, heard[name]).wrong for name, words in WORDS.items()}
    assert sum(wrong.values()) <= 2, heard
    assert wrong["librivox_ss_0870"] == wrong["goforward"] == 0


@pytest.mark.parametrize("name", WORDS)
def test_words_have_times_and_probabilities(transcripts: Mapping[str, WhisperTranscript], name: str) -> None:
    transcript = transcripts[name]
    assert " ".join(word.text for word in transcript.words) == transcript.text
    times = [time for word in transcript.words for time in (word.start_ms, word.end_ms)]
    assert times == sorted(times)
    assert times[-1] <= len(clip_pcm(name)) / SAMPLE_RATE * 1000 + 20


def test_times_are_where_the_words_are(transcripts: Mapping[str, WhisperTranscript]) -> None:
    """The middle of a word is told to a quarter of a second."""
    found = {spoken(word.text): word for word in transcripts["librivox_ss_0870"].words}
    assert found.keys() >= MIDDLES.keys()
    for text, middle_ms in MIDDLES.items():
        assert abs((found[text].start_ms + found[text].end_ms) / 2 - middle_ms) < 250, text


def test_words_are_only_looked_for_when_they_are_wanted(
    model: WhisperModel, transcripts: Mapping[str, WhisperTranscript]
) -> None:
    assert model.transcribe(clip_samples("goforward"), words=False) == replace(transcripts["goforward"], words=())


def test_readings_of_the_beam_that_are_almost_as_likely_are_told(
    model: WhisperModel, transcripts: Mapping[str, WhisperTranscript]
) -> None:
    assert "10 of clubs." in transcripts["cards_001"].others  # it hears "10 of close."
    assert all(0 < len(heard.others) < 5 and heard.text not in heard.others for heard in transcripts.values())
    assert not model.transcribe(clip_samples("cards_001"), beam=1).others


@pytest.mark.parametrize("repeats", [False, True])
def test_a_text_is_told_before_its_times_unless_they_may_change_it(
    model: WhisperModel,
    transcripts: Mapping[str, WhisperTranscript],
    monkeypatch: pytest.MonkeyPatch,
    repeats: bool,
) -> None:
    if repeats:
        monkeypatch.setattr(whisper, "copied_at_end", lambda words: 1)
    told: list[WhisperTranscript] = []
    heard = transcripts["goforward"]
    assert model.transcribe(clip_samples("goforward"), tell=told.append) == heard
    assert told == ([] if repeats else [replace(heard, words=())])


@pytest.mark.parametrize("name", ["silence", "tone", "music"])
def test_text_from_noise_is_told_apart(
    model: WhisperModel, transcripts: Mapping[str, WhisperTranscript], name: str
) -> None:
    """It always writes something. Where nothing was said, it is unsure of it, and says that nothing was said."""
    noise = model.transcribe(noises()[name])
    for transcript in (noise, *transcripts.values()):
        assert (transcript.no_speech > 0.6 and transcript.score < -1.0) == (transcript is noise)


@pytest.mark.parametrize("beam", [1, 5])
def test_the_text_of_fast_speech_is_whole(model: WhisperModel, beam: int) -> None:
    """21 words in less than five seconds."""
    clip = clip_samples("librivox_ss_0870")
    faster = np.interp(np.arange(0, len(clip), 1.5), np.arange(len(clip)), clip).astype(np.float32)
    assert spoken(model.transcribe(faster, beam=beam, words=False).text).endswith("power to do for them")


@pytest.mark.parametrize("seconds", [0.0, 0.01, LONGEST_SEC])
def test_the_shortest_and_the_longest_audio(model: WhisperModel, seconds: float) -> None:
    audio = np.resize(clip_samples("librivox_ss_0870"), int(seconds * SAMPLE_RATE))
    transcript = model.transcribe(audio, beam=1)
    assert (spoken(transcript.text).count("dashwood") >= 3) == (seconds == LONGEST_SEC)


def test_audio_that_is_too_long(model: WhisperModel) -> None:
    with pytest.raises(ValueError, match=r"29\.1 s of audio; the model reads 29 s at once"):
        model.transcribe(np.zeros(int(29.1 * SAMPLE_RATE), np.float32))


def test_several_calls_at_once_read_what_each_reads_alone(
    model: WhisperModel, transcripts: Mapping[str, WhisperTranscript]
) -> None:
    names = ("cards_001", "goforward", "cards_001")
    with ThreadPoolExecutor(len(names)) as pool:
        together = pool.map(lambda name: model.transcribe(clip_samples(name)), names)
        assert list(together) == [transcripts[name] for name in names]


def test_the_vocabulary_may_be_json(transcripts: Mapping[str, WhisperTranscript], folder: Path, tmp_path: Path) -> None:
    for name in ("model.bin", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    words = (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocabulary.json").write_text(json.dumps(words))
    assert WhisperModel(tmp_path).transcribe(clip_samples("goforward")) == transcripts["goforward"]


@pytest.mark.parametrize("damage", ["empty", "no vocabulary", "another model"])
def test_a_folder_that_holds_no_such_model(folder: Path, tmp_path: Path, damage: str) -> None:
    if damage != "empty":
        shutil.copy(folder / "config.json", tmp_path)
        (tmp_path / "model.bin").write_bytes(b"another" * 100)
    if damage == "another model":
        shutil.copy(folder / "vocabulary.txt", tmp_path)
    with pytest.raises(EngineFailed, match=r"is not a Whisper model for CTranslate2"):
        WhisperModel(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected", "heard", "instead"),
    [
        ("librivox_ss_0870", "Jon Dashwoode, clubs.", "Mr. Jon Dashwoode had", "Mr. John Dashwood had"),
        ("cards_001", "Jon Dashwoode, clubs.", "10 of clubs.", "10 of close."),
    ],
)
def test_what_is_expected_is_heard(model: WhisperModel, name: str, expected: str, heard: str, instead: str) -> None:
    assert instead in model.transcribe(clip_samples(name)).text
    read = model.transcribe(clip_samples(name), expected=model.expected_tokens(expected))
    assert heard in read.text
    assert [word.text for word in read.words] == read.text.split()


def test_more_than_it_can_expect_leaves_room_for_the_text(model: WhisperModel) -> None:
    """Of a long text the end counts."""
    much = model.expected_tokens("Zyntrix Kwillfoss " * 500 + "Jon Dashwoode.")
    assert len(much) == 224
    assert much[-4:] == model.expected_tokens("Jon Dashwoode.")[-4:]
    read = model.transcribe(clip_samples("librivox_ss_0870"), expected=much)
    assert read.text.endswith("to do for them.")


def test_what_is_expected_and_was_not_said_is_not_heard(model: WhisperModel) -> None:
    expected = model.expected_tokens("Kwillfoss, Zyntrix.")
    assert spoken(said_once(model.transcribe(clip_samples("goforward"), expected=expected))) == WORDS["goforward"]


def test_tokens_are_those_of_the_models_own_tokeniser(model: WhisperModel, folder: Path) -> None:
    """Which joins letters by a list of pairs."""
    told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in told["merges"]]
    assert [told["vocab"]["".join(pair)] for pair in pairs] == list(range(256, 256 + len(pairs)))
    text = " Siobhan O'Neill, 東京 – 3000 & co.\n<|endoftext|>" + "a" * 1000
    tokens = model.tokens(text)
    assert b"".join(piece_bytes(told["vocab"], token) for token in tokens).decode() == text
    assert max(tokens) < told["vocab"].get("<|endoftext|>", 50256)  # text is never a token that means something
    assert [list(told["vocab"])[token] for token in model.tokens(" Siobhan Kowalczyk,")] == [
        *("ĠSi", "ob", "han"),
        *("ĠK", "ow", "al", "c", "zyk", ","),
    ]
    assert model.expected_tokens(" \n") == []


def piece_bytes(vocabulary: Mapping[str, int], token: int) -> bytes:
    (letters,) = (letters for letters, number in vocabulary.items() if number == token)
    return bytes(_BYTES[letter] for letter in letters)


def test_what_an_answer_begins_with() -> None:
    assert prompt_tokens(None) == ["<|startoftranscript|>"]
    assert prompt_tokens("de") == ["<|startoftranscript|>", "<|de|>", "<|transcribe|>"]
