"""Scripts of timed messages, and the calls that play them to a server; also the clock and the target of a call.

A script has the lines of a recording (docs/recording.md), so each recording is a script.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import urlencode, urlsplit

import h11
import numpy as np
import orjson
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from omni_ws.audio.pcm import SampleLayout, Samples, samples_from_bytes
from omni_ws.caller.answers import Answers, NativeReader, ResponseReader, SessionReader, TimedAnswer
from omni_ws.client import ClientSession
from omni_ws.client.audio import Pcm16, paced, pieces
from omni_ws.wire.recording import (
    AnsweredLine,
    BesideLine,
    ClosedLine,
    CutLine,
    EndedLine,
    InputEndedLine,
    OpenedLine,
    OutputEndedLine,
    ReceivedLine,
    RecordedLine,
    RequestedLine,
    SentLine,
)


def count(text: str) -> int:
    """Parse an integer above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return number


def above_zero(text: str) -> float:
    """Parse a finite number above 0. Raises ValueError or ArgumentTypeError."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


def certificates(path: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in the file ``path``. Raises ArgumentTypeError."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # includes SSLError, for a file without certificates
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror or error}") from None


#: The duration of a piece of speech.
PIECE_MS: Final = 20
PIECE_SEC: Final = PIECE_MS / 1000
#: The time-out of the closing handshake.
_CLOSE_SEC: Final = 5.0


def content(event: ReceivedLine | SentLine) -> bytes | str:
    """Return the payload of a message, or of a piece of a body: str if it is text, otherwise bytes."""
    if event.text is not None:
        return event.text
    return event.binary if event.binary is not None else event.bad_text or b""


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the API key of the server to which a script is played."""

    host: str
    port: int
    secure: bool
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Self:
        """Parse an address with the scheme ws, wss, http or https, a host, and an optional port.

        Raises ValueError for any other text. The only path that is accepted is that of the native WebSocket.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss", "http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as ws://127.0.0.1:8080")
        if parts.path not in ("", "/", "/v1/streaming_input") or parts.query or parts.fragment or parts.username:
            raise ValueError("the address must not have a path, query or user: paths come from the recording")
        secure = parts.scheme in ("wss", "https")
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, api_key)

    @property
    def authority(self) -> str:
        """The host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authenticate the client."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context; None for a plain connection."""
        return ssl.create_default_context() if self.secure else None

    def websocket(self, target: str, subprotocol: str | None = None) -> connect:
        """Return a connection to the WebSocket at the path ``target``, to be awaited or entered.

        Both raise OSError or WebSocketException if there is no connection.
        """
        return connect(
            f"{'wss' if self.secure else 'ws'}://{self.authority}{target}",
            subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
            additional_headers=self.headers,
            compression=None,
            max_size=None,
            proxy=None,
            close_timeout=_CLOSE_SEC,
        )


def spoken(audio: Pcm16, opening: str, *, target: str, after_ms: float = 0.0) -> list[RecordedLine]:
    """Return the script of a call with an open microphone, which hangs up ``after_ms`` after the end of the audio.

    ``opening`` is the message that configures the session. ``target`` is the path of the native WebSocket, or of the
    Realtime API.
    """
    script: list[RecordedLine] = [
        OpenedLine(at=0, connection=0, target=target),
        ReceivedLine(at=0, connection=0, text=opening),
    ]
    at = 0.0
    for number, piece in enumerate(pieces(audio, piece_ms=PIECE_MS)):
        payload, at = base64.b64encode(piece).decode(), (number + 1) * PIECE_MS
        if target.startswith("/v1/realtime"):
            frame: dict[str, Any] = {"type": "input_audio_buffer.append", "audio": payload}
        else:
            frame = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
        script.append(ReceivedLine(at=at, connection=0, text=orjson.dumps(frame).decode()))
    return [*script, ClosedLine(at=at + after_ms, connection=0, by="client", code=1000)]


#: The speed of playing without pauses.
AT_ONCE: Final = float("inf")
#: The default time-out of an awaited event, in seconds.
PATIENCE_SEC: Final = 10.0


class Timetable:
    """The clock of one session that is played: waits for recorded times, and for the events that a step depends on.

    A delay postpones everything after it. ``speed`` is a factor, up to AT_ONCE; ``patience`` is the time-out in seconds
    for each awaited event.
    """

    def __init__(self, *, speed: float, patience: float) -> None:
        self._speed = speed
        self._patience = patience
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Return the milliseconds since the start."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Signal that something was received, so that waiting conditions are tested again."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the recorded time ``at`` (milliseconds) and then for ``is_ready``.

        Returns False if ``is_ready`` timed out.
        """
        at = at / self._speed
        await asyncio.sleep(max(0.0, at + self._late - self.now()) / 1000)
        ready = await self.wait(is_ready)
        self._late = max(self._late, self.now() - at)
        return ready

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if that timed out."""
        try:
            async with asyncio.timeout(self._patience):
                while not is_ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


