"""Input chunks become what models work on: samples, text, pixels. Shared by all engines.

Decoding runs in worker threads. Whatever chunks wait when a thread is free go there together, so that a stream of
20 ms frames costs one hop for as many frames as have come, not one for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.mime import parse_audio_format
from omni_ws.audio.samples import Samples
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import InputSource, Speech
from omni_ws.engine.channel import Channel
from omni_ws.engine.text_pieces import pieces_of
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import OmniError
from omni_ws.media.frame_selection import FrameSelection
from omni_ws.media.image import decode_image
from omni_ws.media.limits import MediaLimits
from omni_ws.media.video import MAX_FRAMES, VideoDecoder, VideoFrame
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

#: Frames of a video of which a few are chosen: half an hour at 30 a second.
MAX_SELECTED_FROM = 16 * MAX_FRAMES

AS_IT_COMES = MediaLimits()


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Samples at the wanted rate. ``part`` numbers the parts of the input: a new number is a break in the audio."""

    samples: Samples
    part: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a text, of ``PIECE_CHARACTERS`` at most."""

    text: str
    part: int


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """A piece of the result of a tool: ``call_id`` is the call that it answers. A result may be empty."""

    text: str
    call_id: str
    part: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """``pixels`` is RGB, shape (height, width, 3), uint8."""

    pixels: NDArray[np.uint8]
    part: int


@dataclass(frozen=True, slots=True)
class VideoPart:
    """Frames of one video, as far as they could be decoded from what has come."""

    frames: tuple[VideoFrame, ...]
    part: int


DecodedPart: TypeAlias = AudioPart | TextPart | ToolResultPart | ImagePart | VideoPart


async def decode_input(
    source: InputSource,
    *,
    audio: AudioFormat,
    sample_rate: int,
    executor: Executor,
    limits: MediaLimits = AS_IT_COMES,
) -> AsyncGenerator[DecodedPart, None]:
    """Yields the decoded parts in order; ``audio`` is the format of chunks that name none. Images and video keep to
    ``limits``.

    Audio comes as one channel at ``sample_rate`` Hz. Raises UnsupportedFormat for what cannot be decoded and
    InvalidValue, after everything that came before it, naming the chunk. What the source raises is raised too.
    """
    decoder = _InputDecoder(audio, sample_rate, limits)
    waiting: Channel[InputChunk] = Channel(WAITING_BYTES, cost=lambda chunk: len(chunk.payload) + CHUNK_OVERHEAD_BYTES)
    reader = asyncio.create_task(_read(source, waiting), name="input reader")
    try:
        async for chunk in waiting:
            batch = [chunk]
            while (following := waiting.take_nowait()) is not None:
                batch.append(following)
            async for part in _hops(decoder, decoder.decode(batch), executor):
                yield part
        async for part in _hops(decoder, decoder.finish(), executor):
            yield part
    finally:
        reader.cancel()
        waiting.discard()
        await asyncio.gather(reader, return_exceptions=True)
        decoder.close()


@dataclass(frozen=True, slots=True)
class Chunks:
    """An input that is whole."""

    chunks: Sequence[InputChunk]

    async def __aiter__(self) -> AsyncIterator[InputChunk]:
        for chunk in self.chunks:
            yield chunk


async def decode_speech(speech: Speech, *, sample_rate: int, executor: Executor) -> Samples | None:
    """Earlier speech as one channel at ``sample_rate`` Hz; None where it is no longer what it was counted as.

    That is audio which was compressed far more than speech can be. What could be decoded once can be again.
    """
    most = max(1.0, speech.audio_ms / 1000 * LONGER_THAN_COUNTED) * sample_rate
    blocks: list[Samples] = []
    source = Chunks(speech.chunks)
    decoded = decode_input(source, audio=speech.format, sample_rate=sample_rate, executor=executor)
    async with aclosing(decoded) as parts:
        async for part in parts:
            if isinstance(part, AudioPart):
                blocks.append(part.samples)
            if sum(map(len, blocks)) > most:
                return None
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


async def _hops(
    decoder: _InputDecoder, parts: Iterator[DecodedPart], executor: Executor
) -> AsyncGenerator[DecodedPart, None]:
    more = True
    while more:
        with events.span("decode", "preprocess_start", "preprocess_end"):
            decoded, more, error = await run_in_thread(executor, _one_hop, parts)
        for place, part in enumerate(_joined(decoded)):
            if place:
                await asyncio.sleep(0)  # others have their turn between the pieces of a long text
            yield part
        if error is not None:
            if error.sequence_id is None:
                error.sequence_id = decoder.last_sequence_id
            raise error


def _one_hop(parts: Iterator[DecodedPart]) -> tuple[list[DecodedPart], bool, OmniError | None]:
    """Parts of up to about HOP_BYTES, whether there are more, and what went wrong after them."""
    decoded: list[DecodedPart] = []
    size = 0
    try:
        for part in parts:
            decoded.append(part)
            size += _size(part)
            if size >= HOP_BYTES:
                return decoded, True, None
    except OmniError as error:
        return decoded, False, error
    return decoded, False, None


def _size(part: DecodedPart) -> int:
    match part:
        case AudioPart(samples=samples):
            return samples.nbytes
        case TextPart(text=text) | ToolResultPart(text=text):
            return len(text)
        case ImagePart(pixels=pixels):
            return pixels.nbytes
        case VideoPart(frames=frames):
            return sum(frame.pixels.nbytes for frame in frames)


async def _read(source: InputSource, waiting: Channel[InputChunk]) -> None:
    try:
        async for chunk in source:
            await waiting.put(chunk)
    except Exception as error:
        waiting.fail(error)
    else:
        waiting.close()


class _InputDecoder:
    """The decoder of the part that is under way. One thread at a time."""

    def __init__(self, audio: AudioFormat, sample_rate: int, limits: MediaLimits) -> None:
        self._default_audio = audio
        self._limits = limits
        self._sample_rate = sample_rate
        self._part = -1
        self._kind: tuple[Modality, object] | None = None
        #: The chunk that was worked on last.
        self.last_sequence_id: int | None = None
        self._audio: AudioDecoder | None = None
        self._video: VideoDecoder | None = None
        self._selection: FrameSelection | None = None

    def decode(self, chunks: Sequence[InputChunk]) -> Iterator[DecodedPart]:
        """What the chunks yield; to be exhausted before the next call."""
        for chunk in chunks:
            if chunk.has_content:
                yield from self._open(chunk)
                yield from self._feed(chunk)

    def finish(self) -> Iterator[DecodedPart]:
        """What the decoders still hold at the end of the input."""
        yield from self._close_part()

    def close(self) -> None:
        """Frees the decoders; what they hold is dropped."""
        if self._audio is not None:
            self._audio.close()
        if self._video is not None:
            self._video.close()
        self._audio = self._video = self._selection = None
        self._kind = None

    def _open(self, chunk: InputChunk) -> Iterator[DecodedPart]:
        """Starts a part, unless the chunk goes on with the one under way."""
        previous, self.last_sequence_id = self.last_sequence_id, chunk.sequence_id
        audio = None
        if chunk.modality is Modality.AUDIO:
            audio = self._default_audio
            if chunk.format is not None:
                audio = parse_audio_format(chunk.format, self._default_audio)
        kind = (chunk.modality, audio if audio is not None else chunk.format or chunk.tool_call_id)
        if kind == self._kind and chunk.modality is not Modality.IMAGE:
            return
        # What is wrong with the end of the part before is not this chunk's fault.
        self.last_sequence_id = previous
        yield from self._close_part()
        self.last_sequence_id = chunk.sequence_id
        self._kind = kind
        self._part += 1
        if audio is not None:
            self._audio = AudioDecoder(audio, sample_rate=self._sample_rate)
        elif chunk.modality is Modality.VIDEO:
            self._open_video()

    def _feed(self, chunk: InputChunk) -> Iterator[DecodedPart]:
        if self._audio is not None:
            for samples in self._audio.pieces(chunk.payload):
                yield AudioPart(samples, self._part)
        elif self._video is not None:
            yield from self._seen(self._video.frames(chunk.payload, chunk.timestamp_ms))
        elif chunk.tool_call_id is not None:
            yield ToolResultPart(chunk.payload.decode(), chunk.tool_call_id, self._part)
        elif chunk.modality is Modality.TEXT:
            yield TextPart(chunk.payload.decode(), self._part)
        else:
            yield ImagePart(self._limits.fit_image(decode_image(chunk.payload)), self._part)

    def _close_part(self) -> Iterator[DecodedPart]:
        try:
            if self._audio is not None:
                yield AudioPart(self._audio.flush(), self._part)
            elif self._video is not None:
                yield from self._seen(iter(self._video.flush()))
                if self._selection is not None:
                    for frame in self._selection.frames():
                        yield VideoPart((frame,), self._part)
        finally:
            self.close()

    def _open_video(self) -> None:
        limits = self._limits
        # Frames that are left out by their distance in time might be needed for the least number of them.
        fps = None if limits.video_min_frames is not None else limits.video_fps
        if limits.select_frames:
            self._selection = FrameSelection(limits)
        self._video = VideoDecoder(
            frames_per_second=fps, max_frames=MAX_FRAMES if limits.video_max_frames is None else MAX_SELECTED_FROM
        )

    def _seen(self, frames: Iterator[VideoFrame]) -> Iterator[VideoPart]:
        """The frames as they come, or, where some of them are chosen, nothing yet."""
        for frame in frames:
            if self._selection is not None:
                self._selection.add(frame)
            else:
                pixels = self._limits.fit_frame(frame.pixels)
                yield VideoPart((VideoFrame(frame.timestamp_ms, pixels),), self._part)


def _joined(parts: list[DecodedPart]) -> list[DecodedPart]:
    """The parts without the empty ones; neighbours that belong to one part are made one."""
    joined: list[DecodedPart] = []
    for (number, _), group in groupby(parts, key=lambda part: (part.part, type(part))):
        members = list(group)
        match members[0]:
            case AudioPart():
                blocks = [part.samples for part in members if isinstance(part, AudioPart) and len(part.samples)]
                if blocks:
                    joined.append(AudioPart(np.concatenate(blocks) if len(blocks) > 1 else blocks[0], number))
            case TextPart():
                text = "".join(part.text for part in members if isinstance(part, TextPart))
                joined += (TextPart(piece, number) for piece in pieces_of(text))
            case ToolResultPart(call_id=call_id):
                text = "".join(part.text for part in members if isinstance(part, ToolResultPart))
                joined.append(ToolResultPart(text, call_id, number))
            case VideoPart():
                frames = tuple(frame for part in members if isinstance(part, VideoPart) for frame in part.frames)
                if frames:
                    joined.append(VideoPart(frames, number))
            case ImagePart():
                joined.extend(members)
    return joined
