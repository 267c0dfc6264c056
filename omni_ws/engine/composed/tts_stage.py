"""The last stage of a composition: it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from omni_ws.core.chunks import InputChunk, Modality, OutputModality, Task
from omni_ws.engine.base import AudioOutput, Engine, Finished, GenerationRequest
from omni_ws.engine.channel import Channel
from omni_ws.engine.composed.parts import Role, asked_of, failures_of
from omni_ws.engine.pipeline import Outputs


class TtsStage:
    """A Stage of one request: text in, audio to the client.

    An answer without text, such as a tool call, is not spoken.
    """

    name = Role.TTS.value

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        #: The length of the audio, in milliseconds.
        self.audio_ms = 0
        self._engine = engine
        self._request = request

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Speak the text as it arrives."""
        async for text in source:
            if not text.isspace():
                break
        else:
            return
        async with aclosing(_chunks(text, source)) as spoken:
            asked = asked_of(
                self._engine, self._request, spoken, role=Role.TTS, task=Task.SPEECH, output=OutputModality.AUDIO
            )
            with failures_of(Role.TTS, self._engine, request_id=self._request.request_id):
                async with aclosing(self._engine.generate(asked)) as events:  # type: ignore[type-var]
                    async for event in events:
                        if isinstance(event, AudioOutput):
                            await outputs.put(event)
                        elif isinstance(event, Finished):
                            self.audio_ms = event.usage.output_audio_ms
        async for _ in source:
            pass  # the text goes on where the TTS has ended before it


async def _chunks(first: str, rest: AsyncIterator[str]) -> AsyncGenerator[InputChunk, None]:
    yield InputChunk(Modality.TEXT, first.encode())
    async for text in rest:
        yield InputChunk(Modality.TEXT, text.encode())
