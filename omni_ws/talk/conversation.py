"""The ways to talk: an open microphone, push-to-talk, typed turns, and one question with its answer.

AnswerListener shows and plays the events of the server, and keeps the answer.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import orjson
import soxr
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from omni_ws.audio.pcm import PCM16, SampleLayout, mixed_down, pcm16_from_samples, samples_from_bytes
from omni_ws.caller.answers import parsed
from omni_ws.caller.live_caller import MicrophoneFormat, RealtimeWire
from omni_ws.client import (
    AudioChunk,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    Event,
    Reconnected,
    Reconnecting,
    ResponseStarted,
    Resumed,
    ServerError,
    SpeechConfirmed,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    TextChunk,
    TranscriptChunk,
    TranscriptView,
)
from omni_ws.client import Final as LastEvent
from omni_ws.client.audio import Pcm16, paced, pieces, read_ahead
from omni_ws.client.connection import authorization, error_from_response, websocket_url
from omni_ws.core.chunks import AudioEncoding, FinishReason
from omni_ws.errors import EmptyInput, OmniError
from omni_ws.scenarios.servers import (
    REALTIME_RATE,
    realtime_wire,
)
from omni_ws.talk.display import JsonDisplay
from omni_ws.talk.sound_devices import PIECE_MS, LoudspeakerDevice, MicrophoneDevice


class AnswerListener:
    """Shows and plays the events of the server. ``reply`` is the pcm16 audio of the latest answer so far."""

    def __init__(
        self, display: JsonDisplay, loudspeaker: LoudspeakerDevice | None, *, interruptible: bool = False
    ) -> None:
        """``interruptible``: whether speech stops the answer (barge-in)."""
        self.display = display
        self.loudspeaker = loudspeaker
        #: What was understood so far, by request.
        self.transcripts: dict[str, TranscriptView] = {}
        self.reply = bytearray()
        self.reply_rate = 0
        #: Id of the running request.
        self.answering: str | None = None
        self.silenced: str | None = None
        #: The names of requests that were sent and have no id yet.
        self.asked: set[str] = set()
        self.unwanted: set[str] = set()
        self.input_ended_at: float | None = None
        #: When a turn ended while the answer to the turn before was still going on.
        self.next_input_ended_at: float | None = None
        self._interruptible = interruptible
        #: What was heard of an answer that speech has interrupted, until it ends or goes on.
        self.paused: tuple[str, float] | None = None
        self.first: dict[str, float] = {}
        self.error: OmniError | None = None

    def input_ended(self) -> None:
        if self.first and self.input_ended_at is not None:
            self.next_input_ended_at = time.perf_counter()
        else:
            self.input_ended_at = time.perf_counter()
        self.display.state("thinking")

    def silence(self) -> None:
        """Stop playback of the current answer, for good."""
        self.silenced = self.answering
        self.paused = None
        self.stop_playing()

    def stop(self) -> None:
        """Stop playback, and discard the answers to requests that were sent already."""
        self.unwanted |= self.asked
        self.asked.clear()
        self.silence()

    @property
    def stoppable(self) -> list[str]:
        """The ids of the requests whose answers are being made or played."""
        sound = self.loudspeaker.buffer.answers if self.loudspeaker else []
        return [*dict.fromkeys([*sound, *([self.answering] if self.answering else [])])]

    def stop_playing(self) -> None:
        if self.loudspeaker:
            self.loudspeaker.buffer.clear()

    def duck(self, lowered: bool) -> None:
        """Lower the volume of playback, or restore the full volume."""
        if self.loudspeaker:
            self.loudspeaker.ducker.duck(lowered)

    @property
    def played(self) -> tuple[str, float] | None:
        """The request whose answer is played, and how many milliseconds of it were played; None if none is."""
        return self.paused or (self.loudspeaker.buffer.heard if self.loudspeaker else None)

    def take(self, event: Event) -> None:
        match event:
            case ResponseStarted(request_id=request_id, ref=ref):
                self.asked.discard(ref or "")
                self.answering = request_id
                if ref in self.unwanted:
                    self.silenced = request_id
                self.reply.clear()
            case SpeechStarted() | SpeechConfirmed() | SpeechDismissed() | SpeechStopped():
                self.take_speech(event)
            case TranscriptChunk():
                self.take_transcript(event)
            case TextChunk(text=text):
                self.first.setdefault("text", time.perf_counter())
                self.display.show("text", text=text)
                self.display.state("answering")
            case AudioChunk():
                self.take_audio(event)
            case ErrorEvent(error=error):
                # Each piece of what cannot be taken has the same error.
                if self.error is None or self.error.message != error.message:
                    self.display.show("error", code=error.code, message=f"{error.code}: {error.message}")
                self.error = error
                if event.blocks_request:
                    self.asked.discard(event.ref or "")
            case Reconnected() | Resumed() | Reconnecting():
                self.take_connection(event)
            case LastEvent():
                self.take_final(event)

    def take_speech(self, event: SpeechStarted | SpeechConfirmed | SpeechDismissed | SpeechStopped) -> None:
        match event:
            case SpeechStarted(certain=False):  # the voice is lowered until it is known whether this interrupts
                kind = "speech_uncertain"
                self.duck(True)
            case SpeechStarted() | SpeechConfirmed():
                kind = "speech_started"
                # The server sends no more of the answer, unless this turns out to have no words.
                if self._interruptible:
                    self.paused = self.played
                    self.stop_playing()
                self.duck(False)
            case SpeechDismissed():
                kind = "speech_dismissed"
                self.duck(False)
            case SpeechStopped():
                kind = "speech_stopped"
                self.input_ended()
        self.display.show(kind, audio_ms=event.audio_ms)

    def take_connection(self, event: Reconnected | Resumed | Reconnecting) -> None:
        match event:
            case Reconnected(resent_chunks=count):
                self.start_over()
                message = f"the connection was lost; a new one has {count} chunks again"
            case Resumed():
                message = "the connection was lost and is back; nothing is missing"
            case Reconnecting(seconds=seconds, error=error):
                message = f"no connection ({error}); the next attempt is in {seconds:.0f} s"
        self.display.show("note", message=message)

    def take_transcript(self, event: TranscriptChunk) -> None:
        if event.late:
            self.display.show("note", message=f"before that you said: {event.text}")
            return
        transcript = self.transcripts.setdefault(event.request_id, TranscriptView())
        transcript.add(event)
        self.display.show("transcript", text=transcript.text, interim=event.interim)

    def take_audio(self, event: AudioChunk) -> None:
        if event.request_id == self.silenced:
            return
        self.first.setdefault("audio", time.perf_counter())
        self.reply += event.audio
        self.reply_rate = event.sample_rate
        self.display.show("audio", bytes=len(event.audio), start_ms=event.start_ms, sample_rate=event.sample_rate)
        if self.loudspeaker:
            self.paused = None
            self.loudspeaker.buffer.play(event)

    def take_final(self, event: LastEvent) -> None:
        for names in (self.asked, self.unwanted):
            names.discard(event.ref or "")
        self.transcripts.pop(event.request_id, None)
        if self.answering not in (None, event.request_id):  # of another request than the one that is answered
            if event.finish_reason is FinishReason.STOP:
                self.display.show("note", message="there were no words in that; the answer goes on")
            return
        if event.finish_reason is FinishReason.CANCELLED:
            self.silence()
        if self.loudspeaker:
            self.loudspeaker.buffer.end()
        usage = {name: getattr(event.usage, name) for name in event.usage.__slots__} if event.usage else None
        self.display.show("final", finish_reason=event.finish_reason.value, usage=usage)
        self.display.show("latency", first_audio_ms=self.since_input("audio"), first_text_ms=self.since_input("text"))
        self.answering = self.silenced = None
        self.input_ended_at, self.next_input_ended_at = self.next_input_ended_at, None
        self.first.clear()

    def since_input(self, what: str) -> int | None:
        """Return the milliseconds from the end of the input to the first ``text`` or ``audio`` (``what``).

        Negative if that came earlier; None if either is missing.
        """
        if what not in self.first or self.input_ended_at is None:
            return None
        return round((self.first[what] - self.input_ended_at) * 1000)

    def start_over(self) -> None:
        """Discard the partial answer, since it begins again."""
        self.duck(False)
        self.reply.clear()
        self.first.clear()
        self.transcripts.clear()
        self.stop_playing()


# The ways to talk: an open microphone, a microphone with a key, typed turns, and one question with its answer.


#: Interval of playback reports.
REPORT_SEC: Final = 0.2
#: After this many pieces of zeros, the microphone is probably switched off.
SILENT_PIECES: Final = 3000 // PIECE_MS
#: Interval of levels on a terminal.
LEVELS_SEC: Final = 1 / 15
#: The name of a request that is alone in its session.
QUESTION: Final = "question"


class TalkSession(Protocol):
    """A session with a server: the interface that ``ClientSession`` and ``RealtimeSession`` share."""

    async def send_audio(self, audio: bytes, *, ref: str | None = None) -> object: ...

    async def send_text(self, text: str, *, end: bool = False, ref: str | None = None) -> object: ...

    async def finish(self) -> None: ...

    async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None: ...

    async def acknowledge_output(self, *, played_ms: float | None = None, request_id: str | None = None) -> None: ...

    def events(self) -> AsyncIterator[Event]: ...

    def response(self, ref: str | None = None) -> AsyncIterator[Event]: ...


class Leave(Exception):
    """Raised when the user ends the conversation."""


async def ask(
    session: TalkSession, listener: AnswerListener, *, text: str | None, audio: AsyncGenerator[bytes, None]
) -> None:
    """Send one question, ``text`` or else ``audio``, and pass its answer to ``listener``; wait until it was played.

    Raises EmptyInput for ``audio`` without samples, OmniError if no answer begins, and ConnectionLost.
    """

    async def send() -> None:
        asked = text is not None
        async with aclosing(audio):
            if text is not None:
                await session.send_text(text, ref=QUESTION)
            else:
                async for piece in audio:
                    await session.send_audio(piece, ref=QUESTION)
                    asked = True
        if not asked:
            raise EmptyInput("there is no sound to send")
        listener.input_ended()
        await session.finish()

    async def receive() -> None:
        async for event in session.response(QUESTION):
            listener.take(event)

    await _together(send, receive)
    if listener.loudspeaker:
        await listener.loudspeaker.played()


def samples(audio: Pcm16 | None, *, fast: bool) -> AsyncGenerator[bytes, None]:
    """Yield the audio of a file, or of standard input if ``audio`` is None. A file is paced, unless ``fast``."""
    if audio is None:
        return read_ahead()
    return paced(pieces(audio, piece_ms=PIECE_MS), interval=0.0 if fast else PIECE_MS / 1000)


async def type_turns(session: TalkSession, listener: AnswerListener) -> None:
    """Send each line of standard input as a turn, until the end of the input; blank lines are skipped.

    At a terminal, a line interrupts the answer before it, and a line "q" ends the conversation. From a pipe, each line
    waits for the answer to the line before.
    """
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        listener.display.show("note", message="type; Enter sends; q and Enter: leave")
    answered = asyncio.Event()

    async def send() -> None:
        names = (f"typed-{number}" for number in count(1))
        async with aclosing(_lines()) as typed:
            async for line in typed:
                if at_terminal and line.lower() == "q":
                    raise Leave
                if at_terminal:
                    await interrupt(session, listener)
                answered.clear()
                listener.asked.add(name := next(names))
                await session.send_text(line, end=True, ref=name)
                listener.input_ended()
                if not at_terminal:
                    await answered.wait()
        if listener.loudspeaker and not at_terminal:
            await listener.loudspeaker.played()
        raise Leave

    await _until_left(lambda: _receive(session, listener, answered), send)


async def _lines() -> AsyncGenerator[str, None]:
    """Yield the lines of standard input that are not blank."""
    waiting = b""
    async with aclosing(read_ahead()) as stream:
        async for piece in stream:
            *lines, waiting = (waiting + piece).split(b"\n")
            for line in filter(None, (line.decode(errors="replace").strip() for line in lines)):
                yield line
    if text := waiting.decode(errors="replace").strip():
        yield text


async def talk_held(session: TalkSession, microphone: MicrophoneDevice, listener: AnswerListener) -> None:
    """Talk by push-to-talk: Enter stops the answer and begins a turn; Enter again ends the turn.

    Returns at a line "q" or the end of standard input.
    """
    names = (f"speech-{number}" for number in count(1))

    async def speak() -> None:
        name = next(names)
        listener.asked.add(name)
        async with aclosing(recorded(microphone, listener.display, "hearing you")) as stream:
            async for piece in stream:
                await session.send_audio(piece, ref=name)
        listener.input_ended()
        await session.finish()

    async def follow_keys() -> None:
        speaking: asyncio.Task[None] | None = None
        listener.display.show("note", message="Enter: speak; Enter again: done; q and Enter: leave")
        listener.display.state("Enter: speak", idle=True)
        async with asyncio.TaskGroup() as group, aclosing(read_ahead()) as lines:
            async for line in lines:
                if line.strip().lower() == b"q":
                    break
                if speaking is None:
                    await interrupt(session, listener)
                    microphone.start()
                    speaking = group.create_task(speak())
                else:
                    microphone.stop()
                    await speaking
                    speaking = None
            if speaking:
                microphone.stop()
        raise Leave

    await _until_left(follow_keys, lambda: _receive(session, listener), lambda: _show_levels(microphone, listener))


async def talk_freely(session: TalkSession, microphone: MicrophoneDevice, listener: AnswerListener) -> None:
    """Talk with an open microphone. Returns at a line "q" or the end of standard input.

    Speech interrupts the answer if the session is configured so.
    """

    async def speak() -> None:
        microphone.start()
        async with aclosing(recorded(microphone, listener.display, "listening", idle=True)) as stream:
            async for piece in stream:
                await session.send_audio(piece)

    async def report() -> None:
        """Report playback: the server paces audio by it, and learns where speech has interrupted the answer."""
        while True:
            await asyncio.sleep(REPORT_SEC)
            await _report(session, listener)

    async def follow_keys() -> None:
        listener.display.show("note", message="speak; q and Enter: leave")
        async with aclosing(read_ahead()) as lines:
            async for line in lines:
                if line.strip().lower() == b"q":
                    break
        raise Leave

    try:
        await _until_left(
            follow_keys,
            lambda: _receive(session, listener),
            lambda: _show_levels(microphone, listener),
            speak,
            report,
        )
    finally:
        microphone.stop()


async def interrupt(session: TalkSession, listener: AnswerListener) -> None:
    """Stop all answers that are being made or played, or still to come, and report how much was played."""
    await _report(session, listener)
    for request_id in listener.stoppable:
        await session.cancel(request_id)
    for name in sorted(listener.asked):
        await session.cancel(ref=name)
    listener.stop()


async def recorded(
    microphone: MicrophoneDevice, display: JsonDisplay, state: str, *, idle: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces that the microphone records.

    Shows ``state`` at the first samples that are not zero: devices give zeros until they have woken up, and speech is
    lost until then. Shows a note if all samples are zero, and if audio was dropped because the network is too slow.
    """
    display.state("opening the microphone", idle=idle)
    silent_pieces, is_open, dropped = 0, False, microphone.dropped_pieces
    async for piece in microphone.pieces():
        if not is_open and any(piece):
            is_open = True
            display.state(state, idle=idle)
        elif not is_open:
            silent_pieces += 1
            if silent_pieces == SILENT_PIECES:
                display.show("note", message="nothing comes out of the microphone; is it switched off?")
        if microphone.dropped_pieces != dropped:
            lost_sec = (microphone.dropped_pieces - dropped) * PIECE_MS / 1000
            dropped = microphone.dropped_pieces
            display.show("note", message=f"the network does not keep up: {lost_sec:.1f} s of speech were not sent")
        yield piece


