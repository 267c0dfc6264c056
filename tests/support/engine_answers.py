"""Requests to an engine without a server, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from support.until import until

from omni_ws.core.chunks import AudioFormat, InputChunk, InputMode, Modality, OutputModality, Task, Word
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    PartFailed,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel

TEXT: Final = frozenset({OutputModality.TEXT})
AUDIO: Final = frozenset({OutputModality.AUDIO})
BOTH: Final = TEXT | AUDIO
IMAGE: Final = InputChunk(Modality.IMAGE, b"a picture")


class Input(Channel[InputChunk]):
    """An input that a test writes; a string is a chunk of text. It is whole unless its end is left open."""

    def __init__(self, *chunks: InputChunk | str, open_end: bool = False) -> None:
        super().__init__(1 << 24, cost=lambda chunk: len(chunk.payload))
        for chunk in chunks:
            self.send(chunk)
        if not open_end:
            self.close()

    def send(self, chunk: InputChunk | str) -> None:
        self.put_nowait(text(chunk) if isinstance(chunk, str) else chunk)

    async def taken(self) -> None:
        """Waits until the engine has taken over all that was sent."""
        await until(lambda: not self.queued)


def open_input(*chunks: InputChunk | str) -> Input:
    return Input(*chunks, open_end=True)


def text(words: str) -> InputChunk:
    return InputChunk(Modality.TEXT, words.encode())


def audio(payload: bytes, frame_ms: int | None = None) -> list[InputChunk]:
    length = len(payload) if frame_ms is None else 32 * frame_ms
    return [InputChunk(Modality.AUDIO, payload[at : at + length]) for at in range(0, len(payload), max(1, length))]


def request_of(source: Input, **fields: Any) -> GenerationRequest:
    """A request for chat with text as its answer, but for ``fields``."""
    defaults: dict[str, Any] = {
        "request_id": "req_1",
        "task": Task.CHAT,
        "input_mode": InputMode.EXTEND,
        "input_audio": AudioFormat(),
        "modalities": TEXT,
    }
    return GenerationRequest(input=source, **{**defaults, **fields})


def asking(*chunks: InputChunk | str, audio: bool = False, **fields: Any) -> GenerationRequest:
    """A request whose input is whole when it starts."""
    return request_of(
        Input(*chunks), **{"input_mode": InputMode.SNAPSHOT, "modalities": BOTH if audio else TEXT, **fields}
    )


class HandOver:
    """A client that takes outputs in both ways: those that are yielded, and those that it is offered.

    It refuses an offer at the turns at which ``refusals`` says so.
    """

    def __init__(self, refusals: Iterable[bool] = ()) -> None:
        self.outputs: list[EngineOutput] = []
        #: The number of outputs that were offered and taken.
        self.taken = 0
        self._refusals = iter(refusals)

    def offer(self, output: EngineOutput) -> bool:
        if next(self._refusals, False):
            return False
        self.taken += 1
        self.outputs.append(output)
        return True

    async def read(self, outputs: AsyncIterator[EngineOutput]) -> None:
        await gather(outputs, self.outputs)


@dataclass
class Answer:
    """An answer, which may be looked at while it comes."""

    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return said(self.outputs)

    @property
    def transcript(self) -> str:
        return "".join(output.text for output in self.transcripts if not output.interim)

    @property
    def transcripts(self) -> list[TranscriptOutput]:
        return [output for output in self.outputs if isinstance(output, TranscriptOutput)]

    @property
    def failures(self) -> list[PartFailed]:
        return [output for output in self.outputs if isinstance(output, PartFailed)]

    @property
    def audio(self) -> list[AudioOutput]:
        return heard(self.outputs)

    @property
    def audio_ms(self) -> float:
        return sum(len(output.samples) * 1000 / output.sample_rate for output in self.audio)

    @property
    def words(self) -> list[Word]:
        return [word for output in self.audio for word in output.words]

    @property
    def spoken_words(self) -> int:
        """The number of words that a ToneEngine has said."""
        return len(self.audio)

    @property
    def finished(self) -> Finished:
        return final(self.outputs)


async def answered(engine: Engine, *chunks: InputChunk | str, **fields: Any) -> Answer:
    """The answer to a complete input."""
    return await collect(engine, Input(*chunks), **fields)


async def collect(
    engine: Engine, source: Input | GenerationRequest, into: Answer | None = None, **fields: Any
) -> Answer:
    """The answer to a request, or to one with this input. What came before an error is in ``into``."""
    request = source if isinstance(source, GenerationRequest) else request_of(source, **fields)
    result = into or Answer()
    async with aclosing(engine.generate(request)) as outputs:  # type: ignore[type-var]
        await gather(outputs, result.outputs)
    return result


async def answer(engine: Engine, *chunks: InputChunk | str, **fields: Any) -> list[EngineOutput]:
    return [output async for output in engine.generate(asking(*(chunks or ("hello",)), **fields))]


async def gather(source: AsyncIterator[EngineOutput], outputs: list[EngineOutput]) -> None:
    """What came before an error stays in ``outputs``."""
    async for output in source:
        outputs.append(output)


def said(outputs: Iterable[EngineOutput]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextOutput))


def heard(outputs: Iterable[EngineOutput]) -> list[AudioOutput]:
    return [output for output in outputs if isinstance(output, AudioOutput)]


def final(outputs: list[EngineOutput]) -> Finished:
    """The last output; there is no other of its kind."""
    *rest, last = outputs
    assert isinstance(last, Finished)
    assert not any(isinstance(output, Finished) for output in rest)
    return last
