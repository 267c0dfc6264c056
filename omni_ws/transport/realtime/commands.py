"""Commands: what the client events of the Realtime API do to a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from omni_ws.core.chunks import AudioFormat, InputChunk, Modality, OutputModality
from omni_ws.core.history import Message
from omni_ws.core.quota import Share, beyond_ordinary, memory_of
from omni_ws.errors import EngineOverloaded, InvalidRequest, InvalidValue, OmniError, PayloadTooLarge, UnknownType
from omni_ws.service.conversation.conversation import WholeRequest, respond
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.failure import new_id
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.realtime.response import Event, Turn, created_fields
from omni_ws.transport.realtime.translator import ConversationItems, Translator, as_input, as_new, messages_of
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import (
    Item,
    RealtimeRefusal,
    base64_field,
    error_fields,
    metadata_field,
    number_field,
    optional_id,
    read_item,
    text_field,
)
from omni_ws.wire.realtime_session import (
    RealtimeAbilities,
    answers_turns,
    interrupts_answers,
    merged_session,
    response_config,
    session_config,
    session_object,
    transcribes_only,
)

#: Where a field of ``session_config`` comes from.
_FIELDS: Final = {
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "modalities": "output_modalities",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.temperature": "temperature",
    "input_audio.sample_rate": "audio.input.format.rate",
    "output_audio.sample_rate": "audio.output.format.rate",
    "task": "audio.input.turn_detection.create_response",
    **{
        f"turn_detection.{name}": f"audio.input.turn_detection.{name}"
        for name in ("threshold", "prefix_padding_ms", "silence_duration_ms", "interrupt_response", "eagerness")
    },
}
#: Responses that may wait for the transcript of a turn.
MAX_DEFERRED: Final = 4


def abilities_of(factory: SessionFactory) -> RealtimeAbilities:
    """What the engine of this server has."""
    able = factory.engine.capabilities
    hears = Modality.AUDIO in able.input_modalities
    sampling = able.sampling | able.sampling_no_ops
    return RealtimeAbilities(
        audio_output=OutputModality.AUDIO in able.output_modalities,
        text_output=OutputModality.TEXT in able.output_modalities,
        turn_detection_types=tuple(factory.speech_workers.turn_detection_types) if hears else (),
        languages=frozenset(able.languages),
        temperature="temperature" in sampling,
        max_tokens="max_tokens" in sampling,
    )


class Commands:
    """Takes the client events of one session, and renders what its conversation says to them.

    Raises an InvalidRequest for an event that is refused, and any other OmniError for the end of the session.
    """

    def __init__(
        self,
        session: Session,
        factory: SessionFactory,
        bound: Mapping[str, Any],
        *,
        media: Mapping[str, Any] | None = None,
    ) -> None:
        """``bound`` is the session object to begin with; ``media`` are fields of ``session_config`` that the transport
        decides, whatever the client sets."""
        self._media = media or {}
        conversation = session.conversation
        self._session_id = session.session_id
        self._conversation = conversation
        conversation.keeps_configurations = True
        self._abilities = abilities_of(factory)
        limit = factory.config.streaming_input.max_payload_per_session
        account = conversation.account
        self._items = ConversationItems(conversation.ledger, account, max_bytes=limit)
        start = merged_session({}, bound)
        #: Of the session object, and of what waits to be responded to.
        self._settings_share = Share(account)
        self._deferred_share = Share(account)
        self._translator = Translator(conversation, self._items, start)
        self._translator.on_transcribed = self._respond_deferred
        self._translator.on_speech = self._feed
        self._now = asyncio.get_running_loop().time
        #: Audio that was appended and not committed, where no turns are detected.
        self._audio = bytearray()
        self._audio_share = Share(account)
        self._audio_limit = limit
        #: ``response.create`` events that wait for the transcript of a turn.
        self._deferred: list[tuple[Mapping[str, Any], str | None]] = []
        self._reported: OmniError | None = None
        #: Sends events at once. Set by the connection.
        self.send: Callable[[Iterable[Event]], None] = lambda events: None
        #: Answers ``output_audio_buffer.clear`` with the response that it cancels. Replaced where the server plays.
        self.output_cleared: Callable[[str | None], None] = self._say_cleared
        conversation.plays_at_once = True  # unless ``conversation.item.truncate`` says otherwise
        conversation.configure(self._config(start))
        self._settings_share.resize(beyond_ordinary(memory_of(start)))
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "session.update": self._update_session,
            "transcription_session.update": self._update_session,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "output_audio_buffer.clear": self._clear_output,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    def created(self) -> list[Event]:
        """The first event of a session."""
        return [{"type": "session.created", "session": self._session_object(), **created_fields(self._session_id)}]

    def receive(self, event: dict[str, Any], *, now: float) -> None:
        """One event of the client, which arrived at the time ``now``."""
        kind = event["type"]
        if kind == "input_audio_buffer.append":
            self.append(base64_field(event, "audio"), now)
        elif (handler := self._handlers.get(kind)) is not None:
            handler(event)
        else:
            raise UnknownType(f"unknown event type {kind[:64]!r}", param="type")

    def render(self, message: ServerMessage) -> Iterator[Event]:
        """The events of what the conversation sends."""
        if isinstance(message, OmniError) and message.request_id is None:
            self._reported = message
        return self._translator.render(message)

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        """The event that reports an error; ``event_id`` is that of the client's event that caused it."""
        return {"type": "error", "error": error_fields(error, event_id=event_id)}

    def reported(self, error: OmniError) -> bool:
        """Whether the client has been sent this error."""
        return self._reported is error

    def close(self) -> None:
        """Release what is held."""
        self._items.close()
        self._translator.close()
        self._drop_audio()
        self._deferred.clear()
        for share in (self._settings_share, self._deferred_share):
            share.resize(0)

    # the session

    def _session_object(self) -> dict[str, Any]:
        config = self._conversation.configuration.effective
        return session_object(self._translator.session, config, session_id=self._session_id)

    def _update_session(self, event: dict[str, Any]) -> None:
        patch = object_field(event, "session")
        if event["type"] == "transcription_session.update":
            patch = {**patch, "type": "transcription"}
        session = merged_session(self._translator.session, patch)
        detected, before = self._detects_turns, self._settings_share.size
        try:
            self._settings_share.resize(beyond_ordinary(memory_of(session)))
            with _session_names():
                self._conversation.configure(self._config(session))
        except OmniError as error:
            self._settings_share.force(before)
            if not isinstance(error, EngineOverloaded):
                raise
            # It ends a session elsewhere. This one goes on as it was.
            self.send([self.error(error, event_id=optional_id(event, "event_id"))])
            return
        self._translator.session = session
        if self._detects_turns:
            self._drop_audio()
        elif detected and (turn := self._translator.turns.speaking) is not None:  # no silence will end it
            self._conversation.finish()
            self.send(self._translator.commit(turn))
        self.send([{"type": "session.updated", "session": self._session_object()}])

    def _config(self, session: Mapping[str, Any]) -> dict[str, Any]:
        config = session_config(session, self._abilities)
        for name, decided in self._media.items():
            config[name] = {**config[name], **decided} if isinstance(decided, Mapping) else decided
        return config

    @property
    def speech_interrupts(self) -> bool:
        """Whether the beginning of a turn silences the answer."""
        return self._detects_turns and interrupts_answers(self._translator.session)

    @property
    def _detects_turns(self) -> bool:
        return self._conversation.configuration.effective.turn_detection is not None

    # audio

    def append(self, audio: bytes, now: float) -> None:
        """Audio in the format of the session. Raises as ``receive`` does."""
        chunk = InputChunk(Modality.AUDIO, audio)
        self._conversation.configuration.check_chunk(chunk)
        if self._detects_turns:
            self._conversation.receive_chunk(chunk, now=now)
            return
        self._conversation.given = True
        size = len(self._audio) + len(chunk.payload)
        if size > self._audio_limit:
            raise PayloadTooLarge(f"at most {self._audio_limit} bytes of audio may wait to be committed", param="audio")
        self._audio_share.resize(size)
        self._audio += chunk.payload

    def _commit(self, event: dict[str, Any]) -> None:
        if self._detects_turns:
            turn = self._translator.turns.speaking
            if turn is None or turn.committed or turn.cleared:
                raise _empty_buffer()
            turn.end_ms = turn.end_ms or turn.start_ms
            self._conversation.finish()
            self.send(self._translator.commit(turn))
            return
        if not self._audio:
            raise _empty_buffer()
        audio = InputChunk(Modality.AUDIO, bytes(self._audio))
        item = Item(item_id=new_id("item_"), role="user", content=[{"type": "input_audio", "transcript": None}])
        turn = Turn(item, answers_turns(self._translator.session), end_ms=self._duration_ms(len(audio.payload)))
        self._drop_audio()
        if turn.answered or not transcribes_only(self._translator.session):
            item.chunks = [audio]
        self.send(self._translator.commit(turn))
        if transcribes_only(self._translator.session):
            config = self._conversation.configuration.effective
            asked = WholeRequest(chunks=[audio], config=config, input_kept=False, answer_kept=False)
            self._translator.turns.bind(turn, respond(self._conversation, asked))

    def _clear(self, event: dict[str, Any]) -> None:
        turn = self._translator.turns.speaking
        if self._detects_turns and turn is not None and not turn.committed:
            turn.cleared = True
            if turn.item.request_id is not None:
                self._conversation.cancel(turn.item.request_id)
        self._drop_audio()
        self.send([{"type": "input_audio_buffer.cleared"}])

    def _clear_output(self, event: dict[str, Any]) -> None:
        response = self._translator.find_response()
        if response is not None:
            response.cancel_reason = "client_cancelled"
            self._conversation.cancel(response.request_id)
        self.output_cleared(None if response is None else response.response_id)

    def _say_cleared(self, response_id: str | None) -> None:
        if response_id is not None:
            self.send([{"type": "output_audio_buffer.cleared", "response_id": response_id}])

    def _drop_audio(self) -> None:
        self._audio.clear()
        self._audio_share.resize(0)

    def _duration_ms(self, size: int) -> int:
        audio = self._conversation.configuration.effective.input_audio
        return round(AudioFormat(audio.format, audio.sample_rate, audio.channels).duration_ms(size))

    # items

    def _create_item(self, event: dict[str, Any]) -> None:
        item = read_item(object_field(event, "item"), new_id("item_"))
        if self._items.get(item.item_id) is not None:
            raise RealtimeRefusal("item_create_duplicate_item_id", "there is an item of this id", param="item.id")
        for chunk in item.chunks:
            self._conversation.configuration.check_chunk(chunk)
        previous = self._items.create(item)
        self._conversation.given = True
        shown = item.shown()
        self.send(
            {"type": f"conversation.item.{step}", "previous_item_id": previous, "item": shown}
            for step in ("added", "done")
        )
        turn = self._translator.turns.speaking
        if turn is not None and turn.answered and not turn.committed:
            self._feed()

    def _feed(self) -> None:
        """Show the engine, with what is being spoken, the images that wait."""
        for chunk in self._items.feed():
            self._conversation.receive_chunk(chunk, now=self._now())

    def _retrieve_item(self, event: dict[str, Any]) -> None:
        item = self._known_item(event, "item_retrieve_invalid_item_id")
        self.send([{"type": "conversation.item.retrieved", "item": item.shown()}])

    def _delete_item(self, event: dict[str, Any]) -> None:
        item = self._known_item(event, "item_delete_invalid_item_id")
        self._items.delete(item)
        self.send([{"type": "conversation.item.deleted", "item_id": item.item_id}])

    def _truncate_item(self, event: dict[str, Any]) -> None:
        item = self._known_item(event, "item_truncate_invalid_item_id")
        played_ms = number_field(event, "audio_end_ms")
        if item.role == "assistant" and item.request_id is not None:
            heard = self._conversation.cut_answer(item.request_id, played_ms)
            if heard is not None:
                self._items.cut(item, heard)
        self.send(
            [
                {
                    "type": "conversation.item.truncated",
                    "item_id": item.item_id,
                    "content_index": int(number_field(event, "content_index", default=0)),
                    "audio_end_ms": round(played_ms),
                }
            ]
        )

    def _known_item(self, event: dict[str, Any], code: str) -> Item:
        item = self._items.get(text_field(event, "item_id"))
        if item is None:
            raise RealtimeRefusal(code, "there is no item of this id", param="item_id")
        return item

    # responses

    def _create_response(self, event: dict[str, Any]) -> None:
        fields = object_field(event, "response")
        event_id = optional_id(event, "event_id")
        if transcribes_only(self._translator.session):
            raise InvalidValue("a transcription session has no responses", param="type")
        if fields.get("conversation") == "none":
            self._respond(fields, in_conversation=False)
        elif self._translator.find_response() is not None:
            raise RealtimeRefusal(
                "conversation_already_has_active_response", "the conversation already has an active response"
            )
        elif self._translator.transcribing:
            if len(self._deferred) >= MAX_DEFERRED:
                raise InvalidValue("too many responses are waiting", param="type")
            self._deferred_share.resize(self._deferred_share.size + memory_of(fields))
            self._deferred.append((fields, event_id))
        else:
            self._respond(fields, in_conversation=True)

    def _respond(self, fields: Mapping[str, Any], *, in_conversation: bool) -> None:
        """Answer the input of the response, or what is pending, or else what the instructions say."""
        metadata = metadata_field(fields)
        with _response_names():
            patch = {"task": None, **response_config(fields, self._abilities)}
            config = self._conversation.configuration.with_patch(patch)
        items: list[Item] = []
        context: tuple[Message, ...] | None = None
        chunks: list[InputChunk] = []
        if fields.get("input") is not None:
            context, chunks = self._own_input(fields["input"])
        elif in_conversation:
            items, chunks = self._items.take_pending()
        if not chunks:
            instructions = patch.pop("instructions", None) or self._translator.session.get("instructions") or ""
            chunks = [InputChunk(Modality.TEXT, instructions.encode())]
            config = self._conversation.configuration.with_patch(patch)
        asked = WholeRequest(
            chunks=chunks, config=config, input_kept=bool(items), answer_kept=in_conversation, context=context
        )
        request_id = respond(self._conversation, asked)
        if items:
            self._items.asked(items, request_id)
            self._bind_audio(items, request_id)
        self.send(self._translator.respond(request_id, config, metadata=metadata, in_conversation=in_conversation))

    def _own_input(self, given: Any) -> tuple[tuple[Message, ...], list[InputChunk]]:
        """A response's own ``input``: what is context, and what comes behind the last answer in it."""
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            raise InvalidValue("response.input must be a list of items", param="response.input")
        items = []
        for index, one in enumerate(given):
            place = f"response.input[{index}]"
            if one.get("type") != "item_reference":
                items.append(read_item(one, new_id("item_"), place=place))
                continue
            item = self._items.get(text_field(one, "id", place=f"{place}."))
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
        """What the engine hears of a request is the transcript of its last audio."""
        spoken = [item for item in items if any(part["type"] == "input_audio" for part in item.content)]
        if spoken:
            turn = Turn(spoken[-1], answered=True, committed=True)
            self._translator.turns.bind(turn, request_id)

    def _respond_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        self._deferred_share.resize(0)
        for fields, event_id in deferred:
            try:
                self._create_response({"response": fields})
            except OmniError as error:
                self.send([{"type": "error", "error": error_fields(error, event_id=event_id)}])

    def _cancel_response(self, event: dict[str, Any]) -> None:
        response = self._translator.find_response(optional_id(event, "response_id"))
        if response is None:
            # In OpenAI's words: LiveKit's client knows by their beginning that a late cancel is harmless.
            message = "Cancellation failed: no active response found"
            raise RealtimeRefusal("response_cancel_not_active", message)
        response.cancel_reason = "client_cancelled"
        self._conversation.cancel(response.request_id)


@contextmanager
def _session_names() -> Iterator[None]:
    """An error that the block raises names the field of the session object."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and not error.param.startswith("session."):
            error.param = "session." + _FIELDS.get(error.param, error.param)
        raise


@contextmanager
def _response_names() -> Iterator[None]:
    """An error that the block raises names the field of the response."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = "response." + _FIELDS.get(error.param, error.param)
        raise


def _empty_buffer() -> RealtimeRefusal:
    return RealtimeRefusal("input_audio_buffer_commit_empty", "there is no audio to commit")
