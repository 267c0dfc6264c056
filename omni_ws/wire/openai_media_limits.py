"""Limits of a chat body on the size of images and the size and frame rate of videos."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue

ImagePixels = Annotated[int, Meta(ge=1, le=32 * 1024 * 1024)]
FramePixels = Annotated[int, Meta(ge=1, le=4096 * 2160)]
MAX_FRAMES: Final = 4096
Frames = Annotated[int, Meta(ge=1, le=MAX_FRAMES)]


class MediaLimitFields(Struct, frozen=True, kw_only=True):
    """Fields that override how the engine scales images and samples videos.

    Pixel counts are of a whole image or frame; ``video_total_pixels`` is the sum over all frames of a video.
    """

    image_min_pixels: ImagePixels | None = None
    image_max_pixels: ImagePixels | None = None
    video_min_pixels: FramePixels | None = None
    video_max_pixels: FramePixels | None = None
    video_fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    video_min_frames: Frames | None = None
    video_max_frames: Frames | None = None
    video_total_pixels: Annotated[int, Meta(ge=1, le=MAX_FRAMES * 4096 * 2160)] | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by field name. Raises InvalidValue for a minimum above its maximum."""
        for kind, unit in (("image", "pixels"), ("video", "pixels"), ("video", "frames")):
            least, most = getattr(self, f"{kind}_min_{unit}"), getattr(self, f"{kind}_max_{unit}")
            if least is not None and most is not None and least > most:
                raise InvalidValue(f"{kind}_min_{unit} must not exceed {kind}_max_{unit}", param=f"{kind}_min_{unit}")
        names = MediaLimitFields.__struct_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}
