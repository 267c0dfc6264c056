"""Which frames of a video are selected, and at what size, when that depends on the whole video."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.errors import UnsupportedFormat
from omni_ws.media import MediaLimits
from omni_ws.media.video import FrameSelection, VideoFrame

EVERY_MS = 100


def selected(limits: MediaLimits, count: int, *, size: tuple[int, int] = (1, 1)) -> list[VideoFrame]:
    selection = FrameSelection(limits)
    for place in range(count):
        selection.add(VideoFrame(place * EVERY_MS, np.zeros((*size, 3), np.uint8)))
    return list(selection.frames())


def places(limits: MediaLimits, count: int) -> list[int]:
    return [frame.timestamp_ms // EVERY_MS for frame in selected(limits, count)]


@pytest.mark.parametrize(
    ("limits", "count", "expected"),
    [
        (MediaLimits(video_max_frames=4), 4, [0, 1, 2, 3]),
        (MediaLimits(video_max_frames=3), 5, [0, 2, 4]),
        (MediaLimits(video_max_frames=1), 5, [0]),
        (MediaLimits(video_min_frames=4), 3, [0, 1, 2]),
        (MediaLimits(video_fps=5, video_min_frames=2), 6, [0, 2, 5]),
        (MediaLimits(video_fps=5, video_min_frames=4), 6, [0, 2, 3, 5]),
        (MediaLimits(video_fps=5, video_min_frames=1, video_max_frames=2), 6, [0, 4]),
        (MediaLimits(video_max_frames=2), 0, []),
    ],
)
def test_which(limits: MediaLimits, count: int, expected: list[int]) -> None:
    assert places(limits, count) == expected


@given(st.integers(1, 20), st.integers(0, 400))
def test_as_many_as_may_be_spread_over_the_whole(most: int, count: int) -> None:
    chosen = places(MediaLimits(video_max_frames=most), count)
    assert len(chosen) == min(most, count)
    assert chosen == sorted(set(chosen))
    if len(chosen) > 1:
        gaps = [after - before for before, after in itertools.pairwise(chosen)]
        assert max(gaps) <= 2 * count / (most - 1) + 1
        assert chosen[0] == 0
        assert chosen[-1] >= count - 1 - count / most


def test_all_of_them_together_keep_to_the_total() -> None:
    frames = selected(MediaLimits(video_total_pixels=4 * 100), 4, size=(20, 20))
    assert [frame.pixels.shape for frame in frames] == [(10, 10, 3)] * 4
    frames = selected(MediaLimits(video_total_pixels=1600), 4, size=(20, 20))
    assert [frame.pixels.shape for frame in frames] == [(20, 20, 3)] * 4
    frames = selected(MediaLimits(video_total_pixels=1599), 4, size=(20, 20))
    assert sum(frame.pixels.shape[0] * frame.pixels.shape[1] for frame in frames) <= 1599
    # The total wins over the minimum of a frame, and is shared by the selected frames only.
    frames = selected(MediaLimits(video_min_pixels=400, video_max_frames=2, video_total_pixels=200), 9, size=(10, 10))
    assert [frame.pixels.shape for frame in frames] == [(10, 10, 3)] * 2


def test_what_is_kept_has_a_limit() -> None:
    selection = FrameSelection(MediaLimits(video_total_pixels=1), max_kept_bytes=2 * 300)
    frame = VideoFrame(0, np.zeros((10, 10, 3), np.uint8))
    selection.add(frame)
    selection.add(frame)
    with pytest.raises(UnsupportedFormat):
        selection.add(frame)
