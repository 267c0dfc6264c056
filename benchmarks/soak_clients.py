"""The clients of a soak: those that talk and check each word, and those that attack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from benchmarks.soak_server import KEY
from omni_ws.caller.answers import NativeReader, TimedAnswer
from omni_ws.client.audio import read_wav

RECORDING: Final = Path(__file__).parents[1] / "tests" / "data" / "goforward.wav"
HEARD: Final = "Go forward 10 meters."
FRAME_BYTES: Final = 640
#: A talker that waits longer for an answer has found a defect, whatever else happens.
PATIENCE_SEC: Final = 90.0
#: In which a server that had no descriptors, or whose voice was killed, still feels it.
AFTERMATH_SEC: Final = 10.0


@dataclass
class Tally:
    """What clients did and found. ``wrong`` are defects; ``excused`` is what a fault of its own time explains."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    #: When the last fault of each kind ended, by the monotonic clock; infinite while it lasts.
    faults: dict[str, float] = field(default_factory=dict)

    def fault(self, *kinds: str, since: float) -> bool:
        """Whether a fault of one of these kinds has been since then."""
        return any(self.faults.get(kind, -1.0) >= since for kind in kinds)


class Overloaded(Exception):
    """The server has no recogniser left, said so, and closes the session."""


class Talker:
    """A session of one conversation: sums by text, and a recording by audio."""

    def __init__(
        self,
        url: str,
        tally: Tally,
        generator: random.Random,
        microphone: asyncio.Lock,
        *,
        reach: Callable[[], Awaitable[socket.socket]] | None = None,
    ) -> None:
        """``microphone`` lets one talker speak at a time: recognition takes much of a small machine.

        ``reach`` makes the connection, for talkers that are elsewhere.
        """
        self._reach = reach
        self._microphone = microphone
        self._url = url
        self._tally = tally
        self._random = generator
        self._socket: ClientConnection | None = None
        self._reader = NativeReader()
        self._sent = 0
        self._turn_began = 0.0
        self.vanished = False

    def vanish(self) -> None:
        """End without a word, as a phone that loses its network or a process that is killed."""
        if self._socket is not None:
            self.vanished = True
            self._socket.transport.abort()

    async def talk(self) -> None:
        """Some turns, and the end. Counts what became of them."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_SEC):
                headers = {"Authorization": f"Bearer {KEY}"}
                options: dict[str, Any] = {"additional_headers": headers, "compression": None, "proxy": None}
                if self._reach is not None:
                    options["sock"] = await self._reach()
                    self._tally.counts["sessions over the link"] += 1
                async with connect(self._url, open_timeout=PATIENCE_SEC, ping_interval=None, **options) as socket:
                    self._socket = socket
                    self._tally.counts["sessions"] += 1
                    for _ in range(self._random.randint(1, 4)):
                        self._turn_began = time.monotonic()
                        await (self._sum() if self._random.random() < 0.8 else self._speak())
        except Overloaded:
            pass
        except (OSError, WebSocketException, TimeoutError) as error:
            self._tally.counts["vanished" if self.vanished else "cut"] += 1
            # A server without free descriptors accepts no connection, and a dead one breaks all.
            excused = self._tally.fault("server", since=began) or (
                not self._sent and self._tally.fault("descriptors", since=began - AFTERMATH_SEC)
            )
            if not self.vanished and not excused:
                self._tally.wrong.append(f"a session ended by {error!r} after {time.monotonic() - began:.1f} s")

    async def _sum(self) -> None:
        one, two = self._random.randint(1, 99), self._random.randint(1, 99)
        chunk = {"text": f"what is {one} plus {two}", "end_of_input": True}
        await self._send(chunk)
        await self._check(str(one + two), "")

    async def _speak(self) -> None:
        async with self._microphone:
            await self._say_recording()

    async def _say_recording(self) -> None:
        audio = read_wav(RECORDING).samples
        for start in range(0, len(audio), FRAME_BYTES):
            await self._send({"payload": b64encode(audio[start : start + FRAME_BYTES]).decode(), "modality": "audio"})
        await self._send({"payload": "", "modality": "audio", "end_of_input": True})
        await self._check("", HEARD)

    async def _send(self, fields: dict[str, Any]) -> None:
        assert self._socket is not None
        await self._socket.send(json.dumps({"type": "input_chunk", "sequence_id": self._sent, **fields}))
        self._sent += 1

    async def _check(self, words: str, heard: str) -> None:
        """Take an answer, and compare it with what has to be in it."""
        got = await self._answer()
        problems = [f"{error.code} {error.param}" for error in got.errors]
        problems += [f"{code} None" for code in self._reader.found.errors]
        self._reader.found.errors.clear()
        if heard and problems == ["engine_overloaded None"]:  # recognisers of clients who vanished are still at work
            self._tally.counts["turns refused for lack of a recogniser"] += 1
            raise Overloaded
        since = self._turn_began - AFTERMATH_SEC
        # A recogniser is loaded from files.
        if heard and problems == ["engine_failed asr"] and self._tally.fault("descriptors", since=since):
            self._tally.counts["turns without a recogniser for lack of descriptors"] += 1
            return
        self._tally.counts["answers"] += 1
        # A voice that was killed, or that could not be started, is an error that names it; the words are right.
        voiceless = self._tally.fault("voice", "descriptors", since=since)
        problems = [error for error in problems if not (voiceless and error == "engine_failed tts")]
        if not got.text or words not in got.text:
            problems.append(f"said {got.text!r}, not {words!r}")
        if heard and got.heard.strip() != heard:
            problems.append(f"heard {got.heard!r}, not {heard!r}")
        if not got.audio and not voiceless:
            problems.append("no audio")
        if not got.audio and not problems:
            self._tally.counts["answers whose voice was killed"] += 1
        self._tally.wrong += problems

    async def _answer(self) -> TimedAnswer:
        """An answer up to its final."""
        assert self._socket is not None
        reader, answers = self._reader, self._reader.finals
        async for message in self._socket:
            reader.heard(time.monotonic(), message)
            if reader.finals > answers:
                return reader.found.answers[answers]
        raise ConnectionResetError("closed before the final")


# attacks


def _garbage(generator: random.Random) -> bytes:
    heads = (
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /v1/streaming_input HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n{",
        b"\x16\x03\x01\x02\x00",
        b"X" * 70_000,
    )
    return generator.choice(heads) + generator.randbytes(generator.randrange(2000))


async def attack(address: tuple[str, int], count: int, seconds: float, content: Callable[[], bytes]) -> int:
    """So many connections with these bytes, kept for some seconds and then reset. Returns how many were taken."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(*address)
                writers.append(writer)
                writer.write(content())
        await asyncio.sleep(seconds)
    finally:
        for writer in writers:
            writer.transport.abort()
    return len(writers)


async def send_garbage(address: tuple[str, int], generator: random.Random) -> None:
    await attack(address, 50, 1.0, lambda: _garbage(generator))


async def keep_heads_open(address: tuple[str, int]) -> None:
    await attack(address, 50, 5.0, lambda: b"GET / HTTP/1.1\r\nHost: a\r\nX: ")


async def take_descriptors(address: tuple[str, int], limit: int) -> None:
    """More connections than the server has descriptors, half of which say nothing."""
    await attack(address, limit + 100, 2.0, lambda: b"")
