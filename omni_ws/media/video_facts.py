"""Describes a video without a model: duration, dominant colour, motion."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from omni_ws.media.colour import dominant_colour
from omni_ws.media.image import thumbnail_of
from omni_ws.media.video import VideoFrame

#: Frames are compared as thumbnails of this width and height.
_SIDE = 64
#: Thresholds on the mean absolute difference of successive frames (of 255). Sensor noise and compression artefacts stay
#: below the first.
_SOME_MOTION = 2.0
_MUCH_MOTION = 12.0


class Motion(StrEnum):
    """How much the picture moves."""

    STILL = "still"
    SOME = "some motion"
    MUCH = "much motion"


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What can be said of a video without a model.

    ``duration_ms`` is the time from the first frame to the last; ``dominant_colour`` is that of the average frame.
    """

    frame_count: int
    duration_ms: int
    dominant_colour: str
    motion: Motion


class VideoObserver:
    """Accumulates the description frame by frame, without keeping frames. Frames may differ in size."""

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
        """Return the description so far; None before the first frame."""
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
