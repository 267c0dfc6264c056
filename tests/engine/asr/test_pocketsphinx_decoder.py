import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support.speech_clips import WORDS, clip_pcm, noises, word_errors

from omni_ws.audio.pcm import pcm16_from_samples
from omni_ws.engine.asr import pocketsphinx_decoder
from omni_ws.engine.asr.pocketsphinx_decoder import PRIMING_SAMPLES, PocketSphinxDecoder
from omni_ws.errors import EngineFailed

#: On one clip of a reading; wrong words of 21.
READING_ERRORS = 4


@pytest.fixture(scope="module")
def decoder() -> Iterator[PocketSphinxDecoder]:
    loaded = PocketSphinxDecoder()
    yield loaded
    loaded.close()
    loaded.close()


def text_of(decoder: PocketSphinxDecoder, pcm: np.ndarray) -> str:
    return " ".join(word.text for word in decoder.transcribe(pcm))


# whole utterances


@pytest.mark.parametrize(
    ("name", "errors"), [("goforward", 0), ("cards_001", 0), ("cards_005", 0), ("librivox_ss_0870", READING_ERRORS)]
)
def test_recorded_speech_is_understood(decoder: PocketSphinxDecoder, name: str, errors: int) -> None:
    assert word_errors(WORDS[name], text_of(decoder, clip_pcm(name))) <= errors


def test_words_have_their_places(decoder: PocketSphinxDecoder) -> None:
    words = decoder.transcribe(clip_pcm("goforward"))
    assert [word.text for word in words] == ["go", "forward", "ten", "meters"]
    assert all(word.start_ms < word.end_ms for word in words)
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(words))
    assert 300 < words[0].start_ms < 600
    assert words[-1].end_ms < len(clip_pcm("goforward")) / 16


@pytest.mark.slow
def test_nothing_is_remembered_from_the_utterance_before(decoder: PocketSphinxDecoder) -> None:
    first = decoder.transcribe(clip_pcm("cards_005"))
    decoder.transcribe(clip_pcm("librivox_ss_0870"))
    decoder.transcribe(pcm16_from_samples(noises()["white noise"]))
    assert decoder.transcribe(clip_pcm("cards_005")) == first


@pytest.mark.slow
@pytest.mark.parametrize("before", ["goforward", "cards_001"])
def test_silence_and_nothing_have_no_words(decoder: PocketSphinxDecoder, before: str) -> None:
    """There is nothing to set the mean of the cepstra from; words would be left over from what was said before."""
    clicks = np.arange(16_000) % 2
    for silence in (np.zeros(16_000), np.zeros(0), np.zeros(1), np.ones(16_000), clicks):
        decoder.transcribe(clip_pcm(before))
        assert decoder.transcribe(silence.astype(np.int16)) == ()


def test_priming_with_silence_is_like_no_priming(decoder: PocketSphinxDecoder) -> None:
    def heard(primer: np.ndarray) -> str:
        decoder.begin(primer)
        decoder.hear(clip_pcm("goforward"))
        words = decoder.interim()
        decoder.end()
        return words

    assert heard(np.zeros(PRIMING_SAMPLES, np.int16)) == heard(np.zeros(0, np.int16)) != ""


@pytest.mark.slow
def test_no_fillers_and_no_alternates_in_the_words(decoder: PocketSphinxDecoder) -> None:
    for name in WORDS:
        assert all(word.text.replace("'", "").isalpha() for word in decoder.transcribe(clip_pcm(name)))


def test_interim_texts_come_to_the_words(decoder: PocketSphinxDecoder) -> None:
    pcm = clip_pcm("goforward")
    speech = pcm[6400:]
    decoder.begin(speech[:PRIMING_SAMPLES])
    texts = []
    for start in range(0, len(pcm), 1600):
        decoder.hear(pcm[start : start + 1600])
        texts.append(decoder.interim())
    decoder.end()
    assert texts[0] == ""
    assert "go" in texts[len(texts) // 2].split()
    assert word_errors(WORDS["goforward"], texts[-1]) <= 1


def test_a_build_without_the_c_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pocketsphinx_decoder._library.cache_clear()
    monkeypatch.setattr(pocketsphinx_decoder, "_FUNCTIONS", (("ps_not_there", None, ()),))
    with pytest.raises(EngineFailed, match="ps_not_there"):
        PocketSphinxDecoder()
    pocketsphinx_decoder._library.cache_clear()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pocketsphinx_decoder._library.cache_clear()
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(EngineFailed, match="pip install"):
        PocketSphinxDecoder()
