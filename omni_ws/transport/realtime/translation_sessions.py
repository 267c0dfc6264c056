"""``/v1/realtime/translations``: OpenAI's translation sessions over WebSocket, their dialect, and client secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import FinalChunk, InputChunk, Modality, OutputChunk, OutputModality, Task, WordsKnown
from omni_ws.core.quota import Share, beyond_ordinary, memory_of
from omni_ws.engine.base import AnswerOptions
from omni_ws.engine.composed.parts import has_model
from omni_ws.errors import InvalidValue, OmniError, UnknownType, UnsupportedParameter
from omni_ws.service import new_id
from omni_ws.service.conversation.output_log import (
    InputHeard,
    RequestWarning,
    ServerMessage,
)
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.session import Session, Sessions
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
from omni_ws.transport.realtime.items import Event, SessionDialect
from omni_ws.transport.realtime.session import RealtimeConnection, accepted, serve_session
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import read
from omni_ws.wire.realtime_session import (
    PCM_RATE,
    TranslationAbilities,
    TranslationFields,
    merged_translation,
    read_client_secret,
    translation_config,
    translation_object,
)
from omni_ws.wire.server_frames import SpeechConfirmedFrame, SpeechStartedFrame

#: The times in events are multiples of this, as OpenAI's are.
FRAME_MS: Final = 200
#: The longest session; the client is told when it expires.
MAX_SESSION_SEC: Final = 24 * 3600


def check_translates(factory: SessionFactory) -> None:
    """Raise UnsupportedParameter, naming what is missing, if the engine of this server cannot translate speech."""
    able = factory.engine.capabilities
    missing = ""
    if not factory.speech_workers.turn_detection_types or not able.languages or not able.transcripts:
        missing = "a recogniser that knows languages: start the server with --languages, or with --asr whisper:base"
    elif not has_model(factory.engine) or Task.CHAT not in able.tasks:
        missing = "a language model, and rules answer here: start the server with --llm URL, or with --llm qwen"
    elif OutputModality.AUDIO not in able.output_modalities:
        missing = "a voice: start the server with --tts"
    if missing:
        raise UnsupportedParameter(f"translation needs {missing}", param="model")


def translation_settings(session: TranslationFields, factory: SessionFactory) -> dict[str, Any]:
    """Return the fields of ``session_config`` for ``session`` on this server. Raises UnsupportedParameter."""
    able = factory.engine.capabilities
    return translation_config(
        session,
        TranslationAbilities(
            speech_languages=able.speech_languages,
            voice_languages=able.voice_languages,
            max_tokens="max_tokens" in able.sampling,
            cleans_audio=factory.speech_workers.cleans_audio,
        ),
    )


class TranslationDialect(SessionDialect):
    """The SessionDialect of OpenAI's translation sessions: speech in one language becomes speech in another.

    Turn detection cuts the speech into utterances. Each utterance is a request without a history: the LLM translates
    it, and a voice speaks it in the target language. Requests are answered one after another, and speech interrupts
    none.
    """

    def __init__(self, session: Session, factory: SessionFactory, bound: TranslationFields, *, model: str) -> None:
        """``bound`` is the session object to begin with; ``model`` is the name that the client gave.

        Raises what ``check_translates`` raises, and the error of a setting that is refused.
        """
        super().__init__()
        check_translates(factory)
        self._owner = session
        self._conversation = session.conversation
        self._factory = factory
        self._model = model
        self._session = bound
        self._settings_share = Share(self._conversation.account)
        #: Bytes of the audio so far.
        self._heard = 0
        #: The requests that have no final yet.
        self._open: set[str] = set()
        #: Whether the client has ended the session, and whether all speech before that was heard.
        self._closing = self._heard_all = False
        #: The request whose text was sent last, for each kind of text.
        self._told: dict[OutputModality, str] = {}
        self._expires_at = int(time.time()) + MAX_SESSION_SEC
        self._configure(bound)
        self._expiry = asyncio.get_running_loop().call_later(MAX_SESSION_SEC, self._finish)

    def connect(
        self, send: Callable[[Iterable[Event]], None], output_cleared: Callable[[str | None], None]
    ) -> list[Event]:
        super().connect(send, output_cleared)
        return [{"type": "session.created", "session": self._session_object()}]

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        match fields["type"]:
            case "session.input_audio_buffer.append":
                self._append(read(fields.get("audio"), bytes, "audio"), now)
            case "session.update":
                session = merged_translation(self._session, object_field(fields, "session"))
                self._configure(session)
                self._session = session
                self._send([{"type": "session.updated", "session": self._session_object()}])
            case "session.close":
                self._finish()
            case kind:
                raise UnknownType(f"unknown event type {kind[:64]!r}", param="type")

    def render(self, message: ServerMessage) -> Iterator[Event]:
        match message:
            case OutputChunk():
                yield from self._output(message)
                if message.late:
                    self._end(message.request_id)
            case SpeechStartedFrame(request_id=str(request_id)) | SpeechConfirmedFrame(request_id=str(request_id)):
                self._open.add(request_id)
            case FinalChunk(words=WordsKnown.NOT_YET) if self._session.wants_transcripts:
                pass  # its transcript follows
            case FinalChunk(request_id=request_id):
                self._end(request_id)
            case InputHeard():
                self._heard_all = True
                self._conversation.finish()
                self._close_if_done()
            case OmniError(request_id=None):
                self._reported = message
                yield self.error(message)
            case OmniError() | RequestWarning():  # of one utterance; those after it are translated
                yield self.error(message.error if isinstance(message, RequestWarning) else message)

    def close(self) -> None:
        self._expiry.cancel()
        self._settings_share.resize(0)

    # the session

    def _session_object(self) -> dict[str, Any]:
        return translation_object(
            self._session, session_id=self._owner.session_id, model=self._model, expires_at=self._expires_at
        )

    def _configure(self, session: TranslationFields) -> None:
        self._settings_share.resize(beyond_ordinary(memory_of(session)))
        self._conversation.configure(translation_settings(session, self._factory))
        self._conversation.answer_with(AnswerOptions(interprets_into=session.language))

    def _append(self, audio: bytes, now: float) -> None:
        if self._closing:
            raise InvalidValue("the session is closing", param="type")
        if len(audio) % 2:
            raise InvalidValue("audio must be whole samples of 16 bits", param="audio")
        chunk = InputChunk(Modality.AUDIO, audio)
        self._conversation.configuration.check_chunk(chunk)
        self._conversation.receive_chunk(chunk, now=now)
        self._heard += len(audio)

    def _finish(self) -> None:
        """End the session once all speech so far is translated."""
        if self._closing:
            return
        self._closing = True
        listener = self._conversation.listener
        assert listener is not None, "a session that translates detects turns"
        listener.mark()

    def _end(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._heard_all and not self._open:
            self._send([{"type": "session.closed"}])
            self._owner.end(None)

    # what was said

    @property
    def _elapsed_ms(self) -> int:
        """The length of the audio received so far, in milliseconds, rounded down to whole frames."""
        return self._heard * 1000 // (2 * PCM_RATE) // FRAME_MS * FRAME_MS

    def _output(self, chunk: OutputChunk) -> Iterator[Event]:
        match chunk.modality:
            case OutputModality.AUDIO if chunk.payload:
                yield {
                    "type": "session.output_audio.delta",
                    "delta": chunk.payload,
                    "sample_rate": PCM_RATE,
                    "channels": 1,
                    "format": "pcm16",
                    "elapsed_ms": self._elapsed_ms,
                }
            case OutputModality.TEXT if chunk.text:
                yield self._text("session.output_transcript.delta", chunk)
            case OutputModality.TRANSCRIPT if chunk.text and not chunk.interim and self._session.wants_transcripts:
                yield self._text("session.input_transcript.delta", chunk)

    def _text(self, kind: str, chunk: OutputChunk) -> Event:
        """Return the event for a piece of text. A blank separates the texts of two requests: clients join all texts."""
        before = self._told.get(chunk.modality)
        self._told[chunk.modality] = chunk.request_id
        apart = before not in (None, chunk.request_id) and not chunk.text[:1].isspace()
        return {"type": kind, "delta": f" {chunk.text}" if apart else chunk.text, "elapsed_ms": self._elapsed_ms}


# ``/v1/realtime/translations``: the front end of OpenAI's translation sessions over WebSocket, and their secrets.


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
        """Respond with a new client secret for translation sessions.

        Raises Unauthenticated, RateLimited if the key has too many secrets, ModelNotFound, and the error of a setting
        that is refused, or of a server that cannot translate.
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
