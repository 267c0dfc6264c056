"""Images: decoding, size limits, and descriptions. The module ``video`` has the same for videos.

Synchronous and CPU-bound: called from worker threads.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_ws.core.file_heads import sniff_image
from omni_ws.errors import UnsupportedFormat

# Still images: decoding, size limits, and a description by size, colour and brightness.


#: The pixels of an image: uint8 of shape (height, width, 3), in the order red, green, blue.
Pixels: TypeAlias = NDArray[np.uint8]

#: 96 MiB of RGB: more than an ordinary photograph of a phone has.
MAX_IMAGE_PIXELS = 32 * 1024 * 1024

_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
#: Bytes per pixel of Pillow's in-memory images with three or four bands.
PILLOW_BYTES = 4
#: The bytes per pixel that decoders use besides the image, for canvases of animations and run-length lines. (The
#: coefficients of a progressive JPEG depend on its bands and are counted in ``_source_bytes``.)
_UNPACKING_BYTES = {"WEBP": 12, "GIF": 4, "BMP": 1}
#: The pixels that are converted to RGB at a time, and the bytes that this takes for each.
_STRIP_PIXELS = 256 * 1024
_STRIP_BYTES = 24

#: The EXIF tag with the orientation of the camera. For each of its values: a function that returns a view of the
#: upright image in the orientation of the file, into which the file's rows can be written.
_ORIENTATION = 0x0112
_UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda whole: whole[:, ::-1],
    3: lambda whole: whole[::-1, ::-1],
    4: lambda whole: whole[::-1],
    5: lambda whole: whole.swapaxes(0, 1),
    6: lambda whole: whole.swapaxes(0, 1)[::-1],
    7: lambda whole: whole.swapaxes(0, 1)[::-1, ::-1],
    8: lambda whole: whole.swapaxes(0, 1)[:, ::-1],
}
#: The orientations that swap width and height.
_SWAPPING = (5, 6, 7, 8)
_LUMA = np.array([0.2126, 0.7152, 0.0722], dtype=np.float32)  # ITU-R BT.709

#: Below the first brightness an image is called dark, above the second bright.
_DARK = 0.2
_BRIGHT = 0.7


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts about an image, measured without a model.

    ``brightness`` is from 0.0 (black) to 1.0 (white); ``dominant_colour`` is one of ``COLOUR_NAMES``.
    """

    width: int
    height: int
    dominant_colour: str
    brightness: float

    def sentence(self, name: str) -> str:
        """Return a sentence that describes the image, which is called ``name``."""
        light = "dark" if self.brightness < _DARK else "bright" if self.brightness > _BRIGHT else "of medium brightness"
        return f"{name} is {self.width} by {self.height} pixels, mostly {self.dominant_colour}, and {light}."


