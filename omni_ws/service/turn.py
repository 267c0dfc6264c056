"""Turn: one request of a conversation, from the chunk that opened it to its final."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, Usage
from omni_ws.core.session import GenerationStarted, StreamingInputSession
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import GenerationRequest, Message
from omni_ws.engine.channel import Channel
from omni_ws.errors import OmniError
from omni_ws.wire.session_config import SessionConfig

#: Input that may wait between the socket and the engine; beyond it the socket is not read.
INPUT_QUEUE_BYTES: Final = 1 << 20
#: Of a longer text no history could keep more anyway.
MAX_TYPED_BYTES: Final = 1 << 18


@dataclass(slots=True, eq=False)
class Turn:
    """``config`` is what was in effect when the request opened."""

    request_id: str
    session: StreamingInputSession
    config: SessionConfig
    on_input_taken: Callable[[Turn, int], None]
    started: GenerationStarted | None = None
    #: Why the request cannot be worked on, found out before or beside the work.
    error: OmniError | None = None
    cancelled: bool = False
    finished: bool = False
    #: The task that produces the answer, while it runs.
    answer: asyncio.Task[None] | None = None
    input: Channel[InputChunk] = field(init=False)
    #: Text of the input, as far as a history can use it.
    typed: bytearray = field(default_factory=bytearray)
    heard: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    output_audio_ms: float = 0

    def __post_init__(self) -> None:
        self.input = Channel(
            INPUT_QUEUE_BYTES,
            cost=lambda chunk: len(chunk.payload),
            on_take=lambda size: self.on_input_taken(self, int(size)),
        )

    @property
    def ready(self) -> bool:
        """Whether there is something to do for it: an answer to start, or an end to tell."""
        return self.started is not None or self.error is not None or self.cancelled

    def start(self, event: GenerationStarted) -> None:
        self.started = event
        for chunk in event.chunks:
            self.append(chunk)
        if self.session.settings.mode is InputMode.SNAPSHOT:
            self.input.close()  # the prompt is frozen: no engine has to wait for what will not join it

    def append(self, chunk: InputChunk) -> None:
        if self.input.closed:
            return  # a request that ended early leaves its rest to nobody
        if chunk.modality is Modality.TEXT and len(self.typed) < MAX_TYPED_BYTES:
            self.typed += chunk.payload
        self.input.put_nowait(chunk)

    @property
    def user_text(self) -> str:
        """What the user typed and said."""
        return " ".join(filter(None, [self.typed.decode("utf-8", "replace"), *self.heard]))

    def generation_request(self, history: tuple[Message, ...]) -> GenerationRequest:
        config, settings = self.config, self.session.settings
        sampling = config.sampling
        return GenerationRequest(
            request_id=self.request_id,
            task=config.task,
            input=self.input,
            input_mode=settings.mode,
            input_audio=settings.audio,
            modalities=frozenset(OutputModality(name) for name in config.modalities),
            voice=config.voice,
            instructions=config.instructions,
            history=history,
            sampling={
                name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None
            },
            stage_sampling=config.stage_sampling,
            stage_params=config.stage_params,
        )

    @property
    def output_format(self) -> AudioFormat:
        audio = self.config.output_audio
        return AudioFormat(audio.format, audio.sample_rate)

    def usage(self, reported: Usage | None) -> Usage:
        """What the engine reports, or, for a request that was cut short, what was seen of it from outside."""
        after_start = self.session.bytes_after_start
        if reported is None:
            return Usage(
                input_tokens=count_words(self.user_text),
                output_tokens=count_words("".join(self.said)),
                input_audio_ms=round(self.session.received_audio_ms),
                output_audio_ms=round(self.output_audio_ms),
                input_after_start_bytes=after_start,
            )
        return Usage(
            input_tokens=reported.input_tokens,
            output_tokens=reported.output_tokens,
            input_audio_ms=reported.input_audio_ms,
            output_audio_ms=round(self.output_audio_ms),
            input_after_start_bytes=after_start,
        )
