"""Sidebands: a second connection that sees and commands a call, with aiortc as its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.realtime_client import RealtimeClient, failed, realtime_client
from support.webrtc_client import WebrtcCaller, post_offer, webrtc_call
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import KeepAliveSettings, PeerRounds
from omni_ws.transport.realtime.session import (
    MAX_BEHIND_BYTES,
    MAX_SIDEBANDS,
    Sideband,
    Sidebands,
)
from omni_ws.transport.webrtc.call import Call
from omni_ws.transport.webrtc.endpoint import WebrtcCalls

TONE = (0.25 * np.sin(2 * np.pi * 440 * np.arange(12_000) / 24_000)).astype(np.float32)
SPOKEN = (TextOutput("Once there was a king. "), AudioOutput(TONE, 24_000))

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


def call_id(location: str) -> str:
    return location.rpartition("/")[2]


@asynccontextmanager
async def sideband_of(
    server: LiveServer, location: str, *, key: str = "", created: bool = True
) -> AsyncIterator[RealtimeClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    query = f"call_id={call_id(location)}"
    async with realtime_client(server, query=query, created=created, additional_headers=headers) as client:
        yield client


async def refused(server: LiveServer, location: str, key: str = "") -> int:
    """The status that the handshake of a sideband is refused with."""
    with pytest.raises(InvalidStatus) as refusal:
        async with sideband_of(server, location, key=key):
            pass
    return refusal.value.response.status_code


def call_of(server: LiveServer) -> Call:
    """The only call."""
    (calls,) = (one for one in server.app.front_ends if isinstance(one, WebrtcCalls))
    (running,) = calls._calls.values()
    return running.call


async def test_it_sees_what_the_caller_sees_and_commands_the_same_session() -> None:
    async with live_server(ScriptedEngine(SPOKEN)) as server, webrtc_call(server) as caller:
        await caller.update(instructions="Be brief.")
        async with sideband_of(server, caller.location) as sideband:
            (created,) = sideband.received
            assert created["session"]["id"] == caller.received[0]["session"]["id"]
            assert created["session"]["instructions"] == "Be brief."
            await sideband.say("Tell me a story.")
            await sideband.send("response.create")
            await caller.until("output_audio_buffer.stopped")
            await sideband.until("output_audio_buffer.stopped")
            # The same events, from the answer to the first command on: with their ids, and without audio.
            begun = [event["type"] for event in caller.received].index("conversation.item.added")
            assert sideband.received[1:] == caller.received[begun:]
            assert not sideband.seen("response.output_audio.delta")
            assert sideband.seen("response.output_audio_transcript.delta")
            await caller.update(instructions="Be kind.")
            assert (await sideband.until("session.updated"))["session"]["instructions"] == "Be kind."
        await caller.update(instructions="Be alone.")  # the call goes on without it


async def test_what_is_refused_is_told_to_the_sender_alone() -> None:
    async with (
        live_server() as server,
        webrtc_call(server) as caller,
        sideband_of(server, caller.location) as one,
        sideband_of(server, caller.location) as other,
    ):
        error = await failed(one, "input_audio_buffer.append", audio="AAAA", event_id="mine")
        assert (error["code"], error["param"], error["event_id"]) == ("invalid_value", "type", "mine")
        assert "by its track" in error["message"]
        assert (await failed(one, "no.such.event"))["code"] == "invalid_event"
        await one.connection.send("{")
        assert (await one.until("error"))["error"]["code"] == "invalid_event"
        await one.update(instructions="Go on.")
        await caller.until("session.updated")
        await other.until("session.updated")
        assert not caller.seen("error")
        assert not other.seen("error")
        caller.send("no.such.event")  # they see all that the caller is told
        assert (await one.until("error")) == (await other.until("error")) == (await caller.until("error"))


async def test_only_the_key_of_the_call_finds_it() -> None:
    keys = tuple(ApiKey(name=name, key_sha256=digest(f"sk-{name}")) for name in ("one", "two"))
    async with live_server(keys=keys) as server, webrtc_call(server, key="sk-one") as caller:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as http:
            headers = {"Authorization": "Bearer sk-one"}
            secret = (await http.post("/v1/realtime/client_secrets", headers=headers, json={})).json()["value"]
        assert await refused(server, caller.location, "sk-two") == 404
        assert await refused(server, "rtc_0123456789abcdef01234567", "sk-two") == 404
        assert await refused(server, "", "sk-one") == 404
        assert await refused(server, caller.location) == 401
        assert await refused(server, caller.location, secret) == 401
        async with sideband_of(server, caller.location, key="sk-one"):
            pass
        location = caller.location
        await caller.close()
        await server.until(lambda: not server.sessions)
        assert await refused(server, location, "sk-one") == 404


async def test_a_session_over_a_websocket_is_no_call() -> None:
    async with live_server() as server, realtime_client(server) as client:
        assert await refused(server, client.received[0]["session"]["id"]) == 404


async def test_there_are_two_at_most() -> None:
    async with live_server() as server, webrtc_call(server) as caller, sideband_of(server, caller.location) as one:
        async with sideband_of(server, caller.location):
            assert await refused(server, caller.location) == 409
        await server.until(lambda: len(call_of(server).sidebands._joined) == MAX_SIDEBANDS - 1)
        async with sideband_of(server, caller.location) as next_one:
            await next_one.update(instructions="Be brief.")
            await one.until("session.updated")


async def test_the_call_ends_while_a_sideband_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sideband.run

    async def run_late(self: Sideband) -> None:
        self._sidebands.end(1000, "")
        await run(self)

    monkeypatch.setattr(Sideband, "run", run_late)
    async with (
        live_server() as server,
        webrtc_call(server) as caller,
        sideband_of(server, caller.location, created=False) as late,
    ):
        assert (await late.closed())[0] == 4404
        assert late.received[0]["error"]["code"] == "session_not_found"


async def test_commands_wait_until_the_caller_is_there() -> None:
    async with live_server() as server:
        caller = WebrtcCaller()
        try:
            answer = await post_offer(server, await caller.offer())
            async with sideband_of(server, answer.headers["location"]) as sideband:
                await sideband.send("session.update", session={"type": "realtime", "instructions": "Be brief."})
                (connection,) = server.connections
                assert not connection.is_reading
                await caller.accept(answer)
                created = await caller.until("session.created")
                assert (await caller.receive()) == (await sideband.until("session.updated"))
                assert created["session"]["instructions"] != "Be brief."
        finally:
            await caller.close()


async def test_it_ends_with_the_call() -> None:
    async with live_server(still_answers=False) as server:
        async with webrtc_call(server) as caller, sideband_of(server, caller.location) as sideband:
            await caller.close()
            assert (await sideband.closed())[0] == 1000
        async with webrtc_call(server) as caller, sideband_of(server, caller.location) as sideband:
            draining = asyncio.create_task(server.running.drain(60))
            assert (await sideband.closed())[0] == 1012
            assert sideband.received[-1]["error"]["code"] == "shutting_down"
            await draining


async def test_a_message_that_is_too_long_ends_the_sideband_alone() -> None:
    limits = {"max_chunk_bytes": 1024}
    async with live_server(streaming_input=limits) as server, webrtc_call(server) as caller:
        async with sideband_of(server, caller.location) as sideband:
            await sideband.send("input_audio_buffer.clear", padding="x" * 100_000)
            assert (await sideband.closed())[0] == 1009
        await caller.update(instructions="Go on.")


async def test_a_slow_reader_is_dropped_and_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.transport.realtime.session.MAX_BEHIND_BYTES", 65_536)  # what is more takes SCTP long
    async with (
        live_server() as server,
        webrtc_call(server) as caller,
        sideband_of(server, caller.location) as slow,
        sideband_of(server, caller.location) as other,
    ):
        for connection in server.connections:
            connection.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
        slow.connection.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        slow.connection.transport.pause_reading()
        await other.say("x" * 20_000)
        item = other.received[-1]["item"]["id"]
        sidebands = call_of(server).sidebands
        for _ in range(40):
            await other.send("conversation.item.retrieve", item_id=item)
            await other.until("conversation.item.retrieved")
            if len(sidebands._joined) < MAX_SIDEBANDS:
                break
        slow.connection.transport.resume_reading()
        assert (await slow.closed())[0] == 4413
        await caller.update(instructions="Go on.")
        await other.until("session.updated")
        assert len(caller.seen("conversation.item.retrieved")) == len(other.seen("conversation.item.retrieved"))


# A sideband without a call: what a connection reports, and time.


class Owner:
    """A session that answers nothing."""

    def receive_message(self, data: Any, *, is_text: bool, sideband: Sideband | None = None) -> None:
        raise AssertionError("nothing is sent")


def sidebands() -> Sidebands:
    return Sidebands(Owner(), list, refused={})


@pytest.mark.parametrize("past", [0, 1])
async def test_how_much_may_be_unread(past: int) -> None:
    written: list[bytes] = []
    connection = SimpleNamespace(
        is_open=True,
        heard_at=0.0,
        write_message=lambda data, is_text: written.append(data),
        transport=SimpleNamespace(get_write_buffer_size=lambda: MAX_BEHIND_BYTES + past),
    )
    all_of_them = sidebands()
    sideband = Sideband(cast("StreamConnection", connection), all_of_them, rounds=PeerRounds(KeepAliveSettings()))
    all_of_them.join(sideband)
    all_of_them.write({"type": "error"})
    all_of_them.write({"type": "error"})
    assert len(written) == 2 - past
    assert bool(all_of_them) is not bool(past)


@pytest.mark.virtual_clock
async def test_one_that_answers_no_ping_leaves_its_place() -> None:
    limits = {"ping_interval_sec": 1, "ping_timeout_sec": 1}
    async with live_server(streaming_input=limits) as server:
        (calls,) = (one for one in server.app.front_ends if isinstance(one, WebrtcCalls))
        call = SimpleNamespace(sidebands=sidebands())
        task = asyncio.get_running_loop().create_future()
        task.set_result(None)
        calls._calls["rtc_1"] = cast("Any", SimpleNamespace(owner=None, live=False, call=call, task=task))
        began = asyncio.get_running_loop().time()
        async with sideband_of(server, "rtc_1", created=False) as silent:
            await server.until(lambda: bool(call.sidebands))
            silent.connection.transport.pause_reading()
            await server.until(lambda: not call.sidebands)
            assert asyncio.get_running_loop().time() - began == pytest.approx(2, abs=0.2)
            silent.connection.transport.resume_reading()
            await silent.closed()
        del calls._calls["rtc_1"]
