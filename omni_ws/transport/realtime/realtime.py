"""RealtimeDialect: translates the events of OpenAI's Realtime API to and from a conversation. Has no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from msgspec import Struct

from omni_ws.core.chunks import (
    AudioFormat,
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
from omni_ws.service.conversation.messages import SavedError, ServerMessage
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.realtime.items import (
    ConversationItems,
    Event,
    Numbered,
    RealtimeResponse,
    SavedItems,
    SavedResponse,
    SavedTurn,
    Turn,
    as_input,
    as_new,
    messages_of,
    spoken_item,
)
from omni_ws.transport.realtime.vllm_dialect import created_fields
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import (
    Item,
    Number,
    RealtimeRefusal,
    error_event,
    error_fields,
    item_event,
    optional_id,
    read,
    read_item,
)
from omni_ws.wire.realtime_session import (
    RealtimeAbilities,
    SessionFields,
    merged_session,
    read_response,
    response_config,
    session_config,
    session_object,
)
from omni_ws.wire.server_frames import (
    ResponseStartedFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)
from omni_ws.wire.session_config import SessionConfig

#: The path of each field of ``session_config`` in OpenAI's session object, for errors.
_FIELDS: Final = {
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "modalities": "output_modalities",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.temperature": "temperature",
    "input_audio.sample_rate": "audio.input.format.rate",
    "input_audio.prompt": "audio.input.transcription.prompt",
    "input_audio.echo": "audio.input.echo",
    "input_audio.noise_reduction": "audio.input.noise_reduction.type",
    "output_audio.sample_rate": "audio.output.format.rate",
    "task": "audio.input.turn_detection.create_response",
    **{
        f"turn_detection.{name}": f"audio.input.turn_detection.{name}"
        for name in ("threshold", "prefix_padding_ms", "silence_duration_ms", "interrupt_response", "eagerness", "duck")
    },
}
#: Responses that may wait for the transcript of a turn.
MAX_DEFERRED: Final = 4


def abilities_of(factory: SessionFactory) -> RealtimeAbilities:
    """Return what the engine of this server can do in a Realtime session."""
    able = factory.engine.capabilities
    hears = Modality.AUDIO in able.input_modalities
    sampling = able.sampling | able.sampling_no_ops
    return RealtimeAbilities(
        audio_output=OutputModality.AUDIO in able.output_modalities,
        text_output=OutputModality.TEXT in able.output_modalities,
        turn_detection_types=tuple(factory.speech_workers.turn_detection_types) if hears else (),
        languages=frozenset(able.languages),
        keywords=able.keywords,
        cleans_audio=factory.speech_workers.cleans_audio,
        temperature="temperature" in sampling,
        max_tokens="max_tokens" in sampling,
    )


class SavedRealtime(Struct, kw_only=True, tag="realtime"):
    """The state of a RealtimeDialect, besides its conversation, in a form that can be written to bytes."""

    conversation_id: str
    session: SessionFields
    #: All items and all turns; other fields refer to them by their indices here.
    items: list[Item]
    turns: list[SavedTurn]
    conversation: SavedItems
    #: Audio that is not committed.
    audio: bytes
    #: The turns that are the input of open requests, and those of ended requests whose transcript is incomplete, by
    #: request id; and the turn that is being spoken.
    input_of: dict[str, int]
    late: dict[str, int]
    speaking: int | None
    responses: list[SavedResponse]
    errors: dict[str, SavedError]
    deferred: list[tuple[dict[str, Any], str | None]]


class RealtimeDialect:
    """Handles the client events of one session, and renders the messages of its conversation as server events.

    ``receive`` raises an InvalidRequest for an event that is refused, and any other OmniError to end the session.
    """

    def __init__(
        self,
        session: Session,
        factory: SessionFactory,
        bound: SessionFields,
        *,
        media: Mapping[str, Any] | None = None,
        saved: SavedRealtime | None = None,
    ) -> None:
        """Create the dialect of a new session, or of a restored one from its state ``saved``.

        ``bound`` is the session object to begin with; ``media`` are fields of ``session_config`` that the transport
        decides, whatever the client sets. Raises IndexError, KeyError or EngineOverloaded if ``saved`` cannot be
        restored here.
        """
        conversation = session.conversation
        limit = factory.config.streaming_input.max_payload_per_session
        account = conversation.account
        self._session_id = session.session_id
        self._conversation_id = new_id("conv_")
        self._conversation = conversation
        self._media = media or {}
        self._factory = factory
        #: The session object as the client has set it.
        self._session = bound
        self._settings_share = Share(account)
        self._items = ConversationItems(conversation.ledger, account, max_bytes=limit)
        self._now = asyncio.get_running_loop().time
        #: Audio that was appended and not committed, if no turns are detected.
        self._audio = bytearray()
        self._audio_share = Share(account)
        self._audio_limit = limit
        #: The turn that is the input of each open request, by request id.
        self._turns: dict[str, Turn] = {}
        #: The turn that is being spoken.
        self._speaking: Turn | None = None
        #: Turns whose request has ended, and whose transcript is not complete yet, by request id.
        self._late: dict[str, Turn] = {}
        #: The responses that are not done, by request id.
        self._responses: dict[str, RealtimeResponse] = {}
        #: Errors of requests that have no response, until their finals.
        self._errors: dict[str, OmniError] = {}
        #: The ``response.create`` events that wait for the transcript of a turn: the response, and the event's id.
        self._deferred: list[tuple[Mapping[str, Any], str | None]] = []
        self._deferred_share = Share(account)
        self._reported: OmniError | None = None
        self._send: Callable[[Iterable[Event]], None] = lambda events: None
        self._output_cleared: Callable[[str | None], None] = lambda response_id: None
        conversation.keeps_configurations = True
        self._goes_on = saved is not None
        try:
            if saved is not None:
                self._restore(saved)
            else:
                conversation.ledger.play_at_once()  # unless ``conversation.item.truncate`` says otherwise
                conversation.configure(self._config(bound))
            self._settings_share.resize(beyond_ordinary(memory_of(self._session)))
        except BaseException:
            self.close()
            raise

    def connect(
        self, send: Callable[[Iterable[Event]], None], output_cleared: Callable[[str | None], None]
    ) -> list[Event]:
        """Set the functions that reach the client. Returns the first events to send: none if the session was restored.

        ``send`` sends events at once. ``output_cleared`` is called after ``output_audio_buffer.clear``, with the id of
        the response that was cancelled by it; None if there was none.
        """
        self._send, self._output_cleared = send, output_cleared
        self._conversation.followed = self._engine_changed
        if self._goes_on:
            return []
        return self.greeting()

    def greeting(self) -> list[Event]:
        """Return the events with which a client is told what the session is."""
        return [{"type": "session.created", "session": self._session_object(), **created_fields(self._session_id)}]

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        """Handle one event of the client, which arrived at the time ``now``."""
        match fields["type"]:
            case "input_audio_buffer.append":
                self.append(read(fields.get("audio"), bytes, "audio"), now)
            case "session.update" | "transcription_session.update":
                self._update_session(fields)
            case "input_audio_buffer.commit":
                self._commit_audio()
            case "input_audio_buffer.clear":
                self._clear_audio()
            case "output_audio_buffer.clear":
                self._clear_output()
            case "conversation.item.create":
                self._create_item(object_field(fields, "item"))
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
                self._create_response(response, optional_id(fields.get("event_id"), "event_id"))
            case "response.cancel":
                self._cancel_response(optional_id(fields.get("response_id"), "response_id"))
            case kind:
                raise UnknownType(f"unknown event type {kind[:64]!r}", param="type")

    def render(self, message: ServerMessage) -> Iterator[Event]:
        """Render a message of the conversation as events; none for messages that the Realtime API does not have."""
        match message:
            case OutputChunk():
                yield from self._output(message)
            case FinalChunk():
                yield from self._final(message)
            case ResponseStartedFrame(trigger=StartTrigger.FILLER, request_id=request_id):
                config = self._conversation.configuration_of(request_id)
                metadata = {"trigger": message.trigger}
                yield from self._begin(request_id, config, metadata=metadata, in_conversation=False)
            case ResponseStartedFrame(trigger=StartTrigger.TELLING, request_id=request_id):
                config = self._conversation.configuration_of(request_id)
                yield from self._begin(request_id, config, metadata={"trigger": message.trigger})
            case ResponseStartedFrame(request_id=request_id):
                yield from self._started(request_id)
            case SpeechStartedFrame(certain=False) | SpeechDismissedFrame():
                pass  # clients are told of speech that does interrupt
            case (
                SpeechStartedFrame(audio_ms=audio_ms, request_id=request_id)
                | SpeechConfirmedFrame(audio_ms=audio_ms, request_id=request_id)
            ):
                yield from self._speech_started(audio_ms, request_id)
            case SpeechStoppedFrame(audio_ms=audio_ms):
                yield from self._speech_stopped(audio_ms)
            case OmniError(request_id=None):
                self._reported = message
                yield self.error(message)
            case OmniError(request_id=str(request_id)):
                self._errors[request_id] = message

    error = staticmethod(error_event)

    def reported(self, error: OmniError) -> bool:
        """Return whether the client has been sent this error."""
        return self._reported is error

    def close(self) -> None:
        """Release all bytes that are charged to the session."""
        self._items.close()
        for response in self._responses.values():
            response.close()
        self._drop_audio()
        self._deferred.clear()
        for share in (self._settings_share, self._deferred_share):
            share.resize(0)

    # saved

    def saved(self) -> SavedRealtime:
        """Return the state of the dialect."""
        items, turns = Numbered[Item](), Numbered[Turn]()
        input_of = {request_id: turns.number(turn) for request_id, turn in self._turns.items()}
        late = {request_id: turns.number(turn) for request_id, turn in self._late.items()}
        speaking = None if self._speaking is None else turns.number(self._speaking)
        return SavedRealtime(
            conversation_id=self._conversation_id,
            session=self._session,
            turns=[SavedTurn.of(turn, items) for turn in turns.found],
            conversation=self._items.saved(items),
            audio=bytes(self._audio),
            input_of=input_of,
            late=late,
            speaking=speaking,
            responses=[response.saved(items) for response in self._responses.values()],
            errors={request_id: SavedError.of(error) for request_id, error in self._errors.items()},
            deferred=[(dict(fields), event_id) for fields, event_id in self._deferred],
            items=items.found,
        )

    def _restore(self, saved: SavedRealtime) -> None:
        self._conversation_id, self._session = saved.conversation_id, saved.session
        items, turns = saved.items, [turn.restored(saved.items) for turn in saved.turns]
        self._items.restore(saved.conversation, items)
        self._audio_share.resize(len(saved.audio))
        self._audio += saved.audio
        self._turns = {request_id: turns[number] for request_id, number in saved.input_of.items()}
        self._late = {request_id: turns[number] for request_id, number in saved.late.items()}
        self._speaking = None if saved.speaking is None else turns[saved.speaking]
        for one in saved.responses:
            response = self._open_response(
                one.request_id, one.config, metadata=one.metadata, in_conversation=one.in_conversation
            )
            response.restore(one, items)
        self._errors = {request_id: error.restored() for request_id, error in saved.errors.items()}
        self._deferred = [*saved.deferred]
        self._deferred_share.resize(sum(memory_of(fields) for fields, _ in saved.deferred))

    # the session

    def _session_object(self) -> dict[str, Any]:
        config = self._conversation.configuration.effective
        return session_object(self._session, config, session_id=self._session_id)

    def _engine_changed(self, config: SessionConfig) -> None:
        """Tell the client that the engine has become another one, with the settings that are in effect now."""
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
            with _naming("session"):
                self._conversation.configure(self._config(session))
        except OmniError as error:
            self._settings_share.force(before)
            if not isinstance(error, EngineOverloaded):
                raise
            # Elsewhere EngineOverloaded ends a session. This one goes on with its old settings.
            event_id = event.get("event_id")
            self._send([self.error(error, event_id=event_id if isinstance(event_id, str) else None)])
            return
        self._session = session
        if self._detects_turns:
            self._drop_audio()
        elif detected and self._speaking is not None:  # no silence will end it
            self._conversation.finish()
            self._send(self._commit(self._speaking))
        self._send([{"type": "session.updated", "session": self._session_object()}])

    def _config(self, session: SessionFields) -> dict[str, Any]:
        config = session_config(session, abilities_of(self._factory))
        for name, decided in self._media.items():
            config[name] = {**config[name], **decided} if isinstance(decided, Mapping) else decided
        return config

    @property
    def speech_interrupts(self) -> bool:
        """Whether the beginning of a turn silences the answer."""
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
        self._conversation.note_given()
        size = len(self._audio) + len(chunk.payload)
        if size > self._audio_limit:
            raise PayloadTooLarge(f"at most {self._audio_limit} bytes of audio may wait to be committed", param="audio")
        self._audio_share.resize(size)
        self._audio += chunk.payload

    def _commit_audio(self) -> None:
        if self._detects_turns:
            turn = self._speaking
            if turn is None or turn.committed or turn.cleared:
                raise _empty_buffer()
            turn.end(turn.end_ms or turn.start_ms)
            self._conversation.finish()
            self._send(self._commit(turn))
            return
        if not self._audio:
            raise _empty_buffer()
        audio = InputChunk(Modality.AUDIO, bytes(self._audio))
        session = self._session
        kept = () if session.transcribes_only else (audio,)
        turn = Turn(spoken_item(*kept), session.answers_turns, end_ms=self._duration_ms(len(audio.payload)))
        self._drop_audio()
        self._send(self._commit(turn))
        if session.transcribes_only:
            config = self._conversation.configuration.effective
            self._bind(turn, self._conversation.respond([audio], config, input_kept=False, answer_kept=False))

    def _clear_audio(self) -> None:
        turn = self._speaking
        self._conversation.spoken.dismiss(rest_untold=True)
        if self._detects_turns and turn is not None and not turn.committed:
            turn.clear()
            if turn.item.request_id is not None:
                self._conversation.cancel(turn.item.request_id)
        self._drop_audio()
        self._send([{"type": "input_audio_buffer.cleared"}])

    def _clear_output(self) -> None:
        response = self._find_response()
        if response is not None:
            response.cancel()
            self._conversation.cancel(response.request_id)
        self._output_cleared(None if response is None else response.response_id)

    def _drop_audio(self) -> None:
        self._audio.clear()
        self._audio_share.resize(0)

    def _duration_ms(self, size: int) -> int:
        audio = self._conversation.configuration.effective.input_audio
        return round(AudioFormat(audio.format, audio.sample_rate, audio.channels).duration_ms(size))

    # spoken turns

    def _bind(self, turn: Turn, request_id: str) -> None:
        """Note that ``turn`` is the input of the request."""
        self._turns[request_id] = turn
        turn.item.asked(request_id)

    def _commit(self, turn: Turn) -> Iterator[Event]:
        """Make the turn's item part of the conversation; begin the response if the engine already works on the turn."""
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
        elif self._session.interrupts_answers and (response := self._find_response()) is not None:
            self._conversation.cancel(response.request_id)

    def _speech_stopped(self, audio_ms: int) -> Iterator[Event]:
        turn, self._speaking = self._speaking, None
        if turn is None:
            return
        turn.end(audio_ms)
        yield {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": audio_ms, "item_id": turn.item.item_id}
        yield from self._commit(turn)
        if turn.item.request_id is None:  # no request will transcribe it
            yield from self._transcribed(turn)

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

    def _wait_for_response(self, turn: Turn, request_id: str) -> None:
        """Make a transcribed turn a pending item, which waits for ``response.create``, in place of its request."""
        self._conversation.ledger.remove(request_id)
        if turn.committed:
            self._items.heard(turn.item, turn.text)

    def _transcript(self, turn: Turn, chunk: OutputChunk) -> Iterator[Event]:
        text = chunk.text
        turn.hear(text, language=heard_language(chunk.hearing))
        if self._session.wants_transcripts and text and not turn.cleared:
            yield _transcription(turn, "delta", delta=text)

    def _transcribed(self, turn: Turn, error: OmniError | None = None, *, failed: bool = False) -> Iterator[Event]:
        """End the transcript of a turn: it is complete, or ``error`` ended the request, or recognition ``failed``."""
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
            yield _transcription(turn, "failed", error=shown)
        else:
            seconds = max(0, turn.end_ms - turn.start_ms) / 1000
            usage = {"type": "duration", "seconds": seconds}
            told = {} if turn.language is None else {"language": turn.language}
            yield _transcription(turn, "completed", transcript=turn.text, usage=usage, **told)

    # items

    def _create_item(self, fields: Mapping[str, Any]) -> None:
        item = read_item(fields, new_id("item_"))
        if self._items.get(item.item_id) is not None:
            raise RealtimeRefusal("item_create_duplicate_item_id", "there is an item of this id", param="item.id")
        for chunk in item.chunks:
            self._conversation.configuration.check_chunk(chunk)
        if item.kind == "function_call_output" and self._conversation.unasked.takes(item.chunks[0]):
            item.take_chunks()  # it is told at the next pause, and waits for no response
        previous = self._items.create(item)
        self._conversation.note_given()
        self._send([item_event("added", item, previous=previous), item_event("done", item, previous=previous)])
        if self._speaking is not None and self._speaking.answered and not self._speaking.committed:
            self._feed()

    def _feed(self) -> None:
        """Feed the waiting images to the engine, as part of the turn that is being spoken."""
        for chunk in self._items.feed():
            self._conversation.receive_chunk(chunk, now=self._now())

    def _truncate_item(self, item: Item, event: Mapping[str, Any]) -> None:
        audio_end_ms = read(event.get("audio_end_ms"), Number, "audio_end_ms")
        content_index = read(event.get("content_index", 0), Number, "content_index")
        if item.role == "assistant" and item.request_id is not None:
            heard = self._conversation.cut_answer(item.request_id, audio_end_ms)
            if heard is not None:
                self._items.cut(item, heard)
        self._send(
            [
                {
                    "type": "conversation.item.truncated",
                    "item_id": item.item_id,
                    "content_index": int(content_index),
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

    def _create_response(self, fields: Mapping[str, Any], event_id: str | None) -> None:
        if self._session.transcribes_only:
            raise InvalidValue("a transcription session has no responses", param="type")
        if fields.get("conversation") == "none":
            self._respond(fields, in_conversation=False)
        elif self._find_response() is not None:
            raise RealtimeRefusal(
                "conversation_already_has_active_response", "the conversation already has an active response"
            )
        elif self._transcribing:
            if len(self._deferred) >= MAX_DEFERRED:
                raise InvalidValue("too many responses are waiting", param="type")
            self._deferred_share.resize(self._deferred_share.size + memory_of(fields))
            self._deferred.append((fields, event_id))
        else:
            self._respond(fields, in_conversation=True)

    def _respond_deferred(self) -> None:
        """Create the responses that waited, if no turn is left to be transcribed."""
        if self._transcribing:
            return
        deferred, self._deferred = self._deferred, []
        self._deferred_share.resize(0)
        for fields, event_id in deferred:
            try:
                self._create_response(fields, event_id)
            except OmniError as error:
                self._send([self.error(error, event_id=event_id)])

    def _respond(self, fields: Mapping[str, Any], *, in_conversation: bool) -> None:
        """Begin a response to its own ``input``; without one to the pending items, or else to the instructions."""
        with _naming("response"):
            response = read_response(fields)
            patch = {"task": None, **response_config(response, abilities_of(self._factory))}
            config = self._conversation.configuration.with_patch(patch)
        items: list[Item] = []
        context: tuple[Message, ...] | None = None
        chunks: list[InputChunk] = []
        if response.input is not None:
            context, chunks = self._own_input(response.input)
        elif in_conversation:
            items, chunks = self._items.take_pending()
        if not chunks:
            instructions = patch.pop("instructions", None) or self._session.instructions or ""
            chunks = [InputChunk(Modality.TEXT, instructions.encode())]
            config = self._conversation.configuration.with_patch(patch)
        request_id = self._conversation.respond(
            chunks, config, input_kept=bool(items), answer_kept=in_conversation, context=context
        )
        if items:
            self._items.asked(items, request_id)
            self._bind_audio(items, request_id)
        self._send(self._begin(request_id, config, metadata=response.metadata, in_conversation=in_conversation))

    def _own_input(self, given: Iterable[Mapping[str, Any]]) -> tuple[tuple[Message, ...], list[InputChunk]]:
        """Split a response's own ``input`` into context and the chunks to answer: those after the last answer in it."""
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

    def _bind_audio(self, items: Iterable[Item], request_id: str) -> None:
        """Bind the last item with audio to the request: the request's transcript is that of this audio."""
        spoken = [item for item in items if any(part["type"] == "input_audio" for part in item.content)]
        if spoken:
            self._bind(Turn(spoken[-1], answered=True, committed=True), request_id)

    def _cancel_response(self, response_id: str | None) -> None:
        response = self._find_response(response_id)
        if response is None:
            # In OpenAI's words: LiveKit's client knows by their beginning that a late cancel is harmless.
            message = "Cancellation failed: no active response found"
            raise RealtimeRefusal("response_cancel_not_active", message)
        response.cancel()
        self._conversation.cancel(response.request_id)

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
        """Begin the response of a request.

        Without ``config`` the request is that of a spoken turn, with all pending items as its context.
        """
        if config is None:
            self._items.seen()
            config = self._conversation.configuration_of(request_id)
        response = self._open_response(request_id, config, metadata=metadata, in_conversation=in_conversation)
        yield from response.begin()

    def _open_response(
        self, request_id: str, config: SessionConfig, *, metadata: Mapping[str, str] | None, in_conversation: bool
    ) -> RealtimeResponse:
        response = self._responses[request_id] = RealtimeResponse(
            request_id,
            config,
            conversation_id=self._conversation_id,
            add=self._items.add if in_conversation else None,
            metadata=metadata,
            account=self._conversation.account,
        )
        return response

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
            if turn is not None and not chunk.interim:
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
        turn = self._turns.get(request_id)
        follows = turn is not None and final.words is WordsKnown.NOT_YET
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
        self._turns.pop(request_id, None)
        if (response := self._responses.get(request_id)) is not None:
            yield from response.finish(final, error)
            del self._responses[request_id]
            self._items.have_grown(response.items)
        self._items.answered(request_id, failed=final.finish_reason is FinishReason.ERROR)
        if turn is not None and not turn.answered:
            self._respond_deferred()


def _transcription(turn: Turn, kind: str, **fields: Any) -> Event:
    return {
        "type": f"conversation.item.input_audio_transcription.{kind}",
        "item_id": turn.item.item_id,
        "content_index": 0,
        **fields,
    }


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Inside the block, let errors name the field as OpenAI does, in ``place``: ``session`` or ``response``."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and not error.param.startswith(f"{place}."):
            error.about(param=f"{place}.{_FIELDS.get(error.param, error.param)}")
        raise


def _empty_buffer() -> RealtimeRefusal:
    return RealtimeRefusal("input_audio_buffer_commit_empty", "there is no audio to commit")
