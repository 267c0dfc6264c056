"""Sights: what is said about pictures: their size, their colour, their motion. Nothing is recognised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_ws.engine.decoding import ImagePart, VideoPart
from omni_ws.media.image import ImageFacts, describe_image
from omni_ws.media.video import Motion, VideoFacts, VideoObserver

_DARK = 0.2
_BRIGHT = 0.7

_MOTION = {Motion.STILL: "nothing moves", Motion.SOME: "there is some motion", Motion.MUCH: "there is much motion"}

#: Follows each description.
UNSEEN = "No model looks at pictures here, so I can't tell what they show."

#: More pictures than this are only counted.
MAX_DESCRIBED = 8


class Sights:
    """The pictures of one request, as facts: no pixels are kept."""

    def __init__(self) -> None:
        self._images: list[ImageFacts] = []
        self._image_count = 0
        self._videos: list[VideoFacts] = []
        self._observer: VideoObserver | None = None
        self._video_part = -1

    def look(self, part: ImagePart | VideoPart) -> None:
        """Add an image, or frames of a video. Blocks for some milliseconds a picture."""
        if isinstance(part, ImagePart):
            self._image_count += 1
            if self._image_count <= MAX_DESCRIBED:
                self._images.append(describe_image(part.pixels))
            return
        if self._observer is None or part.part != self._video_part:
            self._end_video()
            self._observer, self._video_part = VideoObserver(), part.part
        for frame in part.frames:
            self._observer.add(frame)

    def sentences(self) -> tuple[str, ...]:
        """Return the description; empty where there are no pictures. Ends the video under way."""
        self._end_video()
        described = (*_describe_images(self._images, self._image_count), *_describe_videos(self._videos))
        return (*described, UNSEEN) if described else ()

    def _end_video(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and (facts := observer.facts()) is not None:
            self._videos.append(facts)


def _describe_images(images: Sequence[ImageFacts], count: int) -> Iterator[str]:
    """Sentences about ``count`` images, of which ``images`` are the first."""
    for place, facts in enumerate(images, 1):
        name = "The image" if count == 1 else f"Image {place}"
        yield (
            f"{name} is {facts.width} by {facts.height} pixels, mostly {facts.dominant_colour}, "
            f"and {_brightness(facts.brightness)}."
        )
    if count > len(images):
        yield f"There are {count} images in all."


def _describe_videos(videos: Sequence[VideoFacts]) -> Iterator[str]:
    for place, facts in enumerate(videos, 1):
        name = "The video" if len(videos) == 1 else f"Video {place}"
        frames = "one frame" if facts.frame_count == 1 else f"{facts.frame_count} frames"
        duration = f" over {facts.duration_ms / 1000:.1f} seconds" if facts.duration_ms else ""
        motion = f", and {_MOTION[facts.motion]}" if facts.frame_count > 1 else ""
        yield f"{name} has {frames}{duration}, mostly {facts.dominant_colour}{motion}."


def _brightness(brightness: float) -> str:
    if brightness < _DARK:
        return "dark"
    return "bright" if brightness > _BRIGHT else "of medium brightness"
