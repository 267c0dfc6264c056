"""The stages of a composed engine: AsrStage, LlmStage and TtsStage."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    Task,
    Usage,
    Word,
    heard_language,
)
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.answer_limit import (
    SpokenLimit,
    count_history,
    count_words,
    go_on,
    not_continued,
)
from omni_ws.engine.base import (
    TOKENS,
    AudioOutput,
    Engine,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
    TextComplete,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
    TurnTimes,
    WordsComplete,
)
from omni_ws.engine.channel import Channel, ChannelClosed, Outputs, Stage, StageLink
from omni_ws.engine.clauses import (
    SENTENCE_GRACE,
    EarlierParts,
    is_speakable,
    pieces_of,
    told_language,
)
from omni_ws.engine.composed.parts import (
    Role,
    StallTimer,
    asked_of,
    mode_of,
    part_failed,
    run_part,
)
from omni_ws.engine.spoken.languages import load_rules, prepare
from omni_ws.engine.spoken.speakable_text import AT_A_STRETCH, SpeakableText, Spoken, WrittenWords
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import EmptyInput, EngineFailed, InvalidRequest, OmniError


class _EngineStage:
    """Base class of the stages: a Stage that runs an engine, and is the OutputWriter of that engine."""

    _outputs: Outputs
    _sink: Channel[Any] | None

    @property
    def full(self) -> bool:
        sink = self._sink
        return self._outputs.full or (sink is not None and sink.full and not sink.closed)

    async def drain(self) -> None:
        """Wait while the client does not read (see OutputWriter), or while the channel to the next stage is full."""
        await self._outputs.drain()
        if self._sink is not None and self._sink.full:
            with suppress(ChannelClosed):
                await self._sink.room()


# The stage that hears.

_CHUNK_OVERHEAD_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Guess:
    """A prediction of the next ``chunk`` at a pause, which holds if the speaker says nothing more.

    ``chunk`` None withdraws the last guess. ``language`` is the code of the spoken language, if it was detected.
    """

    chunk: InputChunk | None
    language: str | None = None


def _size_of(item: InputChunk | Guess) -> float:
    chunk = item.chunk if isinstance(item, Guess) else item
    return _CHUNK_OVERHEAD_BYTES + (0 if chunk is None else len(chunk.payload))


#: The link that carries input to a part; its capacity is in bytes.
INPUT_LINK: Final = StageLink(1 << 20, cost=_size_of)


class AsrStage(_EngineStage):
    """The first Stage of a request, which transcribes speech: chunks in; chunks to the LLM, transcripts to the client.

    Final transcripts replace the audio. The input stays in order: chunks after audio wait for the audio's transcript.
    If the LLM takes audio (``beside``), all input passes immediately, and only the client gets the transcripts. With
    ``guesses``, the LLM stage also gets a Guess of the transcript at each pause that may end the turn.

    Each stretch of audio becomes one request to the ASR. The joined final transcripts are the whole transcript.
    ``earlier`` are the earlier parts of the message, which go to the LLM before the input; the input is transcribed
    meanwhile. After the answer was cut off, the stage goes on transcribing for the client only.
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
        #: The length of the transcribed audio, in milliseconds.
        self.audio_ms = 0
        self._engine = engine
        self._request = request
        self._beside = beside
        self._guesses = guesses
        #: Whether a final transcript came after the last interim one, which may have confirmed a guess.
        self._guess_settled = False
        self._stretch: _Stretch | None = None
        #: Whether there was any input, even audio without words.
        self._anything = False
        self._separator = ""
        self._boundary = _TextBoundary()
        #: What the LLM has not received yet: earlier parts of the message; after them, final transcripts and guesses.
        self._earlier = earlier
        self._heard: deque[str | TranscriptGuess] = deque()

    async def run(self, source: AsyncIterator[InputChunk], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Transcribe the input, and pass it on to the LLM.

        Raises EmptyInput if there was no input, unless ``beside``: then the LLM checks this.
        """
        assert sink is not None
        self._outputs, self._sink = outputs, sink
        try:
            async for chunk in source:
                if not chunk.has_content:
                    continue
                is_audio = chunk.modality is Modality.AUDIO
                if is_audio:
                    await self._hear(chunk)
                elif not self._beside:
                    await self._write_down()
                if self._beside or not is_audio:
                    await self._pass_on()
                    self._anything = True
                    await self._give(self._boundary.typed(chunk))
            if self._beside:
                await self._pass_on()
                sink.close()  # the answer does not wait for the transcript
            await self._write_down()
            if not self._beside:
                self._outputs.write(WordsComplete())
            await self._pass_on()
        finally:
            if self._stretch is not None:
                await self._stretch.aclose()
        if not self._anything and not self._beside:
            raise EmptyInput("the request has no input")

    async def _hear(self, chunk: InputChunk) -> None:
        if self._stretch is None:
            self._stretch = _Stretch(
                self, self._listen, self._outputs, from_ms=self.audio_ms, separator=self._separator
            )
        await self._stretch.put(chunk)
        if self._heard and self._earlier_known:
            await self._pass_on()  # a guess that was told when the earlier parts were not known

    async def _write_down(self) -> None:
        """Wait until all audio so far is transcribed."""
        if self._stretch is not None:
            await self._stretch.end()
            self._stretch = None

    async def _listen(self, heard: Channel[InputChunk], out: OutputWriter) -> None:
        """Have the ASR transcribe one stretch of audio, from ``heard``."""
        asked = asked_of(
            self._engine,
            self._request,
            heard,
            role=Role.ASR,
            task=Task.TRANSCRIBE,
            output=OutputModality.TEXT,
            guesses=self._guesses or self._request.options.transcript_guesses,
        )
        try:
            await run_part(Role.ASR, self._engine, asked, out)
        except EmptyInput:
            pass  # less than a sample; ``run`` checks whether there was other input
        except OmniError as error:
            if not self._beside:
                raise
            # The LLM has heard the speaker itself.
            self._outputs.write(part_failed(Role.ASR, error))

    def write(self, output: EngineOutput) -> None:
        """See OutputWriter. Called by the ASR."""
        if isinstance(output, TranscriptOutput):
            self._outputs.write(output)
            self._settle(output)
        elif isinstance(output, TranscriptGuess):
            if self._request.options.transcript_guesses:
                self._outputs.write(output)
            if self._guesses and self._earlier_known:
                self._guess_settled = False
                self._heard.append(output)
        elif isinstance(output, Finished):
            self._anything = True
            self.audio_ms += output.usage.input_audio_ms
        if self._earlier is None:
            self._pass_heard_on()

    async def drain(self) -> None:
        """Pass transcripts on to the LLM, if the earlier parts of the message are known; wait, see OutputWriter."""
        if self._earlier_known:
            await self._pass_on()
        await super().drain()

    def _settle(self, transcript: TranscriptOutput) -> None:
        if transcript.interim and self._guess_settled:
            self._guess_settled = False
            self._heard.append(TranscriptGuess(""))  # somebody speaks again
        if transcript.interim or not transcript.text.strip():
            return
        self._request.heard_language.note(transcript.hearing, named=self._request.language)
        self._guess_settled = self._guesses
        self._separator = " "
        if not self._beside:
            self._heard.append(transcript.text)

    @property
    def _earlier_known(self) -> bool:
        """Whether the LLM has the earlier parts of the message, or could get them now without a wait."""
        return self._earlier is None or self._earlier.known

    async def _pass_on(self) -> None:
        """Wait for the earlier parts of the message; pass these parts, and then the transcripts so far, to the LLM."""
        earlier, self._earlier = self._earlier, None
        for chunk in () if earlier is None else await earlier.chunks():
            self._anything = True
            await self._give(self._boundary.earlier(chunk))
        self._pass_heard_on()

    def _pass_heard_on(self) -> None:
        assert self._sink is not None
        while self._heard:
            heard = self._heard.popleft()
            item: InputChunk | Guess
            if isinstance(heard, TranscriptGuess):
                item = Guess(
                    copy(self._boundary).heard(heard.text) if heard.text.strip() else None,
                    heard_language(heard.hearing),
                )
            else:
                item = self._boundary.heard(heard)
            if not self._sink.closed:
                self._sink.put_nowait(item)

    async def _give(self, chunk: InputChunk) -> None:
        """Pass a chunk to the LLM, unless the answer was cut off: then nobody reads the chunk."""
        assert self._sink is not None
        try:
            await self._sink.put(chunk)
        except ChannelClosed:
            if not self._request.cut.made:
                raise


class _Stretch(OutputFilter):
    """A stretch of audio with the task that transcribes it (``listen``), and the OutputWriter of that task.

    ``from_ms`` is the position of the stretch in the input audio. Transcripts are passed to ``out`` with times in the
    whole input, and with ``separator`` before their text unless the text begins with white space.
    """

    def __init__(
        self,
        out: OutputWriter,
        listen: Callable[[Channel[InputChunk], OutputWriter], Awaitable[None]],
        outputs: Outputs,
        *,
        from_ms: int,
        separator: str,
    ) -> None:
        super().__init__(out)
        self._from_ms = from_ms
        self._separator = separator
        self._heard: Channel[InputChunk] = Channel(INPUT_LINK.capacity, cost=INPUT_LINK.cost)
        self._outputs = outputs
        self._listening = asyncio.create_task(self._run(listen), name="listening")

    def write(self, output: EngineOutput) -> None:
        self._out.write(self._placed(output) if isinstance(output, TranscriptOutput) else output)

    def _placed(self, transcript: TranscriptOutput) -> TranscriptOutput:
        text, from_ms = transcript.text, self._from_ms
        if text and not text[0].isspace():
            text = self._separator + text
        if text == transcript.text and not from_ms:
            return transcript
        return TranscriptOutput(
            text,
            transcript.interim,
            start_ms=None if transcript.start_ms is None else transcript.start_ms + from_ms,
            words=tuple(Word(word.text, word.start_ms + from_ms, word.end_ms + from_ms) for word in transcript.words),
            hearing=None if transcript.hearing is None else transcript.hearing.shifted(from_ms),
        )

    async def _run(self, listen: Callable[[Channel[InputChunk], OutputWriter], Awaitable[None]]) -> None:
        try:
            await listen(self._heard, self)
        except ChannelClosed:
            pass  # the client, or the LLM, has ended
        except Exception as error:
            # Reported immediately, because the speaker may say nothing more for a while.
            self._outputs.fail(error)
        finally:
            self._heard.discard()

    async def put(self, chunk: InputChunk) -> None:
        """Add a chunk of the audio. Raises ChannelClosed if no one reads the outputs any more."""
        try:
            await self._heard.put(chunk)
        except ChannelClosed:
            if self._outputs.closed:
                raise
            # The ASR has ended before its input; its outputs are complete.

    async def end(self) -> None:
        """End the audio, and wait until it is transcribed. Raises ChannelClosed under the same condition as ``put``."""
        self._heard.close()
        await self._listening
        if self._outputs.closed:
            raise ChannelClosed

    async def aclose(self) -> None:
        """Cancel the transcription, and wait for its end. Idempotent."""
        await end_tasks(self._listening)


class _TextBoundary:
    """A filter that inserts a space where typed text and a transcript meet without white space."""

    def __init__(self) -> None:
        #: Whether the latest chunk was typed text (True) or a transcript (False); None for any other chunk or none.
        self._typed: bool | None = None
        self._needs_space = False
        #: Whether the latest chunk was text of an earlier part.
        self._after_earlier = False

    def typed(self, chunk: InputChunk) -> InputChunk:
        """Return ``chunk``, which holds typed text or another modality, with a space before its text if needed."""
        if chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None:
            self._typed, self._after_earlier = None, False
            return chunk
        return msgspec.structs.replace(chunk, payload=self._joined(chunk.payload, typed=True))

    def earlier(self, chunk: InputChunk) -> InputChunk:
        """Return ``chunk``, of an earlier part of the message, with a space before its text if needed."""
        given = self.typed(chunk)
        self._after_earlier = chunk.modality is Modality.TEXT
        return given

    def heard(self, text: str) -> InputChunk:
        """Return a chunk with the text of a transcript, with a space before it if needed."""
        return InputChunk(Modality.TEXT, self._joined(text.encode(), typed=False))

    def _joined(self, payload: bytes, *, typed: bool) -> bytes:
        other_kind = self._after_earlier or (self._typed is not None and self._typed is not typed)
        self._after_earlier = False
        if other_kind and self._needs_space and not payload[:1].isspace():
            payload = b" " + payload
        self._typed, self._needs_space = typed, not payload[-1:].isspace()
        return payload


# The stage that answers.

#: The link from LLM to TTS. Its capacity is in characters; the LLM waits for the TTS while it is full.
SPEECH_LINK: Final = StageLink(2000, cost=len)


class LlmStage(_EngineStage):
    """The Stage of one request that runs the LLM: chunks in; the answer to the client, and its text to the TTS.

    The LLM reads the input as it arrives, so that it can process the input early. With ``words_only``, transcripts have
    replaced all speech: if the input then ends without content, because the speech had no words, the LLM's request is
    cancelled, and the answer is ``EngineCapabilities.nothing_heard``.

    ``transcribed`` and ``spoken``: other parts make the transcript and the audio. If the client set no limit, a spoken
    answer ends with a whole sentence within ``max_spoken_tokens``, and the finish reason is LENGTH. ``run`` raises
    EngineFailed if the LLM has no output within ``first_byte_timeout_sec`` after the end of the input, or writes no
    Finished.

    If another server began the answer (``GenerationRequest.begun``), the TTS gets its whole text, and the client only
    the rest. If the LLM cannot continue the answer, the TTS speaks the text that was begun, and ``failure`` is the
    error with which the answer ends.
    """

    name = Role.LLM.value

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        *,
        words_only: bool,
        transcribed: bool,
        spoken: bool,
        first_byte_timeout_sec: float | None,
        max_spoken_tokens: int | None = None,
    ) -> None:
        #: How the answer ended; None until then.
        self.finished: Finished | None = None
        self.failure: EngineFailed | None = None
        self._engine = engine
        self._request = request
        self._words_only = words_only
        self._spoken = spoken
        self._writes = request.tells_text
        dropped = {TranscriptOutput: transcribed, AudioOutput: spoken, TextOutput: not self._writes}
        self._dropped = tuple(kind for kind, drop in dropped.items() if drop)
        self._first_byte_timeout_sec = first_byte_timeout_sec
        #: Whether nothing of the answer itself has come.
        self._waits = True
        self._limit = None
        if spoken and max_spoken_tokens is not None and "max_tokens" not in request.sampling:
            self._limit = SpokenLimit(max_spoken_tokens)
            self._limit.count(request.begun)
        #: The input of the LLM, whose clock runs until the first output.
        self._given: _LlmInput | None = None

    async def run(self, source: AsyncIterator[InputChunk], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Have the LLM answer the input that ``source`` yields; its text also goes to ``sink``, for the TTS."""
        self._outputs, self._sink = outputs, sink
        begun = self._request.begun
        if sink is not None and begun:
            sink.put_nowait(begun)
        if self._request.begun_end is not None:
            async for _ in source:
                pass  # a transcript may still be made of it
            self.finished = self._request.begun_end
            return
        times, words_only = self._request.times, self._words_only
        given = self._given = _LlmInput(self._first_byte_timeout_sec, source, times, must_have_content=words_only)
        fields: dict[str, Any] = {"input": given, "input_mode": mode_of(self._engine)}
        if self._spoken:
            fields |= {"modalities": frozenset({OutputModality.TEXT}), "voice": None, "speed": 1.0, "lexicon": {}}
        request = told_language(replace(self._request, **fields), self._engine)
        try:
            limiting = given.limiting(Role.LLM, self._engine, request_id=request.request_id)
            async with asyncio.timeout(None) as given.withdrawal, limiting:
                await go_on(self._engine, request, self)
        except TimeoutError:
            if self.finished is None:
                self._answer_silence()
        except EngineFailed as error:
            if not error.keeps_answer or sink is None:
                raise
            self.failure = error
            return
        if self.finished is None:
            raise EngineFailed(f"LLM ({self._engine.name}): the answer has no end", param=self.name)

    def write(self, output: EngineOutput) -> None:
        """See OutputWriter. Called by the LLM."""
        if self._waits:
            self._note_output(output)
        if self.finished is not None:
            return
        if type(output) is Finished:
            self._finish(output)
        elif type(output) is TextOutput and self._limit is not None:
            self._write_within(self._limit, output)
        else:
            self._send(output)

    def _note_output(self, output: EngineOutput) -> None:
        """Stop the stall timer, and mark the moment of the answer's first token if ``output`` is one."""
        assert self._given is not None
        self._given.stop()
        if isinstance(output, TOKENS):
            self._waits = False
            self._request.times.mark("first_token", self.name)

    async def drain(self) -> None:
        await super().drain()
        if self.finished is not None:
            await asyncio.sleep(0)  # the LLM's request may be about to be cancelled

    def _write_within(self, limit: SpokenLimit, output: TextOutput) -> None:
        """Pass on the text that ``limit`` allows, and cancel the LLM's request when the limit is reached."""
        if limit.passes(output.text):
            limit.count(output.text)
        elif (said := limit.feed(output.text)) != output.text:
            output = TextOutput(said)
        if output.text:
            self._send(output)
        if limit.reached:
            self.finished = Finished(FinishReason.LENGTH, self._usage(limit.tokens))
            self._outputs.write(TextComplete(self.finished))
            assert self._given is not None
            self._given.withdraw()

    def _finish(self, finished: Finished) -> None:
        rest = "" if self._limit is None else self._limit.finish(cut=finished.reason is FinishReason.LENGTH)
        if rest:
            self._send(TextOutput(rest))
        self.finished = finished
        if self._spoken and not self._waits and finished.reason is not FinishReason.TOOL_CALLS:
            self._outputs.write(TextComplete(finished))

    def _usage(self, output_tokens: int) -> Usage:
        """Return the usage of an answer that this stage cut off: as the LLM counted it, or else an estimate."""
        assert self._given is not None
        words = self._given.words + count_history(self._request.history)
        estimated = Usage(input_tokens=words, output_tokens=output_tokens)
        return self._request.meter.read() or estimated

    def _answer_silence(self) -> None:
        able, language = self._engine.capabilities, self._request.heard_language.now or "en"
        if self._request.options.interprets_into:
            self.finished = Finished(FinishReason.STOP, Usage())
            return
        text = able.nothing_heard if language == "en" else able.nothing_heard_in.get(language, "")
        if not text.startswith(self._request.begun):
            raise not_continued()
        if rest := text.removeprefix(self._request.begun):
            self._send(TextOutput(rest))
        self.finished = Finished(FinishReason.STOP, Usage(output_tokens=count_words(text)))

    def _send(self, output: EngineOutput) -> None:
        sink = self._sink
        if not isinstance(output, self._dropped):
            self._outputs.write(output)
        if sink is not None and type(output) is TextOutput and output.text and not sink.closed:
            sink.put_nowait(output.text)


class _LlmInput(StallTimer):
    """The StallTimer of the LLM, which cancels its request at an end of the input that lacks required content."""

    def __init__(
        self, seconds: float | None, source: AsyncIterator[InputChunk], times: TurnTimes, *, must_have_content: bool
    ) -> None:
        super().__init__(seconds, source)
        #: A timeout that is used to cancel the LLM's request.
        self.withdrawal: asyncio.Timeout | None = None
        #: The number of words in the text of the input so far.
        self.words = 0
        self._times = times
        self._empty = must_have_content

    def withdraw(self) -> None:
        """Cancel the LLM's request."""
        if self.withdrawal is not None:
            self.withdrawal.reschedule(asyncio.get_running_loop().time())

    async def __anext__(self) -> InputChunk:
        try:
            chunk = await super().__anext__()
        except StopAsyncIteration:
            if self._empty and self.withdrawal is not None:
                self.withdraw()
                await asyncio.get_running_loop().create_future()  # for ever: the end would be answered
            self._times.mark("llm_asked", Role.LLM.value)
            raise
        self._empty = False
        if chunk.modality is Modality.TEXT:
            self.words += count_words(chunk.payload.decode())
        return chunk


# The stage that speaks.


class TtsStage(_EngineStage):
    """The Stage of one request that runs the TTS: text in, audio to the client.

    The TTS reads the spoken form of the text (``SpeakableText``); the timed words that the TTS reports are converted
    back to written words. An answer without text, such as a tool call, is not spoken. If the TTS fails and the client
    also gets the text, the answer goes on without audio, unless the TTS refuses a parameter of the request. If another
    server began the answer, the TTS reads the text from ``GenerationRequest.voice_from`` on.
    """

    name = Role.TTS.value

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        #: The length of the audio, in milliseconds.
        self.audio_ms = 0
        self._engine = engine
        self._request = request
        self._words = WrittenWords()
        self.write = self._write_first  # type: ignore[method-assign]
        self._speech_language: str | None = None

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Have the TTS read ``source`` as it arrives, and write the audio to ``outputs``."""
        self._outputs, self._sink = outputs, sink
        async with aclosing(self._spoken_text(source)) as texts:
            first = await anext(texts, None)
            if first is None:
                return
            self._request.times.mark("first_clause", self.name)
            try:
                await self._speak(first, texts)
            except OmniError as error:
                if OutputModality.TEXT not in self._request.modalities or _is_refusal(error):
                    raise
                outputs.write(part_failed(Role.TTS, error))
                await outputs.drain()
        async for _ in source:
            pass  # the TTS has ended before the text, which goes on without it

    async def _speak(self, begin: str, rest: AsyncIterator[str]) -> None:
        async with aclosing(_chunks(begin, rest)) as text:
            asked = asked_of(
                self._engine, self._request, text, role=Role.TTS, task=Task.SPEECH, output=OutputModality.AUDIO
            )
            if self._speech_language is not None:
                asked = replace(asked, speech_language=self._speech_language)
            await run_part(Role.TTS, self._engine, asked, self)

    def _write_first(self, output: EngineOutput) -> None:
        """Mark the moment of the first audio, and replace this method by ``write`` for all later outputs."""
        if isinstance(output, AudioOutput):
            vars(self).pop("write", None)
            self._request.times.mark("first_audio_made", self.name)
        TtsStage.write(self, output)

    def write(self, output: EngineOutput) -> None:
        """See OutputWriter. Called by the TTS."""
        if isinstance(output, AudioOutput):
            if output.words:
                output = AudioOutput(output.samples, output.sample_rate, self._words.place(output.words))
            elif output.text_end is not None:
                end = self._words.written_end(output.text_end)
                output = AudioOutput(output.samples, output.sample_rate, text_end=end)
            self._outputs.write(output)
        elif isinstance(output, Finished):
            self.audio_ms = output.usage.output_audio_ms

    async def _spoken_text(self, source: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        """Yield the spoken form of the text in pieces, the first of which contains something to pronounce."""
        held, begun = "", False
        if (first := await anext(source, None)) is None:
            return
        # Only now is it known which language the user speaks.
        self._speech_language = self._language_to_speak()
        await prepare(self._request.lexicon)
        language = self._language
        await load_rules(language)
        speakable = SpeakableText(language, lexicon=self._request.lexicon)
        async with aclosing(_spoken_pieces(first, source, speakable)) as spoken:
            async for pieces in spoken:
                if self._request.voice_from:
                    pieces = [piece for piece in pieces if piece.start >= self._request.voice_from]
                self._words.add(pieces)
                text = "".join(piece.text for piece in pieces)
                held += text
                begun = begun or is_speakable(text)
                if begun and held:
                    yield held
                    held = ""

    @property
    def _language(self) -> str:
        """The language (RFC 5646) of the text to speak; "" if it is not known.

        This is the language of the voice, if the voice reads only one. If the user speaks a language that the TTS does
        not speak, the language is not known: the answer is most likely in the user's language.
        """
        if self._speech_language is not None:
            return self._speech_language
        able = self._engine.capabilities
        voice = self._request.voice or next(iter(able.voices), "")
        reads, spoken_in = able.voice_languages.get(voice, ""), self._request.heard_language.now
        if self._request.options.interprets_into:
            return reads
        foreign = (
            spoken_in is not None and spoken_in not in able.speech_languages and spoken_in != primary_subtag(reads)
        )
        return "" if foreign else reads

    def _language_to_speak(self) -> str | None:
        """Return the language in which the TTS is to speak; None for the language of the voice.

        This is the language of the user or of the interpretation, if the TTS speaks it. If the client named both a
        voice and the language of the input, its voice decides.
        """
        request = self._request
        if into := request.options.interprets_into:
            return into if into in self._engine.capabilities.speech_languages else None
        if request.voice_named and request.language is not None:
            return None
        spoken_in = request.heard_language.now
        return spoken_in if spoken_in in self._engine.capabilities.speech_languages else None


def _is_refusal(error: OmniError) -> bool:
    """Whether ``error`` is the TTS's refusal of a parameter of the request, which the client has to correct."""
    asked = ("voice", "speed", "stage_params", "stage_sampling")
    return isinstance(error, InvalidRequest) and (error.param or "").partition(".")[0] in asked


async def _spoken_pieces(
    first: str, rest: AsyncIterator[str], speakable: SpeakableText
) -> AsyncGenerator[list[Spoken], None]:
    """Yield the spoken form of a text while it arrives: ``first`` and then ``rest``.

    Words whose spoken form may depend on further text are held back. They are yielded, too, if no more text arrives for
    SENTENCE_GRACE after the end of a sentence.
    """
    read = 0
    text: str | None = first
    while text is not None:
        for piece in pieces_of(text, AT_A_STRETCH):
            yield speakable.feed(piece)
            read += len(piece)
            if read >= AT_A_STRETCH:
                read = 0
                await asyncio.sleep(0)
        while True:
            try:
                async with asyncio.timeout(SENTENCE_GRACE if speakable.looks_complete else None):
                    text = await anext(rest, None)
                break
            except TimeoutError:
                yield speakable.rest()
    yield speakable.rest()


async def _chunks(first: str, rest: AsyncIterator[str]) -> AsyncGenerator[InputChunk, None]:
    yield InputChunk(Modality.TEXT, first.encode())
    async for text in rest:
        yield InputChunk(Modality.TEXT, text.encode())


# The stages of one answer: the LLM, and the TTS if the answer is spoken.


class AnswerStages:
    """The stages of one answer, and the links between them. ``options`` are passed to LlmStage."""

    def __init__(self, request: GenerationRequest, *, llm: Engine, tts: Engine | None, **options: Any) -> None:
        self._llm = LlmStage(llm, request, spoken=tts is not None, **options)
        self._tts = None if tts is None else TtsStage(tts, request)
        self.stages: list[Stage[Any]] = [self._llm, *([self._tts] if self._tts is not None else [])]
        self.links: list[StageLink] = [SPEECH_LINK] * (len(self.stages) - 1)

    @property
    def finished(self) -> Finished:
        """The Finished of the answer, after its stages have ended. Raises the failure of the LlmStage."""
        if self._llm.failure is not None:
            raise self._llm.failure
        finished = self._llm.finished
        assert finished is not None
        spoken_ms = 0 if self._tts is None else self._tts.audio_ms
        usage = replace(finished.usage, output_audio_ms=finished.usage.output_audio_ms + spoken_ms)
        return replace(finished, usage=usage)
