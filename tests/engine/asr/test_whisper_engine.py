"""Speech recognition as a request sees it, with Whisper tiny.en."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import Answer, Input, answered, audio, collect, open_input, request_of, streamed
from support.patience import PATIENCE_SEC, until, until_heard
from support.real_models import fetched
from support.speech_clips import (
    SAMPLE_RATE,
    WORDS,
    as_pcm16,
    clip_bytes,
    clip_samples,
    noises,
    silence,
)

from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.core.chunks import InputChunk, Task
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import UrgentFirst, WhisperRecogniser, whisper_problem
from omni_ws.engine.base import EngineState, TranscriptOutput
from omni_ws.scenarios.speech import word_errors

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.real_time,
]

pytest.importorskip("ctranslate2")

NUMBERS = {"4": "four", "7": "seven", "8": "eight", "10": "ten"}


class Clock:
    """The engine's, which stands still while it works: what it reads takes no time, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings: list[Future[Any]] = []

    def __call__(self) -> float:
        return self.now

    def note_readings(self, workers: UrgentFirst) -> None:
        """From now on what these threads get to do is among ``readings``."""
        submit = workers.submit

        def noted(urgency: int, call: Callable[[], Any]) -> Future[Any]:
            self.readings.append(submit(urgency, call))
            return self.readings[-1]

        vars(workers)["submit"] = noted


CLOCK = Clock()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[RecogniserEngine]:
    fetched("whisper-tiny-en")
    engine = RecogniserEngine(WhisperRecogniser(), clock=CLOCK)
    await engine.start()
    assert isinstance(engine.recogniser, WhisperRecogniser)
    assert engine.recogniser._threads is not None
    CLOCK.note_readings(engine.recogniser._threads)
    # What an interim text took decides when the next one comes.
    engine.recogniser._clock = CLOCK
    yield engine
    await engine.stop()
    assert engine.state is EngineState.STARTING


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: RecogniserEngine) -> AsyncIterator[RecogniserEngine]:
    """The running engine; afterwards nothing of it may be held any more."""
    yield started
    assert started.active_requests == 0
    assert started.recogniser.slots.taken == 0


async def transcribed(engine: RecogniserEngine, *chunks: InputChunk, **fields: object) -> Answer:
    return await answered(engine, *chunks, task=Task.TRANSCRIBE, **fields)


async def spoken(engine: RecogniserEngine, pcm: bytes) -> Answer:
    """The answer to audio that comes as it is spoken, on a machine that is quick."""
    source = open_input()
    running = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE))
    async for _ in paced(engine, source, pcm):
        pass
    source.close()
    return await running


async def paced(engine: RecogniserEngine, source: Input, pcm: bytes) -> AsyncIterator[None]:
    """Puts audio into a channel bit by bit; what came before has been read when more comes."""
    for chunk in audio(pcm, 100):
        CLOCK.now += 0.1
        source.put_nowait(chunk)
        await until(lambda: not source.queued)
        await until_heard(engine)
        await until(lambda: all(one.done() for one in CLOCK.readings))
        CLOCK.readings.clear()
        yield


def plain(text: str) -> str:
    """As WORDS are written: small letters, numbers in words, no punctuation."""
    words = re.sub(r"[^a-z0-9' ]", "", text.lower()).split()
    return " ".join(NUMBERS.get(word, word) for word in words)


