"""Authenticator: API keys of HTTP requests and WebSocket handshakes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from omni_ws.config.keys import ApiKey
from omni_ws.errors import Unauthenticated
from omni_ws.transport.http.request import HttpRequest

#: Prefixes of subprotocols that carry a key: pages cannot set header fields of a WebSocket handshake.
KEY_SUBPROTOCOLS: Final = ("omni-api-key.", "openai-insecure-api-key.")


class Authenticator:
    """Checks keys against their digests. Where no keys are configured, all requests pass, whatever they present."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def has_keys(self) -> bool:
        """Whether any keys are configured."""
        return bool(self._keys)

    def authenticate(self, request: HttpRequest) -> ApiKey | None:
        """Return the key of a request; None where no keys are configured.

        Raises Unauthenticated for a missing, malformed or unknown key.
        """
        return self._find(_needed_key(request)) if self._keys else None

    def authenticate_header(self, authorization: str | None) -> ApiKey | None:
        """Do the same as ``authenticate``, for protocols that have only the ``Authorization`` field."""
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
    """The key that a request presents, known or not; None where there is none, or it is malformed."""
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
