"""InputDecoder: decodes the chunks of one input, with one decoder for each part of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from omni_ws.audio.container import BURST_BYTES
from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.mime import parse_audio_format
from omni_ws.core.chunks import MIN_SAMPLE_RATE, SAMPLE_BYTES, AudioEncoding, AudioFormat, InputChunk, Modality
from omni_ws.core.quota import Room, reserved
from omni_ws.engine.decoded_parts import AudioPart, DecodedPart, ImagePart, TextPart, ToolResultPart, VideoPart
from omni_ws.errors import OmniError
from omni_ws.media.frame_selection import FrameSelection
from omni_ws.media.image import Pixels, decode_image, decoding_bytes
from omni_ws.media.limits import MediaLimits
from omni_ws.media.video import MAX_FRAMES, VideoDecoder, VideoFrame

#: The most that is decoded without a thread: some 50 µs for resampled telephone audio, less for others. Waking a thread
#: takes 70 µs of CPU time, 50 of them the event loop's.
AT_ONCE_BYTES: Final = 4096
#: How much audio is decoded at a time, in bytes of input.
AUDIO_PIECE_BYTES: Final = 64 * 1024
#: The limit on frames of a video from which FrameSelection selects: more than half an hour at 30 frames a second.
MAX_SELECTED_FROM: Final = 16 * MAX_FRAMES


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Yielded before a part that needs a decoding slot, in which ``size`` bytes are to be reserved."""

    size: int


class InputDecoder:
    """Decodes chunks in order. For use by one thread at a time.

    Its generators yield a SlotRequest before each image and each piece of video: the caller resumes them once it has a
    slot, or closes them. Memory is reserved in ``room``.
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
        #: The bytes reserved for the part yielded last; maintained by the caller.
        self.yielded_bytes = 0
        #: What was left out, and has not been told.
        self._left_out: list[OmniError] = []
        self._audio: AudioDecoder | None = None
        self._video: VideoDecoder | None = None
        self._selection: FrameSelection | None = None

    def decode(self, chunks: Sequence[InputChunk]) -> Generator[DecodedPart | SlotRequest]:
        """Yield the parts that ``chunks`` complete. The generator has to be exhausted before the next call."""
        for chunk in chunks:
            if chunk.has_content:
                yield from self._open(chunk)
                yield from self._feed(chunk)

    def finish(self) -> Generator[DecodedPart | SlotRequest]:
        """Yield the parts that the end of the input completes."""
        yield from self._close_part()

    def tell(self, warn: Callable[[OmniError], None]) -> None:
        """Call ``warn`` with what was left out of the input so far, once."""
        left_out, self._left_out = self._left_out, []
        for error in left_out:
            warn(error)

    def decodes_at_once(self, chunks: Sequence[InputChunk] = ()) -> bool:
        """Whether ``chunks``, or ``finish``, take less time than it takes to wake a thread for them.

        They do if they are up to AT_ONCE_BYTES of text, and of raw audio that continues the current part: the first of
        a part may load the resampler.
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
        """Release the decoders. Idempotent."""
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
        """Yield what the decoder of the current part still holds, and release it."""
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
        """Yield the frames, or pass them to the selection, which yields at the end of the part."""
        for frame in frames:
            if self._selection is not None:
                self._selection.add(self._fitted(frame))
            else:
                # Not assigned to a variable, as with an image.
                yield VideoPart((self._fitted(frame),), self._part)

    def _fitted_image(self, data: bytes, size: int) -> Pixels:
        """Decode and scale an image. Of the ``size`` bytes reserved, those of the result remain so."""
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
        """Scale ``pixels`` and reserve the result in place of the original."""
        fitted = fit(pixels)
        if fitted is not pixels:
            self._room.take(fitted.nbytes)
            self._room.give(pixels.nbytes)
        return fitted

    def _samples(self, decoder: AudioDecoder, data: bytes | None, *, begins_chunk: bool = False) -> Iterator[AudioPart]:
        """Yield decoded audio; ``data`` None ends it."""
        with reserved(self._room, _unpacking_bytes(decoder, len(data or b""))):
            pieces = decoder.last_pieces() if data is None else decoder.pieces(data, begins_chunk=begins_chunk)
            for samples in pieces:
                self._room.take(samples.nbytes)
                yield AudioPart(samples, self._part)
        if (stray := decoder.take_stray()) is not None:
            stray.sequence_id = self.last_sequence_id
            self._left_out.append(stray)


def _unpacking_bytes(decoder: AudioDecoder, size: int) -> int:
    """Return the memory for decoding ``size`` bytes before the samples are reserved one by one.

    That is float32 at the source's rate, mixed down, and resampled, with the lowest possible source rate.
    """
    encoding = decoder.source.encoding
    if decoder.unpacks or (encoding not in SAMPLE_BYTES and encoding is not AudioEncoding.WAV):
        return BURST_BYTES
    samples = size // SAMPLE_BYTES.get(encoding, 1)  # WAV: the header may announce any layout
    return samples * 4 * (2 + decoder.sample_rate // MIN_SAMPLE_RATE)
