"""HTTP responses to errors: header fields by status, and JSON bodies in the shape of OpenAI's API."""

from __future__ import annotations

import math
from typing import Final

import orjson

from omni_ws.errors import MethodNotAllowed, OmniError, OriginNotAllowed, Unauthenticated, UpgradeRequired, http_status

#: Names and values of header fields, in the order in which they are sent.
HeaderList = list[tuple[str, str]]

_RETRY_AFTER_STATUSES: Final = frozenset({429, 503})


def error_type(error: OmniError) -> str:
    """The ``type`` of OpenAI's error object."""
    status = http_status(error) or 500
    if isinstance(error, Unauthenticated):
        return "authentication_error"
    if isinstance(error, OriginNotAllowed):
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_object(error: OmniError) -> dict[str, str | None]:
    """OpenAI's error object, the value of ``error`` in a JSON body and in the data of an ``event: error``."""
    return {"message": error.message, "type": error_type(error), "param": error.param, "code": error.code}


def error_headers(error: OmniError) -> HeaderList:
    """The header fields that a response with the status of ``error`` has (RFC 9110, sections 10.2.3 and 15.5)."""
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
    """The JSON body of the response."""
    return orjson.dumps({"error": error_object(error)})
