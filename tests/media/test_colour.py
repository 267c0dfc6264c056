from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageColor

from omni_ws.media import (
    COLOUR_NAMES,
    dominant_colour,
)


@pytest.mark.parametrize(
    ("css", "name"),
    [
        ("black", "black"),
        ("#202020", "black"),
        ("white", "white"),
        ("#eeeeee", "white"),
        ("grey", "grey"),
        ("silver", "grey"),
        ("red", "red"),
        ("crimson", "red"),
        ("darkred", "red"),
        ("orange", "orange"),
        ("saddlebrown", "brown"),
        ("sienna", "brown"),
        ("yellow", "yellow"),
        ("gold", "yellow"),
        ("green", "green"),
        ("lime", "green"),
        ("darkgreen", "green"),
        ("cyan", "cyan"),
        ("teal", "cyan"),
        ("blue", "blue"),
        ("navy", "blue"),
        ("royalblue", "blue"),
        ("indigo", "purple"),
        ("blueviolet", "purple"),
        ("deeppink", "pink"),
        ("hotpink", "pink"),
    ],
)
def test_names(css: str, name: str) -> None:
    assert dominant_colour(np.array([ImageColor.getrgb(css)])) == name


def test_the_most_frequent_wins() -> None:
    pixels = np.zeros((10, 10, 3), dtype=np.uint8)
    pixels[:, :6] = (0, 200, 0)
    assert dominant_colour(pixels) == "green"


@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_every_colour_has_a_name(rgb: tuple[int, int, int]) -> None:
    assert dominant_colour(np.array([rgb])) in COLOUR_NAMES
