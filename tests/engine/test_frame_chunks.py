"""The pace with a simulated Talker, decoder and player, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import pytest

from omni_ws.engine.channel import (
    ChunkPace,
    ChunkPolicy,
)

FRAME_MS = 2048 / 24
LEFT = RIGHT = 3


@dataclass
class Played:
    """Times of arrival and sizes of the chunks."""

    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [frames for _, frames in self.chunks]

    @property
    def worst_gap_ms(self) -> float:
        """Return the longest pause of a player that starts with the first chunk; 0 if there is none."""
        began, got, worst = self.chunks[0][0], 0.0, 0.0
        for arrived, frames in self.chunks:
            waited = max(0.0, arrived - began - got)
            worst = max(worst, waited)
            began += waited
            got += frames * FRAME_MS
        return worst


def play(
    intervals: list[float],
    decode_ms: Callable[[int], float],
    *,
    policy: ChunkPolicy | None = None,
    clauses: tuple[int, ...] = (),
    known_ms: float = 0.0,
) -> Played:
    """Run the simulation.

    Frames follow each other at ``intervals``; ``clauses`` are the numbers of frames after which a clause ends.
    """
    pace = ChunkPace(
        policy or ChunkPolicy(), frame_ms=FRAME_MS, context_frames=LEFT + RIGHT, decode_ms_per_frame=known_ms
    )
    arrivals = list(accumulate(intervals))
    ends = [*clauses, len(arrivals)]
    played = Played()
    now, come, start = 0.0, 0, 0
    for end in ends:
        emitted = start
        while emitted < end:
            while come < len(arrivals) and arrivals[come] <= now:
                pace.received(1, arrivals[come])
                come += 1
            there = min(come, end)
            complete = there == end
            plan = pace.plan(max(0, there - emitted - (0 if complete else RIGHT)), now, complete=complete)
            if plan.frames:
                took = decode_ms(min(emitted - start, LEFT) + plan.frames + min(end - emitted - plan.frames, RIGHT))
                now += took
                emitted += plan.frames
                pace.emitted(plan.frames, took, now)
                played.chunks.append((now, plan.frames))
            else:
                coming = arrivals[come]
                now = coming if plan.wait_ms is None else min(coming, now + plan.wait_ms)
        start = end
    return played


# The first windows grow frame by frame, so the Talker has to be faster by the decoding time of a frame.
@pytest.mark.parametrize("interval", [1, 5, 10, 20, 40, 60, 75, 79])
@pytest.mark.parametrize("base", [0.5, 5, 12])
@pytest.mark.parametrize("per_frame", [0.1, 1, 6])
def test_no_player_waits_while_the_talker_is_faster_than_it(interval: float, base: float, per_frame: float) -> None:
    played = play([interval] * 300, lambda frames: base + per_frame * frames)
    assert sum(played.sizes) == 300
    assert played.sizes[0] == 1
    assert played.worst_gap_ms == 0


@pytest.mark.parametrize("seed", range(30))
def test_no_player_waits_when_frames_and_decoding_are_irregular(seed: int) -> None:
    random = Random(seed)
    intervals = [random.uniform(5, 60) for _ in range(400)]
    clauses = tuple(sorted(random.sample(range(20, 400), 6)))
    # A clause begins with the prefill of its prompt.
    for clause in clauses:
        intervals[clause] += random.uniform(20, 80)
    played = play(intervals, lambda frames: random.uniform(2, 8) + 0.5 * frames, clauses=clauses)
    assert sum(played.sizes) == 400
    assert played.worst_gap_ms == 0


def test_chunks_grow_as_soon_as_there_is_time() -> None:
    played = play([10] * 400, lambda frames: 5 + 0.5 * frames)
    policy = ChunkPolicy()
    grown = [after / before for before, after in zip(played.sizes, played.sizes[1:-1], strict=False)]
    assert max(grown) <= policy.growth
    assert played.sizes[:4] == [1, 2, 4, 8]
    assert max(played.sizes) == policy.largest
    assert len(played.sizes) < 400 / policy.largest + 6


def test_a_talker_that_hardly_keeps_up_gets_small_chunks() -> None:
    assert max(play([84] * 60, lambda frames: 10).sizes[:-1]) == 1


def test_what_is_late_is_caught_up_in_large_chunks() -> None:
    """Decoding a single frame takes longer than it plays; only chunks of several frames keep up."""
    played = play([20] * 300, lambda frames: 70 + 5 * frames)
    assert max(played.sizes) > 8
    first_half, second_half = Played(played.chunks[: len(played.chunks) // 2]), played.chunks[len(played.chunks) // 2 :]
    assert first_half.worst_gap_ms > 0
    assert Played(second_half).worst_gap_ms == 0


@pytest.mark.parametrize("per_frame", [8, 12, 16, 20, 27, 33, 40])
@pytest.mark.parametrize("interval", [5, 20, 40])
def test_where_decoding_is_known_to_be_slow_the_first_chunk_is_larger(interval: float, per_frame: float) -> None:
    """As with the released codec on one core: decoding a single frame takes twice as long as it plays."""
    played = play([interval] * 300, lambda frames: per_frame * frames, known_ms=per_frame)
    assert 1 <= played.sizes[0] < 8
    assert played.worst_gap_ms == 0


def test_a_decoder_that_can_never_keep_up() -> None:
    played = play([5] * 100, lambda frames: 200 * frames, known_ms=200)
    assert played.sizes[0] == ChunkPolicy().largest


def test_a_talker_that_stops_for_a_while_delays_nothing_that_is_there() -> None:
    intervals = [20.0] * 40 + [3_000.0] + [20.0] * 40
    played = play(intervals, lambda frames: 5 + 0.5 * frames)
    before_pause = sum(frames for arrived, frames in played.chunks if arrived < 3_000)
    # All but the frame after the pause, and those that wait for their context.
    assert before_pause == 40 - RIGHT
    sound_until = played.chunks[0][0] + before_pause * FRAME_MS
    arrived = [arrived for arrived, _ in played.chunks if arrived < 3_000]
    assert arrived[-1] < sound_until


def test_a_response_of_one_frame() -> None:
    assert play([10], lambda frames: 5).sizes == [1]
    assert play([10] * 3, lambda frames: 5).sizes == [1, 2]


def test_the_first_chunk_may_be_larger() -> None:
    played = play([10] * 100, lambda frames: 5, policy=ChunkPolicy(first=4, largest=8))
    assert played.sizes[0] == 4
    assert max(played.sizes) == 8
    assert play([10] * 2, lambda frames: 5, policy=ChunkPolicy(first=4)).sizes == [2]


@pytest.mark.parametrize("wrong", [{"first": 0}, {"first": 9, "largest": 8}, {"growth": 0.5}, {"margin_ms": -1}])
def test_policies_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="chunk policy"):
        ChunkPolicy(**wrong)  # type: ignore[arg-type]
