"""``POST /v1/realtime/client_secrets``: short-lived keys for clients that must not know the real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import orjson

from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.shared_counts import KNOW_SECRET
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.realtime.client_secrets import ClientSecret, ClientSecrets, digest_of
from omni_ws.transport.realtime.commands import abilities_of
from omni_ws.wire.realtime_events import text_field
from omni_ws.wire.realtime_session import merged_session, read_client_secret, session_config, session_object

CLIENT_SECRETS_PATH: Final = "/v1/realtime/client_secrets"
#: Of a body; a session's settings are mostly its instructions and tools.
MAX_BODY_BYTES: Final = 256 * 1024


class ClientSecretRoutes(FrontEnd):
    """The handler. It needs a real key where keys are configured: one secret cannot create another."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator, secrets: ClientSecrets) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._secrets = secrets
        if sessions.group is not None:
            sessions.group.on(KNOW_SECRET, self._know)

    async def _know(self, made: tuple[int, bytes, ClientSecret]) -> None:
        """Another worker has made a secret, which is good until this Unix time."""
        expires_at, digest, secret = made
        self._secrets.keep(digest, secret, until=asyncio.get_running_loop().time() + expires_at - time.time())

    def register(self, router: Router) -> None:
        if self._sessions.config.streaming_input.enabled:
            router.add("POST", CLIENT_SECRETS_PATH, self.create)

    async def create(self, exchange: HttpExchange) -> None:
        """Create a secret.

        Raises Unauthenticated, RateLimited where the key has too many, ModelNotFound, and what its sessions would be
        refused with.
        """
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        session = body.session or {}
        if session.get("model") is not None:
            self._sessions.any_model.check(text_field(session, "model", place="session."))
        shown = self._shown(session)
        secret = ClientSecret(key=key, session=orjson.dumps(session))
        now = asyncio.get_running_loop().time()
        value = self._secrets.create(secret, lifetime=body.lifetime, now=now)
        expires_at = int(time.time()) + body.lifetime
        if (group := self._sessions.group) is not None:
            await group.ask_others(KNOW_SECRET, (expires_at, digest_of(value), secret))
        await exchange.respond_json(
            200, {"value": value, "expires_at": expires_at, "session": shown}, [("Cache-Control", "no-store")]
        )

    def _shown(self, session: Mapping[str, Any]) -> dict[str, Any]:
        """The session object that a session with these settings begins with."""
        start = merged_session({}, session)
        configuration = self._sessions.configuration(STREAM_FORMATS, any_model=True)
        config = configuration.apply(session_config(start, abilities_of(self._sessions)))
        return session_object(start, config, session_id=new_id("sess_"))
