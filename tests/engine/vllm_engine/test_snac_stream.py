"""Windows with a stand-in for the codec that has the same receptive field: each frame's output mixes its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_ws.engine.vllm.talker import (
    CodecWindow,
    Codes,
    StreamState,
)

REACH = 3
_WEIGHTS = np.array([0.5, -2.0, 7.0, 31.0, 11.0, -3.0, 0.25])


def mixed(codes: Codes) -> NDArray[np.float64]:
    """One number per frame; beyond the ends there is silence, as in a convolutional codec."""
    padded = np.pad(codes.sum(1).astype(np.float64) + 1, REACH)
    return np.convolve(padded, _WEIGHTS, "valid")[: len(codes)]


def wanted(window: CodecWindow) -> NDArray[np.float64]:
    return mixed(window.codes)[window.skip : window.skip + window.keep]


def some_codes(frames: int) -> Codes:
    return np.random.default_rng(frames).integers(0, 4096, (frames, 7), dtype=np.int32)


@given(st.integers(0, 40), st.data())
def test_windows_give_what_the_whole_gives(frames: int, data: st.DataObject) -> None:
    codes = some_codes(frames)
    state = StreamState.start(7, left=REACH, right=REACH)
    pieces: list[NDArray[np.float64]] = []
    received = 0
    while not state.done:
        if not state.ended and data.draw(st.booleans(), "more"):
            more = data.draw(st.integers(0, frames - received), "frames")
            received += more
            last = received == frames and data.draw(st.booleans(), "last")
            state = state.received(codes[received - more : received], last=last)
        elif state.ready:
            window, state = state.take(data.draw(st.integers(1, state.ready), "take"))
            assert np.array_equal(window.codes, codes[window.first_frame : window.first_frame + len(window.codes)])
            assert len(window.codes) <= window.keep + 2 * REACH
            pieces.append(wanted(window))
        elif not state.ended:
            state = state.received(codes[received:], last=True)
            received = frames
    streamed = np.concatenate([np.empty(0), *pieces])
    assert np.array_equal(streamed, mixed(codes))


@pytest.mark.parametrize("frames", range(1, 16))
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_finish_at_every_boundary(frames: int, chunk: int) -> None:
    codes = some_codes(frames)
    state = StreamState.start(7, left=REACH, right=REACH)
    pieces = []
    for frame in range(frames):
        state = state.received(codes[frame : frame + 1])
        while state.ready >= chunk:
            window, state = state.take(chunk)
            pieces.append(wanted(window))
    state = state.received(codes[:0], last=True)
    while not state.done:
        window, state = state.take(min(chunk, state.ready))
        pieces.append(wanted(window))
    assert np.array_equal(np.concatenate(pieces), mixed(codes))


def test_less_context_is_not_exact() -> None:
    """So the tests above are able to fail."""
    codes = some_codes(12)
    state = StreamState.start(7, left=2, right=REACH).received(codes, last=True)
    _, state = state.take(6)
    window, _ = state.take(6)
    assert not np.array_equal(wanted(window), mixed(codes)[6:])


def test_what_is_remembered_does_not_grow() -> None:
    state = StreamState.start(7)
    for _ in range(100):
        state = state.received(some_codes(1))
        if state.ready:
            _, state = state.take(state.ready)
    assert len(state.held) == 6
    assert state.held.base is None, "a view would keep all that ever came"
    assert state.emitted == 97


def test_a_state_is_a_value() -> None:
    state = StreamState.start(7).received(some_codes(9))
    first, _ = state.take(2)
    again, _ = state.take(2)
    assert np.array_equal(first.codes, again.codes)
    assert state.emitted == 0


@pytest.mark.parametrize("frames", [0, 7])
def test_only_what_is_ready_can_be_taken(frames: int) -> None:
    with pytest.raises(ValueError, match="frames must be 1 to 6"):
        StreamState.start(7).received(some_codes(9)).take(frames)


def test_nothing_comes_after_the_last() -> None:
    state = StreamState.start(7).received(some_codes(1), last=True)
    with pytest.raises(ValueError, match="already ended"):
        state.received(some_codes(1))
