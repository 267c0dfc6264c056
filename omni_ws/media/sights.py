"""Sights: a description, without a model, of the pictures in one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from omni_ws.media.image import ImageFacts, Pixels, describe_image
from omni_ws.media.video import VideoFacts, VideoFrame, VideoObserver

F = TypeVar("F", ImageFacts, VideoFacts)

#: The end of each description.
UNSEEN: Final = "No model looks at pictures here, so I can't tell what they show."
#: Further pictures are only counted.
MAX_DESCRIBED: Final = 8


class Sights:
    """Describes successive pictures by size, colour and motion. Nothing is recognised, and no pixels are kept."""

    def __init__(self) -> None:
        self._images: list[ImageFacts] = []
        self._image_count = 0
        self._videos: list[VideoFacts] = []
        self._observer: VideoObserver | None = None
        self._video_number = -1

    def look_at_image(self, pixels: Pixels) -> None:
        """Add an image. Blocks for some milliseconds."""
        self._image_count += 1
        if self._image_count <= MAX_DESCRIBED:
            self._images.append(describe_image(pixels))

    def look_at_frames(self, frames: Sequence[VideoFrame], number: int) -> None:
        """Add frames of the video with this ``number``. Blocks for some milliseconds a frame."""
        if self._observer is None or number != self._video_number:
            self._end_video()
            self._observer, self._video_number = VideoObserver(), number
        for frame in frames:
            self._observer.add(frame)

    def sentences(self) -> tuple[str, ...]:
        """Return the description; empty if there are no pictures. Ends the current video."""
        self._end_video()
        described = [facts.sentence(name) for name, facts in _named("image", self._image_count, self._images)]
        if self._image_count > len(self._images):
            described.append(f"There are {self._image_count} images in all.")
        described += [facts.sentence(name) for name, facts in _named("video", len(self._videos), self._videos)]
        return (*described, UNSEEN) if described else ()

    def _end_video(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and (facts := observer.facts()) is not None:
            self._videos.append(facts)


def _named(kind: str, count: int, all_facts: Sequence[F]) -> Iterator[tuple[str, F]]:
    """Yield each of the facts with the name of its picture, such as "The image" or, among several, "Image 2"."""
    for place, facts in enumerate(all_facts, 1):
        yield (f"The {kind}" if count == 1 else f"{kind.capitalize()} {place}"), facts
