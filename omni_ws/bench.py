"""The command ``omni-ws bench``: simulated users put load on a server and take measurements, which are reported."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from ssl import SSLContext
from typing import Any, ClassVar, Final, Self, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import orjson

from omni_ws.caller.answers import TimedAnswer
from omni_ws.caller.script import PIECE_MS, PIECE_SEC, beside, certificates, count, speech_of
from omni_ws.cli import INTERRUPTED, USAGE_ERROR
from omni_ws.client import (
    DEFAULT_URL,
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
from omni_ws.client.audio import Pcm16, paced, pieces, read_wav
from omni_ws.client.connection import websocket_url
from omni_ws.core.chunks import FinishReason
from omni_ws.errors import OmniError

#: The pause after a failed turn; the server may ask for a longer one.
PAUSE_AFTER_FAILURE_SEC: Final = 0.5
LAG_INTERVAL_SEC: Final = 0.1


async def bench(load: Load, tally: Tally) -> None:
    """Run all talkers, the simulated users, and keep their measurements in ``tally``, which can be read at any time.

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
    """Measure the delay of this program's own event loop, which is part of all other measured times."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SEC
        await asyncio.sleep(LAG_INTERVAL_SEC)
        tally.times["client_lag"].add(loop.time() - due)


class LoadTalker:
    """A simulated user who asks one question after the other over a connection of its own.

    ``number`` counts the talkers from 0, and staggers their starts.
    """

    def __init__(self, load: Load, tally: Tally, number: int) -> None:
        self._load = load
        self._tally = tally
        self._number = number
        self._asked = 0
        #: The turn in progress, and the error that ended the session; None while it is open.
        self._watch: AnswerWatch | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        #: The number and the time of each piece that was sent and not acknowledged.
        self._sent: deque[tuple[int, float]] = deque()

    async def talk(self) -> None:
        """Ask all questions, over a new connection if the last one was lost or an answer did not come in time.

        Stops if a session is refused. Raises ConnectionFailed if no talker has reached the server so far.
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
        """Open a session, and ask questions until it breaks or all are asked; return whether the session was opened."""
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
        """Ask once; return whether the session is still usable: not after a time-out, as a late answer could follow."""
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
        """Send the question in real time. The answer is timed from ``last_piece``, the end of the question."""
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
        """Read events until the session ends, and record when each arrived."""
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
            async for _ in session.response():  # no event is left: this raises the reason for the end
                pass
            self._error = ConnectionLost("the session has ended")
        except (OmniError, ConnectionLost) as error:
            self._error = error
        self._changed.set()

    async def _answered(self, watch: AnswerWatch) -> None:
        """Wait until the turn is over. If the session ends first, raise its error."""
        while not watch.is_over:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()


def code_of(error: Exception) -> str:
    """Return the code of a server's error, or for other errors a word such as ``unreachable``."""
    match error:
        case OmniError():
            return error.code
        case ConnectionFailed():
            return "unreachable"
        case TimeoutError():
            return "no_answer_in_time"
    return "connection_lost"


# The questions

#: Half a second of silence, with which each turn begins for an open microphone.
LEAD_PIECES: Final = 25


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """A question as text, sent in one piece."""

    seconds: ClassVar = 0.0
    is_open: ClassVar = False

    text: str


