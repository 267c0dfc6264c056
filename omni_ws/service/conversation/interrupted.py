"""Answers that speech interrupts: they are held, or cut off.

The turn of an answer that was cut off is still transcribed and remembered.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from msgspec.structs import replace

from omni_ws.audio.container import media_type
from omni_ws.audio.sound_levels import SpeechLull
from omni_ws.core.chunks import InputChunk, Modality, other_readings
from omni_ws.core.history import Message
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    PartFailed,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.clauses import (
    EarlierParts,
    apart,
)
from omni_ws.service.conversation.onsets import (
    Verdict,
    judged,
    sure_words,
)
from omni_ws.service.conversation.request import Request

#: How long an answer is held at most: it goes on if no words are known by then, until some are.
MAX_HOLD_SEC: Final = 2.0
#: How much longer an answer is held if the turn has ended by then: its words are still being transcribed.
WORDS_DUE_SEC: Final = 3.0


class HeldAnswer:
    """The answer to ``request``, held until it is known whether ``by``, the turn that interrupted it, has words.

    A turn that is ``judged`` a backchannel ("yeah", "mm-hm") has no words in this sense, unless the answer has just
    asked something.

    ``give_up``, which cancels the held answer, is called once the turn has words. A turn without words lets the answer
    go on. If neither is known after MAX_HOLD_SEC, or WORDS_DUE_SEC later if the turn has ended by then, ``resume`` is
    called: the answer goes on, and words of the turn may still cancel it.
    """

    def __init__(
        self, request: Request, by: Request, *, give_up: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        self.request = request
        self.by = by
        #: Settled transcripts of the turn that are no words so far.
        self._passed_over: list[TranscriptOutput] = []
        #: Whether it is known if the turn has words, or the answer was cancelled.
        self.decided = False
        #: Whether the answer goes on before that is known.
        self.resumed = False
        #: Whether ``look_later`` was called.
        self.looked_at_later = False
        self._give_up = give_up
        self._resume = resume
        self._limit = asyncio.get_running_loop().call_later(MAX_HOLD_SEC, self._time_is_up)

    def _time_is_up(self) -> None:
        if self.by.input_ended.is_set():
            self._limit = asyncio.get_running_loop().call_later(WORDS_DUE_SEC, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Let the answer go on, although words may still be recognised in the turn, which then cancel the answer."""
        self.resumed = True
        self._resume()

    def look_later(self, look: Callable[[], None]) -> None:
        """Call ``look`` once all words of the message that the held answer answers are known.

        The turn follows that message in the history, so that the engine may begin with the turn only then.
        """
        self.looked_at_later = True
        self.request.when_question_known(look)

    def decide(self) -> None:
        """Note that the decision is made: the turn has words or has none, or the answer is cancelled."""
        self.decided = True
        self._limit.cancel()

    def take_passed_over(self) -> list[TranscriptOutput]:
        """Return the wordless transcripts with which the turn began, and forget them."""
        passed_over, self._passed_over = self._passed_over, []
        return passed_over

    def judge(self, output: EngineOutput, *, transcribes_first: bool) -> bool | None:
        """Return whether the turn has words, judging by ``output`` of its own answer; None if that remains open.

        If the turn has words, the held answer is given up. ``transcribes_first``: see EngineCapabilities.
        """
        only_speech = self.by.only_speech
        if only_speech and isinstance(output, TranscriptOutput) and self._acknowledges(output):
            return None
        words = _has_words(output, only_after_transcripts=transcribes_first and only_speech)
        if words:
            self._give_up()
        return words

    def guess(self, guess: TranscriptGuess) -> None:
        """Let the answer go on before its turn has ended, if a guess at the words says that they are a backchannel."""
        lull = self.by.lull
        if self.decided or self.resumed or lull is None or not guess.text.strip():
            return
        if self._verdict(guess, lull) is Verdict.BACKCHANNEL:
            self._limit.cancel()
            self._go_on()

    def _acknowledges(self, transcript: TranscriptOutput) -> bool:
        """Return whether the turn may still be a backchannel; if so, keep a settled ``transcript``."""
        said = self._said(transcript.text)
        if not said.strip() or (transcript.interim and not sure_words(said, self.by.language_of(transcript))):
            return True
        if self._verdict(transcript, self.by.lull) is not Verdict.BACKCHANNEL:
            return False
        if not transcript.interim:
            self._passed_over.append(transcript)
        return True

    def _said(self, text: str) -> str:
        """Return all that was said in the turn, up to and including ``text``."""
        return "".join([*(earlier.text for earlier in self._passed_over), text])

    def _verdict(self, words: TranscriptOutput | TranscriptGuess, lull: SpeechLull | None) -> Verdict:
        return judged(
            self._said(words.text),
            None if lull is None else lull.probability,
            self.by.language_of(words),
            voiced_ms=0 if lull is None else lull.voiced_ms,
            after_question=self.request.asks,
            others=[self._said(f" {other}") for other in other_readings(words.hearing)],
        )


