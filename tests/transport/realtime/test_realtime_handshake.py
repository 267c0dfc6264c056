"""Handshakes of ``/v1/realtime``: who may connect, under which names, and how a connection is refused or ended."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest
from support.live_server import live_server, scrape
from support.raw_http import raw_client, request
from support.realtime_client import realtime_client
from support.recordings import lines, recordings
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.transport.realtime.session import Realtime

KEYS = (ApiKey(name="one", key_sha256=digest("sesame"), max_sessions=1),)
BROWSER = ("realtime", "openai-insecure-api-key.sesame", "openai-agents-sdk.1.0")


async def refused(server: Any, **options: Any) -> int:
    """The status that a handshake is refused with."""
    with pytest.raises(InvalidStatus) as refusal:
        async with realtime_client(server, **options):
            pass
    return refusal.value.response.status_code


async def test_the_subprotocol_is_realtime_where_it_is_offered() -> None:
    async with live_server(keys=KEYS) as server:
        async with realtime_client(server, subprotocols=BROWSER) as client:
            assert client.connection.subprotocol == "realtime"
        await server.until(lambda: server.sessions == 0)
        async with realtime_client(server, additional_headers={"Authorization": "Bearer sesame"}) as client:
            assert client.connection.subprotocol is None


@pytest.mark.parametrize(
    "options",
    [{}, {"additional_headers": {"Authorization": "Bearer wrong"}}, {"subprotocols": ("realtime", "omni-api-key.x")}],
)
async def test_a_handshake_without_a_valid_key_is_401(options: dict[str, Any]) -> None:
    async with live_server(keys=KEYS) as server:
        assert await refused(server, **options) == 401


async def test_any_model_is_the_served_one_unless_names_are_strict() -> None:
    async with live_server() as server, realtime_client(server, model="gpt-4o-realtime") as client:
        assert client.received[0]["session"]["model"] == "fake"
    async with live_server(strict_model_names=True) as server:
        assert await refused(server, model="gpt-4o-realtime") == 404
        async with realtime_client(server, model="fake"):
            pass


async def test_it_is_a_websocket_and_can_be_turned_off() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("GET", "/v1/realtime"))
        assert (await client.response()).status == 426
    async with live_server(streaming_input={"enabled": False}) as server:
        assert await refused(server) == 404


async def test_a_server_without_room_says_so_and_closes_with_1013() -> None:
    async with live_server(limits={"max_sessions": 1}) as server, realtime_client(server) as holder:
        await holder.say("hello")  # a session without content would give its place up
        async with realtime_client(server, created=False) as client:
            assert (await client.closed())[0] == 1013
            assert client.received[0]["error"]["code"] == "engine_overloaded"


async def test_a_key_with_all_its_sessions_open_is_closed_with_1013() -> None:
    async with (
        live_server(keys=KEYS) as server,
        realtime_client(server, subprotocols=BROWSER),
        realtime_client(server, created=False, subprotocols=BROWSER) as client,
    ):
        assert (await client.closed())[0] == 1013
        error = client.received[0]["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


@pytest.mark.virtual_clock
async def test_a_drain_finishes_the_response_and_closes_with_1012() -> None:
    going = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), lambda: going.wait(), TextOutput("two")])
    async with live_server(engine, still_answers=False) as server, realtime_client(server) as client:
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        draining = asyncio.create_task(server.running.drain(60))
        await server.until(lambda: server.app.sessions.admission.draining)
        going.set()
        response = await client.response()
        assert response["status"] == "completed"
        assert (await client.closed())[0] == 1012
        assert client.received[-1]["error"]["code"] == "shutting_down"
        await draining


@pytest.mark.virtual_clock
async def test_nobody_has_interrupted_a_response_that_a_shutdown_cuts_off() -> None:
    engine = ScriptedEngine([TextOutput("one "), lambda: asyncio.Event().wait()])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        server.front_end(Realtime).end_all(ShuttingDown("the server is shutting down"))
        response = await client.response()
        assert (response["status"], response["status_details"]) == ("cancelled", {"type": "cancelled"})


@pytest.mark.virtual_clock
async def test_a_silent_client_is_closed() -> None:
    async with live_server(streaming_input={"ping_interval_sec": 0}) as server, realtime_client(server) as client:
        assert (await client.closed())[0] == 4408
        assert client.received[-1]["error"]["code"] == "session_timeout"
        assert asyncio.get_running_loop().time() == pytest.approx(300, abs=1)


async def test_sessions_are_counted_and_recorded_by_their_origin(tmp_path: Any) -> None:
    async with live_server(record=tmp_path) as server:
        async with realtime_client(server) as client:
            await client.say("hello")
            await client.respond()
        await server.until(lambda: server.sessions == 0)
        metrics = await scrape(server)
        assert metrics.value("sessions_opened_total", origin="realtime") == 1
    (path,) = recordings(tmp_path)
    written = lines(path)
    assert written[0]["kind"] == "realtime"
    texts = [orjson.loads(line["text"])["type"] for line in written if line.get("text")]
    assert texts[:2] == ["session.created", "conversation.item.create"]
    assert texts[-1] == "response.done"


async def test_a_client_that_is_gone_leaves_nothing() -> None:
    waiting = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), lambda: waiting.wait()])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("hello")
        await client.send("input_audio_buffer.append", audio="AAAA")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        client.connection.transport.abort()
        await server.until(lambda: server.sessions == 0)


@pytest.mark.virtual_clock
async def test_a_client_that_does_not_read_is_closed() -> None:
    audio = AudioOutput(np.zeros(240_000, np.float32), 24_000)
    limits = {"max_output_bytes": 256 * 1024, "write_timeout_sec": 1, "ping_interval_sec": 0}
    async with (
        live_server(ScriptedEngine(100 * [audio]), streaming_input=limits) as server,
        realtime_client(server) as client,
    ):
        await client.say("hello")
        client.connection.transport.pause_reading()
        await client.send("response.create")
        await server.until(lambda: server.engine.active_requests == 1)
        await server.until(lambda: server.engine.active_requests == 0)
        client.connection.transport.resume_reading()
        assert (await client.closed())[0] == 4413
        assert client.received[-1]["error"]["code"] == "slow_consumer"
