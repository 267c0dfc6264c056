"""A simulated loudspeaker that records which samples of which answer it played, when, and at which level."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_ws.audio.pcm import Pcm16
from omni_ws.caller.script import PIECE_MS

RATE: Final = 24_000
TICK: Final = RATE * PIECE_MS // 1000
#: PROTOCOL, "Uncertain onsets": the sound is lowered by 15 dB.
DUCKED: Final = 10 ** (-15 / 20)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples ``begin`` to ``end`` of an answer, played in a tick, and whether they were ducked."""

    tick: int
    answer: str
    begin: int
    end: int
    ducked: bool


@dataclass(slots=True)
class _Piece:
    answer: str
    begin: int
    samples: Pcm16


@dataclass(slots=True)
class Loudspeaker:
    """Plays a tick of 20 ms at a time. All times are ticks since the start."""

    ticks: int = 0
    played: list[Stretch] = field(default_factory=list)
    ducked: bool = False
    _waiting: deque[_Piece] = field(default_factory=deque)
    #: Up to where each answer was played, in samples.
    _places: dict[str, int] = field(default_factory=dict)
    _playing: str | None = None

    def put(self, answer: str, samples: Pcm16, start_ms: float | None) -> None:
        """Queue received sound. ``start_ms`` is its place in the answer; None: behind the sound received before."""
        last = next((piece for piece in reversed(self._waiting) if piece.answer == answer), None)
        follows = self._places.get(answer, 0) if last is None else last.begin + len(last.samples)
        begin = follows if start_ms is None else round(start_ms * RATE / 1000)
        # The server rounds places to whole milliseconds.
        begin = follows if abs(begin - follows) <= RATE // 1000 else begin
        self._waiting.append(_Piece(answer, begin, samples))

    def tick(self) -> Pcm16:
        """Play on for 20 ms, and return that sound."""
        sound, place = np.zeros(TICK, np.int16), 0
        while self._waiting and place < TICK:
            piece = self._waiting[0]
            count = min(len(piece.samples), TICK - place)
            sound[place : place + count] = piece.samples[:count]
            self.played.append(Stretch(self.ticks, piece.answer, piece.begin, piece.begin + count, self.ducked))
            self._playing = piece.answer
            piece.begin, piece.samples, place = piece.begin + count, piece.samples[count:], place + count
            self._places[piece.answer] = piece.begin
            if not len(piece.samples):
                self._waiting.popleft()
        self.ticks += 1
        return (sound * DUCKED).astype(np.int16) if self.ducked else sound

    def stop(self) -> None:
        """Drop the sound that was received and not yet played."""
        self._waiting.clear()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def holds(self, answer: str) -> bool:
        """Whether sound of an answer is still to be played."""
        return any(piece.answer == answer for piece in self._waiting)

    def place(self, answer: str) -> float:
        """Up to where an answer was played, in milliseconds."""
        return self._places.get(answer, 0) * 1000 / RATE

    @property
    def next_answer(self) -> str | None:
        """The answer whose sound comes next; None where nothing does."""
        return self._waiting[0].answer if self._waiting else None

    @property
    def position(self) -> tuple[str, float] | None:
        """The answer that plays or played last, and up to where, in milliseconds."""
        return None if self._playing is None else (self._playing, self._places[self._playing] * 1000 / RATE)

    # What it recorded

    def sounding(self, begin: int, end: int) -> list[bool]:
        """For each tick of [begin, end) whether anything was played in it."""
        heard = {stretch.tick for stretch in self._since(begin) if stretch.tick < end}
        return [tick in heard for tick in range(begin, end)]

    def longest_gap_ms(self, begin: int, end: int) -> int:
        """The longest time without anything to play in [begin, end)."""
        longest = run = 0
        for sounds in self.sounding(begin, end):
            run = 0 if sounds else run + 1
            longest = max(longest, run)
        return longest * PIECE_MS

    def heard_ms(self, begin: int, end: int, answers: Iterable[str] | None = None) -> float:
        """How much of these answers, or of any, was played in [begin, end)."""
        wanted = None if answers is None else set(answers)
        return sum(
            (one.end - one.begin) * 1000 / RATE
            for one in self._since(begin)
            if one.tick < end and (wanted is None or one.answer in wanted)
        )

    def ducked_ms(self, begin: int, end: int) -> int:
        """How long it played lowered in [begin, end)."""
        return PIECE_MS * len({one.tick for one in self._since(begin) if one.tick < end and one.ducked})

    def lost_and_repeated_ms(self, answer: str) -> tuple[float, float]:
        """How much of an answer was skipped between its first and its last sound, and how much was played twice."""
        place, lost, repeated = 0, 0, 0
        for one in self.played:
            if one.answer == answer:
                lost += max(0, one.begin - place)
                repeated += max(0, min(place, one.end) - one.begin)
                place = max(place, one.end)
        return lost * 1000 / RATE, repeated * 1000 / RATE

    def _since(self, tick: int) -> list[Stretch]:
        return self.played[bisect_left(self.played, tick, key=lambda stretch: stretch.tick) :]
