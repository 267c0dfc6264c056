"""How many frames to decode at a time: small chunks come early, large ones cost less.

Every chunk decodes its neighbours along, so one frame at a time costs several times the work. But a player that has
got little must get more soon. The pace therefore watches how fast frames come, how long decoding takes and how much a
player has left that began with the first chunk, and waits for no more frames than there is time for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """``first`` frames make the first chunk of a response, more where decoding is slow; ``largest`` bounds all."""

    first: int = 1
    largest: int = 24
    #: A chunk is waited for until it is at most this many times the one before.
    growth: float = 2.0
    #: What should still be unplayed when a chunk arrives, for the way to the player and for surprises.
    margin_ms: float = 40.0

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.largest or self.growth < 1 or self.margin_ms < 0:
            raise ValueError("a chunk policy has 1 <= first <= largest, growth >= 1 and margin_ms >= 0")


class ChunkPlan(NamedTuple):
    """Decode ``frames`` now, or, where that is 0, look again when more frames have come.

    ``wait_ms`` from now it must be looked again even without, except where it is None.
    """

    frames: int
    wait_ms: float | None = None


#: Weight of the newest measurement.
_SMOOTHING = 0.3


class ChunkPace:
    """The rhythm of one response. It has no clock: every call is told the time, in milliseconds of any origin.

    ``frame_ms`` is the sound of a frame, ``context_frames`` what a window decodes along, ``decode_ms_per_frame`` what
    decoding a frame of a window takes as far as others have found out.
    """

    def __init__(
        self, policy: ChunkPolicy, *, frame_ms: float, context_frames: int, decode_ms_per_frame: float = 0.0
    ) -> None:
        self._policy = policy
        self._frame_ms = frame_ms
        self._context = context_frames
        #: Between two frames. Until it is known: as if the Talker kept up with the player and no more.
        self._interval_ms = frame_ms
        self._last_arrival_ms: float | None = None
        #: Decoding time per frame of a window.
        self._decode_ms_per_frame = decode_ms_per_frame
        self._began_ms: float | None = None
        self._emitted_ms = 0.0
        self._first = self._last_chunk = self._first_chunk()

    def received(self, frames: int, now_ms: float) -> None:
        """``frames`` have come from the Talker."""
        if frames and self._last_arrival_ms is not None:
            interval = (now_ms - self._last_arrival_ms) / frames
            self._interval_ms += _SMOOTHING * (interval - self._interval_ms)
        if frames:
            self._last_arrival_ms = now_ms

    def emitted(self, frames: int, decode_ms: float, now_ms: float) -> None:
        """A chunk has gone to the player; its decoding took ``decode_ms``."""
        per_frame = decode_ms / (frames + self._context)
        if not self._decode_ms_per_frame:
            self._decode_ms_per_frame = per_frame
        self._decode_ms_per_frame += _SMOOTHING * (per_frame - self._decode_ms_per_frame)
        if self._began_ms is None:
            self._began_ms = now_ms
        self._emitted_ms += frames * self._frame_ms
        self._last_chunk = frames

    def unplayed_ms(self, now_ms: float) -> float:
        """What a player has left that began with the first chunk and never paused; negative: it had to."""
        return 0.0 if self._began_ms is None else self._emitted_ms - (now_ms - self._began_ms)

    def plan(self, ready: int, now_ms: float, *, complete: bool = False) -> ChunkPlan:
        """``complete``: no more frames come after the ``ready`` ones, as far as this clause goes."""
        if self._began_ms is None:
            return ChunkPlan(min(ready, self._first) if ready >= self._first or complete else 0)
        left = self.unplayed_ms(now_ms)
        grown = min(self._policy.largest, ceil(self._last_chunk * self._policy.growth))
        if not complete and ready < grown:
            wanted = self._largest_in_time(ready + 1, grown, ready, now_ms, left - self._policy.margin_ms)
            if wanted:
                deadline = left - self._policy.margin_ms - self._decode_ms(max(ready, 1))
                return ChunkPlan(0, max(1.0, deadline)) if ready else ChunkPlan(0)
        if not ready:
            return ChunkPlan(0)
        most = min(ready, self._policy.largest)
        frames = (
            self._largest_in_time(1, most, ready, now_ms, left - self._policy.margin_ms)
            or self._largest_in_time(1, most, ready, now_ms, left)
            or min(most, grown)
        )
        return ChunkPlan(frames)

    def _first_chunk(self) -> int:
        """Frames that sound for as long as it takes to decode a next chunk that lasts."""
        lasting = 1
        while lasting < self._policy.largest and self._decode_ms(lasting) > lasting * self._frame_ms:
            lasting += 1
        slow = self._decode_ms(lasting) + self._policy.margin_ms if self._decode_ms_per_frame else 0.0
        return min(self._policy.largest, max(self._policy.first, ceil(slow / self._frame_ms)))

    def _largest_in_time(self, least: int, most: int, ready: int, now_ms: float, left_ms: float) -> int:
        """The largest chunk of ``least`` … ``most`` frames that would be there in ``left_ms``; 0 if there is none."""
        since = 0.0 if self._last_arrival_ms is None else now_ms - self._last_arrival_ms
        for frames in range(most, least - 1, -1):
            waiting = max(0.0, (frames - ready) * self._interval_ms - since) if frames > ready else 0.0
            if waiting + self._decode_ms(frames) <= left_ms:
                return frames
        return 0

    def _decode_ms(self, frames: int) -> float:
        return self._decode_ms_per_frame * (frames + self._context)
