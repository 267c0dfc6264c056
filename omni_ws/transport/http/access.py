"""Access to the server: API keys, client secrets, and the checks and fields of CORS (Fetch standard, section 3.2)."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import hmac
import logging
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import InvalidFrame, OriginNotAllowed, RateLimited, Unauthenticated
from omni_ws.service.sessions.shared_counts import KNOW_SECRET, WorkerGroup
from omni_ws.transport.http.request import HeaderList, HttpRequest
from omni_ws.wire.realtime_session import SessionFields

logger = logging.getLogger(__name__)

# API keys

#: Prefixes of subprotocols that carry a key: pages cannot set header fields of a WebSocket handshake.
KEY_SUBPROTOCOLS: Final = ("omni-api-key.", "openai-insecure-api-key.")


class Authenticator:
    """Checks the keys of HTTP requests and WebSocket handshakes against the digests of the configured keys.

    If no keys are configured, all requests pass, whatever key they present.
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

    ``*`` in ``allowed`` allows any page. A request without ``Origin`` is allowed.
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
    """Return whether the request is a CORS preflight: a browser asks by OPTIONS whether it may send another request."""
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
    """Return the CORS fields of the response to an allowed origin's preflight, except those of ``response_headers``.

    All requested header names are granted. Raises InvalidFrame for a header name that is not ASCII.
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


#: Limit of the body of a request for a secret, which is mostly the instructions and tools of a session.
MAX_BODY_BYTES: Final = 256 * 1024
#: The kind of the secrets of the native WebSocket.
NATIVE: Final = "native"
#: The prefix of every client secret, for which OpenAI's SDKs for browsers look.
PREFIX: Final = "ek_"
#: Limits on the secrets of one key that have not expired: their number, and the size of their settings.
MAX_SECRETS: Final = 1024
MAX_SESSION_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecret:
    """The record of a client secret: the key that created it, and the initial settings of its sessions, as JSON.

    ``kind`` is the kind of session that the secret can open: "realtime", "translation" or "native".
    """

    key: ApiKey | None
    session: bytes = field(repr=False)
    kind: str = "realtime"

    def settings(self) -> SessionFields:
        return msgspec.json.decode(self.session, type=SessionFields)


@dataclass(slots=True)
class _Outstanding:
    """The unexpired client secrets of one key, by digest; ``expiries`` is a heap of pairs of expiry time and digest."""

    secrets: dict[bytes, ClientSecret] = field(default_factory=dict)
    expiries: list[tuple[float, bytes]] = field(default_factory=list)
    session_bytes: int = 0

    def keep(self, digest: bytes, secret: ClientSecret, *, until: float) -> None:
        self.secrets[digest] = secret
        self.session_bytes += len(secret.session)
        heapq.heappush(self.expiries, (until, digest))

    def drop_expired(self, now: float) -> None:
        while self.expiries and self.expiries[0][0] <= now:
            _, digest = heapq.heappop(self.expiries)
            self.session_bytes -= len(self.secrets.pop(digest).session)


class ClientSecrets:
    """The unexpired client secrets of all keys. Each may be used any number of times.

    They are kept as digests, in memory alone: a restart of the server invalidates them. ``now`` and ``until`` are times
    of a monotonic clock in seconds.
    """

    def __init__(self) -> None:
        self._by_key: dict[str | None, _Outstanding] = {}

    def create(self, secret: ClientSecret, *, lifetime: float, now: float) -> str:
        """Create a value for ``secret``, keep its digest for ``lifetime`` seconds, and return the value.

        Raises RateLimited if the secret's key has too many secrets, or their settings are too large together.
        """
        outstanding = self._by_key.setdefault(key_name(secret.key), _Outstanding())
        outstanding.drop_expired(now)
        size = outstanding.session_bytes + len(secret.session)
        if len(outstanding.secrets) >= MAX_SECRETS or size > MAX_SESSION_BYTES:
            wait = outstanding.expiries[0][0] - now
            raise RateLimited(
                "too many client secrets have not expired; use one for several sessions, or let them expire sooner",
                retry_after_ms=int(1000 * wait) + 1,
            )
        value = PREFIX + secrets.token_hex(16)
        self.keep(digest_of(value), secret, until=now + lifetime)
        return value

    def keep(self, digest: bytes, secret: ClientSecret, *, until: float) -> None:
        """Keep ``secret``, whose value has this digest, until the time ``until``."""
        self._by_key.setdefault(key_name(secret.key), _Outstanding()).keep(digest, secret, until=until)

    def find(self, value: str | None, now: float) -> ClientSecret | None:
        """Find the secret with this value; None if there is no such secret, or it has expired."""
        if value is None or not value.startswith(PREFIX):
            return None
        digest = digest_of(value)
        for outstanding in self._by_key.values():
            outstanding.drop_expired(now)
            if (found := outstanding.secrets.get(digest)) is not None:
                return found
        return None


async def issued(
    secrets: ClientSecrets, secret: ClientSecret, *, lifetime: int, group: WorkerGroup | None
) -> dict[str, Any]:
    """Create a value for ``secret``, share it with the workers of ``group``, and return the value and its expiry.

    The client receives these two fields as they are. ``lifetime`` is in seconds. Raises RateLimited.
    """
    value = secrets.create(secret, lifetime=lifetime, now=asyncio.get_running_loop().time())
    expires_at = int(time.time()) + lifetime
    if group is not None:
        await group.ask_others(KNOW_SECRET, (expires_at, digest_of(value), secret))
    return {"value": value, "expires_at": expires_at}


def digest_of(value: str) -> bytes:
    """Return the digest of a client secret's value, by which ClientSecrets keeps the secret."""
    return hashlib.sha256(value.encode("latin-1")).digest()
