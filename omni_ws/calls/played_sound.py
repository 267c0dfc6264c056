"""PlayedSound and Microphone: when each piece of a call's sound was played, or spoken.

A client has one loudspeaker: it plays answers one after the other, each from the arrival of its sound on, until the
answer ends or is cut. A playback report gives the client's position in an answer. Reports arrive late, never early: so
of several reports, the one with the least delay tells when the answer began. Reports after the sound has run out tell
nothing. Times are milliseconds of the call.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Differences below this are delays of the network and of timers, and no pauses.
TOLERANCE_MS: Final = 10.0
#: Longer than delays of the network: this is a pause, whatever comes after it.
PAUSE_MS: Final = 250.0
#: How long sound may be on its way to the client, which may have nothing to play by then.
ON_ITS_WAY_MS: Final = 100.0
#: How many reports have to be late before that is a pause; and for how long speech, where the pause is a shorter one.
_LATE_REPORTS: Final = 5
_LATE_MS: Final = 2000.0
#: How far ahead a report or a piece of speech with less delay is looked for: over longer times clocks differ.
LOOK_AHEAD_MS: Final = 10_000.0
#: A microphone whose clock is fast gets ahead little by little: of sound that is ahead by less than this, a part is
#: left out. What is further ahead was never spoken at that pace: it is a file.
FASTER_MS: Final = 200.0
SKIPPED: Final = 0.005
#: How far behind its begin a place is surely within a piece.
_WITHIN_MS: Final = 0.01


class SoundPiece(NamedTuple):
    """Sound that was heard from ``start_ms`` to ``end_ms`` of the call.

    ``ref`` is the number of the piece in the recording (``CallReading.source``), of which ``skip_ms`` were left out at
    the beginning.
    """

    start_ms: float
    end_ms: float
    ref: int
    skip_ms: float


def least_ahead(at: NDArray[np.float64], offsets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each index, the least of ``offsets`` at this index and the later ones within LOOK_AHEAD_MS.

    ``at`` are the times of the offsets, ascending. Takes linear time.
    """
    found = np.empty_like(offsets)
    waiting: list[int] = []  # of increasing index backwards, with the offsets of later ones less
    head = 0
    for index in range(len(offsets) - 1, -1, -1):
        while len(waiting) > head and offsets[waiting[-1]] >= offsets[index]:
            waiting.pop()
        waiting.append(index)
        while at[waiting[head]] - at[index] > LOOK_AHEAD_MS:
            head += 1
        found[index] = offsets[waiting[head]]
    return found


