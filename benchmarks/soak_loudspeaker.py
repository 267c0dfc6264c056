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
from omni_ws.audio.pcm import Pcm16

#: Samples by which a place on an answer's time line, told in milliseconds, may be rounded.
_ROUNDED: Final = VOICE_RATE // 1000


@dataclass(eq=False)
class PlayedAnswer:
    """An answer as its client received and played it. Places are in samples of its sound."""

    request_id: str
    text: str = ""
    #: The sound that was received, and how much of it was played.
    sound: Pcm16 = field(default_factory=lambda: np.zeros(0, np.int16))
    played: int = 0
    #: Why it has its final; None before.
    reason: str | None = None
    #: What stopped it: speech or the client; None where nothing did.
    stopped_by: str | None = None
    #: Where it was at the latest report, and at the latest before it was stopped; None without any.
    reported: int | None = None
    reported_before: int | None = None
    #: Whether the connection was lost while it came or was played.
    lost: bool = False

    @property
    def played_ms(self) -> float:
        return self.played * 1000 / VOICE_RATE

    @property
    def whole(self) -> bool:
        return self.reason == "stop" and self.played == len(self.sound) > 0

    def take(self, begin: int, samples: Pcm16) -> None:
        """Put received sound at this place."""
        end = begin + len(samples)
        if end > len(self.sound):
            self.sound = np.concatenate((self.sound, np.zeros(end - len(self.sound), np.int16)))
        self.sound[begin:end] = samples

    def _words(self, place: int, *, timed: bool) -> int:
        """How many words were heard up to there: begun, or whole where a voice has no word times."""
        sound = self.sound[:place]
        return int(sound.max(initial=0)) // 2 if timed else int((sound & 1).sum())

    def heard(self, words: list[str], *, timed: bool, late: int) -> dict[str, str]:
        """What was heard of the answer with these words, and other texts that the rules allow, with the reason.

        ``late`` samples may lie between what is sent and what is played.
        """
        if self.whole:
            return {" ".join(words): "played"}
        if not len(self.sound):
            # Text without sound is heard when it is sent, unless somebody spoke before there was anything to hear.
            return {"" if self.stopped_by == "speech" else self.text.rstrip(): "played"}
        # Times of words are rounded to milliseconds, and so are clauses, of which a part counts as less.
        off = _ROUNDED if timed else -_ROUNDED
        reasons = {self.played: "played"}
        if self.played:
            reasons.setdefault(max(0, self.played + off), "played")
        if self.stopped_by == "client":
            pass  # it told where that was
        elif self.reported_before is not None:
            # The report that tells where it stopped may come when a request has read the history.
            reasons.setdefault(self.reported_before, "up to the latest report in time")
            if self.reported_before:
                reasons.setdefault(max(0, self.reported_before + off), "up to the latest report in time")
        else:
            end = len(self.sound) if self.lost else min(len(self.sound), self.played + late)
            reasons |= dict.fromkeys(
                range(self.played + 1, end + 1, _ROUNDED), "by the server's clock, without a report"
            )
        texts: dict[str, str] = {}
        for place, reason in reasons.items():
            texts.setdefault(" ".join(words[: self._words(place, timed=timed)]), reason)
        return texts


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
        answer.take(begin, samples)
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
            self.answer = piece.answer
            self._sound(piece, count)
            self._at = begins + count / VOICE_RATE
            if count < left:
                return
            self._pieces.popleft()

    @staticmethod
    def _sound(piece: _Piece, count: int) -> None:
        piece.done += count
        # What comes again was heard before.
        piece.answer.played = max(piece.answer.played, piece.begin + piece.done)

    def stop(self, now: float, by: str) -> None:
        """Drop the sound that was received and not yet played."""
        self.play(now)
        if self._pieces:
            self.answer = self._pieces[0].answer
        for piece in self._pieces:
            answer = piece.answer
            if answer.stopped_by is None:
                answer.stopped_by, answer.reported_before = by, answer.reported
        self._pieces.clear()
        self._at = max(self._at, now)

    def idle(self, now: float) -> bool:
        self.play(now)
        return not self._pieces
