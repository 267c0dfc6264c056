"""Connections to a server: its addresses, opening and resuming a session, encoding of frames, and errors."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
import orjson
from msgspec import UnsetType
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.proxy import get_proxy
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import (
    InvalidFrame,
    InvalidValue,
    MethodNotAllowed,
    OmniError,
    RateLimited,
    ResyncRequired,
    ShuttingDown,
    Unauthenticated,
    leaves,
)
from omni_ws.wire.frames import encode_input, loads_object
from omni_ws.wire.server_frames import (
    SERVER_FRAMES,
    ErrorFields,
    ErrorFrame,
    ServerFrame,
    SessionCreatedFrame,
    SessionResumedFrame,
    SessionUpdatedFrame,
    decode_server_frame,
)

logger = logging.getLogger(__name__)

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(url: str) -> str:
    """Complete a URL: ``http`` becomes ``ws``, and an empty path becomes ``/v1/streaming_input``.

    ``https`` becomes ``wss``, and a URL without a scheme is one of ``ws``. Raises InvalidValue if it is not a WebSocket
    URL.
    """
    refusal = InvalidValue(f"not a WebSocket URL: {url}", param="url")
    try:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # as a name is resolved
        url.encode()  # a command line has surrogates in place of bytes that are not UTF-8
    except ValueError:
        raise refusal from None
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname or port == 0:
        raise refusal
    path = parts.path if parts.path not in ("", "/") else "/v1/streaming_input"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


class Route(NamedTuple):
    """A way to a server: its URL and, if the host name has several addresses, the one to connect to."""

    url: str
    address: str | None = None


class Routes:
    """The routes to one server, or to replicas that share a store, and which of the routes failed.

    Host names are resolved anew for each connection, so that a client finds new addresses. A route that failed is tried
    after all others until it works again: a process that is stopped still accepts connections but never answers. Raises
    InvalidValue if there is no URL.
    """

    def __init__(self, urls: str | Sequence[str]) -> None:
        self.urls = (urls,) if isinstance(urls, str) else tuple(urls)
        if not self.urls:
            raise InvalidValue("no URL of a server", param="url")
        #: The route of the connection of the moment, or of the last attempt.
        self.current: Route | None = None
        #: An ordered set: the last failure is at the end.
        self._failed: dict[Route, None] = {}

    async def in_order(self) -> list[Route]:
        """Resolve the host names, and return all routes: the current one, others, and then those that failed.

        Raises InvalidValue for an invalid URL, and OSError if no host name has an address.
        """
        urls = [websocket_url(url) for url in self.urls]
        found: list[Route] = []
        failure: OSError | None = None
        for routes in await asyncio.gather(*map(_routes_to, urls), return_exceptions=True):
            match routes:
                case list():
                    found += routes
                case OSError():
                    failure = routes
                case _:
                    raise routes
        if not found and failure is not None:
            raise failure
        places = {route: place for place, route in enumerate(self._failed, 1)}
        return sorted(found, key=lambda route: (places.get(route, 0), route != self.current))

    def tries(self, route: Route) -> None:
        """Make a route the current one."""
        self.current = route

    def works(self) -> None:
        """Record that a connection was made by the current route."""
        if self.current is not None:
            self._failed.pop(self.current, None)

    def fails(self) -> None:
        """Record that the current route led to no server."""
        if self.current is not None:
            self._failed.pop(self.current, None)
            self._failed[self.current] = None


async def _routes_to(url: str) -> list[Route]:
    """Return a route for each address of the host; one route without an address if there are not several."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_address(host) or get_proxy(parse_uri(url)) is not None:
        return [Route(url)]
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [Route(url, address) for address in addresses] if len(addresses) > 1 else [Route(url)]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# Connections to a server: opening and resuming a session, encoding of frames, and errors.


DEFAULT_URL: Final = "ws://127.0.0.1:8080/v1/streaming_input"
BINARY: Final = Subprotocol("omni.v1+binary")
JSON: Final = Subprotocol("omni.v1+json")
#: The largest frame that is accepted from a server: many times a second of audio at the highest rate, in base64.
MAX_FRAME_BYTES: Final = 64 << 20

