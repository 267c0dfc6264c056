"""The order and the bookkeeping of recognition with Whisper, with a model that only takes time."""

from __future__ import annotations

import asyncio
import itertools
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import answered, audio, collect, open_input, request_of
from support.patience import PATIENCE_SEC, until
from support.speech_clips import clip_bytes, silence

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import HeardSegment, Hearing, Task, Word, heard_language
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Recognised, Utterance
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import RecognitionCost, WhisperRecogniser, WhisperTranscript
from omni_ws.engine.base import HeardLanguage
from omni_ws.errors import EngineFailed, EngineOverloaded

SPEECH = clip_bytes("librivox_ss_0870")


class TimedModel:
    """Takes a tenth of the length of the audio, on a clock that nothing else moves, and tells what it was asked."""

    languages = frozenset({"de", "en"})
    multilingual = True

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = 0.1
        self.no_speech, self.score, self.text = 0.1, -0.3, "words"
        #: Words of a text that repeats itself, which have times also where none are asked for.
        self.repeated: tuple[Word, ...] = ()
        self.expected: list[list[int]] = []
        #: The languages among which it was to detect one, and the one before; and the one that it finds.
        self.detected: list[tuple[frozenset[str], str | None]] = []
        self.finds: str | None = None
        #: The beam, the length in seconds and the language of what has begun.
        self.begun: list[tuple[int, float, str | None]] = []
        #: Held back while it is not set.
        self.goes_on = threading.Event()
        self.goes_on.set()

    def expected_tokens(self, text: str) -> list[int]:
        return [len(text)]

    def transcribe(
        self,
        audio: Samples,
        *,
        beam: int,
        words: bool,
        language: str | None,
        among: frozenset[str],
        before: str | None,
        expected: Sequence[int],
        tell: Callable[[WhisperTranscript], None] | None,
    ) -> WhisperTranscript:
        seconds = len(audio) / SAMPLE_RATE
        self.detected.append((among, before))
        self.expected.append(list(expected))
        self.begun.append((beam, seconds, language))
        assert self.goes_on.wait(PATIENCE_SEC)
        self.now += self.pace * seconds
        found = (Word("words", 10, 20),) if words else ()
        untimed = WhisperTranscript(self.text, (), self.no_speech, self.score, language=self.finds)
        if tell is not None:
            tell(untimed)
        return replace(untimed, words=self.repeated or found)

    @property
    def beams(self) -> list[int]:
        return [beam for beam, _, _ in self.begun]


@pytest.fixture
def model() -> TimedModel:
    return TimedModel()


def timed(model: TimedModel) -> WhisperRecogniser:
    """A recogniser with one worker."""
    load: Any = lambda: model  # noqa: E731
    return WhisperRecogniser(max_recognisers=4, workers=1, load=load, clock=lambda: model.now)


@pytest.fixture
def recogniser(model: TimedModel) -> Iterator[WhisperRecogniser]:
    recogniser = timed(model)
    recogniser.load()
    model.begun.clear()
    yield recogniser
    model.goes_on.set()
    recogniser.close()


def pcm(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * SAMPLE_RATE), np.int16)


def spoken(seconds: float) -> Utterance:
    utterance = Utterance(0)
    utterance.append(pcm(seconds))
    return utterance


