"""Engines without models, for tests of clients and of the server: one echoes its input, one plays a script."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import parse_audio_format
from omni_ws.audio.pcm import PCM16, Pcm16, Samples, WholeFrames
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    Task,
    Usage,
)
from omni_ws.engine.answer_limit import AnswerText, WordCounter
from omni_ws.engine.base import (
    AudioOutput,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
)
from omni_ws.engine.clauses import own_part
from omni_ws.engine.threads import decoded_in_slices
from omni_ws.errors import EngineFailed, InvalidValue

_WORD: Final = re.compile(r"\s*\S+\s*$|\s*\S+|\s+")
#: Text and raw audio are converted on the event loop in slices of this size, which take about a millisecond.
_SLICE_BYTES: Final = 64 * 1024
#: After this many outputs without a pause, other tasks get to run.
_OUTPUTS_AT_A_STRETCH: Final = 32

CAPABILITIES: Final = EngineCapabilities(
    input_modalities=frozenset(Modality),
    output_modalities=frozenset({OutputModality.TEXT, OutputModality.AUDIO}),
    tasks=frozenset(Task),
    extend=True,
    voices=("echo",),
    sampling=frozenset({"max_tokens", "stop"}),
    sampling_no_ops=frozenset({"temperature", "top_p", "seed"}),
    stage_params=frozenset({"fake.fail_after_chunks"}),
    raw_prompts=True,
    speech_in_history=True,
    pictures_in_history=frozenset({Modality.IMAGE, Modality.VIDEO}),
    media_limits=frozenset({"video_min_frames", "video_max_frames", "video_total_pixels"}),
)


class _ModelFree:
    """Base class of EchoEngine and ScriptedEngine: the methods of Engine that need no model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = name
        self.state = EngineState.STARTING
        self.active_requests = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return CAPABILITIES

    def describe(self) -> tuple[str, ...]:
        return ("this engine only echoes its input; it is meant for tests",)

    async def start(self) -> None:
        self.state = EngineState.OK

    async def stop(self) -> None:
        self.state = EngineState.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSettings:
    """Settings of an EchoEngine; delays and durations are in milliseconds.

    ``fail_after_chunks`` is the number of outputs after which each request fails; None for no failure. ``reply`` is the
    answer to each request in place of the echo.
    """

    first_chunk_delay_ms: int = 0
    chunk_interval_ms: int = 0
    chunk_ms: int = 100
    fail_after_chunks: int | None = None
    reply: str | None = None


class EchoEngine(_ModelFree):
    """An engine that echoes its input: text word by word, audio unchanged, images and video as a count.

    The engine answers while the input is still arriving, unless ``EchoSettings.reply`` is set. All audio of an answer
    has the rate of the first.
    """

    def __init__(self, settings: EchoSettings | None = None) -> None:
        super().__init__("fake")
        self.settings = settings or EchoSettings()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        echo = _Echo(request, self.settings.chunk_ms)
        try:
            emission = _Emission(out, self.settings, fail_after=self._fail_after(request))
            async with aclosing(echo.outputs(self.settings.reply)) as batches:
                async for batch in batches:
                    await emission.write_all(iter(batch))
            emission.fail_as_configured()
            out.write(Finished(echo.answer.reached or FinishReason.STOP, echo.usage()))
        finally:
            echo.close()
            self.active_requests -= 1

    def _fail_after(self, request: GenerationRequest) -> int | None:
        wanted = request.stage_params.get("fake", {}).get("fail_after_chunks", self.settings.fail_after_chunks)
        if wanted is None or (type(wanted) is int and wanted >= 0):
            return wanted
        raise InvalidValue(
            "fail_after_chunks must be a whole number, 0 or greater", param="stage_params.fake.fail_after_chunks"
        )


