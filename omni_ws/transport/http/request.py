"""A request as handlers see it: the head of one HTTP/1.1 message, parsed once and never changed.

Everything that a client may get wrong in a request target is refused here, so that routes and policies compare
plain decoded segments and need no rules of their own about escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from omni_ws.core.addresses import Addresses
from omni_ws.errors import HeaderTooLarge, InvalidFrame, OmniError

#: Lines of a head besides its first; also what a WebSocket handshake may have.
MAX_HEADER_LINES: Final = 128
#: More query fields than any route has; a bound against hash-flooding targets.
MAX_QUERY_FIELDS: Final = 256

_NO_PROXIES: Final = Addresses()

#: What h11 says of what it cannot read, by the beginning of its words, which go on with the client's bytes.
_BROKEN: Final = (
    ("Missing mandatory Host", "a request has a Host field"),
    ("Found multiple Host", "a request has one Host field, not several"),
    ("Illegal method", "the method has characters that do not belong there"),
    ("Illegal target", "the request target has characters that do not belong there"),
    ("illegal request line", "the first line is no request line"),
    ("no request line", "the first line is no request line"),
    ("illegal header line", "a line of the head is no header field"),
    ("Illegal header", "a header field has characters that do not belong there"),
    ("continuation line", "the first header field begins with a space"),
    ("conflicting Content-Length", "the Content-Length fields contradict each other"),
    ("bad Content-Length", "Content-Length is a number of bytes"),
    ("multiple Transfer-Encoding", "Transfer-Encoding is chunked, and nothing else"),
    ("Only Transfer-Encoding", "Transfer-Encoding is chunked, and nothing else"),
    ("illegal chunk header", "the size of a chunk is a hexadecimal number"),
    ("chunk size too long", "the size of a chunk has more than 16 digits"),
    ("malformed chunk footer", "a chunk does not end where its size says"),
    ("peer closed", "the connection was closed in the middle of the body"),
    ("peer unexpectedly closed", "the connection was closed in the middle of the request"),
)

#: How every TLS connection begins.
_TLS_RECORD: Final = b"\x16"


class Fields:
    """An ordered multi-dict of strings: header fields (names in lower case) or query parameters."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._items: tuple[tuple[str, str], ...] = tuple(items)

    def get(self, name: str) -> str | None:
        """The first value of ``name``, or None."""
        return next((value for key, value in self._items if key == name), None)

    def get_all(self, name: str) -> tuple[str, ...]:
        return tuple(value for key, value in self._items if key == name)

    def items(self) -> tuple[tuple[str, str], ...]:
        return self._items

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self._items)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        # Names only: a value may be a key or a token, and reprs end up in logs.
        return f"Fields({', '.join(self)})"


class Headers(Fields):
    """Header fields; names compare without regard to case."""

    __slots__ = ()

    def get(self, name: str) -> str | None:
        return super().get(name.lower())

    def get_all(self, name: str) -> tuple[str, ...]:
        return super().get_all(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def tokens(self, name: str) -> tuple[str, ...]:
        """The members of a comma-separated header field, over all its lines, in their own case."""
        members = (member.strip() for value in self.get_all(name) for member in value.split(","))
        return tuple(member for member in members if member)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request head.

    ``target`` is what stood on the request line; ``segments`` are the percent-decoded parts of its path without empty
    ones (so an escaped slash stays inside its segment), and ``path`` joins them again, such slashes escaped.
    ``client`` is the client's address without its port, as a trusted proxy tells it where one is in between, "" on a
    Unix socket; ``secure`` says that the bytes came in TLS.
    """

    method: str
    target: str
    path: str
    segments: tuple[str, ...]
    query: Fields
    headers: Headers
    http_version: str
    client: str
    secure: bool

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in lower case; "" when the client named none."""
        return (self.headers.get("content-type") or "").partition(";")[0].strip().lower()

    @property
    def has_body(self) -> bool:
        return "transfer-encoding" in self.headers or bool(self.content_length)

    @property
    def wants_websocket(self) -> bool:
        """Whether this is an upgrade that may be answered by 101; anything less is plain HTTP (RFC 9110, 7.8)."""
        return (
            self.http_version == "1.1"
            and self.method == "GET"
            and [token.lower() for token in self.headers.tokens("upgrade")] == ["websocket"]
            and "upgrade" in (token.lower() for token in self.headers.tokens("connection"))
            and not self.has_body
        )

    @property
    def offered_subprotocols(self) -> tuple[str, ...]:
        return self.headers.tokens("sec-websocket-protocol")


def read_request(event: h11.Request, *, client: str, secure: bool, addresses: Addresses = _NO_PROXIES) -> HttpRequest:
    """``event`` as a request; ``client`` is the peer's address, which may be that of a proxy.

    Raises InvalidFrame and HeaderTooLarge for what h11 lets through and this server does not.
    """
    if len(event.headers) > MAX_HEADER_LINES:
        raise HeaderTooLarge(f"the request head has more than {MAX_HEADER_LINES} header lines")
    version = event.http_version.decode("ascii")
    if version not in ("1.0", "1.1"):
        raise InvalidFrame(f"HTTP/{version} is not spoken here; use HTTP/1.1")
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers)
    if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
        # Two framings: a proxy in front may believe the other one and let a second request be smuggled in.
        raise InvalidFrame("a request has Transfer-Encoding or Content-Length, never both; HTTP/1.0 has no chunks")
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
    """The error for what h11 could not read; ``first_byte`` is the first one of the connection."""
    if error.error_status_hint == 431 and in_body:
        return InvalidFrame(f"the line before a chunk, or after the last one, has more than {max_header_bytes} bytes")
    if error.error_status_hint == 431:
        return HeaderTooLarge(f"the request head has more than {max_header_bytes} bytes")
    if first_byte == _TLS_RECORD:
        return InvalidFrame("this looks like TLS, but this port speaks plain HTTP and WebSocket")
    said = str(error)
    words = next((words for beginning, words in _BROKEN if said.startswith(beginning)), None)
    return InvalidFrame("this is not HTTP/1.1" if words is None else f"this is not HTTP/1.1: {words}")


def split_target(target: str) -> tuple[tuple[str, ...], Fields]:
    """Decoded path segments and query of an origin-form, absolute-form or asterisk-form target (RFC 9112, 3.2)."""
    if target == "*":
        return ("*",), Fields()
    if "#" in target:
        raise InvalidFrame("a request target has no fragment")
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
    return segments, _split_query(raw_query)


def _split_absolute(target: str) -> tuple[str, str]:
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise InvalidFrame("the request target is not a URL") from error
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
        raise InvalidFrame("the request target must be a path or an http URL")
    return parts.path, parts.query


def _split_query(raw_query: str) -> Fields:
    if not raw_query:
        return Fields()
    try:
        pairs = parse_qsl(raw_query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as error:  # UnicodeDecodeError is one of them
        raise InvalidFrame("the query is not UTF-8 or has too many fields") from error
    if any("\0" in text for pair in pairs for text in pair):
        raise InvalidFrame("a query must not contain NUL")
    return Fields(pairs)


def _decode(part: str) -> str:
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidFrame("the path is not UTF-8") from error