class Streak:
    """Sound of one answer that the client plays without interruption.

    It begins at ``base_ms`` of the answer, which is not 0 if the answer was held and resumed, for example.
    """

    __slots__ = (
        "answer_id",
        "at",
        "base_ms",
        "cut_at",
        "cut_ms",
        "ends_ms",
        "heard",
        "lasts",
        "refs",
        "reports",
        "starts",
    )

    def __init__(self, answer_id: str, base_ms: float) -> None:
        self.answer_id = answer_id
        self.base_ms = self.ends_ms = base_ms
        self.at, self.starts, self.lasts, self.refs = array("d"), array("d"), array("d"), array("q")
        #: Times, and the position in the answer at each.
        self.reports: list[tuple[float, float]] = []
        #: When the server told the client to stop, or the client reported that it has stopped.
        self.cut_at = math.inf
        #: Up to where in the answer the streak was played; None before ``pieces``.
        self.cut_ms: float | None = None
        #: The pieces that were heard: one for each of the first entries of ``refs``.
        self.heard: list[SoundPiece] = []

    def add(self, at: float, start_ms: float, lasts_ms: float, ref: int) -> None:
        self.at.append(at)
        self.starts.append(start_ms)
        self.lasts.append(lasts_ms)
        self.refs.append(ref)
        self.ends_ms = start_ms + lasts_ms

    def cut(self, at: float) -> None:
        """Record that the client stops playing this sound at ``at``. The earliest ``at`` counts."""
        self.cut_at = min(self.cut_at, at)

    def pieces(self, free_ms: float) -> list[SoundPiece]:
        """Return the pieces that were played, given that the loudspeaker was free from ``free_ms`` on.

        Sets ``heard``, on which ``time_of`` depends, and ``cut_ms``.
        """
        stop_ms = self._stop_ms()
        origins, upto = self._origins()
        found: list[SoundPiece] = []
        cursor, index = free_ms, 0
        for sent_at, start_ms, lasts_ms, ref in zip(self.at, self.starts, self.lasts, self.refs, strict=True):
            while index + 1 < len(upto) and upto[index] <= start_ms:
                index += 1
            begins = max(sent_at, cursor)
            if origins:
                told = max(origins[index] + start_ms, sent_at)
                # Where sound was there to go on with, reports that say otherwise were delayed, if it is not by much.
                dry = sent_at > cursor - ON_ITS_WAY_MS
                known = dry or index + _LATE_REPORTS < len(origins)
                waits = known and told - cursor > (TOLERANCE_MS if dry else PAUSE_MS)
                begins = told if not found or waits else cursor
            ends = min(begins + lasts_ms, begins + max(0.0, stop_ms - start_ms))
            if stop_ms == math.inf or not origins:
                ends = min(ends, self.cut_at)
            if ends > begins:
                found.append(SoundPiece(begins, ends, ref, 0.0))
            cursor = max(begins + lasts_ms, cursor)
            if ends < begins + lasts_ms:
                self.cut_ms = start_ms + max(0.0, ends - begins)
                break
        else:
            self.cut_ms = self.ends_ms
        self.heard = found
        return found

    def time_of(self, position_ms: float) -> float | None:
        """Return when the sound at this position of the answer was heard; None if it was not. Call ``pieces`` first."""
        index = bisect_right(self.starts, position_ms, hi=len(self.heard)) - 1
        if index < 0:
            return None
        at = self.heard[index].start_ms + position_ms - self.starts[index]
        return at if at <= self.heard[index].end_ms + TOLERANCE_MS else None

    def _stop_ms(self) -> float:
        """Return the position in the answer at which the client reported to have stopped; infinite without a report."""
        after = [played for at, played in self.reports if at >= self.cut_at]
        return max(after) if after else math.inf

    def _origins(self) -> tuple[list[float], list[float]]:
        """Return, for each usable report, when position 0 was played according to it, and the reported position."""
        kept: list[tuple[float, float]] = []
        sent, index, most = 0.0, 0, self.base_ms
        for at, played in self.reports:
            while index < len(self.at) and self.at[index] <= at:
                sent = self.starts[index] + self.lasts[index]
                index += 1
            if most < played < sent - TOLERANCE_MS and at < self.cut_at:
                kept.append((at, played))
                most = played
        table = np.array(kept, dtype=np.float64).reshape(-1, 2)
        times, positions = table[:, 0], table[:, 1]
        return least_ahead(times, times - positions).tolist(), positions.tolist()


class PlayedSound:
    """Finds out when a client played which sound, from the sound that was sent and the client's reports.

    Call ``send``, ``report``, ``cut`` and so on in the order of time, then ``pieces``.
    """

    def __init__(self) -> None:
        self.streaks: list[Streak] = []
        #: Sound that is played on arrival, at the same time as any other sound.
        self.beside: list[SoundPiece] = []
        self._latest: dict[str, Streak] = {}
        #: Index of the first streak that no silence has cut.
        self._open = 0

    def send(self, answer_id: str, at: float, lasts_ms: float, ref: int, start_ms: float | None = None) -> None:
        """Record that sound of an answer was sent at ``at``, which lasts ``lasts_ms``; ``ref``: see SoundPiece.

        It begins at ``start_ms`` of the answer; None: where the answer's sound so far ends.
        """
        streak = self._latest.get(answer_id)
        if start_ms is None:
            start_ms = 0.0 if streak is None else streak.ends_ms
        if streak is None or streak.cut_at < math.inf or start_ms < streak.ends_ms - TOLERANCE_MS:
            if streak is not None:
                streak.cut(at)
            streak = self._latest[answer_id] = Streak(answer_id, start_ms)
            self.streaks.append(streak)
        streak.add(at, start_ms, lasts_ms, ref)

    def send_beside(self, at: float, lasts_ms: float, ref: int) -> None:
        """Record sound that is played on arrival, at the same time as any other sound."""
        self.beside.append(SoundPiece(at, at + lasts_ms, ref, 0.0))

    def report(self, answer_id: str | None, at: float, played_ms: float) -> None:
        """Record a report that the client has played ``played_ms`` of an answer; None: of the latest answer."""
        streak = self._latest.get(answer_id) if answer_id is not None else (self.streaks[-1] if self.streaks else None)
        if streak is not None:
            streak.reports.append((at, played_ms))

    def cut(self, answer_id: str, at: float, *, played_ms: float | None = None) -> None:
        """Record that the client stops playing an answer at ``at``, at the position ``played_ms`` if that is known."""
        if (streak := self._latest.get(answer_id)) is not None:
            streak.cut(at)
            if played_ms is not None:
                streak.reports.append((at, played_ms))

    def silence(self, at: float) -> None:
        """Record that the client stops playing all sound sent so far at ``at``."""
        for streak in self.streaks[self._open :]:
            streak.cut(at)
        self._open = len(self.streaks)

    def pieces(self) -> list[SoundPiece]:
        """Return the pieces that were played, in order, without overlaps.

        Sets ``heard`` and ``cut_ms`` of each streak.
        """
        found: list[SoundPiece] = []
        free = 0.0
        for streak in self.streaks:
            mine = streak.pieces(free)
            if not mine:
                continue
            while found and found[-1].end_ms > mine[0].start_ms:  # it ended earlier than was reckoned
                last = found.pop()
                if last.start_ms < mine[0].start_ms:
                    found.append(last._replace(end_ms=mine[0].start_ms))
                    break
            found += mine
            free = mine[-1].end_ms
        return found


