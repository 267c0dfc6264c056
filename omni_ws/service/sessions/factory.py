"""Makes the conversations of a server: one engine, one set of limits, many sessions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.core.addresses import Addresses
from omni_ws.core.audio_format import AudioEncoding
from omni_ws.core.quota import ByteBudget
from omni_ws.core.stream_limits import StreamLimits
from omni_ws.engine.base import Engine, EngineState
from omni_ws.engine.media_room import MediaRoom
from omni_ws.errors import EngineFailed, EngineOverloaded
from omni_ws.metrics import Metrics
from omni_ws.service.conversation.configuration import (
    LOCAL_MODEL,
    Configuration,
    ConfigurationRules,
    ServedModel,
)
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.limits import ConversationLimits
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.identifiers import new_id
from omni_ws.service.listening.workers import SpeechWorkers
from omni_ws.service.observing.accounts import Accounts
from omni_ws.service.observing.observer import ObservedSession, Observers, Origin, SessionIdentity
from omni_ws.service.observing.session_log import SessionLog
from omni_ws.service.sessions.admission import Admission
from omni_ws.service.sessions.stand_in_log import StandInLog

#: Audio that can be cut anywhere, for sessions that play it as it comes.
STREAM_FORMATS: Final = frozenset(
    {AudioEncoding.PCM16, AudioEncoding.F32, AudioEncoding.PCMU, AudioEncoding.PCMA, AudioEncoding.WAV}
)
#: And what HTTP answers may be besides.
FILE_FORMATS: Final = STREAM_FORMATS | {
    AudioEncoding.MP3,
    AudioEncoding.FLAC,
    AudioEncoding.OPUS,
    AudioEncoding.OGG,
}


@dataclass(frozen=True, slots=True)
class NewSession:
    conversation: Conversation
    outbox: Outbox


class SessionFactory:
    """``admission`` counts the sessions, ``budget`` the bytes that they hold together."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        keys: Iterable[ApiKey] = (),
        speech_workers: SpeechWorkers | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.speech_workers = speech_workers or SpeechWorkers(self.metrics)
        self.config = config
        self.addresses = Addresses(config.trusted_proxies)
        self.admission = Admission(
            max_sessions=config.limits.max_sessions, metrics=self.metrics, addresses=self.addresses, keys=keys
        )
        self.budget = ByteBudget(config.limits.max_held_bytes)
        self._stand_ins = StandInLog()
        self.media_room = MediaRoom(self.budget)
        self.observers = Observers()
        self.observers.add(
            Accounts(self.metrics, SessionLog(content=config.log_content)), every_chunk=False, every_output=False
        )
        #: Those that are there, for whoever looks at what they hold.
        self.conversations: WeakSet[Conversation] = WeakSet()
        streaming = config.streaming_input
        self._limits = ConversationLimits(
            stream=StreamLimits(
                reorder_window=streaming.reorder_window_chunks,
                reorder_timeout=streaming.reorder_timeout_sec,
                session_timeout=streaming.session_timeout_sec,
                max_chunk_bytes=streaming.max_chunk_bytes,
                max_held_bytes=streaming.max_payload_per_session,
            ),
            max_pending_requests=streaming.max_pending_requests,
            max_history_tokens=config.limits.max_history_tokens,
        )

    @property
    def model(self) -> ServedModel:
        """Engines in front of other servers know their model's name only once they have started."""
        names = self.config.served_model_name or (self.engine.model,)
        return ServedModel(names, frozenset({*self.config.served_model_alias, LOCAL_MODEL}))

    @property
    def any_model(self) -> ServedModel:
        """The model under whatever name, for clients that are made for other servers; exact where that is wanted."""
        model = self.model
        if self.config.strict_model_names:
            return model
        return replace(model, stand_in=partial(self._stand_ins.asked, served=model.names[0]))

    def check_ready(self) -> None:
        """Raises EngineOverloaded while the engine starts, EngineFailed when it is gone."""
        match self.engine.state:
            case EngineState.STARTING:
                raise EngineOverloaded("the engine is still starting", retry_after_ms=1000)
            case EngineState.UNHEALTHY:
                raise EngineFailed("the engine is not available", fatal=True)

    def open(
        self,
        *,
        output_formats: frozenset[AudioEncoding],
        single_request: bool = False,
        any_model: bool = False,
        streamed_body: bool = False,
        owner: str | None = None,
        admit: Callable[[], None] | None = None,
        origin: str = Origin.HTTP,
        resumable: bool = False,
        session_id: str | None = None,
    ) -> NewSession:
        """``owner`` is the name of the API key that the session belongs to; ``admit`` is asked for each request.
        A ``resumable`` session keeps a journal of what it has sent.

        With ``any_model`` a client may call the model what it likes, where the operator does not forbid it;
        ``streamed_body`` is the input of Mode A or Mode B, all of which may have a limit.

        Whoever opens it says by ``observed.ended`` that it is over.
        """
        now = asyncio.get_running_loop().time
        streaming = self.config.streaming_input
        listens = not single_request and self.speech_workers.available
        outbox = Outbox(
            streaming.max_output_bytes,
            write_timeout=streaming.write_timeout_sec,
            now=now,
            budget=self.budget,
            journal_capacity=streaming.max_output_bytes if resumable else 0,
        )
        rules = ConfigurationRules(
            capabilities=self.engine.capabilities,
            model=self.any_model if any_model else self.model,
            output_formats=frozenset(output_formats),
            defaults=self._defaults(paced=not single_request),
            forced_start_policy=streaming.force_start_policy,
            turn_detection=listens,
        )
        observed = ObservedSession(
            SessionIdentity(session_id or new_id("sess_"), origin, owner), self.observers, now=now
        )
        observed.opened()
        conversation = Conversation(
            self.engine,
            Configuration(rules),
            outbox,
            limits=self._limits_of(single_request=single_request, streamed_body=streamed_body),
            budget=self.budget,
            media_room=self.media_room,
            now=now,
            single_request=single_request,
            owner=owner,
            admit=admit,
            counted_priority=partial(self.admission.priority, owner),
            speech_workers=self.speech_workers if listens else None,
            observed=observed,
        )
        self.conversations.add(conversation)
        return NewSession(conversation, outbox)

    def _limits_of(self, *, single_request: bool, streamed_body: bool) -> ConversationLimits:
        limits = self._limits
        if single_request:  # what its client sends along as history is what it wants to be used
            limits = replace(limits, max_history_tokens=sys.maxsize)
        total = self.config.streaming_input.max_total_payload_per_session
        return replace(limits, stream=replace(limits.stream, max_total_bytes=total)) if streamed_body else limits

    def _defaults(self, *, paced: bool) -> Mapping[str, Any]:
        """What the operator set for clients that do not say. Answers over HTTP are never paced."""
        streaming = self.config.streaming_input
        wanted = {
            "start_policy": streaming.start_policy,
            "after_start": streaming.after_start,
            "max_lead_ms": streaming.max_lead_ms if paced else None,
        }
        return {name: value for name, value in wanted.items() if value is not None}
