"""Sessions that go on at another server: handed over, found at another address, or lost with their store."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace
from support.scripted_server import Peer, created, scripted_server
from websockets.exceptions import ConnectionClosed

from omni_ws.client import (
    AudioChunk,
    ClientLimits,
    Closing,
    ConnectionFailed,
    Final,
    Reconnected,
    ResponseStarted,
    ResumableChanged,
    Resumed,
    TextChunk,
    connect,
)
from omni_ws.client.connection import (
    Route,
    Routes,
)
from omni_ws.errors import InvalidValue, SessionNotFound, SessionTimeout, ShuttingDown
from omni_ws.wire.server_frames import SessionClosingFrame, SessionResumedFrame, SessionUpdatedFrame, error_frame
from omni_ws.wire.session_config import effective

AT_ONCE = ClientLimits(reconnect_delays=(0, 0, 0))
HANDED_OVER = SessionClosingFrame(reason="shutting_down", retryable=True, time_left_ms=0, resume="now")


def asked(peer: Peer) -> dict[str, str]:
    """The query of the handshake."""
    request = peer.websocket.request
    assert request is not None
    return {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}


async def resume(peer: Peer, next_sequence_id: int, *, last_output: int) -> None:
    assert asked(peer)["last_output"] == str(last_output)
    peer.output_sequence_id = last_output + 1
    await peer.send(
        SessionResumedFrame(session_id="sess_0", resume_token="tok_b", next_sequence_id=next_sequence_id, replayed=0)
    )


async def say_resumable(peer: Peer, resumable: bool) -> None:
    config = effective({})
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    await peer.send(SessionUpdatedFrame(**fields, resumable=resumable))


async def create(peer: Peer) -> None:
    await peer.send(replace(created(peer.number), resume_token="tok_a"))


async def half_an_answer(peer: Peer) -> None:
    await create(peer)
    await peer.request()
    await peer.ack(1)
    await peer.started("req_a")
    await peer.output("req_a", "text", text="one ")


# handed over


async def test_a_session_that_is_handed_over_goes_on_at_once() -> None:
    async def drains(peer: Peer) -> None:
        await half_an_answer(peer)
        await peer.send(HANDED_OVER)
        await peer.close(1012)

    async def goes_on(peer: Peer) -> None:
        await resume(peer, 1, last_output=0)
        await peer.output("req_a", "text", text="two")
        await peer.final("req_a")
        await peer.until_closed()

    # No attempt but the first is in time.
    limits = ClientLimits(reconnect_delays=(0, 3600))
    async with scripted_server(drains, goes_on) as url, connect(url, reconnect=True, limits=limits) as session:
        await session.send_text("x", end=True)
        events = [event async for event in session.response()]
    assert [event.text for event in events if isinstance(event, TextChunk)] == ["one ", "two"]
    assert [event for event in events if isinstance(event, Resumed)] == [Resumed("sess_0", 0, 0)]
    assert not [event for event in events if isinstance(event, Closing)]


async def test_a_client_that_does_not_reconnect_is_told_that_it_could() -> None:
    async def drains(peer: Peer) -> None:
        await create(peer)
        await peer.send(HANDED_OVER)
        await peer.close(1012)

    async with scripted_server(drains) as url, connect(url) as session:
        assert [event async for event in session.events()] == [Closing("shutting_down", True, 0, resumes=True)]
        with pytest.raises(ShuttingDown):
            await session.send_text("x")


# a store that does not work


async def test_a_session_that_the_store_has_from_before_is_not_taken_from_there() -> None:
    async def fails(peer: Peer) -> None:
        await half_an_answer(peer)
        await say_resumable(peer, False)
        peer.drop()

    async def has_none(peer: Peer) -> None:
        assert asked(peer)["resumable"] == "false"
        await peer.error(SessionNotFound("none"))
        await peer.close(4404)

    async def fresh(peer: Peer) -> None:
        assert "resumable" not in asked(peer)
        await half_an_answer(peer)
        await peer.final("req_a")
        await peer.until_closed()

    async with (
        scripted_server(fails, has_none, fresh) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("x", end=True)
        events = [event async for event in session.response()]
        assert session.resumable
    changes = [event for event in events if isinstance(event, ResumableChanged | Reconnected)]
    assert changes == [ResumableChanged(False), Reconnected("sess_2", 1)]
    assert isinstance(changes[1], Reconnected)
    assert isinstance(changes[1].error, SessionNotFound)


async def test_a_store_that_works_again_is_told_and_the_session_is_resumed_anywhere() -> None:
    async def recovers(peer: Peer) -> None:
        await half_an_answer(peer)
        for resumable in (False, False, True):
            await say_resumable(peer, resumable)
        peer.drop()

    async def goes_on(peer: Peer) -> None:
        assert "resumable" not in asked(peer)
        await resume(peer, 1, last_output=0)
        await peer.started("req_b")  # and not what was told of the store
        await peer.final("req_a")
        await peer.until_closed()

    async with (
        scripted_server(recovers, goes_on) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("x", end=True)
        events = [event async for event in session.response()]
    assert [event.resumable for event in events if isinstance(event, ResumableChanged)] == [False, True]
    assert [event.request_id for event in events if isinstance(event, ResponseStarted)] == ["req_a", "req_b"]


async def test_what_is_said_of_the_store_is_no_reply_to_a_configuration() -> None:
    async def server(peer: Peer) -> None:
        await create(peer)
        frame = await peer.receive()
        await say_resumable(peer, False)
        await peer.grant(frame)
        await peer.until_closed()

    async with scripted_server(server) as url, connect(url) as session:
        assert (await session.configure(instructions="brief")).instructions == "brief"
        assert not session.resumable


async def test_a_session_with_less_input_than_was_acknowledged_is_left_for_a_fresh_one() -> None:
    async def loses(peer: Peer) -> None:
        await half_an_answer(peer)
        peer.drop()

    async def has_less(peer: Peer) -> None:
        await resume(peer, 0, last_output=0)
        with pytest.raises(ConnectionClosed):
            await peer.receive()

    async def fresh(peer: Peer) -> None:
        await half_an_answer(peer)
        await peer.final("req_a")
        await peer.until_closed()

    async with scripted_server(loses, has_less, fresh) as url, connect(url, reconnect=True, limits=AT_ONCE) as session:
        assert (await session.ask_text("x")).text == "one "
        assert session.session_id == "sess_2"


async def test_a_client_whose_sign_of_life_came_too_late_tries_again() -> None:
    async def loses(peer: Peer) -> None:
        await half_an_answer(peer)
        peer.drop()

    async def heard_nothing(peer: Peer) -> None:
        await peer.send(error_frame(SessionTimeout("the client does not answer")))
        await peer.close(4408)

    async def goes_on(peer: Peer) -> None:
        assert asked(peer)["resume_token"] == "tok_a"
        await resume(peer, 1, last_output=0)
        await peer.output("req_a", "text", text="two")
        await peer.final("req_a")
        await peer.until_closed()

    async with (
        scripted_server(loses, heard_nothing, goes_on) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        assert (await session.ask_text("x")).text == "one two"


# audio that the store does not know of


@pytest.mark.parametrize("binary", [False, True])
async def test_audio_that_comes_again_is_heard_once(binary: bool) -> None:
    async def send(peer: Peer, number: int, start_ms: int) -> None:
        payload = bytes([number]) * 960  # 20 ms
        if binary:
            await peer.binary_audio("req_a", payload, start_ms)
        else:
            fields = {"payload": payload, "format": "pcm16", "sample_rate": 24_000, "start_ms": start_ms}
            await peer.output("req_a", "audio", **fields)

    async def loses(peer: Peer) -> None:
        await half_an_answer(peer)
        for number in range(3):
            await send(peer, number, 20 * number)
        peer.drop()

    async def goes_on(peer: Peer) -> None:
        await resume(peer, 1, last_output=3)
        for number, start_ms in ((1, 20), (2, 50), (3, 70)):
            await send(peer, number, start_ms)
        await peer.final("req_a")
        await peer.until_closed()

    async with (
        scripted_server(loses, goes_on) as url,
        connect(url, reconnect=True, limits=AT_ONCE, binary=binary) as session,
    ):
        await session.send_text("x", end=True)
        pieces = [event async for event in session.response() if isinstance(event, AudioChunk)]
    assert [(piece.start_ms, piece.audio[0], len(piece.audio)) for piece in pieces] == [
        *[(20 * number, number, 960) for number in range(3)],
        (60, 2, 480),
        (70, 3, 960),
    ]


# addresses


async def fresh_answer(peer: Peer) -> None:
    await half_an_answer(peer)
    await peer.final("req_a")
    await peer.until_closed()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_of_several_servers_the_first_that_is_there_is_taken() -> None:
    async with scripted_server(fresh_answer) as url, connect([f"127.0.0.1:{closed_port()}", url]) as session:
        assert (await session.ask_text("x")).text == "one "
    nowhere = [f"ws://127.0.0.1:{closed_port()}/{name}" for name in "ab"]
    with pytest.raises(ConnectionFailed, match="/b"):
        async with connect(nowhere):
            pytest.fail("nobody is there")
    with pytest.raises(InvalidValue, match="no URL"):
        async with connect([]):
            pytest.fail("no address")


async def test_a_server_that_is_full_is_no_reason_not_to_ask_the_next() -> None:
    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with (
        await asyncio.start_server(full, "127.0.0.1", 0) as server,
        scripted_server(fresh_answer) as url,
        connect([f"127.0.0.1:{server.sockets[0].getsockname()[1]}", url]) as session,
    ):
        assert (await session.ask_text("x")).text == "one "


@pytest.mark.virtual_clock
async def test_a_server_that_is_stopped_has_its_share_of_the_time_and_is_asked_last_from_then_on() -> None:
    """The kernel takes connections for a process that is stopped."""
    asked_times: list[float] = []

    async def stopped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_times.append(asyncio.get_running_loop().time())
        await reader.read()
        writer.close()

    async def drops(peer: Peer) -> None:
        await half_an_answer(peer)
        peer.drop()

    async def goes_on(peer: Peer) -> None:
        await resume(peer, 1, last_output=0)
        await peer.final("req_a")
        await peer.until_closed()

    loop = asyncio.get_running_loop()
    async with (
        await asyncio.start_server(stopped, "127.0.0.1", 0) as server,
        scripted_server(drops, goes_on) as url,
    ):
        began = loop.time()
        urls = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}", url]
        async with connect(urls, reconnect=True, limits=AT_ONCE, open_timeout=10) as session:
            assert loop.time() - began == pytest.approx(5, abs=0.5)
            assert (await session.ask_text("x")).text == "one "
    assert len(asked_times) == 1


@pytest.mark.virtual_clock
async def test_behind_a_front_a_server_that_is_stopped_costs_a_moment_and_then_twice_as_long() -> None:
    """The front picks a server anew for each connection, and does not know that one of them is stopped."""
    took: list[float] = []

    async def drops(peer: Peer) -> None:
        await half_an_answer(peer)
        peer.drop()

    async def goes_on(peer: Peer) -> None:
        await resume(peer, 1, last_output=0)
        await peer.final("req_a")
        await peer.until_closed()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began = loop.time()
        took.append(0.0)
        if len(took) in (2, 3):
            await reader.read()  # its request
            while await reader.read(1 << 16):
                pass
            took[-1] = loop.time() - began
        else:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))
        writer.close()

    loop = asyncio.get_running_loop()
    async with (
        scripted_server(drops, goes_on) as url,
        await asyncio.start_server(front, "127.0.0.1", 0) as server,
        connect(
            f"127.0.0.1:{server.sockets[0].getsockname()[1]}", reconnect=True, limits=AT_ONCE, open_timeout=10
        ) as session,
    ):
        assert (await session.ask_text("x")).text == "one "
    assert took == [0, pytest.approx(1.5, abs=0.1), pytest.approx(3, abs=0.1), 0]


def resolves_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    async def found(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "replicas.example"
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)


async def test_names_are_resolved_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = asyncio.Barrier(2)

    async def found(host: str, port: int, **_: Any) -> list[Any]:
        await together.wait()
        if host == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    url = "ws://replicas.example/v1/streaming_input"
    ways = await Routes(["ws://gone.example", url]).in_order()
    assert ways == [Route(url, "127.0.0.1"), Route(url, "127.0.0.2")]


async def test_a_name_that_gets_a_new_address_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loses(peer: Peer) -> None:
        await half_an_answer(peer)
        addresses[:] = ["127.0.0.2", "127.0.0.1"]  # nobody listens at the first
        peer.drop()

    async def goes_on(peer: Peer) -> None:
        await resume(peer, 1, last_output=0)
        request = peer.websocket.request
        assert request is not None
        assert request.headers["Host"].startswith("replicas.example")
        await peer.final("req_a")
        await peer.until_closed()

    async with scripted_server(loses, goes_on) as url:
        addresses = ["127.0.0.1", "127.0.0.3"]
        resolves_to(monkeypatch, addresses)
        named = url.replace("127.0.0.1", "replicas.example")
        async with connect(named, reconnect=True, limits=AT_ONCE) as session:
            await session.send_text("x", end=True)
            events = [event async for event in session.response()]
    assert isinstance(events[-1], Final)
    assert any(isinstance(event, Resumed) for event in events)


async def test_routes_in_the_order_in_which_they_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.3"]
    resolves_to(monkeypatch, addresses)
    routes = Routes("http://replicas.example/")

    async def tried() -> list[str | None]:
        return [route.address for route in await routes.in_order()]

    assert await tried() == addresses
    routes.current = Route("ws://replicas.example/v1/streaming_input", "192.0.2.2")
    assert await tried() == ["192.0.2.2", "192.0.2.1", "192.0.2.3"]
    routes.fails()
    assert await tried() == ["192.0.2.1", "192.0.2.3", "192.0.2.2"]
    routes.current = Route("ws://replicas.example/v1/streaming_input", "192.0.2.1")
    routes.fails()
    assert await tried() == ["192.0.2.3", "192.0.2.2", "192.0.2.1"]
    routes.works()
    assert await tried() == ["192.0.2.1", "192.0.2.3", "192.0.2.2"]
    del addresses[1:]
    assert await tried() == [None]  # without a choice
    addresses.clear()
    with pytest.raises(OSError, match="not known"):
        await routes.in_order()


async def test_a_proxy_resolves_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.9:3128")
    resolves_to(monkeypatch, [])
    assert await Routes("ws://replicas.example").in_order() == [Route("ws://replicas.example/v1/streaming_input")]
