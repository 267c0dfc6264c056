"""HttpRequest: the head of one HTTP/1.1 request, parsed and validated; and the responses to errors.

All errors in a request target are refused here, so that routes and policies compare plain decoded segments and need
no rules about escapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import h11
import orjson

from omni_ws.errors import (
    HeaderTooLarge,
    InvalidFrame,
    MethodNotAllowed,
    NotFound,
    OmniError,
    OriginNotAllowed,
    Unauthenticated,
    UpgradeRequired,
    http_status,
)
from omni_ws.service.sessions.admission import Addresses

#: Header lines of a request; the same as websockets allows in a handshake.
MAX_HEADER_LINES: Final = 128
#: Query fields of a request; bounds the work on hostile targets.
MAX_QUERY_FIELDS: Final = 256

_NO_PROXIES: Final = Addresses()

#: Escapes of letters, digits, and of "-", "." and "_".
_NEEDLESS_ESCAPE: Final = re.compile(r"%(?:2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|5[0-9AaFf]|7[0-9Aa])")
_SHOWN_CHARACTERS: Final = 128

#: Our error messages, by the beginnings of h11's messages. Those continue with bytes of the client, not to be repeated.
_BROKEN: Final = (
    ("Missing mandatory Host", "a request must have a Host header field"),
    ("Found multiple Host", "a request must have only one Host header field"),
    ("Illegal method", "the method contains invalid characters"),
    ("Illegal target", "the request target contains invalid characters"),
    ("illegal request line", "the first line is not a valid request line"),
    ("no request line", "the first line is not a valid request line"),
    ("illegal header line", "a line of the head is not a valid header field"),
    ("Illegal header", "a header field contains invalid characters"),
    ("bare LF", "a line of the head or of the trailers ends without CR"),
    ("folded line", "a header field continues on another line"),
    ("conflicting Content-Length", "the Content-Length header fields contradict each other"),
    ("bad Content-Length", "Content-Length must be a number of bytes"),
    ("multiple Transfer-Encoding", "Transfer-Encoding must be chunked"),
    ("Only Transfer-Encoding", "Transfer-Encoding must be chunked"),
    ("illegal chunk header", "the size of a chunk must be a hexadecimal number"),
    ("chunk size too long", "the size of a chunk must not exceed 16 digits"),
    ("chunk line too long", "the size of a chunk with its extensions must not exceed 256 bytes"),
    ("malformed chunk footer", "a chunk does not match its size"),
    ("peer closed", "the connection was closed in the middle of the body"),
    ("peer unexpectedly closed", "the connection was closed in the middle of the request"),
)

#: First byte of a TLS connection: the type of a handshake record (RFC 8446, section 5.1).
_TLS_RECORD: Final = b"\x16"


class Fields:
    """An ordered, immutable multi-dict of strings: header fields, with names in lower case, or query parameters."""

    __slots__ = ("_items", "_values")

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._items: tuple[tuple[str, str], ...] = tuple(items)
        self._values: dict[str, tuple[str, ...]] = {}
        for name, value in self._items:
            self._values[name] = (*self._values.get(name, ()), value)

    def get(self, name: str) -> str | None:
        """Return the first value of ``name``, or None."""
        return self._values[name][0] if name in self._values else None

    def get_all(self, name: str) -> tuple[str, ...]:
        """Return all values of ``name``, in order."""
        return self._values.get(name, ())

    def items(self) -> tuple[tuple[str, str], ...]:
        """Return all names and values, in order."""
        return self._items

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        # Names only: a value may be a key or a token, and reprs end up in logs.
        return f"Fields({', '.join(self)})"


class Headers(Fields):
    """Header fields; lookups ignore the case of names."""

    __slots__ = ()

    def get(self, name: str) -> str | None:
        return super().get(name.lower())

    def get_all(self, name: str) -> tuple[str, ...]:
        return super().get_all(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def tokens(self, name: str) -> tuple[str, ...]:
        """Return the members of a comma-separated header field, over all its lines, in their own case."""
        members = (member.strip() for value in self.get_all(name) for member in value.split(","))
        return tuple(member for member in members if member)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The parsed head of one HTTP request."""

    method: str
    #: The request target as it was sent.
    target: str
    #: ``segments`` joined by slashes, with slashes inside of them escaped; "*" for the asterisk-form.
    path: str
    #: The percent-decoded segments of the path; none of "/".
    segments: tuple[str, ...]
    query: Fields
    headers: Headers
    #: "1.0" or "1.1".
    http_version: str
    #: The client's address without its port, as reported by trusted proxies; "" on a Unix socket.
    client: str
    #: Whether the request was received over TLS.
    secure: bool

    @property
    def content_length(self) -> int | None:
        """Size of the body in bytes; None if it is not known in advance."""
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in lower case; "" if there is none."""
        return (self.headers.get("content-type") or "").partition(";")[0].strip().lower()

    @property
    def has_body(self) -> bool:
        """Whether body bytes may follow the head."""
        return "transfer-encoding" in self.headers or bool(self.content_length)

    @property
    def wants_websocket(self) -> bool:
        """Whether the request asks for WebSocket, and the server may respond with 101 (RFC 9110, section 7.8).

        If the request offers several protocols, WebSocket is chosen only if ``Sec-WebSocket-Key`` is there.
        """
        protocols = [token.lower() for token in self.headers.tokens("upgrade")]
        return (
            self.http_version == "1.1"
            and self.method == "GET"
            and "websocket" in protocols
            and (len(protocols) == 1 or "sec-websocket-key" in self.headers)
            and "upgrade" in (token.lower() for token in self.headers.tokens("connection"))
            and not self.has_body
        )

    @property
    def offered_subprotocols(self) -> tuple[str, ...]:
        """The subprotocols that a WebSocket client offers, in its order of preference."""
        return self.headers.tokens("sec-websocket-protocol")


def read_request(event: h11.Request, *, client: str, secure: bool, addresses: Addresses = _NO_PROXIES) -> HttpRequest:
    """Build an HttpRequest from h11's event.

    ``client`` is the address of the peer, which may be a proxy; ``addresses`` knows the trusted proxies. ``secure``:
    whether the connection uses TLS. Raises InvalidFrame and HeaderTooLarge for requests that h11 accepts and this
    server refuses.
    """
    if len(event.headers) > MAX_HEADER_LINES:
        raise HeaderTooLarge(f"the request head exceeds {MAX_HEADER_LINES} header lines")
    version = event.http_version.decode("ascii")
    if version not in ("1.0", "1.1"):
        raise InvalidFrame(f"HTTP/{version} is not supported; use HTTP/1.1")
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers)
    if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
        # A proxy that believes the other framing would forward a smuggled request (RFC 9112, section 6.1).
        raise InvalidFrame("Transfer-Encoding is not allowed with Content-Length or in HTTP/1.0")
    target = event.target.decode("ascii")
    segments, query = split_target(target)
    return HttpRequest(
        method=event.method.decode("ascii"),
        target=target,
        path="/" + "/".join(segment.replace("/", "%2F") for segment in segments) if target != "*" else "*",
        segments=segments,
        query=query,
        headers=headers,
        http_version=version,
        client=addresses.client(client, headers.tokens("x-forwarded-for")),
        secure=secure,
    )


def protocol_failure(
    error: h11.RemoteProtocolError, *, first_byte: bytes, in_body: bool, max_header_bytes: int
) -> OmniError:
    """Return the error to respond with when h11 raises ``error``.

    ``first_byte`` is the first byte of the connection; ``in_body``: h11 was parsing a body, not a head.
    """
    if error.error_status_hint == 431 and in_body:
        return InvalidFrame(f"a chunk size line or the trailers exceed {max_header_bytes} bytes")
    if error.error_status_hint == 431:
        return HeaderTooLarge(f"the request head exceeds {max_header_bytes} bytes")
    if first_byte == _TLS_RECORD:
        return InvalidFrame("this looks like TLS, but this port speaks plain HTTP and WebSocket")
    text = str(error)
    reason = next((reason for beginning, reason in _BROKEN if text.startswith(beginning)), None)
    return InvalidFrame("invalid HTTP/1.1" if reason is None else f"invalid HTTP/1.1: {reason}")


def split_target(target: str) -> tuple[tuple[str, ...], Fields]:
    """Split a target in origin-, absolute- or asterisk-form (RFC 9112, section 3.2) into path segments and query.

    Raises InvalidFrame, and NotFound for a path that is not in its simplest form, as it has empty segments or needless
    escapes: with such a path, a client could evade a proxy that allows or blocks paths as they are written.
    """
    if target == "*":
        return ("*",), Fields()
    if "#" in target:
        raise InvalidFrame("a request target must not have a fragment")
    if target.startswith("/"):
        raw_path, _, raw_query = target.partition("?")
    else:
        raw_path, raw_query = _split_absolute(target)
    segments = tuple(_decode(part) for part in raw_path.split("/") if part)
    for segment in segments:
        if segment in (".", ".."):
            raise InvalidFrame("a path must not contain '.' or '..' segments")
        if any(ord(character) < 0x20 or ord(character) == 0x7F for character in segment):
            raise InvalidFrame("a path must not contain control characters")
    if "//" in raw_path or (len(raw_path) > 1 and raw_path.endswith("/")) or _NEEDLESS_ESCAPE.search(raw_path):
        raise NotFound(f"{raw_path[:_SHOWN_CHARACTERS]} not found: it has empty segments, or escapes without need")
    return segments, _split_query(raw_query)


def _split_absolute(target: str) -> tuple[str, str]:
    """Return path and query of a target in absolute-form."""
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise InvalidFrame("the request target is not a valid URL") from error
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
        raise InvalidFrame("the request target must be a path or an http URL")
    return parts.path, parts.query


def _split_query(raw_query: str) -> Fields:
    """Decode a query; parameters with blank values are kept. Raises InvalidFrame."""
    if not raw_query:
        return Fields()
    try:
        pairs = parse_qsl(raw_query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as error:  # a UnicodeDecodeError, too
        raise InvalidFrame("the query is not valid UTF-8 or has too many fields") from error
    if any("\0" in text for pair in pairs for text in pair):
        raise InvalidFrame("a query must not contain NUL")
    return Fields(pairs)


def _decode(part: str) -> str:
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidFrame("the path is not valid UTF-8") from error


# Responses to errors

#: Names and values of header fields, in the order in which they are sent.
HeaderList = list[tuple[str, str]]

_RETRY_AFTER_STATUSES: Final = frozenset({429, 503})


def error_type(error: OmniError) -> str:
    """Return the ``type`` field of OpenAI's error object for ``error``."""
    status = http_status(error) or 500
    if isinstance(error, Unauthenticated):
        return "authentication_error"
    if isinstance(error, OriginNotAllowed):
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_object(error: OmniError) -> dict[str, str | None]:
    """Return OpenAI's error object: the value of ``error`` in a JSON body and in the data of an ``event: error``."""
    return {"message": error.message, "type": error_type(error), "param": error.param, "code": error.code}


def error_headers(error: OmniError) -> HeaderList:
    """Return the header fields that ``error`` adds to its response (RFC 9110, sections 10.2.3 and 15.5)."""
    headers: HeaderList = []
    if isinstance(error, MethodNotAllowed):
        headers.append(("Allow", ", ".join(error.allow)))
    elif isinstance(error, Unauthenticated):
        headers.append(("WWW-Authenticate", "Bearer"))
    elif isinstance(error, UpgradeRequired):
        headers.append(("Upgrade", "websocket"))
        headers.append(("Connection", "Upgrade"))
        headers.append(("Sec-WebSocket-Version", "13"))
    if error.retry_after_ms is not None or http_status(error) in _RETRY_AFTER_STATUSES:
        seconds = math.ceil((error.retry_after_ms or 0) / 1000)
        headers.append(("Retry-After", str(max(1, seconds))))
    return headers


def error_body(error: OmniError) -> bytes:
    """Return the JSON body of the response to ``error``, in the format of OpenAI's API."""
    return orjson.dumps({"error": error_object(error)})
