"""SpeechEngine: an engine for ``Task.SPEECH`` over a Voice, which reads text aloud while the text still arrives."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from msgspec.structs import replace

from omni_ws.audio.pcm import as_samples, audible_part
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage, Word
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_history
from omni_ws.engine.base import (
    AudioOutput,
    Component,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
)
from omni_ws.engine.clauses import (
    PHRASE_MARKS,
    ClauseSplitter,
    Phrase,
    TextClause,
    clauses_as_they_come,
    first_clause_of,
    pieces_of,
)
from omni_ws.engine.decoding import TextPart, decode_request
from omni_ws.engine.spoken.languages import has_rules, load_rules, phrase_words_of, prepare
from omni_ws.engine.spoken.speakable_text import AT_A_STRETCH, SpeakableText, Spoken, WrittenWords
from omni_ws.engine.threads import MediaShare
from omni_ws.errors import EmptyInput, EngineFailed, InvalidValue, UnsupportedParameter

#: Speaks the pieces of a text: writes their audio. A voice that counts its own usage writes a Finished at the end.
Speak: TypeAlias = Callable[[AsyncIterator[str], OutputWriter], Awaitable[None]]


class Voice(Component, Protocol):
    """A voice that serves any number of requests. Its attributes, except ``hosts``, are final after the start.

    ``model`` is the name of the model, or of the default voice.
    """

    #: The names of the other machines that receive the text.
    hosts: tuple[str, ...]
    #: Whether it allocates memory by what is free when it starts, so that nothing else may start at the same time.
    measures_memory: bool

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        """Write the audio of the pieces that ``text`` yields to ``out``; see ``Speak``. Raises InvalidValue.

        A voice that speaks a clause at a time uses ``clause_by_clause`` to cut the text.
        """
        ...


def speech_capabilities(voices: tuple[str, ...], *, speaks: bool = True, **more: Any) -> EngineCapabilities:
    """Return the capabilities of a voice that reads text as it arrives. ``speaks`` False: there is no voice to speak.

    ``more`` are further fields of EngineCapabilities.
    """
    return EngineCapabilities(
        input_modalities=frozenset({Modality.TEXT}),
        output_modalities=frozenset({OutputModality.AUDIO} if speaks else ()),
        tasks=frozenset({Task.SPEECH} if speaks else ()),
        extend=True,
        voices=voices,
        lexicon=speaks,
        **more,
    )


class SpeechEngine:
    """An engine that speaks with ``voice``: a synthesiser, a Talker, or another server.

    After the start, the engine has the name and the model of the voice.
    """

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.name = voice.name
        self.model = voice.model
        self.hosts = voice.hosts
        self.measures_memory = voice.measures_memory
        self.active_requests = 0
        self._started = False

    @property
    def state(self) -> EngineState:
        return self.voice.state if self._started else EngineState.STARTING

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.voice.capabilities

    def describe(self) -> tuple[str, ...]:
        return self.voice.describe()

    async def start(self) -> None:
        """Start the voice. Idempotent."""
        if not self._started:
            await self.voice.start()
            self.name, self.model = self.voice.name, self.voice.model
            self._started = True

    async def stop(self) -> None:
        self._started = False
        await self.voice.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if not self._started:
            raise EngineFailed("the engine is not running", fatal=True)
        self.active_requests += 1
        try:
            await read_aloud(request, out, partial(self.voice.speak, request))
        finally:
            self.active_requests -= 1


async def read_aloud(request: GenerationRequest, out: OutputWriter, speak: Speak) -> None:
    """Have ``speak`` read the input of a request aloud; write a Finished with the usage, unless ``speak`` wrote one.

    Raises UnsupportedParameter if the request does not ask for audio, EmptyInput if there is no text, and the errors of
    ``speak``.
    """
    if OutputModality.AUDIO not in request.modalities:
        raise UnsupportedParameter("task speech answers with audio: name it in modalities", param="modalities")
    read, answer = WordCounter(), AnswerText(request.sampling)
    measured = _MeasuredSpeech(out)
    with request.media_room.share() as share:
        async with aclosing(_text_of(request, share, read, answer)) as text:
            await speak(text, measured)
    if not read.words:
        raise EmptyInput("there is no text to read aloud")
    if measured.finished is not None:
        out.write(measured.finished)
        return
    usage = Usage(
        input_tokens=read.words + count_history(request.history),
        output_tokens=answer.words,
        output_audio_ms=round(measured.audio_ms),
    )
    out.write(Finished(answer.reached or FinishReason.STOP, usage))


class _MeasuredSpeech(OutputFilter):
    """An OutputWriter that measures the duration of a voice's audio, and keeps a Finished that the voice writes."""

    def __init__(self, out: OutputWriter) -> None:
        super().__init__(out)
        self.audio_ms = 0.0
        self.finished: Finished | None = None

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, AudioOutput):
            self.audio_ms += len(output.samples) * 1000 / output.sample_rate
        elif isinstance(output, Finished):
            self.finished = output
            return
        self._out.write(output)


