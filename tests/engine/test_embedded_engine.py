"""The embedded engine as requests see it: recognition, rules and a voice at work together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from support.embedded_engine import EmbeddedEngine
from support.engine_answers import AUDIO, BOTH, TEXT, answered, audio, collect, open_input, request_of, streamed, text
from support.patience import until, until_heard
from support.speech_clips import WORDS, as_pcm16, clip_bytes, noises

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task
from omni_ws.engine.base import (
    EngineState,
    Finished,
    PartFailed,
    TextComplete,
    TextOutput,
    TranscriptOutput,
    WordsComplete,
)
from omni_ws.engine.llm.rules_engine import NOTHING_HEARD
from omni_ws.errors import (
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
    UnsupportedModality,
    UnsupportedParameter,
)
from omni_ws.scenarios.speech import word_errors

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_time]

NOW = datetime(2031, 3, 4, 15, 7)


@contextlib.asynccontextmanager
async def running(**config: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(max_recognisers=4, **config, now=lambda: NOW)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[EmbeddedEngine]:
    async with running() as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started_with_voice(voice_choice: VoiceChoice) -> AsyncIterator[EmbeddedEngine]:
    async with running(voice=voice_choice) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    """The running engine; afterwards nothing of it may be held any more."""
    yield started
    nothing_is_held(started)


@pytest_asyncio.fixture(loop_scope="module")
async def voiced(started_with_voice: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    """The same with a voice."""
    yield started_with_voice
    nothing_is_held(started_with_voice)


def nothing_is_held(engine: EmbeddedEngine) -> None:
    assert engine.active_requests == 0
    assert engine.asr.recogniser.slots.taken == 0
    assert engine.voice.jobs == 0


# text


async def test_text_is_answered(engine: EmbeddedEngine) -> None:
    result = await answered(engine, text("What time"), text(" is it?"))
    assert result.text == "It is 3:07 PM."
    assert result.finished.reason is FinishReason.STOP
    assert (result.finished.usage.input_tokens, result.finished.usage.output_tokens) == (4, 4)
    assert result.audio == []


async def test_word_times_run_along_the_whole_answer(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("count to thirty"), modalities=BOTH)
    assert [word.text for word in result.words] == [str(number) for number in range(1, 31)]
    starts = [word.start_ms for word in result.words]
    assert starts == sorted(starts)
    assert result.words[-1].end_ms <= result.audio_ms + 1


async def test_audio_without_text(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("hello"), modalities=AUDIO)
    assert result.text == ""
    assert result.audio_ms > 500
    assert result.finished.usage.output_tokens == 6


async def test_every_voice_can_be_asked_for(voiced: EmbeddedEngine) -> None:
    other = voiced.capabilities.voices[1]
    assert (await answered(voiced, text("hello"), modalities=BOTH, voice=other)).audio_ms > 300


async def test_what_the_voice_cannot_read_is_written_all_the_same(
    voiced: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert voiced.voice.facts is not None
    monkeypatch.setattr(voiced.voice, "facts", replace(voiced.voice.facts, latin_only=True))
    result = await answered(voiced, text("repeat after me: 你好"), modalities=BOTH)
    assert (result.text, result.audio_ms) == ("你好.", 0)
    assert result.finished.reason is FinishReason.STOP


async def test_what_is_cut_off_is_not_spoken(voiced: EmbeddedEngine) -> None:
    result = await answered(voiced, text("count to twelve"), modalities=BOTH, sampling={"stop": "10. 11"})
    assert [word.text for word in result.words] == [str(number) for number in range(1, 10)]


async def test_nothing_at_all_is_empty_input(engine: EmbeddedEngine) -> None:
    for task in (Task.CHAT, Task.TRANSCRIBE):
        with pytest.raises(EmptyInput):
            await answered(engine, task=task)
    assert (await answered(engine, text("  "))).text == "The message is empty."


# speech in


@pytest.mark.parametrize(("name", "errors"), [("goforward", 0), ("librivox_ss_0870", 0)])
async def test_speech_is_understood(engine: EmbeddedEngine, name: str, errors: int) -> None:
    result = await answered(engine, text("repeat after me:"), *audio(clip_bytes(name)))
    assert word_errors(WORDS[name], result.transcript).wrong <= errors
    assert result.text == f"{result.transcript}."
    assert result.finished.usage.input_tokens == 3 + len(result.transcript.split())
    assert result.finished.usage.input_audio_ms == len(clip_bytes(name)) // 32


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum"])
async def test_noise_is_not_speech(engine: EmbeddedEngine, name: str) -> None:
    noise = audio(as_pcm16(noises()[name]), 100)
    result = await answered(engine, *noise)
    assert result.transcripts == []
    assert result.text == NOTHING_HEARD
    result = await answered(engine, *noise, task=Task.TRANSCRIBE)
    assert (result.transcripts, result.text) == ([], "")
    assert result.finished.reason is FinishReason.STOP


async def test_speech_and_text_are_one_message_in_their_order(engine: EmbeddedEngine) -> None:
    result = await answered(engine, text("repeat after me:"), *audio(clip_bytes("goforward"), 20), text("and back"))
    assert result.text == f"{WORDS['goforward']} and back."


# life and limits


async def test_what_it_says_about_itself(engine: EmbeddedEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.input_modalities == frozenset(Modality)
    assert capabilities.extend
    assert capabilities.sampling == {"max_tokens", "seed", "stop"}
    assert capabilities.sampling_no_ops == {"temperature", "top_p"}
    assert (capabilities.tools, capabilities.logprobs, capabilities.structured_output) == (False, False, False)
    assert capabilities.raw_prompts
    assert (OutputModality.AUDIO in capabilities.output_modalities) is bool(capabilities.voices)
    assert engine.state is EngineState.OK
    assert capabilities.stages == ("asr", "llm", "tts")
    assert capabilities.tasks == frozenset(Task)
    assert (engine.name, engine.model) == ("embedded", "omni-embedded")
    parts = {role: part.name for role, part in engine.parts.items() if part is not None}
    assert parts == {"asr": "recordings", "llm": "rules", "tts": engine.tts.name}
    (line,) = engine.describe()
    assert line.startswith("voice: ")


async def test_tasks_take_what_they_can_work_on(voiced: EmbeddedEngine) -> None:
    speech, words = audio(clip_bytes("cards_001")), [text("hello")]
    wrong: Sequence[tuple[Task, list[InputChunk]]] = ((Task.SPEECH, speech), (Task.TRANSCRIBE, words))
    for task, chunks in wrong:
        with pytest.raises(UnsupportedModality, match=f"task {task} takes"):
            await answered(voiced, *chunks, task=task, modalities=BOTH)
    with pytest.raises(UnsupportedParameter) as refusal:
        await answered(voiced, *words, task=Task.SPEECH, modalities=TEXT)
    assert refusal.value.param == "modalities"
    result = await answered(voiced, *words, task=Task.SPEECH, modalities=BOTH)
    assert result.text == ""
    assert result.audio_ms > 300
    result = await answered(voiced, *speech, task=Task.TRANSCRIBE, modalities=BOTH)
    assert result.text == result.transcript == WORDS["cards_001"]
    assert result.audio == []


@pytest.mark.slow
async def test_an_answer_goes_on_in_writing_when_the_voice_dies(voiced: EmbeddedEngine) -> None:
    assert voiced.voice.worker_pid is not None
    os.kill(voiced.voice.worker_pid, signal.SIGSTOP)
    speaking = asyncio.create_task(answered(voiced, text("hello"), modalities=BOTH))
    await until(lambda: voiced.voice.jobs == 1)
    os.kill(voiced.voice.worker_pid, signal.SIGKILL)
    result = await speaking
    told = (TextOutput, WordsComplete, TextComplete)
    kinds = [type(output) for output in result.outputs if not isinstance(output, told)]
    assert kinds == [PartFailed, Finished]
    assert (result.text, result.finished.reason) == ("Hello. How can I help you?", FinishReason.STOP)
    assert voiced.state is EngineState.OK
    assert (await answered(voiced, text("hello"), modalities=BOTH)).audio_ms > 300


@pytest.mark.slow
async def test_requests_past_the_seats_are_refused_and_the_others_go_on(engine: EmbeddedEngine) -> None:
    speech = audio(clip_bytes("goforward"))
    sources = [open_input(*speech) for _ in range(4)]
    running = [asyncio.create_task(collect(engine, source)) for source in sources]
    slots = engine.asr.recogniser.slots
    await until(lambda: slots.taken == 4)
    with pytest.raises(EngineOverloaded) as refusal:
        await answered(engine, *speech)
    assert refusal.value.retry_after_ms
    assert (await answered(engine, text("hello"))).text.startswith("Hello.")
    for source in sources:
        source.close()
    results = await asyncio.gather(*running)
    assert {result.transcript for result in results} == {WORDS["goforward"]}
    assert (await answered(engine, *speech)).transcript == WORDS["goforward"]


@pytest.mark.parametrize("sent_ms", [0, 300, 1300, 2500])
async def test_cancelling_while_listening_frees_everything(engine: EmbeddedEngine, sent_ms: int) -> None:
    """The checks are in the fixture."""
    source = open_input(*audio(clip_bytes("goforward")[: sent_ms * 32], 20))
    task = asyncio.create_task(collect(engine, source))
    await until(lambda: not source.queued and engine.active_requests == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("outputs_taken", range(1, 8))
async def test_closing_after_any_output_frees_everything(voiced: EmbeddedEngine, outputs_taken: int) -> None:
    source = open_input(*audio(clip_bytes("goforward"), 100))
    source.close()
    outputs = streamed(voiced, request_of(source, modalities=BOTH))
    for _ in range(outputs_taken):
        await anext(outputs)
    await outputs.aclose()
    assert voiced.active_requests == 0


@pytest.mark.slow
async def test_cancelling_at_every_step_frees_everything(voiced: EmbeddedEngine) -> None:
    """Cancels the same short request later and later, until it gets through."""
    steps = 1.0
    while True:
        source = open_input(*audio(clip_bytes("cards_001")), text("x"))
        source.close()
        task = asyncio.create_task(collect(voiced, source, modalities=BOTH))
        for _ in range(int(steps)):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            assert (await task).transcript == "ten of clubs"
            return
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert voiced.active_requests == 0
        assert voiced.asr.recogniser.slots.taken == 0
        steps *= 1.4


async def test_what_breaks_inside_is_not_shown(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> datetime:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine.llm, "_now", broken)
    with pytest.raises(EngineFailed) as failure:
        await answered(engine, text("what time is it"))
    assert "secret" not in failure.value.message
    assert failure.value.param == "llm"


@pytest.mark.slow
async def test_an_engine_without_a_voice() -> None:
    engine = EmbeddedEngine(voice=VoiceChoice.NONE, max_recognisers=1)
    assert engine.state is EngineState.STARTING
    with pytest.raises(EngineFailed, match="not running"):
        await answered(engine, text("hello"))
    await engine.start()
    try:
        assert engine.capabilities.voices == ()
        assert engine.capabilities.output_modalities == {OutputModality.TEXT, OutputModality.TRANSCRIPT}
        assert (await answered(engine, text("thanks"))).text == "You're welcome."
        assert Task.SPEECH not in engine.capabilities.tasks
    finally:
        await engine.stop()
        await engine.stop()
    assert engine.state is EngineState.STARTING


@pytest.mark.slow
async def test_an_engine_that_cannot_start_says_why(voice_choice: VoiceChoice) -> None:
    engine = EmbeddedEngine(voice=voice_choice, default_voice="hal", max_recognisers=1)
    with pytest.raises(EngineFailed, match="no voice 'hal'"):
        await engine.start()
    assert engine.state is EngineState.STARTING


@pytest.mark.slow
async def test_stopping_with_open_requests_frees_them_too() -> None:
    engine = EmbeddedEngine(voice=VoiceChoice.NONE, max_recognisers=1)
    await engine.start()
    source = open_input(*audio(clip_bytes("goforward"), 100))
    running = asyncio.create_task(collect(engine, source))
    await until(lambda: not source.queued)
    await engine.stop()
    source.close()
    with pytest.raises(EngineFailed):
        await running
    assert engine.active_requests == 0


# while somebody speaks


@pytest.mark.slow
async def test_words_are_understood_before_the_end_has_come() -> None:
    """By the engine's clock a second passes between two looks at it: the audio comes as if it was being spoken. How
    soon the words come is measured by benchmarks/gate.py."""
    engine = EmbeddedEngine(voice=VoiceChoice.NONE, max_recognisers=1, clock=partial(next, count(0.0)))
    await engine.start()
    source, pieces = open_input(), iter(audio(clip_bytes("goforward"), 100))
    async with aclosing(streamed(engine, request_of(source))) as outputs:
        following = asyncio.ensure_future(anext(outputs))
        while not following.done():
            source.put_nowait(next(pieces))
            await until(lambda: not source.queued)
            await until_heard(engine.asr)
        first = await following
        assert isinstance(first, TranscriptOutput)
        assert first.interim
        for piece in pieces:
            source.put_nowait(piece)
        source.close()
        heard = [output.text async for output in outputs if isinstance(output, TranscriptOutput) and not output.interim]
    assert heard == [WORDS["goforward"]]
    await engine.stop()
