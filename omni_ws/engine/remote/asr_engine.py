"""RemoteAsrEngine: speech recognition behind any server that has ``/v1/audio/transcriptions``."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
import orjson

from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Pcm16, Samples
from omni_ws.audio.vad import load_detector
from omni_ws.core.chunks import FinishReason, HeardSegment, Hearing, Modality, OutputModality, Usage, Word
from omni_ws.core.json_values import MAX_BODY_VALUES, check_values, language_name
from omni_ws.engine.answer_limit import AnswerText, WordCounter
from omni_ws.engine.asr.listener import (
    AudioPace,
    UtteranceEnded,
    UtterancePaused,
    UtteranceResumed,
    UtteranceSplitter,
)
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Recognised, Utterance, UtteranceLimits
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.decoding import AudioPart, decode_request
from omni_ws.engine.first_to_start import asr_capabilities
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.remote.answer_stream import DONE, event_content, whole_text
from omni_ws.engine.remote.event_stream import EventReader, ServerSentEvent
from omni_ws.engine.remote.settings import RemoteAsrSettings
from omni_ws.engine.remote.upstream import Pool, UpstreamAnswer, UpstreamEngine
from omni_ws.engine.threads import release_in_thread, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed, InvalidFrame, InvalidRequest


class RemoteAsrEngine(UpstreamEngine):
    """Does the task transcribe: cuts the audio into utterances as it arrives, and has each written down.

    Silence is not sent. Each utterance has a settled transcript; interim ones are what the upstream streams of it.
    """

    line_prefix: ClassVar[str] = "transcription "

    def __init__(self, settings: RemoteAsrSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(settings)
        self.settings = settings
        self._clock = clock
        self._transcriber: RemoteTranscriber | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("temperature", "max_tokens", "stop"),
            languages=self.settings.languages,
            word_times=self.settings.word_times,
        )

    async def start(self) -> None:
        """Returns when at least one upstream can be used. Idempotent."""
        await super().start()
        if self._transcriber is None:
            try:
                await run_in_thread(self._threads, load_detector)
            except BaseException:
                await self.stop()
                raise
            self._transcriber = RemoteTranscriber(self._pool, word_times=self.settings.word_times)

    async def stop(self) -> None:
        self._transcriber = None
        await super().stop()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        listener = self._listener(request)
        answer, heard = AnswerText(request.sampling), WordCounter()
        writes = OutputModality.TEXT in request.modalities
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                async with aclosing(self._transcripts(request, share, listener)) as transcripts:
                    async for transcript in transcripts:
                        yield transcript
                        if isinstance(transcript, TranscriptGuess) or transcript.interim:
                            continue
                        heard.feed(transcript.text)
                        async for text in answer.add(transcript.text):
                            if writes:
                                yield TextOutput(text)
            if (rest := answer.finish()) and writes:
                yield TextOutput(rest)
            usage = Usage(
                input_tokens=heard.words,
                output_tokens=answer.words,
                input_audio_ms=round(listener.samples * 1000 / SAMPLE_RATE),
            )
            yield Finished(answer.reached or FinishReason.STOP, usage)
        finally:
            try:
                await listener.close()
            finally:
                self.active_requests -= 1

    def _listener(self, request: GenerationRequest) -> UtteranceListener:
        transcriber = self._transcriber
        if transcriber is None:
            raise EngineFailed("the engine is not running", fatal=True)
        temperature = request.sampling.get("temperature")
        fields = {"language": request.language or "", "temperature": "" if temperature is None else f"{temperature:g}"}
        speculates = self.settings.speculate
        if speculates is None:
            speculates = all(upstream.is_local for upstream in self.upstreams)
        return UtteranceListener(
            partial(transcriber.transcribe, fields=fields, request_id=request.request_id),
            executor=self._threads,
            clock=self._clock,
            speculates=speculates,
            tells_guesses=request.options.transcript_guesses,
        )

    async def _transcripts(
        self, request: GenerationRequest, share: MediaShare, listener: UtteranceListener
    ) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        decoded = decode_request(
            request, {Modality.AUDIO}, sample_rate=SAMPLE_RATE, executor=self._threads, share=share
        )
        number: int | None = None
        async with aclosing(decoded) as parts:
            async for part in parts:
                assert isinstance(part, AudioPart)
                if number is not None and part.part != number:
                    async with aclosing(listener.end_part()) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
                number = part.part
                async with aclosing(listener.hear(part.samples)) as outputs:
                    async for output in outputs:
                        yield output
        if number is None:
            raise EmptyInput("the request has no input")
        async with aclosing(listener.end_part()) as transcripts:
            async for transcript in transcripts:
                yield transcript


# Listening: samples in, transcripts of an upstream out.

#: What most models read at once is half a minute.
_UTTERANCE_LIMITS: Final = UtteranceLimits(cut_after=24 * SAMPLE_RATE, longest=29 * SAMPLE_RATE)


class UtteranceListener:
    """Listens for one request: cuts audio into utterances, and has each written down by ``transcribe``.

    With ``speculates``, that begins at each pause of live audio that may be the end of the utterance, and with
    ``tells_guesses`` what comes of it is told while the pause lasts. Texts of an utterance after the first begin with a
    space: put together they are the whole transcript.
    """

    def __init__(
        self,
        transcribe: Callable[[Pcm16], AsyncGenerator[TranscriptText, None]],
        *,
        executor: Executor,
        clock: Callable[[], float],
        speculates: bool,
        tells_guesses: bool = False,
    ) -> None:
        #: The length of the audio so far, in samples.
        self.samples = 0
        self._transcribe = transcribe
        self._executor = executor
        self._pace = AudioPace(clock)
        self._speculates = speculates
        self._tells_guesses = tells_guesses
        self._splitter = UtteranceSplitter(_NotLive(), _UTTERANCE_LIMITS)
        self._task: TranscriptTask | None = None
        #: Whether a guess was told from ``_task``.
        self._guess_told = False
        self._separator = ""

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        """Take the next samples at 16 kHz; yield what changed."""
        self.samples += len(samples)
        is_live = self._pace.is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._splitter.feed(samples)
        while self._splitter.ready:
            event = await run_in_thread(self._executor, self._splitter.advance)
            match event:
                case UtterancePaused(pcm=pcm) if self._speculates and is_live:
                    await self._begin(pcm)
                case UtteranceResumed():
                    if self._guess_told:
                        yield TranscriptGuess("")
                    await self._withdraw()
                case UtteranceEnded():
                    async with aclosing(self._settle(event)) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
        if self._tells_guesses and (text := self._new_guess()):
            yield TranscriptGuess(self._separator + text)

    def _new_guess(self) -> str:
        """Return what was made of a pause, once, when it is settled; empty text otherwise."""
        settled = None if self._task is None else self._task.settled
        if settled is None or self._guess_told:
            return ""
        self._guess_told = bool(settled.recognised.text)
        return settled.recognised.text

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """The audio breaks off; yield the transcript of the utterance that was under way."""
        ended = await run_in_thread(self._executor, self._splitter.end)
        if ended is not None:
            async with aclosing(self._settle(ended)) as transcripts:
                async for transcript in transcripts:
                    yield transcript

    async def close(self) -> None:
        """Release everything. Idempotent."""
        try:
            await self._withdraw()
        finally:
            await release_in_thread(self._executor, self._splitter.close)

    async def _begin(self, pcm: Pcm16) -> None:
        await self._withdraw()
        self._task = TranscriptTask(self._transcribe(pcm), length=len(pcm))

    async def _withdraw(self) -> None:
        task, self._task = self._task, None
        self._guess_told = False
        if task is not None:
            await task.aclose()

    async def _settle(self, ended: UtteranceEnded) -> AsyncGenerator[TranscriptOutput, None]:
        """The transcripts of a whole utterance: nothing where nothing was understood, and nothing to be replaced."""
        if self._task is None or self._task.length != len(ended.pcm):
            await self._begin(ended.pcm)
        assert self._task is not None
        shown = False
        async for text in self._task:
            said, start_ms = text.recognised, ended.start_ms
            if said.text and not text.settled:
                shown = True
                yield TranscriptOutput(self._separator + said.text, interim=True, start_ms=start_ms)
            elif said.text:
                words = tuple(Word(one.text, start_ms + one.start_ms, start_ms + one.end_ms) for one in said.words)
                hearing = None if said.hearing is None else said.hearing.shifted(start_ms)
                yield TranscriptOutput(self._separator + said.text, start_ms=start_ms, words=words, hearing=hearing)
                self._separator = " "
            elif text.settled and shown:
                yield TranscriptOutput("", start_ms=start_ms)
        await self._withdraw()


class _NotLive:
    """A LiveText that reads nothing: an upstream gets utterances whole."""

    def read(self, utterance: Utterance) -> str | None:
        return ""

    def end(self) -> None:
        pass


class TranscriptTask:
    """A transcript that is made whether or not anybody reads it yet.

    Iterating gives the texts that replace one another, the newest of those that were not read, and last the settled.

    ``length`` is that of the utterance, in samples. Iterating raises what making the transcript raised. Whoever made it
    has to close it.
    """

    def __init__(self, texts: AsyncGenerator[TranscriptText, None], *, length: int) -> None:
        self.length = length
        self._newest: TranscriptText | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(texts), name="transcript")

    def __aiter__(self) -> TranscriptTask:
        return self

    async def __anext__(self) -> TranscriptText:
        while self._newest is None:
            if self._task.done():
                self._task.result()
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        newest, self._newest = self._newest, None
        return newest

    @property
    def settled(self) -> TranscriptText | None:
        """The settled text, before anybody reads it; None while there is none, or where making it failed."""
        newest = self._newest
        return newest if newest is not None and newest.settled else None

    async def aclose(self) -> None:
        """Withdraw the request of one that is not finished. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, texts: AsyncGenerator[TranscriptText, None]) -> None:
        try:
            async with aclosing(texts):
                async for text in texts:
                    self._newest = text
                    self._changed.set()
        finally:
            # The task is done only in a later pass of the loop than this.
            asyncio.get_running_loop().call_soon(self._changed.set)


