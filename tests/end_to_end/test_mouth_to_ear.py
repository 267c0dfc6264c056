"""The parts of real spoken turns, with the real detector, rules and voice, by the clock of the client that spoke."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.speech_clips import clip_bytes, silence

from omni_ws.config.model import VoiceChoice
from omni_ws.core.answer_times import PARTS

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

FRAME_BYTES, FRAME_SEC = 640, 0.02
TURNS = 3
#: How long the loudspeaker of the client takes, and how often it reports.
PLAYS_SEC, REPORTS_SEC = 0.04, 0.1
#: What the parts may differ from what the client measures.
LEAST_SEC, SHARE = 0.025, 0.05


class Person:
    """Speaks and listens in real time. ``sent`` has when each frame of the microphone was sent."""

    def __init__(self, client: NativeClient) -> None:
        self.client = client
        self.sent: list[float] = []
        self.said = b""
        self.began: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()

    async def speak(self) -> None:
        """Send what there is to say, and silence, until cancelled."""
        begin = self._loop.time()
        while True:
            await asyncio.sleep(begin + len(self.sent) * FRAME_SEC - self._loop.time())
            frame, self.said = self.said[:FRAME_BYTES], self.said[FRAME_BYTES:]
            await self.client.binary(frame.ljust(FRAME_BYTES, b"\0"))
            self.sent.append(self._loop.time())

    def spoken_at(self, audio_ms: int) -> float:
        """When the sound at this place was sent."""
        return self.sent[min(len(self.sent) - 1, round(audio_ms / 1000 / FRAME_SEC) - 1)]

    async def answer(self) -> tuple[dict[str, Any], int]:
        """The final of the next answer, and where the speech ended."""
        stopped = await self.client.until("speech_stopped")
        playing: asyncio.Task[None] | None = None
        while not (frame := await self.client.receive()).get("final"):
            if "audio" in frame and playing is None:
                playing = asyncio.create_task(self._play(frame["request_id"]))
        if playing is not None:
            await playing
        return frame, stopped["audio_ms"]

    async def _play(self, request_id: str) -> None:
        await asyncio.sleep(PLAYS_SEC)
        self.began[request_id] = began = self._loop.time()
        await asyncio.sleep(REPORTS_SEC)
        played_ms = (self._loop.time() - began) * 1000
        await self.client.send("output_ack", request_id=request_id, played_ms=played_ms)


async def test_the_parts_of_real_turns_are_what_the_client_measures(voice_choice: VoiceChoice) -> None:
    async with live_server(EmbeddedEngine(voice=voice_choice)) as server, native_client(server) as client:
        await client.configure(turn_detection={"type": "server_vad"})
        person = Person(client)
        speaking = asyncio.create_task(person.speak())
        for turn in range(TURNS):
            person.said = silence(0.4) + clip_bytes("goforward")
            before = _parts(server)
            final, stopped_ms = await person.answer()
            request_id = final["request_id"]
            await server.until(lambda turn=turn: _count(server) == turn + 1, "the report")  # type: ignore[misc]
            parts = {name: total - before[name] for name, total in _parts(server).items()}
            own = person.began[request_id] - person.spoken_at(stopped_ms)
            assert sum(parts.values()) == pytest.approx(own, abs=max(LEAST_SEC, SHARE * own)), parts
            assert final["times"]["first_audio_sent"] / 1000 == pytest.approx(
                sum(parts.values()) - parts["playing"], abs=0.002
            )
            assert {"turn_decision", "recognition", "llm_first_token", "voice", "playing"} <= {
                name for name, _ in PARTS if _count_of(server, name) == turn + 1
            }
            assert final["times"]["turn_decided_audio_ms"] % 32 == 0
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


def _value(server: LiveServer, name: str, **labels: str) -> float:
    return server.app.sessions.metrics.registry.get_sample_value(f"omni_ws_{name}", labels) or 0.0


def _parts(server: LiveServer) -> dict[str, float]:
    return {name: _value(server, "turn_part_seconds_sum", part=name) for name, _ in PARTS}


def _count_of(server: LiveServer, part: str) -> float:
    return _value(server, "turn_part_seconds_count", part=part)


def _count(server: LiveServer) -> float:
    return _value(server, "mouth_to_ear_seconds_count", origin="websocket")
