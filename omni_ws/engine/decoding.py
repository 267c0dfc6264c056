"""Input chunks become what models work on: samples, text, pixels. Shared by all engines.

Decoding runs in worker threads. Whatever chunks wait when a thread is free go there together, so that a stream of
20 ms frames costs one hop for as many frames as have come, not one for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk
from omni_ws.core.quota import counted
from omni_ws.engine.base import InputSource, Speech
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoded_parts import AudioPart, DecodedPart, VideoPart, counted_size, joined, size_of
from omni_ws.engine.input_decoder import InputDecoder, Large
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import OmniError
from omni_ws.media.limits import MediaLimits
from omni_ws.profiler import events

#: Bytes that may wait here, taken from the source but not decoded yet.
WAITING_BYTES = 256 * 1024

#: A thread returns with what it has when it has decoded this much: neither a long file nor a decompression bomb is ever
#: in memory as a whole, and no thread is held for long.
HOP_BYTES = 4 * 1024 * 1024

#: Speech of an earlier turn may be so many times as long as it was counted: Opus at 12 kbit/s takes a fifth of the
#: nominal rate of compressed audio.
LONGER_THAN_COUNTED = 6

#: What a chunk costs to hold besides its payload.
CHUNK_OVERHEAD_BYTES = 128

AS_IT_COMES = MediaLimits()


async def decode_input(
    source: InputSource,
    *,
    audio: AudioFormat,
    sample_rate: int,
    executor: Executor,
    share: MediaShare,
    limits: MediaLimits = AS_IT_COMES,
) -> AsyncGenerator[DecodedPart, None]:
    """Yields the decoded parts in order; ``audio`` is the format of chunks that name none. Images and video keep to
    ``limits``.

    Audio comes as one channel at ``sample_rate`` Hz. What decoding takes is counted in ``share`` before it exists, a
    part until the next one has come: who keeps it longer counts it anew. Raises UnsupportedFormat for what cannot
    be decoded, InvalidValue, PayloadTooLarge or EngineOverloaded for what finds no room, after everything that came
    before it, naming the chunk. What the source raises is raised too.
    """
    decoder = InputDecoder(audio, sample_rate, limits, share)
    waiting: Channel[InputChunk] = Channel(WAITING_BYTES, cost=lambda chunk: len(chunk.payload) + CHUNK_OVERHEAD_BYTES)
    reader = asyncio.create_task(_read(source, waiting), name="input reader")
    try:
        async for chunk in waiting:
            batch = [chunk]
            while (following := waiting.take_nowait()) is not None:
                batch.append(following)
            async for part in _hops(decoder, decoder.decode(batch), executor, share):
                yield part
        async for part in _hops(decoder, decoder.finish(), executor, share):
            yield part
    finally:
        reader.cancel()
        waiting.discard()
        await asyncio.gather(reader, return_exceptions=True)
        decoder.close()
        share.give(decoder.in_hand)


@dataclass(frozen=True, slots=True)
class Chunks:
    """An input that is whole."""

    chunks: Sequence[InputChunk]

    async def __aiter__(self) -> AsyncIterator[InputChunk]:
        for chunk in self.chunks:
            yield chunk


async def decode_speech(speech: Speech, *, sample_rate: int, executor: Executor, share: MediaShare) -> Samples | None:
    """Earlier speech as one channel at ``sample_rate`` Hz; None where it is no longer what it was counted as.

    That is audio which was compressed far more than speech can be. What could be decoded once can be again. The samples
    stay counted in ``share``.
    """
    most = max(1.0, speech.audio_ms / 1000 * LONGER_THAN_COUNTED) * sample_rate
    blocks: list[Samples] = []
    length = 0
    source = Chunks(speech.chunks)
    decoded = decode_input(source, audio=speech.format, sample_rate=sample_rate, executor=executor, share=share)
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
    with counted(share, sum(block.nbytes for block in blocks)):
        return np.concatenate(blocks)


async def _hops(
    decoder: InputDecoder, parts: Generator[DecodedPart | Large], executor: Executor, share: MediaShare
) -> AsyncGenerator[DecodedPart, None]:
    hop = _Hop()
    while hop.more:
        try:
            with events.span("decode", "preprocess_start", "preprocess_end"):
                async with nullcontext() if hop.large is None else share.place(hop.large):
                    hop = await run_in_thread(executor, _one_hop, parts, share, hop.large is not None)
        except OmniError as error:
            parts.close()  # it waits for its place
            hop = _Hop(more=False, error=error)
        first = True
        while hop.parts:
            if not first:
                await asyncio.sleep(0)  # others have their turn between the pieces of a long text
            first = False
            given = counted_size(hop.parts[0])
            yield hop.parts.popleft()
            # The one before is gone only now: its variable has been used again.
            share.give(decoder.in_hand)
            decoder.in_hand = given
        if hop.error is not None:
            if hop.error.sequence_id is None:
                hop.error.sequence_id = decoder.last_sequence_id
            raise hop.error


@dataclass(frozen=True, slots=True)
class _Hop:
    """What a thread came back with, and whether there is more."""

    parts: deque[DecodedPart] = field(default_factory=deque)
    more: bool = True
    #: What the more takes in bytes, where it needs a place for large media.
    large: int | None = None
    #: What went wrong after the parts.
    error: OmniError | None = None


def _one_hop(parts: Iterator[DecodedPart | Large], share: MediaShare, in_place: bool) -> _Hop:
    """Parts of up to about HOP_BYTES; without a place, up to the next that is large."""
    decoded: list[DecodedPart] = []
    size, more = 0, False
    large: int | None = None
    error: OmniError | None = None
    try:
        for part in parts:
            if isinstance(part, Large):
                if in_place and not part.size:
                    continue
                more, large = True, part.size
                break
            decoded.append(part)
            size += size_of(part)
            if more := size >= HOP_BYTES:
                # A video goes on in a place; an image is whole.
                large = 0 if in_place and isinstance(part, VideoPart) else None
                break
    except OmniError as raised:
        error, more = raised, False
    return _Hop(deque(joined(decoded, share)), more, large, error)


async def _read(source: InputSource, waiting: Channel[InputChunk]) -> None:
    try:
        async for chunk in source:
            await waiting.put(chunk)
    except Exception as error:
        waiting.fail(error)
    else:
        waiting.close()