# Utterances written down by an upstream.

#: The most that is read of one transcript, in bytes: a thousand times what anybody says in half a minute.
_MOST_BYTES: Final = 1 << 20
#: What a server says that does not stream; "upstream" is another word.
_STREAMING: Final = re.compile(r"\bstream", re.IGNORECASE)

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]


@dataclass(frozen=True, slots=True)
class TranscriptText:
    """What an utterance says: so far, or with ``settled`` as a whole."""

    recognised: Recognised
    settled: bool


class RemoteTranscriber:
    """Has utterances written down; ``fields`` are further fields of every form.

    Texts are streamed where the upstream streams them. With ``word_times`` they are asked for instead: no server gives
    both.
    """

    def __init__(self, pool: Pool, *, word_times: bool) -> None:
        self._pool = pool
        self._word_times = word_times
        #: Whether the upstreams may stream: none has refused to.
        self._streams = not word_times

    async def transcribe(
        self, pcm: Pcm16, *, fields: Mapping[str, str], request_id: str
    ) -> AsyncGenerator[TranscriptText, None]:
        """Yield texts that replace one another, and last the settled one.

        Raises what the upstream's refusal means, and EngineFailed.
        """
        streams = self._streams
        try:
            async with aclosing(self._ask(pcm, fields, request_id, streams=streams)) as texts:
                async for text in texts:
                    yield text
            return
        except InvalidRequest as refused:
            if not streams or _STREAMING.search(refused.message) is None:
                raise
        self._streams = False
        async with aclosing(self._ask(pcm, fields, request_id, streams=False)) as texts:
            async for text in texts:
                yield text

    async def _ask(
        self, pcm: Pcm16, fields: Mapping[str, str], request_id: str, *, streams: bool
    ) -> AsyncGenerator[TranscriptText, None]:
        form = {"model": self._pool.model or "", "response_format": "json", **fields}
        if self._word_times:
            form |= {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        elif streams:
            form["stream"] = "true"
        body, content_type = _form(form, pcm)
        headers = {
            "Content-Type": content_type,
            "X-Request-Id": request_id,
            "Accept": "application/json, text/event-stream",
        }
        async with self._pool.post("audio/transcriptions", body, headers=headers) as answer:
            if answer.content_type.startswith("text/event-stream"):
                async with aclosing(_events(answer)) as texts:
                    async for text in texts:
                        yield text
            else:
                yield TranscriptText(await _whole(answer), settled=True)


def _form(fields: Mapping[str, str], pcm: Pcm16) -> tuple[bytes, str]:
    """The body with its type (RFC 7578); fields without a value are left out."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
        if value
    ]
    data = pcm.astype("<i2").tobytes()
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="speech.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    ).encode()
    wav = wav_header(sample_rate=SAMPLE_RATE, channels=1, data_bytes=len(data)) + data
    return b"".join(
        (*parts, head, wav, f"\r\n--{boundary}--\r\n".encode())
    ), f"multipart/form-data; boundary={boundary}"


async def _whole(answer: UpstreamAnswer) -> Recognised:
    """The transcript of one JSON object."""
    body = bytearray()
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > _MOST_BYTES:
                raise EngineFailed("the upstream's transcript has no end")
    try:
        check_values(body, MAX_BODY_VALUES)
        content = orjson.loads(body)
    except (InvalidFrame, ValueError):
        content = None
    if not isinstance(content, dict) or not isinstance(text := content.get("text"), str):
        raise EngineFailed("the upstream sent a transcript that cannot be read")
    return Recognised(text.strip(), _words(content.get("words")), _hearing(content))


def _hearing(content: Mapping[str, Any]) -> Hearing:
    """What the upstream says of the transcript; no segments where one of them is incomplete."""
    language, told = content.get("language"), content.get("segments")
    found = language_name(language.lower()) if isinstance(language, str) and language else None
    segments: list[HeardSegment] = []
    for one in told if isinstance(told, list) else ():
        try:
            segment = msgspec.convert(one, _Segment)
        except msgspec.ValidationError:
            return Hearing(found)
        segments.append(segment.heard())
    return Hearing(found, tuple(segments))


class _Segment(msgspec.Struct, frozen=True):
    """A segment of ``verbose_json``."""

    text: str
    start: _Seconds
    end: _Seconds
    tokens: list[int]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float = 0.0

    def heard(self) -> HeardSegment:
        return HeardSegment(
            self.text.strip(),
            round(self.start * 1000),
            round(self.end * 1000),
            tokens=tuple(self.tokens),
            avg_logprob=self.avg_logprob,
            compression_ratio=self.compression_ratio,
            no_speech_prob=self.no_speech_prob,
            temperature=self.temperature,
        )


def _words(told: object) -> tuple[Word, ...]:
    """The words with their times; none where they are not told in order, with sound times."""
    words: list[Word] = []
    for entry in told if isinstance(told, list) else ():
        if not isinstance(entry, dict) or not isinstance(text := entry.get("word"), str):
            return ()
        start, end = entry.get("start"), entry.get("end")
        if not isinstance(start, int | float) or not isinstance(end, int | float) or not 0 <= start <= end < 1e6:
            return ()
        words.append(Word(text.strip(), round(start * 1000), round(end * 1000)))
    return tuple(words)


async def _events(answer: UpstreamAnswer) -> AsyncGenerator[TranscriptText, None]:
    reader, transcript = EventReader(), _StreamedTranscript(answer.upstream)
    shown = ""
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            for event in reader.feed(chunk):
                transcript.read(event)
            if transcript.done:
                await answer.finish(chunks)
                break
            answer.shows_work = reader.grows
            if (text := transcript.text) and text != shown:
                shown, answer.shows_work = text, True
                yield TranscriptText(Recognised(text), settled=False)
        else:
            for event in reader.finish():
                transcript.read(event)
    if not transcript.complete:
        raise EngineFailed("the upstream's transcript ended before its end")
    yield TranscriptText(Recognised(transcript.text), settled=True)


class _StreamedTranscript:
    """Reads the events of one transcript, in OpenAI's form, in vLLM's, or as objects that each are a piece of text."""

    def __init__(self, upstream: str) -> None:
        #: Whether an event has said that this is all.
        self.done = False
        self._upstream = upstream
        self._pieces: list[str] = []
        self._bytes = 0
        self._bare = False

    @property
    def complete(self) -> bool:
        """Whether the stream may end here: bare pieces of text have no end of their own."""
        return self.done or self._bare

    @property
    def text(self) -> str:
        return whole_text("".join(self._pieces)).strip()

    def read(self, event: ServerSentEvent) -> None:
        """Raises what an error event means, and EngineFailed for garbage."""
        if self.done:
            return
        if event.data.strip() == DONE:
            self.done = True
            return
        content = event_content(event, upstream=self._upstream)
        match content.get("type"):
            case "transcript.text.delta":
                self._add(content.get("delta"))
            case "transcript.text.done":
                if isinstance(text := content.get("text"), str):
                    self._pieces, self._bytes = [], 0
                    self._add(text)
                self.done = True
            case None if isinstance(choices := content.get("choices"), list):
                for choice in choices[:1]:
                    delta = choice.get("delta") if isinstance(choice, dict) else None
                    self._add(delta.get("content") if isinstance(delta, dict) else None)
            case None if isinstance(text := content.get("text"), str):
                self._bare = True
                self._add(text)

    def _add(self, text: Any) -> None:
        if isinstance(text, str):
            self._bytes += len(text)
            if self._bytes > _MOST_BYTES:
                raise EngineFailed("the upstream's transcript has no end")
            self._pieces.append(text)
