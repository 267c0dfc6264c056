"""The decoding of a request's input: chunks to samples, text and pixels. Shared by all engines.

A *part* is a run of chunks of one modality and format; its decoded pieces have the same part number.

Decoding runs in threads. A *hop* is one call in a thread. A hop decodes all chunks that wait when it starts, so that a
stream of 20 ms frames under load does not cost a hop for each frame. Hops run in the ListeningThreads, which all
sessions share fairly, and decode at most a slice of audio. Hops for images and video run in the engine's ``executor``,
and need a *decoding slot*: a share of the server's memory for pixels. Input that takes less time to decode than a
thread takes to wake is decoded on the event loop (``InputDecoder.decodes_at_once``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import BURST_BYTES, parse_audio_format
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import MIN_SAMPLE_RATE, SAMPLE_BYTES, AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.core.history import Speech
from omni_ws.core.quota import Room, reserved
from omni_ws.engine.base import GenerationRequest, InputSource
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import pieces_of
from omni_ws.engine.threads import SLICE_SEC, Lane, MediaShare, end_tasks, run_in_thread
from omni_ws.errors import OmniError, UnsupportedModality
from omni_ws.media import (
    MediaLimits,
    Pixels,
    decode_image,
    decoding_bytes,
)
from omni_ws.media.video import MAX_FRAMES, FrameSelection, VideoDecoder, VideoFrame
from omni_ws.profiler import events

# The decoded forms of input.


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Mono samples at the requested rate. A new part number marks a discontinuity in the audio."""

    samples: Samples
    part: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text of at most ``PIECE_CHARACTERS``."""

    text: str
    part: int


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """The result of the tool call ``call_id``, or a piece of it. A result may be empty."""

    text: str
    call_id: str
    part: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image; its pixels are uint8 RGB of shape (height, width, 3)."""

    pixels: NDArray[np.uint8]
    part: int


@dataclass(frozen=True, slots=True)
class VideoPart:
    """Consecutive frames of a video."""

    frames: tuple[VideoFrame, ...]
    part: int


DecodedPart: TypeAlias = AudioPart | TextPart | ToolResultPart | ImagePart | VideoPart


def reserved_size(part: DecodedPart) -> int:
    """Return the number of bytes that are reserved in the MediaRoom for a part.

    Text reserves 0: it is no larger than its chunks, which count as input.
    """
    return 0 if isinstance(part, (TextPart, ToolResultPart)) else size_of(part)


def size_of(part: DecodedPart) -> int:
    """Return the memory of a part's content, in bytes."""
    match part:
        case AudioPart(samples=samples):
            return samples.nbytes
        case TextPart(text=text) | ToolResultPart(text=text):
            return len(text)
        case ImagePart(pixels=pixels):
            return pixels.nbytes
        case VideoPart(frames=frames):
            return sum(frame.pixels.nbytes for frame in frames)


def joined(parts: list[DecodedPart], room: Room) -> list[DecodedPart]:
    """Return ``parts`` with adjacent pieces of the same part merged, and empty pieces dropped except tool results.

    Images are not merged, and merged text is cut into pieces of PIECE_CHARACTERS. While audio is copied, memory for the
    copy is reserved in ``room``; raises the errors of ``room.take``.
    """
    joined: list[DecodedPart] = []
    for (number, _), group in groupby(parts, key=lambda part: (part.part, type(part))):
        members = list(group)
        match members[0]:
            case AudioPart():
                blocks = [part.samples for part in members if isinstance(part, AudioPart) and len(part.samples)]
                if len(blocks) > 1:
                    with reserved(room, sum(block.nbytes for block in blocks)):
                        joined.append(AudioPart(np.concatenate(blocks), number))
                elif blocks:
                    joined.append(AudioPart(blocks[0], number))
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


# Decoding in threads, and on the event loop.

#: The number of threads in an engine's ``executor`` for decoding.
DECODING_THREADS: Final = 4
#: The sample rate of speech for most models, in Hz.
DEFAULT_SAMPLE_RATE: Final = 16_000

#: The limit on input that was read from the source but not decoded, in bytes.
WAITING_BYTES = 256 * 1024

