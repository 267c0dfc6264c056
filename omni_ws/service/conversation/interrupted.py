"""Answers that speech interrupted, turns whose answer was cut off, and what the next message begins with then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from msgspec.structs import replace

from omni_ws.audio.container import media_type
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    PartFailed,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.engine.continued_input import EarlierParts, apart
from omni_ws.service.conversation.mere_acknowledgements import is_acknowledgement
from omni_ws.service.conversation.request import Request

#: How long an answer is held at most: speech that goes on for longer counts as having words.
MAX_HOLD_SEC: Final = 10.0


class HeldAnswer:
    """The answer to ``request``, held until it is known whether the turn that interrupted it, of ``by``, has words.

    A mere acknowledgement ("yeah", "I see") does not count as words, unless the answer has just asked a question.

    ``give_up`` is called once the turn has words, or after MAX_HOLD_SEC.
    """

    def __init__(self, request: Request, by: Request, *, give_up: Callable[[], None]) -> None:
        self.request = request
        self.by = by
        #: Settled transcripts of the turn that were not taken for words.
        self._passed_over: list[TranscriptOutput] = []
        #: Whether it is known how the turn ended for this answer.
        self.decided = False
        #: Whether the turn begins only when all is known that was said before.
        self.looked_at_later = False
        self._give_up = give_up
        self._limit = asyncio.get_running_loop().call_later(MAX_HOLD_SEC, give_up)

    def look_later(self, look: Callable[[], None]) -> None:
        """Look at the turn again when all is known that was said before."""
        self.looked_at_later = True
        self.request.when_question_known(look)

    def decide(self) -> None:
        """It is not held any more."""
        self.decided = True
        self._limit.cancel()

    def take_passed_over(self) -> list[TranscriptOutput]:
        """What was said before the turn turned out to have words."""
        passed_over, self._passed_over = self._passed_over, []
        return passed_over

    def judge(self, output: EngineOutput, *, transcribes_first: bool) -> bool | None:
        """Whether the turn has words, by this output of its answer; None where that does not tell.

        If it has, the held answer is given up. ``transcribes_first``: see EngineCapabilities.
        """
        only_speech = self.by.only_speech
        if only_speech and isinstance(output, TranscriptOutput) and self._acknowledges(output):
            return None
        words = _has_words(output, only_after_transcripts=transcribes_first and only_speech)
        if words:
            self._give_up()
        return words

    def _acknowledges(self, transcript: TranscriptOutput) -> bool:
        """Whether all that was said so far is a mere acknowledgement. What is settled of it is passed over."""
        said = "".join([*(earlier.text for earlier in self._passed_over), transcript.text])
        if not is_acknowledgement(said) or self.request.asks:
            return False
        if not transcript.interim:
            self._passed_over.append(transcript)
        return True


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


# Turns whose answer was cut off, until all that was said in them is known.

#: How long the final of an interrupted request waits for its settled transcript, and the next answer with it.
FINAL_WAITS_SEC: Final = 3.0
#: Turns of one session that are written down at the same time. Whoever interrupts more often is not waited for.
MOST_WRITTEN_DOWN: Final = 16


class Due(Enum):
    """What is to be done about a cut turn now."""

    #: Its recognition has taken too long: settle for what there is.
    GIVE_UP = "give up"
    #: Its words are known: they enter the history.
    WORDS = "words"
    FINAL = "final"
    #: The words became known after the final.
    LATE_WORDS = "late words"


@dataclass(slots=True, eq=False)
class _CutTurn:
    request: Request
    #: When the final is due at the latest, and when its words are not waited for any more.
    final_by: float
    known_by: float
    known: bool = False
    has_final: bool = False
    #: Whether its words became known after its final.
    late: bool = False

    def know(self) -> None:
        """Nothing more is being written down."""
        self.known, self.late = True, self.has_final

    def hurry(self, now: float) -> None:
        """Its final is due at once."""
        self.final_by = min(self.final_by, now)

    def give_up(self, now: float) -> None:
        """Its words are not waited for."""
        self.known_by = now

    def end(self) -> None:
        """Its final is written."""
        self.has_final = True


class CutTurns:
    """Decides when the finals and the late transcripts of cut turns are due. Has no clock: ``now`` is an argument.

    Finals come in the order in which the requests opened. That of an interrupted request waits for its words, for
    FINAL_WAITS_SEC at most; that of one that a client cancelled comes at once, and takes those before it along. Words
    that become known later follow. They enter the history in the order of the requests, too. After ``patience`` seconds
    they are given up.
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
        """The answer to a request was cut off. ``known``: nothing of what was said is still being written down."""
        turn = _CutTurn(request, now if at_once else now + FINAL_WAITS_SEC, now + self.patience, known)
        self._turns.append(turn)
        self._turns.sort(key=lambda one: one.request.number)
        if at_once:
            self.hurry(request, now=now)
        pending = [one for one in self._turns if not one.known]
        for one in pending[:-MOST_WRITTEN_DOWN]:
            one.give_up(now)

    def hurry(self, request: Request, *, now: float) -> None:
        """Let the final of a request come at once, and those before it."""
        for turn in self._turns:
            if turn.request.number <= request.number:
                turn.hurry(now)

    def known(self, request: Request) -> bool:
        """All is known that was said in a request. Returns False where nobody waits for that any more."""
        for turn in self._turns:
            if turn.request is request and not turn.known:
                turn.know()
                return True
        return False

    def give_all_up(self, *, now: float) -> None:
        """The session ends: nothing is waited for."""
        for turn in self._turns:
            turn.give_up(now)
            turn.hurry(now)

    def unwritten(self) -> list[Request]:
        """The requests whose final is written, and whose words are not known yet."""
        return [turn.request for turn in self._turns if turn.has_final and not turn.known]

    def pending_before(self, request: Request) -> list[Request]:
        """Earlier requests whose words the history does not have yet, in their order."""
        earlier = [turn.request for turn in self._turns if turn.request.number < request.number]
        return [one for one in earlier if not one.remembered]

    def before(self, request: Request) -> bool:
        """Whether anything of earlier requests comes before what a request has to say.

        That is their finals, and, where the request sees what they say, their words.
        """
        sees = request.sees_history
        earlier = [turn for turn in self._turns if turn.request.number < request.number]
        return any(not turn.has_final or (sees and not turn.known) for turn in earlier)

    def get_timer(self) -> float | None:
        """When ``due`` has something to tell; None while it waits for words alone."""
        first_final = next((turn.final_by for turn in self._turns if not turn.has_final), math.inf)
        when = min((turn.known_by for turn in self._turns if not turn.known), default=math.inf)
        return None if when == first_final == math.inf else min(when, first_final)

    def due(self, *, now: float) -> Iterator[tuple[Due, Request]]:
        """Tell what is to be done now, each thing once."""
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
        """The turn whose final is next, where it is due."""
        first = next((turn for turn in self._turns if not turn.has_final), None)
        return first if first is not None and (first.known or now >= first.final_by) else None


class EarlierTurns(EarlierParts):
    """What a message begins with that was said before, in turns to which nothing was heard as an answer.

    That is a message of the history, and what is said in requests that may still be written down.
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
