"""Client secrets: short-lived keys for clients that must not know the real one, such as a page in a browser."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import RateLimited
from omni_ws.service.sessions.shared_counts import KNOW_SECRET, WorkerGroup
from omni_ws.wire.realtime_session import SessionFields

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
    """The meaning of a client secret: the key that created it, and the initial settings of its sessions, as JSON.

    ``kind`` is that of its sessions, "realtime", "translation" or "native"; it is good for no others.
    """

    key: ApiKey | None
    session: bytes = field(repr=False)
    kind: str = "realtime"

    def settings(self) -> SessionFields:
        return msgspec.json.decode(self.session, type=SessionFields)


@dataclass(slots=True)
class _Outstanding:
    """The secrets of one key that have not expired, by digest; ``expiries`` is a heap of times and digests."""

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
    """The client secrets of all keys that have not expired. Each may be used any number of times.

    They are kept as digests, in memory alone: a restart of the server invalidates them. ``now`` is a monotonic time in
    seconds.
    """

    def __init__(self) -> None:
        self._by_key: dict[str | None, _Outstanding] = {}

    def create(self, secret: ClientSecret, *, lifetime: float, now: float) -> str:
        """Keep a new secret, and return its value. Raises RateLimited if its key has too many secrets."""
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
        """Keep a secret by its digest, until this monotonic time."""
        self._by_key.setdefault(key_name(secret.key), _Outstanding()).keep(digest, secret, until=until)

    def find(self, value: str | None, now: float) -> ClientSecret | None:
        """Find the secret with this value; None if there is none, or it has expired."""
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
    """Keep a new secret, here and in the other workers of ``group``, and return what its client is told of it.

    Raises RateLimited.
    """
    value = secrets.create(secret, lifetime=lifetime, now=asyncio.get_running_loop().time())
    expires_at = int(time.time()) + lifetime
    if group is not None:
        await group.ask_others(KNOW_SECRET, (expires_at, digest_of(value), secret))
    return {"value": value, "expires_at": expires_at}


def digest_of(value: str) -> bytes:
    """Return the digest by which a secret is kept."""
    return hashlib.sha256(value.encode("latin-1")).digest()
