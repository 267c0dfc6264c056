"""The first stage of a composition: it writes speech down."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import InputChunk, Modality, OutputModality, Task, Word
from omni_ws.engine.base import Engine, Finished, GenerationRequest, TranscriptGuess, TranscriptOutput
from omni_ws.engine.channel import Channel, ChannelClosed, Outputs, StageLink
from omni_ws.engine.composed.parts import Role, asked_of, part_failed
from omni_ws.engine.composed.patience import run_part
from omni_ws.engine.continued_input import EarlierParts
from omni_ws.errors import EmptyInput, OmniError

_CHUNK_OVERHEAD_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Guess:
    """What the next chunk will be if the speaker, who pauses, says nothing more. None takes the guess back."""

    chunk: InputChunk | None


def _size_of(item: InputChunk | Guess) -> float:
    chunk = item.chunk if isinstance(item, Guess) else item
    return _CHUNK_OVERHEAD_BYTES + (0 if chunk is None else len(chunk.payload))


#: Input on its way to a part, in bytes.
INPUT_LINK: Final = StageLink(1 << 20, cost=_size_of)


class AsrStage:
    """A Stage of one request: chunks in; chunks to the LLM, transcripts to the client.

    Settled transcripts take the place of the audio, and input stays in its order: what follows audio waits until that
    is written down. For an LLM that hears, ``beside``, all input passes at once, and the transcripts are the client's
    alone. With ``guesses``, a Guess tells at a pause what the next chunk of text will be if that was the end.

    Each stretch of audio is a request to the ASR. Put together, the settled transcripts are that of the whole input.
    ``earlier`` is what the message begins with: it goes to the LLM before the input, which is written down meanwhile.
    Where the answer is cut off, the stage goes on for the client alone.
    """

    name = Role.ASR.value

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        *,
        beside: bool,
        guesses: bool = False,
        earlier: EarlierParts | None = None,
    ) -> None:
        #: The length of the audio that was written down, in milliseconds.
        self.audio_ms = 0
        self._engine = engine
        self._request = request
        self._beside = beside
        self._guesses = guesses
        #: Whether a guess may have been settled since somebody spoke.
        self._guess_settled = False
        self._stretch: _Stretch | None = None
        #: Whether the input had anything in it, even audio without words.
        self._anything = False
        self._separator = ""
        self._boundary = _TextBoundary()
        #: What was not passed on yet: that of earlier parts, and settled transcripts, which follow it.
        self._earlier = earlier
        self._settled: deque[str] = deque()

    async def run(self, source: AsyncIterator[InputChunk], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Pass the input on. Raises EmptyInput where there was none."""
        assert sink is not None
        try:
            async for chunk in source:
                if not chunk.has_content:
                    continue
                is_audio = chunk.modality is Modality.AUDIO
                if is_audio:
                    await self._hear(chunk, sink, outputs)
                elif not self._beside:
                    await self._write_down()
                if self._beside or not is_audio:
                    await self._pass_on(sink)
                    self._anything = True
                    await self._give(sink, self._boundary.typed(chunk))
            if self._beside:
                await self._pass_on(sink)
                sink.close()  # the answer does not wait for the transcript
            await self._write_down()
            await self._pass_on(sink)
        finally:
            if self._stretch is not None:
                await self._stretch.aclose()
        if not self._anything and not self._beside:
            raise EmptyInput("the request has no input")

    async def _hear(self, chunk: InputChunk, sink: Channel[Any], outputs: Outputs) -> None:
        if self._stretch is None:
            self._stretch = _Stretch(partial(self._listen, sink, outputs), outputs)
        await self._stretch.put(chunk)

    async def _write_down(self) -> None:
        """Wait until all audio so far is written down."""
        if self._stretch is not None:
            await self._stretch.end()
            self._stretch = None

    async def _listen(self, sink: Channel[Any], outputs: Outputs, heard: Channel[InputChunk]) -> None:
        """Write one stretch of audio down."""
        asked = asked_of(
            self._engine,
            self._request,
            heard,
            role=Role.ASR,
            task=Task.TRANSCRIBE,
            output=OutputModality.TEXT,
            guesses=self._guesses,
        )
        from_ms, separator = self.audio_ms, self._separator
        try:
            async with aclosing(run_part(Role.ASR, self._engine, asked)) as events:
                async for event in events:
                    if isinstance(event, TranscriptOutput):
                        await outputs.put(_placed(event, from_ms=from_ms, separator=separator))
                        await self._settle(event, sink)
                    elif isinstance(event, TranscriptGuess) and self._guesses and self._earlier_known:
                        await self._pass_on(sink)
                        self._guess_settled = False
                        chunk = copy(self._boundary).heard(event.text) if event.text.strip() else None
                        await self._give(sink, Guess(chunk))
                    elif isinstance(event, Finished):
                        self._anything = True
                        self.audio_ms += event.usage.input_audio_ms
        except EmptyInput:
            pass  # not a whole sample; whether that was all, the end of the input tells
        except OmniError as error:
            if not self._beside:
                raise
            # The LLM has heard the speaker itself.
            await outputs.put(part_failed(Role.ASR, error))

    async def _settle(self, transcript: TranscriptOutput, sink: Channel[Any]) -> None:
        if transcript.interim and self._guess_settled:
            self._guess_settled = False
            await self._give(sink, Guess(None))  # somebody speaks again
        if transcript.interim or not transcript.text.strip():
            return
        self._guess_settled = self._guesses
        self._separator = " "
        if not self._beside:
            self._settled.append(transcript.text)
            if self._earlier_known:
                await self._pass_on(sink)

    @property
    def _earlier_known(self) -> bool:
        """Whether the LLM has what was said in earlier parts, or can have it at once."""
        return self._earlier is None or self._earlier.known

    async def _pass_on(self, sink: Channel[Any]) -> None:
        """Give the LLM what is settled, behind what was said in earlier parts."""
        earlier, self._earlier = self._earlier, None
        for chunk in () if earlier is None else await earlier.chunks():
            self._anything = True
            await self._give(sink, self._boundary.earlier(chunk))
        while self._settled:
            await self._give(sink, self._boundary.heard(self._settled.popleft()))

    async def _give(self, sink: Channel[Any], item: InputChunk | Guess) -> None:
        """Pass an item on to the LLM, unless the answer is cut off: then nobody reads it."""
        try:
            await sink.put(item)
        except ChannelClosed:
            if not self._request.cut.made:
                raise


