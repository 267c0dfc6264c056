"""SynthesisEngine: reads text aloud with a speech synthesiser, clause by clause, while the text still arrives."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage, Word
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_words
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineOutput, EngineState, Finished, GenerationRequest
from omni_ws.engine.clauses import ClauseSplitter, TextClause, clauses_as_they_come, first_clause_of, pieces_of
from omni_ws.engine.decoding import TextPart, decode_request
from omni_ws.engine.first_to_start import check_is_heard
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.spoken.speakable_text import AT_A_STRETCH, SpeakableText, Spoken, WrittenWords
from omni_ws.engine.tts.voice import Voice
from omni_ws.errors import EmptyInput, EngineFailed, InvalidValue, UnsupportedParameter


class SynthesisEngine:
    """Speaks with hibari or espeak-ng, in a process of its own that is started again when it dies.

    Where ``choice`` is AUTO and there is no synthesiser, the engine starts all the same, and can do nothing.
    ``default_voice`` is one of the voices of the synthesiser, None for its usual one; ``file`` is what hibari speaks
    from, None for the one in the cache of weights. Once started, the engine is named like the synthesiser, and its
    model like the voice.
    """

    def __init__(
        self, choice: VoiceChoice = VoiceChoice.AUTO, *, default_voice: str | None = None, file: Path | None = None
    ) -> None:
        self.name = "synthesis"
        self.model = choice.value
        self.active_requests = 0
        self.voice = Voice(choice, default_voice=default_voice, file=file)
        self._threads: ThreadPoolExecutor | None = None

    @property
    def state(self) -> EngineState:
        if self._threads is None:
            return EngineState.STARTING
        return EngineState.OK if self.voice.healthy else EngineState.UNHEALTHY

    @property
    def capabilities(self) -> EngineCapabilities:
        voices = self.voice.voices
        return EngineCapabilities(
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.AUDIO} if voices else ()),
            tasks=frozenset({Task.SPEECH} if voices else ()),
            extend=True,
            voices=voices,
            voice_aliases=self.voice.aliases,
            voice_languages=self.voice.languages,
            speed=bool(voices),
            sampling=frozenset({"max_tokens", "stop"}),
            sampling_no_ops=frozenset({"temperature", "top_p", "seed"}),
        )

    def describe(self) -> tuple[str, ...]:
        return (self.voice.describe(),)

    async def start(self) -> None:
        """Find a voice and start its process. Idempotent. Raises EngineFailed if the chosen one is missing."""
        if self._threads is None:
            await self.voice.start()
            if self.voice.facts is not None:
                self.name = self.voice.facts.synthesiser.partition(" ")[0]
                self.model = self.voice.voices[0]
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="text decoder")

    async def stop(self) -> None:
        threads, self._threads = self._threads, None
        await self.voice.stop()
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        self._check(request)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                reading = _Reading(request, self.voice, threads=self._threads, share=share)
                async with aclosing(reading.outputs()) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self.active_requests -= 1

    def _check(self, request: GenerationRequest) -> None:
        if not self.voice.voices:
            raise UnsupportedParameter(f"this server has no voice; {self.voice.describe()}", param="task")
        check_is_heard(request)
        if request.voice is not None:
            self.voice.check(request.voice)


class _Reading:
    """One request: text in, speech out."""

    def __init__(
        self, request: GenerationRequest, voice: Voice, *, threads: ThreadPoolExecutor, share: MediaShare
    ) -> None:
        self._request = request
        self._voice = voice
        self._threads = threads
        self._share = share
        self._read = WordCounter()
        self._text = AnswerText(request.sampling)
        self._spoken_ms = 0.0
        language = voice.languages.get(request.voice or next(iter(voice.voices), ""), "")
        reads_numbers = not request.options.spoken_form and language.partition("-")[0].lower() == "en"
        comma_after, self._begin_after_sec = first_clause_of(request.input)
        self._clauses = (
            _SpokenClauses(language, comma_after) if reads_numbers else ClauseSplitter(first_comma_after=comma_after)
        )

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        async with (
            aclosing(self._pieces()) as pieces,
            aclosing(clauses_as_they_come(pieces, self._clauses, begin_after_sec=self._begin_after_sec)) as clauses,
        ):
            async for clause in clauses:
                async with aclosing(self._speak(clause.text)) as outputs:
                    async for output in outputs:
                        yield output
        if not self._read.words:
            raise EmptyInput("there is no text to read aloud")
        usage = Usage(
            input_tokens=self._read.words + sum(count_words(message.text) for message in self._request.history),
            output_tokens=self._text.words,
            output_audio_ms=round(self._spoken_ms),
        )
        yield Finished(self._text.reached or FinishReason.STOP, usage)

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Yield what is to be read aloud, as it arrives."""
        decoded = decode_request(self._request, {Modality.TEXT}, executor=self._threads, share=self._share)
        async with aclosing(decoded) as parts:
            async for part in parts:
                assert isinstance(part, TextPart)
                self._read.feed(part.text)
                async for piece in self._text.add(part.text):
                    for short in pieces_of(piece, AT_A_STRETCH):
                        yield short
                if self._text.reached is not None:
                    return
        yield self._text.finish()

    async def _speak(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        latin_only = self._voice.facts is not None and self._voice.facts.latin_only
        if latin_only and any(map(str.isalpha, clause)) and not _has_latin(clause):
            if self._request.options.skip_unreadable:
                return
            raise InvalidValue("the voice reads Latin letters only: it cannot speak this text", param="text")
        start_ms = self._spoken_ms
        sample_rate = 0
        async with aclosing(self._voice.speak(clause, voice=self._request.voice, speed=self._request.speed)) as pieces:
            async for piece in pieces:
                # Words that are told after the last sample come without a rate of their own.
                sample_rate = piece.sample_rate or sample_rate
                if not sample_rate:
                    continue
                self._spoken_ms += len(piece.samples) * 1000 / sample_rate
                words = tuple(_moved(word, start_ms) for word in piece.words)
                if isinstance(self._clauses, _SpokenClauses):
                    words = self._clauses.written.place(words)
                yield AudioOutput(piece.samples, sample_rate, words)


class _SpokenClauses(ClauseSplitter):
    """Splits what is read of a text of English, which is the text itself with its numbers in words, into clauses."""

    def __init__(self, language: str, first_comma_after: int) -> None:
        super().__init__(first_comma_after=first_comma_after)
        self.written = WrittenWords()
        self._speakable = SpeakableText(language, literal=True)

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
    """Whether any of a text can be read by who knows Latin letters and digits alone, accents aside."""
    return any(letter.isascii() and letter.isalnum() for letter in unicodedata.normalize("NFKD", text))


def _moved(word: Word, by_ms: float) -> Word:
    return Word(word.text, round(word.start_ms + by_ms), round(word.end_ms + by_ms))
