"""A client of the native WebSocket in a room without a headset: its microphone hears what its loudspeaker plays."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.native_client import NativeClient
from support.speech_clips import SAMPLE_RATE, as_pcm16

from omni_ws.audio.pcm import Samples, resampled

FRAME_MS = 20
FRAME = SAMPLE_RATE * FRAME_MS // 1000


@dataclass(frozen=True, slots=True)
class Room:
    """The echo comes ``delay_ms`` after the sound was received, ``gain_db`` louder than it is."""

    delay_ms: int
    gain_db: float

    @property
    def response(self) -> Samples:
        """The direct sound and reflections that die away over 80 ms, together of the gain's energy."""
        generator = np.random.default_rng(5)
        time = np.arange(80 * SAMPLE_RATE // 1000) / SAMPLE_RATE
        taps = generator.normal(0, 1, len(time)) * 10 ** (-3 * time / 0.12)
        taps[: 2 * SAMPLE_RATE // 1000] = 0
        taps *= np.sqrt(0.4 / np.sum(taps**2))
        taps[0] = 1
        return np.asarray(taps * (10 ** (self.gain_db / 20) / np.sqrt(np.sum(taps**2))), np.float32)


class EchoingClient:
    """Plays what it is sent, and streams what its microphone hears, until the ``with`` block is left.

    ``rate`` is that of the output audio. ``reports``: it reports its playback ten times a second. ``hiccups``: its
    frames come unevenly, up to 100 ms late.
    """

    def __init__(
        self, client: NativeClient, room: Room, *, rate: int, reports: bool = True, hiccups: bool = False
    ) -> None:
        self.client = client
        self._room = room
        self._rate = rate
        self._reports = reports
        self._hiccups = hiccups
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        #: What the loudspeaker plays, from the beginning on, as long as it is known.
        self._played = np.zeros(0, np.float32)
        #: What a person says, in the same time.
        self._said = np.zeros(0, np.float32)
        self.heard = np.zeros(0, np.float32)
        self.interruptions: list[float] = []
        self._answer: tuple[str, int, int] | None = None
        self.finals: list[dict[str, Any]] = []

    @property
    def now(self) -> int:
        """The time, in samples since it began."""
        return round((self._loop.time() - self._began) * SAMPLE_RATE)

    def say(self, samples: Samples) -> None:
        """Have a person speak from now on."""
        self._said = np.concatenate((np.pad(self._said, (0, max(0, self.now - len(self._said)))), samples))

    async def listen(self) -> None:
        while True:
            frame = await self.client.receive()
            if frame["type"] == "speech_started":
                self.interruptions.append((self._loop.time() - self._began) * 1000)
                self._played = self._played[: self.now]
                self._answer = None
            elif "audio" in frame:
                self._play(frame)
            elif frame.get("final"):
                self.finals.append(frame)

    def _play(self, frame: dict[str, Any]) -> None:
        received = np.frombuffer(frame["audio"], "<i2").astype(np.float32) / np.float32(32768)
        samples = resampled(received, self._rate, SAMPLE_RATE)
        begin = max(len(self._played), self.now)
        if self._answer is None or self._answer[0] != frame["request_id"]:
            self._answer = (frame["request_id"], begin, frame["sequence_id"])
        self._answer = (*self._answer[:2], frame["sequence_id"])
        self._played = np.concatenate((np.pad(self._played, (0, begin - len(self._played))), samples))

    async def record(self) -> None:
        response, number, late = self._room.response, 0, 0.0
        generator = np.random.default_rng(9)
        while True:
            number += 1
            await asyncio.sleep(max(0.0, self._began + number * FRAME_MS / 1000 + late - self._loop.time()))
            late = max(0.0, generator.normal(-0.03, 0.05)) if self._hiccups else 0.0
            end = number * FRAME
            heard = self._microphone(response, end - FRAME, end)
            self.heard = np.concatenate((self.heard, heard))
            await self.client.binary(as_pcm16(heard))
            if self._reports and number % 5 == 0 and self._answer is not None:
                request_id, begin, last = self._answer
                played = (min(len(self._played), end) - begin) * 1000 / SAMPLE_RATE - self._room.delay_ms / 2
                if played > 0:
                    await self.client.send("output_ack", sequence_id=last, played_ms=played, request_id=request_id)

    def _microphone(self, response: Samples, begin: int, end: int) -> Samples:
        delay = self._room.delay_ms * SAMPLE_RATE // 1000
        source = _between(self._played, begin - delay - len(response) + 1, end - delay)
        noise = np.random.default_rng(end).normal(0, 3e-4, end - begin)
        heard = np.convolve(source, response, "valid") + _between(self._said, begin, end) + noise
        return np.asarray(heard, np.float32)

    @contextlib.asynccontextmanager
    async def in_the_room(self) -> Any:
        tasks = [asyncio.create_task(self.listen()), asyncio.create_task(self.record())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _between(samples: Samples, begin: int, end: int) -> Samples:
    """The samples from ``begin`` to ``end``, and silence where there are none."""
    found = np.zeros(end - begin, np.float32)
    part = samples[max(0, begin) : max(0, end)]
    found[max(0, -begin) : max(0, -begin) + len(part)] = part
    return found