#: A hop ends when it has decoded this many bytes: that bounds its duration, and the memory for a long file or a
#: decompression bomb.
HOP_BYTES = 4 * 1024 * 1024

#: The size of a decoded sample, float32.
BYTES_PER_SAMPLE: Final = 4

#: The limit on the duration of earlier speech, as a factor of the estimate. The estimate assumes 64 kbit/s for
#: compressed audio; Opus at 12 kbit/s lasts five times as long.
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
    check: Callable[[InputChunk], None] = lambda chunk: None,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncGenerator[DecodedPart, None]:
    """Yield the decoded parts of an input, in order, as it arrives.

    ``audio`` is the format of audio chunks without a format of their own. Audio is decoded to mono at ``sample_rate``
    Hz; images and video are decoded in ``executor``, and scaled to ``limits``. ``lane`` is the session's Lane; with
    None, the request gets a Lane of its own. ``warn`` is called for input that was dropped; ``check`` raises for chunks
    that are refused; ``on_end`` is called when the source has been read to its end. A caller that stops early has to
    close the generator.

    Memory is reserved in ``share`` before it is allocated. The memory of a part stays reserved until the next part is
    requested; a consumer that keeps a part longer has to reserve memory for it.

    Raises UnsupportedFormat for input that cannot be decoded, InvalidValue for a ``format`` with an invalid parameter,
    PayloadTooLarge or EngineOverloaded when memory runs out. All parts before the error are yielded first; the error
    has the ``sequence_id`` of its chunk. Exceptions of ``source`` are passed on.
    """
    decoder = InputDecoder(audio, sample_rate, limits, share)
    hops = _Hops(decoder, share, lane=lane or Lane(), executor=executor, sample_rate=sample_rate)
    waiting: Channel[InputChunk] = Channel(WAITING_BYTES, cost=lambda chunk: len(chunk.payload) + CHUNK_OVERHEAD_BYTES)
    reader = asyncio.create_task(_read(source, waiting, check, on_end), name="input reader")
    try:
        async for chunk in waiting:
            batch = [chunk]
            while (following := waiting.take_nowait()) is not None:
                batch.append(following)
            at_once = decoder.decodes_at_once(batch)
            async for part in hops.run(decoder.decode(batch), at_once=at_once):
                yield part
            decoder.tell(warn)
        async for part in hops.run(decoder.finish(), at_once=decoder.decodes_at_once()):
            yield part
        decoder.tell(warn)
    finally:
        waiting.discard()
        await end_tasks(reader)
        decoder.close()
        hops.close()


