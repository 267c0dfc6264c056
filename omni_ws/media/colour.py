"""Names the dominant colour of an image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The colours by hue: (name, upper limit of the hue in degrees). Red is at both ends of the circle.
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

#: In terms of HSV, from 0 to 1: below ``_DARK`` a pixel is black; below ``_PALE_SATURATION`` it is grey or, above
#: ``_BRIGHT``, white.
_DARK = 0.18
_PALE_SATURATION = 0.15
_BRIGHT = 0.85
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
    named = np.where(pale & (value > _BRIGHT), COLOUR_NAMES.index("white"), named)
    return np.where(value < _DARK, COLOUR_NAMES.index("black"), named)


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