def decoding_bytes(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> int:
    """Return the peak memory of decoding an image, in bytes.

    Reads only the header. Raises as ``decode_image`` does.
    """
    with _opened(data, max_pixels) as image:
        count = image.width * image.height
        return count * (_source_bytes(image) + 3) + min(count, _STRIP_PIXELS) * _STRIP_BYTES


def decode_image(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Pixels:
    """Decode an image to upright RGB pixels.

    For an animation, returns the first frame; transparent parts become white. Raises UnsupportedFormat for unknown or
    damaged data, and for more than ``max_pixels`` according to the header, before any pixel is decoded.
    """
    with _opened(data, max_pixels) as image:
        return _rgb(image)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image; any exception in the ``with`` block becomes UnsupportedFormat."""
    kind = sniff_image(data)
    if kind is None:
        raise UnsupportedFormat(f"unsupported or corrupt image; supported: {', '.join(_FORMATS)}")
    try:
        with Image.open(io.BytesIO(data), formats=[_FORMATS[kind]]) as image:
            if image.width * image.height > max_pixels:
                raise UnsupportedFormat(f"at most {max_pixels} pixels per image, got {image.width}x{image.height}")
            yield image
    except UnsupportedFormat:
        raise
    except Exception as error:
        # Pillow's parsers raise various exceptions, among them SyntaxError and struct.error.
        raise UnsupportedFormat(f"corrupt or oversized {kind}") from error


def _source_bytes(image: Image.Image) -> int:
    """Return the bytes per pixel that Pillow and its codec library use while decoding."""
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    coefficients = 2 * len(image.getbands()) if image.format == "JPEG" else 0
    return stored + coefficients + _UNPACKING_BYTES.get(image.format or "", 0)


def _rgb(image: Image.Image) -> Pixels:
    """Convert an image to upright RGB, strip by strip, so that no step needs a second copy of the whole image."""
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    size = (image.width, image.height) if orientation in _SWAPPING else (image.height, image.width)
    pixels = np.empty((*size, 3), np.uint8)
    upright = _UPRIGHT[orientation](pixels) if orientation in _UPRIGHT else pixels
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        upright[top:bottom] = _rgb_strip(image.crop((0, top, image.width, bottom)))
    return pixels


def _rgb_strip(image: Image.Image) -> NDArray[np.uint8]:
    """Return RGB pixels of shape (height, width, 3), or (height, width, 1) for grey."""
    if image.mode.startswith("I"):
        # 16-bit grey, which Pillow would clip instead of scale.
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return grey[:, :, np.newaxis]
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return np.asarray(image.convert("RGB"))


def describe_image(pixels: Pixels) -> ImageFacts:
    """Return size, colour and brightness of an image."""
    height, width = pixels.shape[:2]
    thumbnail = thumbnail_of(pixels)
    brightness = float((thumbnail @ _LUMA).mean() / 255)
    return ImageFacts(width, height, dominant_colour(thumbnail), round(brightness, 3))


def thumbnail_of(pixels: Pixels, side: int = 64) -> NDArray[np.float32]:
    """Return a thumbnail of at most ``side`` × ``side``, by averaging areas of pixels.

    The result has the shape (height, width, 3) and values from 0 to 255.
    """
    height, width = pixels.shape[:2]
    rows, columns = _starts(height, side), _starts(width, side)
    # In horizontal bands: a single call would convert the whole image to uint32, four times its size.
    bands = [pixels[top:bottom].sum(axis=0, dtype=np.uint32) for top, bottom in pairwise((*rows, height))]
    sums = np.add.reduceat(np.stack(bands), columns, axis=1)
    counts = np.multiply.outer(np.diff(rows, append=height), np.diff(columns, append=width))
    return (sums / counts[:, :, np.newaxis]).astype(np.float32)


def _starts(length: int, side: int) -> NDArray[np.intp]:
    """Split ``length`` into at most ``side`` parts and return where each starts."""
    count = min(side, length)
    return np.arange(count) * length // count


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """A model's limits on the pixels of an image or a video frame, and on the frames of a video; None for no limit.

    Images and frames outside the limits are scaled, preserving the aspect ratio. ``video_total_pixels`` limits the sum
    over all frames of a video and takes precedence over ``video_min_pixels``.
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
        """Whether a limit concerns the video as a whole, so that a FrameSelection must select and scale its frames."""
        return (self.video_min_frames, self.video_max_frames, self.video_total_pixels) != (None, None, None)

    def fit_image(self, pixels: Pixels) -> Pixels:
        """Return the image scaled to the limits of images."""
        return fitted(pixels, self.image_min_pixels, self.image_max_pixels)

    def fit_frame(self, pixels: Pixels) -> Pixels:
        """Return the frame of a video scaled to the limits on a single frame."""
        return fitted(pixels, self.video_min_pixels, self.video_max_pixels)


def fitted(pixels: Pixels, least: int | None, most: int | None) -> Pixels:
    """Return the picture scaled to at least ``least`` and at most ``most`` pixels; None for no limit.

    A picture within the limits is returned itself, not a copy.
    """
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


# Colours

#: The names of colours with the upper limit of their hue in degrees. Red is at both ends of the circle.
_HUES = (
    ("red", 15.0),
    ("orange", 45.0),
    ("yellow", 70.0),
    ("green", 165.0),
    ("cyan", 200.0),
    ("blue", 255.0),
    ("purple", 290.0),
    ("pink", 345.0),
    ("red", 360.1),
)
COLOUR_NAMES = ("black", "white", "grey", "red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown")

#: Limits of HSV values, from 0 to 1: below the value ``_BLACK_BELOW`` a pixel is black; below the saturation
#: ``_PALE_SATURATION`` it is grey or, above the value ``_WHITE_ABOVE``, white.
_BLACK_BELOW = 0.18
_PALE_SATURATION = 0.15
_WHITE_ABOVE = 0.85
#: Orange below this value is brown.
_BROWN_BELOW = 0.65


def dominant_colour(pixels: NDArray[Any]) -> str:
    """Return the colour name that applies to most pixels.

    ``pixels`` has the shape (…, 3) and values from 0 to 255.
    """
    counts = np.bincount(_named(pixels.reshape(-1, 3)), minlength=len(COLOUR_NAMES))
    return COLOUR_NAMES[int(counts.argmax())]


def _named(pixels: NDArray[Any]) -> NDArray[np.intp]:
    """Return the index in COLOUR_NAMES of each pixel's colour."""
    rgb = pixels.astype(np.float32) * np.float32(1 / 255)
    value, low = rgb.max(axis=1), rgb.min(axis=1)
    chroma = value - low
    saturation = chroma / np.maximum(value, 1e-6)
    hue = _hue(rgb, value, chroma)
    borders = [border for _, border in _HUES[:-1]]
    by_hue = np.array([COLOUR_NAMES.index(name) for name, _ in _HUES])
    named = by_hue[np.digitize(hue, borders)]
    orange, brown = COLOUR_NAMES.index("orange"), COLOUR_NAMES.index("brown")
    named = np.where((named == orange) & (value < _BROWN_BELOW), brown, named)
    pale = saturation < _PALE_SATURATION
    named = np.where(pale, COLOUR_NAMES.index("grey"), named)
    named = np.where(pale & (value > _WHITE_ABOVE), COLOUR_NAMES.index("white"), named)
    return np.where(value < _BLACK_BELOW, COLOUR_NAMES.index("black"), named)


def _hue(rgb: NDArray[np.float32], value: NDArray[np.float32], chroma: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the hue in degrees, 0 for greys."""
    red, green, blue = rgb.T
    safe = np.maximum(chroma, 1e-6)
    sextant = np.select(
        [value == red, value == green],
        [((green - blue) / safe) % 6, (blue - red) / safe + 2],
        default=(red - green) / safe + 4,
    )
    return np.where(chroma > 0, sextant * 60, 0.0).astype(np.float32)
