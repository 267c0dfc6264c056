"""What Wyoming refuses, its limits, and its ends, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.inline_workers import inline, loud, quiet
from support.live_server import live_server
from support.raw_http import call
from support.recordings import events, lines, recordings
from support.scripted_engines import HearingEngine, takes
from support.wyoming_peer import ON, AudioChunk, AudioStart, peer
from wyoming.asr import Transcript
from wyoming.info import Describe
from wyoming.ping import Ping
from wyoming.pipeline import PipelineStage, RunPipeline
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.values import ConfigurationError
from omni_ws.core.history import Message
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.transport.wyoming.connection import (
    KEPT_SEC,
    MAX_TALKS,
    Talks,
)
from omni_ws.transport.wyoming.front import WyomingServices
from omni_ws.wire.wyoming import MAX_DATA_BYTES, MAX_PAYLOAD_BYTES

pytestmark = pytest.mark.virtual_clock

KEYS = (ApiKey(name="home", key_sha256=digest("sesame"), max_sessions=1),)
SECOND = AudioOutput(np.full(24_000, 0.25, np.float32), 24_000)
PCM = {"rate": 16_000, "width": 2, "channels": 1}


def talker() -> HearingEngine:
    return HearingEngine((TextOutput("Yes."), SECOND), heard=(TranscriptOutput("Hello."), TextOutput("Yes."), SECOND))


# what is refused

REFUSED: dict[str, tuple[str, dict[str, Any], bytes, str]] = {
    "no text": ("synthesize", {}, b"", "invalid_value"),
    "no such voice": ("synthesize", {"text": "Hello.", "voice": {"name": "nobody"}}, b"", "invalid_value"),
    "a speaker": ("synthesize", {"text": "Hello.", "voice": {"speaker": "1"}}, b"", "unsupported_parameter"),
    "SSML": ("synthesize", {"text": "<speak/>", "text_format": "ssml"}, b"", "unsupported_parameter"),
    "a piece of no text": ("synthesize-chunk", {"text": "Hello."}, b"", "invalid_value"),
    "the end of no text": ("synthesize-stop", {}, b"", "invalid_value"),
    "a text that is a number": ("transcript", {"text": 7}, b"", "invalid_value"),
    "another language": ("transcribe", {"language": "xx"}, b"", "unsupported_parameter"),
    "no language": ("transcribe", {"language": "e n"}, b"", "invalid_value"),
    "another model": ("transcribe", {"name": "large"}, b"", "model_not_found"),
    "another program": ("select-program", {"name": "piper"}, b"", "invalid_value"),
    "wake words": ("detect", {}, b"", "unknown_type"),
    "intents": ("recognize", {"text": "x"}, b"", "unknown_type"),
    "a rate that is too low": ("audio-chunk", {**PCM, "rate": 7999}, bytes(2), "invalid_value"),
    "a rate that is too high": ("audio-chunk", {**PCM, "rate": 192_001}, bytes(2), "invalid_value"),
    "no width": ("audio-chunk", {**PCM, "width": 0}, bytes(2), "invalid_value"),
    "too wide": ("audio-chunk", {**PCM, "width": 5}, bytes(10), "invalid_value"),
    "no channels": ("audio-chunk", {**PCM, "channels": 0}, bytes(2), "invalid_value"),
    "too many channels": ("audio-chunk", {**PCM, "channels": 33}, bytes(66), "invalid_value"),
    "half a sample": ("audio-chunk", PCM, bytes(3), "invalid_value"),
    "text for a number": ("audio-start", {**PCM, "rate": "16000"}, b"", "invalid_value"),
    "a longer payload": ("audio-chunk", PCM, bytes(MAX_PAYLOAD_BYTES + 2), "payload_too_large"),
    "longer data": ("transcript", {"text": "a" * MAX_DATA_BYTES}, b"", "payload_too_large"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_wrong_has_an_error_and_ends_the_connection(name: str) -> None:
    kind, data, payload, code = REFUSED[name]
    async with live_server(talker(), **ON) as server, peer(server) as client, peer(server) as other:
        if kind == "audio-chunk":
            await client.send(AudioStart(16_000, 2, 1))
        await client.say(kind, data, payload)
        if kind == "transcribe":
            await client.send(AudioChunk(16_000, 2, 1, bytes(640)))
        assert await client.refused() == code
        await other.send(Synthesize("Hello."))
        await other.until("audio-stop")


@pytest.mark.parametrize("line", [b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\n", b'{"type":"ping"}x\n'])
async def test_a_page_that_sends_http_gets_nothing_done(line: bytes) -> None:
    engine = talker()
    async with live_server(engine, **ON) as server, peer(server) as client:
        await client.write(line + b'{"type":"transcript","data":{"text":"Open the door."}}\n')
        assert await client.refused() == "invalid_frame"
        assert engine.requests == []


async def test_events_that_are_not_known_are_passed_over() -> None:
    async with live_server(talker(), **ON) as server, peer(server) as client:
        for _ in range(2):  # before there is a session, and in one
            await client.say("timer-started", {"id": "x", "total_seconds": 1}, bytes(100_000))
            await client.say("audio-chunk", PCM, bytes(640))
            await client.say("played")
            await client.send(Synthesize("Hello."))
            await client.until("audio-stop")
        assert client.types == ["audio-start", "audio-chunk", "audio-stop"] * 2


async def test_streams_do_not_mix() -> None:
    for kind, data in (("synthesize-start", {}), ("run-pipeline", {"start_stage": "asr", "end_stage": "tts"})):
        async with live_server(talker(), **ON) as server, peer(server) as client:
            await client.send(AudioStart(16_000, 2, 1), AudioChunk(16_000, 2, 1, bytes(640)))
            await client.say(kind, data)
            await client.until("error")
    async with live_server(talker(), **ON) as server, peer(server) as client:
        await client.say("synthesize-start")
        await client.say("transcribe")
        assert await client.refused() == "invalid_value"


# limits


async def test_an_incomplete_event_is_charged_and_released() -> None:
    async with live_server(talker(), **ON) as server, peer(server) as client:
        await client.write(b'{"type":"transcript","payload_length":500000}\n' + bytes(400_000))
        await server.until(lambda: server.held_bytes > 300_000)
        await client.write(bytes(100_000))
        await client.until("error")  # since it has no text
        await server.until(lambda: server.held_bytes == 0)
    async with live_server(talker(), **ON, limits={"max_held_bytes": 300_000}) as server, peer(server) as client:
        await client.write(b'{"type":"transcript","payload_length":500000}\n' + bytes(400_000))
        assert await client.refused() == "engine_overloaded"


async def test_a_silent_client_is_closed() -> None:
    loop = asyncio.get_running_loop()
    for begins in (None, Ping(), Transcript("Hello.")):
        settings: dict[str, Any] = {**ON, "streaming_input": {"session_timeout_sec": 20}}
        async with live_server(talker(), **settings) as server, peer(server) as client:
            began = loop.time()
            if begins is not None:
                await asyncio.sleep(5)
                await client.send(begins)
            await client.write(b'{"type"')  # bytes of an incomplete event are no sign of life
            assert await client.refused() == "session_timeout"
            assert loop.time() - began == pytest.approx(20 if begins is None else 25, abs=0.1)


async def test_a_client_that_does_not_read_is_closed_and_harms_no_other() -> None:
    settings: dict[str, Any] = {**ON, "streaming_input": {"write_timeout_sec": 10}}
    ping = b'{"type":"ping","data":{"text":"' + b"a" * 30_000 + b'"}}\n'
    async with live_server(talker(), **settings) as server, peer(server) as client, peer(server) as other:
        transport = client.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        with suppress(ConnectionError):
            while True:  # until it is closed
                await client.write(ping)
        await other.send(Synthesize("Hello."))
        await other.until("audio-stop")


async def test_connections_at_the_limit_and_one_past_it() -> None:
    settings: dict[str, Any] = {**ON, "limits": {"max_connections": 2}}
    async with live_server(talker(), **settings) as server, peer(server) as one, peer(server) as two:
        async with peer(server) as three:
            assert await three.closed() == []
        for client in (one, two):
            await client.send(Ping())
            await client.until("pong")


async def test_sessions_are_counted_for_the_key_that_is_named(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"wyoming": {"port": 0, "key": "home"}, "record": tmp_path}
    async with live_server(talker(), keys=KEYS, **settings) as server, peer(server) as one, peer(server) as two:
        await one.send(Synthesize("Hello."))
        await one.until("audio-stop")
        await two.send(Describe())
        await two.until("info")
        await two.send(Synthesize("Hello."))
        assert await two.refused() == "rate_limited"
        [conversation] = server.app.sessions.conversations
        assert conversation.observed.identity.owner == "home"
    [file] = recordings(tmp_path)
    assert (lines(file)[0]["kind"], lines(file)[0]["key"]) == ("wyoming", "home")
    assert [event["by"] for event in events(file, "sound")] == ["server"]
    with pytest.raises(ConfigurationError, match=r"wyoming\.key: no API key is named home"):
        async with live_server(**settings):
            pass


async def test_a_recorded_call_has_the_texts_of_the_client(tmp_path: Any) -> None:
    async with live_server(talker(), wyoming={"port": 0}, record=tmp_path) as server:
        async with peer(server) as client:
            await client.send(Transcript("Three and four?"))
            await client.until("handled-stop")
            await client.send(Synthesize("Read this."))
            await client.until("audio-stop")
            await client.send(SynthesizeStart(), SynthesizeChunk("Good morning."), SynthesizeChunk(" And this."))
            await client.send(SynthesizeStop())
            await client.until("synthesize-stopped")
        await server.until(lambda: any(b'"event":"end"' in path.read_bytes() for path in recordings(tmp_path)))
        [entry] = (await call(server.port, "GET", "/calls")).json()["calls"]
        told = (await call(server.port, "GET", f"/calls/{entry['id']}/call.json")).json()
        assert entry["first_words"] == "Three and four?"
        texts = [turn["user"]["text"] for turn in told["turns"]]
        assert texts == ["Three and four?", "Read this.", "Good morning. And this."]
        said = [one for one in told["events"] if one.get("frame", {}).get("type") == "input_chunk"]
        assert {one["side"] for one in said} == {"client"}


def test_talks_are_forgotten_in_their_order() -> None:
    talks = Talks(max_tokens=4)
    said = [Message("user", "a b"), Message("assistant", "c d")]
    talks.add("first", said, now=0.0)
    assert list(talks.messages("first", now=KEPT_SEC - 1)) == said
    assert talks.messages("first", now=KEPT_SEC) == ()
    for number in range(MAX_TALKS + 1):
        talks.add(str(number), said, now=1000.0)
    assert talks.messages("0", now=1000.0) == ()
    assert talks.messages("1", now=1000.0)
    talks.add("1", [Message("user", "e"), Message("assistant", "f")], now=1000.0)
    assert [message.text for message in talks.messages("1", now=1000.0)] == ["c d", "e", "f"]


# ends


async def test_a_draining_server_answers_what_was_asked() -> None:
    engine = talker()
    engine.script = (takes(5), SECOND)
    settings: dict[str, Any] = {**ON, "still_answers": False}
    async with live_server(engine, **settings) as server, peer(server) as client, peer(server) as idle:
        await client.send(Synthesize("Hello."))
        await server.until(lambda: server.engine.active_requests == 1)
        draining = asyncio.create_task(server.running.drain(30))
        assert await idle.refused() == "shutting_down"
        assert await client.refused() == "shutting_down"
        assert client.types == ["audio-start", "audio-chunk", "audio-stop", "error"]
        await draining


async def test_a_client_that_hangs_up_leaves_nothing() -> None:
    engine = talker()
    engine.script = (takes(50), SECOND)
    engine.heard = engine.script
    async with live_server(engine, **ON) as server:
        for ask in (Synthesize("Hello."), Transcript("Hello."), RunPipeline(PipelineStage.ASR, PipelineStage.TTS)):
            async with peer(inline(server)) as client:
                await client.send(ask)
                if isinstance(ask, RunPipeline):
                    await client.speak(quiet(96) + loud(640) + quiet(704))
                await server.until(lambda: server.engine.active_requests == 1)
            await server.check_empty()


async def test_a_port_that_is_taken_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with live_server(talker(), **ON) as server:
        port = server.front_end(WyomingServices).port
        with pytest.raises(OSError, match="choose another with --wyoming-port"):
            async with live_server(wyoming={"port": port}):
                pass
