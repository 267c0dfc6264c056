import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.vllm.talker import FrameLayout

LAYOUT = FrameLayout(first_token=263, codebook_size=64)
FRAMES = st.lists(st.lists(st.integers(0, 63), min_size=7, max_size=7), max_size=6)


def test_the_layout_of_a_frame() -> None:
    assert LAYOUT.end_token == 263 + 7 * 64
    assert LAYOUT.codes_per_frame == (1, 2, 4)
    tokens = [263 + slot * 64 + slot for slot in range(7)]
    codes = LAYOUT.codes(tokens)
    assert codes.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    # In order of time: one code of the first codebook, two of the second, four of the third.
    assert [book.tolist() for book in LAYOUT.books(codes)] == [[0], [1, 4], [2, 3, 5, 6]]


def test_books_of_several_windows() -> None:
    codes = np.arange(28, dtype=np.int32).reshape(2, 2, 7)
    first, second, third = LAYOUT.books(codes)
    assert first.tolist() == [[0, 7], [14, 21]]
    assert second.tolist() == [[1, 4, 8, 11], [15, 18, 22, 25]]
    assert third.shape == (2, 8)


@given(FRAMES, st.integers(1, 20))
def test_frames_come_out_as_they_went_in(frames: list[list[int]], length: int) -> None:
    codes = np.array(frames, np.int32).reshape(-1, 7)
    tokens = LAYOUT.tokens(codes)
    waiting: list[int] = []
    pieces = []
    for start in range(0, len(tokens), length):
        waiting += tokens[start : start + length]
        pieces.append(LAYOUT.take_frames(waiting))
    assert not waiting
    assert np.array_equal(np.concatenate([np.empty((0, 7), np.int32), *pieces]), codes)


def test_what_is_no_whole_frame_stays_inside() -> None:
    tokens = [263] * 6
    assert len(LAYOUT.take_frames(tokens)) == 0
    assert len(tokens) == 6


@pytest.mark.parametrize(("slot", "token"), [(0, 262), (0, 263 + 64), (3, 263), (6, 263 + 7 * 64)])
def test_a_token_in_the_wrong_slot(slot: int, token: int) -> None:
    tokens = LAYOUT.tokens(np.zeros((2, 7), np.int32))
    tokens[7 + slot] = token
    with pytest.raises(ValueError, match=f"token {token} is not valid in slot {slot} of frame 1"):
        LAYOUT.codes(tokens)


@pytest.mark.parametrize(
    "wrong", [{"slots": ()}, {"slots": (0, 2)}, {"slots": (1, 1)}, {"first_token": -1}, {"codebook_size": 0}]
)
def test_layouts_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"slots must contain|must not be negative"):
        FrameLayout(**{"first_token": 0, **wrong})  # type: ignore[arg-type]
