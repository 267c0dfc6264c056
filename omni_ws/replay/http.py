"""Replays recorded HTTP requests: sends the pieces of their bodies while it reads the responses."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import h11
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from omni_ws.audio.container import parse_audio_mime
from omni_ws.core.chunks import AudioFormat
from omni_ws.errors import OmniError
from omni_ws.replay.compare import Answers, NativeAnswers, ReplayedAnswer, parsed
from omni_ws.replay.recording import Pace, RecordedSession, Target, Timetable, content
from omni_ws.wire.recording import (
    AnsweredLine,
    ClosedLine,
    InputEndedLine,
    OpenedLine,
    OutputEndedLine,
    ReceivedLine,
    RequestedLine,
    SentLine,
)

_READ_BYTES: Final = 1 << 16
#: Interval of polls for a result that is not ready.
_ASK_AGAIN_SEC: Final = 0.1
_SESSION_ID: Final = re.compile(r"(?<=/v1/streaming_input/sessions/)[^/?]+|(?<=session_id=)[^&]+")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding"})


class HttpReplay:
    """Replays one request, or one Mode B session.

    ``run`` returns the answers. It raises OSError if the server cannot be reached.
    """

    def __init__(self, recording: RecordedSession, target: Target, pace: Pace) -> None:
        self._is_session = recording.header.kind == "session"
        self._then = recorded_exchanges(recording)
        self._now: list[Exchange] = []
        self._over: set[int] = set()
        self._target = target
        self._patience = pace.patience
        self._time = Timetable(pace)
        self._session_id: str | None = None

    def recorded(self) -> Answers:
        """The recorded answers."""
        return answers_of(self._then, is_session=self._is_session)

    async def run(self) -> Answers:
        """Replays all exchanges; returns the answers."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, then in enumerate(self._then):
                    await self._time.until(then.head.at, self._all_over_before(then))
                    now = Exchange(then.head, self._time.now())
                    self._now.append(now)
                    group.create_task(self._exchange(number, then, now), name="replay exchange")
        except* OSError as errors:
            raise ConnectionError(str(errors.exceptions[0])) from None
        return answers_of(self._now, is_session=self._is_session)

    def _all_over_before(self, then: Exchange) -> Callable[[], bool]:
        """Returns a condition: the exchanges that had ended before this one began have ended."""
        before = {
            number for number, one in enumerate(self._then) if one.ended_at is not None and one.ended_at <= then.head.at
        }
        return lambda: before <= self._over

    async def _exchange(self, number: int, then: Exchange, now: Exchange) -> None:
        try:
            target = self._rewritten(then.head.target)
            if isinstance(then.head, OpenedLine):
                await self._read_messages(target, then.head, now)
                return
            deadline = self._time.now() + self._patience * 1000
            await self._request(target, then, now)
            while then.answer.status == 200 and now.answer.status == 202 and self._time.now() < deadline:
                await asyncio.sleep(_ASK_AGAIN_SEC)
                now.answer = HttpAnswer()
                await self._request(target, then, now)
            if self._session_id is None and self._is_session:
                self._session_id = now.answer.session_id
        finally:
            now.ended_at = self._time.now()
            self._over.add(number)
            self._time.change()

    def _rewritten(self, target: str) -> str:
        return _SESSION_ID.sub(self._session_id, target) if self._session_id else target

    async def _read_messages(self, target: str, head: OpenedLine, now: Exchange) -> None:
        protocols = None if head.subprotocol is None else [Subprotocol(head.subprotocol)]
        try:
            async with connect(
                self._target.websocket(target),
                subprotocols=protocols,
                additional_headers=self._target.headers,
                compression=None,
                max_size=None,
                proxy=None,
            ) as connection:
                with suppress(ConnectionClosed):
                    while True:
                        now.messages.heard(self._time.now(), await connection.recv())
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None

    async def _request(self, target: str, then: Exchange, now: Exchange) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port, ssl=self._target.tls)
        connection = h11.Connection(h11.CLIENT)
        sending = asyncio.create_task(self._send(connection, writer, target, then, now), name="replay body")
        try:
            if then.lost and then.ended_at is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._patience):
                        await self._read_until_lost(reader, connection, then.ended_at, now)
            else:
                await self._read(reader, connection, now)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()

    async def _read_until_lost(
        self, reader: asyncio.StreamReader, connection: h11.Connection, at: float, now: Exchange
    ) -> None:
        """Reads until the time at which the recorded client disconnected."""
        reading = asyncio.create_task(self._read(reader, connection, now), name="replay answer")
        try:
            await self._time.until(at, lambda: True)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _send(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, target: str, then: Exchange, now: Exchange
    ) -> None:
        assert isinstance(then.head, RequestedLine)
        headers = {"Host": self._target.authority, "Connection": "close", **then.head.headers, **self._target.headers}
        request = h11.Request(method=then.head.method, target=target, headers=list(headers.items()))
        has_body = any(name.lower() in _FRAMING for name in then.head.headers)
        with suppress(ConnectionError, h11.LocalProtocolError):  # the server stopped reading; its response tells why
            writer.write(connection.send(request) or b"")
            for piece in then.pieces:
                await self._time.until(piece.at, lambda: True)
                writer.write(connection.send(h11.Data(data=as_bytes(content(piece)))) or b"")
                await writer.drain()
            if then.input_ended_at is not None or not has_body:
                await self._time.until(then.input_ended_at or then.head.at, lambda: True)
                writer.write(connection.send(h11.EndOfMessage()) or b"")
                now.input_ended_at = self._time.now()
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, connection: h11.Connection, now: Exchange) -> None:
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return  # incomplete response
            match event:
                case h11.NEED_DATA:
                    try:
                        connection.receive_data(await reader.read(_READ_BYTES))
                    except ConnectionError:
                        return
                case h11.Response():
                    fields = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                    now.answer.begin(event.status_code, fields.get("content-type", ""))
                case h11.Data():
                    now.answer.feed(self._time.now(), bytes(event.data))
                case h11.EndOfMessage():
                    now.answer.finish(self._time.now())
                    return
                case h11.ConnectionClosed() | h11.PAUSED:
                    return


