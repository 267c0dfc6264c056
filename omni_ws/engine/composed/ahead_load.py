"""AheadLoad: decides whether an answer may be begun before the turn has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

#: Answers that are begun ahead and held back, at most, for all requests of an engine.
MOST_AHEAD: Final = 4
#: Beside other answers one may be begun ahead if answers beside others begin at most this many times as late as alone.
STRIDE: Final = 1.5
#: An LLM that mostly answers several at the same time is seldom idle for long: from this share on, it counts as busy.
MOST_CROWDED: Final = 0.5
#: The weight of the latest measurement in the moving averages.
_SMOOTHING: Final = 0.2


class SpeculationOutcome(StrEnum):
    """What became of an answer that was begun ahead, or could have been."""

    #: The turn ended with what was guessed.
    USED = "used"
    #: The speaker went on.
    WENT_ON = "went_on"
    #: The settled transcript, or other input, is not what was guessed.
    DIFFERED = "differed"
    #: It failed, or the request ended before its turn.
    FAILED = "failed"
    #: It was not begun: the LLM has enough to do.
    SKIPPED = "skipped"


@runtime_checkable
class ThinksAhead(Protocol):
    """An engine that may begin answers before the turn has ended."""

    #: Told what becomes of each.
    on_speculation: Callable[[SpeculationOutcome], None]


class AheadLoad:
    """Learns what answers cost one another.

    An LLM that has nothing else to do may begin an answer ahead. One that answers somebody may do so only if it is
    known to take that in its stride: what it works out ahead, which may be for nothing, must not delay what somebody
    waits for. The measure is the time to the first output, of answers alone and of answers beside others.
    """

    def __init__(self) -> None:
        #: Answers under way whose input is complete.
        self.active = 0
        self._ahead = 0
        #: The share of answers that began beside others, of late.
        self._crowded = 0.0
        self._alone: float | None = None
        self._beside: float | None = None

    @property
    def has_room(self) -> bool:
        """Whether an answer may be begun ahead now."""
        if self._ahead >= MOST_AHEAD:
            return False
        if self.active == 0 and self._crowded < MOST_CROWDED:
            return True
        return self._alone is not None and self._beside is not None and self._beside <= STRIDE * self._alone

    def begin(self, *, ahead: bool) -> AnswerUnderWay:
        """Note that the LLM begins an answer whose input is complete."""
        if not ahead:
            self._crowded += _SMOOTHING * ((self.active > 0) - self._crowded)
        return AnswerUnderWay(self, ahead=ahead)

    def _learn(self, seconds: float, *, beside: bool) -> None:
        known = self._beside if beside else self._alone
        learnt = seconds if known is None else known + _SMOOTHING * (seconds - known)
        if beside:
            self._beside = learnt
        else:
            self._alone = learnt


class AnswerUnderWay:
    """An answer from the end of its input to its own end."""

    def __init__(self, load: AheadLoad, *, ahead: bool) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._beside = load.active > 0
        self._ahead = ahead
        self._has_output = self._ended = False
        load.active += 1
        load._ahead += ahead

    def note_output(self) -> None:
        """Note that an output was made."""
        if not self._has_output:
            self._has_output = True
            self._load._learn(self._loop.time() - self._began, beside=self._beside)

    def used(self) -> None:
        """Note that it is no longer ahead: its turn has ended."""
        self._load._ahead -= self._ahead
        self._ahead = False

    def end(self) -> None:
        """Idempotent."""
        if not self._ended:
            self._ended = True
            self.used()
            self._load.active -= 1
