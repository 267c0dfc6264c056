"""The parts of real spoken turns, with the real detector, rules and voice, against what the client that spoke knows.

Each is told by its own reading of one clock. They differ by how late a frame of sound, or a report of what was played,
got to the server; the client asks after each when that was (a ping behind it, whose pong cannot come sooner).
"""

from __future__ import annotations

import asyncio
from itertools import count
from math import ceil
from typing import Any

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.patience import PATIENCE_SEC
from support.speech_clips import clip_bytes, silence

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import PARTS

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

FRAME_BYTES, FRAME_MS = 640, 20
TURNS = 2
#: How long the loudspeaker of the client takes, and when it reports.
PLAYS_SEC, REPORTS_SEC = 0.04, 0.1
#: The server tells its moments in whole milliseconds, and the time of the audio that was played, too.
ROUNDED_SEC = 0.002


class Person:
    """Speaks and listens in real time."""

    def __init__(self, client: NativeClient) -> None:
        self.client = client
        self.said = b""
        #: When the loudspeaker began with each answer, and when that was reported.
        self.began: dict[str, float] = {}
        self.reported: dict[str, float] = {}
        #: When the server had each frame and each report, at the latest.
        self.had: dict[str, asyncio.Future[float]] = {}
        #: The end of the speech, and of the answer, of each turn.
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._begun = 0.0
        self._playing: set[asyncio.Task[None]] = set()

    async def speak(self) -> None:
        """Send what there is to say, and silence, until cancelled: each frame when its last sound was spoken."""
        self._begun = self._loop.time()
        for number in count(1):
            await asyncio.sleep(self.spoken_at(number * FRAME_MS) - self._loop.time())
            frame, self.said = self.said[:FRAME_BYTES], self.said[FRAME_BYTES:]
            await self.client.binary(frame.ljust(FRAME_BYTES, b"\0"))
            await self._ask_for(f"frame {number}")

    async def _ask_for(self, name: str) -> None:
        self.had[name] = self._loop.create_future()
        await self.client.send("ping", t=name)

    def spoken_at(self, audio_ms: float) -> float:
        return self._begun + audio_ms / 1000

    async def listen(self) -> None:
        while True:
            frame = await self.client.receive()
            if frame["type"] == "pong":
                self.had[frame["t"]].set_result(self._loop.time())
            elif "audio" in frame and frame["request_id"] not in self.began:
                self.began[frame["request_id"]] = 0.0
                self._playing.add(asyncio.create_task(self._play(frame["request_id"])))
            elif frame["type"] == "speech_stopped" or frame.get("final"):
                self.told.put_nowait(frame)

    async def _play(self, request_id: str) -> None:
        await asyncio.sleep(PLAYS_SEC)
        self.began[request_id] = began = self._loop.time()
        await asyncio.sleep(REPORTS_SEC)
        self.reported[request_id] = now = self._loop.time()
        await self.client.send("output_ack", request_id=request_id, played_ms=(now - began) * 1000)
        await self._ask_for(request_id)

    async def late_sec(self, from_ms: float, to_ms: float) -> float:
        """How late the sound between two places was at the server, at the most."""
        numbers = range(int(from_ms / FRAME_MS), ceil(to_ms / FRAME_MS) + 1)
        return max([await self.had[f"frame {number}"] - self.spoken_at(number * FRAME_MS) for number in numbers])

    async def report_took(self, request_id: str) -> float:
        """How long what was reported was under way, at the most."""
        return await self.had[request_id] - self.reported[request_id]


async def test_the_parts_of_real_turns_are_what_the_client_measures(voice_choice: VoiceChoice) -> None:
    async with live_server(EmbeddedEngine(voice=voice_choice)) as server, native_client(server) as client:
        await client.configure(turn_detection={"type": "server_vad"})
        person = Person(client)
        async with asyncio.timeout(PATIENCE_SEC), asyncio.TaskGroup() as tasks:
            going_on = [tasks.create_task(work) for work in (person.speak(), person.listen())]
            for turn in range(1, TURNS + 1):
                await _one_turn(server, person, turn)
            for task in going_on:
                task.cancel()


async def _one_turn(server: LiveServer, person: Person, turn: int) -> None:
    person.said = silence(0.4) + clip_bytes("goforward")
    before = _parts(server)
    stopped, final = await person.told.get(), await person.told.get()
    times = final["times"]
    await server.until(lambda: _count(server) == turn, "the report")
    parts = {name: total - before[name] for name, total in _parts(server).items()}
    silent_ms, heard_ms = stopped["audio_ms"], times["turn_decided_audio_ms"]
    own = person.began[final["request_id"]] - person.spoken_at(silent_ms)
    late = await person.late_sec(silent_ms, silent_ms + heard_ms)
    took = await person.report_took(final["request_id"])
    assert own - late - ROUNDED_SEC <= sum(parts.values()) <= own + took + ROUNDED_SEC, (own, parts)
    assert times["first_audio_sent"] / 1000 == pytest.approx(sum(parts.values()) - parts["playing"], abs=ROUNDED_SEC)
    assert {"turn_decision", "recognition", "llm_first_token", "voice", "playing"} <= {
        name for name, _ in PARTS if _count_of(server, name) == turn
    }
    assert heard_ms % 32 == 0


def _value(server: LiveServer, name: str, **labels: str) -> float:
    return server.app.sessions.metrics.registry.get_sample_value(f"omni_ws_{name}", labels) or 0.0


def _parts(server: LiveServer) -> dict[str, float]:
    return {name: _value(server, "turn_part_seconds_sum", part=name) for name, _ in PARTS}


def _count_of(server: LiveServer, part: str) -> float:
    return _value(server, "turn_part_seconds_count", part=part)


def _count(server: LiveServer) -> float:
    return _value(server, "mouth_to_ear_seconds_count", origin="websocket")