# Requests with their responses


class HttpAnswer:
    """The answer out of a response, collected while that arrives. Reads the formats of all routes."""

    def __init__(self) -> None:
        self.answer = ReplayedAnswer("")
        self.status = 0
        #: Session that the request opened.
        self.session_id: str | None = None
        self._content_type = ""
        self._body = bytearray()

    def begin(self, status: int, content_type: str) -> None:
        """Handles the head of the response."""
        self.status = status
        self._content_type = content_type

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer, and not only the state of one in progress."""
        answer = self.answer
        return bool(answer.outputs or answer.transcript or answer.errors or answer.finish_reason)

    def feed(self, at: float, data: bytes) -> None:
        """Handles a piece of the body."""
        if self._content_type.startswith("audio/"):
            self.answer.audio += data
            self.answer.output(at, is_audio=True)
            return
        self._body += data
        if self._content_type.startswith("text/event-stream"):
            *events, rest = self._body.split(b"\n\n")
            self._body = bytearray(rest)
            for event in events:
                self._event(at, bytes(event))

    def finish(self, at: float) -> None:
        """Handles the end of the response."""
        self.answer.final_at = at
        if self._content_type.startswith("audio/"):
            self.answer.format = _audio_format(self._content_type)
        elif self._content_type.startswith("application/json"):
            self._read(at, parsed(bytes(self._body)))
        elif self._content_type.startswith("text/") and not self._content_type.startswith("text/event-stream"):
            self._add_text(at, self._body.decode("utf-8", "replace"))
        if self.answer.finish_reason is None and self.status == 200 and self.has_answer:
            self.answer.finish_reason = "stop"

    def _event(self, at: float, event: bytes) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                self._read(at, parsed(line[5:]))  # nothing for [DONE]

    def _read(self, at: float, fields: dict[str, Any]) -> None:
        self.session_id = fields.get("session_id")
        error = fields.get("error")
        if isinstance(error, dict):
            self.answer.errors.append(str(error.get("code")))
        transcript = fields.get("input_transcript")
        if isinstance(transcript, dict) and not transcript.get("interim"):
            self.answer.transcript += str(transcript.get("text", ""))
        match fields.get("type"):
            case "speech.audio.delta":
                self._add_audio(at, fields.get("audio"))
            case "transcript.text.delta":
                self._add_text(at, fields.get("delta"))
        if "type" not in fields:
            self._add_text(at, fields.get("text"))
        for choice in fields.get("choices") or ():
            self._choice(at, choice)

    def _choice(self, at: float, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or choice
        self._add_text(at, message.get("content") or message.get("text"))
        audio = message.get("audio")
        if isinstance(audio, dict):
            self._add_audio(at, audio.get("data"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            self.answer.tool_calls += f"{function.get('name') or ''}{function.get('arguments') or ''}"
        if choice.get("finish_reason"):
            self.answer.finish_reason = choice["finish_reason"]

    def _add_text(self, at: float, text: object) -> None:
        if isinstance(text, str) and text:
            self.answer.text += text
            self.answer.output(at)

    def _add_audio(self, at: float, data: object) -> None:
        if isinstance(data, str) and data:
            self.answer.audio += base64.b64decode(data)
            self.answer.format = AudioFormat(sample_rate=24_000)
            self.answer.output(at, is_audio=True)


def _audio_format(content_type: str) -> AudioFormat | None:
    try:
        return parse_audio_mime(content_type)
    except OmniError:
        return None


@dataclass(slots=True)
class Exchange:
    """A request with its response, or a WebSocket that reads the result of a session."""

    head: RequestedLine | OpenedLine
    began_at: float
    input_ended_at: float | None = None
    ended_at: float | None = None
    lost: bool = False
    pieces: list[ReceivedLine] = field(default_factory=list)
    answer: HttpAnswer = field(default_factory=HttpAnswer)
    messages: NativeAnswers = field(default_factory=NativeAnswers)

    @property
    def path(self) -> str:
        return self.head.target.partition("?")[0]

    @property
    def reads_result(self) -> bool:
        """Whether it reads the result of a Mode B session."""
        return isinstance(self.head, OpenedLine) or self.path.endswith("/result")


def recorded_exchanges(recording: RecordedSession) -> list[Exchange]:
    """Reconstructs the exchanges of a recording."""
    exchanges: list[Exchange] = []
    for event in recording.events:
        if isinstance(event, RequestedLine | OpenedLine):
            exchanges.append(Exchange(event, event.at))
            continue
        one = exchanges[getattr(event, "connection")]  # noqa: B009  (what has none ends a recording)
        match event:
            case ReceivedLine():
                one.pieces.append(event)
            case InputEndedLine():
                one.input_ended_at = event.at
            case AnsweredLine():
                one.answer.begin(event.status, event.headers.get("Content-Type", ""))
            case SentLine() if isinstance(one.head, OpenedLine):
                one.messages.heard(event.at, content(event))
            case SentLine():
                one.answer.feed(event.at, as_bytes(content(event)))
            case OutputEndedLine():
                one.answer.finish(event.at)
            case ClosedLine():
                one.ended_at, one.lost = event.at, event.by == "lost"
    return exchanges


def answers_of(exchanges: list[Exchange], *, is_session: bool) -> Answers:
    """Collects answers: one for each reader of the result of a session, otherwise the one of the request."""
    found = Answers()
    for one in exchanges:
        if isinstance(one.head, OpenedLine):
            found.answers += one.messages.found.answers
        elif one.answer.has_answer and (one.reads_result or not is_session):
            found.answers.append(one.answer.answer)
        if one.answer.status >= 400:
            found.errors.append(f"{one.path.rsplit('/', 1)[-1]} {one.answer.status}")
    for answer in found.answers:
        answer.asked_at = _asked_at(exchanges, answer)
    return found


def _asked_at(exchanges: list[Exchange], answer: ReplayedAnswer) -> float:
    """Time of the last end of an input before the answer started."""
    until = answer.first_output_at
    ends = [one.input_ended_at for one in exchanges if one.input_ended_at is not None]
    return max((end for end in ends if until is None or end <= until), default=exchanges[0].began_at)


def as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data
