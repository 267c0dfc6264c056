"""SessionFactory, which opens the sessions of a server and owns what they share; Chats, and Summaries in chats."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from prometheus_client import Gauge

from omni_ws import __version__
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig, SessionsConfig, StreamingInputConfig
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
)
from omni_ws.core.history import HistoryItem
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget, DailyUse, SessionAccount
from omni_ws.engine.base import NOTHING_SAID, Engine, EngineState, GenerationRequest, HeardLanguage, Unread
from omni_ws.engine.composed.parts import (
    RULES,
    HasParts,
    growing_llm,
)
from omni_ws.engine.threads import MediaRoom
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError
from omni_ws.metrics import Metrics
from omni_ws.service import (
    new_id,
    unexpected,
)
from omni_ws.service.conversation import summing
from omni_ws.service.conversation.configuration import (
    LOCAL_MODEL,
    Configuration,
    ConfigurationRules,
    ServedModel,
)
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import (
    Attachment,
    ConversationLimits,
    OutputLog,
    ServerMessage,
    StoredBytes,
    SumsUp,
)
from omni_ws.service.conversation.request import as_engines_know_it
from omni_ws.service.conversation.request_queue import text_input
from omni_ws.service.conversation.summing import Sizes
from omni_ws.service.conversation.tool_results import ServerResults
from omni_ws.service.listening import (
    SpeechWorkers,
    TurnJudge,
    TurnModel,
)
from omni_ws.service.mcp import McpReach, ToolServers
from omni_ws.service.observing.accounts import Accounts, near_client, write_line
from omni_ws.service.observing.observer import ObservedSession, Observers, Origin, SessionIdentity
from omni_ws.service.sessions.admission import Addresses, Admission, DailyUseFile, daily_limits
from omni_ws.service.sessions.shared_counts import SharedDailyUse, SharedSlotCounts, WorkerGroup
from omni_ws.service.store.records import (
    Sealer,
    StoreBackend,
    load_keys_of_store,
)
from omni_ws.service.store.session_store import SessionStore

logger = logging.getLogger(__name__)


def configured_store(config: SessionsConfig, *, budget: ByteBudget, metrics: Metrics) -> SessionStore | None:
    """Return the store that ``sessions.store`` names, not started; None for ``memory``.

    Raises ConfigurationError for a key that cannot be read.
    """
    if config.address.kind == "memory":
        return None
    key = config.store_key
    return SessionStore(
        _backend(config),
        sealer=Sealer([] if key is None else load_keys_of_store(key.get_secret_value())),
        budget=budget,
        metrics=metrics,
        max_age_sec=config.store_max_age_sec,
        max_bytes=config.store_max_bytes,
        slow_sec=config.store_slow_sec,
    )


def _backend(config: SessionsConfig) -> StoreBackend:
    address = config.address
    if address.kind == "sqlite":
        from omni_ws.service.store.sqlite_backend import SqliteBackend

        return SqliteBackend(address.path, max_bytes=config.store_max_bytes, fsync=address.fsync)
    from omni_ws.service.store.redis_backend import RedisBackend

    return RedisBackend(address, max_age_sec=config.store_max_age_sec)


# SessionFactory, which opens the sessions of a server and owns what they share; and the chats beside a session.


model_log = logging.getLogger("omni_ws.model")

#: Formats that can be cut anywhere, for sessions whose client plays audio as it arrives.
STREAM_FORMATS: Final = frozenset(
    {AudioEncoding.PCM16, AudioEncoding.F32, AudioEncoding.PCMU, AudioEncoding.PCMA, AudioEncoding.WAV}
)
#: Characters of a client's text that a log line has at most.
_SHOWN_CHARACTERS: Final = 128
#: The formats of an HTTP response.
FILE_FORMATS: Final = STREAM_FORMATS | {
    AudioEncoding.MP3,
    AudioEncoding.FLAC,
    AudioEncoding.AAC,
    AudioEncoding.OPUS,
    AudioEncoding.OGG,
}


class SessionFactory:
    """Opens sessions, and owns what they share: the engine, admission, the byte budget, metrics and observers."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        keys: Iterable[ApiKey] = (),
        speech_workers: SpeechWorkers | None = None,
        turn_model: TurnModel | None = None,
        group: WorkerGroup | None = None,
        chat_engine: Engine | None = None,
    ) -> None:
        """``group`` is set if this process is one of several workers, which share limits.

        ``chat_engine`` answers in the chats that the server itself opens (Chats); with None, ``engine`` does. Raises
        ConfigurationError if the file of daily use or the key of the store cannot be used.
        """
        self.group = group
        self.engine = engine
        #: Returns advice to sessions on how the operator could improve the engine's parts; None for none.
        self.advise: Callable[[], str | None] = lambda: None
        self.metrics = Metrics()
        judge = None if turn_model is None else TurnJudge(turn_model, self.metrics)
        self.speech_workers = speech_workers or SpeechWorkers(self.metrics, judge=judge)
        self.config = config
        #: Whether calls over WebRTC are answered: they are switched on, and the extra is installed.
        self.takes_calls = config.webrtc.enabled and importlib.util.find_spec("aiortc") is not None
        self.addresses = Addresses(config.trusted_proxies)
        keys = tuple(keys)
        #: None if no key has a daily limit, or if the supervisor of the workers keeps the file.
        self.daily_use_file = None if group else DailyUseFile.configured(config, keys)
        daily_use: DailyUse | None = self.daily_use_file.use if self.daily_use_file else None
        if group is not None and (limits := daily_limits(keys)):
            daily_use = SharedDailyUse(limits, group.counts, group.row)
        self.admission = Admission(
            max_sessions=config.limits.max_sessions,
            metrics=self.metrics,
            addresses=self.addresses,
            keys=keys,
            daily_use=daily_use,
            counts=None if group is None else SharedSlotCounts(group.counts, group.row),
        )
        self.budget = ByteBudget(config.limits.max_held_bytes)
        #: Where sessions are kept for other processes; None: nowhere.
        self.store = configured_store(config.sessions, budget=self.budget, metrics=self.metrics)
        #: Opens chats that sessions hold beside their own conversation.
        self.chats = Chats(self, chat_engine)
        self._has_stood_in = False
        self.media_room = MediaRoom(self.budget)
        self._mcp_reach = McpReach(config.realtime) if config.realtime.mcp_servers else None
        self.observers = Observers()
        self.observers.add(
            Accounts(self.metrics, log_content=config.log_content), every_chunk=False, every_output=False
        )
        if daily_use is not None:
            self.observers.add(self.admission, every_chunk=False, every_output=False)
        #: The rules of each kind of session: one object for all its sessions, as long as the rules stay the same.
        self._rules_of: dict[tuple[frozenset[AudioEncoding], bool, bool], ConfigurationRules] = {}
        #: The open conversations, with the arguments of ``_rules`` for each.
        self.conversations: WeakKeyDictionary[Conversation, Mapping[str, Any]] = WeakKeyDictionary()
        self._limits = _conversation_limits(config)

    @property
    def model(self) -> ServedModel:
        """The served model. An engine that forwards to another server knows its name only once it has started."""
        names = self.config.served_model_name or (self.engine.model,)
        aliases = {*self.config.served_model_alias, LOCAL_MODEL}
        if growing_llm(self.engine) is not None and not self.config.served_model_name:
            aliases.add(RULES)  # clients may know the model by the name of the rules, which answered first
        return ServedModel(names, frozenset(aliases))

    @property
    def any_model(self) -> ServedModel:
        """The served model, which also answers to any other name, as clients of other servers need.

        With ``strict_model_names`` it has only its own names.
        """
        model = self.model
        if self.config.strict_model_names:
            return model
        return replace(model, stand_in=self._stand_in)

    def _stand_in(self, name: str) -> None:
        """Log, the first time, that a client asked for the model by another name.

        The name is logged only if content may be.
        """
        if not self._has_stood_in:
            self._has_stood_in = True
            asked = {"asked": name[:_SHOWN_CHARACTERS]} if self.config.log_content else {}
            message = "a client requested the model by another name; further ones are not told"
            write_line(model_log, logging.INFO, message, **asked, served=self.model.names[0])

    def sum_up_by(self, summaries: SumsUp) -> None:
        """Have ``summaries`` sum up the conversations of sessions that open from now on."""
        self._limits = replace(self._limits, summaries=summaries)

    def check_ready(self) -> None:
        """Raise EngineOverloaded while the engine starts, and EngineFailed when it is unavailable."""
        match self.engine.state:
            case EngineState.STARTING:
                raise EngineOverloaded("the engine is still starting; retry later", retry_after_ms=1000)
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
        stored: StoredBytes | None = None,
        survives: bool = False,
        session_id: str | None = None,
        engine: Engine | None = None,
    ) -> Conversation:
        """Open a session and return its conversation. The caller must call ``observed.ended`` at its end.

        Args:
            output_formats: The formats in which its audio may be sent.
            single_request: Whether it carries one request, as over HTTP, instead of many.
            any_model: Whether the client may use any model name (see ``any_model``).
            streamed_body: Whether its input arrives as in Mode A or Mode B, which is limited as a whole.
            owner: The name of the API key that it belongs to.
            admit: Called for each request; raises to refuse it.
            origin: Labels it in metrics and logs.
            resumable: Whether to keep what was sent, so that a client can resume.
            stored: The budget for its output, if that is kept for readers.
            survives: Whether it can be saved at any time, to be restored in another server.
            session_id: The id of a session that is restored; None for a new one.
            engine: The engine that answers, with text, in place of the server's engine.
        """
        now = asyncio.get_running_loop().time

        def admit_request() -> None:
            if admit is not None:
                admit()
            self.admission.reserve(owner)

        account = self._account()
        identity = SessionIdentity(session_id or self._new_id(), origin, owner, near_client.get())
        observed = ObservedSession(identity, self.observers, now=now)
        observed.opened()
        kind: Any = {"output_formats": output_formats, "any_model": any_model, "single_request": single_request}
        conversation = Conversation(
            engine or self.engine,
            self.configuration(**kind, account=account, engine=engine),
            self._output_log(account, now, resumable=resumable, stored=stored),
            limits=self._limits_of(single_request=single_request, streamed_body=streamed_body, survives=survives),
            budget=account,
            media_room=self.media_room,
            now=now,
            admit=admit_request,
            counted_priority=partial(self.admission.priority, owner),
            speech_workers=self.speech_workers if self.speech_workers.available and not single_request else None,
            observed=observed,
        )
        self._allow_mcp(conversation, readers=stored is not None)
        self.conversations[conversation] = kind
        return conversation

    def _allow_mcp(self, conversation: Conversation, *, readers: bool) -> None:
        """Let the client name MCP servers if the operator lists any, but not in Mode B (``readers`` get the answer)."""
        if self._mcp_reach is not None and not readers:
            mcp = ToolServers(self._mcp_reach, apply=lambda tools: conversation.configuration.offer({"tools": tools}))
            mcp.keep_with(ServerResults(conversation))
            conversation.configuration.mcp = mcp

    def _engine_changed(self) -> None:
        """Adapt open sessions to the engine, whose capabilities have changed."""
        for conversation, kind in [*self.conversations.items()]:
            if not kind["single_request"] and conversation.engine is self.engine:
                conversation.follow(self._rules(**kind))

    def _account(self) -> SessionAccount:
        """Return the budget of a session: its largest input and output, and as much again for history and work."""
        streaming = self.config.streaming_input
        return SessionAccount(self.budget, 2 * (streaming.max_payload_per_session + streaming.max_output_bytes))

    def _output_log(
        self, account: SessionAccount, now: Callable[[], float], *, resumable: bool, stored: StoredBytes | None
    ) -> OutputLog:
        streaming = self.config.streaming_input
        kept = streaming.max_output_bytes if resumable else 0
        if stored is not None:
            kept = min(streaming.max_payload_per_session, stored.capacity)
        return OutputLog(
            streaming.max_output_bytes,
            write_timeout=streaming.write_timeout_sec,
            now=now,
            budget=account,
            kept_capacity=kept,
            stored=stored,
        )

    def configuration(
        self,
        output_formats: frozenset[AudioEncoding],
        *,
        any_model: bool = False,
        single_request: bool = False,
        account: SessionAccount | None = None,
        engine: Engine | None = None,
    ) -> Configuration:
        """Return the initial configuration of a session, charged to its ``account``; see ``open``."""
        rules = self._rules(output_formats, any_model=any_model, single_request=single_request)
        if engine is not None:
            rules = replace(rules, capabilities=engine.capabilities)
        configuration = Configuration(rules, account)
        configuration.mcp_elsewhere = self._mcp_reach is not None
        return configuration

    def connect_gauges(self) -> None:
        """Connect the gauges of the metrics to functions that are called at each scrape.

        Also has the engine report answers begun at pauses, and changes of its capabilities, which sessions then follow.
        """
        metrics, engine, admission, budget = self.metrics, self.engine, self.admission, self.budget
        metrics.sessions_active.set_function(lambda: admission.sessions)
        metrics.sessions_limit.set(admission.max_sessions)
        metrics.draining.set_function(lambda: admission.draining)
        metrics.held_bytes.set_function(lambda: budget.held)
        metrics.held_bytes_limit.set(budget.capacity)
        metrics.engine_up.labels(engine.name).set_function(lambda: engine.state is EngineState.OK)
        if isinstance(engine, HasParts):
            for role in engine.part_states:
                metrics.part_up.labels(role).set_function(partial(_is_up, engine, role))
        metrics.engine_active.labels(engine.name).set_function(lambda: engine.active_requests)
        if hasattr(engine, "on_speculation"):
            engine.on_speculation = lambda outcome: metrics.speculation.labels(outcome).inc()
        if hasattr(engine, "on_change"):
            engine.on_change = self._engine_changed
        metrics.info.labels(__version__, engine.name).set(1)

        def total(gauge: Gauge, size: Callable[[Conversation], int]) -> None:
            gauge.set_function(lambda: sum(map(size, self.conversations)))

        total(metrics.queue_bytes.labels("input"), lambda one: one.stream.held_bytes)
        total(metrics.queue_bytes.labels("outbox"), lambda one: one.outbox.queued)
        total(metrics.queue_bytes.labels("journal"), lambda one: one.outbox.journaled)
        total(metrics.queue_bytes.labels("history"), lambda one: one.ledger.history.held_bytes)
        total(metrics.queue_items.labels("reorder"), lambda one: one.stream.buffered_chunks)
        total(metrics.queue_items.labels("outbox"), lambda one: len(one.outbox))

    def _new_id(self) -> str:
        """Return an id for a session.

        It begins with the ``replica_id``, from which a load balancer knows the replica.
        """
        replica = self.config.replica_id
        worker = f"{self.worker}_" if self.group else ""
        return new_id(f"{replica}_{worker}sess_" if replica else f"{worker}sess_")

    @property
    def worker(self) -> str | None:
        """The name of this worker, which is part of session ids so that other workers find it; None without workers."""
        return None if self.group is None else self.group.name

    def _rules(
        self, output_formats: frozenset[AudioEncoding], *, any_model: bool, single_request: bool
    ) -> ConfigurationRules:
        rules = ConfigurationRules(
            capabilities=self.engine.capabilities,
            model=self.any_model if any_model else self.model,
            output_formats=output_formats,
            defaults=self._defaults(paced=not single_request),
            forced_start_policy=self.config.streaming_input.force_start_policy,
            turn_detection_types=() if single_request else self.speech_workers.turn_detection_types,
            cleans_audio=self.speech_workers.cleans_audio,
            greeting=not single_request,
            tool_filler=self.config.llm.tool_filler,
            spoken_instructions=self.config.spoken_instructions,
            spoken_instructions_with_tools=self.config.spoken_instructions_with_tools,
        )
        kind = (output_formats, any_model, single_request)
        if self._rules_of.get(kind) != rules:  # as the engine has started
            self._rules_of[kind] = rules
        return self._rules_of[kind]

    def _limits_of(self, *, single_request: bool, streamed_body: bool, survives: bool) -> ConversationLimits:
        limits = replace(self._limits, keeps_input=True) if survives else self._limits
        if single_request:  # its client sends the history along, and decides how long it is
            limits = replace(limits, single_request=True, max_history_tokens=sys.maxsize)
        if single_request and not streamed_body:  # an ordinary body has its own limit
            return limits
        total = self.config.streaming_input.max_total_payload_per_session
        return replace(limits, stream=replace(limits.stream, max_total_bytes=total))

    def _defaults(self, *, paced: bool) -> Mapping[str, Any]:
        """Return the operator's defaults for a session's configuration. ``paced`` is false for HTTP responses."""
        streaming = self.config.streaming_input
        wanted = {
            "start_policy": streaming.start_policy,
            "after_start": streaming.after_start,
            "alignment_window_ms": streaming.alignment_window_ms,
            "max_lead_ms": streaming.max_lead_ms if paced else None,
            "idle_prompt": _idle_prompt(streaming) if paced else None,
            "tts": {"lexicon": self.config.tts.lexicon} if self.engine.capabilities.lexicon else None,
        }
        return {name: value for name, value in wanted.items() if value is not None}


