"""The last stage of a composition: it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from omni_ws.core.chunks import InputChunk, Modality, OutputModality, Task
from omni_ws.engine.base import AudioOutput, Engine, Finished, GenerationRequest
from omni_ws.engine.channel import Channel, Outputs
from omni_ws.engine.clauses import SENTENCE_GRACE, is_speakable, pieces_of
from omni_ws.engine.composed.parts import Role, asked_of, part_failed
from omni_ws.engine.composed.patience import run_part
from omni_ws.engine.spoken.speakable_text import AT_A_STRETCH, SpeakableText, Spoken, WrittenWords
from omni_ws.errors import InvalidRequest, OmniError


class TtsStage:
    """A Stage of one request: text in, audio to the client.

    The TTS reads the spoken form of the text (``SpeakableText``); the words that it times are told as they are written.
    An answer with nothing to be read, such as a tool call, is not spoken. Where the TTS fails and the client reads the
    text too, the text goes on without it.
    """

    name = Role.TTS.value

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        #: The length of the audio, in milliseconds.
        self.audio_ms = 0
        self._engine = engine
        self._request = request
        self._words = WrittenWords()

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Speak the text as it arrives."""
        async with aclosing(self._spoken_text(source)) as texts:
            first = await anext(texts, None)
            if first is None:
                return
            try:
                await self._speak(first, texts, outputs)
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
                        if event.words:
                            event = AudioOutput(event.samples, event.sample_rate, self._words.place(event.words))
                        elif event.text_end is not None:
                            end = self._words.written_end(event.text_end)
                            event = AudioOutput(event.samples, event.sample_rate, text_end=end)
                        await outputs.put(event)
                    elif isinstance(event, Finished):
                        self.audio_ms = event.usage.output_audio_ms

    async def _spoken_text(self, source: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        """Yield what the TTS reads, from the first piece on that has something to pronounce."""
        held, begun = "", False
        async with aclosing(_spoken_pieces(source, SpeakableText(self._language))) as spoken:
            async for pieces in spoken:
                self._words.add(pieces)
                text = "".join(piece.text for piece in pieces)
                held += text
                begun = begun or is_speakable(text)
                if begun and held:
                    yield held
                    held = ""

    @property
    def _language(self) -> str:
        """The language that the voice reads alone; empty where that is not known."""
        able = self._engine.capabilities
        voice = self._request.voice or next(iter(able.voices), "")
        return able.voice_languages.get(voice, "")


def _is_refusal(error: OmniError) -> bool:
    """Whether the client asked for something that the TTS does not know, which the client has to mend."""
    asked = ("voice", "speed", "stage_params", "stage_sampling")
    return isinstance(error, InvalidRequest) and (error.param or "").partition(".")[0] in asked


async def _spoken_pieces(source: AsyncIterator[str], speakable: SpeakableText) -> AsyncGenerator[list[Spoken], None]:
    """Yield the spoken form of a text that arrives.

    Words that wait for what follows them are passed on when nothing follows for a while at the end of a sentence.
    """
    read = 0
    while True:
        try:
            async with asyncio.timeout(SENTENCE_GRACE if speakable.looks_complete else None):
                text = await anext(source, None)
        except TimeoutError:
            yield speakable.rest()
            continue
        if text is None:
            break
        for piece in pieces_of(text, AT_A_STRETCH):
            yield speakable.feed(piece)
            read += len(piece)
            if read >= AT_A_STRETCH:
                read = 0
                await asyncio.sleep(0)
    yield speakable.rest()


async def _chunks(first: str, rest: AsyncIterator[str]) -> AsyncGenerator[InputChunk, None]:
    yield InputChunk(Modality.TEXT, first.encode())
    async for text in rest:
        yield InputChunk(Modality.TEXT, text.encode())
