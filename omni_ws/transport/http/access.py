"""Access to the server: API keys, and the checks and header fields of CORS (Fetch standard, section 3.2)."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Collection, Iterable
from functools import cache
from typing import Final
from urllib.parse import urlsplit

from omni_ws.config.keys import ApiKey
from omni_ws.errors import InvalidFrame, OriginNotAllowed, Unauthenticated
from omni_ws.transport.http.request import HeaderList, HttpRequest

logger = logging.getLogger(__name__)

# API keys

#: Prefixes of subprotocols that carry a key: pages cannot set header fields of a WebSocket handshake.
KEY_SUBPROTOCOLS: Final = ("omni-api-key.", "openai-insecure-api-key.")


class Authenticator:
    """Checks the keys of HTTP requests and WebSocket handshakes against their digests.

    If no keys are configured, all requests pass, whatever they present.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def has_keys(self) -> bool:
        """Whether any keys are configured."""
        return bool(self._keys)

    def named(self, name: str) -> ApiKey | None:
        """Return the key of this name; None if there is none."""
        return next((key for key in self._keys if key.name == name), None)

    def authenticate(self, request: HttpRequest) -> ApiKey | None:
        """Return the key of a request; None if no keys are configured.

        Raises Unauthenticated for a missing, malformed or unknown key.
        """
        return self._find(_needed_key(request)) if self._keys else None

    def authenticate_header(self, authorization: str | None) -> ApiKey | None:
        """Do what ``authenticate`` does, given only the value of the ``Authorization`` field."""
        if not self._keys:
            return None
        if authorization is None:
            raise Unauthenticated("missing API key; send 'Authorization: Bearer KEY'")
        return self._find(_bearer(authorization))

    def _find(self, presented_key: str) -> ApiKey:
        # Header fields were decoded as Latin-1; this restores the bytes that the client sent.
        presented = hashlib.sha256(presented_key.encode("latin-1")).digest()
        found: ApiKey | None = None
        for key in self._keys:
            # All keys are compared in constant time, so that timing reveals nothing about them.
            if hmac.compare_digest(presented, key.key_sha256):
                found = key
        if found is None:
            raise Unauthenticated("this key is not known here")
        return found


def presented_key(request: HttpRequest) -> str | None:
    """Return the key that a request presents, known or not; None if there is none, or it is malformed."""
    try:
        return _needed_key(request)
    except Unauthenticated:
        return None


def _needed_key(request: HttpRequest) -> str:
    authorization = request.headers.get("authorization")
    if authorization is not None:
        return _bearer(authorization)
    if request.wants_websocket:
        for entry in request.offered_subprotocols:
            for prefix in KEY_SUBPROTOCOLS:
                if entry.startswith(prefix):
                    return entry.removeprefix(prefix)
    raise Unauthenticated("missing API key; send 'Authorization: Bearer KEY'")


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("send the API key as 'Authorization: Bearer KEY'")
    if not key.strip():
        raise Unauthenticated("the API key is empty; send 'Authorization: Bearer KEY'")
    return key.strip()


# Pages of other origins

#: Methods without side effects: without CORS fields, a page of another origin cannot read the response.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_PREFLIGHT_LIFETIME_SEC: Final = 600
#: Characters of an ``Origin`` or ``Host`` that an error repeats; no valid name is longer.
_SHOWN_CHARACTERS: Final = 300
_EXPOSED: Final = "Retry-After, WWW-Authenticate, Location"


def check_origin(request: HttpRequest) -> None:
    """Raise InvalidFrame for an ``Origin`` that no browser sends."""
    origins = request.headers.get_all("origin")
    if len(origins) > 1:
        raise InvalidFrame("a request must have at most one Origin header field")
    for origin in origins:
        try:
            _ = urlsplit(origin).port
        except ValueError:
            raise InvalidFrame("the Origin header field is not a valid origin") from None
        if not origin.isascii():
            raise InvalidFrame("the Origin header field is not a valid origin")


def is_allowed_origin(request: HttpRequest, allowed: Collection[str]) -> bool:
    """Return whether pages of the request's ``Origin`` may use this server: its own pages, and those in ``allowed``.

    ``*`` in ``allowed`` allows any page.
    """
    origin = request.headers.get("origin")
    return origin is None or "*" in allowed or origin in allowed or _is_own_origin(request)


def origin_refused(request: HttpRequest) -> OriginNotAllowed:
    """Return the error for a page that may not use this server; log, once a process, how to allow pages."""
    _warn_of_refused_origins()
    origin = (request.headers.get("origin") or "")[:_SHOWN_CHARACTERS]
    return OriginNotAllowed(f"pages of {origin} are not allowed; allow them with --allow-origin {origin}")


def host_refused(request: HttpRequest) -> OriginNotAllowed:
    """Return the error for a ``Host`` that a server without API keys does not accept."""
    host = (request.headers.get("host") or "")[:_SHOWN_CHARACTERS]
    return OriginNotAllowed(f"Host {host} not allowed on a server without API keys; allow it with --allow-host")


@cache
def _warn_of_refused_origins() -> None:
    # Only the client is told which origin it was: the log has no text of clients.
    logger.warning(
        "refused a page of another origin; --allow-origin names those that may connect, and the page's error says "
        "which it is (behind a proxy that ends TLS, also the server's own page)"
    )


def _is_own_origin(request: HttpRequest) -> bool:
    """Return whether ``Origin`` names this server: the scheme, host and port that the request was sent to."""
    scheme = "https" if request.secure else "http"
    host = request.headers.get("host") or ""
    return (request.headers.get("origin") or "").lower() == f"{scheme}://{host}".lower()


def is_preflight(request: HttpRequest) -> bool:
    """Return whether the request is a CORS preflight: with OPTIONS, a browser asks whether it may send another one."""
    return (
        request.method == "OPTIONS"
        and "origin" in request.headers
        and "access-control-request-method" in request.headers
    )


def response_headers(request: HttpRequest, *, allowed: bool) -> HeaderList:
    """Return the CORS fields of a response. An origin that is not allowed gets only ``Vary``, for caches."""
    origin = request.headers.get("origin")
    if origin is None:
        return []
    if not allowed:
        return [("Vary", "Origin")]
    return [("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", _EXPOSED), ("Vary", "Origin")]


def preflight_headers(request: HttpRequest, methods: Iterable[str]) -> HeaderList:
    """Return the CORS fields of the response to an allowed origin's preflight. All requested header names are granted.

    Raises InvalidFrame for requested names that are not ASCII.
    """
    headers = [
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        ("Access-Control-Max-Age", str(_PREFLIGHT_LIFETIME_SEC)),
    ]
    wanted = request.headers.tokens("access-control-request-headers")
    if not all(map(str.isascii, wanted)):
        raise InvalidFrame("Access-Control-Request-Headers must be a list of header field names")
    if wanted:
        headers.append(("Access-Control-Allow-Headers", ", ".join(wanted)))
    if request.headers.get("access-control-request-private-network") == "true":
        headers.append(("Access-Control-Allow-Private-Network", "true"))
    return headers