def _idle_prompt(streaming: StreamingInputConfig) -> Mapping[str, Any] | None:
    if not streaming.idle_prompt_sec:
        return None
    return {"after_sec": streaming.idle_prompt_sec, "closes_after_sec": streaming.idle_close_sec or None}


def _is_up(engine: HasParts, role: str) -> bool:
    """Return whether the part of the engine that has ``role`` is healthy; the LLM, if it does the work of that part."""
    states = engine.part_states
    return states.get(role, states["llm"]) is EngineState.OK


def _conversation_limits(config: ServerConfig) -> ConversationLimits:
    streaming = config.streaming_input
    return ConversationLimits(
        stream=StreamLimits(
            reorder_window=streaming.reorder_window_chunks,
            reorder_timeout=streaming.reorder_timeout_sec,
            session_timeout=streaming.session_timeout_sec,
            max_chunk_bytes=streaming.max_chunk_bytes,
            max_held_bytes=streaming.max_payload_per_session,
        ),
        max_pending_requests=streaming.max_pending_requests,
        max_history_tokens=config.limits.max_history_tokens,
        asr_timeout_sec=config.asr.timeout_sec,
    )


#: Labels chats, and those in which talks are summed up, in metrics and logs.
CHAT_ORIGIN: Final = "chat"
SUMMARY_ORIGIN: Final = "summary"
#: What a chat has in common, whatever its session asks for: text alone, and nothing that is said unasked.
_OF_ALL: Final[dict[str, Any]] = {"task": "chat", "modalities": ["text"], "idle_prompt": None, "greeting": ""}


