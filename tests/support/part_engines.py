"""Engines for the parts of a composition, that a test can read and drive: they hear, answer, and speak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import (
    FinishReason,
    Hearing,
    InputChunk,
    Modality,
    OutputModality,
    Task,
    ToolCallFragment,
    Usage,
    Word,
)
from omni_ws.core.json_values import language_name
from omni_ws.engine.base import (
    AudioOutput,
    EngineCapabilities,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
    TextOutput,
    ToolCallOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.fake import CAPABILITIES, EchoEngine
from omni_ws.errors import EmptyInput

SAMPLE_RATE = 24_000
#: The length of a word of a ToneEngine, in milliseconds.
TONE_MS = 20
#: The length of a chunk of audio for a WordEngine, in milliseconds.
WORD_MS = 100
#: A chunk of audio without words.
SILENCE = InputChunk(Modality.AUDIO, b"    ")
#: A chunk of audio at which the speaker may have ended.
PAUSE = InputChunk(Modality.AUDIO, b"....")
#: What an engine can that writes down speech, and does nothing else.
ASR: Mapping[str, Any] = {
    "input_modalities": frozenset({Modality.AUDIO}),
    "output_modalities": frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT}),
    "tasks": frozenset({Task.TRANSCRIBE}),
    "languages": frozenset({"en"}),
    "voices": (),
}


def speech(words: str) -> InputChunk:
    """A chunk of audio in which a WordEngine hears ``words``. A full stop at its end settles what was said."""
    return InputChunk(Modality.AUDIO, words.encode())


class ActingEngine(EchoEngine):
    """An engine that answers by ``act``, and remembers its requests. ``changes`` are what it can do unlike an echo."""

    def __init__(self, name: str, **changes: Any) -> None:
        super().__init__()
        self.name = self.model = name
        self.requests: list[GenerationRequest] = []
        #: How many requests ended before their Finished.
        self.aborted = 0
        self._able = replace(CAPABILITIES, **changes)

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._able

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        raise NotImplementedError

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        self.requests.append(request)
        noting = _NotingEnd(out)
        try:
            await self.act(request, noting)
        finally:
            self.aborted += not noting.ended
            self.active_requests -= 1


class _NotingEnd(OutputFilter):
    ended = False

    def write(self, output: EngineOutput) -> None:
        self.ended = isinstance(output, Finished)
        super().write(output)


class WordEngine(ActingEngine):
    """An ASR whose audio is its text. What it has heard is interim up to a full stop, or to the end of the input.

    A PAUSE in it has a guess follow, if the request asks for guesses: what was said, or ``wrong_guess``. It detects the
    ``language``, and in guesses ``guessed_language``.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__("words", **{**ASR, "word_times": True, "stage_params": frozenset({"words.beam"}), **changes})
        self.wrong_guess: str | None = None
        self.language: str | None = None
        self.guessed_language: str | None = None
        #: Whether it drains after guesses, as one does not that tells them in a callback.
        self.drains_guesses = True
        #: Raised after the next chunk of audio.
        self.failure: Exception | None = None
        #: Held back at the end of each input.
        self.gate: asyncio.Event | None = None

    async def _guess(self, guess: TranscriptGuess, out: OutputWriter) -> None:
        out.write(guess)
        if self.drains_guesses:
            await out.drain()

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        said: list[str] = []
        separator, position, began, guessed = "", 0, 0, False
        async for chunk in request.input:
            if self.failure is not None:
                raise self.failure
            position += WORD_MS
            if guessed:
                await self._guess(TranscriptGuess(""), out)
                guessed = False
            if chunk == PAUSE:
                if request.options.transcript_guesses:
                    heard = _hearing(self.guessed_language or self.language)
                    guess = TranscriptGuess(separator + (self.wrong_guess or " ".join(said)), heard)
                    await self._guess(guess, out)
                    guessed = True
                continue
            said += chunk.payload.decode().split()
            if said and said[-1].endswith("."):
                out.write(_settled(separator + " ".join(said), began, self.language))
                await out.drain()
                said, separator, began = [], " ", position
            elif said:
                out.write(TranscriptOutput(separator + " ".join(said), interim=True, start_ms=began))
                await out.drain()
        if not position:
            raise EmptyInput("no audio")
        if self.gate is not None:
            await self.gate.wait()
        if said:
            out.write(_settled(separator + " ".join(said), began, self.language))
            out.write(TextOutput(" ".join(said)))
        out.write(Finished(FinishReason.STOP, Usage(input_audio_ms=position)))


def _settled(text: str, began: int, language: str | None) -> TranscriptOutput:
    words = tuple(Word(word, began, began + WORD_MS) for word in text.split())
    return TranscriptOutput(text, start_ms=began, words=words, hearing=_hearing(language))


def _hearing(language: str | None) -> Hearing | None:
    return None if language is None else Hearing(language_name(language))


