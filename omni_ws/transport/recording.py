"""Recording of connections: of HTTP requests with their responses, and the messages of WebSockets and data channels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self, TypeVar, cast
from urllib.parse import parse_qsl, urlencode

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.config.model import ServerConfig
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import OmniError
from omni_ws.service import new_id
from omni_ws.service.recording import (
    ConnectionRecording,
    Recorder,
    RecordingFolder,
    SessionRecording,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.http.exchange import ExchangeRecording, HttpExchange
from omni_ws.transport.http.request import HttpRequest
from omni_ws.wire.recording import REDACTED, RecordingKind
from omni_ws.wire.session_config import (
    CREDENTIALS,
    REPLACED,
    has_credential_key,
    scrubbed,
)
from omni_ws.wire.streaming_body import FORM_TYPE, RawAudioBody, body_reader

_LINE: Final = re.compile(rb"[^\n]*\n")
_SECRET_FIELDS: Final = (*CREDENTIALS, "server_url")


class BodyScrubber:
    """Removes the credentials of MCP servers from a body, piece by piece, before the body is recorded.

    It holds back bytes until it can judge them: the whole body if that is one JSON value (``whole``), otherwise an
    incomplete line or frame. The server's limits on bodies, lines and frames bound the bytes held back. The length in
    front of a frame has ``prefix_bytes``; 0 means that the body has lines. After a line that contains the name of a
    credential but is not JSON, nothing is recorded: the server reads no further either.
    """

    def __init__(self, *, whole: bool = False, prefix_bytes: int = 0) -> None:
        self._whole = whole
        self._prefix_bytes = prefix_bytes
        self._held = bytearray()
        self._spoilt = False

    def feed(self, data: bytes) -> bytes:
        """Add a piece of the body, and return what may be recorded now."""
        if self._spoilt:
            return b""
        held = self._held
        held += data
        if self._whole:
            return b""
        if self._prefix_bytes:
            return b"".join(self._frames())
        end = data.rfind(b"\n") + 1
        if not end:
            return b""
        end += len(held) - len(data)
        lines = bytes(held[:end])
        del held[:end]
        return b"".join(map(self._line, _LINE.findall(lines))) if has_credential_key(lines) else lines

    def finish(self) -> bytes:
        """Return the part of the rest that may be recorded. Call this when no more bytes of the body arrive."""
        rest = bytes(self._held)
        self._held.clear()
        if self._prefix_bytes:
            return b"" if has_credential_key(rest) else rest
        return scrubbed(rest) if self._whole else self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if self._spoilt:
            return b""
        text = line.strip()
        if not has_credential_key(text):
            return line
        kept = scrubbed(text) if text[:1] == b"{" else REPLACED  # the value of a lone key is on a line of its own
        self._spoilt = kept == REPLACED
        return kept + line[len(line.rstrip()) :]

    def _frames(self) -> Iterator[bytes]:
        held, start = self._held, 0
        while len(held) - start >= self._prefix_bytes:
            first = start + self._prefix_bytes
            end = first + int.from_bytes(held[start:first], "big")
            if end > len(held):
                break
            frame = bytes(held[first:end])
            start = end
            if frame[:1] == b"{":
                frame = scrubbed(frame)
            yield len(frame).to_bytes(self._prefix_bytes, "big") + frame
        del held[:start]


def scrubbed_target(target: str) -> str:
    """Return the target of a request for recording, without credentials of MCP servers in the query."""
    path, _, query = target.partition("?")
    fields = parse_qsl(query, keep_blank_values=True)
    kept = [(name, _scrubbed_field(name, value)) for name, value in fields]
    return target if kept == fields else f"{path}?{urlencode(kept)}"


def _scrubbed_field(name: str, value: str) -> str:
    if name.rpartition(".")[2] in _SECRET_FIELDS:
        return REDACTED
    return scrubbed(value.encode()).decode()


# HTTP requests.

#: The request header fields that are recorded: those on which the answer depends. Never a key, a cookie or an address.
_HEADERS: Final = (
    "accept",
    "content-type",
    "content-length",
    "transfer-encoding",
    "x-streaming-input",
    "last-event-id",
)
CHAT_PATH: Final = "/v1/chat/completions"
#: Paths whose requests are each recorded in a file of its own. Requests of Mode B are recorded with their session.
_SINGLE: Final = frozenset(
    {
        CHAT_PATH,
        "/v1/completions",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)


def is_whole_json(request: HttpRequest) -> bool:
    """Return whether, by its headers, the body is one JSON object and not streaming input.

    The type that curl sends by default counts as JSON if the body has a Content-Length. Such a body is recorded when it
    is complete, without the credentials of MCP servers in it.
    """
    live = (request.headers.get("x-streaming-input") or "").strip().lower() in ("true", "1")
    kinds = ("", "application/json") if request.content_length is None else ("", "application/json", FORM_TYPE)
    return not live and request.content_type in kinds


class HttpRecordings:
    """The recordings of HTTP requests, and of Mode B sessions, each of which spans several requests.

    The paths of Mode B sessions are below ``sessions_path``. The recording of such a session ends ``idle_sec`` seconds
    after its last request.
    """

    def __init__(self, recorder: Recorder, *, sessions_path: str, idle_sec: float, worker: str | None = None) -> None:
        """``worker`` is the name of this process, if several processes share the folder."""
        self.recorder = recorder
        self._names = "http_" if worker is None else f"{worker}_http_"
        self._sessions_path = sessions_path
        self._idle_sec = idle_sec
        self._sessions: dict[str, _Session] = {}

    @classmethod
    def configured(cls, config: ServerConfig, sessions: SessionFactory, *, sessions_path: str) -> Self | None:
        """Return the recordings that ``config`` asks for, or None. Creates their folder if there is none.

        Raises ConfigurationError for a folder that other users can access, or that cannot be written.
        """
        if config.record is None:
            return None
        group = sessions.group
        folder = RecordingFolder(
            config.record,
            max_bytes=config.record_max_bytes,
            max_age=config.record_max_age_sec,
            owns=(lambda name: True) if group is None else group.owns_file,
        )
        folder.prepare()
        recorder = Recorder(
            folder,
            engine=sessions.engine.name,
            model=lambda: sessions.model.names[0],
            fraction=config.record_fraction,
            keys=config.record_keys,
            payloads=config.record_payloads,
        )
        recorder.start()
        idle_sec = config.streaming_input.session_timeout_sec
        return cls(recorder, sessions_path=sessions_path, idle_sec=idle_sec, worker=sessions.worker)

    def begin(self, exchange: HttpExchange, key: ApiKey | None) -> None:
        """Begin to record an exchange, if its path is recorded and the recorder chooses it.

        A request to an open session of Mode B is recorded exactly if the session is.
        """
        request = exchange.request
        name = key_name(key)
        session: _Session | None = None
        recording: SessionRecording | None = None
        if request.method == "POST" and request.path in _SINGLE:
            recording = self.recorder.begin("http", key=name, name=new_id(self._names))
        elif request.method == "POST" and request.path == self._sessions_path:
            recording = self.recorder.begin("session", key=name, name=new_id(self._names))
        elif request.path.startswith(self._sessions_path + "/"):
            session = self._find(request.segments[3], name)
            recording = None if session is None else session.recording
        if recording is None:
            return
        connection = recording.connection()
        connection.requested(request.method, _request_target(request), _headers(request))
        exchange.record(RecordedExchange(self, connection, session, _body_scrubber(request)))

    def find(self, session_id: str, key: ApiKey | None) -> SessionRecording | None:
        """Return the recording of a session of ``key``, for a WebSocket that reads its answer; None if it has none."""
        session = self._find(session_id, key_name(key))
        return None if session is None else session.recording

    def answer_read(self, session_id: str) -> None:
        """End the recording of a session whose answer a WebSocket has read to its end."""
        if session_id in self._sessions:
            self._sessions[session_id].end()

    def open_session(self, session_id: str, recording: SessionRecording) -> _Session:
        """Note that later requests to this session belong to ``recording``."""
        session = _Session(recording, self._idle_sec, forget=lambda: self._sessions.pop(session_id, None))
        self._sessions[session_id] = session
        return session

    async def close(self) -> None:
        """End all recordings, and write what is not written yet. Call it when nothing is served any more."""
        for session in tuple(self._sessions.values()):
            session.end()
        await asyncio.to_thread(self.recorder.close)

    def _find(self, session_id: str, key_name: str | None) -> _Session | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.recording.key == key_name else None


class _Session:
    """The recording of a Mode B session. It ends when the answer is read, the session is deleted, or requests stop."""

    def __init__(self, recording: SessionRecording, idle_sec: float, *, forget: Callable[[], object]) -> None:
        self.recording = recording
        self._idle_sec = idle_sec
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None
        self.touch()

    def touch(self) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(self._idle_sec, self.end)

    def end(self) -> None:
        self._stop()
        self._forget()
        self.recording.finish()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class RecordedExchange(ExchangeRecording):
    """The ExchangeRecording that records one exchange."""

    def __init__(
        self,
        recordings: HttpRecordings,
        connection: ConnectionRecording,
        session: _Session | None,
        body: BodyScrubber | None,
    ) -> None:
        """``body`` removes credentials from the request body; None for a body that is recorded as it arrives."""
        self._body = body
        self._recordings = recordings
        self._connection = connection
        self._session = session
        self._is_whole = False

    def read(self, data: bytes) -> None:
        if data:
            self._received(data if self._body is None else self._body.feed(data))
            return
        self._body_over()
        self._connection.input_ended()

    def begun(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self._connection.answered(status, headers)

    def written(self, data: bytes) -> None:
        if data:
            self._connection.sent(data)

    def ended(self) -> None:
        self._is_whole = True
        self._connection.output_ended()

    def opens_session(self, session_id: str) -> None:
        self._session = self._recordings.open_session(session_id, self._connection.recording)

    def ends_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None

    def over(self) -> None:
        self._body_over()
        self._connection.closed("server" if self._is_whole else "lost")
        if self._session is not None:
            self._session.touch()
        else:  # one request, one that opened no session, or the last of its session
            self._connection.recording.finish()

    def _body_over(self) -> None:
        if self._body is not None:
            self._received(self._body.finish())

    def _received(self, data: bytes) -> None:
        if data:
            self._connection.received(data)


def _body_scrubber(request: HttpRequest) -> BodyScrubber | None:
    """Return the BodyScrubber for the request's body; None for audio, which contains no credentials."""
    if is_whole_json(request):
        return BodyScrubber(whole=True)
    try:
        reader = body_reader(request.headers.get("content-type") or "", max_chunk_bytes=1)
    except OmniError:  # a form, or a type that is refused
        return BodyScrubber()
    return None if isinstance(reader, RawAudioBody) else BodyScrubber(prefix_bytes=reader.prefix_bytes)


