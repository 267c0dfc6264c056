"""``/v1/realtime/translations``: the front end of OpenAI's translation sessions over WebSocket, and their secrets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec

from omni_ws.config.keys import ApiKey
from omni_ws.errors import OmniError
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import STREAM_FORMATS
from omni_ws.service.sessions.session import Sessions
from omni_ws.transport.http.access import (
    MAX_BODY_BYTES,
    ClientSecret,
    issued,
)
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.realtime.session import RealtimeConnection, accepted, serve_session
from omni_ws.transport.realtime.translation import (
    MAX_SESSION_SEC,
    TranslationDialect,
    check_translates,
    translation_settings,
)
from omni_ws.wire.realtime_events import read
from omni_ws.wire.realtime_session import TranslationFields, merged_translation, read_client_secret, translation_object

TRANSLATIONS_PATH: Final = "/v1/realtime/translations"
TRANSLATION_SECRETS_PATH: Final = "/v1/realtime/translations/client_secrets"
#: Label of the sessions in metrics and logs.
TRANSLATION_ORIGIN: Final = "translation"
#: The name of the model for a client that names none.
DEFAULT_MODEL: Final = "gpt-realtime-translate"
#: A client secret's kind, see ClientSecret.
TRANSLATION: Final = "translation"


class Translations(SessionFrontEnd):
    """The front end of translation sessions: accepts their handshakes, and creates client secrets for them."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, Sessions(app.sessions, origin=TRANSLATION_ORIGIN, grace=0, any_model=True))
        self._rounds = PeerRounds.configured(self._config.streaming_input)

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
            router.add("GET", TRANSLATIONS_PATH, needs_upgrade)
            router.add_websocket(TRANSLATIONS_PATH, self.upgrade)
            router.add("POST", TRANSLATION_SECRETS_PATH, self.create_secret)

    # sessions

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises Unauthenticated or ModelNotFound; an event reports all other errors."""
        key, secret = self._identified(request, TRANSLATION)
        model, bound = DEFAULT_MODEL, TranslationFields()
        if secret is not None:
            model, bound = msgspec.json.decode(secret.session, type=tuple[str, TranslationFields])
        model = request.query.get("model") or model
        self._sessions.any_model.check(model)
        serve = partial(serve_session, request.client, partial(self._begin, key, request.client, bound, model))
        return accepted(request, self._sessions, key, serve=serve, route=TRANSLATIONS_PATH)

    async def _begin(
        self, key: ApiKey | None, address: str, bound: TranslationFields, model: str, connection: StreamConnection
    ) -> RealtimeConnection:
        """Open a session, and attach it to ``connection``. Raises what ``Sessions.admit`` and the dialect raise."""
        session = await self._live.admit(key, client=address)
        try:
            dialect = TranslationDialect(session, self._sessions, bound, model=model)
        except OmniError:
            session.end(None)
            raise
        attachment = RealtimeConnection(connection, session, dialect, rounds=self._rounds)
        session.attach(attachment)
        return attachment

    # client secrets

    async def create_secret(self, exchange: HttpExchange) -> None:
        """Create a client secret.

        Raises Unauthenticated, RateLimited if the key has too many, ModelNotFound, and the error of settings that are
        not accepted, or of a server that cannot translate.
        """
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        check_translates(self._sessions)
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        given: Mapping[str, Any] = body.session or {}
        model = read(given.get("model") or DEFAULT_MODEL, str, "session.model")
        self._sessions.any_model.check(model)
        session = merged_translation(TranslationFields(), given)
        self._sessions.configuration(STREAM_FORMATS, any_model=True).apply(
            translation_settings(session, self._sessions)
        )
        secret = ClientSecret(key=key, session=msgspec.json.encode((model, session)), kind=TRANSLATION)
        told = await issued(self._secrets, secret, lifetime=body.lifetime, group=self._sessions.group)
        shown = translation_object(
            session, session_id=new_id("sess_"), model=model, expires_at=told["expires_at"] + MAX_SESSION_SEC
        )
        await exchange.respond_json(200, {**told, "session": shown}, [("Cache-Control", "no-store")])
