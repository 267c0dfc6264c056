"""Requests to an engine without a server, and their answers."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, Task, Word
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.channel import Channel

TEXT: Final = frozenset({OutputModality.TEXT})
AUDIO: Final = frozenset({OutputModality.AUDIO})
BOTH: Final = TEXT | AUDIO

Input = Channel[InputChunk]


def open_input(*chunks: InputChunk) -> Input:
    channel: Input = Channel(1 << 20, cost=lambda chunk: len(chunk.payload))
    for chunk in chunks:
        channel.put_nowait(chunk)
    return channel


def text(words: str) -> InputChunk:
    return InputChunk(Modality.TEXT, words.encode())


def audio(payload: bytes, frame_ms: int | None = None, byte_rate: int = 32_000) -> list[InputChunk]:
    length = len(payload) if frame_ms is None else byte_rate * frame_ms // 1000
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


@dataclass
class Answer:
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs if isinstance(output, TextOutput))

    @property
    def transcript(self) -> str:
        return "".join(output.text for output in self.transcripts if not output.interim)

    @property
    def transcripts(self) -> list[TranscriptOutput]:
        return [output for output in self.outputs if isinstance(output, TranscriptOutput)]

    @property
    def audio(self) -> list[AudioOutput]:
        return [output for output in self.outputs if isinstance(output, AudioOutput)]

    @property
    def audio_ms(self) -> float:
        return sum(len(output.samples) * 1000 / output.sample_rate for output in self.audio)

    @property
    def words(self) -> list[Word]:
        return [word for output in self.audio for word in output.words]

    @property
    def finished(self) -> Finished:
        last = self.outputs[-1]
        assert isinstance(last, Finished)
        assert not any(isinstance(output, Finished) for output in self.outputs[:-1])
        return last


async def answered(engine: Engine, *chunks: InputChunk, **fields: Any) -> Answer:
    """The answer to a complete input."""
    source = open_input(*chunks)
    source.close()
    return await collect(engine, source, **fields)


async def collect(engine: Engine, source: Input, **fields: Any) -> Answer:
    async with aclosing(engine.generate(request_of(source, **fields))) as outputs:  # type: ignore[type-var]
        return Answer([output async for output in outputs])
