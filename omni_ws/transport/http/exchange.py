"""One request and its answer, as a handler sees them.

    async def handler(exchange: HttpExchange) -> None:
        body = await exchange.read_body(limit)
        await exchange.respond_json(200, {"received": len(body)})

The two directions are independent: a handler may read a part of the body, answer it, and read on. Every write waits
until the peer has room for it, every read lets the peer send more; when the peer goes, the handler's task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol

import h11
import orjson

from omni_ws.core.quota import Share
from omni_ws.errors import OmniError, PayloadTooLarge, UnsupportedFormat, http_status
from omni_ws.transport.http import cors
from omni_ws.transport.http.connections import Connections
from omni_ws.transport.http.error_response import HeaderList, error_body, error_headers
from omni_ws.transport.http.receiving import HttpInput
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.http.sending import HttpOutput

__all__ = ["HttpExchange", "HttpRequest"]

SERVER_NAME: Final = "omni_ws"
JSON: Final = "application/json"

#: Statuses whose answers have no body and no Content-Length (RFC 9110, 8.6).
_BODILESS: Final = frozenset({204, 304})


class ExchangeRecording(Protocol):
    """Who wants to know what is read and written."""

    def read(self, data: bytes) -> None:
        """A piece of the body, b"" at its end."""

    def begun(self, status: int, headers: HeaderList) -> None: ...

    def written(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def opens_session(self, session_id: str) -> None:
        """The request has opened a session, to which others will belong."""

    def ends_session(self) -> None:
        """Nothing is left to be said about the session that the request belongs to."""

    def over(self) -> None:
        """Nothing more is read or written, also where that was not all."""


class HttpExchange:
    """``route`` and ``path_parameters`` are set by the router.

    ``input_pace`` may be set before the body is read: it is told how many bytes of it came, and says for how many
    seconds no more should. They are handed out when that is over; meanwhile, once enough waits, the socket is not read.
    ``input_share`` may be set before that, too: what is kept of the body is counted there, until the exchange is over.
    ``recording`` may be set before anything is read or written.
    """

    def __init__(
        self,
        request: HttpRequest,
        *,
        http_input: HttpInput,
        http_output: HttpOutput,
        connections: Connections,
        origin_allowed: bool,
    ) -> None:
        self.request = request
        self.route: str = ""
        self.path_parameters: Mapping[str, str] = {}
        #: For the account of this request: the session that it is for, and an error that it told by itself.
        self.session_id: str = ""
        self.error: OmniError | None = None
        #: Of the answer; 0 before it began.
        self.status = 0
        self.sent_bytes = 0
        self._input = http_input
        self._body = http_input.body
        self._output = http_output
        self._connections = connections
        self._origin_allowed = origin_allowed
        self.input_pace: Callable[[int], float] | None = None
        self.input_share: Share | None = None
        #: How what runs for this request hears that it must end.
        self.interrupts: list[Callable[[OmniError], None]] = []
        #: Whether the body waits because it came faster than it may.
        self.input_held_to_pace = False
        self.recording: ExchangeRecording | None = None
        #: Called with what comes of the body, before any pace, b"" at its end; what it raises, ``read`` raises.
        self.on_body: Callable[[bytes], None] | None = None
        self._head_sent = False
        self._unread: list[bytes] = []
        self._chunked = False
        self._ended = False

    # The request's body.

    @property
    def received_bytes(self) -> int:
        return self._body.received

    @property
    def body_timeout(self) -> float | None:
        """Longest silence of the peer while it owes body bytes, in seconds; None for no bound. May be set any time."""
        return self._input.body_timeout

    @body_timeout.setter
    def body_timeout(self, seconds: float | None) -> None:
        self._input.body_timeout = seconds

    def body_is_live(self, silence: float) -> None:
        """The body is made while it is sent: it may be slow, with pauses of so many seconds."""
        self._input.min_rate = None
        self._input.body_timeout = silence

    async def read(self) -> bytes:
        """The next bytes of the body, b"" at its end.

        Raises UnsupportedFormat for an encoded body, SessionTimeout for a peer that stopped sending, InvalidFrame for
        a body that is broken.
        """
        self._refuse_encoded_body()
        if self._unread:
            return self._unread.pop(0)
        self._input.wanted()
        chunk = await self._body.take()
        if self.on_body is not None:
            self.on_body(chunk)
        if self.input_pace is not None and chunk and (seconds := self.input_pace(len(chunk))):
            self.input_held_to_pace = True
            await asyncio.sleep(seconds)
            self.input_held_to_pace = False
        self._input.taken()
        if self.recording is not None:
            self.recording.read(chunk)
        return chunk

    def unread(self, data: bytes, *, ended: bool) -> None:
        """Bytes that were read are to be read once more, and with ``ended`` the end of the body behind them."""
        self._unread = [data, b""] if ended else [data]

    async def body(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises as ``read`` does."""
        while chunk := await self.read():
            yield chunk

    async def read_body(self, limit: int) -> bytes:
        """The whole body of at most ``limit`` bytes.

        Raises PayloadTooLarge, before reading where the size is known, and EngineOverloaded as ``keep`` does.
        """
        self._refuse_encoded_body()
        if (self.request.content_length or 0) > limit:
            raise PayloadTooLarge(f"the request body has more than {limit} bytes")
        whole = bytearray()
        while chunk := await self.read():
            whole += chunk
            if len(whole) > limit:
                raise PayloadTooLarge(f"the request body has more than {limit} bytes")
            self.keep(len(whole))
        return bytes(whole)

    def keep(self, size: int) -> None:
        """So many bytes of the body are kept from here on. Raises EngineOverloaded where the server has no room."""
        if self.input_share is not None:
            self.input_share.resize(size)

    def _refuse_encoded_body(self) -> None:
        for coding in self.request.headers.tokens("content-encoding"):
            if coding.lower() != "identity":
                raise UnsupportedFormat(
                    f"request bodies in Content-Encoding {coding[:40]!r} are not accepted; send them as they are",
                    param="Content-Encoding",
                )

    # The answer.

    @property
    def head_sent(self) -> bool:
        """Whether the answer began, so that its status can no longer change."""
        return self._head_sent

    async def respond(self, status: int, headers: Iterable[tuple[str, str]] = (), body: bytes = b"") -> None:
        """Send a whole answer."""
        fields = [*headers]
        if status not in _BODILESS:
            fields.append(("Content-Length", str(len(body))))
        if self._connections.draining or not self._body.complete:
            # What was not read of the request stands between this answer and the next request.
            fields.append(("Connection", "close"))
        events: list[h11.Event] = [self._head(status, fields)]
        if body and self._sends_content(status):
            events.append(h11.Data(data=body))
            self.sent_bytes = len(body)
        self._output.send(*events, h11.EndOfMessage())
        self._head_sent = self._ended = True
        if self.recording is not None:
            self.recording.begun(status, fields)
            self.recording.written(body)
            self.recording.ended()
        await self._output.drain()

    async def respond_json(self, status: int, content: Any, headers: Iterable[tuple[str, str]] = ()) -> None:
        await self.respond(status, [("Content-Type", JSON), *headers], orjson.dumps(content))

    async def respond_error(self, error: OmniError) -> None:
        """Answer with ``error``; drops the connection where the answer began, or where the error has no status."""
        status = http_status(error)
        if self._head_sent or status is None:
            self._output.abort()
            return
        headers: HeaderList = [("Content-Type", JSON), *error_headers(error)]
        if status == 415 and error.param == "Content-Encoding":
            headers.append(("Accept-Encoding", "identity"))
        await self.respond(status, headers, error_body(error))

    async def respond_options(self, methods: Iterable[str]) -> None:
        """Answer OPTIONS for a path that takes ``methods``; to a browser's preflight, with what it asks for."""
        allow = tuple(methods)
        headers: HeaderList = [("Allow", ", ".join(allow))]
        if self._origin_allowed and cors.is_preflight(self.request):
            headers += cors.preflight_headers(self.request, allow)
        await self.respond(204, headers)

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """Begin an answer of unknown length: chunked, or until the connection closes for HTTP/1.0.

        ``filler`` is content without a meaning, that may stand between any two parts of the answer.
        """
        fields = [*headers]
        if self._connections.draining:
            fields.append(("Connection", "close"))
        self._output.send(self._head(status, fields))
        self._head_sent = True
        if self.recording is not None:
            self.recording.begun(status, fields)
        # What h11 makes of a head that says nothing of its length.
        sized = any(name.lower() == "content-length" for name, _ in fields)
        self._chunked = self.request.http_version == "1.1" and self._sends_content(status) and not sized
        if self.request.method != "HEAD":
            self._output.begin_content(filler=filler, chunked=self._chunked)
        await self._output.drain()

    async def write(self, data: bytes) -> None:
        """Send a part of a started answer, and wait while the peer is behind. Raises PeerGone."""
        self._send_part(data)
        await self._output.drain()

    def write_all(self, parts: Sequence[bytes]) -> Coroutine[Any, Any, None]:
        """Send several parts at once."""
        return self.write(b"".join(parts))

    def try_write(self, parts: Sequence[bytes]) -> bool:
        """The same where nothing has to be waited for; False, and nothing is sent, where the peer is behind."""
        if not self._head_sent or not self._output.has_room:
            return False
        self._send_part(b"".join(parts))
        return True

    def _send_part(self, data: bytes) -> None:
        if data and self._chunked and not self._ended:
            self.sent_bytes += len(data)
            self._output.send_chunk(data)
        elif data and self.request.method != "HEAD":
            self.sent_bytes += len(data)
            self._output.send(h11.Data(data=data))
        if self.recording is not None:
            self.recording.written(data)

    async def end(self) -> None:
        """End a started answer; does nothing where it has ended."""
        if not self._ended:
            self._output.send(h11.EndOfMessage())
            self._ended = True
            if self.recording is not None:
                self.recording.ended()
            await self._output.drain()

    def over(self) -> None:
        """For the connection: nothing more is read or written."""
        self.keep(0)
        if self.recording is not None:
            self.recording.over()

    def _sends_content(self, status: int) -> bool:
        return self.request.method != "HEAD" and status not in _BODILESS

    def _head(self, status: int, headers: HeaderList) -> h11.Response:
        self.status = status
        return answer_head(status, [*headers, *cors.answer_headers(self.request, allowed=self._origin_allowed)])


def answer_head(status: int, headers: HeaderList) -> h11.Response:
    """The head of any answer of this server."""
    fields = [("Date", formatdate(usegmt=True)), ("Server", SERVER_NAME), *headers]
    return h11.Response(status_code=status, headers=fields, reason=_reason(status))


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