class RetortEngine(ActingEngine):
    """An LLM: it answers ``reply``, or "You said …", word by word, and remembers what it was given.

    ``reads`` is everything it has taken so far of the input of its newest request, ``reads_of`` of each by its id.
    """

    def __init__(self, reply: str | None = None, **changes: Any) -> None:
        super().__init__(
            "retort",
            **{
                "input_modalities": frozenset({Modality.TEXT, Modality.IMAGE}),
                "output_modalities": frozenset({OutputModality.TEXT}),
                "tasks": frozenset({Task.CHAT}),
                "voices": (),
                **changes,
            },
        )
        self.reply = reply
        self.reads: list[InputChunk] = []
        self.reads_of: dict[str, list[InputChunk]] = {}
        self.took = asyncio.Event()
        #: Raised after the first word of the answer.
        self.failure: Exception | None = None
        #: Held back before the first word of each answer, and before the second.
        self.gate: asyncio.Event | None = None
        self.pause: asyncio.Event | None = None

    @property
    def read(self) -> str:
        """The text that the newest request has read."""
        return _text(self.reads)

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.reads = reads = self.reads_of[request.request_id] = []
        async for chunk in request.input:
            reads.append(chunk)
            self.took.set()
        if self.gate is not None:
            await self.gate.wait()
        read = _text(reads)
        words = (self.reply if self.reply is not None else f"You said {read}").split(" ")
        for index, word in enumerate(words):
            if index == 1 and self.pause is not None:
                await self.pause.wait()
            if index and self.failure is not None:
                raise self.failure
            output = TextOutput(word if index == 0 else f" {word}")
            out.write(output)
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage(input_tokens=len(read.split()), output_tokens=len(words))))


class ToolCallingEngine(RetortEngine):
    """An LLM that answers a question by calling a tool, and tells the result. ``words`` are said before a call."""

    def __init__(self, words: str = "") -> None:
        super().__init__(tools=True)
        self.words = words
        #: Whether it answers results, too, by a call.
        self.restless = False

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        taken = [chunk async for chunk in request.input]
        results = b"".join(chunk.payload for chunk in taken if chunk.tool_call_id is not None).decode()
        if results and not self.restless:
            out.write(TextOutput(f"It is {results}."))
            out.write(Finished(FinishReason.STOP, Usage()))
            return
        if self.words:
            out.write(TextOutput(self.words))
        call_id = f"call_{len(self.requests)}"
        out.write(ToolCallOutput(ToolCallFragment(0, id=call_id, name="local_time")))
        out.write(ToolCallOutput(ToolCallFragment(0, arguments='{"city":')))
        if self.gate is not None:
            await self.gate.wait()
        out.write(ToolCallOutput(ToolCallFragment(0, arguments='"Paris"}')))
        out.write(Finished(FinishReason.TOOL_CALLS, Usage()))


class FindingEngine(ActingEngine):
    """Calls the tool ``find`` for the first question, and repeats everything else."""

    def __init__(self) -> None:
        super().__init__(
            "finder",
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            tools=True,
        )

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        text = "".join([chunk.payload.decode() async for chunk in request.input])
        if len(self.requests) == 1:
            out.write(ToolCallOutput(ToolCallFragment(0, id="call_1", name="find", arguments="{}")))
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))
            return
        out.write(TextOutput(text.rpartition("]\n")[2]))
        out.write(Finished(FinishReason.STOP, Usage()))


class ToneEngine(ActingEngine):
    """Says every word of the text as a tone of 20 ms as soon as the word is complete, while the text still arrives.

    The pitch is the length of the word in hundreds of hertz. ``fail_at`` words the engine breaks.
    """

    def __init__(self, *, fail_at: int | None = None, **changes: Any) -> None:
        super().__init__("tone", voices=("tone", "bell"), **changes)
        self.fail_at = fail_at

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        words, rest = 0, ""
        async for piece in _pieces(request):
            *whole, rest = (rest + piece).split(" ")
            for word in filter(None, whole):
                if words == self.fail_at:
                    raise RuntimeError("secret: the reed is broken")
                words += 1
                out.write(TextOutput(word + " "))
                await out.drain()
                out.write(AudioOutput(tone(100 * len(word)), SAMPLE_RATE))
                await out.drain()
        out.write(Finished(FinishReason.STOP, Usage(input_tokens=words, output_tokens=words)))


async def _pieces(request: GenerationRequest) -> AsyncIterator[str]:
    """The text, whose last word ends with it."""
    async for chunk in request.input:
        yield chunk.payload.decode()
    yield " "


def tone(frequency: float) -> Samples:
    time = np.arange(SAMPLE_RATE * TONE_MS // 1000) / SAMPLE_RATE
    return (0.5 * np.sin(2 * np.pi * frequency * time)).astype(np.float32)


class ReadingEngine(ToneEngine):
    """A ToneEngine whose voice reads English alone, and that tells the times of its words."""

    def __init__(self) -> None:
        super().__init__(voice_languages={"tone": "en", "bell": "nl"}, lexicon=True)

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        await super().act(request, _TimedWords(out))


class _TimedWords(OutputFilter):
    word, start_ms = "", 0

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, TextOutput):
            self.word = output.text.strip()
            return
        if isinstance(output, AudioOutput):
            output = AudioOutput(output.samples, output.sample_rate, (self._timed(),))
        super().write(output)

    def _timed(self) -> Word:
        began, self.start_ms = self.start_ms, self.start_ms + TONE_MS
        return Word(self.word, began, self.start_ms)


class CountingEngine(ActingEngine):
    """Takes its input in, as far as ``gate`` lets it, and answers with the number of bytes."""

    def __init__(self, *, gate: asyncio.Event | None = None) -> None:
        super().__init__("fake")
        self.gate = gate
        self.taken_bytes = 0

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        async for chunk in request.input:
            self.taken_bytes += len(chunk.payload)
            if self.gate is not None:
                await self.gate.wait()
        out.write(TextOutput(str(self.taken_bytes)))
        out.write(Finished(FinishReason.STOP, Usage()))


class SnapshotEngine(EchoEngine):
    """An EchoEngine that takes no input after the start."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, extend=False)


def _text(chunks: list[InputChunk]) -> str:
    return b"".join(chunk.payload for chunk in chunks if chunk.modality is Modality.TEXT).decode()