@dataclass(frozen=True, slots=True)
class SpokenQuestion:
    """A question as a recording, sent in real time.

    ``turn_detection`` is the type of turn detection with which the server listens to an open microphone; None if the
    client ends its input itself. ``last_piece`` is the number, from 1, of the piece with the end of the question: the
    last piece of the recording or, with an open microphone, the last piece within 26 dB of the loudest.
    """

    file: str
    audio: Pcm16
    turn_detection: str | None
    last_piece: int

    @classmethod
    def of(cls, file: str, audio: Pcm16, *, turn_detection: str | None) -> Self:
        """Return the question for a recording. Raises ValueError for a recording without sound."""
        _, spoken = speech_of(audio)
        last = LEAD_PIECES + spoken if turn_detection else sum(1 for _ in pieces(audio, piece_ms=PIECE_MS))
        return cls(file, audio, turn_detection, last)

    @property
    def is_open(self) -> bool:
        """Whether the server listens to an open microphone."""
        return self.turn_detection is not None

    @property
    def seconds(self) -> float:
        """The time that it takes to send the question, up to the moment from which the answer is timed."""
        return self.last_piece * PIECE_SEC if self.is_open else self.audio.duration_ms / 1000

    @property
    def pieces(self) -> Iterator[bytes]:
        """The pieces to send: the recording.

        For an open microphone, silence precedes it, and follows it without end.
        """
        recording = pieces(self.audio, piece_ms=PIECE_MS)
        if not self.is_open:
            return recording
        silence = bytes(2 * self.audio.channels * (self.audio.sample_rate * PIECE_MS // 1000))
        return chain(repeat(silence, LEAD_PIECES), recording, repeat(silence))


Question: TypeAlias = TypedQuestion | SpokenQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The questions of all talkers, and how often they ask. Times are in seconds.

    With ``run_sec``, each talker begins turns for that time; otherwise it asks ``turns`` times, or without end if that
    is None. ``stagger_sec`` is the time between the starts of two talkers, ``pause_sec`` that between an answer and the
    next question. ``patience_sec`` is the longest time from the end of the input to the end of the answer.
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
        """The configuration of each session. Answers are pcm16, so that their size gives their duration."""
        config: dict[str, Any] = {"output_audio": {"format": "pcm16"}}
        if self.modalities is not None:
            config["modalities"] = list(self.modalities)
        if isinstance(self.question, SpokenQuestion):
            audio = self.question.audio
            config["input_audio"] = {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels}
            if self.question.turn_detection is not None:
                config["turn_detection"] = {"type": self.question.turn_detection}
        return config


# The answers


_BYTES_PER_SAMPLE: Final = 2


@dataclass(slots=True)
class SimulatedPlayer:
    """A simulated loudspeaker: it starts with the first audio, and is silent if the next audio arrives late."""

    #: The lengths of these silences in seconds.
    gaps: list[float] = field(default_factory=list)
    audio_sec: float = 0.0
    #: When all audio so far will have been played; None before the first audio.
    plays_until: float | None = None

    def add(self, chunk: AudioChunk, now: float) -> None:
        length = len(chunk.audio) / (_BYTES_PER_SAMPLE * chunk.sample_rate)
        until = now if self.plays_until is None else self.plays_until
        if now > until:
            self.gaps.append(now - until)
        self.plays_until = max(now, until) + length
        self.audio_sec += length


class AnswerWatch:
    """The events of one turn, up to the end of its answer, with the time of each in seconds.

    With an ``open_microphone`` the server detects the turns, and may divide a recording with pauses into several. An
    answer before the end of the recording, complete or cut off, is counted in ``partial_answers``, and the turn
    continues.
    """

    def __init__(self, *, open_microphone: bool) -> None:
        self._begin_answer()
        self.partial_answers = 0
        #: When the input ended or, with an open microphone, the speech ended; None before that.
        self.asked_at: float | None = None
        #: The code of the first error of the turn, and the delay after which to retry.
        self.error_code: str | None = None
        self.retry_after_ms: int | None = None
        self.is_over = False
        self._open_microphone = open_microphone
        #: The requests of this turn; and those of them whose speech is not the last speech of the turn.
        self._requests: set[str] = set()
        self._earlier: set[str] = set()

    def _begin_answer(self) -> None:
        self.answer = TimedAnswer(keeps_audio=False)
        self.player = SimulatedPlayer()

    def input_ended(self, now: float) -> None:
        self.asked_at = now

    def take(self, event: Event, now: float) -> None:
        """Record an event that arrived at ``now``; events after the end of the turn are ignored."""
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


# The measurements, in bounded memory

#: The names of the measured times, in the order of the report.
TIMES: Final = [
    "session_opened",
    "first_text",
    "first_audio",
    "final",
    "acknowledgement",
    "gap_in_playback",
    "client_lag",
]
#: The most values that are kept for percentiles: half a megabyte.
KEPT_VALUES: Final = 65_536


class MeasuredValues:
    """Measured values of one kind. Of more than ``kept``, a random sample is kept; number and maximum stay exact."""

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
        """Return the number of values, the largest, and percentiles by nearest rank; None if there are no values."""
        if not self._n:
            return None
        ordered = sorted(self._values)

        def at(part: float) -> float:
            return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

        return {"n": self._n, "median": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": self._max}


@dataclass(slots=True)
class Tally:
    """The measurements of all talkers so far. Times are in seconds, those of answers from the end of the input on."""

    began_at: float = 0.0
    #: The end of the last turn; before any has ended, the time at which the last session was opened.
    last_at: float = 0.0
    opened: int = 0
    #: The sessions that were refused, by error code, and the first message for each code.
    refused: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    #: The answers without text and audio, such as those to speech in which no words were recognised.
    empty: int = 0
    partial_answers: int = 0
    #: The measured times, by their names in the report.
    times: dict[str, MeasuredValues] = field(default_factory=lambda: {name: MeasuredValues() for name in TIMES})
    audible: int = 0
    with_underruns: int = 0
    characters: int = 0
    audio_sec: float = 0.0
    #: None until the usage of an answer reports tokens.
    output_tokens: int | None = None

    @property
    def unfinished(self) -> int:
        return self.asked - self.answered - self.failed.total()

    def begin(self, now: float) -> None:
        """Record when the talkers start."""
        self.began_at = self.last_at = now

    def open(self, began: float, now: float) -> None:
        """Count a session that was requested at ``began`` and is open since ``now``."""
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
        """Count a turn that failed with the error ``code``."""
        self.partial_answers += watch.partial_answers
        self.failed[code] += 1
        self.last_at = now

    def finish(self, watch: AnswerWatch, now: float) -> None:
        """Count a turn that is over. Only the times of an answer without an error are measured."""
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


# The command ``omni-ws bench``, and the report that it prints.


ALL_ANSWERED: Final = 0
FAILED: Final = 1
#: A question that the rules of the default engine can answer, too.
DEFAULT_TEXT: Final = "What is three plus four?"
DEFAULT_TURNS: Final = 5
_MODALITIES: Final = ("text", "audio")


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command, print its report, and return its exit status.

    ``--help`` and wrong usage of options raise SystemExit.
    """
    options = _parser().parse_args(arguments)
    try:
        load = _load(options, environ)
    except (ValueError, OmniError) as error:
        return _complain(error)
    tally, interrupted = Tally(), False
    try:
        asyncio.run(bench(load, tally))
    except KeyboardInterrupt:
        interrupted = True
    except ConnectionFailed as error:
        return _complain(f"{error}; start a server (omni-ws serve), or choose another with --url")
    if options.json:
        print(orjson.dumps(as_json(load, tally, interrupted=interrupted)).decode())
    else:
        print(as_text(load, tally, interrupted=interrupted))
    if "unauthenticated" in tally.refused:
        print("omni-ws bench: give a key with --api-key or OMNI_WS_API_KEY", file=sys.stderr)
    if interrupted:
        return INTERRUPTED
    return FAILED if tally.failed or tally.refused else ALL_ANSWERED


def _complain(problem: object) -> int:
    print(f"omni-ws bench: error: {problem}", file=sys.stderr)
    return USAGE_ERROR


def _load(options: argparse.Namespace, environ: Mapping[str, str]) -> Load:
    """Return the load for the options. Raises ValueError or OmniError for a bad URL, file or combination of options."""
    return Load(
        url=websocket_url(options.url),
        question=_question(options),
        api_key=options.api_key or environ.get("OMNI_WS_API_KEY"),
        tls=options.ca_file,
        sessions=options.sessions,
        turns=None if options.seconds is not None else options.turns or DEFAULT_TURNS,
        run_sec=options.seconds,
        stagger_sec=options.stagger,
        pause_sec=options.pause,
        patience_sec=options.patience,
        modalities=options.modalities,
    )


def _question(options: argparse.Namespace) -> Question:
    if options.file is None:
        if options.open_mic is not None:
            raise ValueError("--open-mic goes with --file")
        return TypedQuestion(DEFAULT_TEXT if options.text is None else options.text)
    try:
        return SpokenQuestion.of(options.file, read_wav(options.file), turn_detection=options.open_mic)
    except OSError as error:
        raise ValueError(f"cannot read {options.file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"cannot use {options.file}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws bench",
        description="Load a running server with talkers who ask and wait for their answers, and print how long those "
        "took. The exit status is 0 if all turns were answered, 1 if one failed or a session was refused, 2 for wrong "
        "usage or a server that cannot be reached, 130 after ^C, which prints what was measured so far.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help="address of the server [%(default)s]")
    add("--api-key", metavar="KEY", help="API key [environment variable OMNI_WS_API_KEY]")
    add("--ca-file", type=certificates, metavar="X.pem", help="certificates to trust for wss:// [the system's]")
    add("--sessions", type=count, default=4, metavar="N", help="talkers, each on its own connection [%(default)s]")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--turns", type=count, metavar="N", help=f"questions of each talker [{DEFAULT_TURNS}]")
    length.add_argument("--seconds", type=_above_zero, metavar="SEC", help="instead: begin turns for so long")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--file", metavar="X.wav", help="say this recording, in real time, in pieces of 20 ms")
    what.add_argument("--text", type=_text, help=f"type this question [{DEFAULT_TEXT}]")
    add(
        "--open-mic",
        nargs="?",
        const="server_vad",
        choices=["server_vad", "semantic_vad"],
        help="let the server detect the end of the recording, with silence behind it [server_vad]",
    )
    add("--modalities", type=_modalities, metavar="text,audio", help="what answers are made of [as the server has it]")
    add("--stagger", type=_seconds, default=0.2, metavar="SEC", help="between the starts of talkers [%(default)g]")
    add("--pause", type=_seconds, default=0.0, metavar="SEC", help="between answer and next question [%(default)g]")
    add("--patience", type=_above_zero, default=30.0, metavar="SEC", help="how long an answer may take [%(default)g]")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be a number, 0 or above")
    return number


def _above_zero(text: str) -> float:
    if (number := _seconds(text)) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _modalities(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(_MODALITIES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("must be text, audio, or both with a comma")
    return names


# The report, as JSON and as text

_COLUMNS: Final = ("n", "median", "p90", "p99", "max")
_LABEL_WIDTH: Final = 34
#: The counts of turns that are reported besides those asked, answered and failed.
_REMARKS: Final = {
    "unfinished": "unfinished",
    "empty_answers": "answered without text and audio",
    "partial_answers": "answers before the speech had ended",
}
_LABELS: Final = {
    "session_opened": "opening a session",
    "first_text": "{start} → first text",
    "first_audio": "{start} → first audio",
    "final": "{start} → final",
    "acknowledgement": "acknowledgement of a piece",
    "gap_in_playback": "gap in playback",
    "client_lag": "lag of this program itself",
}


def as_json(load: Load, tally: Tally, *, interrupted: bool) -> dict[str, Any]:
    """Build the report for programs. Times are in milliseconds if their names say so, otherwise in seconds.

    A value that was not observed is absent, or null.
    """
    elapsed = tally.last_at - tally.began_at
    return {
        "url": _shown_url(load.url),
        "question": _asked(load),
        "interrupted": interrupted,
        "seconds": round(elapsed, 3),
        "sessions": {"wanted": load.sessions, "opened": tally.opened, "refused": dict(tally.refused)},
        "turns": {
            "asked": tally.asked,
            "answered": tally.answered,
            "failed": dict(tally.failed),
            "unfinished": tally.unfinished,
            "empty_answers": tally.empty,
            "partial_answers": tally.partial_answers,
        },
        "measured_from": "end_of_speech" if load.question.is_open else "end_of_input",
        "ms": {name: _milliseconds(values) for name, values in tally.times.items()},
        "playback": {"answers_with_audio": tally.audible, "with_underruns": tally.with_underruns},
        "output": {
            "tokens": tally.output_tokens,
            "tokens_per_second": _rate(tally.output_tokens, elapsed),
            "characters": tally.characters,
            "characters_per_second": _rate(tally.characters, elapsed),
            "audio_seconds": round(tally.audio_sec, 3),
            "audio_seconds_per_second": _rate(tally.audio_sec, elapsed),
        },
    }


def as_text(load: Load, tally: Tally, *, interrupted: bool) -> str:
    """Format the report for a terminal."""
    return "\n".join(_lines(load, as_json(load, tally, interrupted=interrupted), tally.refusals))


def _lines(load: Load, report: Mapping[str, Any], refusals: Mapping[str, str]) -> Iterator[str]:
    if report["interrupted"]:
        yield "interrupted; measured until then:"
    yield f"{report['url']}, {_described(load)}"
    sessions, turns, times = report["sessions"], report["turns"], report["ms"]
    refused = [f"{count} refused: {code}" for code, count in sessions["refused"].items()]
    yield ", ".join([f"sessions: {sessions['opened']} opened by {sessions['wanted']} talkers", *refused])
    yield from (f"  {code}: {message}" for code, message in refusals.items())
    counts = [f"turns: {turns['asked']} asked in {report['seconds']:.1f} s", f"{turns['answered']} answered"]
    counts += [f"{count} failed: {code}" for code, count in turns["failed"].items()]
    counts += [f"{turns[kind]} {words}" for kind, words in _REMARKS.items() if turns[kind]]
    yield ", ".join(counts)
    start = report["measured_from"].replace("_", " ")
    labels = {name: label.format(start=start) for name, label in _LABELS.items() if times[name] is not None}
    if not sessions["opened"]:
        return
    if labels:
        yield f"{'milliseconds':<{_LABEL_WIDTH}}" + "".join(f"{name:>9}" for name in _COLUMNS)
    for name, label in labels.items():
        cells = [f"{times[name]['n']:>9}", *(f"{times[name][column]:>9.1f}" for column in _COLUMNS[1:])]
        yield f"{label:<{_LABEL_WIDTH}}" + "".join(cells)
    if turns["answered"]:
        yield from _output_lines(report)


def _output_lines(report: Mapping[str, Any]) -> Iterator[str]:
    playback, output = report["playback"], report["output"]
    if playback["answers_with_audio"]:
        yield f"playback: {playback['with_underruns']} of {playback['answers_with_audio']} answers had gaps"
    amounts = [
        f"{output[name]:,.{digits}f} {words} ({output[f'{name}_per_second']:,.1f}/s)"
        for name, words, digits in (
            ("tokens", "tokens", 0),
            ("characters", "characters", 0),
            ("audio_seconds", "s of audio", 1),
        )
        if output[name]
    ]
    if amounts:
        yield "output: " + ", ".join(amounts)


def _milliseconds(values: MeasuredValues) -> dict[str, float] | None:
    found = values.distribution()
    return found and {name: value if name == "n" else round(value * 1000, 1) for name, value in found.items()}


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else round(amount / seconds, 2)


def _asked(load: Load) -> dict[str, Any]:
    match load.question:
        case TypedQuestion(text=text):
            return {"text": text}
        case SpokenQuestion(file=file, audio=audio, turn_detection=turn_detection):
            seconds = round(audio.duration_ms / 1000, 3)
            return {"file": file, "seconds": seconds, "turn_detection": turn_detection}


def _described(load: Load) -> str:
    match load.question:
        case TypedQuestion(text=text):
            return f"typed: {text if len(text) <= 60 else text[:59] + '…'}"
        case SpokenQuestion(file=file, audio=audio, turn_detection=turn_detection):
            how = f"open microphone, {turn_detection}" if turn_detection else "the client ends its input"
            return f"spoken: {file} ({audio.duration_ms / 1000:.1f} s; {how})"


def _shown_url(url: str) -> str:
    """Return the URL without parts that may be secret: a user, a password and a query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
