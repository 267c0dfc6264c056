"""Raw audio, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omni_ws.audio.pcm import WholeFrames


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8), st.integers(1, 12))
def test_frames_stay_whole_however_they_are_cut(data: bytes, cuts: list[int], frame_bytes: int) -> None:
    frames = WholeFrames(frame_bytes)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [frames.take(data[start:end]) for start, end in pairwise(bounds)]
    assert all(len(piece) % frame_bytes == 0 for piece in pieces)
    assert b"".join(pieces) == data[: len(data) - len(data) % frame_bytes]


def test_what_is_dropped_does_not_come_back() -> None:
    frames = WholeFrames(4)
    assert frames.take(b"abcdef") == b"abcd"
    frames.drop()
    assert frames.take(b"ABCDE") == b"ABCD"
