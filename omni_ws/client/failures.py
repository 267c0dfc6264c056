"""Errors of a client: those of the server, by their codes, and those of the connection."""

from __future__ import annotations

from typing import Final

import orjson
from msgspec import UnsetType

from omni_ws.errors import MethodNotAllowed, OmniError, RateLimited, ShuttingDown, leaves
from omni_ws.wire.server_frames import ErrorFields


class ConnectionFailed(ConnectionError):
    """No session could be opened.

    Nothing listens at the address, it did not answer in time, or it does not speak this protocol.
    """


class ConnectionLost(ConnectionError):
    """The session ended early, without an error from the server.

    The connection broke and was not re-established, the server is going away, or the session was closed by its owner.
    """


class ServerError(OmniError):
    """An error from the server whose code is unknown to this version; ``code`` is as received."""

    def __init__(self, message: str, *, code: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self._code = code

    @property
    def code(self) -> str:
        return self._code


_BY_CODE: Final = {error.wire.code: error for error in leaves()}
#: For responses without an error code, such as those of proxies.
_BY_STATUS: Final = {
    error.wire.http_status: error
    for error in (_BY_CODE[code] for code in ("unauthenticated", "origin_not_allowed", "not_found", "upgrade_required"))
} | {429: RateLimited, 503: ShuttingDown}


def is_retryable(error: OmniError) -> bool:
    """Returns whether a later attempt may succeed."""
    return error.retryable if isinstance(error, ServerError) else error.wire.retryable


def error_from_fields(fields: ErrorFields) -> OmniError:
    """Converts the content of an ``error`` frame to an exception."""
    error = _build(_BY_CODE.get(fields.code), fields.code, fields.message, retryable=fields.retryable)
    error.param = fields.param
    error.sequence_id = fields.sequence_id
    error.request_id = fields.request_id
    error.ref = None if isinstance(fields.ref, UnsetType) else fields.ref
    error.retry_after_ms = fields.retry_after_ms
    return error


def error_from_response(status: int, body: bytes) -> OmniError:
    """Converts an HTTP response that refuses the handshake to an exception."""
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