def keyboard(seconds: float) -> Samples:
    """Keys that are hit seven times a second: each a click, a knock, and a fainter click when it comes up."""
    generator = np.random.default_rng(3)
    sound = generator.normal(0, 0.001, int(seconds * SAMPLE_RATE))
    time = np.arange(SAMPLE_RATE // 20) / SAMPLE_RATE
    at = 0.1
    while at < seconds - 0.3:
        for offset, loudness in ((0.0, 0.3), (generator.uniform(0.06, 0.12), 0.1)):
            click = generator.normal(0, 1, len(time)) * np.exp(-400 * time)
            knock = np.sin(2 * np.pi * generator.uniform(180, 260) * time) * np.exp(-120 * time)
            start = int((at + offset) * SAMPLE_RATE)
            sound[start : start + len(time)] += loudness * (click + 0.5 * knock)
        at += generator.uniform(0.08, 0.2)
    return np.asarray(sound, np.float32)


async def test_words_have_their_places_in_the_input(engine: RecogniserEngine) -> None:
    """How many of all clips are heard wrong is in test_word_errors.py."""
    result = await transcribed(engine, *audio(silence(2) + clip_bytes("goforward") + silence(0.6), 20))
    (settled,) = [transcript for transcript in result.transcripts if not transcript.interim]
    assert plain(" ".join(word.text for word in settled.words)) == WORDS["goforward"]
    assert result.text == result.transcript == settled.text
    assert settled.start_ms is not None
    assert 1500 < settled.start_ms <= settled.words[0].start_ms
    assert settled.words[-1].end_ms < 2000 + len(clip_bytes("goforward")) / 32


async def test_equal_bytes_give_equal_text_however_they_are_cut(engine: RecogniserEngine) -> None:
    speech = clip_bytes("cards_001") + silence(0.8) + clip_bytes("goforward")
    results = [await transcribed(engine, *audio(speech, frame_ms)) for frame_ms in (20, None)]
    results.append(await spoken(engine, speech))
    settled = [[each for each in result.transcripts if not each.interim] for result in results]
    assert len(settled[0]) == 2
    assert settled[1:] == settled[:1] * 2


@pytest.mark.parametrize("name", ["tone", "keyboard"])
async def test_noise_gives_no_words(engine: RecogniserEngine, name: str) -> None:
    """Neither interim nor settled ones; other sounds are in test_word_errors.py."""
    sound = keyboard(10) if name == "keyboard" else noises(10)[name]
    result = await transcribed(engine, *audio(as_pcm16(sound), 100))
    assert (result.transcripts, result.text) == ([], "")


@pytest.mark.parametrize(("name", "seconds"), [("white noise", 2), ("hum", 6), ("music", 2), ("keyboard", 0.6)])
async def test_noise_that_was_taken_for_speech_gives_no_words(
    engine: RecogniserEngine, name: str, seconds: float
) -> None:
    sound = keyboard(seconds) if name == "keyboard" else noises(seconds)[name]
    recogniser = engine.recogniser
    assert isinstance(recogniser, WhisperRecogniser)
    assert recogniser.transcribe(pcm16_from_samples(sound)).result(PATIENCE_SEC).text == ""
    assert recogniser._interim(pcm16_from_samples(sound)) == ""


async def test_interim_texts_come_while_somebody_speaks(engine: RecogniserEngine) -> None:
    """The first after 0.8 s of speech on a machine that has nothing else to do, and the last has most of the words."""
    result = await spoken(engine, clip_bytes("librivox_ss_0870"))
    interim = [transcript.text for transcript in result.transcripts if transcript.interim]
    assert len(interim) >= 3
    assert word_errors(WORDS["librivox_ss_0870"], plain(interim[-1])).wrong < 12
    assert word_errors(WORDS["librivox_ss_0870"], plain(result.transcript)).wrong <= 1


async def test_the_first_interim_text_comes_before_the_audio_ends(engine: RecogniserEngine) -> None:
    source = open_input()
    async with aclosing(streamed(engine, request_of(source, task=Task.TRANSCRIBE))) as outputs:
        following = asyncio.ensure_future(anext(outputs))
        async for _ in paced(engine, source, clip_bytes("goforward")):
            if following.done():
                break
        first = await following
        assert isinstance(first, TranscriptOutput)
        assert first.interim
        assert plain(first.text).split()[0] == "go"


async def test_two_talkers_at_once_are_both_understood(engine: RecogniserEngine) -> None:
    names = ("goforward", "cards_001")
    results = await asyncio.gather(*(spoken(engine, clip_bytes(name)) for name in names))
    for name, result in zip(names, results, strict=True):
        assert any(transcript.interim for transcript in result.transcripts)
        assert word_errors(WORDS[name], plain(result.transcript)).wrong <= 1


@pytest.mark.parametrize("sent_ms", [0, 1500])
async def test_cancelling_frees_everything(engine: RecogniserEngine, sent_ms: int) -> None:
    """The checks are in the fixture."""
    source = open_input(*audio(clip_bytes("goforward")[: sent_ms * 32], 20))
    task = asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE))
    await until(lambda: not source.queued and engine.active_requests == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_long_speech_is_cut_and_nothing_is_lost(engine: RecogniserEngine) -> None:
    """25 seconds without a pause that is long enough to end an utterance."""
    clip = clip_samples("librivox_ss_0870")
    loud = np.flatnonzero(np.abs(clip) > 0.02)
    speech = np.tile(clip[loud[0] : loud[-1]], 4)
    result = await transcribed(engine, *audio(as_pcm16(speech)))
    settled = [transcript for transcript in result.transcripts if not transcript.interim]
    assert len(settled) >= 2
    words = 4 * len(WORDS["librivox_ss_0870"].split())
    assert word_errors(" ".join([WORDS["librivox_ss_0870"]] * 4), plain(result.transcript)).wrong <= words // 10


async def test_more_talkers_take_no_more_memory(engine: RecogniserEngine) -> None:
    await transcribed(engine, *audio(clip_bytes("goforward")))
    before = resident_mb()
    await asyncio.gather(*(transcribed(engine, *audio(clip_bytes("goforward"))) for _ in range(2)))
    gc.collect()
    assert resident_mb() - before < 40


def resident_mb() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


async def test_what_it_says_about_itself(engine: RecogniserEngine) -> None:
    assert (engine.name, engine.model, engine.state) == ("whisper", "tiny.en", EngineState.OK)
    assert engine.capabilities.languages == {"en"}
    assert engine.capabilities.word_times
    assert whisper_problem() is None


async def test_a_model_of_many_languages_expects_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it costs here is not asked.
    monkeypatch.setattr("omni_ws.engine.asr.whisper._TRIAL_SAMPLES", SAMPLE_RATE // 10)
    engine = RecogniserEngine(WhisperRecogniser(str(fetched("whisper-base"))))
    await engine.start()
    try:
        assert {"de", "en", "fr", "zh"} < engine.capabilities.languages
        clip = audio(clip_bytes("librivox_ss_0870"))
        found = await transcribed(engine, *clip)
        assert word_errors(WORDS["librivox_ss_0870"], plain(found.transcript)).wrong <= 1
        german = await transcribed(engine, *clip, language="de")
        assert (found.transcript[:4], german.transcript[:4]) == ("And ", "Und ")
    finally:
        await engine.stop()
