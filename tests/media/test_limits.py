"""The sizes to which images and frames are scaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.media import MediaLimits


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        (MediaLimits(), (40, 80)),
        (MediaLimits(image_max_pixels=3200), (40, 80)),
        (MediaLimits(image_max_pixels=3199), (39, 79)),
        (MediaLimits(image_max_pixels=800), (20, 40)),
        (MediaLimits(image_min_pixels=3200), (40, 80)),
        (MediaLimits(image_min_pixels=3201), (41, 81)),
        (MediaLimits(image_min_pixels=12_800), (80, 160)),
        (MediaLimits(video_max_pixels=1, video_min_pixels=1), (40, 80)),
    ],
)
def test_images(limits: MediaLimits, size: tuple[int, int]) -> None:
    assert limits.fit_image(np.zeros((40, 80, 3), np.uint8)).shape == (*size, 3)


def test_frames_have_limits_of_their_own() -> None:
    frame = np.full((40, 80, 3), 200, np.uint8)
    fitted = MediaLimits(video_max_pixels=800, image_max_pixels=1).fit_frame(frame)
    assert (fitted.shape, int(fitted[0, 0, 0])) == ((20, 40, 3), 200)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4000))
def test_a_limit_is_kept_and_no_side_vanishes(height: int, width: int, limit: int) -> None:
    pixels = np.zeros((height, width, 3), np.uint8)
    smaller = MediaLimits(image_max_pixels=limit).fit_image(pixels).shape
    # A side of one pixel cannot shrink any further.
    assert smaller[0] * smaller[1] <= max(limit, *smaller[:2])
    assert min(smaller) >= 1
    larger = MediaLimits(image_min_pixels=limit).fit_image(pixels).shape
    assert larger[0] * larger[1] >= limit