def decode_request(
    request: GenerationRequest,
    takes: Set[Modality],
    *,
    share: MediaShare,
    executor: Executor | None = None,
    sample_rate: int = DEFAULT_SAMPLE_RATE,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncGenerator[DecodedPart, None]:
    """Yield the decoded parts of a request's input, see ``decode_input``.

    ``executor`` is for images and video. Raises UnsupportedModality for a part whose modality is not in ``takes``.
    """

    def check(chunk: InputChunk) -> None:
        if chunk.has_content and chunk.modality not in takes:
            message = f"task {request.task} takes {' and '.join(sorted(takes))}, not {chunk.modality}"
            raise UnsupportedModality(message, param="modality")

    return decode_input(
        request.input,
        audio=request.input_audio,
        sample_rate=sample_rate,
        executor=executor or request.lane,
        share=share,
        lane=request.lane,
        limits=MediaLimits(**request.options.media_limits),  # type: ignore[arg-type]  # checked on the wire
        warn=request.warn,
        check=check,
        on_end=on_end,
    )


@dataclass(frozen=True, slots=True)
class Chunks:
    """An InputSource of given chunks, which are there from the start."""

    chunks: Sequence[InputChunk]

    async def __aiter__(self) -> AsyncIterator[InputChunk]:
        for chunk in self.chunks:
            yield chunk


async def decode_speech(
    speech: Speech, *, sample_rate: int, executor: Executor, share: MediaShare, lane: Lane
) -> Samples | None:
    """Decode speech of an earlier request to mono at ``sample_rate`` Hz.

    Returns None for speech longer than MAX_DURATION_FACTOR times the estimate for its size, such as silence that is
    compressed to almost nothing. The memory of the samples stays reserved in ``share``. Raises the errors of
    ``decode_input``.
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


class _Hops:
    """Runs the hops that decode one input. A part's memory is refunded when the caller asks for the next part."""

    def __init__(
        self, decoder: InputDecoder, share: MediaShare, *, lane: Lane, executor: Executor, sample_rate: int
    ) -> None:
        self._decoder = decoder
        self._share = share
        self._lane = lane
        self._executor = executor
        self._sample_rate = sample_rate
        #: The bytes reserved for the part yielded last.
        self._yielded_bytes = 0

    async def run(
        self, parts: Generator[DecodedPart | SlotRequest], *, at_once: bool
    ) -> AsyncGenerator[DecodedPart, None]:
        """Run ``parts`` in threads, or on the event loop with ``at_once``, and yield the decoded parts."""
        hop = _Hop()
        while hop.more:
            try:
                with events.span("decode", "preprocess_start", "preprocess_end"):
                    if at_once:
                        hop = _one_hop(parts, self._share, False)
                    else:
                        hop = await self._in_thread(parts, hop.slot_bytes)
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
                self.close()
                self._yielded_bytes = given
            if hop.error is not None:
                if hop.error.sequence_id is None:
                    hop.error.about(sequence_id=self._decoder.last_sequence_id)
                raise hop.error

    def close(self) -> None:
        """Return the memory of the last yielded part to the share. Idempotent."""
        self._share.give(self._yielded_bytes)
        self._yielded_bytes = 0

    async def _in_thread(self, parts: Iterator[DecodedPart | SlotRequest], slot_bytes: int | None) -> _Hop:
        """Run one hop in a thread; with ``slot_bytes``, in a decoding slot, see SlotRequest."""
        audio_bytes = int(SLICE_SEC * self._sample_rate) * BYTES_PER_SAMPLE
        if slot_bytes is not None:
            async with self._share.slot(slot_bytes):
                return await run_in_thread(self._executor, _one_hop, parts, self._share, True, audio_bytes)
        hop = await run_in_thread(self._lane, _one_hop, parts, self._share, False, audio_bytes)
        self._lane.charge(hop.audio_bytes / (BYTES_PER_SAMPLE * self._sample_rate))
        return hop


@dataclass(frozen=True, slots=True)
class _Hop:
    """The result of one call in a thread (a hop): the decoded ``parts``, and whether input may be left (``more``)."""

    parts: deque[DecodedPart] = field(default_factory=deque)
    more: bool = True
    #: The bytes to reserve for the next hop if that needs a decoding slot, else None; see SlotRequest.
    slot_bytes: int | None = None
    #: The bytes of the decoded audio.
    audio_bytes: int = 0
    #: The error that ended decoding after ``parts``.
    error: OmniError | None = None


def _one_hop(
    parts: Iterator[DecodedPart | SlotRequest], share: MediaShare, has_slot: bool, most_audio: int = HOP_BYTES
) -> _Hop:
    """Decode parts up to about HOP_BYTES, or ``most_audio`` bytes of audio. Without a slot, stop at a SlotRequest."""
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


async def _read(
    source: InputSource,
    waiting: Channel[InputChunk],
    check: Callable[[InputChunk], None],
    on_end: Callable[[], None],
) -> None:
    """Copy the source into ``waiting``, with backpressure."""
    try:
        async for chunk in source:
            check(chunk)
            await waiting.put(chunk)
    except Exception as error:
        waiting.fail(error)
    else:
        on_end()
        waiting.close()


# The decoder of one input, with one decoder for each part of it.

#: The limit on input that is decoded on the event loop. It takes up to 50 µs, with resampled telephone audio; to wake a
#: thread takes 70 µs of CPU time, 50 µs of them on the event loop.
AT_ONCE_BYTES: Final = 4096
#: How much audio is decoded at a time, in bytes of input.
AUDIO_PIECE_BYTES: Final = 64 * 1024
#: The limit on frames of a video from which FrameSelection selects: more than half an hour at 30 frames a second.
MAX_SELECTED_FROM: Final = 16 * MAX_FRAMES


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Yielded before a part that needs a decoding slot: a request for the slot, and for ``size`` bytes with it."""

    size: int


class InputDecoder:
    """A decoder of all chunks of one input, in order. For use by one thread at a time.

    The generators yield a SlotRequest before each image and each piece of video. The caller then gets a decoding slot
    and resumes the generator, or closes it. Memory is reserved in ``room``.
    """

    def __init__(self, audio: AudioFormat, sample_rate: int, limits: MediaLimits, room: Room) -> None:
        self._default_audio = audio
        self._limits = limits
        self._room = room
        self._sample_rate = sample_rate
        self._part = -1
        self._kind: tuple[Modality, object] | None = None
        #: The number of the chunk to which an error belongs.
        self.last_sequence_id: int | None = None
        #: Errors about bytes that were dropped, until ``tell`` reports them.
        self._left_out: list[OmniError] = []
        self._audio: AudioDecoder | None = None
        self._video: VideoDecoder | None = None
        self._selection: FrameSelection | None = None

    def decode(self, chunks: Sequence[InputChunk]) -> Generator[DecodedPart | SlotRequest]:
        """Decode ``chunks``, and yield the parts. The generator has to be exhausted before the next call."""
        for chunk in chunks:
            if chunk.has_content:
                yield from self._open(chunk)
                yield from self._feed(chunk)

    def finish(self) -> Generator[DecodedPart | SlotRequest]:
        """End the input, and yield the parts that the decoders still hold."""
        yield from self._close_part()

    def tell(self, warn: Callable[[OmniError], None]) -> None:
        """Call ``warn`` with an error for each run of bytes that was dropped since the last call."""
        left_out, self._left_out = self._left_out, []
        for error in left_out:
            warn(error)

    def decodes_at_once(self, chunks: Sequence[InputChunk] = ()) -> bool:
        """Whether ``decode(chunks)``, or ``finish`` if there are no chunks, takes less time than to wake a thread.

        This is true for at most AT_ONCE_BYTES of text, or of raw audio that continues the current part: the first chunk
        of a part may load the resampler.
        """
        if self._video is not None or (self._audio is not None and not self._audio.source.is_raw):
            return False
        audio_goes_on = self._audio is not None and self._audio.source == self._default_audio
        size = 0
        for chunk in chunks:
            size += len(chunk.payload)
            is_audio = chunk.modality is Modality.AUDIO and chunk.format is None
            if size > AT_ONCE_BYTES or not ((is_audio and audio_goes_on) or chunk.modality is Modality.TEXT):
                return False
        return True

    def close(self) -> None:
        """Release the decoder of the current part. Idempotent."""
        if self._audio is not None:
            self._audio.close()
        if self._video is not None:
            self._video.close()
        self._audio = self._video = self._selection = None
        self._kind = None

    def _open(self, chunk: InputChunk) -> Generator[DecodedPart | SlotRequest]:
        """Start a new part, unless ``chunk`` continues the current one."""
        previous, self.last_sequence_id = self.last_sequence_id, chunk.sequence_id
        audio = None
        if chunk.modality is Modality.AUDIO:
            audio = self._default_audio
            if chunk.format is not None:
                audio = parse_audio_format(chunk.format, self._default_audio)
        kind = (chunk.modality, audio if audio is not None else chunk.format or chunk.tool_call_id)
        if kind == self._kind and chunk.modality is not Modality.IMAGE:
            return
        # An error at the end of the previous part belongs to its last chunk, not to this one.
        self.last_sequence_id = previous
        yield from self._close_part()
        self.last_sequence_id = chunk.sequence_id
        self._kind = kind
        self._part += 1
        if audio is not None:
            self._audio = AudioDecoder(audio, sample_rate=self._sample_rate, room=self._room)
        elif chunk.modality is Modality.VIDEO:
            self._open_video()

    def _feed(self, chunk: InputChunk) -> Generator[DecodedPart | SlotRequest]:
        if self._audio is not None:
            for start in range(0, len(chunk.payload), AUDIO_PIECE_BYTES):
                piece = chunk.payload[start : start + AUDIO_PIECE_BYTES]
                yield from self._samples(self._audio, piece, begins_chunk=start == 0 and not chunk.continues)
        elif self._video is not None:
            with reserved(self._room, len(chunk.payload)):
                yield SlotRequest(0)
                yield from self._video_parts(self._video.frames(chunk.payload, chunk.timestamp_ms))
        elif chunk.tool_call_id is not None:
            yield ToolResultPart(chunk.payload.decode(), chunk.tool_call_id, self._part)
        elif chunk.modality is Modality.TEXT:
            yield TextPart(chunk.payload.decode(), self._part)
        else:
            with reserved(self._room, len(chunk.payload)):
                size = decoding_bytes(chunk.payload)
                yield SlotRequest(size)
                # Not assigned to a variable, which would keep the pixels alive until the generator resumes.
                yield ImagePart(self._fitted_image(chunk.payload, size), self._part)

    def _close_part(self) -> Generator[DecodedPart | SlotRequest]:
        """Yield the rest that the decoder of the current part holds, and release the decoder."""
        try:
            if self._audio is not None:
                yield from self._samples(self._audio, None)
            elif self._video is not None:
                yield SlotRequest(0)
                yield from self._video_parts(self._video.last_frames())
                if self._selection is not None:
                    for frame in self._selection.frames():
                        yield VideoPart((frame,), self._part)
        finally:
            self.close()

    def _open_video(self) -> None:
        limits = self._limits
        # With a minimum number of frames none is dropped by time, since it might be needed to reach the minimum.
        fps = None if limits.video_min_frames is not None else limits.video_fps
        if limits.select_frames:
            self._selection = FrameSelection(limits, self._room)
        self._video = VideoDecoder(
            frames_per_second=fps,
            max_frames=MAX_FRAMES if limits.video_max_frames is None else MAX_SELECTED_FROM,
            room=self._room,
        )

    def _video_parts(self, frames: Iterator[VideoFrame]) -> Iterator[VideoPart]:
        """Yield the frames; or, if only some are selected, collect them until the end of the part."""
        for frame in frames:
            if self._selection is not None:
                self._selection.add(self._fitted(frame))
            else:
                # Not assigned to a variable, as with an image.
                yield VideoPart((self._fitted(frame),), self._part)

    def _fitted_image(self, data: bytes, size: int) -> Pixels:
        """Decode and scale an image. Of the ``size`` bytes reserved, the size of the result stays reserved."""
        try:
            pixels = decode_image(data)
        except BaseException:
            self._room.give(size)
            raise
        self._room.give(size - pixels.nbytes)
        return self._scaled(self._limits.fit_image, pixels)

    def _fitted(self, frame: VideoFrame) -> VideoFrame:
        return VideoFrame(frame.timestamp_ms, self._scaled(self._limits.fit_frame, frame.pixels))

    def _scaled(self, fit: Callable[[Pixels], Pixels], pixels: Pixels) -> Pixels:
        """Scale ``pixels`` with ``fit``, and reserve the memory of the result instead of that of the original."""
        fitted = fit(pixels)
        if fitted is not pixels:
            self._room.take(fitted.nbytes)
            self._room.give(pixels.nbytes)
        return fitted

    def _samples(self, decoder: AudioDecoder, data: bytes | None, *, begins_chunk: bool = False) -> Iterator[AudioPart]:
        """Yield the decoded audio of ``data``; with None, the rest that the decoder holds."""
        with reserved(self._room, _unpacking_bytes(decoder, len(data or b""))):
            pieces = decoder.last_pieces() if data is None else decoder.pieces(data, begins_chunk=begins_chunk)
            for samples in pieces:
                self._room.take(samples.nbytes)
                yield AudioPart(samples, self._part)
        if (stray := decoder.take_stray()) is not None:
            self._left_out.append(stray.about(sequence_id=self.last_sequence_id))


def _unpacking_bytes(decoder: AudioDecoder, size: int) -> int:
    """Return how many bytes of memory the decoding of ``size`` bytes takes in addition to the returned samples.

    This memory holds the samples as float32 at the source's rate, the mono mix, and the resampler's output, estimated
    for the lowest possible source rate.
    """
    encoding = decoder.source.encoding
    if decoder.unpacks or (encoding not in SAMPLE_BYTES and encoding is not AudioEncoding.WAV):
        return BURST_BYTES
    samples = size // SAMPLE_BYTES.get(encoding, 1)  # WAV: the header may announce any layout
    return samples * 4 * (2 + decoder.sample_rate // MIN_SAMPLE_RATE)