# Speaking into a session of the client library, while another task listens to it

#: The level of speech relative to the loudest frame; anything below counts as noise of the recording.
SPEECH_LEVEL: Final = 10 ** (-26 / 20)


def frame_levels(samples: Samples, frame: int) -> NDArray[np.float64]:
    """Return the RMS level of each frame of ``frame`` samples; the last frame may have fewer."""
    starts = np.arange(0, len(samples), frame)
    sums = np.add.reduceat(np.square(samples, dtype=np.float64), starts)
    levels: NDArray[np.float64] = np.sqrt(sums / np.diff(starts, append=len(samples)))
    return levels


def loud_part(levels: NDArray[np.float64]) -> tuple[int, int]:
    """Return the range [first, end) from the first to the last loud frame: one within 26 dB of the loudest.

    Raises ValueError if there is no sound.
    """
    if not levels.any():
        raise ValueError("the recording has no sound")
    loud = np.flatnonzero(levels > SPEECH_LEVEL * levels.max())
    return int(loud[0]), int(loud[-1]) + 1


def speech_of(audio: Pcm16) -> tuple[int, int]:
    """Return the range [first, end) of the 20 ms pieces with the speech. Raises ValueError if there is no sound."""
    samples = samples_from_bytes(audio.samples, SampleLayout.S16)
    return loud_part(frame_levels(samples, max(1, audio.sample_rate * PIECE_MS // 1000) * audio.channels))


async def say(session: ClientSession, audio: Pcm16) -> None:
    """Send audio to the session in real time."""
    async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_SEC):
        await session.send_audio(piece)


@asynccontextmanager
async def beside(*activities: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the activities during the block and cancel them at its end; raise the exception of one that failed."""
    tasks = [asyncio.create_task(activity) for activity in activities]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


# WebSocketCall and HttpCall: they play a script over WebSockets, native or Realtime API, or as HTTP requests.
#
# Every message, and every piece of a body, is sent in order and at its time.


#: The close codes of drain and time-outs, which depend on timing and are not compared.
ORDERLY_CLOSE_CODES: Final = frozenset({1001, 1012, 4408})
#: The close codes that are never sent in a frame (RFC 6455, section 7.4.1).
_NEVER_SENT: Final = frozenset({1005, 1006, 1015})
#: The events that a reader counts, and that steps wait for.
_COUNTED: Final = ("started", "finals", "configured")


def recorded_answers(script: Sequence[RecordedLine], reader: SessionReader) -> Answers:
    """Return the answers that are recorded in a script, as collected by ``reader``, which must be new."""
    for _ in _steps(script, reader):
        pass
    ends = {event.connection: event for event in script if isinstance(event, ClosedLine)}
    found = reader.finished()
    found.ends.extend(f"server {one.code}" if one.by == "server" else one.by for _, one in sorted(ends.items()))
    return found


class WebSocketCall:
    """Plays the script of one session to a server.

    ``reader`` makes the readers of the recorded and of the new session. ``speed`` and ``patience`` are those of the
    Timetable. ``sent`` has the times of the messages, in milliseconds of the same clock as the answers.
    """

    def __init__(
        self,
        script: Sequence[RecordedLine],
        target: Target,
        reader: Callable[[], SessionReader],
        *,
        speed: float = 1.0,
        patience: float = PATIENCE_SEC,
    ) -> None:
        self._script = script
        self._target = target
        self._time = Timetable(speed=speed, patience=patience)
        self._then, self._now = reader(), reader()
        self._connections: dict[int, ClientConnection] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._ends: dict[int, str] = {}
        self.sent: list[float] = []
        #: The number of expected events that never arrived: later steps do not wait for them.
        self._missing = dict.fromkeys(_COUNTED, 0)
        #: The places of answers that produced fewer outputs than recorded.
        self._cut_short: set[int] = set()

    async def run(self, until: Callable[[Answers], bool] | None = None) -> Answers:
        """Play the script, and wait for as many answers as are recorded in it; return those that arrived.

        With ``until``, the call ends as soon as this returns True for the answers, even before the end of the script.
        Raises OSError if the server cannot be reached.
        """
        try:
            for step in _steps(self._script, self._then):
                if until is not None and until(self._now.found):
                    break
                await self._take(step)
            await self._time.wait(lambda: self._is_answered(until))
        finally:
            for connection in self._connections.values():
                await connection.close()
            for reader in self._readers:
                await reader
        found = self._now.finished()
        found.ends.extend(end for _, end in sorted(self._ends.items()))
        return found

    async def _take(self, step: _Step) -> None:
        event = step.event
        if not await self._time.until(event.at, lambda: self._is_due(step)):
            self._missing = {name: max(0, step.counts[name] - getattr(self._now, name)) for name in _COUNTED}
            self._cut_short.add(step.place)
        connection = self._connections.get(event.connection)
        if isinstance(event, OpenedLine):
            await self._open(event)
        elif connection is None or event.connection in self._ends:
            return
        elif isinstance(event, ReceivedLine):
            await self._send(connection, event)
        elif event.by == "lost":
            connection.transport.abort()
            await self._time.wait(lambda: event.connection in self._ends)
        else:
            await connection.close(event.code if event.code and event.code not in _NEVER_SENT else 1000)

    def _is_answered(self, until: Callable[[Answers], bool] | None) -> bool:
        now, then = self._now, self._then
        if all(number in self._ends for number in self._connections):
            return True
        if until is not None:
            return until(now.found)
        enough = now.finals >= then.finals - self._missing["finals"] and len(now.found.errors) >= len(then.found.errors)
        last = next(event for event in reversed(self._script) if isinstance(event, ClosedLine | OpenedLine))
        closes = isinstance(last, ClosedLine) and last.by == "server" and last.code not in ORDERLY_CLOSE_CODES
        return enough and not closes

    def _is_due(self, step: _Step) -> bool:
        now = self._now
        if step.event.connection in self._ends and not isinstance(step.event, OpenedLine):
            return True
        heard = all(getattr(now, name) >= step.counts[name] - self._missing[name] for name in _COUNTED)
        if isinstance(step.event, ClosedLine) and step.event.by == "lost":
            # Between answers there is nothing to wait for: an answer may arrive in fewer pieces than recorded.
            finals = step.counts["finals"]
            return heard and (step.counts["started"] == finals or now.highest >= step.highest or now.finals > finals)
        if not step.outputs or step.place in self._cut_short:
            return heard
        come_as_far = any(
            answer.final_at is not None
            or (answer.outputs >= step.outputs and (not step.sounds or answer.first_audio_at is not None))
            for answer in now.found.answers[step.place : step.place + 1]
        )
        return heard and come_as_far

    async def _open(self, event: OpenedLine) -> None:
        query = ""
        if event.last_output is not None and self._now.session_id and self._now.resume_token:
            resumed = {
                "session_id": self._now.session_id,
                "resume_token": self._now.resume_token,
                "last_output": str(min(event.last_output, self._now.highest)),
            }
            query = f"?{urlencode(resumed)}"
        try:
            connection = await self._target.websocket(event.target + query, event.subprotocol)
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None
        self._connections[event.connection] = connection
        self._readers.append(asyncio.create_task(self._read(event.connection, connection), name="caller's reader"))
        # A client sends nothing before the first frame of the server.
        greetings = self._now.greetings
        await self._time.wait(lambda: self._now.greetings > greetings or event.connection in self._ends)

    async def _send(self, connection: ClientConnection, event: ReceivedLine) -> None:
        message = self._now.rewritten(content(event), self._then)
        if message is not None:
            self.sent.append(self._time.now())
            self._now.asked(self.sent[-1], message)
            with suppress(ConnectionClosed):  # the reader records it
                await connection.send(message, text=event.binary is None)

    async def _read(self, number: int, connection: ClientConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                self._now.heard(self._time.now(), await connection.recv())
                self._time.change()
        await connection.wait_closed()
        protocol = connection.protocol
        if protocol.close_rcvd is not None and (protocol.close_sent is None or protocol.close_rcvd_then_sent):
            self._ends[number] = f"server {connection.close_code}"
        else:
            self._ends[number] = "client" if protocol.close_sent is not None else "lost"
        self._time.change()


@dataclass(frozen=True, slots=True)
class _Step:
    """An action of the client, and what the client had received before."""

    event: OpenedLine | ReceivedLine | ClosedLine
    counts: dict[str, int]
    #: The outputs of the running answer that the step depends on, and the place of that answer.
    outputs: int
    place: int
    #: Whether that answer had audio by then.
    sounds: bool
    highest: int


def _steps(script: Iterable[RecordedLine], reader: SessionReader) -> Iterator[_Step]:
    """Yield the actions of the client, each with what ``reader`` had received by then."""
    script = tuple(script)
    for index, event in enumerate(script):
        if isinstance(event, SentLine):
            reader.heard(event.at, content(event))
        if not isinstance(event, OpenedLine | ReceivedLine | ClosedLine):
            continue
        if isinstance(event, ClosedLine) and event.by == "server":
            continue
        highest, outputs, running = reader.highest, 0, None
        if isinstance(event, ClosedLine) and event.by == "lost":
            later = (one.last_output for one in script[index:] if isinstance(one, OpenedLine))
            highest = next((one for one in later if one is not None), highest)
        elif isinstance(event, ReceivedLine):
            running, may_stop = reader.running, reader.asked(event.at, content(event))
            if running is not None:
                # Input during an answer waits until the answer has begun; a cancel, until it has as many outputs as
                # recorded.
                outputs = running.outputs if may_stop else min(running.outputs, 1)
        yield _Step(
            event,
            {name: getattr(reader, name) for name in _COUNTED},
            outputs,
            0 if running is None else reader.found.answers.index(running),
            # Speech that interrupts an answer before its first audio is answered together with the question before it.
            running is not None and running.first_audio_at is not None,
            highest,
        )


# Requests over HTTP: the pieces of their bodies are sent while the responses are read

_READ_BYTES: Final = 1 << 16
#: The interval of polls for a result that is not ready.
_ASK_AGAIN_SEC: Final = 0.1
_SESSION_ID: Final = re.compile(r"(?<=/v1/streaming_input/sessions/)[^/?]+|(?<=session_id=)[^&]+")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding"})


@dataclass(slots=True)
class Exchange:
    """A request with its response, or a WebSocket that reads the result of a session."""

    head: RequestedLine | OpenedLine
    began_at: float
    input_ended_at: float | None = None
    ended_at: float | None = None
    lost: bool = False
    pieces: list[ReceivedLine] = field(default_factory=list)
    response: ResponseReader = field(default_factory=ResponseReader)
    messages: NativeReader = field(default_factory=NativeReader)

    @property
    def path(self) -> str:
        return self.head.target.partition("?")[0]

    def ask_again(self) -> None:
        """Expect a new response, as the request is sent once more."""
        self.response = ResponseReader()

    def end_input(self, at: float) -> None:
        """Record when the whole request was sent."""
        self.input_ended_at = at

    def end(self, at: float, *, lost: bool = False) -> None:
        """Record when the exchange ended; ``lost``: the client disconnected before the end of the response."""
        self.ended_at, self.lost = at, lost


class HttpCall:
    """Plays the script of one request, or of one Mode B session (``is_session``), to a server.

    ``speed`` and ``patience`` are those of the Timetable.
    """

    def __init__(
        self,
        script: Sequence[RecordedLine],
        target: Target,
        *,
        speed: float = 1.0,
        patience: float = PATIENCE_SEC,
        is_session: bool = False,
    ) -> None:
        self._is_session = is_session
        self._then = _exchanges(script)
        self._now: list[Exchange] = []
        self._over: set[int] = set()
        self._target = target
        self._patience = patience
        self._time = Timetable(speed=speed, patience=patience)
        self._session_id: str | None = None

    def recorded(self) -> Answers:
        """Return the answers that are recorded in the script."""
        return self._answers(self._then)

    async def run(self) -> Answers:
        """Play all exchanges; return the answers. Raises OSError if the server cannot be reached."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, then in enumerate(self._then):
                    await self._time.until(then.head.at, self._all_over_before(then))
                    now = Exchange(then.head, self._time.now())
                    self._now.append(now)
                    group.create_task(self._exchange(number, then, now), name="caller's exchange")
        except* OSError as errors:
            raise ConnectionError(str(errors.exceptions[0])) from None
        return self._answers(self._now)

    def _all_over_before(self, then: Exchange) -> Callable[[], bool]:
        """Return a condition: all exchanges that had ended before ``then`` in the script have ended in this call."""
        before = {
            number for number, one in enumerate(self._then) if one.ended_at is not None and one.ended_at <= then.head.at
        }
        return lambda: before <= self._over

    async def _exchange(self, number: int, then: Exchange, now: Exchange) -> None:
        try:
            target = then.head.target
            if self._session_id:
                target = _SESSION_ID.sub(self._session_id, target)
            if isinstance(then.head, OpenedLine):
                await self._read_messages(target, then.head, now)
                return
            deadline = self._time.now() + self._patience * 1000
            await self._request(target, then.head, then, now)
            while then.response.status == 200 and now.response.status == 202 and self._time.now() < deadline:
                await asyncio.sleep(_ASK_AGAIN_SEC)
                now.ask_again()
                await self._request(target, then.head, then, now)
            if self._session_id is None and self._is_session:
                self._session_id = now.response.session_id
        finally:
            now.end(self._time.now())
            self._over.add(number)
            self._time.change()

    async def _read_messages(self, target: str, head: OpenedLine, now: Exchange) -> None:
        try:
            async with self._target.websocket(target, head.subprotocol) as connection:
                with suppress(ConnectionClosed):
                    while True:
                        now.messages.heard(self._time.now(), await connection.recv())
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None

    async def _request(self, target: str, head: RequestedLine, then: Exchange, now: Exchange) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port, ssl=self._target.tls)
        connection = h11.Connection(h11.CLIENT)
        headers = {"Host": self._target.authority, "Connection": "close", **head.headers, **self._target.headers}
        request = h11.Request(method=head.method, target=target, headers=list(headers.items()))
        sending = asyncio.create_task(self._send(connection, writer, request, then, now), name="caller's body")
        reading = asyncio.create_task(self._read(reader, connection, now), name="caller's answer")
        try:
            if then.lost and then.ended_at is not None:
                await self._time.until(then.ended_at)  # when the client of the recording disconnected
            else:
                await reading
        finally:
            sending.cancel()
            reading.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)
            writer.transport.abort()

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        request: h11.Request,
        then: Exchange,
        now: Exchange,
    ) -> None:
        has_body = any(name.decode().lower() in _FRAMING for name, _ in request.headers)
        with suppress(ConnectionError, h11.LocalProtocolError):  # the server stopped reading; its response says why
            writer.write(connection.send(request) or b"")
            for piece in then.pieces:
                await self._time.until(piece.at)
                writer.write(connection.send(h11.Data(data=_as_bytes(content(piece)))) or b"")
                await writer.drain()
            if then.input_ended_at is not None or not has_body:
                await self._time.until(then.input_ended_at or then.head.at)
                writer.write(connection.send(h11.EndOfMessage()) or b"")
                now.end_input(self._time.now())
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, connection: h11.Connection, now: Exchange) -> None:
        with suppress(h11.RemoteProtocolError, ConnectionError):  # an incomplete response
            while True:
                match connection.next_event():
                    case h11.NEED_DATA:
                        connection.receive_data(await reader.read(_READ_BYTES))
                    case h11.Response() as response:
                        fields = {name.decode(): value.decode("latin-1") for name, value in response.headers}
                        now.response.begin(response.status_code, fields.get("content-type", ""))
                    case h11.Data(data=data):
                        now.response.feed(self._time.now(), bytes(data))
                    case h11.EndOfMessage():
                        now.response.finish(self._time.now())
                        return
                    case h11.ConnectionClosed() | h11.PAUSED:
                        return

    def _answers(self, exchanges: list[Exchange]) -> Answers:
        """Return the answers: one for each reader of a session's result, or the one to a single request."""
        found = Answers()
        for one in exchanges:
            if isinstance(one.head, OpenedLine):
                found.answers.extend(one.messages.found.answers)
            elif one.response.has_answer and (one.path.endswith("/result") or not self._is_session):
                found.answers.append(one.response.answer)
            if one.response.status >= 400:
                found.errors.append(f"{one.path.rsplit('/', 1)[-1]} {one.response.status}")
        for answer in found.answers:
            answer.ask(_asked_at(exchanges, answer))
        return found