def _has_words(output: EngineOutput, *, only_after_transcripts: bool) -> bool | None:
    match output:
        case TranscriptOutput(text=text):
            return True if text.strip() else None
        case PartFailed():
            return True  # nobody knows
        case TextOutput(text=""):
            return None
        case TextOutput() | AudioOutput() | ToolCallOutput() | ThoughtOutput():
            return not only_after_transcripts
        case _:
            return None


# Turns whose answer was cut off, until all of their words are known.

#: How long the final of an interrupted request waits for its settled transcript, and the next answer with it.
FINAL_WAITS_SEC: Final = 3.0
#: Cut turns of one session that are transcribed at the same time. If there are more, the words of the oldest are not
#: waited for.
MOST_WRITTEN_DOWN: Final = 16


class Due(Enum):
    """A step that is due for a cut turn: a turn that is still transcribed although its answer was cut off."""

    #: Its transcription has taken too long: the words so far are taken as final.
    GIVE_UP = "give up"
    #: Its words are known: they enter the history.
    WORDS = "words"
    #: Its final is written.
    FINAL = "final"
    #: Its words became known after its final: they are sent in a late transcript.
    LATE_WORDS = "late words"


@dataclass(slots=True, eq=False)
class _CutTurn:
    request: Request
    #: The latest time for its final, and the time after which its words are not waited for.
    final_by: float
    known_by: float
    known: bool = False
    has_final: bool = False
    #: Whether its words became known after its final.
    late: bool = False

    def know(self) -> None:
        """Note that the transcription has ended, so that no more words will become known."""
        self.known, self.late = True, self.has_final

    def hurry(self, now: float) -> None:
        """Make the final due now."""
        self.final_by = min(self.final_by, now)

    def give_up(self, now: float) -> None:
        """Stop waiting for the words of the turn."""
        self.known_by = now

    def end(self) -> None:
        """Note that the final is written."""
        self.has_final = True


