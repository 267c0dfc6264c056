"""The fields of a chat body that say how large, and how dense in time, images and videos are to be."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_ws.errors import InvalidValue

ImagePixels = Annotated[int, Meta(ge=1, le=32 * 1024 * 1024)]
FramePixels = Annotated[int, Meta(ge=1, le=4096 * 2160)]


class MediaLimitFields(Struct, frozen=True, kw_only=True):
    image_min_pixels: ImagePixels | None = None
    image_max_pixels: ImagePixels | None = None
    video_min_pixels: FramePixels | None = None
    video_max_pixels: FramePixels | None = None
    video_fps: Annotated[float, Meta(gt=0, le=240)] | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by name. Raises InvalidValue for a minimum above its maximum."""
        for kind in ("image", "video"):
            least, most = getattr(self, f"{kind}_min_pixels"), getattr(self, f"{kind}_max_pixels")
            if least is not None and most is not None and least > most:
                raise InvalidValue("more than the most that there may be", param=f"{kind}_min_pixels")
        names = MediaLimitFields.__struct_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}