class Chats:
    """Opens chats: conversations of the server's own with a model. ``engine`` answers; None for the server's engine."""

    def __init__(self, factory: SessionFactory, engine: Engine | None = None) -> None:
        self._factory = factory
        self._engine = engine
        self._lives: set[asyncio.Task[None]] = set()

    def open(self, of: Conversation, receive: Callable[[ServerMessage], None], *, in_background: bool = False) -> Chat:
        """Open a chat on behalf of the session of ``of``, until ``Chat.close``.

        Its requests count as those of that session. ``receive`` is called with each message, and must not raise.
        ``in_background``: the server asks the session's engine of its own accord, so that the requests count only
        against daily limits.
        """
        own = None if of.engine is self._factory.engine else of.engine
        conversation = self._factory.open(
            output_formats=STREAM_FORMATS,
            any_model=True,
            origin=SUMMARY_ORIGIN if in_background else CHAT_ORIGIN,
            owner=of.observed.identity.owner,
            engine=own if in_background else self._engine,
        )
        if not in_background:
            conversation.admit = of.admit
        chat = Chat(conversation, receive)
        life = asyncio.create_task(chat.run(), name=f"chat {conversation.observed.identity.session_id}")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return chat

    async def close(self) -> None:
        """Wait until all chats have ended, and stop their own engine, if there is one.

        The sessions must have ended before.
        """
        if self._lives:
            await asyncio.wait(self._lives)
        if self._engine is not None:
            await self._engine.stop()


