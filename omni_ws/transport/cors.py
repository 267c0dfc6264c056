"""The header fields by which a browser lets a page of an allowed origin read an answer (Fetch standard, CORS)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from omni_ws.transport.error_answer import HeaderList
from omni_ws.transport.http_request import HttpRequest

#: Methods that change nothing: an answer without CORS fields is already unreadable to a foreign page.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_PREFLIGHT_LIFETIME_SEC: Final = 600
_EXPOSED: Final = "Retry-After, WWW-Authenticate, Location"


def is_preflight(request: HttpRequest) -> bool:
    return (
        request.method == "OPTIONS"
        and "origin" in request.headers
        and "access-control-request-method" in request.headers
    )


def answer_headers(request: HttpRequest, *, allowed: bool) -> HeaderList:
    """For every answer. ``Vary`` also where the origin is not allowed: a cache must not hand that answer on."""
    origin = request.headers.get("origin")
    if origin is None:
        return []
    if not allowed:
        return [("Vary", "Origin")]
    return [("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", _EXPOSED), ("Vary", "Origin")]


def preflight_headers(request: HttpRequest, methods: Iterable[str]) -> HeaderList:
    """For the answer to a preflight of an allowed origin; the requested header names are granted as they are."""
    headers = [
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        ("Access-Control-Max-Age", str(_PREFLIGHT_LIFETIME_SEC)),
    ]
    wanted = request.headers.tokens("access-control-request-headers")
    if wanted:
        headers.append(("Access-Control-Allow-Headers", ", ".join(wanted)))
    if request.headers.get("access-control-request-private-network") == "true":
        headers.append(("Access-Control-Allow-Private-Network", "true"))
    return headers
