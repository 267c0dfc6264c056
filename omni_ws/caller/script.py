"""Scripts: timed lines to play to a server, the pace of playing, and the target server.

A script has the lines of a recording (docs/recording.md), so each recording is a script.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
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


def count(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return number


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


def certificates(path: str) -> ssl.SSLContext:
    """Read the certificates to trust for wss."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # includes SSLError, for a file without certificates
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror or error}") from None


#: The duration of a piece of speech.
PIECE_MS: Final = 20
PIECE_SEC: Final = PIECE_MS / 1000
#: The time-out of the closing handshake.
_CLOSE_SEC: Final = 5.0


def content(event: ReceivedLine | SentLine) -> bytes | str:
    """Return the payload of a message or of a piece of a body: text if it is text."""
    if event.text is not None:
        return event.text
    return event.binary if event.binary is not None else event.bad_text or b""


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the API key of the server to which a script is played."""

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
        """The host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authenticate the client."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None for a plain connection."""
        return ssl.create_default_context() if self.secure else None

    def websocket(self, target: str, subprotocol: str | None = None) -> connect:
        """Return a connection to the WebSocket at the path ``target``, to be awaited or entered."""
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
    """Return the script of a call with an open microphone, which hangs up ``after_ms`` after the end of the audio.

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


#: The speed of playing without pauses.
AT_ONCE: Final = float("inf")
#: The default time-out of an awaited event, in seconds.
PATIENCE_SEC: Final = 10.0


class Timetable:
    """The clock of one session that is played: it waits for recorded times, and for the events that a step depends on.

    A delay postpones everything after it. ``speed`` is a factor, up to AT_ONCE; ``patience`` is the time-out in seconds
    of each awaited event.
    """

    def __init__(self, *, speed: float, patience: float) -> None:
        self._speed = speed
        self._patience = patience
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Return the milliseconds since the start."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Signal that something was received, so that conditions are tested again."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the recorded time ``at`` (milliseconds) and then for ``is_ready``.

        Returns False if ``is_ready`` timed out.
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


# Speaking into a session of the client library, while another task listens to it

#: The level of speech relative to the loudest frame; anything below counts as noise of the recording.
SPEECH_LEVEL: Final = 10 ** (-26 / 20)


def frame_levels(samples: Samples, frame: int) -> NDArray[np.float64]:
    """Return the RMS level of each ``frame`` samples; the last frame may have fewer."""
    starts = np.arange(0, len(samples), frame)
    sums = np.add.reduceat(np.square(samples, dtype=np.float64), starts)
    levels: NDArray[np.float64] = np.sqrt(sums / np.diff(starts, append=len(samples)))
    return levels


def loud_part(levels: NDArray[np.float64]) -> tuple[int, int]:
    """Return the index of the first loud frame, and the index after the last: frames within 26 dB of the loudest.

    Raises ValueError if there is no sound.
    """
    if not levels.any():
        raise ValueError("the recording has no sound")
    loud = np.flatnonzero(levels > SPEECH_LEVEL * levels.max())
    return int(loud[0]), int(loud[-1]) + 1


def speech_of(audio: Pcm16) -> tuple[int, int]:
    """Return the range [first, end) of the 20 ms pieces with speech; see ``loud_part``."""
    samples = samples_from_bytes(audio.samples, SampleLayout.S16)
    return loud_part(frame_levels(samples, max(1, audio.sample_rate * PIECE_MS // 1000) * audio.channels))


async def say(session: ClientSession, audio: Pcm16) -> None:
    """Send audio to the session in real time."""
    async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_SEC):
        await session.send_audio(piece)


@asynccontextmanager
async def beside(*activities: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the activities during the block and cancel them at its end; raise the exception of one that failed."""
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
