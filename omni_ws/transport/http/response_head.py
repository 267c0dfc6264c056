"""The head of a response, with the fields that all responses of this server have."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import h11

from omni_ws.transport.http.error_response import HeaderList

SERVER_NAME: Final = "omni_ws"


def response_head(status: int, headers: HeaderList) -> h11.Response:
    """Return the head of a response, with the fields that all responses of this server have."""
    return _head_at(int(time.time()), status, tuple(headers))


@lru_cache(maxsize=64)
def _head_at(second: int, status: int, headers: tuple[tuple[str, str], ...]) -> h11.Response:
    """Build a head. Equal ones of the same second are one: to build and check it takes longer than to send it."""
    fields = [("Date", formatdate(second, usegmt=True)), ("Server", SERVER_NAME), *headers]
    return h11.Response(status_code=status, headers=fields, reason=_reason(status))


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
