"""The parts of a composition: their roles, their names, and their failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import InputMode, OutputModality, Task
from omni_ws.engine.base import (
    NO_SINK,
    AnswerOptions,
    Cut,
    Engine,
    EngineState,
    GenerationRequest,
    InputSource,
    PartFailed,
    UsageMeter,
    incident,
)
from omni_ws.errors import EngineFailed, OmniError


class Role(StrEnum):
    """What a part does: recognition, answers, or speech."""

    ASR = "asr"
    LLM = "llm"
    TTS = "tts"


@dataclass(frozen=True, slots=True)
class PartDescription:
    """A part as clients and operators see it: the name of its engine, and of its model."""

    name: str
    model: str
    #: The names of the other machines that it sends its input to.
    hosts: tuple[str, ...] = ()


@runtime_checkable
class HasParts(Protocol):
    """An engine that is made of others."""

    @property
    def parts(self) -> dict[str, PartDescription | None]:
        """The parts by the names of their roles; None where there is none."""
        ...

    @property
    def part_states(self) -> dict[str, EngineState]:
        """The states of the parts that there are. Before the start, also of those that may be left out."""
        ...


@runtime_checkable
class SendsAway(Protocol):
    """An engine whose work other machines may do."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of those machines, each once; empty where all of the work stays on this one."""
        ...


@runtime_checkable
class HasShortcomings(Protocol):
    """An engine that may lack a part, or whose parts may not be the best of their kind."""

    @property
    def shortcomings(self) -> tuple[str, ...]:
        """Why that is so, once started: a line for each, with what to do."""
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """An engine that takes the memory that is free when it starts: nothing else may start at the same time."""

    measures_memory: Literal[True]


def parts_of(engine: Engine) -> dict[str, PartDescription | None]:
    """Return the parts of any engine. One that is not made of others is the LLM."""
    if isinstance(engine, HasParts):
        return engine.parts
    return {role.value: description_of(engine) if role is Role.LLM else None for role in Role}


def description_of(part: Engine) -> PartDescription:
    """Return what clients and operators see of an engine that is a part."""
    return PartDescription(part.name, part.model, part.hosts if isinstance(part, SendsAway) else ())


@contextmanager
def failures_of(role: Role, engine: Engine, *, request_id: str | None = None) -> Iterator[None]:
    """Give failures of a part its name. That of the ASR or the TTS ends no session: text goes on without them."""
    try:
        yield
    except EngineFailed as error:
        if error.param is None:
            error.param = role.value
            error.message = f"{role.upper()} ({engine.name}): {error.message}"
            error.args = (error.message,)
        error.fatal = error.fatal and role is Role.LLM
        raise
    except (OmniError, ConfigurationError):
        raise
    except Exception as error:
        failure = incident(f"{role.upper()} ({engine.name}): the engine failed", error, request_id=request_id)
        failure.param = role.value
        raise failure from error


def part_failed(role: Role, error: OmniError) -> PartFailed:
    """The output for a failure that a request goes on without."""
    error.param = role.value
    return PartFailed(error)


def asked_of(
    part: Engine,
    request: GenerationRequest,
    source: InputSource,
    *,
    role: Role,
    task: Task,
    output: OutputModality,
    guesses: bool = False,
) -> GenerationRequest:
    """The request to a part that hears or speaks: it has nothing of the conversation but its input."""
    return replace(
        request,
        request_id=f"{request.request_id}-{role}",
        task=task,
        input=source,
        input_mode=mode_of(part),
        modalities=frozenset({output}),
        remembered=False,
        instructions="",
        history=(),
        sampling={},
        tools=(),
        tool_choice=None,
        options=AnswerOptions(
            priority=request.options.priority, skip_unreadable=True, spoken_form=True, transcript_guesses=guesses
        ),
        meter=UsageMeter(),
        cut=Cut(),
        sink=NO_SINK,
    )


def mode_of(part: Engine) -> InputMode:
    """How a part gets its input, which arrives while other parts still work on theirs."""
    return InputMode.EXTEND if part.capabilities.extend else InputMode.SNAPSHOT
