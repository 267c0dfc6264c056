"""The dialects of ``/v1/realtime``: OpenAI's, and vLLM's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from omni_ws.core.chunks import (
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    StartTrigger,
    WordsKnown,
    heard_language,
)
from omni_ws.core.history import Message
from omni_ws.core.quota import Share, beyond_ordinary, memory_of
from omni_ws.engine.composed.parts import shown_parts
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidRequest,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    UnknownType,
)
from omni_ws.service import new_id
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.output_log import (
    InputHeard,
    ServerMessage,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.realtime.effects import Effects, McpItems, UrlImages, abilities_of, naming
from omni_ws.transport.realtime.items import (
    AfterAudio,
    ConversationItems,
    Dictation,
    Event,
    RealtimeResponse,
    SessionDialect,
    Turn,
    as_input,
    as_new,
    empty_buffer,
    messages_of,
    spoken_item,
    transcription_event,
)
from omni_ws.transport.realtime.kept import KeptRealtime
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import (
    Item,
    Number,
    RealtimeRefusal,
    error_fields,
    item_event,
    optional_id,
    read,
    read_item,
)
from omni_ws.wire.realtime_session import (
    SessionFields,
    beta_transcription_session,
    merged_session,
    read_response,
    response_config,
    session_config,
    session_object,
)
from omni_ws.wire.server_frames import (
    BackchannelFrame,
    ResponseStartedFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)
from omni_ws.wire.session_config import SessionConfig

#: The event of a soft "mm-hm" of the server, which OpenAI does not have.
BACKCHANNEL: Final = "input_audio_buffer.backchannel"
#: Responses that may wait for the transcript of a turn.
MAX_DEFERRED: Final = 4


class RealtimeDialect(SessionDialect):
    """The SessionDialect of OpenAI's Realtime API."""

    may_be_vllm = True
    #: The turn that is being spoken.
    _speaking: Turn | None = None
    #: Whether turn detection has committed a turn since the client's last commit.
    _just_committed = False

    def __init__(
        self,
        session: Session,
        factory: SessionFactory,
        bound: SessionFields,
        *,
        media: Mapping[str, Any] | None = None,
        kept: KeptRealtime | None = None,
    ) -> None:
        """Create the dialect of a new session.

        ``bound`` is the session object to begin with; ``media`` are fields of ``session_config`` that the transport
        decides, whatever the client sets. ``kept`` is a stored conversation to continue. Raises InvalidRequest and
        EngineOverloaded.
        """
        super().__init__()
        conversation = session.conversation
        limit = factory.config.streaming_input.max_payload_per_session
        account = conversation.account
        self._session_id, self._conversation_id = session.session_id, new_id("conv_")
        self._is_recorded = session.recording is not None
        self._conversation = conversation
        self._owner = session
        self._media, self._factory = media or {}, factory
        self._effects = Effects(conversation, self._media)
        self._images = UrlImages(factory.config.http, account, self._handle, self._refuse, session.end)
        #: The session object as the client has set it.
        self._session = bound
        self._settings_share = Share(account)
        self._items = ConversationItems(conversation.ledger, account, max_bytes=limit)
        self._mcp = self._new_mcp_items()
        self._now = asyncio.get_running_loop().time
        #: Audio that was appended and not committed, if no turns are detected.
        self._audio = bytearray()
        self._audio_share = Share(account)
        self._audio_limit = limit
        self._dictation = Dictation(conversation)
        self._after_audio = AfterAudio(conversation, self._end_audio)
        #: The turn that is the input of each open request, by request id.
        self._turns: dict[str, Turn] = {}
        #: Turns whose request has ended, and whose transcript is not complete yet, by request id.
        self._late: dict[str, Turn] = {}
        #: The responses that are not done, by request id.
        self._responses: dict[str, RealtimeResponse] = {}
        #: Errors of requests that have no response, until their finals.
        self._errors: dict[str, OmniError] = {}
        #: The ``response.create`` events that wait for the transcript of a turn: the response, and the event's id.
        self._deferred: list[tuple[Mapping[str, Any], str | None]] = []
        self._deferred_share = Share(account)
        self._output_cleared: Callable[[str | None], None] = lambda response_id: None
        conversation.keeps_configurations = True
        try:
            self._start()
            if kept is not None:
                self._conversation_id = kept.conversation_id
                self._items.go_on(kept.items)
        except BaseException:
            self.close()
            raise

    def _new_mcp_items(self) -> McpItems:
        return McpItems(
            self._conversation.configuration.mcp,
            self._items,
            self._conversation.ledger,
            send=lambda events: self._send(events),
            may_answer=lambda: not self._transcribing and self._speaking is None and self._find_response() is None,
            answer=lambda: self._respond({"type": "response.create", "response": {}}, in_conversation=True),
            forget=lambda request_id: self._responses.pop(request_id, None),
        )

    def _start(self) -> None:
        self._conversation.ledger.play_at_once()  # unless ``conversation.item.truncate`` says otherwise
        self._conversation.configure(self._config(self._session))
        self._session = self._mcp.kept(self._session)
        self._effects.apply(self._session)
        self._settings_share.resize(beyond_ordinary(memory_of(self._session)))

    def connect(
        self, send: Callable[[Iterable[Event]], None], output_cleared: Callable[[str | None], None]
    ) -> list[Event]:
        super().connect(send, output_cleared)
        self._output_cleared = output_cleared
        self._conversation.followed = self._engine_changed
        self._conversation.unasked.idled = self._idled
        return self.greeting()

    def greeting(self) -> list[Event]:
        """Return the events that describe the session to a client."""
        recorded = {"recorded": True} if self._is_recorded else {}
        created = {"session": self._session_object(), **created_fields(self._session_id), **recorded}
        return [{"type": "session.created", **created, **self._effects.session_warnings(self._session)}]

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        """Handle one event of the client, or hold the event until its images are fetched."""
        if not self._images.holds(fields, now=now):
            self._handle(fields, now)

    def _refuse(self, error: OmniError, event: Mapping[str, Any]) -> None:
        event_id = event.get("event_id")
        self._send([self.error(error, event_id=event_id if isinstance(event_id, str) else None)])

    def _handle(self, fields: Mapping[str, Any], now: float) -> None:
        match fields["type"]:
            case "input_audio_buffer.append":
                self.append(read(fields.get("audio"), bytes, "audio"), now)
            case "session.update" | "transcription_session.update":
                self._update_session(fields)
            case "input_audio_buffer.commit" | "input_audio_buffer.clear" as kind:
                self._after_audio.put(kind, optional_id(fields.get("event_id"), "event_id"))
            case "output_audio_buffer.clear":
                self._clear_output()
            case "conversation.item.create":
                self._create_item(object_field(fields, "item"), fields)
            case "conversation.item.retrieve":
                item = self._known_item(fields, "retrieve")
                self._send([{"type": "conversation.item.retrieved", "item": item.shown()}])
            case "conversation.item.delete":
                item = self._known_item(fields, "delete")
                self._items.delete(item)
                self._send([{"type": "conversation.item.deleted", "item_id": item.item_id}])
            case "conversation.item.truncate":
                self._truncate_item(self._known_item(fields, "truncate"), fields)
            case "response.create":
                response = object_field(fields, "response")
                fields = {**fields, "response": response}
                self._create_response(fields, optional_id(fields.get("event_id"), "event_id"))
            case "response.cancel":
                self._cancel_response(optional_id(fields.get("response_id"), "response_id"))
            case kind:
                raise UnknownType(f"unknown event type {kind[:64]!r}", param="type")

    def render(self, message: ServerMessage) -> Iterator[Event]:
        match message:
            case OutputChunk():
                yield from self._output(message)
            case FinalChunk():
                yield from self._final(message)
            case ResponseStartedFrame(trigger=StartTrigger.FILLER | StartTrigger.TELLING as why, request_id=request_id):
                config, kept = self._conversation.configuration_of(request_id), why is StartTrigger.TELLING
                yield from self._begin(request_id, config, metadata={"trigger": why}, in_conversation=kept)
            case ResponseStartedFrame(request_id=request_id):
                yield from self._started(request_id)
            case SpeechStartedFrame(certain=False) | SpeechDismissedFrame():
                pass  # clients are told of speech that does interrupt
            case (
                SpeechStartedFrame(audio_ms=audio_ms, request_id=request_id)
                | SpeechConfirmedFrame(audio_ms=audio_ms, request_id=request_id)
            ):
                yield from self._speech_started(audio_ms, request_id)
            case BackchannelFrame(text=text, payload=payload):
                yield {"type": BACKCHANNEL, "transcript": text, "delta": payload}
            case SpeechStoppedFrame(audio_ms=audio_ms):
                yield from self._speech_stopped(audio_ms)
            case InputHeard():
                self._after_audio.go_on()
            case OmniError(request_id=None):
                self._reported = message
                yield self.error(message)
            case OmniError(request_id=str(request_id)):
                self._errors[request_id] = message

    def close(self) -> None:
        self._items.close()
        self._images.close()
        self._mcp.close()
        for response in self._responses.values():
            response.close()
        self._drop_audio()
        self._deferred.clear()
        for share in (self._settings_share, self._deferred_share):
            share.resize(0)

    # kept

    def kept(self) -> KeptRealtime:
        """Return the snapshot from which another session can continue the conversation."""
        speaking = (turn for turn in self._turns.values() if turn.answered)
        return KeptRealtime(
            conversation_id=self._conversation_id, session=self._session, items=[*self._items.kept(speaking)]
        )

    # the session

    def _session_object(self) -> dict[str, Any]:
        config = self._conversation.configuration.effective
        return self._mcp.shown(session_object(self._session, config, session_id=self._session_id))

    def _engine_changed(self, config: SessionConfig) -> None:
        """Tell the client that the engine was replaced, and which settings are in effect now."""
        parts = shown_parts(self._factory.engine)
        self._send([{"type": "session.updated", "session": self._session_object(), "parts": parts}])

    def _update_session(self, event: Mapping[str, Any]) -> None:
        patch = object_field(event, "session")
        if event["type"] == "transcription_session.update":
            patch = {**patch, "type": "transcription"}
        session = merged_session(self._session, patch)
        detected, before = self._detects_turns, self._settings_share.size
        try:
            self._settings_share.resize(beyond_ordinary(memory_of(session)))
            with naming("session"):
                self._conversation.configure(self._config(session))
        except OmniError as error:
            self._settings_share.force(before)
            if not isinstance(error, EngineOverloaded):
                raise
            # Elsewhere EngineOverloaded ends a session. This one goes on with its old settings.
            self._refuse(error, event)
            return
        self._session = self._mcp.kept(session)
        self._effects.apply(session)
        if self._dictates and self._audio:
            waiting = InputChunk(Modality.AUDIO, bytes(self._audio))
            self._drop_audio()
            self._dictate(waiting, self._now())
        elif not self._dictates:
            self._dictation.clear()
        if self._detects_turns:
            self._drop_audio()
        elif detected and self._speaking is not None:  # no silence will end it
            self._conversation.finish()
            self._send(self._commit(self._speaking))
        warnings = self._effects.warnings({**event, "session": patch}, session)
        shown = self._session_object()
        if event["type"] == "session.update":
            self._send([{"type": "session.updated", "session": shown, **warnings}])
        else:
            beta = beta_transcription_session(shown)
            self._send([{"type": "transcription_session.updated", "session": beta, **warnings}])

    def _config(self, session: SessionFields) -> dict[str, Any]:
        config = session_config(session, abilities_of(self._factory))
        for name, decided in self._media.items():
            config[name] = {**config[name], **decided} if isinstance(decided, Mapping) else decided
        return config

    @property
    def speech_interrupts(self) -> bool:
        """Whether the beginning of the user's speech silences the answer."""
        return self._detects_turns and self._session.interrupts_answers

    @property
    def _detects_turns(self) -> bool:
        return self._conversation.configuration.effective.turn_detection is not None

    # audio

    def append(self, audio: bytes, now: float) -> None:
        """Append audio, in the format of the session, to the input. Raises what ``receive`` raises."""
        chunk = InputChunk(Modality.AUDIO, audio)
        self._conversation.configuration.check_chunk(chunk)
        if self._detects_turns:
            self._conversation.receive_chunk(chunk, now=now)
            return
        if self._dictates:
            self._dictate(chunk, now)
            return
        self._conversation.note_given()
        size = len(self._audio) + len(chunk.payload)
        if size > self._audio_limit:
            raise PayloadTooLarge(f"at most {self._audio_limit} bytes of audio may wait to be committed", param="audio")
        self._audio_share.resize(size)
        self._audio += chunk.payload

    @property
    def _dictates(self) -> bool:
        """Whether the client dictates: audio is transcribed as it arrives, and the client's commits end utterances."""
        return self._session.transcribes_only and not self._detects_turns

    def _dictate(self, chunk: InputChunk, now: float) -> None:
        turn = self._dictation.append(chunk, now)
        if turn is not None and turn.item.request_id is not None:
            self._turns[turn.item.request_id] = turn

    def _end_audio(self, kind: str, event_id: str | None) -> None:
        """Handle the commit or clear event ``kind``. All audio before the event was heard."""
        try:
            if kind == "input_audio_buffer.commit":
                self._commit_audio()
            else:
                self._clear_audio()
        except InvalidRequest as error:
            self._send([self.error(error, event_id=event_id)])

    def _commit_audio(self) -> None:
        just_committed, self._just_committed = self._just_committed, False
        if self._detects_turns:
            turn = self._speaking
            if turn is None or turn.committed or turn.cleared:
                if just_committed and self._session.transcribes_only:
                    return  # a client that detects turns itself, and was slower: its audio is committed
                raise empty_buffer()
            turn.end(turn.end_ms or turn.start_ms)
            self._conversation.finish()
            self._send(self._commit(turn))
            return
        if self._dictates:
            self._commit_dictation()
            return
        if not self._audio:
            raise empty_buffer()
        audio = InputChunk(Modality.AUDIO, bytes(self._audio))
        turn = Turn(spoken_item(audio), self._session.answers_turns, end_ms=self._duration_ms(len(audio.payload)))
        self._drop_audio()
        self._send(self._commit(turn))

    def _commit_dictation(self) -> None:
        dictation, turn = self._dictation, self._dictation.turn
        if turn is None:
            raise empty_buffer()
        turn.end(self._duration_ms(dictation.size))
        self._send(self._commit(turn))
        ended, error = dictation.ended, dictation.error
        dictation.finish()
        if ended:
            self._send(self._transcribed(turn, error, failed=turn.item.request_id is None))

    def _clear_audio(self) -> None:
        turn, self._just_committed = self._speaking, False
        self._conversation.spoken.dismiss(rest_untold=True)
        self._dictation.clear()
        if self._detects_turns and turn is not None and not turn.committed:
            turn.clear()
            if turn.item.request_id is not None:
                self._conversation.cancel(turn.item.request_id)
        self._drop_audio()
        self._send([{"type": "input_audio_buffer.cleared"}])

    def _clear_output(self) -> None:
        response = self._find_response()
        self._conversation.silence()
        if response is not None:
            response.cancel()
            self._conversation.cancel(response.request_id)
        self._output_cleared(None if response is None else response.response_id)

    def _drop_audio(self) -> None:
        self._audio.clear()
        self._audio_share.resize(0)

    def _duration_ms(self, size: int) -> int:
        return round(self._conversation.configuration.effective.input_audio.encoded.duration_ms(size))

    # spoken turns

    def _bind(self, turn: Turn, request_id: str) -> None:
        """Note that ``turn`` is the input of the request."""
        self._turns[request_id] = turn
        turn.item.asked(request_id)

    def _commit(self, turn: Turn) -> Iterator[Event]:
        """Make the turn's item part of the conversation. Begin the response if the engine works on the turn already."""
        if not turn.commit():
            return
        item = turn.item
        previous = self._items.add(item)
        yield {"type": "input_audio_buffer.committed", "item_id": item.item_id, "previous_item_id": previous}
        yield item_event("added", item, previous=previous)
        yield item_event("done", item, previous=previous)
        if turn.started and turn.answered and item.request_id is not None:
            yield from self._begin(item.request_id)

    def _speech_started(self, audio_ms: int, request_id: str | None) -> Iterator[Event]:
        turn = self._speaking = Turn(spoken_item(), self._session.answers_turns, audio_ms)
        if request_id is not None:
            self._bind(turn, request_id)
        yield {
            "type": "input_audio_buffer.speech_started",
            "audio_start_ms": audio_ms,
            "item_id": turn.item.item_id,
        }
        if turn.answered:
            self._feed()
        elif self._session.interrupts_answers:
            self._conversation.silence()  # a response that is done may still be played
            if (response := self._find_response()) is not None:
                self._conversation.cancel(response.request_id)

    def _speech_stopped(self, audio_ms: int) -> Iterator[Event]:
        turn, self._speaking = self._speaking, None
        if turn is None:
            return
        turn.end(audio_ms)
        yield {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": audio_ms, "item_id": turn.item.item_id}
        self._just_committed = self._just_committed or not turn.committed
        yield from self._commit(turn)
        if turn.item.request_id is None:  # no request will transcribe it
            yield from self._transcribed(turn)

    def _idled(self, note: str) -> None:
        """Respond to a silence of ``idle_timeout_ms`` after the last response. ``note`` tells the model about it."""
        heard = self._conversation.listener
        end_ms = 0 if heard is None else heard.audio_ms
        config = self._conversation.configuration.with_patch({"task": None})
        if (idle := config.idle_prompt) is None or not self._conversation.queue.opened or self._effects.overflow:
            return
        turn = Turn(spoken_item(), answered=True, start_ms=max(0, end_ms - round(1000 * idle.after_sec)), end_ms=end_ms)
        silence = {"audio_start_ms": turn.start_ms, "audio_end_ms": end_ms, "item_id": turn.item.item_id}
        self._send([{"type": "input_audio_buffer.timeout_triggered", **silence}, *self._commit(turn)])
        self._send(self._transcribed(turn))
        chunk = InputChunk(Modality.TEXT, note.encode())
        self._send(self._begin(self._conversation.respond([chunk], config, input_kept=False), config))

    # transcripts

    @property
    def _transcribing(self) -> bool:
        """Whether any turn that will wait for ``response.create`` is still being transcribed."""
        return any(turn.committed and not turn.answered for turn in self._turns.values()) or any(
            not turn.answered for turn in self._late.values()
        )

    def _late_words(self, chunk: OutputChunk) -> Iterator[Event]:
        """Render the rest of the transcript of a turn whose request has already ended."""
        turn = self._late.pop(chunk.request_id, None)
        if turn is None:
            return
        if chunk.text:
            yield from self._transcript(turn, chunk)
        yield from self._transcribed(turn, failed=chunk.failed)
        if not turn.answered:
            self._wait_for_response(turn, chunk.request_id)
            self._respond_deferred()
        self._mcp.flush()

    def _wait_for_response(self, turn: Turn, request_id: str) -> None:
        """Make a transcribed turn a pending item for the next ``response.create``, and drop its request's history."""
        self._conversation.ledger.remove(request_id)
        if turn.committed:
            self._items.heard(turn.item, turn.text)

    def _transcript(self, turn: Turn, chunk: OutputChunk) -> Iterator[Event]:
        if chunk.interim:
            text = turn.preview(chunk.text) if self._dictates else ""
        else:
            text = turn.hear(chunk.text, language=heard_language(chunk.hearing))
        if self._session.wants_transcripts and text and not turn.cleared:
            yield transcription_event(turn, "delta", delta=text)

    def _transcribed(self, turn: Turn, error: OmniError | None = None, *, failed: bool = False) -> Iterator[Event]:
        """End a turn's transcript: it is complete, or ``error`` ended its request, or recognition has ``failed``."""
        if turn.transcribed or turn.cleared:
            return
        turn.settle()
        if not self._session.wants_transcripts:
            return
        if error is None and (failed or not self._conversation.engine.capabilities.transcripts):
            error = EngineFailed("what was said could not be transcribed", param="asr")
        if error is not None and not turn.transcript:
            fields = error_fields(error)
            shown = {name: fields[name] for name in ("type", "code", "message", "param")}
            yield transcription_event(turn, "failed", error=shown)
        else:
            seconds = max(0, turn.end_ms - turn.start_ms) / 1000
            usage = {"type": "duration", "seconds": seconds}
            code = turn.language
            told: dict[str, Any] = {} if code is None else {"language": code, "languages": [{"code": code}]}
            yield transcription_event(turn, "completed", transcript=turn.text, usage=usage, **told)

    # items

    def _create_item(self, fields: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        if fields.get("type") == "mcp_approval_response":
            self._mcp.approve(self._unused(optional_id(fields.get("id"), "item.id") or new_id("item_")), fields)
            return
        after = self._items.place_of(optional_id(event.get("previous_item_id"), "previous_item_id"))
        item = read_item(fields, new_id("item_"))
        self._unused(item.item_id)
        for chunk in item.chunks:
            self._conversation.configuration.check_chunk(chunk)
        if item.kind == "function_call_output" and self._conversation.unasked.takes(item.chunks[0]):
            item.take_chunks()  # it is told at the next pause, and waits for no response
        previous = self._items.create(item, after=after)
        self._conversation.note_given()
        added = item_event("added", item, previous=previous)
        warnings = self._effects.warnings(event, self._session)
        self._send([{**added, **warnings}, item_event("done", item, previous=previous)])
        if self._speaking is not None and self._speaking.answered and not self._speaking.committed:
            self._feed()

    def _unused(self, item_id: str) -> str:
        """Return ``item_id``. Raises RealtimeRefusal if there is an item of this id."""
        if self._items.get(item_id) is not None:
            raise RealtimeRefusal("item_create_duplicate_item_id", "there is an item of this id", param="item.id")
        return item_id

    def _feed(self) -> None:
        """Feed the images of pending items to the engine, as part of the turn that is being spoken."""
        for chunk in self._items.feed():
            self._conversation.receive_chunk(chunk, now=self._now())

    def _truncate_item(self, item: Item, event: Mapping[str, Any]) -> None:
        audio_end_ms = read(event.get("audio_end_ms"), Number, "audio_end_ms")
        content_index = read(event.get("content_index", 0), Number, "content_index")
        if content_index != 0:
            raise InvalidValue("content_index must be 0: an item has one part that is heard", param="content_index")
        if item.role == "assistant" and item.request_id is not None:
            if self._media and (response := self._responses.get(item.request_id)) is not None:  # the server plays it
                response.cancel()
                self._conversation.cancel(item.request_id)
            heard = self._conversation.cut_answer(item.request_id, audio_end_ms)
            if heard is not None:
                self._items.cut(item, heard)
        self._send(
            [
                {
                    "type": "conversation.item.truncated",
                    "item_id": item.item_id,
                    "content_index": 0,
                    "audio_end_ms": round(audio_end_ms),
                }
            ]
        )

    def _known_item(self, fields: Mapping[str, Any], step: str) -> Item:
        item = self._items.get(read(fields.get("item_id"), str, "item_id"))
        if item is None:
            raise RealtimeRefusal(f"item_{step}_invalid_item_id", "there is no item of this id", param="item_id")
        return item

    # what the client asks for

    def _create_response(self, event: Mapping[str, Any], event_id: str | None) -> None:
        fields: Mapping[str, Any] = event["response"]
        if self._session.transcribes_only:
            raise InvalidValue("a transcription session has no responses", param="type")
        if fields.get("conversation") == "none":
            self._respond(event, in_conversation=False)
        elif self._find_response() is not None:
            raise RealtimeRefusal(
                "conversation_already_has_active_response", "the conversation already has an active response"
            )
        elif self._transcribing:
            if len(self._deferred) >= MAX_DEFERRED:
                raise InvalidValue("too many responses are waiting", param="type")
            self._deferred_share.resize(self._deferred_share.size + memory_of(event))
            self._deferred.append((event, event_id))
        else:
            self._respond(event, in_conversation=True)

    def _respond_deferred(self) -> None:
        """Create the deferred responses, unless a turn is still being transcribed."""
        if self._transcribing:
            return
        deferred, self._deferred = self._deferred, []
        self._deferred_share.resize(0)
        for event, event_id in deferred:
            try:
                self._create_response(event, event_id)
            except OmniError as error:
                self._send([self.error(error, event_id=event_id)])

    def _respond(self, event: Mapping[str, Any], *, in_conversation: bool) -> None:
        """Begin a response to the ``input`` of ``event``; if it has none, to the pending items or the instructions."""
        with naming("response"):
            response = read_response(event["response"])
            patch = {"task": None, **response_config(response, abilities_of(self._factory))}
            patch = {name: value for name, value in patch.items() if name not in self._media}
            config = self._conversation.configuration.with_patch(patch)
        items: list[Item] = []
        context: tuple[Message, ...] | None = None
        chunks: list[InputChunk] = []
        if response.input is not None:
            context, chunks = self._own_input(response.input)
        elif overflow := self._effects.overflow:
            raise overflow
        elif in_conversation:
            items, chunks = self._items.take_pending()
        if not chunks:
            instructions = patch.pop("instructions", None) or self._session.instructions or ""
            chunks = [InputChunk(Modality.TEXT, instructions.encode())]
            config = self._conversation.configuration.with_patch(patch)
        with self._effects.answering(response):
            request_id = self._conversation.respond(
                chunks, config, input_kept=bool(items), answer_kept=in_conversation, context=context
            )
        if items:
            self._items.asked(items, request_id)
            self._bind_audio(items, request_id, chunks)
        warnings = self._effects.warnings(event, self._session)
        begun = self._begin(request_id, config, metadata=response.metadata, in_conversation=in_conversation)
        self._send({**event, **warnings} if event["type"] == "response.created" else event for event in begun)

    def _own_input(self, given: Iterable[Mapping[str, Any]]) -> tuple[tuple[Message, ...], list[InputChunk]]:
        """Split the ``input`` of a response into its context and the chunks to answer.

        The chunks to answer are those of the last items, after the last answer or system message.
        """
        items = []
        for index, one in enumerate(given):
            place = f"response.input[{index}]"
            if one.get("type") != "item_reference":
                items.append(read_item(one, new_id("item_"), place=place))
                continue
            item = self._items.get(read(one.get("id"), str, f"{place}.id"))
            if item is None:
                raise InvalidValue("there is no item of this id", param=f"{place}.id")
            items.append(as_new(item))
        for chunk in (chunk for item in items for chunk in item.chunks):
            self._conversation.configuration.check_chunk(chunk)
        asked = len(items)
        while asked and items[asked - 1].chunks and items[asked - 1].role != "system":
            asked -= 1
        return tuple(messages_of(items[:asked])), list(as_input(items[asked:]))

    def _bind_audio(self, items: Iterable[Item], request_id: str, chunks: Iterable[InputChunk]) -> None:
        """Assign the request's transcript, that of the audio in ``chunks``, to the last of ``items`` with audio."""
        spoken = [item for item in items if any(part["type"] == "input_audio" for part in item.content)]
        if spoken:
            ms = self._duration_ms(sum(len(one.payload) for one in chunks if one.modality is Modality.AUDIO))
            self._bind(Turn(spoken[-1], answered=True, committed=True, end_ms=ms), request_id)

    def _cancel_response(self, response_id: str | None) -> None:
        response = self._find_response(response_id)
        if response is None:
            # In OpenAI's words: LiveKit's client knows by their beginning that a late cancel is harmless.
            message = "Cancellation failed: no active response found"
            raise RealtimeRefusal("response_cancel_not_active", message)
        response.cancel()
        self._conversation.cancel(response.request_id)
        self._mcp.cancel(response)

    # responses

    def _find_response(self, response_id: str | None = None) -> RealtimeResponse | None:
        """Find an open response by its id; without an id, the open response in the conversation."""
        for response in self._responses.values():
            if response.response_id == response_id or (response_id is None and response.in_conversation):
                return response
        return None

    def _begin(
        self,
        request_id: str,
        config: SessionConfig | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        in_conversation: bool = True,
    ) -> Iterator[Event]:
        """Begin the response to a request.

        If ``config`` is None, the request is a spoken turn, and has all pending items as its context.
        """
        if in_conversation:
            yield from self._mcp.release()
        if config is None:
            self._items.seen()
            config = self._conversation.configuration_of(request_id)
            if overflow := self._effects.overflow:
                self._errors[request_id] = overflow
                self._conversation.cancel(request_id)
        response = self._responses[request_id] = RealtimeResponse(
            request_id,
            config,
            conversation_id=self._conversation_id,
            add=self._items.add if in_conversation else None,
            metadata=metadata,
            account=self._conversation.account,
            server_call=self._mcp.item_of if in_conversation else lambda request_id, call_id, name: None,
        )
        yield from response.begin()

    def _started(self, request_id: str) -> Iterator[Event]:
        if request_id in self._responses or (turn := self._turns.get(request_id)) is None:
            return
        turn.start()
        if turn.committed and turn.answered:
            yield from self._begin(request_id)

    def _output(self, chunk: OutputChunk) -> Iterator[Event]:
        request_id = chunk.request_id
        if chunk.late:
            yield from self._late_words(chunk)
            return
        turn = self._turns.get(request_id)
        if chunk.modality is OutputModality.TRANSCRIPT:
            if turn is not None:
                yield from self._transcript(turn, chunk)
            return
        if turn is not None:
            if not turn.answered:
                return  # the transcript again, as the answer
            if request_id not in self._responses:  # an engine that answers while it listens
                yield from self._begin(request_id)
            able = self._conversation.engine.capabilities
            if able.transcribes_first or not able.transcripts:
                yield from self._transcribed(turn)
        if (response := self._responses.get(request_id)) is not None:
            yield from response.render(chunk)

    def _final(self, final: FinalChunk) -> Iterator[Event]:
        request_id = final.request_id
        error = self._errors.pop(request_id, None)
        if isinstance(error, RealtimeRefusal):  # it was cancelled for that
            final = replace(final, finish_reason=FinishReason.ERROR)
        turn = self._turns.get(request_id)
        follows = turn is not None and final.words is WordsKnown.NOT_YET
        if turn is not None and turn is self._dictation.turn:  # before its commit
            del self._turns[request_id]
            self._dictation.end(error)
            return
        if turn is not None:
            if follows:
                self._late[request_id] = turn
            else:
                yield from self._transcribed(turn, error, failed=final.words is WordsKnown.NEVER)
            silent = request_id not in self._responses
            if silent and turn.answered and not turn.cleared and error is not None:
                yield from self._begin(request_id)
            if not turn.answered and not follows:
                self._wait_for_response(turn, request_id)
        failed, cancelled = (final.finish_reason is one for one in (FinishReason.ERROR, FinishReason.CANCELLED))
        cut_off = (failed or cancelled) and not self._owner.is_open  # its input waits for a session that goes on
        if not cut_off:
            self._turns.pop(request_id, None)
        if (response := self._responses.get(request_id)) is not None:
            yield from response.finish(final, error, cut_off=cut_off)
            self._items.have_grown(response.items)
            if response.waits:
                yield from self._mcp.hold(response)
            else:
                del self._responses[request_id]
        if not cut_off:
            self._items.answered(request_id, failed=failed)
        if turn is not None and not turn.answered:
            self._respond_deferred()
        self._mcp.flush()


# vLLM's dialect of ``/v1/realtime``, whose clients have utterances transcribed, one after the other.


_VLLM_CONFIGURATION: Final = {
    "task": "transcribe",
    "modalities": ["text"],
    "input_audio": {"format": "pcm16", "sample_rate": 16_000},  # its one format
    "turn_detection": None,
    "history": False,
}
#: vLLM's error codes, by our own, if they differ.
_VLLM_CODES: Final = {
    "unknown_type": "unknown_event",
    "invalid_frame": "invalid_json",
    "invalid_value": "invalid_event",
}


def begins_vllm_dialect(event: Mapping[str, Any]) -> bool:
    """Return whether a client's first event is one of vLLM's dialect that OpenAI's API would refuse."""
    if event["type"] == "session.update":
        return "session" not in event and "model" in event
    return event["type"] == "input_audio_buffer.commit" and ("final" in event or event.keys() == {"type"})


def created_fields(session_id: str) -> dict[str, Any]:
    """Return the fields of ``session.created`` for vLLM's clients. They are sent to all clients."""
    return {"id": session_id, "created": int(time.time())}


class VllmDialect(SessionDialect):
    """The SessionDialect of clients of vLLM's ``/v1/realtime``, used from their first event on.

    Before, a RealtimeDialect has sent ``session.created``. An utterance begins with its first audio and ends with a
    commit that is ``final``. Any other commit changes nothing, because audio is transcribed as it arrives.
    """

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self._conversation = conversation
        self._transcribes = False
        self._hears = False
        self._text: list[str] = []

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        if not self._transcribes:  # an engine that cannot refuses each event
            self._conversation.configure(_VLLM_CONFIGURATION)
            self._transcribes = True
        match fields["type"]:
            case "session.update":
                self._conversation.configure({"model": read(fields.get("model"), str, "model")})
            case "input_audio_buffer.append":
                chunk = InputChunk(Modality.AUDIO, read(fields.get("audio"), bytes, "audio"))
                self._conversation.receive_chunk(chunk, now=now)
                self._hears = True
            case "input_audio_buffer.commit":
                if fields.get("final") is True:
                    self._end_utterance(now)
            case unknown:
                raise UnknownType(f"unknown event type {str(unknown)[:64]!r}", param="type")

    def _end_utterance(self, now: float) -> None:
        if not self._hears:
            self._send([_transcription_done("", 0, 0)])
            return
        self._hears = False
        self._conversation.receive_chunk(InputChunk(Modality.AUDIO, b"", end_of_input=True), now=now)

    def render(self, message: ServerMessage) -> Iterator[Event]:
        match message:
            case OutputChunk(modality=OutputModality.TEXT, text=text):
                self._text.append(text)
                yield {"type": "transcription.delta", "delta": text}
            case FinalChunk(finish_reason=reason, usage=usage):
                text, self._text = "".join(self._text), []
                if reason is not FinishReason.ERROR:
                    yield _transcription_done(text, usage.input_tokens, usage.output_tokens)
            case OmniError():
                self._reported = message
                yield self.error(message)

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        """Return an error as an event of vLLM's dialect, whose field ``error`` is a string. The event has no id."""
        code = "invalid_audio" if error.param == "audio" else _VLLM_CODES.get(error.code, error.code)
        return {"type": "error", "error": error.message, "code": code}

    def close(self) -> None:
        pass  # it holds nothing that is charged


def _transcription_done(text: str, prompt_tokens: int, completion_tokens: int) -> Event:
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return {"type": "transcription.done", "text": text, "usage": usage}
