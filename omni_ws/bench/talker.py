"""Talkers, who put load on a server: what they ask, what they hear, and what they have measured."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from ssl import SSLContext
from typing import Any, ClassVar, Final, Self, TypeAlias

from omni_ws.caller.answers import TimedAnswer
from omni_ws.caller.script import PIECE_MS, PIECE_SEC, beside, speech_of
from omni_ws.client import (
    AudioChunk,
    ClientSession,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    Event,
    InputAck,
    ResponseStarted,
    SpeechStarted,
    TextChunk,
    connect,
)
from omni_ws.client import Final as LastEvent
from omni_ws.client.audio import Pcm16, paced, pieces
from omni_ws.core.chunks import FinishReason
from omni_ws.errors import OmniError

#: The pause after a turn that failed; the server may ask for a longer one.
PAUSE_AFTER_FAILURE_SEC: Final = 0.5
LAG_INTERVAL_SEC: Final = 0.1


async def bench(load: Load, tally: Tally) -> None:
    """Run all talkers; ``tally`` has at any time what was measured so far.

    Raises ConnectionFailed if the server cannot be reached at all.
    """
    tally.begin(asyncio.get_running_loop().time())
    try:
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(_measure_lag(tally))
            talkers = [tasks.create_task(LoadTalker(load, tally, number).talk()) for number in range(load.sessions)]
            await asyncio.wait(talkers)
            lag.cancel()
    except ExceptionGroup as failures:
        unreachable, others = failures.split(ConnectionFailed)
        if unreachable is None or others is not None:
            raise
        raise unreachable.exceptions[0] from None


async def _measure_lag(tally: Tally) -> None:
    """Measure how late this program's own event loop is: what it adds to all other times."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SEC
        await asyncio.sleep(LAG_INTERVAL_SEC)
        tally.times["client_lag"].add(loop.time() - due)


