"""Requests to an engine without a server, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from support.patience import until

from omni_ws.core.chunks import AudioFormat, InputChunk, InputMode, Modality, OutputModality, Task, Word
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputWriter,
    PartFailed,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel, ChannelClosed

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


@dataclass
class Answer:
    """An answer, which may be looked at while it comes: the OutputWriter of an engine whose client reads all at once.

    With ``halts``, it is full at those looks at which they say so.
    """

    outputs: list[EngineOutput] = field(default_factory=list)
    halts: Iterator[bool] = field(default_factory=lambda: iter(()))

    @property
    def full(self) -> bool:
        return next(self.halts, False)

    def write(self, output: EngineOutput) -> None:
        self.outputs.append(output)

    async def drain(self) -> None:
        pass

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
    await engine.generate(request, result)
    return result


async def answer(engine: Engine, *chunks: InputChunk | str, **fields: Any) -> list[EngineOutput]:
    return (await collect(engine, asking(*(chunks or ("hello",)), **fields))).outputs


def streamed(engine: Engine, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
    """The outputs of an answer, as a client takes them. Closing the iterator cancels the answer."""
    return written(partial(engine.generate, request))


class _Reader:
    """The OutputWriter of a client that takes one output after the other."""

    def __init__(self) -> None:
        self.outputs: Channel[EngineOutput] = Channel(1, cost=lambda output: 1)

    @property
    def full(self) -> bool:
        return self.outputs.full and not self.outputs.closed

    def write(self, output: EngineOutput) -> None:
        if not self.outputs.closed:
            self.outputs.put_nowait(output)

    async def drain(self) -> None:
        with suppress(ChannelClosed):
            await self.outputs.room()


@asynccontextmanager
async def reading(write: Callable[[OutputWriter], Awaitable[None]]) -> AsyncIterator[AsyncIterator[EngineOutput]]:
    """What ``write`` writes, and then what it raises, as a client takes it. Leaving the block cancels ``write``."""
    reader = _Reader()

    async def run() -> None:
        try:
            await write(reader)
        except Exception as error:
            reader.outputs.fail(error)
        else:
            reader.outputs.close()

    writing = asyncio.create_task(run(), name="writing")
    try:
        yield reader.outputs
    finally:
        reader.outputs.discard()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def written(write: Callable[[OutputWriter], Awaitable[None]]) -> AsyncGenerator[EngineOutput, None]:
    """The same as an iterator, which cancels ``write`` when it is closed."""
    async with reading(write) as outputs:
        async for output in outputs:
            yield output


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