def test_settled_texts_have_words_and_a_beam(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    recognised = recogniser.transcribe(pcm(2)).result(PATIENCE_SEC)
    segment = HeardSegment(
        "words",
        10,
        20,
        tokens=(),
        avg_logprob=-0.3,
        compression_ratio=5 / len(zlib.compress(b"words")),
        no_speech_prob=0.1,
    )
    assert recognised == Recognised("words", (Word("words", 10, 20),), Hearing(None, (segment,)))
    assert model.begun == [(5, 2.0, None)]


async def test_what_was_said_once_is_told_once(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    model.text = "ten of clubs ten of clubs ten of"
    starts = [0, 300, 600, *[900] * 5]
    model.repeated = tuple(
        Word(word, start, min(start + 300, 900)) for word, start in zip(model.text.split(), starts, strict=True)
    )
    assert recogniser.transcribe(pcm(2)).result(PATIENCE_SEC).text == "ten of clubs"
    live = recogniser.live_text()
    await until(lambda: live.read(spoken(1)) == "ten of clubs")
    live.end()


def test_settled_texts_go_before_interim_ones(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    model.goes_on.clear()
    first = recogniser.transcribe(pcm(1))
    for _ in range(3):
        recogniser.live_text().read(spoken(1))
    last = recogniser.transcribe(pcm(1))
    model.goes_on.set()
    assert first.result(PATIENCE_SEC) == last.result(PATIENCE_SEC)
    recogniser.close()
    assert model.beams[:2] == [5, 5]


def test_recordings_go_last(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    model.goes_on.clear()
    first = recogniser.transcribe(pcm(1))
    recording = recogniser.transcribe(pcm(2), waited_for=False)
    recogniser.live_text().read(spoken(3))
    speaker = recogniser.transcribe(pcm(4))
    model.goes_on.set()
    for work in (first, recording, speaker):
        work.result(PATIENCE_SEC)
    assert [seconds for _, seconds, _ in model.begun] == [1, 4, 3, 2]


async def test_interim_texts_are_greedy_and_come_one_at_a_time(
    recogniser: WhisperRecogniser, model: TimedModel
) -> None:
    live, utterance = recogniser.live_text(), spoken(0.3)
    assert live.read(utterance) == ""
    assert model.begun == []  # too little
    model.goes_on.clear()
    for _ in range(10):
        utterance.append(pcm(0.1))
        assert live.read(utterance) == ""
    await until(lambda: bool(model.begun))
    assert model.begun == [(1, 0.4, None)]
    model.goes_on.set()
    await until(lambda: live.read(utterance) == "words")
    live.end()


@pytest.mark.parametrize(
    ("no_speech", "score", "text", "settled", "interim"),
    [
        (0.5, -1.1, "words", "words", "words"),
        (0.7, -1.1, "words", "", ""),
        (0.7, -0.9, "words", "words", ""),  # without a beam, it may repeat itself and be sure of that
        (0.5, -0.9, ". . .", "", ""),
    ],
)
def test_text_of_noise_is_dropped(
    recogniser: WhisperRecogniser,
    model: TimedModel,
    no_speech: float,
    score: float,
    text: str,
    settled: str,
    interim: str,
) -> None:
    model.no_speech, model.score, model.text = no_speech, score, text
    told: list[Recognised] = []
    assert recogniser.transcribe(pcm(1), tell_untimed=told.append).result(PATIENCE_SEC).text == settled
    assert [(one.text, one.words) for one in told] == ([(settled, ())] if settled else [])
    assert recogniser._interim(pcm(1)) == interim


def test_a_request_may_have_a_language(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    german = recogniser.expecting(language="de")
    german.transcribe(pcm(1)).result(PATIENCE_SEC)
    recogniser.transcribe(pcm(1)).result(PATIENCE_SEC)
    assert [language for _, _, language in model.begun] == ["de", None]
    assert german.capabilities.languages == {"de", "en"}


def test_a_request_may_name_what_is_to_be_expected(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    request = request_of(open_input(), expected="Ng, Ngo.")
    model.expected.clear()
    expecting = recogniser.transcriber(request)
    expecting.transcribe(pcm(1)).result(PATIENCE_SEC)
    expecting._interim(pcm(1))
    recogniser.transcribe(pcm(1)).result(PATIENCE_SEC)
    assert model.expected == [[8], [8], []]
    assert recogniser.capabilities.keywords


def test_an_english_model_has_no_copy_for_each_request(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    model.multilingual = False
    assert recogniser.transcriber(request_of(open_input(), languages=frozenset({"en"}))) is recogniser


def test_a_request_may_limit_the_detection(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    model.detected.clear()
    heard = HeardLanguage("de")
    request = request_of(open_input(), languages=frozenset({"de"}), heard_language=heard)
    transcriber = recogniser.transcriber(request)
    transcriber.transcribe(pcm(1)).result(PATIENCE_SEC)
    heard.code = "en"  # as an utterance has told meanwhile
    transcriber.transcribe(pcm(1)).result(PATIENCE_SEC)
    assert model.detected == [(frozenset({"de"}), "de"), (frozenset({"de"}), "en")]


def test_the_operator_may_limit_the_detection(model: TimedModel) -> None:
    load: Any = lambda: model  # noqa: E731
    recogniser = WhisperRecogniser(workers=1, languages=["de"], load=load, clock=lambda: model.now)
    recogniser.load()
    model.detected.clear()
    recogniser.transcriber(request_of(open_input())).transcribe(pcm(1)).result(PATIENCE_SEC)
    assert model.detected == [(frozenset({"de"}), None)]
    assert recogniser.capabilities.languages == {"de"}
    assert recogniser.describe()[0].startswith("languages: German;")
    recogniser.close()


@pytest.mark.parametrize("multilingual", [True, False])
def test_a_language_that_the_model_does_not_hear_is_refused(model: TimedModel, multilingual: bool) -> None:
    model.multilingual = multilingual
    load: Any = lambda: model  # noqa: E731
    recogniser = WhisperRecogniser(workers=1, languages=["de", "es"], load=load)
    with pytest.raises(EngineFailed, match="does not hear spanish") as refused:
        recogniser.load()
    assert ("--asr whisper:base" in str(refused.value)) is not multilingual
    recogniser.close()


async def test_the_language_of_an_utterance_is_kept_for_the_next(model: TimedModel) -> None:
    recogniser = timed(model)
    engine = RecogniserEngine(recogniser, clock=lambda: model.now)
    await engine.start()
    model.detected.clear()
    model.finds = "de"
    heard = HeardLanguage()
    twice = SPEECH + silence(1) + SPEECH
    try:
        answer = await answered(engine, *audio(twice), task=Task.TRANSCRIBE, heard_language=heard)
    finally:
        await engine.stop()
    settled = [one.hearing for one in answer.transcripts if not one.interim]
    assert [heard_language(one) for one in settled if one is not None] == ["de", "de"]
    assert (model.detected[0][1], model.detected[-1][1], heard.code, heard.before) == (None, "de", "de", None)


def test_the_start_and_the_work_measure_what_it_costs(recogniser: WhisperRecogniser, model: TimedModel) -> None:
    cost = recogniser.cost
    before = cost.talkers()
    model.pace = 1.0
    for _ in range(20):
        recogniser.transcribe(pcm(3)).result(PATIENCE_SEC)
    assert cost.talkers() < before
    assert cost.talkers() == 1


def costs_little(cost: RecognitionCost) -> None:
    for _ in range(50):
        cost.note_settled(0.01, 3)
        cost.note_interim(0.01)


@pytest.fixture
def cost(engine: RecogniserEngine) -> RecognitionCost:
    assert isinstance(engine.recogniser, WhisperRecogniser)
    return engine.recogniser.cost


@pytest_asyncio.fixture
async def engine(model: TimedModel) -> AsyncIterator[RecogniserEngine]:
    """An engine with one worker, for which all audio comes as it is spoken."""
    ticks = itertools.count(0, 10)
    engine = RecogniserEngine(timed(model), clock=lambda: next(ticks))
    await engine.start()
    model.begun.clear()
    yield engine
    model.goes_on.set()
    assert engine.active_requests == 0
    await engine.stop()


async def test_who_has_ended_goes_before_those_who_still_speak(
    engine: RecogniserEngine, model: TimedModel, cost: RecognitionCost
) -> None:
    costs_little(cost)
    model.goes_on.clear()
    # As much as may come at once and is still taken for live.
    sources = [open_input(*audio(SPEECH[:44_000])) for _ in range(3)]
    running = [asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE)) for source in sources]
    await until(lambda: bool(model.begun))  # the others wait
    assert model.beams == [1]
    sources[2].close()
    workers = engine.recogniser._threads  # type: ignore[attr-defined]
    await until(lambda: any(urgency == 0 for urgency, *_ in workers._waiting))
    model.goes_on.set()
    await running[2]
    assert model.beams[1] == 5
    for source in sources:
        source.close()
    await asyncio.gather(*running)


async def test_one_talker_too_many_is_refused(
    engine: RecogniserEngine, model: TimedModel, cost: RecognitionCost
) -> None:
    """With interim texts each takes half of the only worker; they go first, so that more are carried."""
    carried = engine.recogniser.slots.count
    assert 1 < cost.talkers() < carried <= 4
    sources = [open_input(*audio(SPEECH[:16_000])) for _ in range(carried)]
    running = [asyncio.create_task(collect(engine, source, task=Task.TRANSCRIBE)) for source in sources]
    await until(lambda: engine.recogniser.slots.taken == carried)
    with pytest.raises(EngineOverloaded, match=f"all {carried} recognisers are in use") as refusal:
        await answered(engine, *audio(SPEECH[:16_000]), task=Task.TRANSCRIBE)
    assert refusal.value.retry_after_ms
    for source in sources:
        source.close()
    await asyncio.gather(*running)


async def test_the_upper_limit_holds_where_recognition_costs_little(
    engine: RecogniserEngine, model: TimedModel, cost: RecognitionCost
) -> None:
    costs_little(cost)
    assert cost.talkers() > 4
    assert engine.recogniser.slots.count == 4
