"""Offers that are refused, the limits that hold for calls, and what an answer tells of the server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import socket
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any, cast

import httpx
import pytest
from aioice import Connection, stun
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.webrtc_client import WebrtcCaller, post_offer, webrtc_call

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.loading import load
from omni_ws.config.values import ConfigurationError
from omni_ws.errors import InvalidFrame, InvalidValue
from omni_ws.transport.webrtc.call import MAX_CANDIDATES, announced, check_offer
from omni_ws.transport.webrtc.endpoint import MAX_OFFER_BYTES

HOST = "a=candidate:1 1 udp 2130706431 {address} 40000 typ host"
ANSWER = "\r\n".join([HOST.format(address="10.0.0.5"), HOST.format(address="fd00::5"), "a=mid:0", ""])


async def an_offer() -> str:
    caller = WebrtcCaller()
    offer = await caller.offer()
    await caller.close()
    return offer


async def refused(server: LiveServer, status: int, code: str, offer: str | bytes, **headers: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as client:
        fields = {"Content-Type": "application/sdp", **headers}
        answer = await client.post("/v1/realtime/calls", content=offer, headers=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_offers_that_are_not_acceptable() -> None:
    offer = await an_offer()
    no_opus = "\r\n".join(line for line in offer.splitlines() if "opus" not in line.lower()) + "\r\n"
    two = offer + "m=video 9 UDP/TLS/RTP/SAVPF 96\r\nc=IN IP4 0.0.0.0\r\na=mid:2\r\na=rtpmap:96 VP8/90000\r\n"
    audio_only = offer[: offer.index("m=application")]
    async with live_server() as server:
        await refused(server, 400, "invalid_frame", "v=0 and so on")
        await refused(server, 400, "invalid_frame", b"\xff\xfe")
        await refused(server, 415, "unsupported_format", two)
        await refused(server, 415, "unsupported_format", audio_only)
        await refused(server, 415, "unsupported_format", no_opus)
        await refused(server, 415, "unsupported_format", offer, **{"Content-Type": "application/json"})
        await refused(server, 413, "payload_too_large", offer.ljust(MAX_OFFER_BYTES + 1))
        await server.check_empty()


async def test_a_form_brings_the_session() -> None:
    async with live_server() as server:
        caller = WebrtcCaller()
        form: dict[str, Any] = {
            "sdp": (None, await caller.offer(), "application/sdp"),
            "session": (None, '{"type": "realtime", "instructions": "Be brief."}', "application/json"),
        }
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as client:
            await caller.accept(await client.post("/v1/realtime/calls", files=form))
            created = await caller.until("session.created")
            assert created["session"]["instructions"] == "Be brief."
            await caller.close()
            nothing = await client.post("/v1/realtime/calls", files={"session": form["session"]})
            assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "sdp")
            form["session"] = (None, "{", "application/json")
            broken = await client.post("/v1/realtime/calls", files=form)
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_frame")


async def test_keys_and_client_secrets() -> None:
    key = ApiKey(name="shop", key_sha256=digest("sk-1"), max_sessions=1)
    async with live_server(keys=(key,)) as server:
        offer = await an_offer()
        await refused(server, 401, "unauthenticated", offer)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as client:
            made = await client.post(
                "/v1/realtime/client_secrets",
                headers={"Authorization": "Bearer sk-1"},
                json={"session": {"type": "realtime", "instructions": "Sell."}},
            )
            secret = made.json()["value"]
            async with webrtc_call(server, key=secret) as caller:
                assert caller.received[0]["session"]["instructions"] == "Sell."
                await refused(server, 429, "rate_limited", offer, Authorization="Bearer sk-1")
                assert (await client.post(f"{caller.location}/hangup")).status_code == 401


@pytest.mark.slow
@pytest.mark.real_time
async def test_speech_beyond_the_pace_of_a_key_is_dropped_and_events_wait() -> None:
    key = ApiKey(name="shop", key_sha256=digest("sk-1"), input_bytes_per_sec=24_000)
    async with live_server(keys=(key,)) as server, webrtc_call(server, key="sk-1") as caller:
        dropped = server.app.sessions.metrics.webrtc_packets.labels("dropped")
        await server.until(lambda: dropped._value.get() > 0)
        updated = await caller.update(instructions="Be brief.")
        assert updated["instructions"] == "Be brief."


async def test_the_limit_of_sessions() -> None:
    async with live_server(limits={"max_sessions": 1}) as server, webrtc_call(server) as caller:
        # One that has sent content keeps its place.
        content = [{"type": "input_text", "text": "hello"}]
        caller.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await caller.until("conversation.item.done")
        await refused(server, 503, "engine_overloaded", await an_offer())


async def test_a_server_that_is_told_not_to_serve_calls() -> None:
    async with live_server(webrtc={"enabled": False}) as server:
        await refused(server, 501, "webrtc_off", await an_offer())


async def test_a_server_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = await an_offer()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiortc" else find(name))
    async with live_server() as server:
        answer = await post_offer(server, offer)
        assert answer.status_code == 501
        assert "pip install 'omni-ws[webrtc]'" in answer.json()["error"]["message"]


async def test_the_answer_names_no_server_of_others() -> None:
    async with live_server(webrtc={"announce": "198.51.100.7"}) as server:
        answer = await post_offer(server, await an_offer())
        candidates = [line for line in answer.text.splitlines() if line.startswith("a=candidate:")]
        assert candidates
        assert all(" 198.51.100.7 " in line and line.endswith(" typ host") for line in candidates)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as client:
            assert (await client.post(f"{answer.headers['location']}/hangup")).status_code == 200


def test_the_announced_address_replaces_those_of_its_family() -> None:
    assert announced(ANSWER, None) == ANSWER
    assert announced(ANSWER, "198.51.100.7").splitlines() == [HOST.format(address="198.51.100.7"), "a=mid:0"]
    assert announced(ANSWER, "2001:db8::7").splitlines() == [HOST.format(address="2001:db8::7"), "a=mid:0"]


@pytest.mark.parametrize("blank", [" ", "  ", "\t"])
@pytest.mark.parametrize("name", ["0b7e6f2c-55a5-4f7a-8a3e-1f4d0a3f9b7e.local", "A.LOCAL", "host.example", "1.2.3"])
async def test_names_are_not_looked_up(name: str, blank: str) -> None:
    offer = await an_offer()
    line = HOST.format(address=name).replace(" ", blank)
    checked = check_offer(f"{offer}{line}\r\na=end-of-candidates\r\n")
    assert name not in checked
    assert "end-of-candidates" not in checked


@pytest.mark.parametrize("missing", ["a=setup", "a=fingerprint"])
async def test_an_offer_without_keys_is_refused(missing: str) -> None:
    offer = "\r\n".join(line for line in (await an_offer()).splitlines() if not line.startswith(missing))
    with pytest.raises(InvalidFrame, match="must have a=fingerprint and a=setup"):
        check_offer(f"{offer}\r\n")


@pytest.mark.parametrize("length", [256, 257])
async def test_the_name_of_an_offer_is_short(length: int) -> None:
    """It is in each packet that the server sends to the addresses of the offer."""
    offer = re.sub("a=ice-ufrag:.*", f"a=ice-ufrag:{'a' * length}", await an_offer())
    with nullcontext() if length == 256 else pytest.raises(InvalidValue, match="at most 256 characters"):
        check_offer(offer)


async def test_an_offer_names_a_bounded_number_of_addresses() -> None:
    offer = "\r\n".join(line for line in (await an_offer()).splitlines() if not line.startswith("a=candidate"))
    many = [HOST.format(address=f"10.0.0.{number}") for number in range(MAX_CANDIDATES + 1)]
    check_offer("\r\n".join([offer, *many[1:], ""]))
    with pytest.raises(Exception, match="at most 16 candidates"):
        check_offer("\r\n".join([offer, *many, ""]))


@pytest.mark.parametrize(
    "server",
    [
        *("http://turn.example", "stun:", "turn:host:1?transport=sctp"),
        *(
            "turns:host?transport=udp",
            "stun:host?transport=udp",
        ),  # the library ignores the one, and fails over the other
    ],
)
def test_ice_servers_are_urls(server: str) -> None:
    with pytest.raises(ConfigurationError, match="stun:HOST:PORT"):
        load(["--webrtc.ice_servers", server])


def test_one_ice_server_of_each_kind() -> None:
    load(["--webrtc.ice_servers", "stun:host:1,turns:host:2?transport=tcp"])
    with pytest.raises(ConfigurationError, match="at most one STUN and one TURN"):
        load(["--webrtc.ice_servers", "turn:host:1,turns:host:2"])


async def test_a_turn_server_that_gives_no_address_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:  # it does not listen
        nobody.bind(("127.0.0.1", 0))
        url = f"turn:127.0.0.1:{nobody.getsockname()[1]}?transport=tcp"
        async with live_server(webrtc={"ice_servers": (url,)}) as server, webrtc_call(server):
            assert f"{url} of webrtc.ice_servers gave no address for a call" in caplog.messages


class _SlowTurn(asyncio.DatagramProtocol):
    """A TURN server that gives an address when ``told``, and notes when it is asked for one and gets it back."""

    def __init__(self) -> None:
        self.asked, self.told, self.released = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        message = stun.parse_message(data)
        if message.message_method == stun.Method.ALLOCATE:
            self._tasks.add(asyncio.create_task(self._give(message, addr)))
        elif message.message_method == stun.Method.REFRESH and message.attributes["LIFETIME"] == 0:
            self._answer(message, addr, LIFETIME=0)
            self.released.set()

    async def _give(self, message: stun.Message, addr: tuple[str, int]) -> None:
        self.asked.set()
        await self.told.wait()
        relayed = {"XOR-MAPPED-ADDRESS": addr, "XOR-RELAYED-ADDRESS": ("127.0.0.1", 9)}
        self._answer(message, addr, LIFETIME=600, **relayed)

    def _answer(self, message: stun.Message, addr: tuple[str, int], **fields: Any) -> None:
        kind = stun.Class.RESPONSE
        self._transport.sendto(bytes(stun.Message(message.message_method, kind, message.transaction_id, fields)), addr)


@contextlib.asynccontextmanager
async def slow_turn(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[_SlowTurn, str]]:
    """A TURN server and its URL. The server waits for its address as long as that takes."""
    monkeypatch.setattr(Connection.get_component_candidates, "__defaults__", (PATIENCE_SEC,))  # not 5 seconds
    transport, turn = await asyncio.get_running_loop().create_datagram_endpoint(_SlowTurn, ("127.0.0.1", 0))
    async with asyncio.timeout(PATIENCE_SEC):
        yield turn, f"turn:127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    transport.close()


async def test_a_caller_that_leaves_while_addresses_are_gathered_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server asked for on the caller's behalf arrives after the caller has gone, and is given back."""
    offer = await an_offer()
    async with slow_turn(monkeypatch) as (turn, url), live_server(webrtc={"ice_servers": (url,)}) as server:
        asking = asyncio.create_task(post_offer(server, offer))
        await turn.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await server.until(lambda: not any(one.busy for one in server.running._connections._open))
        turn.told.set()
        await turn.released.wait()


async def test_a_server_that_drains_while_addresses_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = await an_offer()
    async with (
        slow_turn(monkeypatch) as (turn, url),
        live_server(webrtc={"ice_servers": (url,)}, still_answers=False) as server,
    ):
        asking = asyncio.create_task(post_offer(server, offer))
        await turn.asked.wait()
        server.app.drain(PATIENCE_SEC)
        await server.until(lambda: not server.sessions)
        turn.told.set()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        await turn.released.wait()
