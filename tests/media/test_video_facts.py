from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from omni_ws.media.video import Motion, VideoFacts, VideoFrame, VideoObserver


def facts_of(frames: Iterable[VideoFrame]) -> VideoFacts | None:
    observer = VideoObserver()
    for frame in frames:
        observer.add(frame)
    return observer.facts()


def flat(
    colour: tuple[int, int, int], height: int = 48, width: int = 64
) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    return np.full((height, width, 3), colour, dtype=np.uint8)


def test_no_frames_no_facts() -> None:
    assert facts_of([]) is None


def test_one_frame_is_still() -> None:
    assert facts_of([VideoFrame(700, flat((200, 0, 0)))]) == VideoFacts(1, 0, "red", Motion.STILL)


def test_noise_is_no_motion() -> None:
    random = np.random.default_rng(0)
    frames = [
        VideoFrame(40 * i, (flat((0, 120, 0)) + random.integers(0, 12, (48, 64, 3))).astype(np.uint8))
        for i in range(20)
    ]
    facts = facts_of(frames)
    assert facts is not None
    # An image no larger than the grid keeps its full pixel noise, which stays well below motion.
    assert facts.motion in (Motion.STILL, Motion.SOME)
    assert (facts.frame_count, facts.duration_ms, facts.dominant_colour) == (20, 760, "green")


@pytest.mark.parametrize(("width", "motion"), [(0, Motion.STILL), (3, Motion.SOME), (24, Motion.MUCH)])
def test_motion_is_graded(width: int, motion: Motion) -> None:
    frames = []
    for index in range(10):
        pixels = flat((255, 255, 255), 240, 320)
        start = index * 24
        pixels[:, start : start + width] = 0
        frames.append(VideoFrame(index * 100, pixels))
    facts = facts_of(frames)
    assert facts is not None
    assert facts.motion is motion
    assert facts.dominant_colour == "white"


def test_frames_of_different_sizes() -> None:
    observer = VideoObserver()
    for index, (height, width) in enumerate([(1, 1), (5, 300), (2000, 3), (480, 640)]):
        observer.add(VideoFrame(index, flat((0, 0, 220), height, width)))
    assert observer.facts() == VideoFacts(4, 3, "blue", Motion.STILL)
