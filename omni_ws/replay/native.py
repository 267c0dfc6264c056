"""Replays a recorded WebSocket session, native or of the Realtime API: sends every message, in order, at its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlencode

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.replay.compare import ORDERLY_CLOSE_CODES, Answers, NativeAnswers, ReplayedAnswer, decoded, parsed
from omni_ws.replay.recording import Pace, RecordedSession, Target, Timetable, content
from omni_ws.wire.recording import ClosedLine, OpenedLine, ReceivedLine, RecordedLine, SentLine

#: Time-out of the closing handshake.
_CLOSE_SEC: Final = 5.0
#: Close codes that are never sent in a frame (RFC 6455, section 7.4.1).
_NEVER_SENT: Final = frozenset({1005, 1006, 1015})


class _Classified(Protocol):
    def __call__(self, message: bytes | str, *, ended: bool) -> tuple[bool, bool]: ...


@dataclass(frozen=True, slots=True)
class WebSocketKind:
    """What distinguishes the WebSockets of this server for a replay."""

    #: Makes what follows both directions of a session.
    answers: Callable[[], NativeAnswers]
    #: Whether the input has ended after a message of the client, given whether it had before, and whether the message
    #: stops or may stop a running answer.
    classified: _Classified
    #: A message with current ids and numbers in place of recorded ones, given what was received then and now; None if
    #: it has no counterpart.
    rewritten: Callable[[bytes | str, NativeAnswers, NativeAnswers], bytes | str | None]


def recorded_answers(recording: RecordedSession, kind: WebSocketKind) -> Answers:
    """Collects the answers of a recording."""
    answers = kind.answers()
    for _ in _steps(recording.events, answers, kind):
        pass
    return _finished(answers, recording.events)


def _finished(answers: NativeAnswers, events: Iterable[RecordedLine]) -> Answers:
    ends = {event.connection: event for event in events if isinstance(event, ClosedLine)}
    found = answers.finished()
    found.ends = [f"server {event.code}" if event.by == "server" else event.by for _, event in sorted(ends.items())]
    return found


class WebSocketReplay:
    """Replays one session.

    ``run`` returns the answers. It raises OSError if the server cannot be reached.
    """

    def __init__(self, recording: RecordedSession, target: Target, pace: Pace, kind: WebSocketKind) -> None:
        self._recording = recording
        self._kind = kind
        self._target = target
        self._time = Timetable(pace)
        self._then = kind.answers()
        self._now = kind.answers()
        self._connections: dict[int, ClientConnection] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._ends: dict[int, str] = {}
        #: Expected events that never arrived, which later steps do not wait for.
        self._missing: dict[str, int] = {"started": 0, "finals": 0, "configured": 0}
        #: Places of answers that produced fewer outputs than recorded.
        self._cut_short: set[int] = set()

    async def run(self) -> Answers:
        """Replays the session; returns the answers."""
        try:
            for step in _steps(self._recording.events, self._then, self._kind):
                await self._take(step)
            await self._time.wait(self._is_answered)
        finally:
            for connection in self._connections.values():
                await connection.close()
            for reader in self._readers:
                await reader
        found = self._now.finished()
        found.ends = [self._ends[number] for number in sorted(self._ends)]
        return found

    async def _take(self, step: _Step) -> None:
        if not await self._time.until(step.event.at, lambda: self._is_due(step)):
            for name in self._missing:
                self._missing[name] = max(0, getattr(step, name) - getattr(self._now, name))
            self._cut_short.add(step.place)
        match step.event:
            case OpenedLine():
                await self._open(step.event)
            case ReceivedLine():
                await self._send(step.event)
            case ClosedLine():
                await self._close(step.event)

    def _is_answered(self) -> bool:
        now, then = self._now, self._then
        if all(number in self._ends for number in self._connections):
            return True
        enough = now.finals >= then.finals - self._missing["finals"] and len(now.found.errors) >= len(then.found.errors)
        last = next(event for event in reversed(self._recording.events) if isinstance(event, ClosedLine | OpenedLine))
        closes = isinstance(last, ClosedLine) and last.by == "server" and last.code not in ORDERLY_CLOSE_CODES
        return enough and not closes

    def _is_due(self, step: _Step) -> bool:
        now, missing = self._now, self._missing
        if step.event.connection in self._ends and not isinstance(step.event, OpenedLine):
            return True
        heard = all(getattr(now, name) >= getattr(step, name) - missing[name] for name in missing)
        if isinstance(step.event, ClosedLine) and step.event.by == "lost":
            # Between answers there is nothing to wait for: an answer may come in fewer pieces than recorded.
            between = step.started == step.finals
            return heard and (between or now.highest >= step.highest or now.finals >= step.finals + 1)
        if not step.outputs or step.place in self._cut_short:
            return heard
        come_as_far = now.outputs_of(step.place) >= step.outputs and (not step.sounds or now.sounds(step.place))
        return heard and come_as_far

    async def _open(self, event: OpenedLine) -> None:
        query: dict[str, str] = {}
        if event.last_output is not None and self._now.session_id and self._now.resume_token:
            query = {
                "session_id": self._now.session_id,
                "resume_token": self._now.resume_token,
                "last_output": str(min(event.last_output, self._now.highest)),
            }
        url = self._target.websocket(event.target) + (f"?{urlencode(query)}" if query else "")
        try:
            connection = await connect(
                url,
                subprotocols=None if event.subprotocol is None else [Subprotocol(event.subprotocol)],
                additional_headers=self._target.headers,
                compression=None,
                max_size=None,
                proxy=None,
                close_timeout=_CLOSE_SEC,
            )
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None
        self._connections[event.connection] = connection
        self._readers.append(asyncio.create_task(self._read(event.connection, connection), name="replay reader"))
        # A client sends nothing before the first frame of the server.
        greetings = self._now.greetings
        await self._time.wait(lambda: self._now.greetings > greetings or event.connection in self._ends)

    async def _send(self, event: ReceivedLine) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or event.connection in self._ends:
            return
        message = self._kind.rewritten(content(event), self._then, self._now)
        if message is None:
            return
        self._now.asked(self._time.now(), message)
        with suppress(ConnectionClosed):  # the reader records it
            await connection.send(message, text=event.binary is None)

    async def _close(self, event: ClosedLine) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or event.connection in self._ends:
            return
        if event.by == "lost":
            connection.transport.abort()
            await self._time.wait(lambda: event.connection in self._ends)
        else:
            await connection.close(event.code if event.code and event.code not in _NEVER_SENT else 1000)

    async def _read(self, number: int, connection: ClientConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                self._now.heard(self._time.now(), await connection.recv())
                self._time.change()
        await connection.wait_closed()
        protocol = connection.protocol
        if protocol.close_rcvd is not None and (protocol.close_sent is None or protocol.close_rcvd_then_sent):
            self._ends[number] = f"server {connection.close_code}"
        else:
            self._ends[number] = "client" if protocol.close_sent is not None else "lost"
        self._time.change()


@dataclass(frozen=True, slots=True)
class _Step:
    """An action of the recorded client, and what it had received before."""

    event: OpenedLine | ReceivedLine | ClosedLine
    started: int
    finals: int
    configured: int
    #: Outputs of the running answer that the step depends on, and the place of that answer.
    outputs: int
    place: int
    #: Whether that answer was heard.
    sounds: bool
    highest: int


def _steps(events: Iterable[RecordedLine], answers: NativeAnswers, kind: WebSocketKind) -> Iterator[_Step]:
    """Yields the actions of the client, each with what ``answers`` had received by then."""
    events = tuple(events)
    ended = True
    for index, event in enumerate(events):
        match event:
            case SentLine():
                answers.heard(event.at, content(event))
                continue
            case ClosedLine(by="server"):
                continue
            case OpenedLine() | ReceivedLine() | ClosedLine():
                pass
            case _:
                continue
        highest = answers.highest
        if isinstance(event, ClosedLine) and event.by == "lost":
            later = (one.last_output for one in events[index:] if isinstance(one, OpenedLine))
            highest = next((one for one in later if one is not None), highest)
        depends = False
        if isinstance(event, ReceivedLine):
            ended, depends = kind.classified(content(event), ended=ended)
        running = answers.running if isinstance(event, ReceivedLine) else None
        heard = 0 if running is None else running.outputs
        yield _Step(
            event,
            answers.started,
            answers.finals,
            answers.configured,
            # Input during an answer waits until that has begun; a cancel, until it has progressed as far as recorded.
            heard if depends else min(heard, 1),
            0 if running is None else answers.found.answers.index(running),
            # Speech that interrupts an answer before its first audio is answered together with what was asked.
            running is not None and running.first_audio_at is not None,
            highest,
        )
        if isinstance(event, ReceivedLine):
            answers.asked(event.at, content(event))


# The native WebSocket


def _native_classified(message: bytes | str, *, ended: bool) -> tuple[bool, bool]:
    """See WebSocketKind."""
    if isinstance(message, bytes):
        return (bool(message[3] & 1), ended) if len(message) > 3 else (ended, False)
    match parsed(message):
        case {"type": "input_chunk", **fields}:
            return fields.get("end_of_input") is True, ended
        case {"type": "finish"}:
            return True, False
        case {"type": "cancel"}:
            return True, True
    return ended, False


def _native_rewritten(message: bytes | str, then: NativeAnswers, now: NativeAnswers) -> bytes | str | None:
    """See WebSocketKind."""
    if isinstance(message, bytes):
        return message
    frame = parsed(message)
    match frame:
        case {"type": "cancel" | "history_truncate", "request_id": str(request_id)}:
            place = then.place_of(request_id)
            if place is None or place >= len(now.found.answers):
                return message
            return orjson.dumps(frame | {"request_id": now.found.answers[place].request_id}).decode()
        case {"type": "output_ack", "sequence_id": int(number)} if number > now.highest:
            # An output that has not been sent cannot be acknowledged.
            number = now.highest
            return orjson.dumps(frame | {"sequence_id": number}).decode() if number >= 0 else None
    return message


NATIVE: Final = WebSocketKind(NativeAnswers, _native_classified, _native_rewritten)


# The Realtime API

#: A place that has the same event in the recording and in the replay.
_Place: TypeAlias = tuple[str | int, ...]
_ENCODINGS: Final = {
    "audio/pcm": (AudioEncoding.PCM16, 24_000),
    "audio/pcmu": (AudioEncoding.PCMU, 8000),
    "audio/pcma": (AudioEncoding.PCMA, 8000),
}
#: Fields of client events that name what the server has given an id.
_ID_FIELDS: Final = frozenset({"id", "item_id", "previous_item_id", "response_id", "call_id"})
#: Events that stop a response that is in progress.
_STOPPING: Final = frozenset({"response.cancel", "output_audio_buffer.clear", "conversation.item.truncate"})


class RealtimeAnswers(NativeAnswers):
    """Follows both directions of a session, event by event, in order. A response is an answer."""

    def __init__(self) -> None:
        super().__init__()
        #: The ids that the server gave.
        self.ids: dict[_Place, str] = {}
        #: The item of speech that the next response answers.
        self._asked: str | None = None
        self._answer_to: dict[str, ReplayedAnswer] = {}
        #: By item, what was heard and is not part of an answer yet.
        self._heard: dict[str, str] = {}

    def asked(self, at: float, message: bytes | str) -> None:
        if parsed(message).get("type") in ("input_audio_buffer.commit", "response.create"):
            self._ends.append(at)

    def heard(self, at: float, message: bytes | str) -> None:
        event = parsed(message)
        match event.get("type"):
            case "session.created":
                self.greetings += 1
                self._take_session(event["session"])
            case "session.updated":
                self.configured += 1
                self._take_session(event["session"])
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
                self.found.answers.append(ReplayedAnswer("", transcript=event["text"], finish_reason="completed"))
            case "error":
                error = event["error"]
                self.found.errors.append(str(error.get("code") if isinstance(error, dict) else event.get("code")))
            case str(kind) if kind.startswith("response."):
                self._respond(at, kind, event)

    def finished(self) -> Answers:
        """All answers; what was heard and never answered counts as one."""
        for item_id, transcript in self._heard.items():
            self.found.answers.append(ReplayedAnswer(item_id, transcript=transcript, finish_reason="completed"))
        self._heard.clear()
        return self.found

    def _take_session(self, session: dict[str, Any]) -> None:
        output = session.get("audio", {}).get("output", {}).get("format")
        if output is not None:
            encoding, rate = _ENCODINGS[output["type"]]
            self._format = AudioFormat(encoding, output.get("rate", rate), 1)

    def _name_speech(self, item_id: str) -> None:
        if item_id not in self.ids.values():
            self.ids["speech", sum(place[0] == "speech" for place in self.ids)] = item_id

    def _transcribed(self, item_id: str, transcript: str) -> None:
        answer = self._answer_to.get(item_id)
        if answer is None:
            self._heard[item_id] = transcript
        else:
            answer.transcript = transcript

    def _respond(self, at: float, kind: str, event: dict[str, Any]) -> None:
        if kind == "response.created":
            self._begin(at, event["response"]["id"])
            return
        answer = self._answer(event["response"]["id"] if kind == "response.done" else event["response_id"])
        match kind:
            case "response.output_item.added":
                self.ids["output", self._place(answer), event["output_index"]] = event["item"]["id"]
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                answer.output(at)
                answer.text += event["delta"]
            case "response.output_audio.delta":
                self._hear_audio(at, answer, decoded(event["delta"]), self._format)
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                call = event["item"]
                self.ids["call", self._place(answer), event["output_index"]] = call["call_id"]
                answer.output(at)
                answer.tool_calls += f"{call['name']}{call['arguments']}"
            case "response.done":
                self._end(at, answer, event["response"])

    def _begin(self, at: float, response_id: str) -> None:
        self.started += 1
        self.running = answer = self._answer(response_id)
        answer.asked_at = self._ends[-1] if self._ends else at
        self.ids["response", self._place(answer)] = response_id
        if self._asked is not None:
            self._answer_to[self._asked] = answer
            answer.transcript = self._heard.pop(self._asked, "")
            self._asked = None

    def _end(self, at: float, answer: ReplayedAnswer, response: dict[str, Any]) -> None:
        self.finals += 1
        answer.final_at = at
        answer.finish_reason = "error" if response["status"] == "failed" else response["status"]
        if (error := (response.get("status_details") or {}).get("error")) is not None:
            answer.errors.append(str(error.get("code")))
        if answer is self.running:
            self.running = None

    def _place(self, answer: ReplayedAnswer) -> int:
        return self.found.answers.index(answer)


def _realtime_classified(message: bytes | str, *, ended: bool) -> tuple[bool, bool]:
    """See WebSocketKind."""
    kind = parsed(message).get("type")
    if kind == "input_audio_buffer.append":
        return False, ended
    if kind in ("input_audio_buffer.commit", "response.create"):
        return True, False
    return (True, True) if kind in _STOPPING else (ended, False)


def _realtime_rewritten(message: bytes | str, then: NativeAnswers, now: NativeAnswers) -> bytes | str | None:
    """See WebSocketKind."""
    assert isinstance(then, RealtimeAnswers)
    assert isinstance(now, RealtimeAnswers)
    event = parsed(message)
    if event.get("type") == "input_audio_buffer.append":
        return message
    current = {then.ids[place]: item_id for place, item_id in now.ids.items() if place in then.ids}
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


REALTIME: Final = WebSocketKind(RealtimeAnswers, _realtime_classified, _realtime_rewritten)
