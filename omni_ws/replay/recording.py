"""A recording to be played again: its lines, their times, and the server that they go to."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

from omni_ws.errors import InvalidFrame
from omni_ws.wire.recording import (
    CutLine,
    EndedLine,
    HeaderLine,
    OpenedLine,
    ReceivedLine,
    RecordedLine,
    RequestedLine,
    SentLine,
    decode_event,
    decode_header,
)
from omni_ws.wire.server_frames import ServerFrame, decode_server_frame


class RecordingError(Exception):
    """The recording is unusable; the message names file and line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A recording in memory."""

    path: Path
    header: HeaderLine
    events: tuple[RecordedLine, ...]


def read_recording(path: Path, *, incomplete: bool = False) -> RecordedSession:
    """Reads and checks a recording.

    ``incomplete`` accepts one that was cut. Raises RecordingError.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordingError(path, 0, error.strerror or "cannot be read") from None
    unfinished = lines.pop()  # empty if the last line is complete
    if not lines:
        raise RecordingError(path, 1, "empty, or not a recording")
    header = _decoded(decode_header, path, 1, lines[0])
    if not header.payloads:
        raise RecordingError(path, 1, "recorded without payloads (record_payloads = false), so it cannot be replayed")
    if header.kind == "telephony":
        raise RecordingError(path, 1, "a telephone call, which cannot be replayed")
    events: list[RecordedLine] = []
    connections = 0
    for number, line in enumerate(lines[1:], start=2):
        if events and isinstance(events[-1], EndedLine | CutLine):
            raise RecordingError(path, number, "a line after the end")
        event = _decoded(decode_event, path, number, line)
        connections = _checked(event, connections, path, number)
        if isinstance(event, SentLine) and event.text is not None and header.kind == "websocket":
            _decoded(_server_frame, path, number, event.text.encode())
        events.append(event)
    end = len(lines) + 1
    if unfinished and not incomplete:
        raise RecordingError(path, end, "the recording breaks off within this line")
    if events and isinstance(events[-1], CutLine) and not incomplete:
        raise RecordingError(path, end - 1, f"the recording was cut here: {events[-1].reason} (see --incomplete)")
    if (not events or not isinstance(events[-1], EndedLine | CutLine)) and not incomplete:
        raise RecordingError(path, end, "the recording has no end: it was interrupted, or is still being written")
    if not any(isinstance(event, OpenedLine | RequestedLine) for event in events):
        raise RecordingError(path, end, "the recording has no connection")
    return RecordedSession(path, header, tuple(event for event in events if not isinstance(event, CutLine | EndedLine)))


_Decoded = TypeVar("_Decoded")


def _decoded(decode: Callable[[bytes], _Decoded], path: Path, number: int, line: bytes) -> _Decoded:
    try:
        return decode(line)
    except ValueError as error:
        raise RecordingError(path, number, str(error)) from None


def _server_frame(data: bytes) -> ServerFrame:
    try:
        return decode_server_frame(data)
    except InvalidFrame as error:
        raise ValueError(f"not a frame of a server: {error.message}") from None


def _checked(event: RecordedLine, connections: int, path: Path, number: int) -> int:
    """Checks the connection number of an event; returns the number of connections so far."""
    if isinstance(event, OpenedLine | RequestedLine):
        if event.connection != connections:
            raise RecordingError(path, number, f"connection {event.connection} where {connections} is next")
        return connections + 1
    if not isinstance(event, CutLine | EndedLine) and event.connection >= connections:
        raise RecordingError(path, number, f"no connection {event.connection}")
    return connections


def content(event: ReceivedLine | SentLine) -> bytes | str:
    """Payload of a message or of a piece of a body: text if it is text."""
    if event.text is not None:
        return event.text
    return event.binary if event.binary is not None else event.bad_text or b""


@dataclass(frozen=True, slots=True)
class Target:
    """Address and key of the server that a replay talks to."""

    host: str
    port: int
    secure: bool
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Self:
        """Parses an address with the scheme ws, wss, http or https, a host, and an optional port.

        Raises ValueError.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss", "http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as ws://127.0.0.1:8080")
        if parts.path not in ("", "/", "/v1/streaming_input") or parts.query or parts.fragment or parts.username:
            raise ValueError("the address must not have a path, query or user: paths come from the recording")
        secure = parts.scheme in ("wss", "https")
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, api_key)

    @property
    def authority(self) -> str:
        """Host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that authenticate."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context; None for a plain connection."""
        return ssl.create_default_context() if self.secure else None

    def websocket(self, target: str) -> str:
        """URL of a WebSocket at a path."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{target}"


#: ``--speed max``.
AT_ONCE: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``speed`` is a factor; ``patience`` is the time-out in seconds of each awaited event."""

    speed: float = 1.0
    patience: float = 10.0


class Timetable:
    """Clock of one session: at recorded speed, faster or without pauses, but never before the events a step depends on.

    A delay postpones everything after it.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Milliseconds since the start."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Signals that something was received, so that conditions are tested again."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool]) -> bool:
        """Waits for the recorded time ``at`` (milliseconds) and then for ``is_ready``.

        Returns False if the latter timed out.
        """
        at = at / self._pace.speed
        await asyncio.sleep(max(0.0, at + self._late - self.now()) / 1000)
        ready = await self.wait(is_ready)
        self._late = max(self._late, self.now() - at)
        return ready

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Waits for a condition; returns False if that timed out."""
        try:
            async with asyncio.timeout(self._pace.patience):
                while not is_ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
