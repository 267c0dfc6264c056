"""The frame of speech on request, with espeak-ng, and for the Latin letters of hibari with a voice that says so."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from support.engine_answers import (
    AUDIO,
    BOTH,
    TEXT,
    Answer,
    answered,
    audio,
    collect,
    open_input,
    request_of,
    streamed,
    text,
)

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, Word
from omni_ws.core.history import Message
from omni_ws.engine import child
from omni_ws.engine.base import AnswerOptions, AudioOutput, EngineState, Finished
from omni_ws.engine.tts import voice_process
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.errors import EmptyInput, EngineFailed, InvalidValue, UnsupportedModality, UnsupportedParameter

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(voice_choice: VoiceChoice) -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(VoiceProcess(voice_choice))
    await engine.start()
    yield engine
    await engine.stop()
    assert engine.state is EngineState.STARTING


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: SpeechEngine) -> AsyncIterator[SpeechEngine]:
    """The running engine; afterwards nothing of it may be held any more."""
    yield started
    assert started.active_requests == 0
    assert voice_of(started).jobs == 0


def voice_of(engine: SpeechEngine) -> VoiceProcess:
    assert isinstance(engine.voice, VoiceProcess)
    return engine.voice


async def read(engine: SpeechEngine, *chunks: InputChunk, **fields: Any) -> Answer:
    return await answered(engine, *chunks, **{"task": Task.SPEECH, "modalities": AUDIO, **fields})


async def test_text_is_read_while_more_arrives(engine: SpeechEngine) -> None:
    source = open_input(text("This is the first sentence. And this"))
    async with aclosing(streamed(engine, request_of(source, task=Task.SPEECH, modalities=BOTH))) as outputs:
        words: list[Word] = []
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            words += output.words
            if len(words) == 5:
                break
        assert [word.text for word in words] == ["This", "is", "the", "first", "sentence"]
        source.put_nowait(text(" is the second."))
        # Not closed: a sentence that seems complete is spoken when nothing follows.
        async for output in outputs:
            assert isinstance(output, AudioOutput)
            words += output.words
            if len(words) == 10:
                break
        assert [word.text for word in words[5:]] == ["And", "this", "is", "the", "second"]
        source.close()
        last = [output async for output in outputs][-1]
    assert isinstance(last, Finished)
    assert last.usage.input_tokens == 10
    assert last.usage.output_tokens == 10


async def test_there_is_no_text(engine: SpeechEngine) -> None:
    history = (Message("user", "not read now"),)
    result = await read(engine, text("Go. Forward, ten meters"), modalities=BOTH, history=history)
    assert {type(output) for output in result.outputs} == {AudioOutput, Finished}
    assert [word.text for word in result.words] == ["Go", "Forward", "ten", "meters"]
    assert (result.finished.usage.input_tokens, result.finished.usage.output_tokens) == (4 + 3, 4)
    assert result.finished.usage.output_audio_ms == pytest.approx(result.audio_ms, abs=1)


async def test_word_times_run_along_the_whole_text(engine: SpeechEngine) -> None:
    result = await read(engine, text(" ".join(f"Number {number}." for number in range(2, 8))))
    starts = [word.start_ms for word in result.words]
    assert len(starts) == 12
    assert starts == sorted(starts)
    assert result.words[-1].end_ms <= result.audio_ms + 1


async def test_a_long_text_is_spoken_before_its_end_is_read(engine: SpeechEngine) -> None:
    source = open_input(text("This is one of many sentences. " * 2000))
    source.close()
    async with aclosing(streamed(engine, request_of(source, task=Task.SPEECH, modalities=AUDIO))) as outputs:
        assert isinstance(await anext(outputs), AudioOutput)


@pytest.mark.parametrize(
    ("sampling", "words", "reason"),
    [
        ({"max_tokens": 2}, ["One,", "two,"], FinishReason.LENGTH),
        ({"max_tokens": 4}, ["One,", "two,", "three,", "four."], FinishReason.STOP),
        ({"stop": "three"}, ["One,", "two,"], FinishReason.STOP),
        ({"stop": "One"}, [], FinishReason.STOP),
    ],
)
async def test_what_is_cut_off_is_not_spoken(
    engine: SpeechEngine, sampling: dict[str, Any], words: list[str], reason: FinishReason
) -> None:
    result = await read(engine, text("One, two, "), text("three, four."), sampling=sampling)
    assert [word.text for word in result.words] == [word.strip(",.") for word in words]
    assert result.finished.reason is reason
    assert result.finished.usage.output_tokens == len(words)


async def test_numbers_are_read_in_words_and_told_as_they_are_written(engine: SpeechEngine) -> None:
    written = await read(engine, text("It was on 2024/10/01 and "), text("cost $20."))
    assert [word.text for word in written.words] == ["It", "was", "on", "2024/10/01", "and", "cost", "$20"]
    assert [word.text_end for word in written.words][-1] == len("It was on 2024/10/01 and cost $20.")
    assert written.finished.usage.input_tokens == written.finished.usage.output_tokens == 7
    spoken = await read(engine, text("It was on October first, twenty twenty-four and cost twenty dollars."))
    assert written.audio_ms == pytest.approx(spoken.audio_ms, rel=0.02)
    # What a composition sends is in words already.
    done = await read(engine, text("It cost $20."), options=AnswerOptions(spoken_form=True))
    assert all(word.text_end is None for word in done.words)


async def test_speed_can_be_asked_for(engine: SpeechEngine) -> None:
    assert engine.capabilities.speed
    slow, fast = [await read(engine, text("One. Two."), speed=speed) for speed in (0.5, 2.0)]
    assert slow.audio_ms > 3 * fast.audio_ms
    assert [word.text for word in slow.words] == [word.text for word in fast.words] == ["One", "Two"]


async def test_every_voice_can_be_asked_for(engine: SpeechEngine) -> None:
    other = engine.capabilities.voices[1]
    assert (await read(engine, text("hello"), voice=other)).audio_ms > 300
    with pytest.raises(InvalidValue, match=re.escape(other)):
        await read(engine, text("hello"), voice="nobody")


async def test_what_is_refused(engine: SpeechEngine) -> None:
    for chunks in ((), (text(" \n"),)):
        with pytest.raises(EmptyInput):
            await read(engine, *chunks)
    with pytest.raises(UnsupportedModality, match="task speech takes text, not audio"):
        await read(engine, *audio(bytes(640)))
    with pytest.raises(UnsupportedParameter) as refusal:
        await read(engine, text("hello"), modalities=TEXT)
    assert refusal.value.param == "modalities"


async def test_a_voice_of_latin_letters_refuses_what_it_cannot_read(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = voice_of(engine)
    assert voice.facts is not None
    monkeypatch.setattr(voice, "facts", replace(voice.facts, latin_only=True))
    for unreadable in ("你好", "Привет!"):
        with pytest.raises(InvalidValue, match="Latin letters only") as refusal:
            await read(engine, text(unreadable))
        assert refusal.value.param == "text"
    for readable in ("... 12", "é", "ﬁ"):
        assert (await read(engine, text(readable))).audio_ms > 100
    mixed = await read(engine, text("你好。 Go."), options=AnswerOptions(skip_unreadable=True))
    assert [word.text for word in mixed.words] == ["Go"]


async def test_a_slow_voice_begins_with_a_short_clause(engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = voice_of(engine)
    assert voice.facts is not None
    said, say = list[str](), voice.say

    def noted(clause: str, **how: Any) -> AsyncGenerator[AudioOutput, None]:
        said.append(clause)
        return say(clause, **how)

    monkeypatch.setattr(voice, "say", noted)
    for pace in (0.0, 0.5):
        monkeypatch.setattr(voice, "facts", replace(voice.facts, pace=pace))
        await read(engine, text("Yes, of course, my dear."))
    assert said == ["Yes, of course, my dear.", "Yes,", "of course, my dear."]
    assert "0.50 s of CPU time for a second of speech" in voice.describe()[0]


async def test_what_it_says_about_itself(engine: SpeechEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.tasks == {Task.SPEECH}
    assert capabilities.input_modalities == {Modality.TEXT}
    assert capabilities.output_modalities == {OutputModality.AUDIO}
    assert capabilities.voices == voice_of(engine).voices
    assert capabilities.voice_aliases == voice_of(engine).aliases
    assert capabilities.voice_languages.keys() == set(capabilities.voices)
    assert engine.state is EngineState.OK
    assert engine.name == "espeak-ng"
    assert engine.model == voice_of(engine).voices[0]
    assert engine.describe()[0].startswith(f"voice: {engine.name}")


@pytest.mark.parametrize("outputs_taken", range(1, 4))
async def test_closing_after_any_output_frees_everything(engine: SpeechEngine, outputs_taken: int) -> None:
    """The checks are in the fixture."""
    source = open_input(text("This is a sentence. This is another one."))
    outputs = streamed(engine, request_of(source, task=Task.SPEECH, modalities=AUDIO))
    for _ in range(outputs_taken):
        await anext(outputs)
    await outputs.aclose()


@pytest.mark.slow
async def test_cancelling_at_every_step_frees_everything(engine: SpeechEngine) -> None:
    """Cancels the same short request later and later, until it gets through."""
    steps = 1.0
    while True:
        source = open_input(text("Yes. No."))
        source.close()
        task = asyncio.create_task(collect(engine, source, task=Task.SPEECH, modalities=AUDIO))
        for _ in range(int(steps)):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            assert (await task).audio_ms > 300
            return
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (engine.active_requests, voice_of(engine).jobs) == (0, 0)
        steps *= 1.4


async def test_an_engine_without_a_voice() -> None:
    engine = SpeechEngine(VoiceProcess(VoiceChoice.NONE))
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await read(engine, text("hello"))
    await engine.start()
    try:
        assert (engine.capabilities.tasks, engine.capabilities.output_modalities) == (frozenset(), frozenset())
        assert not engine.capabilities.speed
        with pytest.raises(UnsupportedParameter, match="no voice"):
            await read(engine, text("hello"))
    finally:
        await engine.stop()
        await engine.stop()


async def test_an_engine_that_cannot_start_says_why(voice_choice: VoiceChoice) -> None:
    engine = SpeechEngine(VoiceProcess(voice_choice, default_voice="hal"))
    with pytest.raises(EngineFailed, match="no voice 'hal'"):
        await engine.start()
    assert engine.state is EngineState.STARTING


async def _until_it_is(engine: SpeechEngine, state: EngineState) -> None:
    while engine.state is not state:
        await asyncio.gather(read(engine, text("hello")), return_exceptions=True)


async def test_a_voice_that_does_not_come_back_is_told_and_comes_back(
    voice_choice: VoiceChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = VoiceProcess(voice_choice)
    engine = SpeechEngine(voice)
    await engine.start()
    try:
        assert voice.worker_pid is not None
        monkeypatch.setattr(voice_process, "WORKER_MODULE", "omni_ws.not_there")
        monkeypatch.setattr(child, "MAX_BACKOFF_SEC", 0.01)
        os.kill(voice.worker_pid, signal.SIGKILL)
        await _until_it_is(engine, EngineState.UNHEALTHY)
        monkeypatch.undo()
        await _until_it_is(engine, EngineState.OK)
        assert (await read(engine, text("hello"))).audio_ms > 300
    finally:
        await engine.stop()
