"""An answer goes on in another server behind what was told of it: its text, its sound, and its calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.moving_session import ClauseVoice, chunks_of, final_of, text_told, told
from support.scripted_engines import RetortEngine, ToolCallingEngine, WordEngine
from support.voices import need

from omni_ws.audio.codec import AudioDecoder
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    Word,
)
from omni_ws.engine.base import (
    EngineOutput,
    Finished,
    OutputFilter,
)
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.errors import EngineFailed
from omni_ws.service.conversation.output_log import ServerMessage

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

REPLY = (
    "The fox lives in the wood. It hunts 12 mice at night, and it sleeps all day, as most foxes do. "
    "In winter its coat is thick. Farmers do not like it much."
)
QUESTION = InputChunk(Modality.TEXT, b"Tell me of the fox.", 0, end_of_input=True)
AND_NOW = InputChunk(Modality.TEXT, b"And now?", 1, end_of_input=True)
SPOKEN = {"modalities": ["text", "audio"], "output_audio": {"format": "pcm16", "sample_rate": 24_000}}
TEXT = {"modalities": ["text"]}
#: The bytes of a millisecond of this sound. By how much the length of an answer varies from one time to the next: 44 ms
#: with espeak-ng. The shortest word takes 107.
PCM_MS = 48
NOTHING_MS = 80


class Stalling(RetortEngine):
    """A RetortEngine whose answer stops after some words, and has no end."""

    def __init__(self, words: int) -> None:
        super().__init__(" ".join(REPLY.split(" ")[:words]))

    async def act(self, request: Any, out: Any) -> None:
        class Endless(OutputFilter):
            def write(self, output: EngineOutput) -> None:
                if not isinstance(output, Finished):
                    super().write(output)

        await super().act(request, Endless(out))
        await asyncio.Event().wait()


class Going(RetortEngine):
    """A RetortEngine that goes on with an answer, and remembers what it went on with."""

    def __init__(self, reply: str) -> None:
        super().__init__(reply, continues=frozenset({OutputModality.TEXT}))
        self.whole = reply

    async def act(self, request: Any, out: Any) -> None:
        assert self.whole.startswith(request.begun)
        self.reply = self.whole[len(request.begun) :]
        await super().act(request, out)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def voices() -> AsyncIterator[dict[VoiceChoice, SpeechEngine]]:
    choices = (VoiceChoice.HIBARI, VoiceChoice.ESPEAK)
    engines = {choice: SpeechEngine(VoiceProcess(need(choice))) for choice in choices}
    await asyncio.gather(*(engine.start() for engine in engines.values()))
    yield engines
    await asyncio.gather(*(engine.stop() for engine in engines.values()))


@pytest.fixture(scope="module")
def voice(voices: dict[VoiceChoice, SpeechEngine]) -> SpeechEngine:
    return voices[VoiceChoice.HIBARI]


def audio_ms(received: list[ServerMessage]) -> float:
    return sum(len(one.payload) for one in chunks_of(received, OutputModality.AUDIO)) / PCM_MS


def after_audio(ms: float) -> Callable[[list[ServerMessage]], bool]:
    return lambda received: audio_ms(received) >= ms


def after_text(characters: int) -> Callable[[list[ServerMessage]], bool]:
    return lambda received: len(text_told(received)) >= characters


def sound_of(received: list[ServerMessage]) -> np.ndarray[Any, Any]:
    """The whole sound of an answer, without gaps between its pieces."""
    end, pieces = 0.0, []
    for one in chunks_of(received, OutputModality.AUDIO):
        assert one.start_ms == pytest.approx(end, abs=1)
        end += len(one.payload) / PCM_MS
        pieces.append(one.payload)
    return np.frombuffer(b"".join(pieces), np.int16)


def words_of(received: list[ServerMessage]) -> list[Word]:
    return [word for one in chunks_of(received, OutputModality.AUDIO) for word in one.words]


async def composed(llm: RetortEngine | RulesEngine, voice: SpeechEngine) -> ComposedEngine:
    engine = ComposedEngine(llm, tts=voice)
    await engine.start()
    return engine


@pytest.mark.parametrize("choice", [VoiceChoice.HIBARI, VoiceChoice.ESPEAK])
async def test_the_voice_goes_on_where_the_sound_ended(
    voices: dict[VoiceChoice, SpeechEngine], choice: VoiceChoice
) -> None:
    engine = await composed(RetortEngine(REPLY), voices[choice])
    goes_on = await composed(Going(REPLY), voices[choice])
    stays = await told(engine, QUESTION, config=SPOKEN)
    for share in (0.02, 0.3, 0.5, 0.7, 0.97):
        other = engine if share in (0.3, 0.7) else goes_on
        moved = await told(engine, QUESTION, config=SPOKEN, moves=after_audio(share * audio_ms(stays)), other=other)
        check_same(moved, stays)


@pytest.mark.parametrize("words", [6, 9, 14, 20])
@pytest.mark.parametrize("llm", [RetortEngine, Going])
async def test_model_and_voice_go_on_in_the_middle_of_a_text(
    voice: SpeechEngine, llm: Callable[[str], RetortEngine], words: int
) -> None:
    stalls, other = Stalling(words), llm(REPLY)
    first, second = await composed(stalls, voice), await composed(other, voice)
    stays = await told(second, QUESTION, config=SPOKEN)
    moved = await told(first, QUESTION, config=SPOKEN, moves=after_audio(900), other=second)
    check_same(moved, stays)
    begun = stalls.reply if llm is Going else ""
    assert [one.begun for one in other.requests] == ["", begun]


@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 0.9])
async def test_a_voice_without_words_begins_again_at_the_clause(share: float) -> None:
    voice = ClauseVoice()
    engine = await composed(RetortEngine(REPLY), SpeechEngine(voice))
    stays = await told(engine, QUESTION, config=SPOKEN)
    clauses, voice.said = voice.said, []
    moved = await told(engine, QUESTION, config=SPOKEN, moves=after_audio(share * audio_ms(stays)))
    check_same(moved, stays)
    assert np.abs(sound_of(moved).astype(int) - sound_of(stays)).max() <= 20
    assert voice.said[-1] == clauses[-1]
    assert voice.said.count(clauses[0]) == 1 or share < 0.3


def check_same(moved: list[ServerMessage], stays: list[ServerMessage]) -> None:
    """A client is told the same, and hears the same up to what espeak-ng varies from time to time."""
    assert text_told(moved) == text_told(stays) == REPLY
    assert final_of(moved).finish_reason is FinishReason.STOP
    whole, sound = sound_of(stays), sound_of(moved)
    assert abs(len(whole) - len(sound)) <= PCM_MS / 2 * NOTHING_MS
    words, again = words_of(stays), words_of(moved)
    assert [(one.text, one.text_end) for one in again] == [(one.text, one.text_end) for one in words]
    for one, other in zip(again, words, strict=True):
        assert abs(one.start_ms - other.start_ms) <= NOTHING_MS


@pytest.mark.parametrize("form", ["wav", "f32", "pcmu"])
async def test_sound_of_every_format_goes_on(voice: SpeechEngine, form: str) -> None:
    engine = await composed(Going(REPLY), voice)
    config = {"modalities": ["audio"], "output_audio": {"format": form, "sample_rate": 16_000}}
    lengths = []
    for moves in (None, lambda received: len(chunks_of(received, OutputModality.AUDIO)) >= 4):
        received = await told(engine, QUESTION, config=config, moves=moves)
        data = b"".join(one.payload for one in chunks_of(received, OutputModality.AUDIO))
        if form == "wav":
            assert data.count(b"RIFF") == 1
        with AudioDecoder(AudioFormat(AudioEncoding(form), 16_000), sample_rate=24_000) as decoder:
            samples = np.concatenate([*decoder.pieces(data), decoder.flush()])
        lengths.append(len(samples))
        assert final_of(received).finish_reason is FinishReason.STOP
    assert abs(lengths[0] - lengths[1]) <= 24 * NOTHING_MS


async def test_a_model_whose_text_is_whole_is_not_asked_again(voice: SpeechEngine) -> None:
    llm = Going(REPLY)
    moved = await told(await composed(llm, voice), QUESTION, config=SPOKEN, moves=after_audio(4000))
    assert text_told(moved) == REPLY
    assert len(llm.requests) == 1
    assert final_of(moved).usage.output_tokens == len(REPLY.split())


async def test_what_a_model_says_otherwise_ends_the_answer_behind_its_sound(voice: SpeechEngine) -> None:
    """The voice reads what was told to its end, and the next answer sees it."""
    llm, other = RetortEngine(f"{REPLY} And"), RetortEngine("Of the fox nothing is known.")
    llm.pause = asyncio.Event()  # behind its first word

    def first(received: list[ServerMessage]) -> bool:
        return len(text_told(received)) > 0

    first_engine, second_engine = await composed(llm, voice), await composed(other, voice)
    moved = await told(first_engine, QUESTION, config=SPOKEN, moves=first, other=second_engine, then=[AND_NOW])
    (error,) = (one for one in moved if isinstance(one, EngineFailed))
    assert "LLM (retort): the answer that another server had begun cannot be continued" in error.message
    ended, answered = (one for one in moved if isinstance(one, FinalChunk))
    assert (ended.finish_reason, answered.finish_reason) == (FinishReason.ERROR, FinishReason.STOP)
    texts = chunks_of(moved, OutputModality.TEXT)
    assert "".join(one.text for one in texts if one.request_id == ended.request_id) == "The"
    assert "The" in [word.text for word in words_of(moved)]
    history = other.requests[-1].history
    assert [(one.role, one.text) for one in history] == [("user", "Tell me of the fox."), ("assistant", "The")]


async def test_rules_go_on_although_the_clock_does(voice: SpeechEngine) -> None:
    clocks = [partial(datetime, 2026, 1, 5, 10, minute) for minute in (42, 43)]
    engines = [await composed(RulesEngine(now=clock), voice) for clock in clocks]
    question = InputChunk(Modality.TEXT, b"What time is it?", 0, end_of_input=True)
    stays = await told(engines[0], question, config=SPOKEN)
    moved = await told(engines[0], question, config=SPOKEN, moves=after_audio(500), other=engines[1])
    assert text_told(moved) == text_told(stays)
    assert "42" in text_told(moved)
    assert [one.text for one in words_of(moved)] == [one.text for one in words_of(stays)]
    assert final_of(moved).finish_reason is FinishReason.STOP
    for engine in engines:
        await engine.llm_part.stop()


async def test_a_call_of_a_tool_goes_on_with_its_id() -> None:
    llm = ToolCallingEngine("Wait.")
    llm.gate = asyncio.Event()
    other = ToolCallingEngine("Wait.")
    config = {**TEXT, "tools": [{"type": "function", "function": {"name": "local_time"}}]}

    def half(received: list[ServerMessage]) -> bool:
        calls = chunks_of(received, OutputModality.TOOL_CALL)
        return any(one.tool_call is not None and one.tool_call.arguments for one in calls)

    for engine in (llm, other):
        await engine.start()
    moved = await told(llm, QUESTION, config=config, moves=half, other=other)
    fragments = [one.tool_call for one in chunks_of(moved, OutputModality.TOOL_CALL) if one.tool_call is not None]
    assert [one.id for one in fragments if one.id] == ["call_1"]
    assert "".join(one.arguments for one in fragments) == '{"city":"Paris"}'
    assert text_told(moved) == "Wait."
    assert final_of(moved).finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
async def test_a_greeting_is_said_once(voice: SpeechEngine, modalities: list[str]) -> None:
    engine = await composed(RetortEngine(REPLY), voice)
    config = {**SPOKEN, "modalities": modalities, "greeting": "Hello there. What can I do for you today?"}
    stays = await told(engine, config=config, greets=True)
    moved = await told(engine, config=config, greets=True, moves=after_audio(0.6 * audio_ms(stays)))
    assert text_told(moved) == text_told(stays)
    assert abs(len(sound_of(moved)) - len(sound_of(stays))) <= PCM_MS / 2 * NOTHING_MS
    assert [one.text for one in words_of(moved)] == [one.text for one in words_of(stays)]


@pytest.mark.parametrize("characters", [1, 60, 140])
async def test_a_spoken_question_is_heard_once(characters: int) -> None:
    llm, other = RetortEngine(REPLY), Going(REPLY)
    first, second = (ComposedEngine(each, asr=WordEngine(), think_ahead=True) for each in (llm, other))
    for engine in (first, second):
        await engine.start()
    question = InputChunk(Modality.AUDIO, b"tell me of the fox.", 0, end_of_input=True)
    moved = await told(first, question, config=TEXT, moves=after_text(characters), other=second, then=[AND_NOW])
    transcripts = [one.text for one in chunks_of(moved, OutputModality.TRANSCRIPT) if not one.interim]
    assert transcripts == ["tell me of the fox."]
    assert text_told(moved) == REPLY * 2
    assert [one.begun for one in other.requests] == [text_told(moved)[: len(other.requests[0].begun)], ""]
    assert other.requests[1].history[0].text == "tell me of the fox."
    assert other.requests[1].history[1].text == REPLY
