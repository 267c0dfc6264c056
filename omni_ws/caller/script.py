"""What is played and where: the lines of a script with their times, their pace, and the server that they go to.

A script has the lines of a recording (docs/recording.md): each recording is one.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np
import orjson
from numpy.typing import NDArray
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from omni_ws.audio.pcm import SampleLayout, Samples, samples_from_bytes
from omni_ws.client import ClientSession
from omni_ws.client.audio import Pcm16, paced, pieces
from omni_ws.wire.recording import ClosedLine, OpenedLine, ReceivedLine, RecordedLine, SentLine

#: Of spoken audio.
PIECE_MS: Final = 20
PIECE_SEC: Final = PIECE_MS / 1000
#: Time-out of the closing handshake.
_CLOSE_SEC: Final = 5.0


def content(event: ReceivedLine | SentLine) -> bytes | str:
    """Payload of a message or of a piece of a body: text if it is text."""
    if event.text is not None:
        return event.text
    return event.binary if event.binary is not None else event.bad_text or b""


@dataclass(frozen=True, slots=True)
class Target:
    """Address and key of the server that a script is played to."""

    host: str
    port: int
    secure: bool
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None) -> Self:
        """Parse an address with the scheme ws, wss, http or https, a host, and an optional port.

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

    def websocket(self, target: str, subprotocol: str | None = None) -> connect:
        """A connection to the WebSocket at a path, to be awaited or entered."""
        return connect(
            f"{'wss' if self.secure else 'ws'}://{self.authority}{target}",
            subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
            additional_headers=self.headers,
            compression=None,
            max_size=None,
            proxy=None,
            close_timeout=_CLOSE_SEC,
        )


def spoken(audio: Pcm16, opening: str, *, target: str, after_ms: float = 0.0) -> list[RecordedLine]:
    """Return the script of a call with an open microphone, which hangs up ``after_ms`` behind the end of the audio.

    ``opening`` is the message that configures the session. ``target`` is the path of the native WebSocket, or of the
    Realtime API.
    """
    script: list[RecordedLine] = [
        OpenedLine(at=0, connection=0, target=target),
        ReceivedLine(at=0, connection=0, text=opening),
    ]
    at = 0.0
    for number, piece in enumerate(pieces(audio, piece_ms=PIECE_MS)):
        payload, at = base64.b64encode(piece).decode(), (number + 1) * PIECE_MS
        if target.startswith("/v1/realtime"):
            frame: dict[str, Any] = {"type": "input_audio_buffer.append", "audio": payload}
        else:
            frame = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
        script.append(ReceivedLine(at=at, connection=0, text=orjson.dumps(frame).decode()))
    return [*script, ClosedLine(at=at + after_ms, connection=0, by="client", code=1000)]


#: A speed: without pauses.
AT_ONCE: Final = float("inf")
#: Seconds that an awaited event may take, where nothing else is said.
PATIENCE_SEC: Final = 10.0


class Timetable:
    """Clock of one session: at recorded speed, faster or without pauses, but never before the events a step depends on.

    A delay postpones everything after it. ``speed`` is a factor; ``patience`` is the time-out in seconds of each event
    that is awaited.
    """

    def __init__(self, *, speed: float, patience: float) -> None:
        self._speed = speed
        self._patience = patience
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Milliseconds since the start."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Signal that something was received, so that conditions are tested again."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the recorded time ``at`` (milliseconds) and then for ``is_ready``.

        Returns False if the latter timed out.
        """
        at = at / self._speed
        await asyncio.sleep(max(0.0, at + self._late - self.now()) / 1000)
        ready = await self.wait(is_ready)
        self._late = max(self._late, self.now() - at)
        return ready

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if that timed out."""
        try:
            async with asyncio.timeout(self._patience):
                while not is_ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


# Speaking into a session of the client library, while something else listens to it

#: The level of speech, relative to the loudest frame; what is softer counts as the noise of a recording.
SPEECH_LEVEL: Final = 10 ** (-26 / 20)


def frame_levels(samples: Samples, frame: int) -> NDArray[np.float64]:
    """The RMS level of each ``frame`` samples, of which the last may be fewer."""
    starts = np.arange(0, len(samples), frame)
    sums = np.add.reduceat(np.square(samples, dtype=np.float64), starts)
    levels: NDArray[np.float64] = np.sqrt(sums / np.diff(starts, append=len(samples)))
    return levels


def loud_part(levels: NDArray[np.float64]) -> tuple[int, int]:
    """The frames in which speech begins, and behind which it has ended: those within 26 dB of the loudest.

    Raises ValueError where there is no sound.
    """
    if not levels.any():
        raise ValueError("the recording has no sound")
    loud = np.flatnonzero(levels > SPEECH_LEVEL * levels.max())
    return int(loud[0]), int(loud[-1]) + 1


def speech_of(audio: Pcm16) -> tuple[int, int]:
    """The pieces in which speech begins, and behind which it has ended; see ``loud_part``."""
    samples = samples_from_bytes(audio.samples, SampleLayout.S16)
    return loud_part(frame_levels(samples, max(1, audio.sample_rate * PIECE_MS // 1000) * audio.channels))


async def say(session: ClientSession, audio: Pcm16) -> None:
    """Send audio in real time."""
    async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_SEC):
        await session.send_audio(piece)


@asynccontextmanager
async def beside(*activities: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run something beside the block, and no longer than that; raise what went wrong in it."""
    tasks = [asyncio.create_task(activity) for activity in activities]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