_Opened = TypeVar("_Opened")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a server, and the options of a connection to it.

    ``url`` may be a sequence of URLs, of replicas that share a store. ``binary`` offers binary audio frames. ``ssl`` is
    for ``wss`` only; None means the system's certificates. ``open_timeout`` is in seconds and covers the handshake and
    the first frames.
    """

    url: str | Sequence[str] = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    binary: bool = True
    ssl: SSLContext | None = None
    open_timeout: float = 10
    routes: Routes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "routes", Routes(self.url))


@dataclass(frozen=True, slots=True)
class OpenedConnection:
    """A connection with a fresh session. ``updated`` is the reply to the configuration; None if none was sent."""

    websocket: ClientConnection
    created: SessionCreatedFrame
    updated: SessionUpdatedFrame | None


#: A connection that continues an existing session, and its first frame.
ResumedConnection: TypeAlias = tuple[ClientConnection, SessionResumedFrame]


async def open_session(
    endpoint: Endpoint, config: Mapping[str, Any], *, handshake_timeout: float = math.inf
) -> OpenedConnection:
    """Connect, wait for ``session_created``, and apply ``config`` unless it is empty.

    ``handshake_timeout`` is in seconds, for each address, within ``open_timeout``. Raises ConnectionFailed if no server
    of this protocol answers in time, or the error with which the server refuses the session or ``config``, such as
    Unauthenticated or InvalidValue.
    """
    return await _opened(endpoint, "", lambda websocket: _finish_opening(websocket, config), handshake_timeout)


async def resume_session(
    endpoint: Endpoint,
    session_id: str,
    resume_token: str,
    last_output: int,
    config: Mapping[str, Any],
    *,
    resumable: bool = True,
    handshake_timeout: float = math.inf,
) -> ResumedConnection | OpenedConnection:
    """Resume a session after the output ``last_output``.

    ``resumable`` is False if the server said that its store lacks the current state of the session, so that only the
    same server can resume it. If the server can no longer replay the missed outputs, a fresh session is opened instead,
    which gets ``config``. ``handshake_timeout`` is as for ``open_session``. Raises what that raises, and
    SessionNotFound if the session has ended.
    """
    known = {"session_id": session_id, "resume_token": resume_token, "last_output": last_output}
    wanted = urlencode(known if resumable else {**known, "resumable": "false"})
    return await _opened(endpoint, wanted, lambda websocket: _finish_resume(websocket, config), handshake_timeout)


async def _opened(
    endpoint: Endpoint,
    query: str,
    finish: Callable[[ClientConnection], Awaitable[_Opened]],
    handshake_timeout: float,
) -> _Opened:
    """Connect, with ``query`` added to the URL, and return the result of ``finish``.

    On failure or time-out, close the connection.
    """
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(endpoint.open_timeout):
            websocket = await _connected(endpoint, query, handshake_timeout)
            try:
                return await finish(websocket)
            except BaseException:
                websocket.transport.abort()
                raise
    except TimeoutError:
        endpoint.routes.fails()
        took = asyncio.get_running_loop().time() - began
        raise ConnectionFailed(f"{_address(endpoint)} did not answer within {took:.3g} seconds") from None


def _address(endpoint: Endpoint) -> str:
    """Return the server's address for messages, without the resume token that the URL of a connection may contain."""
    return ", ".join(websocket_url(url) for url in endpoint.routes.urls)


async def _connected(endpoint: Endpoint, query: str, handshake_timeout: float) -> ClientConnection:
    """Connect by the first route on which a server completes the handshake.

    Each route has at most ``handshake_timeout``, and its share of ``open_timeout``: behind a route may be a process
    that accepts connections but never answers.
    """
    routes = endpoint.routes
    try:
        ways = await routes.in_order()
    except OSError as error:
        raise ConnectionFailed(f"cannot reach {_address(endpoint)}: {error}") from error
    for left, route in enumerate(ways, 1 - len(ways)):
        parts = urlsplit(route.url)
        url = urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, query]))))
        routes.tries(route)
        try:
            share = endpoint.open_timeout / len(ways) if left else endpoint.open_timeout
            async with asyncio.timeout(min(share, handshake_timeout)):
                websocket = await _handshake(endpoint, url, route.address)
        except (OmniError, OSError, TimeoutError) as error:
            routes.fails()
            if not left or (isinstance(error, OmniError) and not is_retryable(error)):
                raise
        else:
            routes.works()
            return websocket
    raise AssertionError("a URL has at least one route")