class LoadTalker:
    """A talker, who asks one question after the other over a connection of its own.

    ``number`` counts from 0 and staggers their starts.
    """

    def __init__(self, load: Load, tally: Tally, number: int) -> None:
        self._load = load
        self._tally = tally
        self._number = number
        self._asked = 0
        #: The turn that is listened to, and what ended the session; None while it is open.
        self._watch: AnswerWatch | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        #: Pieces that were sent and not acknowledged: their numbers, and when.
        self._sent: deque[tuple[int, float]] = deque()

    async def talk(self) -> None:
        """Ask all of its questions, over another connection where one was lost.

        A session that is refused is the end of it. Raises ConnectionFailed if there has been no sign of a server.
        """
        await asyncio.sleep(self._number * self._load.stagger_sec)
        while self._wants_to_ask:
            if not await self._session():
                return

    @property
    def _wants_to_ask(self) -> bool:
        if self._load.run_sec is not None:
            return asyncio.get_running_loop().time() < self._tally.began_at + self._load.run_sec
        return self._load.turns is None or self._asked < self._load.turns

    async def _session(self) -> bool:
        """Open a session and ask until it breaks or enough was asked; return whether it was opened."""
        loop, load = asyncio.get_running_loop(), self._load
        began, opened = loop.time(), False
        try:
            config = load.session_config
            async with connect(load.url, api_key=load.api_key, config=config, ssl=load.tls) as session:
                opened = True
                self._tally.open(began, loop.time())
                self._watch = self._error = None
                self._sent.clear()
                async with beside(self._listen(session)):
                    while self._wants_to_ask and await self._turn(session):
                        pass
        except (OmniError, ConnectionFailed) as error:
            if opened or (isinstance(error, ConnectionFailed) and not (self._tally.opened or self._tally.refused)):
                raise
            self._tally.refuse(code_of(error), str(error))
        return opened

    async def _turn(self, session: ClientSession) -> bool:
        """Ask once; return whether the session can go on. After a failure a late answer must not meet the next."""
        loop, load, question = asyncio.get_running_loop(), self._load, self._load.question
        self._watch = watch = AnswerWatch(open_microphone=question.is_open)
        self._asked += 1
        self._tally.ask()
        try:
            async with (
                asyncio.timeout(question.seconds + load.patience_sec) as patience,
                AsyncExitStack() as microphone,
            ):
                asking = self._ask(session, watch)
                if question.is_open:
                    await microphone.enter_async_context(beside(asking))
                else:
                    await asking
                await self._answered(watch)
                patience.reschedule(None)
                self._tally.finish(watch, loop.time())
                # A microphone stays open until the answer has been played, and the pause is over.
                if question.is_open:
                    await asyncio.sleep(max(0.0, (watch.player.plays_until or 0.0) - loop.time()))
                if watch.error_code is None:
                    await asyncio.sleep(load.pause_sec)
                else:
                    await asyncio.sleep(max(PAUSE_AFTER_FAILURE_SEC, (watch.retry_after_ms or 0) / 1000))
        except (OmniError, ConnectionLost, TimeoutError) as error:
            self._tally.fail(watch, watch.error_code or code_of(error), loop.time())
            await asyncio.sleep(PAUSE_AFTER_FAILURE_SEC)
            return False
        return self._error is None

    async def _ask(self, session: ClientSession, watch: AnswerWatch) -> None:
        """Send the question in real time. Answers are timed from its last piece, which may end the input."""
        loop, question = asyncio.get_running_loop(), self._load.question
        if isinstance(question, TypedQuestion):
            now = loop.time()
            watch.input_ended(now)
            self._sent.append((await session.send_text(question.text, end=True), now))
            return
        place = 0
        with suppress(*(OmniError, ConnectionLost) if question.is_open else ()):  # ``_listen`` gets the error, too
            async with aclosing(paced(question.pieces, interval=PIECE_SEC)) as microphone:
                async for piece in microphone:
                    place += 1
                    now, is_last = loop.time(), place == question.last_piece
                    if is_last:
                        watch.input_ended(now)
                    number = await session.send_audio(piece, end=is_last and not question.is_open)
                    self._sent.append((number, now))

    async def _listen(self, session: ClientSession) -> None:
        """Read until the session ends, and note when each event came."""
        loop = asyncio.get_running_loop()
        try:
            async for event in session.events():
                now = loop.time()
                if isinstance(event, InputAck):
                    while self._sent and self._sent[0][0] < event.next_sequence_id:
                        self._tally.times["acknowledgement"].add(now - self._sent.popleft()[1])
                elif self._watch is not None:
                    self._watch.take(event, now)
                    self._changed.set()
            async for _ in session.response():  # none is left, and it raises why
                pass
            self._error = ConnectionLost("the session has ended")
        except (OmniError, ConnectionLost) as error:
            self._error = error
        self._changed.set()

    async def _answered(self, watch: AnswerWatch) -> None:
        """Wait until the turn is over. Raises the error that ended the session before."""
        while not watch.is_over:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()


def code_of(error: Exception) -> str:
    """The code of the server, or a word of this program's for what no server reports."""
    match error:
        case OmniError():
            return error.code
        case ConnectionFailed():
            return "unreachable"
        case TimeoutError():
            return "no_answer_in_time"
    return "connection_lost"


# What they ask

#: Half a second of silence, with which an open microphone begins each turn.
LEAD_PIECES: Final = 25


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """A text, sent at once."""

    seconds: ClassVar = 0.0
    is_open: ClassVar = False

    text: str


