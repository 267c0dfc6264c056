"""Videos: decoding as they arrive, selection of frames for a model, and a description without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.compressed import usable_frames
from omni_ws.audio.container import (
    LENIENT_METADATA,
    STREAMING_OPTIONS,
    ByteSource,
    ContainerReader,
    HeldMp4,
)
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.quota import UNLIMITED, Reservation, Room, reserved
from omni_ws.errors import OmniError, UnsupportedFormat
from omni_ws.media import (
    MediaLimits,
    Pixels,
    decode_image,
    decoding_bytes,
    dominant_colour,
    fitted,
    thumbnail_of,
)

#: 4K (DCI).
MAX_FRAME_PIXELS = 4096 * 2160
MAX_FRAMES = 4096
#: The largest MP4 file whose index is at its end.
MAX_BUFFERED_BYTES = 64 * 1024 * 1024
#: The most decoded bytes that the decoder thread may produce ahead of its consumer.
_BURST_BYTES = 32 * 1024 * 1024
#: The demuxer's read size: 8 ms of video at 1 Mbit/s.
_BLOCK_BYTES = 1024
#: The codec's memory per pixel: ten reference frames of 1.5 bytes per pixel.
_CODEC_BYTES = 15
#: The allowance for the padding around a frame in the codec's buffers.
_MARGIN_PIXELS = 1 << 20
#: The bytes needed to recognise any container or image.
_MAGIC_BYTES = 12
_TS_SYNC = 0x47
#: The boxes with which an MP4 or QuickTime file may begin.
_MP4_BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"wide", b"free", b"skip")


class VideoFrame(NamedTuple):
    """A decoded frame of a video, or a single image.

    ``timestamp_ms`` is that of the chunk with the image; in a container, that of the container's first chunk plus the
    frame's presentation time.
    """

    timestamp_ms: int
    pixels: Pixels


class VideoDecoder:
    """Decodes one video input as it arrives: single images, or a container in pieces.

    A chunk that begins with the signature of an image is one frame. Otherwise the first bytes open a container (MP4,
    WebM, Matroska, MPEG-TS), and all chunks are pieces of it.

    ``frames_per_second`` drops frames that follow too closely. More than ``max_frames`` of the remaining frames, or
    more than ``max_pixels`` in one of them, is an error. An MP4 file with its index at the end is buffered, up to
    ``max_buffered_bytes``, and decoded by ``last_frames``.

    Raises UnsupportedFormat, and the errors of ``room``. The pixels of the returned frames remain charged to ``room``;
    the caller has to release them. A container occupies a thread until ``close``, which the garbage collector calls,
    too.
    """

    def __init__(
        self,
        *,
        max_pixels: int = MAX_FRAME_PIXELS,
        max_frames: int = MAX_FRAMES,
        frames_per_second: float | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        room: Room = UNLIMITED,
    ) -> None:
        self._max_pixels = max_pixels
        self._max_frames = max_frames
        self._frames_per_second = frames_per_second
        self._room = room
        self._max_buffered_bytes = max_buffered_bytes
        self._count = 0
        self._next_due_ms = -math.inf
        self._start_ms = 0
        self._head = b""
        #: The reader of a container; None for single images.
        self._reader: ContainerReader[VideoFrame] | None = None
        self._ended = False

    def frames(self, data: bytes, timestamp_ms: int | None = None) -> Iterator[VideoFrame]:
        """Yield the frames that ``data`` completes. To be exhausted before the next call.

        ``timestamp_ms`` is used for images, and for the first chunk of a container. Raises ValueError after
        ``last_frames`` or ``close``.
        """
        if self._ended:
            raise ValueError("the decoder is already flushed")
        if self._reader is None and not self._head:
            self._start_ms = timestamp_ms or 0
            if sniff_image(data) is not None:
                yield from self._admitted(self._still(data))
                return
        yield from self._admitted(self._container_frames(data))

    def close(self) -> None:
        """Release the decoder's thread and buffers. Idempotent."""
        self._ended = True
        if self._reader is not None:
            self._reader.close()

    def last_frames(self) -> Iterator[VideoFrame]:
        """End the input, and yield the remaining frames. A second call yields none."""
        if self._ended:
            return
        try:
            if self._reader is not None:
                yield from self._admitted(self._reader.finish())
            elif self._head:
                raise UnsupportedFormat("the video ended before its first frame")
        finally:
            self.close()

    def _still(self, data: bytes) -> Iterator[VideoFrame]:
        size = decoding_bytes(data, max_pixels=self._max_pixels)
        with reserved(self._room, size, keep=True):
            pixels = decode_image(data, max_pixels=self._max_pixels)
        self._room.give(size - pixels.nbytes)
        yield VideoFrame(self._start_ms, pixels)

    def _container_frames(self, data: bytes) -> Iterator[VideoFrame]:
        if self._reader is None:
            self._head += data
            if len(self._head) < _MAGIC_BYTES:
                return
            data, self._head = self._head, b""
            self._reader = self._open(_container_name(data))
        yield from self._reader.feed(data)

    def _open(self, name: str) -> ContainerReader[VideoFrame]:
        parse = partial(
            _frames,
            name,
            self._room,
            start_ms=self._start_ms,
            max_pixels=self._max_pixels,
            frames_per_second=self._frames_per_second,
        )
        return ContainerReader(
            parse,
            cost=lambda frame: frame.pixels.nbytes,
            burst=_BURST_BYTES,
            block_bytes=_BLOCK_BYTES,
            name="decode-video",
            held=HeldMp4(self._max_buffered_bytes, self._room) if name == "mp4" else None,
        )

    def _admitted(self, frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
        """Yield ``frames`` without the single images that exceed the frame rate; raise UnsupportedFormat for too many.

        The frames of a container that exceed the frame rate were dropped before, without converting their pixels.
        """
        try:
            for frame in frames:
                if self._reader is None and frame.timestamp_ms < self._next_due_ms:
                    self._room.give(frame.pixels.nbytes)
                    continue
                if self._frames_per_second is not None:
                    self._next_due_ms = frame.timestamp_ms + 1000 / self._frames_per_second
                self._count += 1
                if self._count > self._max_frames:
                    raise UnsupportedFormat(f"at most {self._max_frames} frames per video")
                yield frame
        except OmniError:
            self.close()
            raise


def _container_name(head: bytes) -> str:
    """Return libav's name of the container by its signature. Raises UnsupportedFormat."""
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head[4:8] in _MP4_BOXES:
        return "mp4"
    if head[0] == _TS_SYNC:
        return "mpegts"
    raise UnsupportedFormat("unsupported or corrupt video; supported: mp4, webm, mkv, MPEG-TS and single images")


def _frames(
    name: str,
    room: Room,
    source: ByteSource,
    *,
    start_ms: int,
    max_pixels: int,
    frames_per_second: float | None,
) -> Iterator[VideoFrame]:
    """Demux and decode ``source``, which begins at ``start_ms``, and yield its frames.

    The pixels of each frame remain charged to ``room``; the codec's own frames are charged until the iterator ends.
    """
    # Unlike the other containers, MPEG-TS has no header that lists its streams, so libav has to probe some input.
    options = {"probesize": "65536"} if name == "mpegts" else STREAMING_OPTIONS
    next_due_ms = -math.inf
    codec = Reservation(room)
    try:
        with codec, av.open(source, "r", format=name, options=options, metadata_errors=LENIENT_METADATA) as container:
            if not container.streams.video:
                raise UnsupportedFormat("the file has no video stream")
            stream = container.streams.video[0]
            context: Any = stream.codec_context
            if context is None:
                raise UnsupportedFormat("the codec of the video is not supported")
            _check_size(context.width, context.height, max_pixels)
            codec.raise_to(context.width * context.height * _CODEC_BYTES)
            # The frame size may change later, and libav then checks it before it allocates. It includes macroblocks
            # and padding, hence the slack; ``_pixels`` checks the exact size of each frame.
            context.options = {"max_pixels": str(2 * max_pixels + _MARGIN_PIXELS)}
            # One thread per video, since many are decoded concurrently.
            context.thread_count = 1
            for frame in usable_frames(container.demux(stream), context.decode, "video"):
                codec.raise_to(frame.width * frame.height * _CODEC_BYTES)
                timestamp_ms = _timestamp_ms(frame, stream.start_time)
                if timestamp_ms >= next_due_ms:
                    if frames_per_second is not None:
                        next_due_ms = timestamp_ms + 1000 / frames_per_second
                    yield VideoFrame(start_ms + timestamp_ms, _pixels(frame, max_pixels, room))
    except av.error.MemoryError as error:
        raise UnsupportedFormat(f"the frames of the video are far larger than {max_pixels} pixels") from error
    except (av.error.FFmpegError, ValueError, LookupError) as error:
        # PyAV raises ValueError and LookupError for some damaged headers.
        raise UnsupportedFormat("decoding the video failed; the data may be corrupt") from error


def _timestamp_ms(frame: av.VideoFrame, start_time: int | None) -> int:
    if frame.pts is None or frame.time_base is None:
        return 0
    return round((frame.pts - (start_time or 0)) * frame.time_base * 1000)


def _pixels(frame: av.VideoFrame, max_pixels: int, room: Room) -> Pixels:
    _check_size(frame.width, frame.height, max_pixels)
    size = 3 * frame.width * frame.height
    # Once for the returned pixels, once for the intermediate copy that rotation may need.
    with reserved(room, size), reserved(room, size, keep=True):
        pixels: Any = frame.to_ndarray(format="rgb24")
        # Phones store frames in the sensor's orientation, with the rotation as metadata.
        quarter_turns = round(frame.rotation / 90) % 4
        return np.ascontiguousarray(np.rot90(pixels, quarter_turns)) if quarter_turns else pixels


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnsupportedFormat(f"at most {max_pixels} pixels per frame, got {width}x{height}")


# Selection of frames

#: The most bytes of decoded frames that are kept until the end of the video.
MAX_KEPT_BYTES = 512 * 1024 * 1024


class FrameSelection:
    """Selects frames under limits on their number and total size, evenly spread over a video.

    The length of the video is known only at its end, so frames are kept until then, but at most ``2 *
    video_max_frames``: each time this number is exceeded, every other kept frame is dropped, and only half as many of
    the following frames are kept.

    The pixels of added frames are charged to ``room``. Those of dropped frames are released; those of selected frames
    remain charged, for the caller to release.
    """

    def __init__(self, limits: MediaLimits, room: Room = UNLIMITED, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._limits = limits
        self._room = room
        self._max_kept_bytes = max_kept_bytes
        self._kept: list[VideoFrame] = []
        self._kept_bytes = 0
        self._seen = 0
        self._stride = 1
        self._due_ms = 0.0
        #: The number of frames so far at the rate ``video_fps``.
        self._paced = 0

    def add(self, frame: VideoFrame) -> None:
        """Add a frame, already scaled to its limits. Raises UnsupportedFormat if too many bytes are kept."""
        fps = self._limits.video_fps
        if fps is None or not self._seen or frame.timestamp_ms >= self._due_ms:
            self._paced += 1
            self._due_ms = frame.timestamp_ms + 1000 / (fps or 1000)
        self._seen += 1
        if (self._seen - 1) % self._stride:
            self._room.give(frame.pixels.nbytes)
            return
        self._kept.append(frame)
        self._kept_bytes += frame.pixels.nbytes
        most = self._limits.video_max_frames
        if most is not None and len(self._kept) > 2 * most:
            self._drop(self._kept[1::2])
            self._kept = self._kept[::2]
            self._stride *= 2
        if self._kept_bytes > self._max_kept_bytes:
            raise UnsupportedFormat(
                "the decoded frames of the video are too large in total; request fewer or smaller frames"
            )

    def frames(self) -> Iterator[VideoFrame]:
        """Yield the selected frames in order, scaled down to share ``video_total_pixels``.

        Call once, after the last frame was added. Raises the errors of ``room``.
        """
        limits, available = self._limits, len(self._kept)
        count = max(self._paced, limits.video_min_frames or 0)
        count = min(count, available, limits.video_max_frames or available)
        # Evenly spaced, from the first to the last frame kept.
        chosen = [round(index * (available - 1) / (count - 1)) if count > 1 else 0 for index in range(count)]
        wanted = set(chosen)
        self._drop([frame for index, frame in enumerate(self._kept) if index not in wanted])
        for index in chosen:
            frame = self._kept[index]
            if limits.video_total_pixels is not None:
                frame = self._shared(frame, limits.video_total_pixels // count)
            yield frame

    def _shared(self, frame: VideoFrame, most: int) -> VideoFrame:
        """Scale a frame down to its share of ``video_total_pixels``."""
        pixels = fitted(frame.pixels, None, max(1, most))
        if pixels is not frame.pixels:
            self._room.take(pixels.nbytes)
            self._room.give(frame.pixels.nbytes)
        return VideoFrame(frame.timestamp_ms, pixels)

    def _drop(self, frames: Sequence[VideoFrame]) -> None:
        size = sum(frame.pixels.nbytes for frame in frames)
        self._kept_bytes -= size
        self._room.give(size)


# Description

#: Frames are compared as thumbnails of this width and height.
_SIDE = 64
#: Thresholds on the mean absolute difference of successive frames (of 255). Sensor noise and compression artefacts stay
#: below the first.
_SOME_MOTION = 2.0
_MUCH_MOTION = 12.0


class Motion(StrEnum):
    """The amount of motion in a video."""

    STILL = "nothing moves"
    SOME = "there is some motion"
    MUCH = "there is much motion"


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Facts about a video, measured without a model.

    ``duration_ms`` is the time from the first frame to the last; ``dominant_colour`` is that of the average frame.
    """

    frame_count: int
    duration_ms: int
    dominant_colour: str
    motion: Motion

    def sentence(self, name: str) -> str:
        """Return a sentence that describes the video, which is called ``name``."""
        frames = "one frame" if self.frame_count == 1 else f"{self.frame_count} frames"
        duration = f" over {self.duration_ms / 1000:.1f} seconds" if self.duration_ms else ""
        motion = f", and {self.motion}" if self.frame_count > 1 else ""
        return f"{name} has {frames}{duration}, mostly {self.dominant_colour}{motion}."


class VideoObserver:
    """Accumulates the facts about a video frame by frame, without keeping frames. Frames may differ in size."""

    def __init__(self) -> None:
        self._count = 0
        self._first_ms = 0
        self._last_ms = 0
        self._sum: NDArray[np.float64] = np.zeros((_SIDE, _SIDE, 3))
        self._previous: NDArray[np.float32] | None = None
        self._difference_sum = 0.0

    def add(self, frame: VideoFrame) -> None:
        """Add the next frame."""
        picture = _square(thumbnail_of(frame.pixels, _SIDE))
        if self._previous is None:
            self._first_ms = frame.timestamp_ms
        else:
            self._difference_sum += float(np.abs(picture - self._previous).mean())
        self._previous = picture
        self._last_ms = frame.timestamp_ms
        self._sum += picture
        self._count += 1

    def facts(self) -> VideoFacts | None:
        """Return the facts so far; None before the first frame."""
        if self._count == 0:
            return None
        mean_difference = self._difference_sum / max(self._count - 1, 1)
        motion = Motion.STILL
        if mean_difference >= _MUCH_MOTION:
            motion = Motion.MUCH
        elif mean_difference >= _SOME_MOTION:
            motion = Motion.SOME
        colour = dominant_colour(self._sum / self._count)
        return VideoFacts(self._count, self._last_ms - self._first_ms, colour, motion)


def _square(thumbnail: NDArray[np.float32]) -> NDArray[np.float32]:
    """Stretch a smaller thumbnail to the full size, so that frames of any size can be compared."""
    rows = np.arange(_SIDE) * thumbnail.shape[0] // _SIDE
    columns = np.arange(_SIDE) * thumbnail.shape[1] // _SIDE
    square: NDArray[np.float32] = thumbnail[rows][:, columns]
    return square
