"""Live sessions over WebRTC, with aiortc as the caller, and connections that attach to them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types.live import SessionClosedEvent
from support.live_server import LiveServer, live_server
from support.native_client import FrameClient
from support.patience import PATIENCE_SEC
from support.realtime_client import check_live, live_client, realtime_client
from support.scripted_engines import SPOKEN_MS, Talker, spoken
from support.speech_clips import at_24k, clip_bytes, silence
from support.webrtc_client import WebrtcCaller, webrtc_call
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.wire.live_session import MAX_PERMITTED

LIVE = "/v1/live/sessions"
SESSION: Any = {"model": "gpt-live-1"}
LOUD = 1000
HEARD, SAID = "session.input_audio.append", "session.output_audio.delta"
CLOSED, STARTED = "session.closed", "session.started"

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


class LiveCaller(WebrtcCaller):
    """The page of a Live session."""

    check = staticmethod(check_live)

    def said(self) -> str:
        return "".join(one["delta"] for one in self.seen("session.output_transcript.delta"))


class Attached(FrameClient):
    """A sideband. The audio of both sides is in ``heard`` and ``said``, the latter with its intervals in ``times``."""

    closed = FrameClient.close_of_server

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection)
        self.received = self.frames
        self.heard, self.said = bytearray(), bytearray()
        self.times: list[tuple[int, int]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(orjson.dumps({"type": kind, **fields}).decode())

    async def receive(self) -> dict[str, Any]:
        """The next event; audio is taken on the way."""
        while True:
            event: dict[str, Any] = orjson.loads(await self.message())
            check_live(event)
            if event["type"] == HEARD:
                assert event.keys() == {"type", "audio"}
                self.heard += base64.b64decode(event["audio"])
            elif event["type"] == SAID:
                assert event.keys() == {"type", "delta", "start_ms", "end_ms"}
                self.said += base64.b64decode(event["delta"])
                self.times.append((event["start_ms"], event["end_ms"]))
            else:
                self.received.append(event)
                return event


async def an_offer() -> str:
    caller = LiveCaller()
    try:
        return await caller.offer()
    finally:
        await caller.close()


def http(server: LiveServer, key: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC, headers=headers)


@asynccontextmanager
async def live_call(server: LiveServer, *, key: str = "", **session: Any) -> AsyncIterator[LiveCaller]:
    """A call that was answered; its ``location`` is the path of the session."""
    caller = LiveCaller()
    try:
        async with http(server, key) as client:
            transport = {"type": "webrtc", "sdp": await caller.offer()}
            answer = await client.post(LIVE, json={"session": {**SESSION, **session}, "transport": transport})
        assert answer.status_code == 201, answer.text
        body = answer.json()
        assert body["transport"]["type"] == "webrtc"
        assert body["session"]["id"].startswith("live_")
        sdp = httpx.Response(201, text=body["transport"]["sdp"], headers=answer.headers)
        await caller.accept(sdp)
        assert caller.location == f"{LIVE}/{body['session']['id']}"
        yield caller
    finally:
        await caller.close()


@asynccontextmanager
async def attached(server: LiveServer, location: str, *, key: str = "", query: str = "") -> AsyncIterator[Attached]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"ws://127.0.0.1:{server.port}{location}/attach{query}"
    async with connect(url, max_size=None, ping_interval=None, additional_headers=headers) as connection:
        yield Attached(connection)


async def refused(server: LiveServer, location: str, key: str = "") -> int:
    """The status that the handshake of a sideband is refused with."""
    with pytest.raises(InvalidStatus) as refusal:
        async with attached(server, location, key=key):
            pass
    return refusal.value.response.status_code


def turn() -> bytes:
    return at_24k(silence(0.3) + clip_bytes("goforward") + silence(1.0))


def loud_ms(audio: bytes) -> float:
    """How much of pcm16 at 24 kHz is no silence."""
    return float((np.abs(np.frombuffer(audio, "<i2").astype(np.int32)) > LOUD).sum()) / 24


async def test_a_spoken_turn_that_a_sideband_sees_and_hears() -> None:
    engine = Talker("go forward", reply=lambda said: spoken("One two three four."))
    async with (
        live_server(engine) as server,
        live_call(server, instructions="Be brief.") as caller,
        attached(server, caller.location, query="?graceful_close=true") as sideband,
    ):
        first = await caller.receive()
        greeting = await sideband.receive()
        assert first["type"] == greeting["type"] == STARTED
        assert first["session"] == greeting["session"]
        assert first["session"]["instructions"] == "Be brief."
        caller.microphone.say(turn())
        while caller.said() != "One two three four.":
            await caller.receive()
        await sideband.send("session.input_audio.mute", event_id="mute")
        assert (await caller.until("session.input_audio.muted"))["client_event_id"] == "mute"
        await sideband.until("session.input_audio.muted")
        assert sideband.received[1:] == caller.received[1:]
        assert "".join(one["delta"] for one in caller.seen("session.input_transcript.delta")) == "go forward"
        assert not caller.seen(SAID)
        # Both sides, on one line without a gap.
        assert loud_ms(bytes(sideband.heard)) > 150
        assert loud_ms(bytes(sideband.said)) == pytest.approx(4 * SPOKEN_MS, abs=2)
        assert all(end == begin for (_, end), (begin, _) in zip(sideband.times, sideband.times[1:], strict=False))
        assert len(sideband.said) / 48 == pytest.approx(sideband.times[-1][1] - sideband.times[0][0], abs=2)
        # Muted: the mirror goes on, the session hears nothing.
        before = loud_ms(bytes(sideband.heard))
        caller.microphone.say(turn())
        await sideband.send("session.commentary.append", delegation_id=None, content="Tell it.", event_id="tell")
        appended = await caller.until("session.commentary.appended")
        assert appended["client_event_id"] == "tell"
        while caller.said().count("four.") < 2:
            await caller.receive()
        await asyncio.wait_for(caller.microphone.silent.wait(), PATIENCE_SEC)
        await sideband.send("session.close", event_id="bye")
        closed = await caller.until(CLOSED)
        assert (closed["reason"], closed["client_event_id"]) == ("close_requested", "bye")
        assert await sideband.until(CLOSED) == closed
        assert (await sideband.closed())[0] == 1000
        await caller.ended()
        assert loud_ms(bytes(sideband.heard)) > before + 150
        assert len(engine.asked) == 2
    assert np.abs(np.concatenate(caller.heard)).max() > LOUD


async def test_the_client_of_openai_opens_a_session_and_attaches() -> None:
    async with live_server(Talker()) as server:
        address = f"127.0.0.1:{server.port}/v1"
        caller = LiveCaller()
        async with AsyncOpenAI(
            base_url=f"http://{address}", websocket_base_url=f"ws://{address}", api_key="not-needed"
        ) as client:
            try:
                transport: Any = {"type": "webrtc", "sdp": await caller.offer()}
                answer = await client.live.create(session=SESSION, transport=transport)
                sdp = httpx.Response(
                    201, text=answer.transport.sdp, headers={"location": f"{LIVE}/{answer.session.id}"}
                )
                await caller.accept(sdp)
                async with client.live.sideband.connect(session_id=answer.session.id, graceful_close=True) as sideband:
                    assert (await sideband.recv()).type == STARTED
                    await caller.until(STARTED)
                    await sideband.session.close()
                    while not isinstance(event := await sideband.recv(), SessionClosedEvent):
                        pass
                    assert event.reason == "close_requested"
                await caller.until(CLOSED)
            finally:
                await caller.close()


async def test_what_the_data_channel_is_permitted() -> None:
    permitted = {
        "allowed_client_events": ["session.input_audio.mute", "session.output_audio.fixture.play"],
        "allowed_server_events": [{"type": STARTED}, {"type": "session.input_audio.muted"}, {"type": "error"}],
    }
    async with (
        live_server(Talker()) as server,
        live_call(server, client={"data_channel": permitted}) as caller,
        attached(server, caller.location) as sideband,
    ):
        started, info = await caller.receive(), await caller.receive()
        assert started["session"]["client"] == {"data_channel": permitted}
        assert (info["type"], info["code"]) == ("info", "data_channel_permissions")
        for kind in ("session.input_audio.unmute", "session.close", HEARD, "session.start"):
            caller.send(kind, event_id=kind)
            error = (await caller.until("error"))["error"]
            assert (error["code"], error["param"], error["client_event_id"]) == ("invalid_value", "type", kind)
        caller.send("session.output_audio.fixture.play", audio="AAAA")  # a sideband's alone, whatever is permitted
        assert (await caller.until("error"))["error"]["param"] == "type"
        caller.send("session.input_audio.mute")
        await caller.until("session.input_audio.muted")
        await sideband.send("session.input_audio.unmute")
        await sideband.until("session.input_audio.unmuted")
        await sideband.send("session.input_audio.mute")
        await caller.until("session.input_audio.muted")
        assert not caller.seen("session.input_audio.unmuted")
        for kind in (HEARD, "session.start"):
            await sideband.send(kind, audio="AAAA", session=SESSION)
            assert (await sideband.until("error"))["error"]["param"] == "type"
        await sideband.connection.send(b"{}")
        assert (await sideband.until("error"))["error"]["code"] == "invalid_event"


async def test_a_sideband_plays_a_fixture() -> None:
    async with (
        live_server(Talker()) as server,
        live_call(server) as caller,
        attached(server, caller.location) as sideband,
    ):
        await caller.until(STARTED)
        tone = (9000 * np.sin(2 * np.pi * 440 * np.arange(24 * 400) / 24_000)).astype("<i2").tobytes()
        audio = base64.b64encode(tone + bytes(48 * 300) + tone).decode()
        await sideband.send("session.output_audio.fixture.play", audio=audio, event_id="play")
        for client in (caller, sideband):
            assert (await client.until("session.output_audio.fixture.playing"))["client_event_id"] == "play"
            assert (await client.until("session.output_audio.fixture.played"))["client_event_id"] == "play"
        assert tone + bytes(48 * 300) + tone in bytes(sideband.said)

        def heard_ms() -> tuple[int, int]:
            """From the first loud sample to the last, and how much of that is no pause."""
            loud = np.flatnonzero(np.abs(np.concatenate([np.zeros(1), *caller.heard])) > LOUD)
            if not len(loud):
                return 0, 0
            gaps = np.diff(loud)
            return (loud[-1] - loud[0]) // 48, int(gaps[gaps < 480].sum()) // 48

        # What the page plays has the pause where it is: aiortc keeps back four packets.
        await server.until(lambda: heard_ms()[0] >= 1000)
        span, sounding = heard_ms()
        assert span <= 1130
        assert span - sounding == pytest.approx(300, abs=40)


async def test_who_may_attach() -> None:
    keys = tuple(ApiKey(name=name, key_sha256=digest(f"sk-{name}")) for name in ("one", "two"))
    async with live_server(Talker(), keys=keys) as server, live_call(server, key="sk-one") as caller:
        async with http(server, "sk-one") as client:
            secret = (await client.post("/v1/realtime/client_secrets", json={})).json()["value"]
        assert await refused(server, caller.location, "sk-two") == 404
        assert await refused(server, f"{LIVE}/live_0123456789abcdef01234567", "sk-one") == 404
        assert await refused(server, caller.location) == 401
        assert await refused(server, caller.location, secret) == 401
        async with http(server, "sk-two") as client:
            assert (await client.post(f"{caller.location}/hangup")).status_code == 404
        async with http(server, secret) as client:
            assert (await client.post(f"{caller.location}/hangup")).status_code == 401
            assert (await client.post(LIVE, json={})).status_code == 401
        async with (
            attached(server, caller.location, key="sk-one") as one,
            attached(server, caller.location, key="sk-one") as two,
        ):
            assert (await one.receive())["type"] == (await two.receive())["type"] == STARTED
            assert await refused(server, caller.location, "sk-one") == 409


async def test_ids_of_other_sessions() -> None:
    async with live_server(Talker()) as server, live_call(server) as live, webrtc_call(server) as realtime:
        live_id, call_id = (one.location.rpartition("/")[2] for one in (live, realtime))
        assert await refused(server, f"{LIVE}/{call_id}") == 404
        with pytest.raises(InvalidStatus) as refusal:
            async with realtime_client(server, query=f"call_id={live_id}"):
                pass
        assert refusal.value.response.status_code == 404
        async with live_client(server) as client:  # nobody attaches to a session whose audio is in its events
            session = await client.start()
            assert await refused(server, f"{LIVE}/{session['id']}") == 404
        async with http(server) as client:
            assert (await client.post(f"/v1/realtime/calls/{live_id}/hangup")).status_code == 404
            assert (await client.post(f"{LIVE}/{call_id}/hangup")).status_code == 404


async def test_why_it_ends() -> None:
    async with live_server(Talker()) as server:
        async with live_call(server) as caller, attached(server, caller.location) as sideband:
            await caller.until(STARTED)
            async with http(server) as client:
                assert (await client.post(f"{caller.location}/hangup")).status_code == 200
                assert (await client.post(f"{caller.location}/hangup")).status_code == 404
            assert (await caller.until(CLOSED))["reason"] == "close_requested"
            assert (await sideband.until(CLOSED))["reason"] == "close_requested"
        async with live_call(server) as caller, attached(server, caller.location) as sideband:
            await caller.until(STARTED)
            await caller.close()
            assert (await sideband.until(CLOSED))["reason"] == "remote_hangup"
            assert (await sideband.closed())[0] == 1000


async def test_a_caller_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.transport.webrtc.call.SETUP_TIMEOUT_SEC", 0.5)
    async with live_server(Talker()) as server, http(server) as client:
        offer = {"session": SESSION, "transport": {"type": "webrtc", "sdp": await an_offer()}}
        answer = await client.post(LIVE, json=offer)
        async with attached(server, answer.headers["location"]) as sideband:
            assert (await sideband.receive())["type"] == STARTED
            assert (await sideband.until(CLOSED))["reason"] == "connection_lost"


def selectors(count: int) -> dict[str, Any]:
    return {"data_channel": {"allowed_server_events": count * [{"type": "error"}]}}


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"voices": 1}, "unknown_parameter", "session.voices"),
        ({"audio": {"format": {"type": "audio/pcm", "rate": 24000}}}, "unknown_parameter", "session.audio.format"),
        ({"model": None}, "invalid_value", "session.model"),
        ({"store": True}, "unsupported_parameter", "session.store"),
        ({"idle_timeout_s": 5}, "unsupported_parameter", "session.idle_timeout_s"),
        ({"client": {}}, "missing_required_parameter", "session.client.data_channel"),
        (
            {"client": {"data_channel": {"allowed_server_events": [{"type": "response.event"}]}}},
            "invalid_value",
            "session.client.data_channel.allowed_server_events",
        ),
        (
            {"client": selectors(MAX_PERMITTED + 1)},
            "invalid_value",
            "session.client.data_channel.allowed_server_events",
        ),
    ],
)
async def test_sessions_that_are_refused(session: dict[str, Any], code: str, param: str) -> None:
    async with live_server(Talker()) as server, http(server) as client:
        offer = {"session": {**SESSION, **session}, "transport": {"type": "webrtc", "sdp": await an_offer()}}
        answer = await client.post(LIVE, json=offer)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error


async def test_offers_that_are_refused() -> None:
    async with live_server(Talker()) as server, http(server) as client:
        sdp = await an_offer()
        most = {"session": {**SESSION, "client": selectors(MAX_PERMITTED)}, "transport": {"type": "webrtc", "sdp": sdp}}
        answer = await client.post(LIVE, json=most)
        assert answer.status_code == 201
        assert (await client.post(f"{answer.headers['location']}/hangup")).status_code == 200
        for body, status, param in (
            ({"session": SESSION}, 400, "transport.type"),
            ({"session": SESSION, "transport": {"type": "sip", "sdp": sdp}}, 400, "transport.type"),
            ({"session": SESSION, "transport": {"type": "webrtc"}}, 400, "transport.sdp"),
            ({"session": SESSION, "transport": {"type": "webrtc", "sdp": "v=0"}}, 415, "sdp"),
            ({"transport": {"type": "webrtc", "sdp": sdp}}, 400, "session.model"),
        ):
            answer = await client.post(LIVE, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert (await client.post(LIVE, content=sdp, headers={"Content-Type": "application/sdp"})).status_code == 415
        await server.check_empty()
    rules = Talker()
    rules.name = "rules"
    async with live_server(rules) as server, http(server) as client:
        answer = await client.post(LIVE, json={"session": SESSION, "transport": {"type": "webrtc", "sdp": sdp}})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_model")
        assert "--llm" in error["message"]
    async with live_server(Talker(), webrtc={"enabled": False}) as server, http(server) as client:
        assert (await client.post(LIVE, json={})).status_code == 501


async def test_what_telephones_and_stored_sessions_would_need() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("sk-one")),)
    path = f"{LIVE}/live_0123456789abcdef01234567"
    async with live_server(Talker(), keys=keys) as server, http(server, "sk-one") as client:
        for method, step in (
            ("POST", "accept"),
            ("POST", "reject"),
            ("POST", "refer"),
            ("POST", "fork"),
            ("GET", "content"),
        ):
            answer = await client.request(method, f"{path}/{step}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", step)
        assert (await client.post(f"{path}/accept", headers={"Authorization": ""})).status_code == 401
        url = f"ws://127.0.0.1:{server.port}{path}/fork"
        for headers, status in (({"Authorization": "Bearer sk-one"}, 400), ({}, 401)):
            with pytest.raises(InvalidStatus) as refusal:
                async with connect(url, additional_headers=headers):
                    pass
            assert refusal.value.response.status_code == status
        for step in ("attach", "fork"):
            assert (await client.get(f"{path}/{step}")).status_code == 426


async def test_a_stored_call_is_forked(tmp_path: Path) -> None:
    kept = {"store": f"sqlite:{tmp_path / 'kept' / 'sessions.db'}"}
    async with live_server(Talker(), sessions=kept) as server, http(server) as client:
        first, second = LiveCaller(), LiveCaller()
        try:
            stored = {**SESSION, "store": True, "instructions": "Be brief."}
            body = {"session": stored, "transport": {"type": "webrtc", "sdp": await first.offer()}}
            answer = await client.post(LIVE, json=body)
            session = answer.json()["session"]
            await first.accept(httpx.Response(201, text=answer.json()["transport"]["sdp"], headers=answer.headers))
            assert "resume_token" not in await first.until(STARTED)
            fork = f"{LIVE}/{session['id']}/fork"
            transport = {"type": "webrtc", "sdp": await second.offer()}
            query = {"resume_token": session["resume_token"]}
            assert (await client.post(fork, json={"transport": transport}, params=query)).status_code == 409
            assert (await client.post(f"{LIVE}/{session['id']}/hangup")).status_code == 200
            assert (await client.post(fork, json={"transport": transport})).status_code == 404
            asked = {"transport": transport, "session": {"store": False}}
            answer = await client.post(fork, json=asked, params=query)
            assert answer.status_code == 201, answer.text
            sdp = httpx.Response(201, text=answer.json()["transport"]["sdp"], headers=answer.headers)
            await second.accept(sdp)
            shown = (await second.until(STARTED))["session"]
            assert (shown["instructions"], shown["store"]) == ("Be brief.", False)
            assert shown["id"] == answer.json()["session"]["id"] != session["id"]
        finally:
            await first.close()
            await second.close()


async def test_a_call_that_is_not_answered_is_not_stored(tmp_path: Path) -> None:
    kept = {"store": f"sqlite:{tmp_path / 'kept' / 'sessions.db'}"}
    async with live_server(Talker(), sessions=kept) as server, http(server) as client:
        caller, store = LiveCaller(), server.app.sessions.store
        assert store is not None
        try:
            offer = (await caller.offer()).replace("opus/48000", "other/48000")
            body = {"session": {**SESSION, "store": True}, "transport": {"type": "webrtc", "sdp": offer}}
            answer = await client.post(LIVE, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_format")
        finally:
            await caller.close()
        for lease in [*store._leases.values()]:
            await store.settle(lease)
        assert not store._leases


async def test_pages_of_other_origins() -> None:
    page = "https://shop.example"
    async with live_server(Talker(), allow_origin=(page,)) as server, http(server) as client:
        asks = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        preflight = await client.options(LIVE, headers=asks)
        assert preflight.headers["access-control-allow-origin"] == page
        assert "POST" in preflight.headers["access-control-allow-methods"]
        answer = await client.post(LIVE, json={}, headers={"Origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert (await client.post(LIVE, json={}, headers={"Origin": "https://other.example"})).status_code == 403
