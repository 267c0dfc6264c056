"""Opening a session: the handshake, its refusals, and the configuration that comes first."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.typing import Subprotocol

from omni_ws.client.failures import ConnectionFailed, error_from_fields, error_from_response
from omni_ws.errors import InvalidFrame, InvalidValue, ResyncRequired
from omni_ws.wire.frames import loads_object
from omni_ws.wire.server_frames import (
    SERVER_FRAMES,
    ErrorFrame,
    ServerFrame,
    SessionCreatedFrame,
    SessionResumedFrame,
    SessionUpdatedFrame,
    decode_server_frame,
)

DEFAULT_URL: Final = "ws://127.0.0.1:8080/v1/streaming_input"
BINARY: Final = Subprotocol("omni.v1+binary")
JSON: Final = Subprotocol("omni.v1+json")
#: The largest frame that a server may send: a second of the largest audio there is, in base64, fits several times.
MAX_FRAME_BYTES: Final = 64 << 20

_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_SERVER_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in SERVER_FRAMES)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is, and how to talk to it. ``ssl`` None means the system's certificates for wss."""

    url: str = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    binary: bool = True
    ssl: SSLContext | None = None
    open_timeout: float = 10


@dataclass(frozen=True, slots=True)
class OpenedConnection:
    """A fresh session. ``updated`` is None where no configuration was asked for."""

    websocket: ClientConnection
    created: SessionCreatedFrame
    updated: SessionUpdatedFrame | None


@dataclass(frozen=True, slots=True)
class ResumedConnection:
    """A session that goes on."""

    websocket: ClientConnection
    resumed: SessionResumedFrame


def websocket_url(url: str) -> str:
    """``http`` becomes ``ws``, and a missing path the native one. Raises InvalidValue for what is no such URL."""
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise InvalidValue(f"not a WebSocket URL: {url}", param="url")
    path = parts.path if parts.path not in ("", "/") else "/v1/streaming_input"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


def read_frame(message: str) -> ServerFrame | None:
    """None for a type that this version does not know. Raises InvalidFrame for anything else that is no frame."""
    try:
        return decode_server_frame(message)
    except InvalidFrame:
        kind = loads_object(message.encode()).get("type")
        if isinstance(kind, str) and kind not in _SERVER_TYPES:
            logger.debug("ignoring a frame of the unknown type %s", kind)
            return None
        raise


async def open_session(endpoint: Endpoint, config: Mapping[str, Any]) -> OpenedConnection:
    """Connect, and apply ``config`` if it says anything.

    Raises ConnectionFailed, or the server's error: Unauthenticated, EngineOverloaded, InvalidValue for ``config``, …
    """
    url = websocket_url(endpoint.url)
    try:
        async with asyncio.timeout(endpoint.open_timeout):
            websocket = await _handshake(endpoint, url)
            try:
                return await _introduce(websocket, config)
            except BaseException:
                websocket.transport.abort()
                raise
    except TimeoutError:
        raise ConnectionFailed(f"{url} did not answer within {endpoint.open_timeout:g} seconds") from None


async def resume_session(
    endpoint: Endpoint, session_id: str, resume_token: str, last_output: int, config: Mapping[str, Any]
) -> ResumedConnection | OpenedConnection:
    """Go on with a session; where the server cannot tell all that was missed, a fresh one, configured by ``config``.

    Raises what ``open_session`` raises, and SessionNotFound where there is nothing to go on with.
    """
    wanted = urlencode({"session_id": session_id, "resume_token": resume_token, "last_output": last_output})
    parts = urlsplit(websocket_url(endpoint.url))
    url = urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, wanted]))))
    try:
        async with asyncio.timeout(endpoint.open_timeout):
            websocket = await _handshake(endpoint, url)
            try:
                return await _come_back(websocket, config)
            except BaseException:
                websocket.transport.abort()
                raise
    except TimeoutError:
        raise ConnectionFailed(f"the server did not answer within {endpoint.open_timeout:g} seconds") from None


async def _come_back(websocket: ClientConnection, config: Mapping[str, Any]) -> ResumedConnection | OpenedConnection:
    try:
        message = await websocket.recv()
        frame = None if isinstance(message, bytes) else read_frame(message)
    except ConnectionClosed as closed:
        raise ConnectionFailed(f"the server closed the connection at once: {closed}") from None
    except InvalidFrame as error:
        raise ConnectionFailed(f"the server does not speak this protocol: {error}") from None
    match frame:
        case SessionResumedFrame():
            return ResumedConnection(websocket, frame)
        case ErrorFrame(error=fields) if fields.code == ResyncRequired.wire.code:
            return await _introduce(websocket, config)
        case ErrorFrame(error=fields):
            raise error_from_fields(fields)
    raise ConnectionFailed("the server did not say what became of the session")


async def _handshake(endpoint: Endpoint, url: str) -> ClientConnection:
    options: dict[str, Any] = {}
    if endpoint.api_key is not None:
        options["additional_headers"] = {"Authorization": f"Bearer {endpoint.api_key}"}
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
            max_size=MAX_FRAME_BYTES,
            **options,
        )
    except InvalidStatus as refusal:
        raise error_from_response(refusal.response.status_code, bytes(refusal.response.body or b"")) from None
    except InvalidURI as error:
        raise InvalidValue(f"not a WebSocket URL: {error}", param="url") from None
    except (InvalidHandshake, WebSocketException) as error:
        raise ConnectionFailed(f"{url} does not speak WebSocket: {error}") from error
    except OSError as error:
        raise ConnectionFailed(f"cannot reach {url}: {error}") from error


async def _introduce(websocket: ClientConnection, config: Mapping[str, Any]) -> OpenedConnection:
    """The first frames: session_created, then what becomes of ``config``."""
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
                case SessionUpdatedFrame() as updated if created is not None:
                    return OpenedConnection(websocket, created, updated)
                case ErrorFrame(error=fields):
                    raise error_from_fields(fields)
    except ConnectionClosed as closed:
        raise ConnectionFailed(f"the server closed the connection at once: {closed}") from None
    except InvalidFrame as error:
        raise ConnectionFailed(f"the server does not speak this protocol: {error}") from None


def encode_config(fields: Mapping[str, Any]) -> bytes:
    """Raises InvalidValue for values that JSON does not have."""
    try:
        return msgspec.json.encode({**fields, "type": "session_config"})
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"the configuration is not JSON: {error}") from None


def _is_loopback(host: str | None) -> bool:
    """A proxy of the environment is never meant for these."""
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
