"""Words that a recogniser tells while somebody speaks, over real sockets: they end turns, or keep them open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.inline_workers import MS, InlineWorkers, ScriptedJudge, loud, quiet
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import HEARS, PlayingEngine, interim, takes

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput, TranscriptGuess, TranscriptOutput

pytestmark = pytest.mark.virtual_clock

ANSWER = [TextOutput("an answer")]
#: Less the lag of a detector that the one of the tests does not have.
LAG_MS = 64


class EarlyEars(PlayingEngine):
    """Hears, in each turn, what the next of ``turns`` says, from its begin on, and answers when its input has ended."""

    def __init__(self, *turns: Sequence[Any], guesses: bool = True) -> None:
        able = {**HEARS, "languages": frozenset({"en"}), "transcript_guesses": guesses}
        super().__init__(ANSWER, transcribes_first=True, hears_on=True, **able)
        self._turns = iter(turns)

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        first = await anext(aiter(request.input))
        if first.modality is Modality.AUDIO:
            for step in next(self._turns, ()):
                if callable(step):
                    await step()
                elif not isinstance(step, TranscriptGuess) or request.options.transcript_guesses:
                    out.write(step)
        taken: list[InputChunk] = [first, *[chunk async for chunk in request.input]]
        self.inputs.append(taken)
        for step in self.script:
            out.write(step)
        out.write(Finished(FinishReason.STOP, Usage()))


@contextlib.asynccontextmanager
async def listening(
    engine: EarlyEars, *, judge: ScriptedJudge | None = None, **turns: Any
) -> AsyncIterator[NativeClient]:
    async with live_server(engine) as server:
        workers = InlineWorkers()
        workers.judge = judge
        server.app.sessions.speech_workers = workers
        async with native_client(server) as client:
            kind = "server_vad" if judge is None else "semantic_vad"
            await client.configure(turn_detection={"type": kind, **turns}, modalities=["text"])
            yield client


async def speak(client: NativeClient, audio: bytes) -> None:
    """At the pace of speech."""
    for start in range(0, len(audio), 32 * MS):
        await client.binary(audio[start : start + 32 * MS])
        await asyncio.sleep(0.032)
    await client.barrier()


async def silence_until_stopped(client: NativeClient) -> int:
    """How many milliseconds of silence end the turn."""
    sent = 0
    while not client.seen("speech_stopped"):
        await speak(client, quiet(32))
        sent += 32
    return sent + LAG_MS


# pauses


@pytest.mark.parametrize(
    ("text", "eagerness", "probability", "silence_ms"),
    [
        ("Set a timer for", "auto", 1.0, 1504),
        ("Set a timer for", "low", 1.0, 4000),
        ("Set a timer for", "high", 1.0, 704),
        ("Set a timer.", "auto", 1.0, 256),
        ("Set a timer.", "auto", 0.6, 416),
        ("Set a timer.", "auto", 0.2, 1088),
        ("Set a timer.", "low", 0.2, 1984),
        ("", "auto", 1.0, 1120),
        ("", "auto", 0.2, 1504),
    ],
)
async def test_the_words_of_a_pause_count(text: str, eagerness: str, probability: float, silence_ms: int) -> None:
    heard = [takes(0.75), TranscriptGuess(text)]
    async with listening(EarlyEars(heard), judge=ScriptedJudge([probability]), eagerness=eagerness) as client:
        await speak(client, quiet(96) + loud(960))
        assert await silence_until_stopped(client) == pytest.approx(silence_ms, abs=32)


async def test_a_recogniser_without_guesses_changes_nothing() -> None:
    async with listening(EarlyEars([], guesses=False), judge=ScriptedJudge([1.0])) as client:
        await speak(client, quiet(96) + loud(960))
        assert await silence_until_stopped(client) == 256


async def test_the_assistant_has_asked_for_a_number() -> None:
    said = [takes(0.75), TranscriptGuess("Seven.")]
    engine = EarlyEars(said)
    engine.script = (TextOutput("What is your phone number?"),)
    async with listening(engine, judge=ScriptedJudge([1.0])) as client:
        await client.say("I have a question")
        await client.answer()
        await speak(client, quiet(96) + loud(960))
        assert await silence_until_stopped(client) == pytest.approx(1504, abs=32)


# sound in which no words come


async def test_a_turn_in_which_no_words_come_any_more_ends() -> None:
    heard = [interim("what time is it"), *[step for _ in range(4) for step in (takes(1), interim("what time is it"))]]
    async with listening(EarlyEars([*heard, TranscriptOutput("What time is it?")])) as client:
        await speak(client, quiet(96) + loud(3000))
        assert not client.seen("speech_stopped")
        await speak(client, loud(3000))
        assert len(client.seen("speech_stopped")) == len(client.seen("speech_started")) == 1
        *outputs, final = client.seen("output_chunk")
        # The same again is not sent.
        assert [frame["text"] for frame in outputs] == ["what time is it", "What time is it?", "an answer"]
        assert final["finish_reason"] == "stop"


@pytest.mark.parametrize(("heard", "joins"), [([""], False), (["hello"], True)], ids=["nothing", "a word"])
async def test_typed_text_waits_for_no_babble(heard: list[str], joins: bool) -> None:
    engine = EarlyEars([takes(1), *map(interim, heard), takes(0.5), *map(interim, heard)])
    async with listening(engine) as client:
        await speak(client, quiet(96) + loud(2500))
        await client.say("hello")
        first = await client.answer()
        if joins:
            assert (first.text, first.reason) == ("an answer", "stop")
        else:
            assert (first.reason, first.chunks) == ("cancelled", [])
            assert (await client.answer()).text == "an answer"
        modalities = [{chunk.modality for chunk in taken} for taken in engine.inputs]
        assert modalities[-1] == ({Modality.AUDIO, Modality.TEXT} if joins else {Modality.TEXT})
        await speak(client, loud(500) + quiet(640))
        assert client.seen("speech_stopped")[-1]["request_id"] == (first.final["request_id"] if joins else None)


async def test_typed_text_joins_a_turn_that_has_only_begun() -> None:
    engine = EarlyEars([interim(""), takes(0.5), interim("")])
    async with listening(engine) as client:
        await speak(client, quiet(96) + loud(1900))
        await client.say("hello")
        assert (await client.answer()).text == "an answer"
        assert {chunk.modality for chunk in engine.inputs[-1]} == {Modality.AUDIO, Modality.TEXT}


async def test_an_interim_transcript_without_a_word_is_told_nobody() -> None:
    engine = EarlyEars([interim("good"), interim(" "), interim(""), TranscriptOutput("good day")])
    async with listening(engine) as client:
        await client.chunk(quiet(320) + loud(640) + quiet(960))
        answer = await client.answer()
        assert [chunk["text"] for chunk in answer.chunks] == ["good", "good day", "an answer"]
