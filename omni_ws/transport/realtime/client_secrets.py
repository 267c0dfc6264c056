"""``/v1/realtime/client_secrets``: the front end that creates client secrets for the Realtime API."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec

from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import STREAM_FORMATS
from omni_ws.service.sessions.shared_counts import KNOW_SECRET
from omni_ws.transport.http.access import MAX_BODY_BYTES, ClientSecret, issued
from omni_ws.transport.http.application import Application, FrontEnd, Router
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


class ClientSecretRoutes(FrontEnd):
    """The front end that creates client secrets. If keys are configured, it needs a key: a secret does not do."""

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        if app.sessions.group is not None:
            app.sessions.group.on(KNOW_SECRET, self._know)

    async def _know(self, made: tuple[int, bytes, ClientSecret]) -> None:
        """Keep a secret that another worker made: the Unix time of its expiry, its digest, and the secret."""
        expires_at, digest, secret = made
        self._secrets.keep(digest, secret, until=asyncio.get_running_loop().time() + expires_at - time.time())

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
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
        told = await issued(self._secrets, secret, lifetime=body.lifetime, group=self._sessions.group)
        await exchange.respond_json(200, {**told, "session": shown}, [("Cache-Control", "no-store")])

    def _shown(self, session: SessionFields) -> dict[str, Any]:
        """Return the session object of ``session.created`` for these settings."""
        configuration = self._sessions.configuration(STREAM_FORMATS, any_model=True)
        config = configuration.apply(session_config(session, abilities_of(self._sessions)))
        return session_object(session, config, session_id=new_id("sess_"))