async def _text_of(
    request: GenerationRequest, share: MediaShare, read: WordCounter, answer: AnswerText
) -> AsyncGenerator[str, None]:
    """Yield the text to be read aloud, as it arrives. A newline, which ends sentences, separates parts of the input.

    ``read`` counts the words of the input; ``answer`` cuts the text at the limits of the request.
    """
    last: int | None = None
    async with aclosing(decode_request(request, {Modality.TEXT}, share=share)) as parts:
        async for part in parts:
            assert isinstance(part, TextPart)
            read.feed(part.text)
            text = part.text if last in (None, part.part) else f"\n{part.text}"
            last = part.part
            async for piece in answer.add(text):
                for short in pieces_of(piece, AT_A_STRETCH):
                    yield short
            if answer.reached is not None:
                return
    if rest := answer.finish():
        yield rest


# Text for voices that speak a clause at a time.

#: The pause behind a Phrase. At the end of a text voices make one of 400 ms.
PHRASE_PAUSE_MS: Final = 120.0


async def clause_by_clause(
    request: GenerationRequest,
    text: AsyncIterator[str],
    out: OutputWriter,
    speak: Callable[[str], AsyncGenerator[AudioOutput, None]],
    *,
    language: str = "",
    latin_only: bool = False,
    tells_words: bool = False,
    slow: bool = False,
) -> None:
    """Cut ``text`` into clauses, and write the audio that ``speak`` makes of each clause, in order.

    If there are rules for the voice's ``language`` (``spoken.languages``), numbers are put into words. Words in the
    request's lexicon are replaced for any voice. The word times from ``speak`` count from the beginning of a clause,
    and are converted to times from the beginning of the audio. ``tells_words``: the voice reports words; otherwise the
    outputs have ``text_end``. ``latin_only``: the voice reads only Latin letters; other text raises InvalidValue or,
    with ``skip_unreadable``, is skipped. ``slow``: the voice is slow, so the first clause is as short as possible, even
    if the text is complete. For a fast voice, the first clause of English text that arrives slowly from a model may be
    a Phrase, which is spoken with the tone and the short pause of an unfinished sentence.
    """
    await load_rules(language)
    reads_numbers = not request.options.spoken_form and has_rules(language)
    comma_after, begin_after_sec = first_clause_of(request.input)
    if slow:
        comma_after = 0
    spoken = None
    if reads_numbers or request.lexicon:
        await prepare(request.lexicon)
        spoken = SpokenClauses(language, request.lexicon, reads_numbers=reads_numbers, first_comma_after=comma_after)
    splitter = spoken or ClauseSplitter(language=language or "en", first_comma_after=comma_after)
    spoken_ms = 0.0
    # Behind a short phrase, a slow voice would not have its second clause in time.
    phrase_words = phrase_words_of(language) if begin_after_sec is None and not slow else None
    come = clauses_as_they_come(text, splitter, begin_after_sec=begin_after_sec, phrase_words=phrase_words)
    async with aclosing(come) as clauses:
        async for clause in clauses:
            if latin_only and any(map(str.isalpha, clause.text)) and not _has_latin(clause.text):
                if request.options.skip_unreadable:
                    continue
                raise InvalidValue("the voice reads Latin letters only: it cannot speak this text", param="text")
            start_ms = spoken_ms
            said = _spoken_phrase(clause.text, speak) if isinstance(clause, Phrase) else speak(clause.text)
            async with aclosing(said) as pieces:
                async for piece in pieces:
                    spoken_ms += len(piece.samples) * 1000 / piece.sample_rate
                    words = tuple(_moved(word, start_ms) for word in piece.words)
                    if spoken is not None:
                        words = spoken.written.place(words)
                    text_end = None
                    if not tells_words:
                        text_end = clause.end if spoken is None else spoken.written.written_end(clause.end)
                    out.write(AudioOutput(piece.samples, piece.sample_rate, words, text_end))
                    await out.drain()


