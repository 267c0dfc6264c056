"""Plays a script of HTTP requests: sends the pieces of their bodies while it reads the responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import h11
from websockets.exceptions import ConnectionClosed, WebSocketException

from omni_ws.caller.answers import Answers, NativeReader, ResponseReader, TimedAnswer
from omni_ws.caller.script import PATIENCE_SEC, Target, Timetable, content
from omni_ws.wire.recording import (
    AnsweredLine,
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

_READ_BYTES: Final = 1 << 16
#: Interval of polls for a result that is not ready.
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
        """Expect another response: the request is sent once more."""
        self.response = ResponseReader()

    def end_input(self, at: float) -> None:
        """Note when the whole request was sent."""
        self.input_ended_at = at

    def end(self, at: float, *, lost: bool = False) -> None:
        """Note when the exchange ended; ``lost``: the client disconnected before the end of the response."""
        self.ended_at, self.lost = at, lost


class HttpCall:
    """Plays the script of one request, or of one Mode B session (``is_session``).

    ``run`` returns the answers. It raises OSError if the server cannot be reached.
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
        """The answers that the script has itself."""
        return self._answers(self._then)

    async def run(self) -> Answers:
        """Play all exchanges; return the answers."""
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
        """Return a condition: the exchanges that had ended before this one began have ended."""
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
                await self._time.until(then.ended_at)  # when the client of then disconnected
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
        with suppress(ConnectionError, h11.LocalProtocolError):  # the server stopped reading; its response tells why
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
        """Collect answers: one for each reader of the result of a session, otherwise the one of the request."""
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
    """The exchanges of a script, with what it has of the responses."""
    exchanges: list[Exchange] = []
    for event in script:
        if isinstance(event, RequestedLine | OpenedLine):
            exchanges.append(Exchange(event, event.at))
            continue
        if isinstance(event, CutLine | EndedLine):
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
    """Time of the last end of an input before the answer started."""
    until = answer.first_output_at
    ends = [one.input_ended_at for one in exchanges if one.input_ended_at is not None]
    return max((end for end in ends if until is None or end <= until), default=exchanges[0].began_at)


def _as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data
