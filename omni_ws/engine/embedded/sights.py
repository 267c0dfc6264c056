"""What the embedded engine says about pictures: their size, their colour, their motion. Nothing is recognised."""

from __future__ import annotations

from collections.abc import Iterator

from omni_ws.media.image import ImageFacts
from omni_ws.media.video_facts import Motion, VideoFacts

_DARK = 0.2
_BRIGHT = 0.7

_MOTION = {Motion.STILL: "nothing moves", Motion.SOME: "there is some motion", Motion.MUCH: "there is much motion"}

#: More pictures than this are only counted.
MAX_DESCRIBED = 8


def describe_images(images: list[ImageFacts], count: int) -> Iterator[str]:
    """Sentences about ``count`` images, of which ``images`` are the first."""
    for place, facts in enumerate(images, 1):
        name = "The image" if count == 1 else f"Image {place}"
        yield (
            f"{name} is {facts.width} by {facts.height} pixels, mostly {facts.dominant_colour}, "
            f"and {_brightness(facts.brightness)}."
        )
    if count > len(images):
        yield f"There are {count} images in all."


def describe_videos(videos: list[VideoFacts]) -> Iterator[str]:
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