async def _finish_resume(
    websocket: ClientConnection, config: Mapping[str, Any]
) -> ResumedConnection | OpenedConnection:
    """Read the reply to a resume. If the server opens a fresh session instead, configure it with ``config``."""
    try:
        message = await websocket.recv()
        frame = None if isinstance(message, bytes) else read_frame(message)
    except ConnectionClosed as closed:
        raise ConnectionFailed(f"the server closed the connection during the handshake: {closed}") from None
    except InvalidFrame as error:
        raise ConnectionFailed(f"the server does not speak this protocol: {error}") from None
    match frame:
        case SessionResumedFrame():
            return websocket, frame
        case ErrorFrame(error=fields) if fields.code == ResyncRequired.wire.code:
            return await _finish_opening(websocket, config)
        case ErrorFrame(error=fields):
            raise error_from_fields(fields)
    raise ConnectionFailed("the server neither resumed nor refused the session")


def authorization(api_key: str) -> dict[str, str]:
    """Return the header with a key. Raises Unauthenticated, without quoting the key, if a header cannot contain it."""
    if not api_key.isprintable():
        raise Unauthenticated("the API key has a line break, or another character that no key has")
    return {"Authorization": f"Bearer {api_key}"}


async def _handshake(endpoint: Endpoint, url: str, address: str | None) -> ClientConnection:
    options: dict[str, Any] = {} if address is None else {"host": address}
    if endpoint.api_key is not None:
        options["additional_headers"] = authorization(endpoint.api_key)
    if endpoint.ssl is not None:
        options["ssl"] = endpoint.ssl
    if _is_loopback(urlsplit(url).hostname):
        options["proxy"] = None
    try:
        return await open_websocket(
            url,
            subprotocols=[BINARY, JSON] if endpoint.binary else [JSON],
            compression=None,  # audio does not compress
            open_timeout=None,
            ping_interval=None,  # the session has its own keep-alive, which knows what a pong may have to wait for
            max_size=MAX_FRAME_BYTES,
            **options,
        )
    except InvalidStatus as refusal:
        raise error_from_response(refusal.response.status_code, bytes(refusal.response.body or b"")) from None
    except InvalidURI as error:
        # The library's message would quote ``url`` with its resume token.
        raise InvalidValue(f"not a WebSocket URL: {_address(endpoint)}: {error.msg}", param="url") from None
    except (InvalidHandshake, WebSocketException) as error:
        raise ConnectionFailed(f"{_address(endpoint)} does not speak WebSocket: {error}") from error
    except OSError as error:
        raise ConnectionFailed(f"cannot reach {_address(endpoint)}: {error}") from error


async def _finish_opening(websocket: ClientConnection, config: Mapping[str, Any]) -> OpenedConnection:
    """Read the first frames of a fresh session: ``session_created``, then the reply to ``config``."""
    created: SessionCreatedFrame | None = None
    try:
        while True:
            message = await websocket.recv()
            if isinstance(message, bytes):
                raise ConnectionFailed("the server sent output before it created the session")
            match read_frame(message):
                case SessionCreatedFrame() as created:
                    if not config:
                        return OpenedConnection(websocket, created, None)
                    await websocket.send(encode_config(config), text=True)
                case SessionUpdatedFrame() as updated if created is not None and not updated.is_unasked:
                    return OpenedConnection(websocket, created, updated)
                case ErrorFrame(error=fields):
                    raise error_from_fields(fields)
    except ConnectionClosed as closed:
        raise ConnectionFailed(f"the server closed the connection during the handshake: {closed}") from None
    except InvalidFrame as error:
        raise ConnectionFailed(f"the server does not speak this protocol: {error}") from None


def _is_loopback(host: str | None) -> bool:
    """Return whether the host is this machine, for which no proxy is used."""
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Frames

_MAX_U32: Final = 2**32 - 1
_SERVER_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in SERVER_FRAMES)
_encode = msgspec.json.Encoder().encode


def read_frame(message: str) -> ServerFrame | None:
    """Decode a text frame; return None if its type is unknown to this version.

    Raises InvalidFrame if it is not a frame.
    """
    try:
        return decode_server_frame(message)
    except InvalidFrame:
        kind = loads_object(message.encode()).get("type")
        if isinstance(kind, str) and kind not in _SERVER_TYPES:
            logger.debug("ignoring a frame of the unknown type %s", kind)
            return None
        raise