class _Emission:
    """The writer of one answer, with the configured delays and the configured failure, if any.

    After a delay, a timer's callback writes the next output, as in an engine that gets a callback for each output of a
    model in another process. The task that writes the answer wakes only when the client does not read.
    """

    def __init__(self, out: OutputWriter, settings: EchoSettings, *, fail_after: int | None) -> None:
        self._out = out
        self._fail_after = fail_after
        self._emitted = 0
        #: The delay before the next output, and before all later ones.
        self._delay_sec = settings.first_chunk_delay_ms / 1000
        self._interval_sec = settings.chunk_interval_ms / 1000
        self._timer: asyncio.TimerHandle | None = None

    async def write_all(self, outputs: Iterator[EngineOutput]) -> None:
        """Write all outputs, and wait while the client does not read."""
        out = self._out
        for output in outputs:
            if self._delay_sec:
                await self._write_in_time(output, outputs)
            else:
                self.fail_as_configured()
                if self._emitted % _OUTPUTS_AT_A_STRETCH == _OUTPUTS_AT_A_STRETCH - 1:
                    await asyncio.sleep(0)  # an echo never blocks, so let other tasks run
                self._emitted += 1
                self._delay_sec = self._interval_sec
                out.write(output)
            if out.full:
                await out.drain()

    def fail_as_configured(self) -> None:
        """Raise EngineFailed if ``fail_after`` outputs were written."""
        if self._emitted == self._fail_after:
            raise EngineFailed(f"the fake engine failed after {self._fail_after} chunks, as configured")

    async def _write_in_time(self, output: EngineOutput, following: Iterator[EngineOutput]) -> None:
        """Write ``output`` and then ``following`` in timer callbacks, while there are delays and the client reads."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait(output, following, done)
        try:
            await done
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, output: EngineOutput, following: Iterator[EngineOutput], done: asyncio.Future[None]) -> None:
        """Start the timer whose callback writes ``output``."""
        self.fail_as_configured()
        self._timer = done.get_loop().call_later(self._delay_sec, self._emit, output, following, done)

    def _emit(self, output: EngineOutput, following: Iterator[EngineOutput], done: asyncio.Future[None]) -> None:
        """Write ``output`` in the callback of its timer, and start the next timer or set ``done``."""
        if done.done():  # cancelled in the same pass
            return
        self._emitted += 1
        self._delay_sec = self._interval_sec
        try:
            self._out.write(output)
            after = next(following, None) if self._delay_sec and not self._out.full else None
            if after is None:
                done.set_result(None)
            else:
                self._wait(after, following, done)
        except Exception as error:
            done.set_exception(error)


class _Echo:
    """A converter of one request's input to the outputs that echo it."""

    def __init__(self, request: GenerationRequest, chunk_ms: int) -> None:
        self.answer = AnswerText(request.sampling)
        self._request = request
        self._chunk_ms = chunk_ms
        self._writes = request.tells_text
        self._speaks = OutputModality.AUDIO in request.modalities
        self._decoder: AudioDecoder | None = None
        #: In place of a decoder, for 16-bit samples that need no conversion.
        self._unchanged: WholeFrames | None = None
        self._source: AudioFormat | None = None
        #: The number of the last chunk of audio.
        self._last_id: int | None = None
        #: The rate of the first audio: an answer has a single rate.
        self._sample_rate: int | None = None
        self._seen = {Modality.IMAGE: 0, Modality.VIDEO: 0}
        self._words_in = WordCounter()
        self._audio_ms = {"in": 0.0, "out": 0.0}

    def usage(self) -> Usage:
        return Usage(
            input_tokens=self._words_in.words,
            output_tokens=self.answer.words,
            input_audio_ms=round(self._audio_ms["in"]),
            output_audio_ms=round(self._audio_ms["out"]),
        )

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    async def outputs(self, reply: str | None) -> AsyncGenerator[Iterable[EngineOutput]]:
        """Yield the outputs for each chunk, in order, and a sentence at the end that counts images and video chunks.

        With ``reply``, yield only the reply, at the end of the input.
        """
        async for chunk in own_part(self._request.input):
            async for audio in self._audio(chunk) if chunk.modality is Modality.AUDIO else self._flush_audio():
                if reply is None and self.answer.reached is None:
                    yield audio
            if chunk.modality is Modality.AUDIO:
                continue
            if chunk.modality is not Modality.TEXT:
                self._seen[chunk.modality] += 1
                continue
            for piece in _slices(chunk):
                text = piece.payload.decode()
                self._words_in.feed(text)
                if reply is None:  # cut to the limit, also once that is reached
                    yield self._text(text)
        async for audio in self._flush_audio():
            if reply is None and self.answer.reached is None:
                yield audio
        if reply is not None:
            yield self._text(reply)
        else:
            yield self._whole(self._counts())
        yield _words(self.answer.finish())

    # text

    def _text(self, text: str) -> Iterator[TextOutput]:
        if self._writes:
            yield from _words(self.answer.feed(text))

    def _whole(self, text: str) -> Iterator[TextOutput]:
        """Yield ``text`` as one output, without an end that may be the beginning of a stop string."""
        if self._writes and (passed := self.answer.feed(text)):
            yield TextOutput(passed)

    def _counts(self) -> str:
        """Return a sentence with the number of images and video chunks."""
        # Video is not decoded, so a chunk counts as a frame, and other limits on videos have no effect.
        most = int(self._request.options.media_limits.get("video_max_frames", self._seen[Modality.VIDEO]))
        images, video = self._seen[Modality.IMAGE], min(most, self._seen[Modality.VIDEO])
        counts = [
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((images, "image"), (video, "video chunk"))
            if count
        ]
        return f"Received {' and '.join(counts)}." if counts else ""

    # audio

    async def _audio(self, chunk: InputChunk) -> AsyncGenerator[Iterable[AudioOutput], None]:
        source = self._request.input_audio
        if chunk.format is not None:
            source = parse_audio_format(chunk.format, source)
        if source is not self._source and source != self._source:
            async for audio in self._flush_audio():
                yield audio
            self._begin_audio(source)
        if self._unchanged is not None:
            for piece in _slices(chunk):
                yield self._outputs(np.frombuffer(self._unchanged.take(piece.payload), PCM16), source.sample_rate)
            return
        decoder = self._decoder
        assert decoder is not None
        if source.is_raw:  # decoded on the event loop
            for piece in _slices(chunk):
                yield self._outputs(decoder.decode(piece.payload), decoder.sample_rate)
            return
        for piece in _slices(chunk):
            pieces = decoder.pieces(piece.payload, begins_chunk=not piece.continues)
            async for audio in self._unpacked(decoder, pieces, chunk.sequence_id):
                yield audio

    async def _unpacked(
        self, decoder: AudioDecoder, pieces: Iterator[Samples], sequence_id: int | None
    ) -> AsyncGenerator[Iterable[AudioOutput], None]:
        async with aclosing(decoded_in_slices(self._request.lane, pieces, decoder.sample_rate)) as slices:
            async for decoded in slices:
                for samples in decoded:
                    yield self._outputs(samples, decoder.sample_rate)
        self._tell_stray(decoder, sequence_id)

    def _begin_audio(self, source: AudioFormat) -> None:
        self._source = source
        self._sample_rate = rate = self._sample_rate or source.sample_rate
        if source == AudioFormat(AudioEncoding.PCM16, rate):
            self._unchanged = WholeFrames(PCM16.itemsize)
        else:
            self._decoder = AudioDecoder(source, sample_rate=rate)

    async def _flush_audio(self) -> AsyncGenerator[Iterable[AudioOutput], None]:
        """End the current part of audio, and yield the samples that its decoder still holds."""
        decoder = self._decoder
        if decoder is None:
            self._unchanged = self._source = None
            return
        try:
            if decoder.source.is_raw:
                yield self._outputs(decoder.flush(), decoder.sample_rate)
            else:
                async for audio in self._unpacked(decoder, decoder.last_pieces(), self._last_id):
                    yield audio
        finally:
            decoder.close()
            self._decoder = self._source = None

    def _tell_stray(self, decoder: AudioDecoder, sequence_id: int | None) -> None:
        self._last_id = sequence_id
        if (stray := decoder.take_stray()) is not None:
            self._request.warn(stray.about(sequence_id=sequence_id))

    def _outputs(self, samples: Samples | Pcm16, sample_rate: int) -> list[AudioOutput]:
        duration = len(samples) * 1000 / sample_rate
        self._audio_ms["in"] += duration
        if not len(samples) or not self._speaks:
            return []
        self._audio_ms["out"] += duration
        step = max(1, sample_rate * self._chunk_ms // 1000)
        if len(samples) <= step:
            return [AudioOutput(samples, sample_rate)]
        return [AudioOutput(samples[start : start + step], sample_rate) for start in range(0, len(samples), step)]


def _words(text: str) -> Iterator[TextOutput]:
    return map(TextOutput, _WORD.findall(text))


def _slices(chunk: InputChunk) -> Iterable[InputChunk]:
    """Cut large text and audio into slices."""
    if len(chunk.payload) <= _SLICE_BYTES or chunk.modality not in (Modality.TEXT, Modality.AUDIO):
        return (chunk,)
    return _cut(chunk)


def _cut(chunk: InputChunk) -> Iterator[InputChunk]:
    content = chunk.payload.decode() if chunk.modality is Modality.TEXT else chunk.payload
    for start in range(0, len(content), _SLICE_BYTES):
        piece = content[start : start + _SLICE_BYTES]
        payload = piece.encode() if isinstance(piece, str) else piece
        yield msgspec.structs.replace(chunk, payload=payload, continues=chunk.continues or start > 0)


class ScriptedEngine(_ModelFree):
    """An engine that writes the same outputs for every request, after its input has ended.

    ``script`` may also contain exceptions, which are raised, and callables, with which tests synchronise: they are
    called, and an awaitable result is awaited. If the script has no Finished, the answer ends with FinishReason.STOP.
    ``requests`` records the requests.
    """

    def __init__(self, script: Iterable[EngineOutput | Exception | Callable[[], object]]) -> None:
        super().__init__("scripted")
        self.script = tuple(script)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        self.requests.append(request)
        try:
            async for _ in request.input:
                pass
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    result = step()
                    if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future):
                        await result
                    continue
                out.write(step)
                if isinstance(step, Finished):
                    return
                await out.drain()
            out.write(Finished(FinishReason.STOP, Usage()))
        finally:
            self.active_requests -= 1
