"""OpenAI's Live API: its front end and connections over WebSocket, and LiveDialect, which has no socket.

LiveDialect translates the events of the API to and from a conversation.

**Who speaks when** is decided by the conversation: its turn detection, its interruption, its history of what was heard.
The client sends audio and receives audio (``LivePlayer``) without pause. The server must hear speech, detect turns and
have a language model.

**Time.** The session's time line begins at ``session.started``. Every FRAME_MS a tick sends the audio that is due,
reports to the conversation how far each answer was played, and sends the client the words that were heard so far, so
that text is never ahead of its audio. The tick also counts usage, and ends a session that is silent or lasts too long.

**Context.** Appended commentary becomes a telling: the assistant says it once, when both sides are silent. Appended
thinking and instructions only enter the history.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from msgspec import structs, to_builtins
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import (
    SAMPLE_BYTES,
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    WordsKnown,
)
from omni_ws.core.history import estimate_tokens
from omni_ws.core.quota import Share, beyond_ordinary, memory_of
from omni_ws.engine.composed.parts import has_model
from omni_ws.errors import (
    ORDERLY_ENDS,
    EmptyInput,
    EngineOverloaded,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    UnknownType,
    UnsupportedParameter,
)
from omni_ws.service import unexpected
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.conversation.unasked import Telling
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.service.store.session_store import SessionStore
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import SoleLink, StreamConnection, stream_accepted
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.realtime.items import Event, SessionDialect
from omni_ws.transport.realtime.kept import (
    LIVE_KIND,
    TOKEN,
    KeptLive,
    as_text,
    begin_record,
    check_kept,
    new_token,
    read_live,
)
from omni_ws.transport.realtime.live_parts import (
    DELEGATE,
    DELEGATE_RULE,
    DELEGATE_TOOL,
    FRAME_MS,
    SILENCE,
    ClientDelegations,
    Delegations,
    Delta,
    Heard,
    HeardText,
    LiveFixture,
    LivePlayer,
    ResponsesDelegations,
    SpokenText,
    TranscriptLine,
)
from omni_ws.transport.realtime.session import RealtimeConnection, Sideband, serve_session
from omni_ws.transport.recording import (
    begin_recording,
    recorded,
)
from omni_ws.wire.live_session import (
    MAX_INSTRUCTIONS_TOKENS,
    ClientDelegation,
    MediaStart,
    ResponsesDelegation,
    audio_of,
    checked_append,
    invalid_audio,
    live_config,
    read_audio,
    read_fork,
    read_start,
    read_update,
    session_resource,
)
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import RealtimeRefusal, encode_event, error_fields, optional_id
from omni_ws.wire.server_frames import (
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

#: A session ends after this time without audio from the client.
SILENT_SEC: Final = 30.0
#: How much longer than its audio the rest of an answer may take at the end of a session.
PLAYOUT_MARGIN_MS: Final = 1000
#: The interval of ``session.usage.updated``.
USAGE_SEC: Final = 15
#: The paths of the fields of ``session_config`` in a Live session, for errors.
_FIELDS: Final = {"model": "session.model", "voice": "session.audio.output.voice"}
#: Events of OpenAI's that are not offered here.
_REFUSED: Final = frozenset(
    {
        "decision.create",
        "decision.item.create",
        "decision.item.delete",
        "transport.dtmf.send",
    }
)


def live_id(session_id: str) -> str:
    """Return the id of a session as the Live API shows it: "live_…" for "sess_…"."""
    return session_id.replace("sess_", "live_", 1)


def session_of(given: str) -> str:
    """Return the id of the session that the Live API shows under the id ``given``."""
    return given.replace("live_", "sess_", 1)


class LiveDialect(SessionDialect):
    """The SessionDialect of OpenAI's Live API. Before ``session.start`` it sends nothing but errors."""

    def __init__(
        self,
        session: Session,
        factory: SessionFactory,
        *,
        max_sec: float | None,
        media: AudioFormat | None = None,
        forked: KeptLive | None,
    ) -> None:
        """``max_sec`` is how long the session may last from now on, besides the operator's limit; None for no limit.

        ``media`` is the format of the media tracks that carry the audio; None if events carry it. ``forked`` is the
        stored session that this one continues; None for a new conversation.
        """
        super().__init__()
        self.session_id = live_id(session.session_id)
        self.conversation = session.conversation
        self.factory = factory
        #: What the client asked for; None before the start.
        self.start_fields: MediaStart | None = None
        #: Whether ``session.closed`` was sent: nothing follows it.
        self.closed = False
        #: The token that ``keep`` (see ``carry``) has returned; "" for none.
        self.token = ""
        self._blocked: Callable[[], bool] = lambda: False
        self._listening: Callable[[], bool] = lambda: True
        self._keep: Callable[[], str] = lambda: ""
        self.player: LivePlayer
        self._forked = forked
        self._kept: KeptLive | None = None
        self._session = session
        self._media = media
        self._audio = media or AudioFormat()
        self._fixture: LiveFixture
        self._loop = asyncio.get_running_loop()
        self._share = Share(self.conversation.account)
        self._delegations: Delegations
        self._origin = self._heard_at = self._loop.time()
        self._ends_at = self._origin + (math.inf if max_sec is None else max_sec)
        self._expires_at = 0
        self._clock: asyncio.TimerHandle | None = None
        self._usage_due = USAGE_SEC
        self._muted = False
        #: Milliseconds of audio that have arrived, and how far the line was ahead of this audio at its last arrival.
        self._received_ms = 0.0
        self._behind_ms = 0.0
        #: When the user last began and stopped to speak, on the line.
        self._spoke_ms = 0.0
        self._stopped_ms: float | None = None
        self._input, self._output = TranscriptLine(), TranscriptLine()
        self._heard: dict[str, HeardText] = {}
        self._spoken: dict[str, SpokenText] = {}
        #: Answers whose audio was cut: their transcript ends where the sent audio ends.
        self._ending: set[str] = set()
        #: The commentary that the model has not seen yet: by its number, the id of the client's event.
        self._appends: dict[int, str | None] = {}
        self._appended = 0
        #: The size of all appended instructions, in tokens.
        self._rule_tokens = 0

    # what carries it

    def carry(self, *, blocked: Callable[[], bool], listening: Callable[[], bool], keep: Callable[[], str]) -> None:
        """Set the connection's functions.

        ``blocked`` returns whether the client takes no output; ``listening`` whether its input is read. ``keep`` begins
        to keep the session in the store, and returns a token to send to the client, or "".
        """
        self._blocked, self._listening, self._keep = blocked, listening, keep

    def send(self, events: Iterable[Event]) -> None:
        """Send events immediately, unless the session is closed."""
        if not self.closed:
            self._send(events)

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        shown = error_fields(error)
        code = "invalid_model" if shown["code"] == "model_not_found" else shown["code"]
        fields = {"type": shown["type"], "code": code, "message": shown["message"]}
        for name, value in (("param", shown["param"]), ("client_event_id", event_id)):
            if value is not None:
                fields[name] = value
        return {"type": "error", "error": fields}

    def kept(self) -> KeptLive:
        """Return the snapshot from which the session can be forked.

        The session must have started, with ``store: true``, on a server with a store.
        """
        self.remember()
        assert self._kept is not None
        return self._kept

    def remember(self) -> None:
        """Keep the history so far for ``kept``, since the conversation discards it as the session ends.

        Does nothing for a session that is not stored, or has ended.
        """
        start = self.start_fields
        if self.factory.store is not None and start is not None and start.store and self._session.is_open:
            messages = [*map(as_text, self.conversation.ledger.history.messages())]
            self._kept = KeptLive(start=structs.replace(start, input=None), messages=messages)

    def close(self) -> None:
        """Stop the clock, and refund all bytes that are charged to the session."""
        if self._clock is not None:
            self._clock.cancel()
        if self.started:
            self._delegations.close()
            self._fixture.close()
        self._share.resize(0)

    # the session

    @property
    def started(self) -> bool:
        """Whether ``session.started`` was sent."""
        return self.start_fields is not None

    @property
    def _line_ms(self) -> float:
        """The current position on the session's time line, in milliseconds."""
        return (self._loop.time() - self._origin) * 1000

    @property
    def now_ms(self) -> int:
        """The current position on the session's time line, in whole milliseconds."""
        return int(self._line_ms)

    @property
    def usage(self) -> dict[str, int]:
        """The usage of the session: its length so far, in seconds."""
        return {"seconds": self.now_ms // 1000 if self.started else 0}

    def resource(self) -> dict[str, Any]:
        """Return the session object that clients see. The session must have started."""
        assert self.start_fields is not None
        voice = self.conversation.configuration.effective.voice
        shown = session_resource(
            self.start_fields, session_id=self.session_id, expires_at=self._expires_at, voice=voice
        )
        return {**shown, "delegation": to_builtins(self._delegations.shown)}

    def greeting(self) -> list[Event]:
        """Return the events that describe the session to a client. The session must have started."""
        return [{"type": "session.started", "session": self.resource()}]

    def start(self, fields: Mapping[str, Any], event_id: str | None = None) -> None:
        """Start the session and its clock with the client's object ``session``, and send ``session.started``.

        Raises an InvalidRequest if the object is not accepted, and EngineOverloaded if there is no room for it.
        """
        media, forked = self._media is not None, self._forked
        start = read_start(fields, media=media) if forked is None else read_fork(fields, forked.start, media=media)
        conversation = self.conversation
        self._check_llm()
        self._check_store(start)
        delegates = conversation.engine.capabilities.tools
        types = self.factory.speech_workers.turn_detection_types
        if Modality.AUDIO not in conversation.engine.capabilities.input_modalities or not types:
            raise UnsupportedParameter("a Live session needs speech recognition and turn detection", param="session")
        kind = "semantic_vad" if "semantic_vad" in types else "server_vad"
        config = live_config(start, turn_detection=kind, tools=(DELEGATE_TOOL,) if delegates else ())
        config["instructions"] = self._instructions(start, delegates=delegates)
        if self._media is not None:
            audio = {"format": self._media.encoding.value, "sample_rate": self._media.sample_rate}
            config |= {"input_audio": audio, "output_audio": audio}
        delegations = self._delegations_of(start)
        self._share.resize(beyond_ordinary(memory_of(start)))
        try:
            conversation.configure(config)
        except InvalidRequest as error:
            param = _FIELDS.get(error.param or "", f"session.{error.param}" if error.param else "session")
            raise error.about(param=param) from None
        if delegates:
            conversation.answer_with(replace(conversation.options, tool_rule=DELEGATE_RULE))
        conversation.ledger.play_at_once()
        conversation.ledger.place(start.messages() if forked is None else forked.messages)
        self.start_fields, self._delegations = start, delegations
        self._set_acknowledgement()
        if start.store and self._session.recording is not None and self._session.recording.has_sound:
            self._session.recording.store()
        self._audio = self._media or audio_of(start.format)
        self._fixture = LiveFixture(self, self._audio)
        self._origin = self._heard_at = self._loop.time()
        self._ends_at = min(self._ends_at, self._origin + self.factory.config.live.max_session_sec)
        self._expires_at = int(time.time() + self._ends_at - self._origin)
        silence = self.factory.config.live.silence
        self.player = LivePlayer(self._audio, self._play, self._passed, silence=silence)
        self.token = self._keep() if start.store else ""
        told = {"resume_token": self.token} if self.token else {}
        self.send([{**_answering(event, event_id), **told} for event in self.greeting()])
        self._clock = self._loop.call_at(self._origin + FRAME_MS / 1000, self._tick)

    def _check_store(self, start: MediaStart) -> None:
        """Raise UnsupportedParameter if the client asks for ``store``, but nothing stores or records the session."""
        recording = self._session.recording
        if start.store and self.factory.store is None and (recording is None or not recording.has_sound):
            why = "this session is not recorded" if self.factory.config.record else "nothing is recorded (--record)"
            raise UnsupportedParameter(
                f"sessions are not stored here: {why}; store must be false", param="session.store"
            )

    def _check_llm(self) -> None:
        if not has_model(self.conversation.engine):
            message = "a Live session needs a language model, and only rules answer here: serve with --llm"
            raise RealtimeRefusal("invalid_model", message, param="session.model")

    def _instructions(self, start: MediaStart, *, delegates: bool) -> str:
        rules = self.conversation.configuration.rules
        own = rules.spoken_instructions_with_tools if delegates else rules.spoken_instructions
        given = start.instructions if start.instructions and start.instructions.strip() else own
        return f"{given}\n\n{DELEGATE_RULE}".strip() if delegates else given

    def _delegations_of(self, start: MediaStart) -> Delegations:
        wanted = start.delegation or ClientDelegation()
        if isinstance(wanted, ResponsesDelegation):
            return ResponsesDelegations(self, wanted)
        assert isinstance(wanted, ClientDelegation)
        return ClientDelegations(self, wanted)

    def _set_acknowledgement(self) -> None:
        """Set, if the client asks, the delay until work that the model hands over without a word is acknowledged."""
        if (delay_ms := self._delegations.shown.acknowledgement_delay_ms) is not None:
            self.conversation.unasked.acknowledge_after(delay_ms / 1000)

    def end(self, reason: str, event_id: str | None = None) -> None:
        """End the session, with ``session.closed`` if it has started. Does nothing if it was closed.

        Commentary that the client appended, and that was not said by then, is answered with an error.
        """
        if self.closed:
            return
        if self.started:
            refusal = InvalidValue("the session is closed, and this was not told", param="content")
            self.send([self.error(refusal, event_id=one) for one in self._appends.values()])
            closed = {"type": "session.closed", "reason": reason, "session": self.resource(), "usage": self.usage}
            self.send([_answering(closed, event_id)])
        self.closed = True
        self.remember()
        self._session.end(None)

    # events of the client

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        if self.closed:
            return
        kind, event_id = fields["type"], optional_id(fields.get("event_id"), "event_id")
        if kind == "session.start" and not self.started:
            try:
                self.start(object_field(fields, "session"), event_id)
            except OmniError as error:  # the session cannot be had as it is wanted
                self.send([self.error(error, event_id=event_id)])
                self._reported = error
                self._session.end(error)
        elif kind == "session.start":
            raise InvalidValue("the session has already started", param="type")
        elif kind == "session.close":
            self.end("close_requested", event_id)
        elif not self.started:
            if kind != "session.input_audio.append":  # which is dropped
                raise InvalidValue("the first event must be session.start", param="type")
        else:
            self._receive(kind, fields, event_id, now)

    def _receive(self, kind: str, fields: Mapping[str, Any], event_id: str | None, now: float) -> None:
        match kind:
            case "session.input_audio.append":
                self.append(read_audio(fields), now)
            case "session.input_audio.mute" | "session.input_audio.unmute":
                self._muted = kind == "session.input_audio.mute"
                self.send([_answering({"type": f"{kind}d"}, event_id)])
            case "session.commentary.append":
                self._tell(*self._append(fields), event_id)
            case "session.thinking.append" | "session.instructions.append":
                content, _ = self._append(fields)
                role = "user" if "thinking" in kind else "system"
                tokens = self._rules_with(content) if role == "system" else self._rule_tokens
                if self._within_limits(partial(self.conversation.note, content, role), event_id):
                    self._rule_tokens = tokens
                    self._acknowledge(kind, event_id)
            case "session.update":
                update = read_update(object_field(fields, "session"))
                if update.delegation is not None:
                    self._delegations.update(update.delegation)
                    self._set_acknowledgement()
                self.send([_answering({"type": "session.updated", "session": self.resource()}, event_id)])
            case "session.output_audio.fixture.play":
                self._fixture.play(fields, event_id)
            case "response.create" | "response.item.create":
                self._delegations.receive(fields)
            case _ if kind in _REFUSED:
                raise UnsupportedParameter(f"{kind} is not offered here", param="type")
            case _:
                raise UnknownType(f"unknown event type {kind[:64]!r}", param="type")

    def append(self, audio: bytes, now: float) -> None:
        """Append audio of the user, in the format of the session, to the input.

        The audio counts as silence while the client has muted the input, or a fixture (the client's own audio) is
        played to the user. Raises what ``receive`` raises.
        """
        if not audio:
            raise invalid_audio("audio must not be empty")
        if len(audio) % SAMPLE_BYTES[self._audio.encoding]:
            raise invalid_audio("audio must be whole samples")
        if self._muted or self._fixture.playing:
            audio = SILENCE[self._audio.encoding] * len(audio)
        chunk = InputChunk(Modality.AUDIO, audio)
        self.conversation.configuration.check_chunk(chunk)
        self._heard_at = now
        self._received_ms += self._audio.duration_ms(len(audio))
        self._behind_ms = (now - self._origin) * 1000 - self._received_ms
        self.conversation.receive_chunk(chunk, now=now)

    # context

    def _append(self, fields: Mapping[str, Any]) -> tuple[str, str | None]:
        if self._fixture.playing:
            raise InvalidValue("nothing can be appended while a fixture is played", param="type")
        content, delegation_id = checked_append(fields)
        if delegation_id is not None:
            self._delegations.check(delegation_id)
        return content, delegation_id

    def _rules_with(self, content: str) -> int:
        """Return the tokens of all appended instructions with ``content``. Raises InvalidValue beyond the limit."""
        tokens = self._rule_tokens + estimate_tokens(content)
        if tokens > MAX_INSTRUCTIONS_TOKENS:
            raise InvalidValue(
                f"appended instructions must not exceed {MAX_INSTRUCTIONS_TOKENS} tokens together", param="content"
            )
        return tokens

    def _tell(self, content: str, delegation_id: str | None, event_id: str | None) -> None:
        number = self._appended = self._appended + 1

        def entered() -> None:
            if number in self._appends:
                del self._appends[number]
                self._acknowledge("session.commentary.append", event_id)

        def dropped() -> None:
            if number in self._appends:
                del self._appends[number]
                refusal = InvalidValue("the work was cancelled with its answer, and is not told", param="delegation_id")
                self.send([self.error(refusal, event_id=event_id)])

        telling = Telling(content, about=delegation_id, entered=entered, dropped=dropped)
        self._appends[number] = event_id
        if not self._within_limits(partial(self.conversation.tell, telling), event_id):
            del self._appends[number]

    def _within_limits(self, append: Callable[[], None], event_id: str | None) -> bool:
        """Call ``append``. If there is no room for what it appends, send an error for the event, and return False."""
        try:
            append()
        except EngineOverloaded as error:
            self.send([self.error(error, event_id=event_id)])
            return False
        return True

    def _acknowledge(self, kind: str, event_id: str | None) -> None:
        now_ms = self.now_ms
        self.send([_answering({"type": f"{kind}ed", "start_ms": now_ms, "end_ms": now_ms}, event_id)])

    # messages of the conversation

    def render(self, message: ServerMessage) -> Iterator[Event]:
        if self.closed or not self.started:
            if isinstance(message, OmniError) and message.request_id is None and not self.closed:
                yield from self._fatal(message)
            return
        match message:
            case OutputChunk():
                yield from self._answered(message)
            case FinalChunk():
                yield from self._final(message)
            case SpeechStartedFrame(certain=False) | SpeechDismissedFrame():
                self.player.duck(isinstance(message, SpeechStartedFrame))
            case SpeechStartedFrame(audio_ms=audio_ms) | SpeechConfirmedFrame(audio_ms=audio_ms):
                self._spoke_ms, self._stopped_ms = audio_ms + self._behind_ms, None
                self.player.duck(False)
                self._cut()
            case SpeechStoppedFrame(audio_ms=audio_ms):
                self._stopped_ms = audio_ms + self._behind_ms
            case OmniError(request_id=None):
                yield from self._fatal(message)
            case OmniError() if not isinstance(message, EmptyInput):  # a turn without words is no error here
                yield self.error(message)

    def _answered(self, chunk: OutputChunk) -> Iterator[Event]:
        request_id = chunk.request_id
        if chunk.modality is OutputModality.AUDIO:
            if chunk.words:
                self._text_of(request_id).pronounce(chunk.words)
            self.player.say(request_id, chunk.payload, chunk.start_ms)
            self.player.pump(self._line_ms)
        elif chunk.modality is OutputModality.TEXT:
            self._text_of(request_id).write(chunk.text)
        elif chunk.modality is OutputModality.TRANSCRIPT:
            yield from self._transcript(chunk)

    def _fatal(self, error: OmniError) -> Iterator[Event]:
        if not self.reported(error):
            self._reported = error
            yield self.error(error)

    def _text_of(self, request_id: str) -> SpokenText:
        return self._spoken.setdefault(request_id, SpokenText())

    def _final(self, final: FinalChunk) -> Iterator[Event]:
        request_id = final.request_id
        if final.words is not WordsKnown.NOT_YET:
            self._heard.pop(request_id, None)
        if final.finish_reason is FinishReason.CANCELLED:
            if self.player.has(request_id):
                self.player.cut()
            self._end_text(request_id)
            self._hand_over(request_id, cancelled=True)
            return
        self.player.finish(request_id)
        self.player.pump(self._line_ms)
        if not self.player.has(request_id):
            yield from self._rest(request_id)
        if final.finish_reason is not FinishReason.ERROR:
            self._hand_over(request_id)

    def _hand_over(self, request_id: str, *, cancelled: bool = False) -> None:
        """Begin the work that an answer delegates by its calls; if ``cancelled``, only the calls in the history."""
        ledger = self.conversation.ledger
        entry = ledger.find(request_id)
        for call in () if entry is None else entry.tool_calls:
            if call.name == DELEGATE and (not cancelled or ledger.knows_call(call.id)):
                self._delegations.opened(call.id, call.arguments)

    def _cut(self) -> None:
        """Drop the unsent audio of answers; a fixture plays on. Audio that an answer produces after this is sent."""
        for request_id in self.player.cut():
            self._end_text(request_id)

    def _end_text(self, request_id: str) -> None:
        """Let the transcript of an answer end where its sent audio ends."""
        if self.player.has(request_id):
            self._ending.add(request_id)
        else:
            self._ending.discard(request_id)
            self._spoken.pop(request_id, None)

    # transcripts

    def _transcript(self, chunk: OutputChunk) -> Iterator[Event]:
        heard = self._heard.setdefault(chunk.request_id, HeardText())
        joins = heard.begun
        if text := heard.hear(chunk.text, interim=chunk.interim):
            now_ms = self.now_ms
            end_ms = now_ms if self._stopped_ms is None else self._stopped_ms
            start_ms = max(self._spoke_ms, self._input.end_ms) if joins else self._spoke_ms
            delta = self._input.place(text, start_ms, end_ms, now_ms=now_ms, joins=joins)
            yield _transcript_delta("input", delta)
        if chunk.late:
            self._heard.pop(chunk.request_id, None)

    def _passed(self, heard: Heard) -> None:
        """Report how far an answer was heard: to the conversation as a position, and to the client as words."""
        if self._fixture.passed(heard):
            return
        request_id = heard.answer_id
        self.conversation.report_playback(heard.position_ms, request_id=request_id)
        if self._session.recording is not None:
            self._session.recording.played(request_id, heard.position_ms)
        if heard.ended:
            self.send(self._rest(request_id))
            return
        if (text := self._spoken.get(request_id)) is None:
            return
        delta = text.heard(heard.position_ms, self.conversation.ledger.find(request_id))
        if delta is not None:
            shift_ms = heard.line_ms - heard.position_ms
            self.send(self._spoke(text, delta.text, delta.start_ms + shift_ms, delta.end_ms + shift_ms))
        if request_id in self._ending:
            self._end_text(request_id)

    def _rest(self, request_id: str) -> Iterator[Event]:
        """Render the rest of the transcript of an answer that was heard to its end."""
        text = self._spoken.pop(request_id, None)
        if text is not None and (rest := text.rest()).strip():
            start_ms = self._output.end_ms if text.begun else self.now_ms
            yield from self._spoke(text, rest, start_ms, self.now_ms)

    def _spoke(self, text: SpokenText, new: str, start_ms: float, end_ms: float) -> Iterator[Event]:
        delta = self._output.place(new, start_ms, end_ms, now_ms=self.now_ms, joins=text.begin())
        yield _transcript_delta("output", delta)

    # the clock

    def _play(self, audio: bytes, start_ms: float, end_ms: float) -> None:
        times = {"start_ms": round(start_ms), "end_ms": round(end_ms)}
        self.send([{"type": "session.output_audio.delta", "delta": audio, **times}])

    def _tick(self) -> None:
        try:
            frames = int(self._line_ms / FRAME_MS + 0.01)
            self._clock = self._loop.call_at(self._origin + (frames + 1) * FRAME_MS / 1000, self._tick)
            self.player.tick(frames * FRAME_MS, blocked=self._blocked())
            self._count_time()
        except Exception as error:
            self._session.end(unexpected(error, where="the clock of a Live session"))

    def _count_time(self) -> None:
        now = self._loop.time()
        if not self._listening():  # it is the server that does not read
            self._heard_at = now
        # A tick before the limit of the key, at which the session would end with an error.
        if now - self._heard_at >= SILENT_SEC or now + FRAME_MS / 1000 >= self._ends_at:
            self.end("expired")
        elif now - self._origin >= self._usage_due:
            self._usage_due += USAGE_SEC
            self.send([{"type": "session.usage.updated", "usage": self.usage}])


def _answering(event: Event, event_id: str | None) -> Event:
    """Return the event with the id of the client's event that it answers."""
    return event if event_id is None else {**event, "client_event_id": event_id}


def _transcript_delta(direction: str, delta: Delta) -> Event:
    times = {"start_ms": delta.start_ms, "end_ms": delta.end_ms}
    return {"type": f"session.{direction}_transcript.delta", "delta": delta.text, **times}


# ``/v1/live/sessions``: the front end of OpenAI's Live API over WebSocket, and the connections of its sessions.


LIVE_PATH: Final = "/v1/live/sessions"
FORK_PATH: Final = f"{LIVE_PATH}/{{session_id}}/fork"
#: Label of the sessions in metrics, logs and recordings.
LIVE_ORIGIN: Final = "live"


class Live(SessionFrontEnd):
    """The front end of the Live API: accepts the handshakes of its clients, and opens a session for each."""

    def __init__(self, app: Application) -> None:
        # A session ends with its connection.
        super().__init__(app, Sessions(app.sessions, origin=LIVE_ORIGIN, grace=0, any_model=True))
        self._rounds = PeerRounds.configured(self._config.streaming_input)

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
            router.add("GET", LIVE_PATH, needs_upgrade)
            router.add_websocket(LIVE_PATH, self.upgrade)
            router.add("GET", FORK_PATH, needs_upgrade)
            router.add_websocket(FORK_PATH, self.fork)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises Unauthenticated; an event reports all other errors. Ignores the query."""
        key = self._authenticator.authenticate(request)
        serve = partial(serve_session, request.client, partial(self._begin, key, request.client, None))
        return stream_accepted(self._sessions, key, serve=serve, route=LIVE_PATH)

    def fork(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake, as ``upgrade`` does, for a session that continues a stored one.

        Raises UnsupportedParameter without a store.
        """
        key = self._authenticator.authenticate(request)
        check_kept(self._sessions.store, "fork")
        wanted = (session_of(request.segments[-2]), None if key is not None else request.query.get(TOKEN) or "")
        serve = partial(serve_session, request.client, partial(self._begin, key, request.client, wanted))
        return stream_accepted(self._sessions, key, serve=serve, route=FORK_PATH)

    async def _begin(
        self, key: ApiKey | None, address: str, wanted: tuple[str, str | None] | None, connection: StreamConnection
    ) -> LiveConnection:
        """Open a session, and attach it to ``connection``.

        ``wanted`` is the id of the stored session to continue and the client's token; None for a new conversation.
        Raises what ``Sessions.admit`` and ``read_live`` raise.
        """
        forked = None if wanted is None else await read_live(self._sessions.store, wanted[0], key, wanted[1])
        session = await self._live.admit(key, client=address)
        begin_recording(self._recorder, session, LIVE_ORIGIN, key)
        most = None if key is None else key.max_session_sec
        dialect = LiveDialect(session, self._sessions, max_sec=most, forked=forked)
        link = recorded(connection, session.recording)
        attachment = LiveConnection(link, session, dialect, rounds=self._rounds)
        attachment.keep_in(self._sessions.store, key)
        session.attach(attachment)
        return attachment


class LiveConnection(RealtimeConnection):
    """The connection of a Live session. It ends with ``session.closed`` and the close code 1000, or with an error.

    A Live session can be neither resumed nor moved to another server: when this server ends, the session expires. A
    session with ``store: true`` is kept in the store, and other sessions can continue its conversation.
    """

    _store: SessionStore | None = None
    _key: ApiKey | None = None

    def __init__(self, connection: SoleLink, session: Session, dialect: LiveDialect, *, rounds: PeerRounds) -> None:
        super().__init__(connection, session, dialect, rounds=rounds)
        self._live = dialect
        dialect.carry(blocked=self._blocks_output, listening=lambda: connection.is_reading, keep=self._begin_record)

    def _blocks_output(self) -> bool:
        """Return whether the client takes no audio now."""
        return self._connection.paused

    def keep_in(self, store: SessionStore | None, key: ApiKey | None) -> None:
        """Set the store in which the session is kept once it has started, if its client wants that."""
        self._store, self._key = store, key

    def _begin_record(self) -> str:
        if self._store is None:
            return ""
        token = new_token() if self._key is None else ""
        self.keep(begin_record(self._store, self._session, LIVE_KIND, self._key, self._live.kept, token), {})
        self._send_settled(())
        return token

    def connection_closing(self) -> None:
        self._live.remember()
        super().connection_closing()

    def _send_settled(self, events: Iterable[Event]) -> None:
        self._send(events)  # what was said is heard later anyway, and sound waits for nothing
        if self._kept is not None:
            self._kept.write()

    def receive_message(
        self, data: bytes | bytearray | memoryview, *, is_text: bool, sideband: Sideband | None = None
    ) -> None:
        if not is_text and self._listening:
            refusal = self._live.error(InvalidFrame("events are text messages"))
            if sideband is not None:
                sideband.send(refusal)
            else:
                self._send([refusal])
            (sideband or self._connection).end_pass()
            return
        super().receive_message(data, is_text=is_text, sideband=sideband)

    async def _say_goodbye(self, error: OmniError) -> None:
        if isinstance(error, ORDERLY_ENDS) and self._live.started:
            self._flush()
            await self._heard()
            self._live.end("expired")
        else:
            await super()._say_goodbye(error)

    async def _heard(self) -> None:
        """Wait until the answers that were made are heard, for little longer than they last."""
        player = self._live.player
        for _ in range(math.ceil((player.lasts_ms + PLAYOUT_MARGIN_MS) / FRAME_MS)):
            if not player.sounding or not self._connection.is_open:
                return
            await asyncio.sleep(FRAME_MS / 1000)

    def _close_code(self, error: OmniError) -> int:
        if self._live.closed:
            return CloseCode.NORMAL_CLOSURE
        return CloseCode.POLICY_VIOLATION if isinstance(error, InvalidRequest) else super()._close_code(error)

    def _write(self, event: Event) -> None:
        if event["type"] != "session.output_audio.delta":
            super()._write(event)
            return
        # It has no id, and no times on the connection that carries the audio.
        data = encode_event({"type": event["type"], "delta": event["delta"]})
        self._connection.write_message(data, is_text=True)
