"""The last stage of a composition: it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from omni_ws.core.chunks import InputChunk, Modality, OutputModality, Task
from omni_ws.engine.base import AudioOutput, Engine, Finished, GenerationRequest
from omni_ws.engine.channel import Channel
from omni_ws.engine.composed.parts import Role, asked_of, part_failed
from omni_ws.engine.composed.patience import run_part
from omni_ws.engine.pipeline import Outputs
from omni_ws.errors import InvalidRequest, OmniError


class TtsStage:
    """A Stage of one request: text in, audio to the client.

    An answer without text, such as a tool call, is not spoken. Where the TTS fails and the client reads the text too,
    the text goes on without it.
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
        try:
            await self._speak(text, source, outputs)
        except OmniError as error:
            if OutputModality.TEXT not in self._request.modalities or _is_refusal(error):
                raise
            await outputs.put(part_failed(Role.TTS, error))
        async for _ in source:
            pass  # the text goes on where the TTS has ended before it

    async def _speak(self, begin: str, rest: AsyncIterator[str], outputs: Outputs) -> None:
        async with aclosing(_chunks(begin, rest)) as text:
            asked = asked_of(
                self._engine, self._request, text, role=Role.TTS, task=Task.SPEECH, output=OutputModality.AUDIO
            )
            async with aclosing(run_part(Role.TTS, self._engine, asked)) as events:
                async for event in events:
                    if isinstance(event, AudioOutput):
                        await outputs.put(event)
                    elif isinstance(event, Finished):
                        self.audio_ms = event.usage.output_audio_ms


def _is_refusal(error: OmniError) -> bool:
    """Whether the client asked for something that the TTS does not know, which the client has to mend."""
    asked = ("voice", "stage_params", "stage_sampling")
    return isinstance(error, InvalidRequest) and (error.param or "").partition(".")[0] in asked


async def _chunks(first: str, rest: AsyncIterator[str]) -> AsyncGenerator[InputChunk, None]:
    yield InputChunk(Modality.TEXT, first.encode())
    async for text in rest:
        yield InputChunk(Modality.TEXT, text.encode())