def _request_target(request: HttpRequest) -> str:
    return scrubbed_target(request.target) if request.target.startswith("/") else request.path


def _headers(request: HttpRequest) -> dict[str, str]:
    return {name: value for name in _HEADERS if (value := request.headers.get(name)) is not None}


# WebSockets.


def begin_recording(recorder: Recorder | None, session: Session, kind: RecordingKind, key: ApiKey | None) -> None:
    """Begin to record a session, if the recorder chooses it."""
    if recorder is not None:
        session.record(recorder.begin(kind, key=key_name(key), name=session.session_id))


_Connection = TypeVar("_Connection", bound=ServerConnection)
_Channel = TypeVar("_Channel")


def recorded(
    connection: _Connection, recording: SessionRecording | None, *, last_output: int | None = None
) -> _Connection:
    """Return a stand-in for ``connection`` that records its messages; ``connection`` if ``recording`` is None.

    Messages are recorded as they arrive, before the session receives them, and as they are sent. ``last_output`` is the
    number of the last output that the client has received, if it resumes its session.
    """
    if recording is None:
        return connection
    assert connection.request is not None
    written = recording.connection()
    written.opened(
        _handshake_target(connection.request.path),
        subprotocol=connection.subprotocol,
        last_output=last_output,
    )
    return cast("_Connection", _RecordedConnection(connection, written))


