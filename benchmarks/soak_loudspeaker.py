"""The loudspeaker of a client of the soak: it plays answers one after the other, by its own clock.

It is late by the time between an output and its sound, and stands still where it has nothing. Which words of an answer
were begun, and which were played to their ends, it knows by the samples alone (``soak_voices``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.soak_voices import VOICE_RATE
from omni_ws.audio.samples import Pcm16

#: Samples by which a place on an answer's time line, told in milliseconds, may be rounded.
_ROUNDED: Final = VOICE_RATE // 1000
#: Samples by which a voice without word times may be cut differently: its characters do not last whole milliseconds.
_TOLERANCE: Final = VOICE_RATE // 1000


@dataclass(eq=False)
class PlayedAnswer:
    """What came of an answer, and what was played of it. Places are in samples of its sound."""

    request_id: str
    text: str = ""
    #: The end of the sound that came, and how much of it was played.
    came: int = 0
    played: int = 0
    #: How many of its words were begun, and where each of them ended.
    begun: int = 0
    ends: list[int] = field(default_factory=list)
    #: Why it has its final; None before.
    reason: str | None = None
    #: What stopped it: speech or the client; None where nothing did.
    stopped_by: str | None = None
    reported: int = 0

    @property
    def played_ms(self) -> float:
        return self.played * 1000 / VOICE_RATE

    def ended(self, *, tolerance: int = 0) -> int:
        """How many words were played to their ends."""
        return sum(end + tolerance <= self.played for end in self.ends)

    @property
    def whole(self) -> bool:
        return self.reason == "stop" and self.played == self.came

    def heard(self, words: list[str], *, timed: bool) -> set[str]:
        """What was heard of the answer with these words: one text, or several where that cannot be told exactly."""
        if self.whole:
            return {" ".join(words)}
        if not self.came:
            # Text without sound is heard when it is sent, unless somebody spoke before there was anything to hear.
            return {"" if self.stopped_by == "speech" else self.text.rstrip()}
        counts = {self.begun} if timed else {self.ended(), self.ended(tolerance=_TOLERANCE)}
        return {" ".join(words[:count]) for count in counts}


@dataclass(slots=True)
class _Piece:
    answer: PlayedAnswer
    begin: int
    samples: Pcm16
    ready: float
    done: int = 0


class Loudspeaker:
    """Plays what it is given, up to ``now``. ``latency_sec`` lie between an output and its sound."""

    def __init__(self, latency_sec: float) -> None:
        self._latency_sec = latency_sec
        self._pieces: deque[_Piece] = deque()
        #: Up to when it has played.
        self._at = 0.0
        #: What it plays, or played last; None before anything came.
        self.answer: PlayedAnswer | None = None

    def put(self, answer: PlayedAnswer, start_ms: float, samples: Pcm16, now: float) -> None:
        begin = round(start_ms * VOICE_RATE / 1000)
        last = next((piece for piece in reversed(self._pieces) if piece.answer is answer), None)
        follows = answer.played if last is None else last.begin + len(last.samples)
        if abs(begin - follows) <= _ROUNDED:
            begin = follows
        answer.came = max(answer.came, begin + len(samples))
        self._pieces.append(_Piece(answer, begin, samples, now + self._latency_sec))

    def play(self, now: float) -> None:
        """Play on up to ``now``."""
        while self._pieces:
            piece = self._pieces[0]
            begins = max(self._at, piece.ready)
            left = len(piece.samples) - piece.done
            count = min(left, int((now - begins) * VOICE_RATE + 1e-6))
            if count <= 0 and left:
                return
            self._sound(piece, count)
            self._at = begins + count / VOICE_RATE
            if count < left:
                return
            self._pieces.popleft()

    def _sound(self, piece: _Piece, count: int) -> None:
        answer, begin = piece.answer, piece.begin + piece.done
        piece.done += count
        self.answer = answer
        fresh = max(0, answer.played - begin)  # what comes again was heard before
        sound = piece.samples[piece.done - count : piece.done][fresh:]
        if not len(sound):
            return
        ends = begin + fresh + np.flatnonzero(sound & 1) + 1
        answer.ends += [int(end) for end in ends]
        answer.begun = max(answer.begun, int(sound.max()) // 2)
        answer.played = begin + count

    def stop(self, now: float, by: str) -> None:
        """Play nothing more of what came so far."""
        self.play(now)
        for piece in self._pieces:
            piece.answer.stopped_by = piece.answer.stopped_by or by
        self._pieces.clear()
        self._at = max(self._at, now)

    def idle(self, now: float) -> bool:
        self.play(now)
        return not self._pieces