def _exchanges(script: Sequence[RecordedLine]) -> list[Exchange]:
    """Return the exchanges of a script, with the recorded responses."""
    exchanges: list[Exchange] = []
    for event in script:
        if isinstance(event, RequestedLine | OpenedLine):
            exchanges.append(Exchange(event, event.at))
            continue
        if isinstance(event, CutLine | EndedLine | BesideLine):
            continue
        one = exchanges[event.connection]
        match event:
            case ReceivedLine():
                one.pieces.append(event)
            case InputEndedLine():
                one.end_input(event.at)
            case AnsweredLine():
                one.response.begin(event.status, event.headers.get("Content-Type", ""))
            case SentLine() if isinstance(one.head, OpenedLine):
                one.messages.heard(event.at, content(event))
            case SentLine():
                one.response.feed(event.at, _as_bytes(content(event)))
            case OutputEndedLine():
                one.response.finish(event.at)
            case ClosedLine():
                one.end(event.at, lost=event.by == "lost")
    return exchanges


def _asked_at(exchanges: list[Exchange], answer: TimedAnswer) -> float:
    """Return the time of the last end of input before the answer began."""
    until = answer.first_output_at
    ends = [one.input_ended_at for one in exchanges if one.input_ended_at is not None]
    return max((end for end in ends if until is None or end <= until), default=exchanges[0].began_at)


def _as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data
