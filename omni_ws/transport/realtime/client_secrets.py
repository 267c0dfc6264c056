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
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.shared_counts import KNOW_SECRET
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.realtime.effects import abilities_of
from omni_ws.wire.realtime_events import read
from omni_ws.wire.realtime_session import (
    SessionFields,
    merged_session,
    read_client_secret,
    session_config,
    session_object,
)

CLIENT_SECRETS_PATH: Final = "/v1/realtime/client_secrets"
#: Limit of a request body, which is mostly the instructions and tools of a session.
MAX_BODY_BYTES: Final = 256 * 1024


class ClientSecretRoutes(FrontEnd):
    """The front end that creates client secrets. If keys are configured, it needs a key: a secret does not do."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator, secrets: ClientSecrets) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._secrets = secrets
        if sessions.group is not None:
            sessions.group.on(KNOW_SECRET, self._know)

    async def _know(self, made: tuple[int, bytes, ClientSecret]) -> None:
        """Keep a secret that another worker made: the Unix time of its expiry, its digest, and the secret."""
        expires_at, digest, secret = made
        self._secrets.keep(digest, secret, until=asyncio.get_running_loop().time() + expires_at - time.time())

    def register(self, router: Router) -> None:
        if self._sessions.config.streaming_input.enabled:
            router.add("POST", CLIENT_SECRETS_PATH, self.create)

    async def create(self, exchange: HttpExchange) -> None:
        """Create a secret.

        Raises Unauthenticated, RateLimited if the key has too many, ModelNotFound, and the error of session settings
        that are not accepted.
        """
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        given = body.session or {}
        if given.get("model") is not None:
            self._sessions.any_model.check(read(given["model"], str, "session.model"))
        session = merged_session(SessionFields(), given)
        shown = self._shown(session)
        secret = ClientSecret(key=key, session=msgspec.json.encode(session))
        now = asyncio.get_running_loop().time()
        value = self._secrets.create(secret, lifetime=body.lifetime, now=now)
        expires_at = int(time.time()) + body.lifetime
        if (group := self._sessions.group) is not None:
            await group.ask_others(KNOW_SECRET, (expires_at, digest_of(value), secret))
        await exchange.respond_json(
            200, {"value": value, "expires_at": expires_at, "session": shown}, [("Cache-Control", "no-store")]
        )

    def _shown(self, session: SessionFields) -> dict[str, Any]:
        """Return the session object of ``session.created`` for these settings."""
        configuration = self._sessions.configuration(STREAM_FORMATS, any_model=True)
        config = configuration.apply(session_config(session, abilities_of(self._sessions)))
        return session_object(session, config, session_id=new_id("sess_"))


#: The prefix of every client secret, for which OpenAI's SDKs for browsers look.
PREFIX: Final = "ek_"
#: Limits on the secrets of one key that have not expired: their number, and the size of their settings.
MAX_SECRETS: Final = 1024
MAX_SESSION_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecret:
    """The meaning of a client secret: the key that created it, and the initial settings of its sessions, as JSON.

    ``kind`` is that of its sessions, "realtime" or "translation"; it is good for no others.
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


def digest_of(value: str) -> bytes:
    """Return the digest by which a secret is kept."""
    return hashlib.sha256(value.encode("latin-1")).digest()
