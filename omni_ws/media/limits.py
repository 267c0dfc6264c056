"""MediaLimits: the size of images, and the size and frame rate of videos, as a model sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from omni_ws.media.image import Pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits on the pixels of an image or frame, and on the frames of a video; None for no limit.

    Images outside their limits are scaled, preserving the aspect ratio. ``video_total_pixels`` limits the sum over all
    frames of a video and takes precedence over ``video_min_pixels``.
    """

    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None
    video_total_pixels: int | None = None

    @property
    def select_frames(self) -> bool:
        """Whether the frames can be selected and scaled only once the whole video is known; see FrameSelection."""
        return (self.video_min_frames, self.video_max_frames, self.video_total_pixels) != (None, None, None)

    def fit_image(self, pixels: Pixels) -> Pixels:
        """Return the image scaled to its limits."""
        return _fitted(pixels, self.image_min_pixels, self.image_max_pixels)

    def fit_frame(self, pixels: Pixels) -> Pixels:
        """Return the frame of a video scaled to its limits."""
        return _fitted(pixels, self.video_min_pixels, self.video_max_pixels)

    @staticmethod
    def fit_share(pixels: Pixels, most: int) -> Pixels:
        """Return the frame scaled down to at most ``most`` pixels, though at least one."""
        return _fitted(pixels, None, max(1, most))


def _fitted(pixels: Pixels, least: int | None, most: int | None) -> Pixels:
    height, width = pixels.shape[:2]
    if most is not None and height * width > most:
        scale = math.sqrt(most / (height * width))
        size = (max(1, math.floor(width * scale)), max(1, math.floor(height * scale)))
    elif least is not None and height * width < least:
        scale = math.sqrt(least / (height * width))
        size = (math.ceil(width * scale), math.ceil(height * scale))
    else:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
