"""Answers with the times of their parts, read from the native WebSocket, the Realtime API or HTTP responses.

All of these protocols are converted to the events of the client library, which a TimedAnswer collects.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson

from omni_ws.audio.container import parse_audio_mime
from omni_ws.client import AudioChunk, ErrorEvent, Event, ServerError, TextChunk, ToolCallChunk, TranscriptChunk
from omni_ws.client import Final as LastEvent
from omni_ws.client.connection import error_from_fields, read_frame
from omni_ws.client.events import AnswerBuilder, output_event
from omni_ws.core.chunks import AudioEncoding, AudioFormat, ToolCallFragment
from omni_ws.engine.remote.event_stream import EventReader
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.wire import server_frames
from omni_ws.wire.frames import FLAG_END, HEADER, decode_output_audio


class TimedAnswer(AnswerBuilder):
    """The answer to one request, with the times of its parts in the unit of the caller's clock.

    ``asked_at`` is the time from which latencies count. Without ``keeps_audio``, only the times of audio are kept.
    Late transcripts are added to the answer.
    """

    def __init__(self, request_id: str = "", *, keeps_audio: bool = True) -> None:
        super().__init__()
        self.request_id = request_id
        self.finish_reason: str | None = None
        #: The number of pieces of text, audio and tool calls so far.
        self.outputs = 0
        self.asked_at: float | None = None
        self.first_output_at: float | None = None
        self.first_text_at: float | None = None
        self.first_audio_at: float | None = None
        self.final_at: float | None = None
        self._keeps_audio = keeps_audio

    def hear(self, event: Event, at: float) -> None:
        """Add an event that arrived at ``at``."""
        match event:
            case TextChunk() | ToolCallChunk() | AudioChunk():
                self.outputs += 1
                self.first_output_at = at if self.first_output_at is None else self.first_output_at
                if isinstance(event, TextChunk) and self.first_text_at is None:
                    self.first_text_at = at
                elif isinstance(event, AudioChunk) and self.first_audio_at is None:
                    self.first_audio_at = at
            case TranscriptChunk(late=True):
                self.transcript.add(event)
            case LastEvent(finish_reason=reason):
                self.end(reason, at)
        if self._keeps_audio or not isinstance(event, AudioChunk):
            self.add(event)

    def end(self, reason: str | None, at: float | None = None) -> None:
        """Record why the answer ended, and when. Without a ``reason`` the answer counts as partial."""
        self.finish_reason, self.final_at = reason, at

    def ask(self, at: float | None) -> None:
        """Set ``asked_at``, the end of the question, from which latencies count; None if it is not known."""
        self.asked_at = at

    def settle(self, transcript: str) -> None:
        """Append to the settled transcript of the input."""
        self.transcript.add(TranscriptChunk("", 0, transcript))

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def heard(self) -> str:
        """The settled part of the transcript of the input."""
        return self.transcript.settled

    @property
    def tool_calls(self) -> str:
        """The names and arguments of all tool calls."""
        return "".join(f"{call.name}{call.arguments}" for call in self.calls.values())

    @property
    def sound(self) -> bytes:
        return b"".join(self.audio)

    @property
    def audio_format(self) -> AudioFormat | None:
        if self.format is None:
            return None
        encoding, sample_rate = self.format
        return AudioFormat(AudioEncoding(encoding), sample_rate, 1)

    @property
    def error_codes(self) -> list[str]:
        return [error.code for error in self.errors]

    @property
    def is_partial(self) -> bool:
        """Whether the answer was cut short, so that its length depends on timing."""
        return self.finish_reason in (None, "cancelled", "error")

    def latency(self, moment: float | None) -> float | None:
        """Return the time from ``asked_at`` to ``moment``; None if either is missing."""
        return None if moment is None or self.asked_at is None else moment - self.asked_at


@dataclass(slots=True)
class Answers:
    """The answers of a session.

    ``errors`` are the codes of errors that belong to no request; ``ends`` says how each connection ended: ``client``,
    ``lost``, or ``server`` with the close code, such as ``server 1000``.
    """

    answers: list[TimedAnswer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class SessionReader(ABC):
    """Follows both directions of a WebSocket session, message by message, in order."""

    def __init__(self) -> None:
        self.found = Answers()
        #: Counts of received greetings, configurations, and answers begun and ended; and the highest output number.
        self.greetings = self.configured = self.started = self.finals = 0
        self.highest = -1
        #: For the native WebSocket: what is needed to resume the session.
        self.session_id: str | None = None
        self.resume_token: str | None = None
        #: The answer in progress.
        self.running: TimedAnswer | None = None
        self._format = (AudioEncoding.PCM16.value, 24_000)
        self._input_ended = True
        #: The times at which inputs ended.
        self._ends: list[float] = []
        self._by_id: dict[str, TimedAnswer] = {}

    @abstractmethod
    def asked(self, at: float, message: bytes | str) -> bool:
        """Process a message of the client, sent at ``at``; return whether it stops, or may stop, a running answer."""

    @abstractmethod
    def heard(self, at: float, message: bytes | str) -> None:
        """Process a message of the server, received at ``at``.

        May raise KeyError, TypeError or AttributeError for a message that is not of the protocol.
        """

    @abstractmethod
    def rewritten(self, message: bytes | str, then: Any) -> bytes | str | None:
        """Return a recorded client message with its ids and numbers replaced by those of this session.

        ``then`` is the reader of the recorded session. Returns None if the message has no counterpart in this session.
        """

    def finished(self) -> Answers:
        """Return all answers, after the end of the session."""
        return self.found

    def _answer(self, request_id: str) -> TimedAnswer:
        if request_id not in self._by_id:
            self._by_id[request_id] = answer = TimedAnswer(request_id)
            self.found.answers.append(answer)
        return self._by_id[request_id]

    def _hear(self, answer: TimedAnswer, event: Event, at: float) -> None:
        """Add an event. At the first output, move ``asked_at`` on to the first later end of input, if there was one."""
        began = answer.first_output_at
        answer.hear(event, at)
        if began is None and answer.first_output_at is not None and answer.asked_at is not None:
            answer.ask(next((end for end in self._ends if answer.asked_at <= end <= at), answer.asked_at))

    def _end(self, answer: TimedAnswer) -> None:
        self.finals += 1
        if answer is self.running:
            self.running = None


class NativeReader(SessionReader):
    """Follows a session of the native WebSocket."""

    def __init__(self) -> None:
        super().__init__()
        #: The time of each chunk, by number.
        self._chunks: dict[int, float] = {}

    def asked(self, at: float, message: bytes | str) -> bool:
        match _fields(message):
            case {"type": "input_chunk", **fields}:
                may_stop, self._input_ended = self._input_ended, fields.get("end_of_input") is True
                number = fields.get("sequence_id")
                if isinstance(number, int) and number not in self._chunks:
                    self._chunks[number] = at
                    self._ends += [at] if self._input_ended else []
                return may_stop
            case {"type": "finish"}:
                self._ends.append(at)
                self._input_ended = True
            case {"type": "cancel"}:
                self._input_ended = True
                return True
        return False

    def heard(self, at: float, message: bytes | str) -> None:
        with suppress(InvalidFrame):
            if isinstance(message, str):
                self._take(at, read_frame(message))
                return
            audio = decode_output_audio(message)
            if self._is_new(audio.sequence_id) and (answer := self.running) is not None:
                chunk = AudioChunk(
                    answer.request_id, audio.sequence_id, audio.payload, *self._format, start_ms=audio.start_ms
                )
                self._hear(answer, chunk, at)

    def _take(self, at: float, frame: server_frames.ServerFrame | None) -> None:
        match frame:
            case server_frames.SessionCreatedFrame() | server_frames.SessionResumedFrame():
                self.greetings += 1
                self.session_id, self.resume_token = frame.session_id, frame.resume_token
                if isinstance(frame, server_frames.SessionCreatedFrame):
                    self._format = (frame.output_audio.format.value, frame.output_audio.sample_rate)
            case server_frames.SessionUpdatedFrame(output_audio=output):
                self.configured += not frame.is_unasked
                self._format = (output.format.value, output.sample_rate)
            case server_frames.ResponseStartedFrame(request_id=request_id) if request_id not in self._by_id:
                self.started += 1
                self.running = answer = self._answer(request_id)
                number = frame.sequence_id
                answer.ask(at if number is None else self._chunks.get(number, at))
            case server_frames.SpeechStoppedFrame():
                self._ends.append(at)
            case server_frames.ErrorFrame(error=error) if error.request_id:
                self._answer(error.request_id).add(ErrorEvent(error_from_fields(error)))
            case server_frames.ErrorFrame(error=error):
                self.found.errors.append(error.code)
            case server_frames.OutputChunkFrame() if self._is_new(frame.sequence_id):
                answer, event = self._answer(frame.request_id), output_event(frame)
                if event is not None:
                    self._hear(answer, event, at)
                if isinstance(event, LastEvent):
                    self._end(answer)

    def _is_new(self, number: int) -> bool:
        """Return whether an output is new: after a resume the server repeats some outputs."""
        if number <= self.highest:
            return False
        self.highest = number
        return True

    def rewritten(self, message: bytes | str, then: NativeReader) -> bytes | str | None:
        frame = {} if isinstance(message, bytes) else parsed(message)
        match frame:
            case {"type": "cancel" | "history_truncate", "request_id": str(request_id)}:
                ids = [answer.request_id for answer in then.found.answers]
                now = self.found.answers[ids.index(request_id) :][:1] if request_id in ids else []
                return orjson.dumps(frame | {"request_id": now[0].request_id}).decode() if now else message
            case {"type": "output_ack", "sequence_id": int(number)} if number > self.highest:
                # An output that was not received yet cannot be acknowledged.
                frame |= {"sequence_id": self.highest}
                return orjson.dumps(frame).decode() if self.highest >= 0 else None
        return message


def _fields(message: bytes | str) -> dict[str, Any]:
    """Return the fields of a client's message, from its JSON or its binary header; empty for any other message."""
    if isinstance(message, str):
        return parsed(message)
    if len(message) < HEADER.size:
        return {}
    _, _, _, flags, number, _ = HEADER.unpack_from(message)
    return {"type": "input_chunk", "sequence_id": number, "end_of_input": flags & FLAG_END != 0}