async def _receive(session: TalkSession, listener: AnswerListener, answered: asyncio.Event | None = None) -> None:
    """Pass all events to ``listener``; set ``answered`` after an event with which no answer is open or expected.

    Raises ConnectionLost when the server closes the session.
    """
    async for event in session.events():
        listener.take(event)
        if answered is not None and not listener.asked and listener.answering is None:
            answered.set()
    raise ConnectionLost("the server has closed the session")


async def _report(session: TalkSession, listener: AnswerListener) -> None:
    if (played := listener.played) is not None:
        await session.acknowledge_output(request_id=played[0], played_ms=played[1])


async def _show_levels(microphone: MicrophoneDevice, listener: AnswerListener) -> None:
    """Show the levels of both sides as they change, on a terminal."""
    while listener.display.live:
        await asyncio.sleep(LEVELS_SEC)
        speaker = listener.loudspeaker
        playing = speaker is not None and not speaker.buffer.idle
        listener.display.levels(microphone.level, speaker.level if speaker else 0.0, playing=playing)


async def _until_left(*actions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with suppress(Leave):
        await _together(*actions)


async def _together(*actions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run actions concurrently. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for action in actions:
                group.create_task(action())
    except BaseExceptionGroup as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None


# A session of the Realtime API, of this server or another, with the methods and events of the client library.


_OPEN_SEC: Final = 10.0
_REASONS: Final = {
    "completed": FinishReason.STOP,
    "cancelled": FinishReason.CANCELLED,
    "incomplete": FinishReason.LENGTH,
}
#: The answer to a cancel that came too late.
_TOO_LATE: Final = "response_cancel_not_active"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The audio formats of the devices: recorded rate (Hz) and channels, and played rate. Audio is resampled."""

    heard: int = REALTIME_RATE
    heard_channels: int = 1
    played: int = REALTIME_RATE


def realtime_url(url: str) -> str:
    """Return the address of the WebSocket: ``https://host``, ``…/v1`` and ``…/v1/realtime`` are the same server.

    Raises InvalidValue.
    """
    parts = urlsplit(websocket_url(url))
    path = parts.path.rstrip("/").removesuffix("/streaming_input")
    path = f"{path}/realtime" if path.endswith("/v1") else path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query or "model=gpt-realtime", ""))


@asynccontextmanager
async def connect_realtime(
    url: str, *, api_key: str | None, config: Mapping[str, Any], tls: ssl.SSLContext | None, rates: DeviceRates
) -> AsyncIterator[RealtimeSession]:
    """Open a session of the Realtime API with settings that are named as in the native protocol.

    ``rates`` are those of the devices. Raises NotHere for a setting that the Realtime API does not have, InvalidValue
    for a bad ``url``, ConnectionFailed if there is no server of that API at ``url``, and the error of a server that
    refuses the session.
    """
    wire = realtime_wire(config, MicrophoneFormat(REALTIME_RATE))
    address = realtime_url(url)
    options: dict[str, Any] = {} if tls is None else {"ssl": tls}
    if api_key is not None:
        options["additional_headers"] = authorization(api_key)
    try:
        websocket = await open_websocket(address, open_timeout=_OPEN_SEC, max_size=None, compression=None, **options)
    except InvalidStatus as refusal:
        raise error_from_response(refusal.response.status_code, bytes(refusal.response.body or b"")) from None
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(f"cannot reach {address}: {error or type(error).__name__}") from error
    async with websocket:
        session = RealtimeSession(websocket, wire, rates)
        await session.open()
        yield session


class RealtimeSession:
    """A session of the Realtime API, opened by ``connect_realtime``.

    ``finish`` and ``send_text`` also ask for an answer. All methods that send raise ConnectionLost.
    """

    def __init__(self, websocket: ClientConnection, wire: RealtimeWire, rates: DeviceRates) -> None:
        self._websocket = websocket
        self._wire = wire
        self._rates = rates
        self._to_server = soxr.ResampleStream(rates.heard, REALTIME_RATE, 1, dtype="int16")
        self._to_device = soxr.ResampleStream(REALTIME_RATE, rates.played, 1, dtype="int16")
        #: The session as the server has described it.
        self.created: dict[str, Any] = {}
        #: The names of requests that have no response yet, and the name of the turn that is being spoken.
        self._asked: deque[str | None] = deque()
        self._spoken_ref: str | None = None
        self._is_spoken = False
        #: The ids of the response that runs, of the last one that ran, and of the one that speech has interrupted.
        self._running: str | None = None
        self._latest: str | None = None
        self._interrupted: str | None = None
        #: What was heard of an answer, as last reported; and the id of the answer that the server knows to be cut.
        self._heard: tuple[str, float] | None = None
        self._cut: str | None = None

    @property
    def is_interruptible(self) -> bool:
        """Whether speech stops an answer."""
        return self._wire.is_interruptible

    async def open(self) -> None:
        """Configure the session. Raises ConnectionFailed, and the error of a server that refuses the settings."""
        try:
            async for message in self._websocket:
                fields = parsed(message)
                match fields.get("type"):
                    case "session.created":
                        self.created = fields.get("session") or {}
                        await self._send(self._wire.opening(self.created))
                    case "session.updated":
                        return
                    case "error":
                        raise _error(fields.get("error"))
        except ConnectionClosed as closed:
            raise ConnectionFailed(f"the server closed the connection: {closed}") from None
        raise ConnectionFailed("the server closed the connection")

    # sending

    async def send_audio(self, audio: bytes, *, ref: str | None = None) -> None:
        """Send audio as the device records it; it is converted to mono at the API's rate."""
        self._spoken_ref, self._is_spoken = ref, True
        if self._rates.heard_channels > 1:
            samples = samples_from_bytes(audio, SampleLayout.S16)
            audio = pcm16_from_samples(mixed_down(samples, self._rates.heard_channels)).tobytes()
        await self._send(*self._wire.audio(0, _resampled(self._to_server, audio)))

    async def send_text(self, text: str, *, end: bool = False, ref: str | None = None) -> None:
        """Send a text, which is a whole turn whatever ``end`` is, and ask for an answer."""
        self._asked.append(ref)
        await self._send(*self._wire.typed(0, text))

    async def finish(self) -> None:
        """End the turn that is being spoken, if there is one, and ask for an answer."""
        if not self._is_spoken:
            return
        self._is_spoken = False
        self._asked.append(self._spoken_ref)
        rest = _resampled(self._to_server, b"", last=True)
        self._to_server.clear()
        await self._send(*self._wire.audio(0, rest), {"type": "input_audio_buffer.commit"}, {"type": "response.create"})

    async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None:
        """Stop the running response, or the one that is awaited, whatever ``request_id`` and ``ref`` are.

        If ``request_id`` is the answer acknowledged last, report how much of it was heard.
        """
        if self._running is not None or self._asked:
            await self._send(self._wire.cancel)
        if self._heard is not None and request_id == self._heard[0]:
            await self._tell_cut(*self._heard)

    async def acknowledge_output(self, *, played_ms: float | None = None, request_id: str | None = None) -> None:
        """Note how much of an answer was played; tell the server, once, if speech has interrupted the answer."""
        if request_id is None or played_ms is None:
            return
        self._heard = request_id, played_ms
        if request_id == self._interrupted:
            await self._tell_cut(request_id, played_ms)

    async def _tell_cut(self, answer: str, played_ms: float) -> None:
        if answer != self._cut:
            self._cut = answer
            await self._send(*self._wire.cut(answer, played_ms))

    async def _send(self, *messages: dict[str, Any]) -> None:
        try:
            for message in messages:
                await self._websocket.send(orjson.dumps(message).decode())
        except ConnectionClosed as closed:
            raise ConnectionLost(f"the connection was lost: {closed}") from None

    # receiving

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events until the session ends. Raises ConnectionLost if it breaks, or speaks another protocol."""
        try:
            async for message in self._websocket:
                try:
                    events = [*self._read(message)]
                except (LookupError, TypeError, AttributeError, ValueError):
                    kind = parsed(message).get("type")
                    raise ConnectionLost(f"the server sent an event {kind} that is not of the Realtime API") from None
                for event in events:
                    yield event
        except ConnectionClosed as closed:
            raise ConnectionLost(f"the connection was lost: {closed}") from None

    async def response(self, ref: str | None = None) -> AsyncIterator[Event]:
        """Yield events up to the end of the next answer, whatever ``ref`` is.

        Raises the server's error if no answer is in progress, and ConnectionLost.
        """
        async for event in self.events():
            yield event
            if isinstance(event, LastEvent):
                return
            if isinstance(event, ErrorEvent) and self._running is None:
                raise event.error
        raise ConnectionLost("the server has closed the session")

    def _read(self, message: bytes | str) -> Iterator[Event]:
        fields = parsed(message)
        match fields.get("type"):
            case "error":
                error = _error(fields["error"])
                if error.code == _TOO_LATE:
                    return
                if blocks := self._running is None and bool(self._asked):
                    error.ref = self._asked.popleft()
                yield ErrorEvent(error, blocks_request=blocks)
                return
            case "response.done":
                details = fields["response"].get("status_details") or {}
                if details.get("error"):
                    yield ErrorEvent(_error(details["error"]))
        for kind, told in self._wire.read(message):
            yield from self._event(kind, told)

    def _event(self, kind: str, told: Mapping[str, Any]) -> Iterator[Event]:
        name, text, audio_ms = told.get("name", ""), told.get("text", ""), told.get("audio_ms") or 0
        match kind:
            case "started":
                self._interrupted = self._latest if self.is_interruptible else None
                yield SpeechStarted(audio_ms, name)
            case "stopped":
                yield SpeechStopped(audio_ms, name)
            case "transcript":
                yield TranscriptChunk(name, 0, text)
            case "response":
                self._running = self._latest = name
                self._to_device.clear()
                yield ResponseStarted(name, "", None, "", self._asked.popleft() if self._asked else None)
            case "text":
                yield TextChunk(name, 0, text)
            case "audio" if name != self._interrupted:  # else it was sent before the server knew
                yield self._sound(name, told["pcm"])
            case "final":
                self._running = None
                if name != self._interrupted and (rest := self._sound(name, b"", last=True)).audio:
                    yield rest
                yield LastEvent(name, 0, _REASONS.get(text, FinishReason.ERROR), None)

    def _sound(self, name: str, pcm: bytes, *, last: bool = False) -> AudioChunk:
        audio = _resampled(self._to_device, pcm, last=last)
        return AudioChunk(name, 0, audio, AudioEncoding.PCM16.value, self._rates.played)


def _resampled(stream: soxr.ResampleStream, audio: bytes, *, last: bool = False) -> bytes:
    return bytes(stream.resample_chunk(np.frombuffer(audio, PCM16), last=last).tobytes())


def _error(fields: object) -> ServerError:
    told = fields if isinstance(fields, dict) else {}
    return ServerError(str(told.get("message")), code=str(told.get("code") or told.get("type") or "error"))
