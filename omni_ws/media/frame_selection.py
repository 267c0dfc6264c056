"""FrameSelection: selects the frames of a video that a model sees, under limits on their number and total size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_ws.core.quota import UNLIMITED, Room
from omni_ws.errors import UnsupportedFormat
from omni_ws.media.limits import MediaLimits
from omni_ws.media.video import VideoFrame

#: The limit on decoded frames that are kept until the end of the video, in bytes.
MAX_KEPT_BYTES = 512 * 1024 * 1024


class FrameSelection:
    """Selects frames spread evenly over a video, whose length is known only at its end: frames are kept until then.

    At most ``2 * video_max_frames`` are kept. Beyond that every other frame is dropped, from those kept and from those
    that follow, so that the distance between them doubles.

    The pixels of added frames are accounted for in ``room``; those of dropped frames are returned to it, those of
    selected frames remain the caller's.
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
        #: The number of frames at ``video_fps``.
        self._paced = 0

    def add(self, frame: VideoFrame) -> None:
        """Add a frame, already scaled to its limits. Raises UnsupportedFormat when too many bytes are kept."""
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
        """Yield the selected frames in order, at the end of the video."""
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
        pixels = self._limits.fit_share(frame.pixels, most)
        if pixels is not frame.pixels:
            self._room.take(pixels.nbytes)
            self._room.give(frame.pixels.nbytes)
        return VideoFrame(frame.timestamp_ms, pixels)

    def _drop(self, frames: Sequence[VideoFrame]) -> None:
        size = sum(frame.pixels.nbytes for frame in frames)
        self._kept_bytes -= size
        self._room.give(size)