def parsed(message: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; return an empty one for anything else."""
    try:
        value = orjson.loads(message)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def decoded(payload: object) -> bytes:
    """Decode audio in base64; return b"" for anything else."""
    try:
        return base64.b64decode(payload) if isinstance(payload, str) else b""
    except ValueError:  # binascii.Error, or text that is not ASCII
        return b""


# The Realtime API

#: The place of an event, which is the same in the recording and in the replay.
_Place: TypeAlias = tuple[str | int, ...]
_ENCODINGS: Final = {
    "audio/pcm": (AudioEncoding.PCM16.value, 24_000),
    "audio/pcmu": (AudioEncoding.PCMU.value, 8000),
    "audio/pcma": (AudioEncoding.PCMA.value, 8000),
}
#: The fields of client events that contain ids given by the server.
_ID_FIELDS: Final = frozenset({"id", "item_id", "previous_item_id", "response_id", "call_id"})
#: The events that stop a response in progress.
_STOPPING: Final = frozenset({"response.cancel", "output_audio_buffer.clear", "conversation.item.truncate"})


class RealtimeReader(SessionReader):
    """Follows a session of the Realtime API; each response is an answer."""

    def __init__(self) -> None:
        super().__init__()
        #: The ids that the server gave, by place.
        self.ids: dict[_Place, str] = {}
        #: The id of the item of speech that the next response answers.
        self._asked: str | None = None
        self._answer_to: dict[str, TimedAnswer] = {}
        #: By item id, transcripts that are not part of an answer yet.
        self._heard: dict[str, str] = {}

    def asked(self, at: float, message: bytes | str) -> bool:
        kind = parsed(message).get("type")
        if kind == "input_audio_buffer.append":
            may_stop, self._input_ended = self._input_ended, False
            return may_stop
        if kind in ("input_audio_buffer.commit", "response.create"):
            self._ends.append(at)
            self._input_ended = True
        elif kind in _STOPPING:
            self._input_ended = True
            return True
        return False

    def heard(self, at: float, message: bytes | str) -> None:
        event = parsed(message)
        match event.get("type"):
            case "session.created" | "session.updated" as kind:
                self._take_session(event["session"], is_new=kind == "session.created")
            case "input_audio_buffer.speech_started":
                self._name_speech(event["item_id"])
            case "input_audio_buffer.speech_stopped":
                self._ends.append(at)
            case "input_audio_buffer.committed":
                self._name_speech(event["item_id"])
                self._asked = event["item_id"]
            case "conversation.item.input_audio_transcription.completed":
                self.finals += 1
                self._transcribed(event["item_id"], event["transcript"])
            case "conversation.item.input_audio_transcription.failed":
                self.finals += 1
            case "transcription.done":  # vLLM's dialect
                self.finals += 1
                self._keep_unanswered("", event["text"])
            case "error":
                error = event["error"]
                self.found.errors.append(str(error.get("code") if isinstance(error, dict) else event.get("code")))
            case "response.created":
                self._begin(at, event["response"]["id"])
            case "response.done":
                self._done(at, event["response"])
            case str(kind) if kind.startswith("response."):
                self._respond(at, kind, event)

    def finished(self) -> Answers:
        """Return all answers. A transcript without an answer counts as one."""
        for item_id, transcript in self._heard.items():
            self._keep_unanswered(item_id, transcript)
        self._heard.clear()
        return self.found

    def _keep_unanswered(self, item_id: str, transcript: str) -> None:
        answer = TimedAnswer(item_id)
        answer.settle(transcript)
        answer.end("completed")
        self.found.answers.append(answer)

    def _take_session(self, session: dict[str, Any], *, is_new: bool) -> None:
        self.greetings += is_new
        self.configured += not is_new
        output = session.get("audio", {}).get("output", {}).get("format")
        if output is not None:
            encoding, rate = _ENCODINGS[output["type"]]
            self._format = (encoding, output.get("rate", rate))

    def _name_speech(self, item_id: str) -> None:
        if item_id not in self.ids.values():
            self.ids["speech", sum(place[0] == "speech" for place in self.ids)] = item_id

    def _transcribed(self, item_id: str, transcript: str) -> None:
        if (answer := self._answer_to.get(item_id)) is None:
            self._heard[item_id] = transcript
        else:
            answer.settle(transcript)

    def _begin(self, at: float, response_id: str) -> None:
        self.started += 1
        self.running = answer = self._answer(response_id)
        answer.ask(self._ends[-1] if self._ends else at)
        self.ids["response", self._place(answer)] = response_id
        if self._asked is not None:
            self._answer_to[self._asked] = answer
            answer.settle(self._heard.pop(self._asked, ""))
            self._asked = None

    def _respond(self, at: float, kind: str, event: dict[str, Any]) -> None:
        name = event["response_id"]
        answer = self._answer(name)
        match kind:
            case "response.output_item.added":
                self.ids["output", self._place(answer), event["output_index"]] = event["item"]["id"]
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                self._hear(answer, TextChunk(name, 0, event["delta"]), at)
            case "response.output_audio.delta":
                self._hear(answer, AudioChunk(name, 0, decoded(event["delta"]), *self._format), at)
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                call, index = event["item"], event["output_index"]
                self.ids["call", self._place(answer), index] = call["call_id"]
                fragment = ToolCallFragment(index, call["call_id"], call["name"], call["arguments"])
                self._hear(answer, ToolCallChunk(name, 0, fragment), at)

    def _done(self, at: float, response: dict[str, Any]) -> None:
        answer = self._answer(response["id"])
        answer.end("error" if response["status"] == "failed" else response["status"], at)
        if (error := (response.get("status_details") or {}).get("error")) is not None:
            answer.errors.append(ServerError("", code=str(error.get("code"))))
        self._end(answer)

    def _place(self, answer: TimedAnswer) -> int:
        return self.found.answers.index(answer)

    def rewritten(self, message: bytes | str, then: RealtimeReader) -> bytes | str | None:
        event = parsed(message)
        if event.get("type") == "input_audio_buffer.append":
            return message
        current = {then.ids[place]: item_id for place, item_id in self.ids.items() if place in then.ids}
        renamed = _renamed(event, current)
        return message if renamed == event else orjson.dumps(renamed).decode()


def _renamed(value: Any, current: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(one, current) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: current.get(one, one) if name in _ID_FIELDS and isinstance(one, str) else _renamed(one, current)
        for name, one in value.items()
    }


# HTTP

#: The format of audio that JSON contains in base64.
_IN_EVENTS: Final = AudioFormat(sample_rate=24_000)


class ResponseReader:
    """Assembles the answer of an HTTP response as it arrives. Reads the formats of all routes."""

    def __init__(self) -> None:
        self.answer = TimedAnswer()
        self.status = 0
        #: The id of the session that the request opened.
        self.session_id: str | None = None
        self._content_type = ""
        self._body = bytearray()
        self._events = EventReader()

    def begin(self, status: int, content_type: str) -> None:
        """Process the head of the response."""
        self.status = status
        self._content_type = content_type

    @property
    def has_answer(self) -> bool:
        """Whether the response has an answer, and not only the state of an answer in progress."""
        answer = self.answer
        return bool(answer.outputs or answer.heard or answer.errors or answer.finish_reason)

    def feed(self, at: float, data: bytes) -> None:
        """Process a piece of the body."""
        if self._content_type.startswith("audio/"):
            self._add_audio(at, data, _audio_format(self._content_type))
        elif self._content_type.startswith("text/event-stream"):
            for event in self._events.feed(data):
                self._read(at, parsed(event.data))  # no fields for [DONE]
        else:
            self._body += data

    def finish(self, at: float) -> None:
        """Process the end of the response."""
        if self._content_type.startswith("application/json"):
            self._read(at, parsed(bytes(self._body)))
        elif self._content_type.startswith("text/"):
            self._add_text(at, self._body.decode("utf-8", "replace"))
        reason = self.answer.finish_reason
        self.answer.end("stop" if reason is None and self.status == 200 and self.has_answer else reason, at)

    def _read(self, at: float, fields: dict[str, Any]) -> None:
        self.session_id = fields.get("session_id")
        error = fields.get("error")
        if isinstance(error, dict):
            self.answer.errors.append(ServerError("", code=str(error.get("code"))))
        transcript = fields.get("input_transcript")
        if isinstance(transcript, dict) and not transcript.get("interim"):
            self.answer.add(TranscriptChunk("", 0, str(transcript.get("text", ""))))
        match fields.get("type"):
            case "speech.audio.delta":
                self._add_audio(at, decoded(fields.get("audio")), _IN_EVENTS)
            case "transcript.text.delta":
                self._add_text(at, fields.get("delta"))
        if "type" not in fields:
            self._add_text(at, fields.get("text"))
        for choice in fields.get("choices") or ():
            self._choice(at, choice)

    def _choice(self, at: float, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or choice
        self._add_text(at, message.get("content") or message.get("text"))
        audio = message.get("audio")
        if isinstance(audio, dict):
            self._add_audio(at, decoded(audio.get("data")), _IN_EVENTS)
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            name, arguments = function.get("name"), function.get("arguments") or ""
            self.answer.add(ToolCallChunk("", 0, ToolCallFragment(call.get("index", place), None, name, arguments)))
        if choice.get("finish_reason"):
            self.answer.end(choice["finish_reason"])

    def _add_text(self, at: float, text: object) -> None:
        if isinstance(text, str) and text:
            self.answer.hear(TextChunk("", 0, text), at)

    def _add_audio(self, at: float, data: bytes, source: AudioFormat) -> None:
        if data:
            self.answer.hear(AudioChunk("", 0, data, source.encoding, source.sample_rate), at)


def _audio_format(content_type: str) -> AudioFormat:
    try:
        return parse_audio_mime(content_type)
    except OmniError:
        return AudioFormat()
