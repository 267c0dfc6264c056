"""Decodes the input of a request: chunks to samples, text and pixels. Shared by all engines.

Decoding runs in threads. A *hop* is one call in a thread; all chunks that wait when it starts are decoded in it, so
that a stream of 20 ms frames under load does not cost a hop for each frame. Hops run in the ListeningThreads, which all
sessions share fairly, and have a slice of audio at most; those that need a slot, for images and video, run in the
``executor`` of the engine. What takes less time than a thread takes to wake (``InputDecoder.decodes_at_once``) is
decoded on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.history import Speech
from omni_ws.core.quota import reserved
from omni_ws.engine.base import GenerationRequest, InputSource
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoded_parts import MODALITIES, AudioPart, DecodedPart, VideoPart, joined, reserved_size, size_of
from omni_ws.engine.input_decoder import InputDecoder, SlotRequest
from omni_ws.engine.listening_threads import SLICE_SEC, Lane
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import OmniError, UnsupportedModality
from omni_ws.media.limits import MediaLimits
from omni_ws.profiler import events

#: The threads that an engine decodes input in.
DECODING_THREADS: Final = 4
#: The sample rate of speech for most models, in Hz.
DEFAULT_SAMPLE_RATE: Final = 16_000

#: The limit on input that was read from the source but not decoded, in bytes.
WAITING_BYTES = 256 * 1024

#: A hop ends when it has decoded this many bytes: that bounds its duration, and the memory that a long file or a
#: decompression bomb takes.
HOP_BYTES = 4 * 1024 * 1024

#: Of decoded audio, float32.
BYTES_PER_SAMPLE: Final = 4

#: How many times its estimated duration earlier speech may have: the nominal rate of compressed audio is 64 kbit/s, and
#: Opus at 12 kbit/s lasts five times as long.
MAX_DURATION_FACTOR = 6

#: The estimated memory of a chunk besides its payload.
CHUNK_OVERHEAD_BYTES = 128

#: No limits: images and video keep their size.
NO_LIMITS = MediaLimits()


async def decode_input(
    source: InputSource,
    *,
    audio: AudioFormat,
    sample_rate: int,
    executor: Executor,
    share: MediaShare,
    lane: Lane | None = None,
    limits: MediaLimits = NO_LIMITS,
    warn: Callable[[OmniError], None] = lambda error: None,
) -> AsyncGenerator[DecodedPart, None]:
    """Yield the decoded parts of an input, in order, as it arrives.

    ``lane`` is the place of the session in the ListeningThreads; without one, the request has its own.
    ``audio`` is the format of chunks that do not name one. Audio is decoded to mono at ``sample_rate`` Hz; images and
    video are scaled to ``limits``. ``warn`` is told what was left out. Close the generator when stopping early.

    Memory is reserved in ``share`` before it is allocated. A part remains reserved until the next one is requested; a
    consumer that keeps it longer reserves it anew.

    Raises UnsupportedFormat for input that cannot be decoded; InvalidValue; PayloadTooLarge or EngineOverloaded when
    memory runs out. The error follows everything decoded before it, and its ``sequence_id`` is that of the chunk.
    Exceptions of ``source`` are passed on.
    """
    decoder = InputDecoder(audio, sample_rate, limits, share)
    threads = _Threads(lane or Lane(), executor, sample_rate)
    waiting: Channel[InputChunk] = Channel(WAITING_BYTES, cost=lambda chunk: len(chunk.payload) + CHUNK_OVERHEAD_BYTES)
    reader = asyncio.create_task(_read(source, waiting), name="input reader")
    try:
        async for chunk in waiting:
            batch = [chunk]
            while (following := waiting.take_nowait()) is not None:
                batch.append(following)
            where = None if decoder.decodes_at_once(batch) else threads
            async for part in _hops(decoder, decoder.decode(batch), where, share):
                yield part
            decoder.tell(warn)
        where = None if decoder.decodes_at_once() else threads
        async for part in _hops(decoder, decoder.finish(), where, share):
            yield part
        decoder.tell(warn)
    finally:
        reader.cancel()
        waiting.discard()
        await asyncio.gather(reader, return_exceptions=True)
        decoder.close()
        share.give(decoder.yielded_bytes)


async def decode_request(
    request: GenerationRequest,
    takes: Set[Modality],
    *,
    executor: Executor,
    share: MediaShare,
    sample_rate: int = DEFAULT_SAMPLE_RATE,
) -> AsyncGenerator[DecodedPart, None]:
    """Yield the parts of a request for a task that takes only some modalities, as ``decode_input`` does.

    Raises UnsupportedModality for others.
    """
    decoded = decode_input(
        request.input,
        audio=request.input_audio,
        sample_rate=sample_rate,
        executor=executor,
        share=share,
        lane=request.lane,
        limits=MediaLimits(**request.options.media_limits),  # type: ignore[arg-type]  # checked on the wire
        warn=request.warn,
    )
    async with aclosing(decoded) as parts:
        async for part in parts:
            if (modality := MODALITIES[type(part)]) not in takes:
                message = f"task {request.task} takes {' and '.join(sorted(takes))}, not {modality}"
                raise UnsupportedModality(message, param="modality")
            yield part


@dataclass(frozen=True, slots=True)
class Chunks:
    """An InputSource for input that is complete."""

    chunks: Sequence[InputChunk]

    async def __aiter__(self) -> AsyncIterator[InputChunk]:
        for chunk in self.chunks:
            yield chunk


async def decode_speech(
    speech: Speech, *, sample_rate: int, executor: Executor, share: MediaShare, lane: Lane
) -> Samples | None:
    """Decode speech of an earlier request to mono at ``sample_rate`` Hz.

    Returns None when it turns out many times longer than estimated, as silence compressed to almost nothing may be. The
    samples remain reserved in ``share``.
    """
    most = max(1.0, speech.audio_ms / 1000 * MAX_DURATION_FACTOR) * sample_rate
    blocks: list[Samples] = []
    length = 0
    source = Chunks(speech.chunks)
    decoded = decode_input(
        source, audio=speech.format, sample_rate=sample_rate, executor=executor, share=share, lane=lane
    )
    async with aclosing(decoded) as parts:
        async for part in parts:
            if not isinstance(part, AudioPart):
                continue
            share.take(part.samples.nbytes)
            blocks.append(part.samples)
            length += len(part.samples)
            if length > most:
                share.give(sum(block.nbytes for block in blocks))
                return None
    if not blocks:
        return np.zeros(0, np.float32)
    with reserved(share, sum(block.nbytes for block in blocks)):
        return np.concatenate(blocks)


@dataclass(frozen=True, slots=True)
class _Threads:
    """Where the hops of one input run."""

    lane: Lane
    executor: Executor
    sample_rate: int

    async def hop(self, parts: Iterator[DecodedPart | SlotRequest], share: MediaShare, slot_bytes: int | None) -> _Hop:
        audio_bytes = int(SLICE_SEC * self.sample_rate) * BYTES_PER_SAMPLE
        if slot_bytes is not None:
            async with share.slot(slot_bytes):
                return await run_in_thread(self.executor, _one_hop, parts, share, True, audio_bytes)
        hop = await run_in_thread(self.lane, _one_hop, parts, share, False, audio_bytes)
        self.lane.charge(hop.audio_bytes / (BYTES_PER_SAMPLE * self.sample_rate))
        return hop


async def _hops(
    decoder: InputDecoder, parts: Generator[DecodedPart | SlotRequest], threads: _Threads | None, share: MediaShare
) -> AsyncGenerator[DecodedPart, None]:
    """Run ``parts`` in ``threads``, hop by hop, or at once without them. Yield what they decode."""
    hop = _Hop()
    while hop.more:
        try:
            with events.span("decode", "preprocess_start", "preprocess_end"):
                if threads is None:
                    hop = _one_hop(parts, share, False)
                else:
                    hop = await threads.hop(parts, share, hop.slot_bytes)
        except OmniError as error:
            parts.close()  # it is suspended in a request for a slot, which is refused
            hop = _Hop(more=False, error=error)
        first = True
        while hop.parts:
            if not first:
                await asyncio.sleep(0)  # let other tasks run between the pieces of a long text
            first = False
            given = reserved_size(hop.parts[0])
            yield hop.parts.popleft()
            # The previous part is free only now that the consumer has asked for the next one.
            share.give(decoder.yielded_bytes)
            decoder.yielded_bytes = given
        if hop.error is not None:
            if hop.error.sequence_id is None:
                hop.error.sequence_id = decoder.last_sequence_id
            raise hop.error


@dataclass(frozen=True, slots=True)
class _Hop:
    """The result of a hop."""

    parts: deque[DecodedPart] = field(default_factory=deque)
    more: bool = True
    #: The bytes to reserve for the next hop, when that needs a decoding slot; see SlotRequest.
    slot_bytes: int | None = None
    #: How much of it is audio.
    audio_bytes: int = 0
    #: The error that ended decoding, after ``parts``.
    error: OmniError | None = None


def _one_hop(
    parts: Iterator[DecodedPart | SlotRequest], share: MediaShare, has_slot: bool, most_audio: int = HOP_BYTES
) -> _Hop:
    """Decode parts of about HOP_BYTES, or of audio ``most_audio``; without a slot, stop at the first that needs one."""
    decoded: list[DecodedPart] = []
    size, audio_bytes, more = 0, 0, False
    slot_bytes: int | None = None
    error: OmniError | None = None
    try:
        for part in parts:
            if isinstance(part, SlotRequest):
                if has_slot and not part.size:
                    continue
                more, slot_bytes = True, part.size
                break
            decoded.append(part)
            size += size_of(part)
            if isinstance(part, AudioPart):
                audio_bytes += part.samples.nbytes
            if more := size >= HOP_BYTES or audio_bytes >= most_audio:
                # The rest of a video needs a slot again; an image is complete.
                slot_bytes = 0 if has_slot and isinstance(part, VideoPart) else None
                break
    except OmniError as raised:
        error, more = raised, False
    return _Hop(deque(joined(decoded, share)), more, slot_bytes, audio_bytes, error)


async def _read(source: InputSource, waiting: Channel[InputChunk]) -> None:
    """Copy the source into ``waiting``, with backpressure."""
    try:
        async for chunk in source:
            await waiting.put(chunk)
    except Exception as error:
        waiting.fail(error)
    else:
        waiting.close()