async def _spoken_phrase(
    text: str, speak: Callable[[str], AsyncGenerator[AudioOutput, None]]
) -> AsyncGenerator[AudioOutput, None]:
    """Yield the audio of a Phrase, in the tone of an unfinished sentence, with at most PHRASE_PAUSE_MS of silence."""
    silent: list[AudioOutput] = []
    async with aclosing(speak(text if text[-1] in PHRASE_MARKS else f"{text},")) as pieces:
        async for piece in pieces:
            if (part := audible_part(as_samples(piece.samples))) is None:
                silent.append(piece)
                continue
            for earlier in silent:
                yield earlier
            end = part[1]
            yield replace(piece, samples=piece.samples[:end])
            silent = [replace(piece, samples=piece.samples[end:], words=())]
    left_ms = PHRASE_PAUSE_MS
    for piece in silent:
        kept = replace(piece, samples=piece.samples[: round(left_ms * piece.sample_rate / 1000)])
        left_ms -= len(kept.samples) * 1000 / piece.sample_rate
        if len(kept.samples) or kept.words:
            yield kept


class SpokenClauses(ClauseSplitter):
    """A ClauseSplitter for the spoken form of a text, which SpeakableText makes of literal text.

    With ``reads_numbers`` False, only words of the lexicon are replaced. ``written`` converts positions and words of
    the spoken form back to the written text. ``limits`` are arguments of ClauseSplitter.
    """

    def __init__(self, language: str, lexicon: Mapping[str, str], *, reads_numbers: bool = True, **limits: int) -> None:
        super().__init__(language=language or "en", **limits)
        self.written = WrittenWords()
        self._speakable = SpeakableText(language if reads_numbers else "", literal=True, lexicon=lexicon)

    def feed(self, text: str) -> list[TextClause]:
        return super().feed(self._noted(self._speakable.feed(text)))

    @property
    def looks_complete(self) -> bool:
        return self._speakable.looks_complete or super().looks_complete

    def rest(self) -> TextClause:
        clauses = super().feed(self._noted(self._speakable.rest()))
        last = super().rest()
        return TextClause(" ".join(clause.text for clause in (*clauses, last) if clause.text), last.end)

    def _noted(self, pieces: Iterable[Spoken]) -> str:
        noted = list(pieces)
        self.written.add(noted)
        return "".join(piece.text for piece in noted)


def _has_latin(text: str) -> bool:
    """Whether a text contains a digit or a Latin letter, with or without an accent."""
    return any(letter.isascii() and letter.isalnum() for letter in unicodedata.normalize("NFKD", text))


def _moved(word: Word, by_ms: float) -> Word:
    return Word(word.text, round(word.start_ms + by_ms), round(word.end_ms + by_ms))
