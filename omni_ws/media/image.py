"""Still images: what they are, their pixels, and what can be said about them without a model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
#: Of a pixel in Pillow's own pictures of three or four bands.
PILLOW_BYTES = 4
#: Bytes for a pixel that the libraries may take besides the picture: canvases of animations, lines of run lengths.
#: (The coefficients of a progressive JPEG are counted with its bands.)
_UNPACKING_BYTES = {"WEBP": 12, "GIF": 4, "BMP": 1}
#: Pixels that are converted at a time, and what that takes for each.
_STRIP_PIXELS = 256 * 1024
_STRIP_BYTES = 24

#: The EXIF tag that says how the camera was held, and for each of its values where the picture's rows and columns go:
#: a view of the upright pixels as the file has them.
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
_SWAPPING = (5, 6, 7, 8)
_LUMA = np.array([0.2126, 0.7152, 0.0722], dtype=np.float32)  # ITU-R BT.709


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """``brightness`` from 0.0 (black) to 1.0 (white); ``dominant_colour`` as people call it."""

    width: int
    height: int
    dominant_colour: str
    brightness: float


def decoding_bytes(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> int:
    """What ``decode_image`` takes, by the head of the image; raises what that raises for it."""
    with _opened(data, max_pixels) as image:
        count = image.width * image.height
        return count * (_source_bytes(image) + 3) + min(count, _STRIP_PIXELS) * _STRIP_BYTES


def decode_image(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Pixels:
    """Upright (EXIF), the first frame of an animation, transparent parts on white.

    Raises UnsupportedFormat for anything that is no image, is damaged, or has more than ``max_pixels``; the size is
    read before anything is unpacked.
    """
    with _opened(data, max_pixels) as image:
        return _rgb(image)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """What goes wrong in the block is the image's fault."""
    kind = sniff_image(data)
    if kind is None:
        raise UnsupportedFormat(f"not an image that can be read; known are {', '.join(_FORMATS)}")
    try:
        with Image.open(io.BytesIO(data), formats=[_FORMATS[kind]]) as image:
            if image.width * image.height > max_pixels:
                raise UnsupportedFormat(f"an image of {image.width}x{image.height} pixels is more than {max_pixels}")
            yield image
    except UnsupportedFormat:
        raise
    except Exception as error:
        # Pillow's readers raise whatever their parsing runs into, SyntaxError and struct.error among it.
        raise UnsupportedFormat(f"a damaged or oversized {kind}") from error


def _source_bytes(image: Image.Image) -> int:
    """What Pillow and the library behind it take for a pixel while they unpack one."""
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    coefficients = 2 * len(image.getbands()) if image.format == "JPEG" else 0
    return stored + coefficients + _UNPACKING_BYTES.get(image.format or "", 0)


def _rgb(image: Image.Image) -> Pixels:
    """Strip by strip: as a whole, each step would take as much as the picture once more."""
    image.load()
    turned = image.getexif().get(_ORIENTATION, 1)
    size = (image.width, image.height) if turned in _SWAPPING else (image.height, image.width)
    pixels = np.empty((*size, 3), np.uint8)
    upright = _UPRIGHT[turned](pixels) if turned in _UPRIGHT else pixels
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        upright[top:bottom] = _rgb_strip(image.crop((0, top, image.width, bottom)))
    return pixels


def _rgb_strip(image: Image.Image) -> NDArray[np.uint8]:
    """Shape (height, width, 3), or (height, width, 1) where all three are the same."""
    if image.mode.startswith("I"):
        # 16 bits of grey; Pillow would clip them instead of scaling.
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return grey[:, :, np.newaxis]
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return np.asarray(image.convert("RGB"))


def describe_image(pixels: Pixels) -> ImageFacts:
    height, width = pixels.shape[:2]
    thumbnail = thumbnail_of(pixels)
    brightness = float((thumbnail @ _LUMA).mean() / 255)
    return ImageFacts(width, height, dominant_colour(thumbnail), round(brightness, 3))


def thumbnail_of(pixels: Pixels, side: int = 64) -> NDArray[np.float32]:
    """At most ``side`` × ``side``, shape (h, w, 3), 0 … 255: every pixel the mean of those it stands for."""
    height, width = pixels.shape[:2]
    rows, columns = _starts(height, side), _starts(width, side)
    # Band by band: as one call it would make a copy of the whole picture, of four times its size.
    bands = [pixels[top:bottom].sum(axis=0, dtype=np.uint32) for top, bottom in pairwise((*rows, height))]
    sums = np.add.reduceat(np.stack(bands), columns, axis=1)
    counts = np.multiply.outer(np.diff(rows, append=height), np.diff(columns, append=width))
    return (sums / counts[:, :, np.newaxis]).astype(np.float32)


def _starts(length: int, side: int) -> NDArray[np.intp]:
    """Where the parts begin, of which there are ``side`` at most."""
    count = min(side, length)
    return np.arange(count) * length // count