class Microphone:
    """Finds out when the user spoke which sound, from the times of its arrival.

    Call ``add`` for each piece that arrives, then ``pieces``. Of the pieces of one stretch of speech, the one with the
    least delay tells when the stretch was spoken. Sound that arrives faster than it can be spoken, such as a file,
    counts as spoken from its arrival on.
    """

    def __init__(self) -> None:
        self._at, self._lasts, self._refs, self._numbers = array("d"), array("d"), array("q"), array("q")
        self._in_order = True
        #: The numbers so far, once one has come out of order: before that, none can be a repeated one.
        self._known: set[int] = set()
        #: The length of all sound so far.
        self.total_ms = 0.0
        self._places: list[SoundPiece] | None = None
        #: Where each piece ends in all sound.
        self._ends: NDArray[np.float64] = np.empty(0)

    def add(self, at: float, lasts_ms: float, ref: int, number: int | None = None) -> None:
        """Record a piece that arrived at ``at``. Pieces are ordered by ``number``; a repeated number is ignored."""
        number = len(self._numbers) if number is None else number
        if self._in_order and self._numbers and number <= self._numbers[-1]:
            self._in_order, self._known = False, set(self._numbers)
        if number in self._known:
            return
        if not self._in_order:
            self._known.add(number)
        self._at.append(at)
        self._lasts.append(lasts_ms)
        self._refs.append(ref)
        self._numbers.append(number)
        self.total_ms += lasts_ms

    def pieces(self) -> list[SoundPiece]:
        """Return the pieces that the user spoke, in order, without overlaps."""
        if self._places is None:
            self._places = list(self._placed())
        return self._places

    def time_of(self, audio_ms: float) -> float | None:
        """Return when the user spoke the sound at ``audio_ms`` of all received sound in a row; None without sound."""
        pieces = self.pieces()
        if not pieces:
            return None
        index = min(int(np.searchsorted(self._ends, audio_ms)), len(pieces) - 1)
        return float(pieces[index].end_ms - self._ends[index] + audio_ms)

    def begin_of(self, audio_ms: float) -> float | None:
        """Return when the user spoke the sound that begins at ``audio_ms``; None without sound.

        The place between two pieces is the end of the first, which may be long before the other was spoken.
        """
        at = self.time_of(audio_ms + _WITHIN_MS)
        return None if at is None else at - _WITHIN_MS

    @staticmethod
    def _sure(at: NDArray[np.float64], lasts: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return, for each piece, whether enough of its stretch follows to distinguish a pause from a delay."""
        stops = np.append(np.flatnonzero(np.diff(at) - lasts[1:] > PAUSE_MS), len(at) - 1)
        following = stops[np.searchsorted(stops, np.arange(len(at)))]
        sure: NDArray[np.bool_] = at[following] - at > _LATE_MS
        return sure

    def _placed(self) -> Iterator[SoundPiece]:
        at, lasts, refs = (np.array(column) for column in (self._at, self._lasts, self._refs))
        if not self._in_order:
            _, first = np.unique(np.array(self._numbers), return_index=True)
            at, lasts, refs = np.maximum.accumulate(at[first]), lasts[first], refs[first]
        ends = self._ends = np.cumsum(lasts)
        offsets = least_ahead(at, at - ends)
        cursor, sure = 0.0, self._sure(at, lasts)
        for index, (offset, end, lasting, ref) in enumerate(zip(offsets, ends, lasts, refs, strict=True)):
            begins, skipped = offset + end - lasting, 0.0
            if begins < cursor + (TOLERANCE_MS if sure[index] or not index else PAUSE_MS):
                if TOLERANCE_MS < cursor - begins < FASTER_MS:
                    skipped = lasting * SKIPPED
                begins = cursor
            cursor = begins + lasting - skipped
            yield SoundPiece(float(begins), float(cursor), int(ref), float(skipped))
