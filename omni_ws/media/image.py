"""Still images: what they are, their pixels, and what can be said about them without a model."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from omni_ws.core.image_type import sniff_image
from omni_ws.errors import UnsupportedFormat
from omni_ws.media.colour import dominant_colour

#: Shape (height, width, 3), red, green, blue.
Pixels: TypeAlias = NDArray[np.uint8]

#: 96 MiB once decoded; more than a phone's ordinary photograph has.
MAX_IMAGE_PIXELS = 32 * 1024 * 1024

_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
_LUMA = np.array([0.2126, 0.7152, 0.0722], dtype=np.float32)  # ITU-R BT.709


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """``brightness`` from 0.0 (black) to 1.0 (white); ``dominant_colour`` as people call it."""

    width: int
    height: int
    dominant_colour: str
    brightness: float


def decode_image(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Pixels:
    """Upright (EXIF), the first frame of an animation, transparent parts on white.

    Raises UnsupportedFormat for anything that is no image, is damaged, or has more than ``max_pixels``; the size is
    looked at before anything is unpacked.
    """
    kind = sniff_image(data)
    if kind is None:
        raise UnsupportedFormat(f"not an image that can be read; known are {', '.join(_FORMATS)}")
    try:
        with Image.open(io.BytesIO(data), formats=[_FORMATS[kind]]) as image:
            if image.width * image.height > max_pixels:
                raise UnsupportedFormat(f"an image of {image.width}x{image.height} pixels is more than {max_pixels}")
            return _rgb(ImageOps.exif_transpose(image))
    except UnsupportedFormat:
        raise
    except Exception as error:
        # Pillow's readers raise whatever their parsing runs into, SyntaxError and struct.error among it.
        raise UnsupportedFormat(f"a damaged or oversized {kind}") from error


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):
        # 16 bits of grey; Pillow would clip them instead of scaling.
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, np.newaxis], 3, axis=2)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return np.array(image.convert("RGB"))


def describe_image(pixels: Pixels) -> ImageFacts:
    height, width = pixels.shape[:2]
    thumbnail = thumbnail_of(pixels)
    brightness = float((thumbnail @ _LUMA).mean() / 255)
    return ImageFacts(width, height, dominant_colour(thumbnail), round(brightness, 3))


def thumbnail_of(pixels: Pixels, side: int = 64) -> NDArray[np.float32]:
    """At most ``side`` × ``side``, shape (h, w, 3), 0 … 255: every pixel the mean of those it stands for."""
    height, width = pixels.shape[:2]
    size = (min(side, width), min(side, height))
    small = Image.fromarray(pixels).resize(size, Image.Resampling.BOX)
    return np.asarray(small).astype(np.float32)
