"""The server that a command talks to: the one on the default port, one of its own, or one of the Realtime API."""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
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
from omni_ws.caller.script import Target
from omni_ws.client import (
    DEFAULT_URL,
    AudioChunk,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    Event,
    ResponseStarted,
    ServerError,
    SpeechStarted,
    SpeechStopped,
    TextChunk,
    TranscriptChunk,
    connect,
)
from omni_ws.client import Final as LastEvent
from omni_ws.client.connection import authorization, error_from_response, websocket_url
from omni_ws.config import ServerConfig, load
from omni_ws.core.chunks import AudioEncoding, FinishReason
from omni_ws.scenarios.servers import (
    REALTIME_RATE,
    own_server,
    realtime_wire,
    until_started,
)
from omni_ws.tools.weights import fetch_for_start

#: How long the default port may take to answer: it is on this machine.
_LOOK_SEC: Final = 5.0


@asynccontextmanager
async def found_server(*, api_key: str | None, environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Yield the URL of the server on the default port or, if there is none, of one that runs during the block.

    Raises NoServer if its own does not start, and the error of a server that refuses the session.
    """
    if await _answers(api_key):
        yield DEFAULT_URL
        return
    print("no server on the default port: one starts, and ends with this command", file=sys.stderr, flush=True)
    await _fetch(load((), environ).config)
    async with own_server({}) as authority:
        yield f"ws://{authority}/v1/streaming_input"


async def _fetch(config: ServerConfig) -> None:
    """Fetch weights in a daemon thread, whose end an interrupted command does not wait for."""
    loop, fetched = asyncio.get_running_loop(), asyncio.Event()

    def fetch() -> None:
        try:
            fetch_for_start(config)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fetched.set)

    threading.Thread(target=fetch, name="weights", daemon=True).start()
    await fetched.wait()


async def _answers(api_key: str | None) -> bool:
    """Return whether a server of this protocol is on the default port; wait for one that starts."""
    await until_started(Target.parse(DEFAULT_URL))
    try:
        async with connect(DEFAULT_URL, api_key=api_key, open_timeout=_LOOK_SEC):
            return True
    except ConnectionFailed:
        return False


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
    """The sound of the devices, whose rates in Hz may differ from that of the Realtime API."""

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
    """Open a session with settings that are named as in the native protocol.

    Raises NotHere for a setting that the Realtime API does not have, ConnectionFailed if nothing speaks it at ``url``,
    and the error of a server that refuses the session.
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
    """A session, made by ``connect_realtime``. Without turn detection ``finish`` and ``send_text`` ask for answers."""

    def __init__(self, websocket: ClientConnection, wire: RealtimeWire, rates: DeviceRates) -> None:
        self._websocket = websocket
        self._wire = wire
        self._rates = rates
        self._to_server = soxr.ResampleStream(rates.heard, REALTIME_RATE, 1, dtype="int16")
        self._to_device = soxr.ResampleStream(REALTIME_RATE, rates.played, 1, dtype="int16")
        #: The session as the server has described it.
        self.created: dict[str, Any] = {}
        #: The names of requests that have no response yet, and that of the one that is being spoken.
        self._asked: deque[str | None] = deque()
        self._spoken_ref: str | None = None
        self._is_spoken = False
        #: The response that runs, the last one that ran, and the one that speech has interrupted.
        self._running: str | None = None
        self._latest: str | None = None
        self._interrupted: str | None = None
        #: What was heard of an answer, as it was reported; and the answer that the server knows to be cut.
        self._heard: tuple[str, float] | None = None
        self._cut: str | None = None

    @property
    def is_interruptible(self) -> bool:
        """Whether speech stops an answer."""
        return self._wire.is_interruptible

    async def open(self) -> None:
        """Configure the session. Raises the error of a server that refuses, and ConnectionFailed."""
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
        """Send audio of the device."""
        self._spoken_ref, self._is_spoken = ref, True
        if self._rates.heard_channels > 1:
            samples = samples_from_bytes(audio, SampleLayout.S16)
            audio = pcm16_from_samples(mixed_down(samples, self._rates.heard_channels)).tobytes()
        await self._send(*self._wire.audio(0, _resampled(self._to_server, audio)))

    async def send_text(self, text: str, *, end: bool = False, ref: str | None = None) -> None:
        """Send a text, which is a whole turn."""
        self._asked.append(ref)
        await self._send(*self._wire.typed(0, text))

    async def finish(self) -> None:
        """End the turn that is being spoken. Does nothing if none is."""
        if not self._is_spoken:
            return
        self._is_spoken = False
        self._asked.append(self._spoken_ref)
        rest = _resampled(self._to_server, b"", last=True)
        self._to_server.clear()
        await self._send(*self._wire.audio(0, rest), {"type": "input_audio_buffer.commit"}, {"type": "response.create"})

    async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None:
        """Stop an answer, by its id or the name of its request, and tell what was heard of it."""
        if self._running is not None or self._asked:
            await self._send(self._wire.cancel)
        if self._heard is not None and request_id == self._heard[0]:
            await self._tell_cut(*self._heard)

    async def acknowledge_output(self, *, played_ms: float | None = None, request_id: str | None = None) -> None:
        """Note how much of an answer was played, and tell the server if speech has interrupted the answer."""
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
        """Yield all events until the session ends. Raises ConnectionLost."""
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
        """Yield events up to the end of the next answer. Raises the error of a server that begins none."""
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
