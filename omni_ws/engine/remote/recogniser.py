"""RemoteRecogniser: speech recognition by any server that has ``/v1/audio/transcriptions``."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Final, TypeAlias

import httpx
import msgspec

from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Pcm16
from omni_ws.core.chunks import HeardSegment, Hearing, Word
from omni_ws.core.json_values import MAX_BODY_VALUES, json_or_none, language_name
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    ListenerSlots,
    Recognised,
    Utterance,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.base import EngineCapabilities, GenerationRequest
from omni_ws.engine.remote.event_stream import DONE, ServerSentEvent, event_content, whole_text
from omni_ws.engine.remote.settings import RemoteAsrSettings
from omni_ws.engine.remote.upstream import OnUpstreams, UpstreamAnswer
from omni_ws.errors import EngineFailed, InvalidRequest

#: Most models process at most half a minute at once.
_UTTERANCE_LIMITS: Final = UtteranceLimits(cut_after=24 * SAMPLE_RATE, longest=29 * SAMPLE_RATE)
#: The limit on the size of a transcript, in bytes: a thousand times what anybody says in half a minute.
_MOST_BYTES: Final = 1 << 20
#: Recognises a server's message that it does not support streaming, but not the word "upstream".
_STREAMING: Final = re.compile(r"\bstream", re.IGNORECASE)

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]


class RemoteRecogniser(OnUpstreams):
    """A Recogniser that sends complete utterances to an upstream; interim texts are what the upstream streams.

    With ``word_times`` in the settings, word times are requested instead of a stream: no server supports both.
    """

    def __init__(self, settings: RemoteAsrSettings) -> None:
        super().__init__(settings, says="transcription ")
        self.settings = settings
        #: No limit by speed: an upstream that is overloaded refuses requests itself.
        self.slots = ListenerSlots(sys.maxsize)
        #: Whether to request streams: no upstream has refused to stream so far.
        self.streams = not settings.word_times

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("temperature", "max_tokens", "stop"),
            languages=self.settings.languages,
            word_times=self.settings.word_times,
            keywords=True,
            transcript_guesses=self.speculates,
        )

    @property
    def speculates(self) -> bool:
        """Whether utterances are transcribed at each pause: by default, if no upstream is on another machine."""
        wanted = self.settings.speculate
        return all(one.is_local for one in self.pool.upstreams) if wanted is None else wanted

    async def start(self) -> None:
        await super().start()
        self.streams = not self.settings.word_times

    def note_no_stream(self) -> None:
        """Note that an upstream has refused to stream: streams are not requested any more."""
        self.streams = False

    def transcriber(self, request: GenerationRequest) -> RemoteTranscriber:
        return RemoteTranscriber(self, request)


class RemoteTranscriber:
    """A Transcriber, and its LiveText, which has no texts because an upstream gets complete utterances only."""

    def __init__(self, recogniser: RemoteRecogniser, request: GenerationRequest) -> None:
        self.limits = _UTTERANCE_LIMITS
        self.readings = 0
        self._recogniser = recogniser
        self._pool = recogniser.pool
        self.speculates = recogniser.speculates
        self._headers = {"X-Request-Id": request.request_id, "Accept": "application/json, text/event-stream"}
        temperature = request.sampling.get("temperature")
        self._fields = {
            "language": request.language or "",
            "prompt": request.expected,
            "temperature": "" if temperature is None else f"{temperature:g}",
        }

    def live_text(self) -> RemoteTranscriber:
        return self

    def read(self, utterance: Utterance) -> str:
        return ""

    def end(self) -> None:
        pass

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool,
        tell: Callable[[str], None],
        tell_untimed: Callable[[Recognised], None],
    ) -> asyncio.Task[Recognised]:
        return asyncio.create_task(self._transcribed(pcm, tell), name="transcript")

    async def _transcribed(self, pcm: Pcm16, tell: Callable[[str], None]) -> Recognised:
        """Return an upstream's transcript. Raises the error that its refusal means, or EngineFailed."""
        streams = self._recogniser.streams
        try:
            return await self._ask(pcm, tell, streams=streams)
        except InvalidRequest as refused:
            if not streams or _STREAMING.search(refused.message) is None:
                raise
        self._recogniser.note_no_stream()
        return await self._ask(pcm, tell, streams=False)

    async def _ask(self, pcm: Pcm16, tell: Callable[[str], None], *, streams: bool) -> Recognised:
        form = {"model": self._pool.model or "", "response_format": "json", **self._fields}
        if self._recogniser.settings.word_times:
            form |= {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        elif streams:
            form["stream"] = "true"
        samples = pcm.astype("<i2").tobytes()
        wav = wav_header(sample_rate=SAMPLE_RATE, channels=1, data_bytes=len(samples)) + samples
        told = {name: value for name, value in form.items() if value}
        # The pool chooses the upstream; this URL only serves to encode the form.
        body = httpx.Request("POST", "http://upstream", data=told, files={"file": ("speech.wav", wav, "audio/wav")})
        headers = {"Content-Type": body.headers["Content-Type"], **self._headers}
        async with self._pool.post("audio/transcriptions", body.read(), headers=headers) as answer:
            if answer.content_type.startswith("text/event-stream"):
                return await _streamed(answer, tell)
            return await _whole(answer)


async def _whole(answer: UpstreamAnswer) -> Recognised:
    """Return the transcript in a response that is one JSON object."""
    body = bytearray()
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > _MOST_BYTES:
                raise EngineFailed("the upstream's transcript has no end")
    content = json_or_none(body, MAX_BODY_VALUES)
    if not isinstance(content, dict) or not isinstance(text := content.get("text"), str):
        raise EngineFailed("the upstream sent a transcript that cannot be read")
    return Recognised(text.strip(), _words(content.get("words")), _hearing(content))


def _hearing(content: Mapping[str, Any]) -> Hearing:
    """Return the upstream's information about the transcript; without segments if one of them is incomplete."""
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
    """Return the words with their times; empty if they are not in order or a time is invalid."""
    words: list[Word] = []
    for entry in told if isinstance(told, list) else ():
        if not isinstance(entry, dict) or not isinstance(text := entry.get("word"), str):
            return ()
        start, end = entry.get("start"), entry.get("end")
        if not isinstance(start, int | float) or not isinstance(end, int | float) or not 0 <= start <= end < 1e6:
            return ()
        words.append(Word(text.strip(), round(start * 1000), round(end * 1000)))
    return tuple(words)


async def _streamed(answer: UpstreamAnswer, tell: Callable[[str], None]) -> Recognised:
    """Return the transcript in a stream of events; ``tell`` is called with the text so far."""
    transcript, shown = _StreamedTranscript(answer.upstream), ""
    async with aclosing(answer.events()) as pieces:
        async for events, grows in pieces:
            for event in events:
                transcript.read(event)
            if transcript.done:
                await answer.finish(pieces)
                break
            text = transcript.text
            is_new = bool(text) and text != shown
            answer.note(shows_work=is_new or grows)
            if is_new:
                shown = text
                tell(text)
    if not transcript.complete:
        raise EngineFailed("the upstream's transcript ended before its end")
    return Recognised(transcript.text)


class _StreamedTranscript:
    """A reader of the events of one transcript: OpenAI's, vLLM's, or objects with a piece of text each."""

    def __init__(self, upstream: str) -> None:
        #: Whether an event has ended the transcript.
        self.done = False
        self._upstream = upstream
        self._pieces: list[str] = []
        self._bytes = 0
        self._bare = False

    @property
    def complete(self) -> bool:
        """Whether the stream may end here. Objects with pieces of text have no event for the end."""
        return self.done or self._bare

    @property
    def text(self) -> str:
        return whole_text("".join(self._pieces)).strip()

    def read(self, event: ServerSentEvent) -> None:
        """Process an event. Raises the error of an error event, or EngineFailed for an event that cannot be read."""
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
