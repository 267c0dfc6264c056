"""The three things that can be done with an input: answer it, read it aloud, write it down."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import datetime

from omni_ws.engine.base import EngineOutput, Message
from omni_ws.engine.embedded.intake import Intake
from omni_ws.engine.embedded.reply import Reply
from omni_ws.engine.llm.rules import NOTHING_HEARD, answer
from omni_ws.engine.tts.flite import speakable
from omni_ws.errors import EmptyInput, InvalidValue
from omni_ws.profiler import events


async def chat(
    intake: Intake, reply: Reply, *, history: Sequence[Message], now: Callable[[], datetime]
) -> AsyncGenerator[EngineOutput, None]:
    """Transcripts while the input arrives; then the answer, each sentence as text and at once as speech."""
    async with aclosing(intake.transcripts()) as transcripts:
        async for transcript in transcripts:
            yield transcript
    if not intake.anything:
        raise EmptyInput("the request has no input")
    separator = ""
    sentences = _sentences(intake, history, now)
    while (sentence := await _next_sentence(sentences, intake)) is not None:
        async with aclosing(reply.say(separator + sentence)) as outputs:
            async for output in outputs:
                yield output
        if reply.reached is not None:
            return
        separator = " "
    async with aclosing(reply.finish()) as outputs:
        async for output in outputs:
            yield output


async def _next_sentence(sentences: Iterator[str], intake: Intake) -> str | None:
    with events.span("rules"):
        return await intake.worked_on(next, sentences, None)


def _sentences(intake: Intake, history: Sequence[Message], now: Callable[[], datetime]) -> Iterator[str]:
    pictures = False
    for sentence in intake.sights.sentences():
        pictures = True
        yield sentence
    if intake.text:
        yield from answer(intake.text, history, now())
    elif not pictures:
        yield from (NOTHING_HEARD,) if intake.audio else answer("", history, now())


async def read_aloud(intake: Intake, reply: Reply, *, latin_only: bool) -> AsyncGenerator[EngineOutput, None]:
    """Speaks each clause as soon as it is complete, while later text still arrives."""
    separator = ""
    async with aclosing(intake.clauses()) as clauses:
        async for clause in clauses:
            if latin_only and any(map(str.isalpha, clause)) and not speakable(clause):
                raise InvalidValue("the voice reads Latin letters only: it cannot speak this text", param="text")
            async with aclosing(reply.say(separator + clause)) as outputs:
                async for output in outputs:
                    yield output
            if reply.reached is not None:
                return
            separator = " "
    if not separator:
        raise EmptyInput("there is no text to read aloud")
    async with aclosing(reply.finish()) as outputs:
        async for output in outputs:
            yield output


async def transcribe(intake: Intake, reply: Reply) -> AsyncGenerator[EngineOutput, None]:
    """What is heard; texts that are final are the answer too."""
    async with aclosing(intake.transcripts()) as transcripts:
        async for transcript in transcripts:
            yield transcript
            if not transcript.interim:
                async with aclosing(reply.say(transcript.text)) as outputs:
                    async for output in outputs:
                        yield output
    if not intake.anything:
        raise EmptyInput("the request has no input")
    async with aclosing(reply.finish()) as outputs:
        async for output in outputs:
            yield output