@dataclass(frozen=True, slots=True)
class SpokenQuestion:
    """A recording, sent in real time.

    ``turn_detection`` is the type with which the server listens to an open microphone; None where the client ends its
    input itself. ``last_piece`` is which of its ``pieces`` has the end of what is said, from 1: the last of the
    recording or, with an open microphone, the last within 26 dB of the loudest.
    """

    file: str
    audio: Pcm16
    turn_detection: str | None
    last_piece: int

    @classmethod
    def of(cls, file: str, audio: Pcm16, *, turn_detection: str | None) -> Self:
        """Return the question that a recording asks. Raises ValueError for one without any sound."""
        _, spoken = speech_of(audio)
        last = LEAD_PIECES + spoken if turn_detection else sum(1 for _ in pieces(audio, piece_ms=PIECE_MS))
        return cls(file, audio, turn_detection, last)

    @property
    def is_open(self) -> bool:
        """Whether the server listens to an open microphone."""
        return self.turn_detection is not None

    @property
    def seconds(self) -> float:
        """How long it takes to send it, up to the moment from which answers are timed."""
        return self.last_piece * PIECE_SEC if self.is_open else self.audio.duration_ms / 1000

    @property
    def pieces(self) -> Iterator[bytes]:
        """What is sent: the recording; into an open microphone, silence before it and endless silence behind it."""
        recording = pieces(self.audio, piece_ms=PIECE_MS)
        if not self.is_open:
            return recording
        silence = bytes(2 * self.audio.channels * (self.audio.sample_rate * PIECE_MS // 1000))
        return chain(repeat(silence, LEAD_PIECES), recording, repeat(silence))


Question: TypeAlias = TypedQuestion | SpokenQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all talkers ask, and how often. Times are seconds.

    Each asks ``turns`` times or, with None, begins no turn after ``run_sec``. ``patience_sec`` is how long an answer
    may take from the end of the input; ``pause_sec`` passes between an answer and the next question.
    """

    url: str
    question: Question
    api_key: str | None = field(default=None, repr=False)
    tls: SSLContext | None = None
    sessions: int = 4
    turns: int | None = 5
    run_sec: float | None = None
    stagger_sec: float = 0.2
    pause_sec: float = 0.0
    patience_sec: float = 30.0
    modalities: tuple[str, ...] | None = None

    @property
    def session_config(self) -> dict[str, Any]:
        """The configuration of each session. Answers are pcm16, whose length says how long it plays."""
        config: dict[str, Any] = {"output_audio": {"format": "pcm16"}}
        if self.modalities is not None:
            config["modalities"] = list(self.modalities)
        if isinstance(self.question, SpokenQuestion):
            audio = self.question.audio
            config["input_audio"] = {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels}
            if self.question.turn_detection is not None:
                config["turn_detection"] = {"type": self.question.turn_detection}
        return config


# What they hear


_BYTES_PER_SAMPLE: Final = 2


@dataclass(slots=True)
class SimulatedPlayer:
    """A loudspeaker that starts with the first audio, and is silent wherever the next has not come yet."""

    #: The silences, each where audio came too late.
    gaps: list[float] = field(default_factory=list)
    audio_sec: float = 0.0
    #: When what has come will have been played; None before the first.
    plays_until: float | None = None

    def add(self, chunk: AudioChunk, now: float) -> None:
        length = len(chunk.audio) / (_BYTES_PER_SAMPLE * chunk.sample_rate)
        until = now if self.plays_until is None else self.plays_until
        if now > until:
            self.gaps.append(now - until)
        self.plays_until = max(now, until) + length
        self.audio_sec += length


class AnswerWatch:
    """Follows one turn up to the end of its answer: its events, and when each came, in seconds.

    With an ``open_microphone`` the server decides what a turn is. A recording with pauses may be several: what is
    answered, or cut off, before its end is counted in ``partial_answers``, and the turn goes on.
    """

    def __init__(self, *, open_microphone: bool) -> None:
        self._begin_answer()
        self.partial_answers = 0
        #: When the input ended or, with an open microphone, the speech; None before.
        self.asked_at: float | None = None
        #: The code of the first error of the turn, and when to try again.
        self.error_code: str | None = None
        self.retry_after_ms: int | None = None
        self.is_over = False
        self._open_microphone = open_microphone
        #: The requests of this turn, and of these the ones whose speech is not the latest of the turn.
        self._requests: set[str] = set()
        self._earlier: set[str] = set()

    def _begin_answer(self) -> None:
        self.answer = TimedAnswer(keeps_audio=False)
        self.player = SimulatedPlayer()

    def input_ended(self, now: float) -> None:
        self.asked_at = now

    def take(self, event: Event, now: float) -> None:
        """Record an event that came at ``now``; later ones than the end of the turn are ignored."""
        if self.is_over:
            return
        match event:
            case ErrorEvent():
                self._fail(event.error.code)
                self.retry_after_ms = event.error.retry_after_ms
                self.is_over = event.blocks_request
            case SpeechStarted(request_id=request_id) if self._open_microphone:
                self._earlier |= self._requests
                if request_id is not None:
                    self._requests.add(request_id)
                self._begin_answer()
            case ResponseStarted(request_id=request_id):
                self._requests.add(request_id)
            case LastEvent():
                self._finished(event, now)
            case TextChunk(request_id=request_id) | AudioChunk(request_id=request_id):
                if request_id not in self._earlier:
                    self._requests.add(request_id)
                    self.answer.hear(event, now)
                    if isinstance(event, AudioChunk):
                        self.player.add(event, now)

    def _fail(self, code: str) -> None:
        if self.error_code is None:
            self.error_code = code

    def _finished(self, event: LastEvent, now: float) -> None:
        if event.finish_reason is FinishReason.ERROR:
            self._fail("engine_failed")
        elif self._open_microphone and (event.request_id in self._earlier or self.asked_at is None):
            self.partial_answers += 1
            if event.request_id not in self._earlier:
                self._begin_answer()
            self._requests.discard(event.request_id)
            self._earlier.discard(event.request_id)
            return
        elif event.finish_reason is FinishReason.CANCELLED:
            self._fail("cancelled")
        self.answer.hear(event, now)
        self.is_over = True


# What they have measured, in bounded memory

#: What is measured, in the order of the report.
TIMES: Final = [
    "session_opened",
    "first_text",
    "first_audio",
    "final",
    "acknowledgement",
    "gap_in_playback",
    "client_lag",
]
#: Values that are kept for percentiles: half a megabyte.
KEPT_VALUES: Final = 65_536


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

    def distribution(self) -> dict[str, float] | None:
        """Return the number of values, their largest and their percentiles by nearest rank; None without any value."""
        if not self._n:
            return None
        ordered = sorted(self._values)

        def at(part: float) -> float:
            return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

        return {"n": self._n, "median": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": self._max}


@dataclass(slots=True)
class Tally:
    """What all talkers have measured so far. Times are seconds, for answers from the end of their input."""

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
    #: By the names of the report.
    times: dict[str, MeasuredValues] = field(default_factory=lambda: {name: MeasuredValues() for name in TIMES})
    audible: int = 0
    with_underruns: int = 0
    characters: int = 0
    audio_sec: float = 0.0
    #: None until an answer has told.
    output_tokens: int | None = None

    @property
    def unfinished(self) -> int:
        return self.asked - self.answered - self.failed.total()

    def begin(self, now: float) -> None:
        """Note when the talkers start."""
        self.began_at = self.last_at = now

    def open(self, began: float, now: float) -> None:
        """Count a session that is open ``now``, and was asked for at ``began``."""
        self.opened += 1
        self.last_at = now
        self.times["session_opened"].add(now - began)

    def ask(self) -> None:
        """Count a turn that begins."""
        self.asked += 1

    def refuse(self, code: str, message: str) -> None:
        """Count a session that was refused."""
        self.refused[code] += 1
        self.refusals.setdefault(code, message)

    def fail(self, watch: AnswerWatch, code: str, now: float) -> None:
        """Count a turn that failed."""
        self.partial_answers += watch.partial_answers
        self.failed[code] += 1
        self.last_at = now

    def finish(self, watch: AnswerWatch, now: float) -> None:
        """Count a turn that is over. Only what was answered without an error is measured."""
        if watch.error_code is not None:
            self.fail(watch, watch.error_code, now)
            return
        self.partial_answers += watch.partial_answers
        answer, player = watch.answer, watch.player
        answer.ask(watch.asked_at)
        assert answer.asked_at is not None, "only a failure ends a turn before its input has ended"
        self.answered += 1
        self.last_at = now
        self.empty += answer.first_text_at is None and answer.first_audio_at is None
        for name, moment in (
            ("first_text", answer.first_text_at),
            ("first_audio", answer.first_audio_at),
            ("final", answer.final_at),
        ):
            if (latency := answer.latency(moment)) is not None:
                self.times[name].add(latency)
        self.characters += len(answer.text)
        self.audio_sec += player.audio_sec
        if answer.final is not None and answer.final.usage is not None:
            self.output_tokens = (self.output_tokens or 0) + answer.final.usage.output_tokens
        if answer.first_audio_at is not None:
            self.audible += 1
            self.with_underruns += bool(player.gaps)
            for gap in player.gaps:
                self.times["gap_in_playback"].add(gap)
