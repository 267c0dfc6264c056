"""Engines that a test scripts and reads: parts that hear, answer and speak, and whole ones that play a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from inspect import isawaitable
from typing import Any

import numpy as np
from support.engine_answers import written

from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import (
    FinishReason,
    Hearing,
    InputChunk,
    Modality,
    OutputModality,
    Task,
    TokenLogprob,
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
from omni_ws.media import MediaLimits

SAMPLE_RATE = 24_000
#: The length of a word of a ToneEngine, in milliseconds.
TONE_MS = 20
#: How long a word of a spoken answer sounds.
SPOKEN_MS = 200
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
#: What a language model can.
LLM: Mapping[str, Any] = {
    "input_modalities": frozenset({Modality.TEXT, Modality.IMAGE}),
    "output_modalities": frozenset({OutputModality.TEXT}),
    "tasks": frozenset({Task.CHAT}),
    "voices": (),
}
#: What an engine can that tells what it has heard.
HEARS = {"output_modalities": CAPABILITIES.output_modalities | {OutputModality.TRANSCRIPT}}


def speech(words: str) -> InputChunk:
    """A chunk of audio in which a WordEngine hears ``words``. A full stop at its end settles what was said."""
    return InputChunk(Modality.AUDIO, words.encode())


class ActingEngine(EchoEngine):
    """Answers by ``act``, here as an echo, and remembers its requests. ``changes`` are what it can do unlike that."""

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
        await super().generate(request, out)

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
        super().__init__("retort", **{**LLM, **changes})
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


class ToneEngine(ActingEngine):
    """Says every word of the text as a tone of 20 ms as soon as the word is complete, while the text still arrives.

    The pitch is the length of the word in hundreds of hertz. ``fail_at`` words the engine breaks.
    """

    #: Whether it tells the times of its words, and no text.
    timed = False

    def __init__(self, *, fail_at: int | None = None, **changes: Any) -> None:
        super().__init__("tone", **{"voices": ("tone", "bell"), **changes})
        self.fail_at = fail_at

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        words, rest = 0, ""
        async for piece in _pieces(request):
            *whole, rest = (rest + piece).split(" ")
            for word in filter(None, whole):
                if words == self.fail_at:
                    raise RuntimeError("secret: the reed is broken")
                if not self.timed:
                    out.write(TextOutput(word + " "))
                    await out.drain()
                times = (Word(word, TONE_MS * words, TONE_MS * (words + 1)),) if self.timed else ()
                out.write(AudioOutput(tone(100 * len(word)), SAMPLE_RATE, times))
                await out.drain()
                words += 1
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

    timed = True

    def __init__(self) -> None:
        super().__init__(voice_languages={"tone": "en", "bell": "nl"}, lexicon=True)


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


class PlayingEngine(ActingEngine):
    """Plays its script for each request, once its input has ended; ``inputs`` has what each brought.

    A step is an output, an exception, which is raised, or a callable, whose result is awaited if it can be. Without a
    Finished the answer ends with ``stop``. ``changes`` are what it can do unlike an echo.
    """

    def __init__(self, script: Iterable[Any] = (), **changes: Any) -> None:
        super().__init__("scripted", **changes)
        self.script = tuple(script)
        self.inputs: list[list[InputChunk]] = []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        return self.script

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        taken = [chunk async for chunk in request.input]
        self.inputs.append(taken)
        for step in self.steps(request, taken):
            if isinstance(step, Exception):
                raise step
            if callable(step):
                if isawaitable(result := step()):
                    await result
            elif isinstance(step, Finished):
                out.write(step)
                return
            else:
                out.write(step)
                await out.drain()
        out.write(Finished(FinishReason.STOP, Usage()))


class CapableEngine(PlayingEngine):
    """Has every capability, but for ``changes``."""

    def __init__(self, script: Iterable[Any] = (), **changes: Any) -> None:
        able = dict.fromkeys(("tools", "logprobs", "structured_output", "choices", "priority", "raw_prompts"), True)
        able |= dict.fromkeys(("template_arguments", "translates", "word_times", "keywords", "lexicon"), True)
        limits = frozenset(field.name for field in fields(MediaLimits))
        super().__init__(script, **{**able, "languages": frozenset({"en", "de"}), "media_limits": limits, **changes})


class HearingEngine(PlayingEngine):
    """Answers typed input by its script, and speech by ``heard``, in the same notation.

    ``heard_in_turn``, where it is set, has what is heard in one turn after the other.
    """

    def __init__(self, script: Iterable[Any] = (), *, heard: Iterable[Any] = (), **changes: Any) -> None:
        super().__init__(script, **{**HEARS, "transcribes_first": True, **changes})
        self.heard = tuple(heard)
        self.heard_in_turn: Iterator[Iterable[Any]] | None = None

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        heard = self.heard if self.heard_in_turn is None else next(self.heard_in_turn)
        return heard if any(chunk.modality is Modality.AUDIO for chunk in taken) else self.script


class Ears(PlayingEngine):
    """An ASR: it hears in the n-th turn what the n-th of ``turns`` says, and nothing in later ones.

    A text in it is settled, and stands behind those before it.
    """

    def __init__(self, *turns: Sequence[Any]) -> None:
        super().__init__(**ASR)
        self.turns = iter(turns)
        self._heard: dict[str, Sequence[Any]] = {}
        #: How many turns it has begun with.
        self.begun = 0

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.begun += 1
        self._heard[request.request_id] = next(self.turns, ())  # it may end after one that began later
        await super().act(request, out)

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        separator = ""
        for step in self._heard.pop(request.request_id):
            yield TranscriptOutput(separator + step) if isinstance(step, str) else step
            separator = " " if isinstance(step, str) else separator
        yield Finished(FinishReason.STOP, Usage(input_audio_ms=100))


class Talker(PlayingEngine):
    """Hears ``turns`` one after the other, and answers each with the steps of ``reply``.

    ``reply`` gets what was said or typed; None: it is repeated.
    """

    def __init__(self, *turns: str, reply: Callable[[str], Iterable[Any]] | None = None, **changes: Any) -> None:
        super().__init__(**{**HEARS, "transcribes_first": True, "tools": True, "word_times": True, **changes})
        self.turns = iter(turns)
        self.reply = reply or (lambda said: spoken(f"You said {said}"))
        #: What each request said, in order.
        self.asked: list[str] = []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        said = b"".join(one.payload for one in taken if one.modality is Modality.TEXT).decode()
        if any(one.modality is Modality.AUDIO for one in taken):
            said = next(self.turns, "")
            yield TranscriptOutput(said)
        self.asked.append(said)
        yield from self.reply(said)


class ToolCallingEngine(PlayingEngine):
    """An LLM that answers a question by calling a tool, and tells the result. ``words`` are said before a call."""

    def __init__(self, words: str = "") -> None:
        super().__init__(**LLM, tools=True)
        self.words = words
        #: Whether it answers results, too, by a call.
        self.restless = False
        #: Held back within each call.
        self.gate: asyncio.Event | None = None

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        results = b"".join(chunk.payload for chunk in taken if chunk.tool_call_id is not None).decode()
        if results and not self.restless:
            yield TextOutput(f"It is {results}.")
            return
        if self.words:
            yield TextOutput(self.words)
        call_id = f"call_{len(self.requests)}"
        yield ToolCallOutput(ToolCallFragment(0, id=call_id, name="local_time"))
        yield ToolCallOutput(ToolCallFragment(0, arguments='{"city":'))
        if self.gate is not None:
            yield self.gate.wait
        yield ToolCallOutput(ToolCallFragment(0, arguments='"Paris"}'))
        yield Finished(FinishReason.TOOL_CALLS, Usage())


class FindingEngine(PlayingEngine):
    """Calls the tool ``find`` for the first question, and repeats everything else."""

    def __init__(self) -> None:
        super().__init__(**{**LLM, "input_modalities": frozenset({Modality.TEXT}), "tools": True})

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        if len(self.requests) == 1:
            call = ToolCallFragment(0, id="call_1", name="find", arguments="{}")
            return [ToolCallOutput(call), Finished(FinishReason.TOOL_CALLS, Usage())]
        return [TextOutput(_text(taken).rpartition("]\n")[2])]


class Reins:
    """How many outputs each request may have so far, in whatever server it is answered."""

    def __init__(self) -> None:
        self.loose = True
        self._allowed: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def allow(self, request_id: str, outputs: int) -> None:
        self._allowed[request_id] += outputs
        self._pull()

    def let_go(self) -> None:
        self.loose = True
        self._pull()

    def _pull(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, request_id: str, output: int) -> None:
        while not self.loose and output >= self._allowed[request_id]:
            await self._changed.wait()


class ReinedEngine(EchoEngine):
    """Says what it sees of the history, then echoes its input, each output when it may."""

    def __init__(self, reins: Reins) -> None:
        super().__init__()
        self._reins = reins

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        seen = "".join(f"{message.role}: {message.text}/" for message in request.history)
        made = 0
        async with aclosing(written(partial(super().generate, request))) as outputs:
            await self._reins.until(request.request_id, made)
            out.write(TextOutput(f"<{seen}>"))
            async for output in outputs:
                if not isinstance(output, Finished):
                    made += 1
                    await self._reins.until(request.request_id, made)
                out.write(output)
                await out.drain()


def spoken(text: str, *, timed: bool = True, word_ms: int = SPOKEN_MS, level: float = 0.25) -> Iterator[Any]:
    """The steps of an answer of these words; unless ``timed`` each sentence is a clause without times of words."""
    yield TextOutput(text)
    samples = np.full(SAMPLE_RATE * word_ms // 1000, level, np.float32)
    end = 0
    for index, word in enumerate(text.split()):
        end = text.index(word, end) + len(word)
        if timed:
            times = Word(word, index * word_ms, (index + 1) * word_ms, text_end=end)
            yield AudioOutput(samples, SAMPLE_RATE, (times,))
        else:
            stop = text.find(".", end - 1) + 1
            yield AudioOutput(samples, SAMPLE_RATE, text_end=stop or len(text))


def long_answer() -> list[EngineOutput]:
    """Two hundred words, a tenth of a second each."""
    script: list[EngineOutput] = [TextOutput(" ".join(f"word{number}" for number in range(200)))]
    for number in range(200):
        word = Word(f"word{number}", number * 100, number * 100 + 90)
        script.append(AudioOutput(np.full(2400, 0.1, np.float32), 24_000, (word,)))
    return script


def delegates(said: str, task: str = "find it", *, number: int = 1) -> list[Any]:
    """The steps of an answer that hands over work."""
    call = ToolCallFragment(0, id=f"call_{number}", name="delegate", arguments=f'{{"task": "{task}"}}')
    return [*spoken(said), ToolCallOutput(call), Finished(FinishReason.TOOL_CALLS, Usage())]


def takes(seconds: float) -> Callable[[], Awaitable[None]]:
    """A step that takes so long."""
    return lambda: asyncio.sleep(seconds)


def interim(text: str) -> TranscriptOutput:
    return TranscriptOutput(text, interim=True)


def tool_call(name: str, *arguments: str, index: int = 0, choice: int = 0) -> list[ToolCallOutput]:
    """A call as engines give it: its head, then its arguments in pieces."""
    head = ToolCallFragment(index, id=f"call_{name}_{index}", name=name)
    pieces = [ToolCallFragment(index, arguments=piece) for piece in arguments]
    return [ToolCallOutput(one, choice=choice) for one in (head, *pieces)]


def token(text: str, logprob: float = -0.5, *others: str) -> TokenLogprob:
    """A token with itself and ``others`` as the likeliest."""
    top = tuple(TokenLogprob(one, one.encode(), logprob - rank) for rank, one in enumerate((text, *others)))
    return TokenLogprob(text, text.encode(), logprob, top if others else ())


def said(text: str, *, choice: int = 0, logprobs: bool = False) -> TextOutput:
    return TextOutput(text, logprobs=(token(text),) if logprobs else (), choice=choice)


def finished(reason: FinishReason = FinishReason.STOP, *reasons: FinishReason) -> Finished:
    return Finished(reason, Usage(input_tokens=3, output_tokens=5), reasons)


def _text(chunks: list[InputChunk]) -> str:
    return b"".join(chunk.payload for chunk in chunks if chunk.modality is Modality.TEXT).decode()