class Chat(Attachment):
    """A conversation of the server's own with a model, and the Attachment of that conversation.

    The input of each request is complete as it opens (``Conversation.respond``).
    """

    def __init__(self, conversation: Conversation, receive: Callable[[ServerMessage], None]) -> None:
        self.conversation = conversation
        self._receive = receive
        self._closed = asyncio.Event()
        #: Whether it answers no more: it was closed, or its engine has failed for good.
        self.has_ended = False
        conversation.attach(self)
        conversation.suspend_time(True)

    def configure(self, **patch: Any) -> None:
        """Configure later requests with fields of ``session_config``. Raises what ``Conversation.configure`` raises."""
        self.conversation.configure({**_OF_ALL, **patch})

    def output_ready(self) -> None:
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while not self._closed.is_set() and (message := self.conversation.outbox.take()) is not None:
            self._receive(message)

    def close(self) -> None:
        """Stop the answers, and release everything in the next pass of the loop.

        No message is received after this call.
        """
        self.has_ended = True
        self._closed.set()

    async def run(self) -> None:
        """Answer requests until the chat ends."""
        answers = asyncio.create_task(self.conversation.run())
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([answers, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.has_ended = True
            answers.cancel()
            closed.cancel()
            found, _ = await asyncio.gather(answers, closed, return_exceptions=True)
            if isinstance(found, OmniError):
                logger.warning("a chat of a session has ended: %s", found.message)
            self.conversation.end()
            self._deliver()
            self.conversation.detach()
            self.conversation.outbox.close()
            self.conversation.observed.ended()


# Summaries: sums up long talks in the background, by the model that answers in them or by rules.


#: Seconds after a failure in which a conversation is not summed up.
RETRY_SEC: Final = 60.0
#: How many conversations are summed up at a time if the engine can answer many at the same time.
MAX_AT_ONCE: Final = 4


@dataclass(slots=True)
class _Draft:
    """Notes that have not replaced their items in the history yet."""

    items: list[HistoryItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Summaries(SumsUp):
    """Sums up the older part of long conversations. A conversation tells it whether anybody speaks.

    **When.** A conversation is summed up once its history has outgrown its share of the model's context
    (``summing.sizes``), while nobody speaks in it and no answer is due. As soon as that changes, the model's work is
    dropped, and begins again in the next pause; notes on portions that were finished are kept meanwhile. Where the
    model shares a machine's cores (``EngineCapabilities.shares_cores``), one conversation at a time is summed up, only
    while no session waits for the model, and any answer stops the work.

    **How.** A model that shares a machine's cores is assumed to be small: rules select sentences of the user, if they
    know the language (``summing.selected``). Any other model is asked for notes, in a chat of its own, without history.
    When everything that is due is noted, the notes replace all these messages in one step, in what requests see from
    then on: this changes the beginning of the prompt, which engines have computed already, as seldom as dropping the
    oldest turns would. A model that shares the cores then computes the new beginning in the same pause, which takes it
    seconds.

    Clients are not told of failures. The work is tried again after the next answer; until then the oldest turns are
    dropped as without summaries.
    """

    def __init__(self, chats: Chats, metrics: Metrics) -> None:
        self._chats = chats
        self._metrics = metrics
        #: The conversations in which somebody speaks, or an answer is due.
        self._busy: WeakSet[Conversation] = WeakSet()
        #: Conversations that wait to be summed up, in the order in which that became due.
        self._waiting: dict[Conversation, None] = {}
        self._running: dict[Conversation, asyncio.Task[bool]] = {}
        self._drafts: WeakKeyDictionary[Conversation, _Draft] = WeakKeyDictionary()
        #: By conversation, the time before which it is not summed up, after the model has failed.
        self._not_before: WeakKeyDictionary[Conversation, float] = WeakKeyDictionary()
        #: The conversations of chats in which a model is asked for notes.
        self._own: WeakSet[Conversation] = WeakSet()

    @property
    def idle(self) -> bool:
        """Whether no conversation is being summed up or waits for that."""
        return not self._running and not self._waiting

    # what conversations tell

    def disturb(self, conversation: Conversation) -> None:
        """Interrupt the work for this conversation: somebody speaks, or an answer is due."""
        if conversation in self._own:
            return
        self._busy.add(conversation)
        self._waiting.pop(conversation, None)
        if self._running:
            self._give_way(conversation)

    def _give_way(self, conversation: Conversation) -> None:
        shares = conversation.engine.capabilities.shares_cores
        for other, task in self._running.items():
            if other is conversation or (shares and other.engine is conversation.engine):
                task.cancel()

    def note_quiet(self, conversation: Conversation) -> None:
        """Note that nobody speaks in this conversation, and no answer is due."""
        if conversation in self._own:
            return
        self._busy.discard(conversation)
        if conversation not in self._running and self._is_due(conversation):
            self._waiting[conversation] = None
        if self._waiting:
            self._begin()

    def forget(self, conversation: Conversation) -> None:
        """Stop all work for a conversation, which ends."""
        self._waiting.pop(conversation, None)
        self._busy.discard(conversation)
        self._drafts.pop(conversation, None)
        if (task := self._running.get(conversation)) is not None:
            task.cancel()
        if self._waiting:
            self._begin()

    async def close(self) -> None:
        """Stop all work. The sessions must have ended."""
        self._waiting.clear()
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # work

    def _sizes(self, conversation: Conversation) -> Sizes | None:
        config = conversation.configuration.effective
        if not config.history_summary or config.task is not Task.CHAT or conversation.limits.single_request:
            return None
        context = conversation.engine.capabilities.context
        return summing.sizes(conversation.ledger.history, context=context, instructions=config.instructions)

    def _is_due(self, conversation: Conversation) -> bool:
        size = self._sizes(conversation)
        if size is None or not conversation.ledger.history.is_longer_than(size.longest):
            return False
        return asyncio.get_running_loop().time() >= self._not_before.get(conversation, 0.0)

    def _begin(self) -> None:
        for conversation in [*self._waiting]:
            shares = conversation.engine.capabilities.shares_cores
            if len(self._running) >= (1 if shares else MAX_AT_ONCE):
                return
            if conversation in self._running or (shares and self._busy):
                continue
            del self._waiting[conversation]
            if (size := self._sizes(conversation)) is not None:
                task = asyncio.create_task(self._sum_up(conversation, size), name="summary of a talk")
                self._running[conversation] = task
                task.add_done_callback(partial(self._over, conversation))

    def _over(self, conversation: Conversation, task: asyncio.Task[bool]) -> None:
        del self._running[conversation]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._not_before[conversation] = asyncio.get_running_loop().time() + RETRY_SEC
        if isinstance(error, OmniError):
            logger.info("a talk was not summed up: %s", error.message)
        elif isinstance(error, Exception):
            unexpected(error, where="the summary of a talk")
        outcome = "failed" if error is not None else "dropped" if task.cancelled() or not task.result() else "written"
        self._metrics.summaries.labels(outcome).inc()
        if task.cancelled() and conversation not in self._busy and self._is_due(conversation):
            self._waiting[conversation] = None  # it gave way to another
        if self._waiting:
            self._begin()

    async def _sum_up(self, conversation: Conversation, size: Sizes) -> bool:
        """Sum up the messages that are due. Returns whether requests now see the notes in their place."""
        history, draft = conversation.ledger.history, self._draft(conversation)
        asking = _Asking(self._chats, conversation, self._own)
        shares = conversation.engine.capabilities.shares_cores
        of_both = not shares
        instructions = summing.INSTRUCTIONS + (summing.OF_BOTH if of_both else "")
        try:
            while items := summing.next_portion(history, size, behind=len(draft.items)):
                if shares and summing.may_select(items):
                    notes = summing.selected(items)
                else:
                    answer = await asking.ask(summing.question(items, of_both=of_both), instructions)
                    notes = summing.read_notes(answer)
                draft.items.extend(items)
                draft.notes.append(notes)
            self._drafts.pop(conversation, None)
            if not history.sum_up(draft.items, summing.merged(draft.notes)):
                return False  # the history has changed meanwhile
            history.shorten(size.room)
            conversation.ledger.weigh()
            if history.notes_tokens > size.notes:
                history.condense(summing.merged([history.notes]))
            if history.notes_tokens > size.notes:
                notes = history.notes
                if shares:
                    history.condense(summing.lightened(notes, size))
                else:
                    answer = await asking.ask(summing.shorter(notes, size), summing.CONDENSING)
                    if history.notes == notes:
                        history.condense(summing.fitted(notes, answer, size))
            conversation.ledger.weigh()
        finally:
            asking.close()
        if shares:
            await _compute_ahead(conversation)
        return True

    def _draft(self, conversation: Conversation) -> _Draft:
        """Return the draft of a conversation; a new one if its items are no longer the oldest of the history."""
        draft = self._drafts.get(conversation)
        if draft is None or not conversation.ledger.history.is_next(draft.items):
            draft = self._drafts[conversation] = _Draft()
        return draft


async def _compute_ahead(conversation: Conversation) -> None:
    """Have the model compute the beginning of the next prompt, by a request for one token, which nobody sees.

    If somebody speaks meanwhile, the part computed so far is not lost: engines keep it for the conversation.
    """
    config = conversation.configuration.effective
    request = GenerationRequest(
        request_id=new_id("req_"),
        task=config.task,
        input=text_input(NOTHING_SAID),
        input_mode=InputMode.SNAPSHOT,
        input_audio=AudioFormat(),
        modalities=frozenset({OutputModality.TEXT}),
        instructions=config.instructions,
        history=conversation.ledger.history.messages(),
        sampling={"max_tokens": 1},
        tools=tuple(map(as_engines_know_it, config.tools)),
        owner=conversation.observed.identity.owner,
        conversation=conversation.observed.identity.session_id,
        computes_only=True,
        heard_language=HeardLanguage(conversation.ledger.language),
    )
    try:
        await conversation.engine.generate(request, Unread())
    except asyncio.CancelledError:
        pass  # the task ends here: it gives way, and the notes are written
    except Exception as error:
        failure = error if isinstance(error, OmniError) else unexpected(error, where="computing a summary ahead")
        logger.debug("the notes on a talk were not computed ahead: %s", failure.message)


class _Asking:
    """A chat in which a model is asked for notes on one conversation. It opens with the first question."""

    def __init__(self, chats: Chats, of: Conversation, own: WeakSet[Conversation]) -> None:
        self._chats = chats
        self._of = of
        self._own = own
        self._chat: Chat | None = None
        self._answer: asyncio.Future[str] | None = None
        self._error: OmniError | None = None

    async def ask(self, question: str, instructions: str) -> str:
        """Return the model's answer to ``question``. Raises an OmniError."""
        chat = self._chat or self._open()
        able = chat.conversation.engine.capabilities.sampling
        # Notes begin alike: a penalty on repetitions would end them early.
        sampling = {"temperature": 0, "repetition_penalty": 1, "max_tokens": summing.MAX_TOKENS}
        chat.configure(
            instructions=instructions,
            history=False,
            sampling={name: value for name, value in sampling.items() if name in able},
        )
        self._answer, self._error = asyncio.get_running_loop().create_future(), None
        chunk = InputChunk(Modality.TEXT, question.encode())
        chat.conversation.respond([chunk], chat.conversation.configuration.effective)
        return await self._answer

    def _open(self) -> Chat:
        self._chat = self._chats.open(self._of, self._receive, in_background=True)
        self._own.add(self._chat.conversation)
        return self._chat

    def _receive(self, message: ServerMessage) -> None:
        if isinstance(message, OmniError):
            self._error = message
        if not isinstance(message, FinalChunk) or self._answer is None or self._answer.done():
            return
        assert self._chat is not None
        entry = self._chat.conversation.ledger.find(message.request_id)
        if self._error is not None:
            self._answer.set_exception(self._error)
        elif entry is None or message.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._answer.set_exception(EngineFailed("the model did not answer"))
        else:
            self._answer.set_result(entry.answer_text)

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