def recorded_channel(channel: _Channel, recording: SessionRecording | None, target: str) -> _Channel:
    """Return a stand-in for ``channel`` that records its messages; ``channel`` if ``recording`` is None.

    ``channel`` is the data channel of a call, and ``target`` the call's request target.
    """
    if recording is None:
        return channel
    written = recording.connection()
    written.opened(target, subprotocol=None, last_output=None)
    return cast("_Channel", _RecordedChannel(channel, written))


class _RecordedLink:
    """A stand-in for a link: records its messages, and passes all calls on to the link."""

    def __init__(self, connection: Any, recording: ConnectionRecording) -> None:
        self._connection = connection
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def attach(self, receiver: Any, account: ByteBudget | None = None) -> None:
        self._connection.attach(_RecordedReceiver(receiver, self._recording), account)

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        self._recording.sent(data, is_text=is_text)
        self._connection.write_message(data, is_text=is_text)


class _RecordedChannel(_RecordedLink):
    """A stand-in for the data channel of a call: records its messages, and passes all calls on to the channel."""

    async def close_in_time(self, code: int, reason: str) -> None:
        self._recording.closed("client" if self._connection.lost else "server")
        await self._connection.close_in_time(code, reason)


class _RecordedConnection(_RecordedLink):
    """A stand-in for a StreamConnection: records its messages, and passes all calls on to the connection."""

    def __init__(self, connection: Any, recording: ConnectionRecording) -> None:
        super().__init__(connection, recording)
        connection.connection_lost_waiter.add_done_callback(self._lost)

    async def send(self, message: bytes, *, text: bool) -> None:
        self._recording.sent(message, is_text=text)
        await self._connection.send(message, text=text)

    def _lost(self, _: object) -> None:
        protocol = self._connection.protocol
        received, sent = protocol.close_rcvd, protocol.close_sent
        if received is not None and (sent is None or protocol.close_rcvd_then_sent):
            self._recording.closed("client", received.code)
        elif sent is not None:
            self._recording.closed("server", sent.code)
        else:
            self._recording.closed("lost", CloseCode.ABNORMAL_CLOSURE)


class _RecordedReceiver:
    """A stand-in for a FrameReceiver: records the messages it gets, and passes all calls on to the receiver."""

    def __init__(self, receiver: Any, recording: ConnectionRecording) -> None:
        self._receiver = receiver
        self._receive_message = receiver.receive_message
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        message = bytes(data)
        if is_text or message[:64].lstrip()[:1] == b"{":  # the Realtime API also takes JSON in binary messages
            message = scrubbed(message)
        self._recording.received(message, is_text=is_text)
        self._receive_message(data, is_text=is_text)


def _handshake_target(target: str) -> str:
    """Return a handshake's target with at most ``session_id`` of its query; with none of it if it resumes a session."""
    path, _, query = target.partition("?")
    fields = [(name, value) for name, value in parse_qsl(query) if name == "session_id"]
    return f"{path}?{urlencode(fields)}" if fields and "resume_token" not in query else path