def encode_config(fields: Mapping[str, Any]) -> bytes:
    """Encode a ``session_config`` frame. Raises InvalidValue for a value that JSON cannot express."""
    try:
        return _encode({**fields, "type": "session_config"})
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"the configuration cannot be written as JSON: {error}") from None


def chunk_encoder(*, binary: bool) -> Callable[[InputChunk], tuple[bytes, bool]]:
    """Return a function that encodes a numbered chunk. It returns the frame, and whether that is a text frame."""
    return _smallest_frame if binary else _text_frame


def _smallest_frame(chunk: InputChunk) -> tuple[bytes, bool]:
    """Encode a chunk as a binary frame or, if the chunk has fields that the binary header lacks, as a text frame."""
    has_no_field = chunk.format is not None or chunk.tool_call_id is not None or chunk.ref is not None
    if has_no_field or (chunk.timestamp_ms or 0) > _MAX_U32:
        return _text_frame(chunk)
    return encode_input(chunk), False


def _text_frame(chunk: InputChunk) -> tuple[bytes, bool]:
    fields: dict[str, Any] = {"type": "input_chunk", "sequence_id": chunk.sequence_id, "modality": chunk.modality}
    if chunk.payload:
        text = _as_text(chunk)
        if text is None:
            fields["payload"] = chunk.payload
        else:
            fields["text"] = text
    if chunk.format is not None:
        fields["format"] = chunk.format
    if chunk.timestamp_ms is not None:
        fields["timestamp_ms"] = chunk.timestamp_ms
    if chunk.tool_call_id is not None:
        fields["role"], fields["tool_call_id"] = "tool", chunk.tool_call_id
    if chunk.end_of_input:
        fields["end_of_input"] = True
    if chunk.ref is not None:
        fields["ref"] = chunk.ref
    return _encode(fields), True


def _as_text(chunk: InputChunk) -> str | None:
    """Decode a text payload; return None for another modality, and for text that is cut within a character."""
    if chunk.modality is not Modality.TEXT:
        return None
    try:
        return chunk.payload.decode()
    except UnicodeDecodeError:
        return None


# Errors: those of the server, by their codes, and those of the connection


class ConnectionFailed(ConnectionError):
    """The session could not be opened.

    Nothing listens at the address, it did not answer in time, or it does not speak this protocol.
    """


class ConnectionLost(ConnectionError):
    """The session ended early, without an error from the server.

    The connection broke and could not be re-established, the server is going away, or the application closed the
    session.
    """


class ServerError(OmniError):
    """An error from the server whose code this version does not know; ``code`` is as received."""

    def __init__(self, message: str, *, code: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self._code = code

    @property
    def code(self) -> str:
        return self._code


_BY_CODE: Final = {error.wire.code: error for error in leaves()}
#: Error classes by HTTP status, for responses without an error code, such as those of proxies.
_BY_STATUS: Final = {
    error.wire.http_status: error
    for error in (_BY_CODE[code] for code in ("unauthenticated", "origin_not_allowed", "not_found", "upgrade_required"))
} | {429: RateLimited, 503: ShuttingDown}


def is_retryable(error: OmniError) -> bool:
    """Whether a later attempt may succeed."""
    return error.retryable if isinstance(error, ServerError) else error.wire.retryable


def error_from_fields(fields: ErrorFields) -> OmniError:
    """Convert the content of an ``error`` frame to an exception."""
    error = _build(_BY_CODE.get(fields.code), fields.code, fields.message, retryable=fields.retryable)
    return error.about(
        param=fields.param,
        sequence_id=fields.sequence_id,
        request_id=fields.request_id,
        ref=None if isinstance(fields.ref, UnsetType) else fields.ref,
        retry_after_ms=fields.retry_after_ms,
    )


def error_from_response(status: int, body: bytes) -> OmniError:
    """Convert an HTTP response that refuses the handshake to an exception."""
    try:
        fields = orjson.loads(body)["error"]
        code, message = str(fields["code"]), str(fields["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        code, message = f"http_{status}", f"the server refused the connection with status {status}"
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    return _build(kind, code, message, retryable=status in (429, 502, 503, 504))


def _build(kind: type[OmniError] | None, code: str, message: str, *, retryable: bool) -> OmniError:
    if kind is None:
        return ServerError(message, code=code, retryable=retryable)
    if issubclass(kind, MethodNotAllowed):
        return kind(message, allow=())
    return kind(message)
