"""TurnTimes: when each step of one answer happened, from the end of the user's speech to the first sound at their ear.

The service and the parts of an engine mark the moments, each where it happens and once, in the one TurnTimes of the
request (``GenerationRequest.times``). All that tells them, such as finals, log lines, metrics, traces and recordings,
reads them there. Times are seconds on the event loop's clock.
"""

from __future__ import annotations

import asyncio
from typing import Literal, NamedTuple, TypeAlias

from omni_ws.core.answer_times import MOMENTS, PARTS
from omni_ws.profiler import events

#: A moment that a part of an engine marks.
EngineMoment: TypeAlias = Literal["llm_asked", "first_token", "first_clause", "first_audio_made"]


class TurnPart(NamedTuple):
    """A part of the wait for an answer: its name in ``PARTS``, and when it began and ended."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TurnTimes:
    """The moments of one answer, and what it threw away. A moment is None until it is known, and where there is none.

    ``speech_ended``: the end of the user's speech as turn detection labels it, when the sound of it arrived;
    ``turn_decided``: turn detection took the turn for ended, having heard ``turn_decided_audio_ms`` more.
    ``input_ended``: the last input had come. ``engine_started``: the engine got the request, which may be while the
    user speaks. ``transcript_settled``: the last words of the input were final, and ``transcript_guessed``: the same
    words were known as a guess at a pause. ``llm_asked``: the LLM had all of its input. ``first_token``: the first
    text, thought or tool call of the answer; ``first_clause``: the voice was given text; ``first_audio_made``: it gave
    sound. If the answer was begun at a pause, these four are of that answer. ``first_audio_sent`` and
    ``last_audio_sent``: the sound went to the connection. ``first_audio_played``: the client began to play it, by its
    report, or the server by its own clock. ``interrupted``: a cancel, speech or another request ended the answer.
    """

    __slots__ = (
        *MOMENTS,
        "_guess",
        "awaits_transcript",
        "discarded_sec",
        "discarded_tokens",
        "moved",
        "turn_decided_audio_ms",
    )

    def __init__(self) -> None:
        self.speech_ended: float | None = None
        self.input_ended: float | None = None
        self.turn_decided: float | None = None
        self.engine_started: float | None = None
        self.transcript_guessed: float | None = None
        self.transcript_settled: float | None = None
        self.llm_asked: float | None = None
        self.first_token: float | None = None
        self.first_clause: float | None = None
        self.first_audio_made: float | None = None
        self.first_audio_sent: float | None = None
        self.first_audio_played: float | None = None
        self.last_audio_sent: float | None = None
        self.interrupted: float | None = None
        #: How much audio after the end of the speech had been judged as the turn was decided, in milliseconds.
        self.turn_decided_audio_ms: int | None = None
        #: Whether the answer waits for the transcript. An LLM that hears by itself does not.
        self.awaits_transcript = False
        #: Whether another server has begun the request: what is marked here is not the whole, and is not told.
        self.moved = False
        #: Answers that were begun at a pause and not used: how long they were worked on, and their tokens so far.
        self.discarded_sec = 0.0
        self.discarded_tokens = 0
        #: The latest guess of the words, and when it was made.
        self._guess: tuple[str, float] | None = None

    # marking

    def mark(self, moment: EngineMoment, stage: str) -> None:
        """Note that ``moment`` is now, unless it was before, and tell the profiler, as an event of ``stage``."""
        if getattr(self, moment) is None:
            setattr(self, moment, asyncio.get_running_loop().time())
            events.emit(stage, moment)

    def decide_turn(self, speech_ended: float, now: float, audio_ms: int) -> None:
        """Note that the turn is taken for ended ``now``, ``audio_ms`` of audio after the end of its speech."""
        self.speech_ended = min(speech_ended, now)
        self.turn_decided, self.turn_decided_audio_ms = now, audio_ms

    def guess(self, words: str, now: float) -> None:
        """Note a guess of the words of the input at a pause, which may prove right."""
        self._guess = (words, now) if words.strip() else None

    def settle(self, words: str, now: float) -> None:
        """Note words of the input that are final; not once sound of the answer was sent."""
        if self.first_audio_sent is None:
            self.transcript_settled = now
            guess, self._guess = self._guess, None
            self.transcript_guessed = guess[1] if guess is not None and guess[0] == words else None

    def all_sent(self, now: float) -> None:
        """Note that all of the answer went to the connection: its sound, too, if it has any."""
        if self.first_audio_sent is not None:
            self.last_audio_sent = now

    def play(self, when: float) -> None:
        """Note that the first sound of the answer was played at ``when``; not before it was sent."""
        self.first_audio_played = when if self.first_audio_sent is None else max(when, self.first_audio_sent)

    def take_over(self, used: TurnTimes) -> None:
        """Take the engine's moments of an answer that was begun at a pause, and is used."""
        self.llm_asked, self.first_token = used.llm_asked, used.first_token
        self.first_clause, self.first_audio_made = used.first_clause, used.first_audio_made

    def discard(self, seconds: float, tokens: int) -> None:
        """Note an answer that was begun at a pause, and is thrown away after ``seconds`` of work."""
        self.discarded_sec += seconds
        self.discarded_tokens += tokens

    # reading

    @property
    def origin(self) -> float | None:
        """The moment from which the others are counted: the end of the speech or, without speech, of the input."""
        if self.moved:
            return None
        return self.input_ended if self.speech_ended is None else self.speech_ended

    @property
    def mouth_to_ear(self) -> float | None:
        """The seconds from the end of the speech to the first sound that was played; None without either."""
        if self.speech_ended is None or self.first_audio_played is None or self.moved:
            return None
        return self.first_audio_played - self.speech_ended

    def known(self) -> dict[str, float]:
        """Return the moments that are known, by their names."""
        return {name: when for name in MOMENTS if (when := getattr(self, name)) is not None}

    def in_ms(self) -> dict[str, int]:
        """Return the known moments in milliseconds since ``origin``, as clients get them; empty without an origin.

        A moment before the origin is negative. With them are ``turn_decided_audio_ms`` and, if an answer was thrown
        away, ``discarded_ms`` and the ``discarded_tokens`` that are known of it.
        """
        if (origin := self.origin) is None:
            return {}
        told = {name: round((when - origin) * 1000) for name, when in self.known().items()}
        if self.turn_decided_audio_ms is not None:
            told["turn_decided_audio_ms"] = self.turn_decided_audio_ms
        if self.discarded_sec:
            told["discarded_ms"] = round(self.discarded_sec * 1000)
        if self.discarded_tokens:
            told["discarded_tokens"] = self.discarded_tokens
        return told

    def parts(self) -> list[TurnPart]:
        """Return what the answer waited for, one part after the other, from ``origin`` to its first sound.

        Each part begins where the one before ends, so that they sum up to the whole. What was ready before took no time
        of its own: the part has 0 seconds. A part whose end is not known is left out, and its time is in the next.
        """
        if (last := self.origin) is None:
            return []
        parts = []
        for name, moment in PARTS:
            ended = getattr(self, moment)
            if ended is None or (moment == "transcript_settled" and not self.awaits_transcript):
                continue
            parts.append(TurnPart(name, last, last := max(last, ended)))
        return parts