class _Stretch:
    """A stretch of audio, and the task that writes it down."""

    def __init__(self, listen: Callable[[Channel[InputChunk]], Awaitable[None]], outputs: Outputs) -> None:
        self._heard: Channel[InputChunk] = Channel(INPUT_LINK.capacity, cost=INPUT_LINK.cost)
        self._outputs = outputs
        self._listening = asyncio.create_task(self._run(listen), name="listening")

    async def _run(self, listen: Callable[[Channel[InputChunk]], Awaitable[None]]) -> None:
        try:
            await listen(self._heard)
        except ChannelClosed:
            pass  # the client, or the LLM, has ended
        except Exception as error:
            # Told at once: the speaker may say nothing more for a while.
            if not self._outputs.closed:
                self._outputs.fail(error)
        finally:
            self._heard.discard()

    async def put(self, chunk: InputChunk) -> None:
        """Take more of the audio. Raises ChannelClosed where nobody reads the outputs any more."""
        try:
            await self._heard.put(chunk)
        except ChannelClosed:
            if self._outputs.closed:
                raise
            # The ASR has ended before its input did, and has said all that it had to say.

    async def end(self) -> None:
        """Wait until the audio is written down. Raises ChannelClosed as ``put`` does."""
        self._heard.close()
        await self._listening
        if self._outputs.closed:
            raise ChannelClosed

    async def aclose(self) -> None:
        """Withdraw it. Idempotent."""
        if not self._listening.done():
            self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


class _TextBoundary:
    """Keeps typed and heard words apart where text of one kind follows text of the other."""

    def __init__(self) -> None:
        #: Whether the latest chunk of text was typed; None where the latest chunk was none, or there is none.
        self._typed: bool | None = None
        self._needs_space = False
        #: Whether the latest chunk was text of an earlier part.
        self._after_earlier = False

    def typed(self, chunk: InputChunk) -> InputChunk:
        """Return a chunk that was not heard, as the LLM gets it."""
        if chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None:
            self._typed, self._after_earlier = None, False
            return chunk
        return msgspec.structs.replace(chunk, payload=self._joined(chunk.payload, typed=True))

    def earlier(self, chunk: InputChunk) -> InputChunk:
        """Return a chunk of an earlier part, as the LLM gets it."""
        given = self.typed(chunk)
        self._after_earlier = chunk.modality is Modality.TEXT
        return given

    def heard(self, text: str) -> InputChunk:
        """Return the chunk for a transcript."""
        return InputChunk(Modality.TEXT, self._joined(text.encode(), typed=False))

    def _joined(self, payload: bytes, *, typed: bool) -> bytes:
        other_kind = self._after_earlier or (self._typed is not None and self._typed is not typed)
        self._after_earlier = False
        if other_kind and self._needs_space and not payload[:1].isspace():
            payload = b" " + payload
        self._typed, self._needs_space = typed, not payload[-1:].isspace()
        return payload


def _placed(transcript: TranscriptOutput, *, from_ms: int, separator: str) -> TranscriptOutput:
    """Return a transcript of a stretch that began at ``from_ms`` as a part of the transcript of the whole input."""
    text = transcript.text
    if text and not text[0].isspace():
        text = separator + text
    if text == transcript.text and not from_ms:
        return transcript
    return TranscriptOutput(
        text,
        transcript.interim,
        start_ms=None if transcript.start_ms is None else transcript.start_ms + from_ms,
        words=tuple(Word(word.text, word.start_ms + from_ms, word.end_ms + from_ms) for word in transcript.words),
        hearing=None if transcript.hearing is None else transcript.hearing.shifted(from_ms),
    )
