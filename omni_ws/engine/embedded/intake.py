"""What a request brings in, understood as far as this engine can: texts, transcripts, facts about pictures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import TypeVar

from omni_ws.audio.samples import Samples
from omni_ws.core.chunks import Modality, Task
from omni_ws.engine.answer_limit import WordCounter, count_words
from omni_ws.engine.asr.listener import Listener, Listening
from omni_ws.engine.asr.utterance import SAMPLE_RATE
from omni_ws.engine.base import GenerationRequest, TranscriptOutput
from omni_ws.engine.clauses import SENTENCE_GRACE, ClauseSplitter
from omni_ws.engine.decoded_parts import AudioPart, DecodedPart, ImagePart, TextPart, VideoPart
from omni_ws.engine.decoding import decode_input
from omni_ws.engine.llm.sights import Sights
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.text_pieces import PIECE_CHARACTERS
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import UnsupportedModality
from omni_ws.media.limits import MediaLimits
from omni_ws.profiler import events

T = TypeVar("T")

#: What the tasks take; chat takes everything.
_TAKES = {
    Task.SPEECH: frozenset({Modality.TEXT}),
    Task.TRANSCRIBE: frozenset({Modality.AUDIO}),
    Task.CHAT: frozenset(Modality),
}
_MODALITIES: dict[type[DecodedPart], Modality] = {
    AudioPart: Modality.AUDIO,
    TextPart: Modality.TEXT,
    ImagePart: Modality.IMAGE,
    VideoPart: Modality.VIDEO,
}


class Intake:
    """Reads the input of one request, once: as ``transcripts``, or as the ``clauses`` of a text to be read aloud."""

    def __init__(
        self,
        request: GenerationRequest,
        listening: Listening,
        *,
        executor: Executor,
        clock: Callable[[], float],
        share: MediaShare,
    ) -> None:
        self.sights = Sights()
        self.words = sum(count_words(message.text) for message in request.history)
        #: Whether anything came at all, and whether any of it was audio.
        self.anything = False
        self.audio = False
        self._request = request
        self._listening = listening
        self._executor = executor
        self._clock = clock
        self._share = share
        self._listener: Listener | None = None
        self._audio_part: int | None = None
        self._samples = 0
        #: The texts in the order in which they came, each in pieces.
        self._texts: list[list[str]] = []
        self._characters = 0
        self._text_part: int | None = None
        self._text_words = WordCounter()

    @property
    def audio_ms(self) -> int:
        return round(self._samples * 1000 / SAMPLE_RATE)

    @property
    def text(self) -> str:
        """What was written and said, in the order in which it came."""
        return " ".join(text for pieces in self._texts if (text := "".join(pieces).strip()))

    async def worked_on(self, call: Callable[..., T], *arguments: object) -> T:
        """``call(*arguments)``, which works on the whole text: in a thread where that is long."""
        if self._characters <= PIECE_CHARACTERS:
            return call(*arguments)
        return await run_in_thread(self._executor, call, *arguments)

    async def transcripts(self) -> AsyncGenerator[TranscriptOutput, None]:
        """What is heard, while the input arrives; everything else is in the attributes when it has ended."""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                if part.part != self._audio_part:
                    async for transcript in self._end_audio():
                        yield transcript
                if isinstance(part, AudioPart):
                    self._audio_part = part.part
                    async for transcript in self._hear(part.samples):
                        yield transcript
                elif isinstance(part, TextPart):
                    self._read(part)
                else:
                    with events.span("sights", "encoder_start", "encoder_end", modality=_MODALITIES[type(part)].value):
                        await run_in_thread(self._executor, self.sights.look, part)
        async for transcript in self._end_audio():
            yield transcript

    async def clauses(self) -> AsyncGenerator[str, None]:
        """The text in pieces that can be spoken, each as soon as it is complete."""
        async with aclosing(self._cut_text()) as clauses:
            async for clause in clauses:
                self.words += count_words(clause)
                yield clause

    async def _cut_text(self) -> AsyncGenerator[str, None]:
        splitter = ClauseSplitter()
        async with aclosing(self._parts()) as parts:
            following: asyncio.Task[DecodedPart | None] | None = None
            try:
                while True:
                    following = following or asyncio.create_task(_next_part(parts))
                    grace = SENTENCE_GRACE if splitter.looks_complete else None
                    done, _ = await asyncio.wait([following], timeout=grace)
                    if not done:
                        yield splitter.rest()
                        continue
                    part, following = following.result(), None
                    if part is None:
                        break
                    assert isinstance(part, TextPart)
                    for clause in splitter.feed(part.text):
                        yield clause
            finally:
                if following is not None:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
        if rest := splitter.rest():
            yield rest

    async def close(self) -> None:
        """Gives back what listening held. Idempotent."""
        if self._listener is not None:
            await self._listener.close()

    async def _parts(self) -> AsyncGenerator[DecodedPart, None]:
        request = self._request
        takes = _TAKES[request.task]
        decoded = decode_input(
            request.input,
            audio=request.input_audio,
            sample_rate=SAMPLE_RATE,
            executor=self._executor,
            share=self._share,
            limits=MediaLimits(**request.options.media_limits),  # type: ignore[arg-type]  # checked on the wire
        )
        async with aclosing(decoded) as parts:
            async for part in parts:
                modality = _MODALITIES[type(part)]
                if modality not in takes:
                    raise UnsupportedModality(
                        f"task {request.task} takes {' and '.join(sorted(takes))}, not {modality}", param="modality"
                    )
                self.anything = True
                yield part

    async def _hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput, None]:
        self.audio = True
        self._samples += len(samples)
        if self._listener is None:
            self._listener = Listener(self._listening, clock=self._clock)
        async with aclosing(self._listener.hear(samples)) as transcripts:
            async for transcript in transcripts:
                yield self._noted(transcript)

    async def _end_audio(self) -> AsyncGenerator[TranscriptOutput, None]:
        if self._audio_part is None or self._listener is None:
            return
        self._audio_part = None
        async with aclosing(self._listener.end_part()) as transcripts:
            async for transcript in transcripts:
                yield self._noted(transcript)

    def _noted(self, transcript: TranscriptOutput) -> TranscriptOutput:
        if not transcript.interim:
            self._begin_text(None)
            self._add_text(transcript.text)
        return transcript

    def _read(self, part: TextPart) -> None:
        if part.part != self._text_part:
            self._begin_text(part.part)
        self._add_text(part.text)

    def _begin_text(self, part: int | None) -> None:
        self._texts.append([])
        self._text_part = part
        self._text_words = WordCounter()

    def _add_text(self, text: str) -> None:
        self._texts[-1].append(text)
        self._characters += len(text)
        self.words -= self._text_words.words
        self._text_words.feed(text)
        self.words += self._text_words.words


async def _next_part(parts: AsyncIterator[DecodedPart]) -> DecodedPart | None:
    """The next part, or None at the end."""
    return await anext(parts, None)
