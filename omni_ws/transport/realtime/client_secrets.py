"""ClientSecrets: short-lived keys for clients that must not know the real one, such as a page in a browser."""

from __future__ import annotations

import hashlib
import heapq
import secrets
from dataclasses import dataclass, field
from typing import Final

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import RateLimited

#: Every client secret begins with it, and OpenAI's SDKs for browsers look for it.
PREFIX: Final = "ek_"
#: What one key may have outstanding; keys do not take each other's room.
MAX_SECRETS: Final = 1024
MAX_SESSION_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecret:
    """What a client secret stands for: the key that made it, and the settings that its sessions begin with, as JSON."""

    key: ApiKey | None
    session: bytes = field(repr=False)


@dataclass(slots=True)
class _Outstanding:
    """The secrets of one key, by their digests; ``expiries`` is a heap of times with these digests."""

    secrets: dict[bytes, ClientSecret] = field(default_factory=dict)
    expiries: list[tuple[float, bytes]] = field(default_factory=list)
    session_bytes: int = 0

    def drop_expired(self, now: float) -> None:
        while self.expiries and self.expiries[0][0] <= now:
            _, digest = heapq.heappop(self.expiries)
            self.session_bytes -= len(self.secrets.pop(digest).session)


class ClientSecrets:
    """The client secrets that have not expired, of all keys. Each may be used any number of times.

    They are kept as digests, in memory alone: a restart of the server invalidates them. ``now`` is a monotonic time in
    seconds.
    """

    def __init__(self) -> None:
        self._by_key: dict[str | None, _Outstanding] = {}

    def create(self, secret: ClientSecret, *, lifetime: float, now: float) -> str:
        """Return the value of a new secret. Raises RateLimited where its key has too many."""
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
        """Know a secret that was made by another worker of the server, by its digest."""
        outstanding = self._by_key.setdefault(key_name(secret.key), _Outstanding())
        outstanding.secrets[digest] = secret
        outstanding.session_bytes += len(secret.session)
        heapq.heappush(outstanding.expiries, (until, digest))

    def find(self, value: str | None, now: float) -> ClientSecret | None:
        """The secret with this value; None where there is none, or it has expired."""
        if value is None or not value.startswith(PREFIX):
            return None
        digest = digest_of(value)
        for outstanding in self._by_key.values():
            outstanding.drop_expired(now)
            if (found := outstanding.secrets.get(digest)) is not None:
                return found
        return None


def digest_of(value: str) -> bytes:
    """By what a secret is known."""
    return hashlib.sha256(value.encode("latin-1")).digest()
