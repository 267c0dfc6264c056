"""The decoders of one input, one after the other: each part of it has its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from omni_ws.audio.compressed_decoder import BURST_BYTES
from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.mime import parse_audio_format
from omni_ws.core.audio_format import MIN_SAMPLE_RATE, SAMPLE_BYTES, AudioEncoding, AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.quota import Room, counted
from omni_ws.engine.decoded_parts import AudioPart, DecodedPart, ImagePart, TextPart, ToolResultPart, VideoPart
from omni_ws.media.frame_selection import FrameSelection
from omni_ws.media.image import Pixels, decode_image, decoding_bytes
from omni_ws.media.limits import MediaLimits
from omni_ws.media.video import MAX_FRAMES, VideoDecoder, VideoFrame

#: Audio is decoded so many bytes at a time.
AUDIO_PIECE_BYTES: Final = 64 * 1024
#: Frames of a video of which a few are chosen: half an hour at 30 a second.
MAX_SELECTED_FROM: Final = 16 * MAX_FRAMES


@dataclass(frozen=True, slots=True)
class Large:
    """Stands before what needs a place to be decoded, and is counted with so many bytes from then on."""

    size: int


class InputDecoder:
    """The decoder of the part that is under way. One thread at a time."""

    def __init__(self, audio: AudioFormat, sample_rate: int, limits: MediaLimits, room: Room) -> None:
        self._default_audio = audio
        self._limits = limits
        self._room = room
        self._sample_rate = sample_rate
        self._part = -1
        self._kind: tuple[Modality, object] | None = None
        #: The chunk that was worked on last.
        self.last_sequence_id: int | None = None
        #: What is counted of the part that was given out last.
        self.in_hand = 0
        self._audio: AudioDecoder | None = None
        self._video: VideoDecoder | None = None
        self._selection: FrameSelection | None = None

    def decode(self, chunks: Sequence[InputChunk]) -> Generator[DecodedPart | Large]:
        """What the chunks yield; to be exhausted before the next call."""
        for chunk in chunks:
            if chunk.has_content:
                yield from self._open(chunk)
                yield from self._feed(chunk)

    def finish(self) -> Generator[DecodedPart | Large]:
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

    def _open(self, chunk: InputChunk) -> Generator[DecodedPart | Large]:
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

    def _feed(self, chunk: InputChunk) -> Generator[DecodedPart | Large]:
        if self._audio is not None:
            for start in range(0, len(chunk.payload), AUDIO_PIECE_BYTES):
                yield from self._samples(self._audio, chunk.payload[start : start + AUDIO_PIECE_BYTES])
        elif self._video is not None:
            with counted(self._room, len(chunk.payload)):
                yield Large(0)
                yield from self._seen(self._video.frames(chunk.payload, chunk.timestamp_ms))
        elif chunk.tool_call_id is not None:
            yield ToolResultPart(chunk.payload.decode(), chunk.tool_call_id, self._part)
        elif chunk.modality is Modality.TEXT:
            yield TextPart(chunk.payload.decode(), self._part)
        else:
            with counted(self._room, len(chunk.payload)):
                size = decoding_bytes(chunk.payload)
                yield Large(size)
                # No variable: it would hold the pixels until the next part is wanted.
                yield ImagePart(self._fitted_image(chunk.payload, size), self._part)

    def _close_part(self) -> Generator[DecodedPart | Large]:
        try:
            if self._audio is not None:
                yield from self._samples(self._audio, None)
            elif self._video is not None:
                yield Large(0)
                yield from self._seen(self._video.last_frames())
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
            self._selection = FrameSelection(limits, self._room)
        self._video = VideoDecoder(
            frames_per_second=fps,
            max_frames=MAX_FRAMES if limits.video_max_frames is None else MAX_SELECTED_FROM,
            room=self._room,
        )

    def _seen(self, frames: Iterator[VideoFrame]) -> Iterator[VideoPart]:
        """The frames as they come, or, where some of them are chosen, nothing yet."""
        for frame in frames:
            if self._selection is not None:
                self._selection.add(self._fitted(frame))
            else:
                # No variable, as of an image.
                yield VideoPart((self._fitted(frame),), self._part)

    def _fitted_image(self, data: bytes, size: int) -> Pixels:
        """``size`` is counted already; its pixels stay so."""
        try:
            pixels = decode_image(data)
        except BaseException:
            self._room.give(size)
            raise
        self._room.give(size - pixels.nbytes)
        return self._counted(self._limits.fit_image, pixels)

    def _fitted(self, frame: VideoFrame) -> VideoFrame:
        return VideoFrame(frame.timestamp_ms, self._counted(self._limits.fit_frame, frame.pixels))

    def _counted(self, fit: Callable[[Pixels], Pixels], pixels: Pixels) -> Pixels:
        """Fitted; what was there before is no longer counted."""
        fitted = fit(pixels)
        if fitted is not pixels:
            self._room.take(fitted.nbytes)
            self._room.give(pixels.nbytes)
        return fitted

    def _samples(self, decoder: AudioDecoder, data: bytes | None) -> Iterator[AudioPart]:
        """None is the end of the data."""
        with counted(self._room, _unpacking_bytes(decoder, len(data or b""))):
            for samples in decoder.last_pieces() if data is None else decoder.pieces(data):
                self._room.take(samples.nbytes)
                yield AudioPart(samples, self._part)


def _unpacking_bytes(decoder: AudioDecoder, size: int) -> int:
    """What so many bytes of input take before their samples are counted one by one: at the source's rate, mixed, and
    at the wanted rate, of which the source's may be the smallest."""
    encoding = decoder.source.encoding
    if encoding not in SAMPLE_BYTES and encoding is not AudioEncoding.WAV:
        return BURST_BYTES
    samples = size // SAMPLE_BYTES.get(encoding, 1)  # a wav header may say anything
    return samples * 4 * (2 + decoder.sample_rate // MIN_SAMPLE_RATE)
