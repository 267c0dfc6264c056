"""Turns of satellites over Wyoming: one that connects, and one that the server connects to."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from support.inline_workers import inline, loud, quiet
from support.live_server import LiveServer, live_server
from support.scripted_engines import HearingEngine, takes
from support.wyoming_peer import ON, AudioChunk, AudioStop, WyomingPeer, WyomingSatellite, peer
from wyoming.ping import Ping, Pong
from wyoming.pipeline import PipelineStage, RunPipeline
from wyoming.snd import Played

from omni_ws.config.model import StreamingInputConfig
from omni_ws.config.values import MIB
from omni_ws.core.chunks import Task
from omni_ws.engine.base import AudioOutput, Engine, TextOutput, TranscriptOutput
from omni_ws.errors import EngineFailed
from omni_ws.transport.wyoming.connection import LISTEN_MS
from omni_ws.transport.wyoming.front import RECONNECT_SEC

pytestmark = pytest.mark.virtual_clock

TIMES = StreamingInputConfig()
SECOND = AudioOutput(np.full(24_000, 0.25, np.float32), 24_000)
HEARD = (TranscriptOutput("Turn on"), TranscriptOutput(" the light."), TextOutput("Done."), SECOND)
RUN = RunPipeline(PipelineStage.ASR, PipelineStage.TTS)
ALWAYS = RunPipeline(PipelineStage.ASR, PipelineStage.TTS, restart_on_end=True)
#: Seconds of an answer: more than the buffers of sockets and of a session take.
MANY = 600
LISTENED = ["transcribe", "voice-started", "voice-stopped", "transcript"]
SPOKEN = ["audio-start", "audio-chunk", "synthesize", "audio-stop"]


def server_time() -> float:
    return asyncio.get_running_loop().time()


def engine_that_hears(*heard: Any) -> HearingEngine:
    return HearingEngine(heard=heard or HEARD)


async def command(satellite: WyomingPeer) -> None:
    """What a user says, and the silence behind it."""
    await satellite.speak(quiet(96) + loud(640) + quiet(704))


async def test_a_turn_has_the_events_of_home_assistant() -> None:
    engine = engine_that_hears()
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await command(satellite)
        await satellite.until("audio-stop")
        assert satellite.types == [*LISTENED, *SPOKEN]
        said = {event.type: event.data.get("text") for event in satellite.seen}
        assert (said["transcript"], said["synthesize"]) == ("Turn on the light.", "Done.")
        assert satellite.heard() == np.full(24_000, 8192, "<i2").tobytes()
        started, stopped = (event.data["timestamp"] for event in satellite.seen[1:3])
        assert 0 < started < 640 < stopped < 1440
        await command(satellite)  # it has not asked for another turn
        await satellite.send(Ping())
        await satellite.until("pong")
        assert len(engine.requests) == 1
        await satellite.send(RUN)
        await command(satellite)
        await satellite.until("audio-stop")
        assert [message.text.split() for message in engine.requests[1].history] == [
            ["Turn", "on", "the", "light."],
            ["Done."],
        ]


@pytest.mark.parametrize(
    ("stage", "ends"), [(PipelineStage.ASR, []), (PipelineStage.HANDLE, ["handled"]), (PipelineStage.TTS, SPOKEN)]
)
async def test_a_pipeline_ends_where_the_satellite_says(stage: PipelineStage, ends: list[str]) -> None:
    engine = engine_that_hears()
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        if stage is PipelineStage.ASR:
            engine.heard = HEARD[:2]
        await satellite.send(RunPipeline(PipelineStage.ASR, stage))
        await command(satellite)
        await satellite.until([*LISTENED, *ends][-1])
        assert satellite.types == [*LISTENED, *ends]
        assert engine.requests[0].task is (Task.TRANSCRIBE if stage is PipelineStage.ASR else Task.CHAT)
        if ends == ["handled"]:
            assert satellite.seen[-1].data == {"text": "Done."}


@pytest.mark.parametrize(
    ("sound", "words"), [(quiet(96) + loud(640), "Turn on the light."), (quiet(99), ""), (b"", "")]
)
async def test_a_satellite_ends_the_sound_itself(sound: bytes, words: str) -> None:
    async with live_server(engine_that_hears(), **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await satellite.speak(sound)
        await satellite.send(AudioStop(), AudioStop())
        assert (await satellite.until("transcript")).data["text"] == words
        if words:
            await satellite.until("audio-stop")
        assert server.engine.active_requests == 0


async def test_where_nobody_speaks_a_turn_ends_by_itself() -> None:
    async with live_server(engine_that_hears(), **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await satellite.speak(quiet(LISTEN_MS))
        await satellite.send(Ping())
        await satellite.until("pong")
        assert satellite.types == ["transcribe", "pong"]
        await satellite.speak(quiet(20))
        assert (await satellite.until("transcript")).data == {"text": ""}


@pytest.mark.parametrize("tells", [True, False])
async def test_a_satellite_that_always_listens_is_heard_again_once_the_answer_was_played(tells: bool) -> None:
    engine = engine_that_hears()
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(ALWAYS)
        await command(satellite)
        await satellite.until("audio-stop")
        began = server_time()
        await command(satellite)  # it hears the answer
        if tells:
            await satellite.send(Played())
        await satellite.until("transcribe")
        assert server_time() - began == pytest.approx(0 if tells else 2, abs=0.1)
        await command(satellite)
        await satellite.until("audio-stop")
        assert len(engine.requests) == 2


async def test_a_new_pipeline_takes_the_place_of_the_one_before() -> None:
    engine = engine_that_hears()
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await satellite.speak(quiet(96) + loud(640))
        await satellite.until("voice-started")
        await satellite.send(RUN)
        await satellite.until("transcribe")
        await command(satellite)
        await satellite.until("audio-stop")
        assert [event.type for event in satellite.seen].count("transcript") == 1
        for kind in ("transcribe", "synthesize-start"):
            await satellite.say(kind)
            assert (await satellite.until("error")).data["code"] == "invalid_value"


async def test_a_failed_turn_leaves_the_satellite_connected() -> None:
    engine = engine_that_hears(EngineFailed("the model is away"))
    async with live_server(engine, **ON, expect_errors=True) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await command(satellite)
        assert (await satellite.until("error")).data["code"] == "engine_failed"
        engine.heard = HEARD
        await satellite.send(RUN)
        await command(satellite)
        await satellite.until("audio-stop")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"start_stage": "wake", "end_stage": "tts"}, "unsupported_parameter"),
        ({"start_stage": "tts", "end_stage": "tts"}, "unsupported_parameter"),
        ({"start_stage": "asr", "end_stage": "intent"}, "unsupported_parameter"),
        ({"start_stage": "asr", "end_stage": "cook"}, "invalid_value"),
        ({"start_stage": "asr"}, "invalid_value"),
    ],
)
async def test_a_pipeline_that_cannot_run_is_refused_by_name(fields: dict[str, str], code: str) -> None:
    async with live_server(engine_that_hears(), **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await satellite.until("transcribe")
        await satellite.say("run-pipeline", fields)
        assert (await satellite.until("error")).data["code"] == code
        await satellite.send(RUN)
        await satellite.until("transcribe")
        await satellite.send(AudioChunk(16_000, 2, 1, quiet(20)), AudioChunk(8_000, 2, 1, quiet(20)))
        assert (await satellite.until("error")).data["code"] == "invalid_value"  # the rate has changed


async def test_a_wrong_event_ends_the_turn_with_its_answer() -> None:
    engine = engine_that_hears(*HEARD[:3], takes(3600), SECOND)
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(RUN)
        await command(satellite)
        await satellite.until("transcript")
        await satellite.say("synthesize-stop")
        assert (await satellite.until("error")).data["code"] == "invalid_value"
        engine.heard, began = HEARD, server_time()
        await satellite.send(RUN)
        await command(satellite)
        await satellite.until("audio-stop")
        assert server_time() - began < 3600


async def test_a_wrong_event_does_not_have_a_satellite_heard_again_twice() -> None:
    engine = engine_that_hears()
    async with live_server(engine, **ON) as server, peer(inline(server)) as satellite:
        await satellite.send(ALWAYS)
        await command(satellite)
        await satellite.until("audio-stop")
        await satellite.say("synthesize-stop")
        await satellite.until("error")
        await satellite.send(Played())
        await satellite.until("transcribe")
        await satellite.speak(quiet(96) + loud(640))
        await satellite.until("voice-started")
        await asyncio.sleep(60)  # longer than the answer before took to be played
        await satellite.speak(quiet(704))
        await satellite.until("audio-stop")
        assert satellite.types.count("transcribe") == 2


# satellites that the server connects to


def connected_to(satellite: WyomingSatellite, engine: Engine) -> AbstractAsyncContextManager[LiveServer]:
    return live_server(engine, wyoming={"satellites": [f"127.0.0.1:{satellite.port}"]})


async def talk(hub: WyomingPeer) -> None:
    await hub.send(RUN)
    await command(hub)
    await hub.until("audio-stop")


async def test_the_server_connects_to_satellites_and_stays_there() -> None:
    satellite, engine = WyomingSatellite(), engine_that_hears()
    async with satellite.listening(), connected_to(satellite, engine) as server:
        hub = await satellite.visited()
        assert inline(server).sessions == 0
        await talk(hub)
        assert server.sessions == 1
        while server.sessions:  # until the session has been silent for too long
            await hub.until("ping")
            await hub.send(Pong())
        await talk(hub)
        assert engine.requests[1].history == ()
        await hub.until("ping")  # which nobody answers
        began = server_time()
        hub = await satellite.visited()
        assert server_time() - began == pytest.approx(TIMES.ping_timeout_sec + RECONNECT_SEC, abs=1)
        await talk(hub)
        hub.writer.close()
        hub = await satellite.visited()
        await talk(hub)
        hub.writer.close()


@pytest.mark.parametrize("pause_sec", [TIMES.write_timeout_sec - 1, TIMES.write_timeout_sec + 1])
async def test_a_satellite_whose_reading_pauses_is_waited_for(pause_sec: float) -> None:
    """An answer that fills all buffers, and then waits in its maker: up to ``write_timeout_sec``."""
    satellite, engine = WyomingSatellite(), engine_that_hears(*HEARD[:3], *[SECOND] * MANY)
    async with satellite.listening(), connected_to(satellite, engine) as server:
        hub = await satellite.visited()
        inline(server)
        await hub.send(RUN)
        await command(hub)
        await hub.until("audio-start")
        await asyncio.sleep(pause_sec)
        assert server.held_bytes < TIMES.max_output_bytes + MIB
        if pause_sec < TIMES.write_timeout_sec:
            await hub.until("audio-stop")
            assert len(hub.heard()) == MANY * 48_000
        else:
            hub = await satellite.visited()
        engine.heard = HEARD
        await talk(hub)
        hub.writer.close()


async def test_a_satellite_that_is_away_is_sought_again() -> None:
    satellite = WyomingSatellite()
    async with satellite.listening():
        pass  # now its port is known, and closed
    async with connected_to(satellite, engine_that_hears()), satellite.listening():
        await satellite.visited()


async def test_an_address_that_cannot_be_one_hinders_nothing(caplog: pytest.LogCaptureFixture) -> None:
    addresses = ["kitchen..local:10700"]
    async with live_server(engine_that_hears(), wyoming={"satellites": addresses}) as server:
        await server.until(lambda: "the satellite kitchen..local:10700 cannot be reached" in caplog.text)