class CutTurns:
    """Decides when the finals and late transcripts of a session's cut turns are due.

    The answer of a cut turn was cut off while the recogniser still transcribes the turn.
    Finals, and words in the history, come in the order in which the requests opened. The final of an interrupted
    request waits for the words of its turn, for FINAL_WAITS_SEC at most. The final of a request that a client cancelled
    is due immediately, and so are all finals before it. Words that become known after the final are sent late; after
    ``patience`` seconds they are given up. This class has no clock: ``now`` is an argument.
    """

    __slots__ = ("_turns", "patience")

    def __init__(self, patience: float) -> None:
        self.patience = patience
        #: In the order of their opening.
        self._turns: list[_CutTurn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, request: Request) -> bool:
        return any(turn.request is request for turn in self._turns)

    def add(self, request: Request, *, known: bool, at_once: bool, now: float) -> None:
        """Add a request whose answer was cut off.

        ``known``: the transcription of its speech has ended. ``at_once``: its final is due now.
        """
        turn = _CutTurn(request, now if at_once else now + FINAL_WAITS_SEC, now + self.patience, known)
        self._turns.append(turn)
        self._turns.sort(key=lambda one: one.request.number)
        if at_once:
            self.hurry(request, now=now)
        pending = [one for one in self._turns if not one.known]
        for one in pending[:-MOST_WRITTEN_DOWN]:
            one.give_up(now)

    def hurry(self, request: Request, *, now: float) -> None:
        """Make the final of a request due now, and those of the requests before it."""
        for turn in self._turns:
            if turn.request.number <= request.number:
                turn.hurry(now)

    def known(self, request: Request) -> bool:
        """Note that the transcript of a request is complete.

        Returns whether anybody still waits for it.
        """
        for turn in self._turns:
            if turn.request is request and not turn.known:
                turn.know()
                return True
        return False

    def give_all_up(self, *, now: float) -> None:
        """Make all steps due now, as the session ends."""
        for turn in self._turns:
            turn.give_up(now)
            turn.hurry(now)

    def unwritten(self) -> list[Request]:
        """Return the requests that have their final, but whose words are not known yet."""
        return [turn.request for turn in self._turns if turn.has_final and not turn.known]

    def pending_before(self, request: Request) -> list[Request]:
        """Return the cut turns before ``request`` that have not entered the history, in order."""
        earlier = [turn.request for turn in self._turns if turn.request.number < request.number]
        return [one for one in earlier if not one.remembered]

    def before(self, request: Request) -> bool:
        """Return whether ``request`` must wait for earlier cut turns before its answer may be sent.

        It waits for their finals and, if it sees the history, for their words.
        """
        sees = request.sees_history
        earlier = [turn for turn in self._turns if turn.request.number < request.number]
        return any(not turn.has_final or (sees and not turn.known) for turn in earlier)

    def get_timer(self) -> float | None:
        """Return when ``due`` next has a step because of the time; None if no step depends on time."""
        first_final = next((turn.final_by for turn in self._turns if not turn.has_final), math.inf)
        when = min((turn.known_by for turn in self._turns if not turn.known), default=math.inf)
        return None if when == first_final == math.inf else min(when, first_final)

    def due(self, *, now: float) -> Iterator[tuple[Due, Request]]:
        """Yield the steps that are due now with their requests, each once, in the order in which to do them."""
        for turn in tuple(self._turns):
            if not turn.known and now >= turn.known_by:
                turn.know()
                yield Due.GIVE_UP, turn.request
        for turn in tuple(self._turns):
            if not turn.known:
                break  # what was said later has its place behind these words
            if not turn.request.remembered:
                yield Due.WORDS, turn.request
                if turn.has_final:
                    self._turns.remove(turn)
                if turn.late:
                    yield Due.LATE_WORDS, turn.request
        while (next_one := self._final_due(now)) is not None:
            next_one.end()
            yield Due.FINAL, next_one.request
            if next_one.request.remembered:
                self._turns.remove(next_one)

    def _final_due(self, now: float) -> _CutTurn | None:
        """Return the turn whose final is next, if that final is due."""
        first = next((turn for turn in self._turns if not turn.has_final), None)
        return first if first is not None and (first.known or now >= first.final_by) else None


class EarlierTurns(EarlierParts):
    """The words of earlier turns that got no heard answer: the user's next message begins with these words.

    ``said`` is a message in the history, the last to which no answer was heard. ``requests`` are later turns, which may
    still be being transcribed.
    """

    def __init__(self, said: Message | None, requests: Iterable[Request]) -> None:
        self._said = said
        self._requests = tuple(requests)

    @property
    def known(self) -> bool:
        return all(request.question_known for request in self._requests)

    async def chunks(self) -> tuple[InputChunk, ...]:
        for request in self._requests:
            await request.until_question_known()
        messages = [*([self._said] if self._said is not None else ()), *(one.question for one in self._requests)]
        chunks: list[InputChunk] = []
        for chunk in (chunk for message in messages for part in message.parts for chunk in _chunks_of(part)):
            chunks.append(apart(chunks[-1], chunk) if chunks else chunk)
        return tuple(chunks)


def _chunks_of(message: Message) -> Iterator[InputChunk]:
    if message.text.strip():
        yield InputChunk(Modality.TEXT, message.text.encode())
    if message.picture is not None:
        yield message.picture
    if (speech := message.speech) is not None:
        for chunk in speech.chunks:
            yield chunk if chunk.format is not None else replace(chunk, format=media_type(speech.format))
