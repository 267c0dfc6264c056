"""What all talkers of a load test have measured so far, in bounded memory."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from omni_ws.bench.answer_watch import AnswerWatch

#: Values that are kept for percentiles: half a megabyte.
KEPT_VALUES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Distribution:
    """Each is a value that was measured: that of the nearest rank."""

    n: int
    median: float
    p90: float
    p99: float
    max: float


class MeasuredValues:
    """Values of one kind. Of more than ``kept`` a random sample is kept; their number and the largest are exact."""

    def __init__(self, *, kept: int = KEPT_VALUES) -> None:
        self._kept = kept
        self._values = array("d")
        self._n = 0
        self._max = -math.inf
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._n += 1
        self._max = max(self._max, value)
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (place := self._random.randrange(self._n)) < self._kept:
            self._values[place] = value

    def distribution(self) -> Distribution | None:
        """None without any value."""
        if not self._n:
            return None
        ordered = sorted(self._values)

        def at(part: float) -> float:
            return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

        return Distribution(self._n, at(0.5), at(0.9), at(0.99), self._max)


@dataclass(slots=True)
class Tally:
    """Counts and times of a load test. Times are seconds; those of answers count from the end of the input."""

    began_at: float = 0.0
    #: The end of the last turn or, before one has ended, of the last session that was opened.
    last_at: float = 0.0
    opened: int = 0
    #: Sessions that were refused, and what the first of each code was told.
    refused: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    #: Answers without text and audio, such as those to speech in which no words were heard.
    empty: int = 0
    partial_answers: int = 0
    opening: MeasuredValues = field(default_factory=MeasuredValues)
    first_text: MeasuredValues = field(default_factory=MeasuredValues)
    first_audio: MeasuredValues = field(default_factory=MeasuredValues)
    final: MeasuredValues = field(default_factory=MeasuredValues)
    acknowledgement: MeasuredValues = field(default_factory=MeasuredValues)
    client_lag: MeasuredValues = field(default_factory=MeasuredValues)
    audible: int = 0
    with_underruns: int = 0
    gap: MeasuredValues = field(default_factory=MeasuredValues)
    characters: int = 0
    audio_sec: float = 0.0
    #: None until an answer has told.
    output_tokens: int | None = None

    @property
    def unfinished(self) -> int:
        return self.asked - self.answered - self.failed.total()

    def refuse(self, code: str, message: str) -> None:
        self.refused[code] += 1
        self.refusals.setdefault(code, message)

    def fail(self, code: str, now: float) -> None:
        self.failed[code] += 1
        self.last_at = now

    def finish(self, watch: AnswerWatch, now: float) -> None:
        """Counts a turn that is over. Only what was answered without an error is measured."""
        self.partial_answers += watch.partial_answers
        if watch.error_code is not None:
            self.fail(watch.error_code, now)
            return
        answer, asked_at = watch.answer, watch.asked_at
        assert asked_at is not None, "only a failure ends a turn before its input has ended"
        self.answered += 1
        self.last_at = now
        self.empty += answer.first_text is None and answer.first_audio is None
        for values, moment in (
            (self.first_text, answer.first_text),
            (self.first_audio, answer.first_audio),
            (self.final, answer.final),
        ):
            if moment is not None:
                values.add(moment - asked_at)
        self.characters += answer.characters
        self.audio_sec += answer.player.audio_sec
        if answer.output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + answer.output_tokens
        if answer.first_audio is not None:
            self.audible += 1
            self.with_underruns += bool(answer.player.gaps)
            for gap in answer.player.gaps:
                self.gap.add(gap)
