"""The greeting: an answer without a question, with which a session begins."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
import dataclasses
from typing import cast

import msgspec

from omni_ws.core.chunks import FinishReason, InputChunk, InputMode, Modality, OutputModality, StartTrigger, Task, Usage
from omni_ws.core.request_input import GenerationStarted, InputSettings, RequestInput
from omni_ws.core.start_policy import OnEndOnly
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import NO_SINK, AudioOutput, Engine, EngineOutput, Finished, GenerationRequest, TextOutput
from omni_ws.service.conversation.request import Request
from omni_ws.wire.session_config import SessionConfig


def greeting_input() -> RequestInput:
    """The input of a greeting, which never has any."""
    return RequestInput(InputSettings(start_policy=OnEndOnly(), mode=InputMode.SNAPSHOT))


def greeting_configuration(config: SessionConfig) -> SessionConfig:
    """What is in effect for the greeting of a session that begins with ``config``."""
    return msgspec.structs.replace(config, task=Task.SPEECH)


def begin_greeting(request: Request) -> GenerationStarted:
    """Makes a request that has just opened the greeting of its configuration, ready to be answered."""
    request.greeting = request.config.greeting
    request.field_names = _name_in_configuration
    started = GenerationStarted(StartTrigger.GREETING, None, ())
    request.start(started)
    request.input_ended.set()
    return started


async def say_greeting(engine: Engine, request: Request, generation: GenerationRequest) -> AsyncIterator[EngineOutput]:
    """The text at once, where text is wanted; then the speech of ``engine``, where audio is wanted and it reads aloud.

    Sampling is for answers that a model makes up: a greeting is never cut.
    """
    text = request.greeting
    writes = OutputModality.TEXT in generation.modalities
    if writes:
        yield TextOutput(text)
    if OutputModality.AUDIO not in generation.modalities or Task.SPEECH not in engine.capabilities.tasks:
        yield Finished(FinishReason.STOP, Usage(output_tokens=count_words(text)))
        return
    wanted = dataclasses.replace(
        generation, input=_Text(text), modalities=frozenset({OutputModality.AUDIO}), sampling={}, sink=NO_SINK
    )
    spoken = cast("AsyncGenerator[EngineOutput]", engine.generate(wanted))  # by the contract of Engine
    async with aclosing(spoken) as outputs:
        async for output in outputs:
            if isinstance(output, AudioOutput):
                if not writes:
                    request.entry.say(text)  # for the history; how much of it was heard is known later
                    writes = True
                yield output
            elif isinstance(output, Finished):
                yield output


class _Text:
    """An input of one chunk."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def __aiter__(self) -> AsyncIterator[InputChunk]:
        yield InputChunk(Modality.TEXT, self._text.encode(), end_of_input=True)


def _name_in_configuration(param: str | None) -> str | None:
    """To the engine the greeting is the text of an input."""
    return "greeting" if param == "text" else param
