"""The deadlines of an HTTP connection on the virtual clock, just before and just after each expires."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest
from support.http_server import RoutedApplication, serving
from support.raw_http import chunked, raw_client, request, websocket_upgrade

from omni_ws.errors import SessionTimeout
from omni_ws.transport.http.application import HttpLimits, UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

LIMITS = HttpLimits(
    header_timeout_sec=10,
    body_timeout_sec=30,
    min_body_rate=None,
    keepalive_timeout_sec=75,
    write_timeout_sec=20,
    linger_timeout_sec=5,
)
#: Tolerance: the server arms its timers in the virtual instant in which the client acts, or a few passes later.
JUST = 0.5


def now() -> float:
    return asyncio.get_running_loop().time()


async def measure(exchange: HttpExchange) -> None:
    await exchange.respond_json(200, {"received": len(await exchange.read_body(10_000_000))})


async def hello(exchange: HttpExchange) -> None:
    await exchange.respond(200, body=b"hello")


APPLICATION = RoutedApplication(
    handlers={"GET /": hello, "POST /measure": measure}, upgrades={"/ws": lambda _: UpgradeDecision()}
)


async def test_silent_connection_is_closed_without_a_word() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        begin = now()
        assert await client.rest() == b""
        assert now() - begin == pytest.approx(10, abs=JUST)


@pytest.mark.parametrize("together", [True, False])
async def test_an_empty_line_behind_a_body_leaves_the_connection_idle(together: bool) -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        posted = request("POST", "/measure", body=b"abc")
        await client.send(posted + b"\r\n" if together else posted)
        assert (await client.response()).json() == {"received": 3}
        if not together:
            await client.send(b"\r")
            await client.send(b"\n")
        await asyncio.sleep(70)
        await client.send(request("GET", "/"))
        assert (await client.response()).body == b"hello"
        await client.send(b"\r\n")
        begin = now()
        assert await client.rest() == b""
        assert now() - begin == pytest.approx(75, abs=JUST)


@pytest.mark.parametrize("behind", [b"", b"\r\n"])
async def test_a_client_that_sends_no_more_is_not_waited_for(behind: bytes) -> None:
    async def work(exchange: HttpExchange) -> None:
        await asyncio.sleep(1)
        await exchange.respond(200)

    app = RoutedApplication(handlers={"GET /": work})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        begin = now()
        await client.send(request("GET", "/") + behind)
        client.finish_sending()
        assert (await client.response()).status == 200
        assert await client.rest() == b""
        assert now() - begin == pytest.approx(1, abs=JUST)


@pytest.mark.parametrize("dripping", [False, True], ids=["stalled", "byte by byte"])
async def test_slow_head_is_answered_by_408(dripping: bool) -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        begin = now()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        for _ in range(9 if dripping else 0):
            await asyncio.sleep(1)
            await client.send(b"x")
        response = await client.response()
        assert now() - begin == pytest.approx(10, abs=JUST)
        assert (response.status, response.error["code"]) == (408, SessionTimeout.wire.code)
        assert await client.rest() == b""


async def test_head_in_time_is_answered() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        await asyncio.sleep(9)
        await client.send(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(9)
        await client.send(b"Host: x\r\n\r\n")
        assert (await client.response()).status == 200


async def test_kept_alive_connection_is_closed_after_its_time() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        for pause in (0, 74):
            await asyncio.sleep(pause)
            await client.send(request("GET", "/"))
            assert (await client.response()).status == 200
        begin = now()
        assert await client.rest() == b""
        assert now() - begin == pytest.approx(75, abs=JUST)


async def test_head_timer_runs_again_on_a_kept_alive_connection() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        await client.response()
        await asyncio.sleep(70)
        await client.send(b"GET / HT")
        begin = now()
        assert (await client.response()).status == 408
        assert now() - begin == pytest.approx(10, abs=JUST)


async def test_stalled_body_is_answered_by_408() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Transfer-Encoding: chunked"))
        for _ in range(5):
            await asyncio.sleep(29)
            await client.send(chunked(b"part", end=False))
        begin = now()
        response = await client.response()
        assert now() - begin == pytest.approx(30, abs=JUST)
        assert (response.status, response.error["code"], response.headers["connection"]) == (
            408,
            "session_timeout",
            "close",
        )
        await client.send(chunked(b"too late"))
        assert await client.rest() == b""


@pytest.mark.parametrize(("every", "size", "seconds"), [(29, 1, 30), (10, 4_900, 1020), (10, 5_000, None)])
async def test_slow_body_is_answered_by_408(every: float, size: int, seconds: float | None) -> None:
    """After the time-out, 500 bytes per second are required: 4,900 bytes in 10 s fall behind by 0.2 s each time."""
    limits = replace(LIMITS, min_body_rate=500)
    async with serving(APPLICATION, limits=limits) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Transfer-Encoding: chunked"))
        begin, answer = now(), asyncio.create_task(client.response())
        while not answer.done() and now() - begin < 3000:
            await asyncio.sleep(every)
            await client.send(chunked(bytes(size), end=False))
        if seconds is None:
            await client.send(b"0\r\n\r\n")
            assert (await answer).status == 200
            return
        refusal = await answer
        assert (refusal.status, refusal.error["code"]) == (408, "session_timeout")
        assert "500 bytes per second" in refusal.error["message"]
        assert now() - begin == pytest.approx(seconds, abs=every + JUST)


async def test_body_timer_waits_for_100_continue() -> None:
    async def think_first(exchange: HttpExchange) -> None:
        await asyncio.sleep(100)
        await measure(exchange)

    app = RoutedApplication(handlers={"POST /": think_first})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/", "Expect: 100-continue", "Content-Length: 3"))
        assert (await client.head())[1] == 100
        await asyncio.sleep(29)
        await client.send(b"abc")
        assert (await client.response()).json() == {"received": 3}


async def test_body_timer_stands_still_while_we_do_not_read() -> None:
    async def think_first(exchange: HttpExchange) -> None:
        await asyncio.sleep(100)
        await measure(exchange)

    app = RoutedApplication(handlers={"POST /": think_first})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        client.writer.write(request("POST", "/", body=b"b" * 1_000_000))
        response = await client.response()
        assert response.json() == {"received": 1_000_000}


@pytest.mark.parametrize("timeout", [None, 100.0])
async def test_handler_sets_its_own_body_timeout(timeout: float | None) -> None:
    async def patient(exchange: HttpExchange) -> None:
        assert exchange.body_timeout == 30
        exchange.allow_silence(timeout)
        await measure(exchange)

    app = RoutedApplication(handlers={"POST /": patient, "POST /measure": measure})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/", "Content-Length: 3", body=b"a"))
        await asyncio.sleep(99)
        await client.send(b"bc")
        assert (await client.response()).status == 200
        # The next request on the connection has the default time-out again.
        await client.send(request("POST", "/measure", "Content-Length: 3"))
        begin = now()
        assert (await client.response()).status == 408
        assert now() - begin == pytest.approx(30, abs=JUST)


async def test_nothing_times_out_while_a_handler_works() -> None:
    async def work(exchange: HttpExchange) -> None:
        await asyncio.sleep(3600)
        await exchange.respond(200)

    app = RoutedApplication(handlers={"GET /": work})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert (await client.response()).status == 200


async def test_client_that_does_not_read_is_dropped() -> None:
    ended = asyncio.Event()

    async def write_for_ever(exchange: HttpExchange) -> None:
        try:
            await exchange.start(200)
            while True:
                await exchange.write(b"x" * 100_000)
        finally:
            ended.set()

    app = RoutedApplication(handlers={"GET /": write_for_ever})
    async with serving(app, limits=LIMITS) as door:
        peer = socket.create_connection(("127.0.0.1", door.port))
        peer.sendall(request("GET", "/"))
        begin = now()
        await ended.wait()
        assert now() - begin == pytest.approx(20, abs=JUST)
        peer.close()


class AnotherProcess:
    """Has to serve ``/elsewhere``."""

    connections_elsewhere = 0

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.given = asyncio.Event()

    def destination(self, target: bytes) -> int | None:
        return 1 if target == b"/elsewhere" else None

    def pass_on(self, serial: int, connection: int, received: bytes) -> None:
        os.close(connection)
        self.received.append(received)
        self.given.set()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_connection_is_passed_on_once_its_client_has_read_or_dropped(reads: bool) -> None:
    async def answer(exchange: HttpExchange) -> None:
        await exchange.respond(200, body=b"x" * 60_000)  # which the transport buffers without pausing the handler

    other = AnotherProcess()
    app = RoutedApplication(handlers={"GET /": answer})
    async with serving(app, limits=LIMITS, elsewhere=other) as door:
        with socket.socket(fileno=os.dup(door.server.sockets[0].fileno())) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", door.port))
        peer.sendall(request("GET", "/") + request("GET", "/elsewhere"))
        begin = now()
        await asyncio.sleep(19)
        assert (len(door.connections), other.received) == (1, [])
        if reads:
            peer.setblocking(False)
            received = b""
            while len(received) < 60_000:
                received += await asyncio.get_running_loop().sock_recv(peer, 65536)
            await other.given.wait()
            assert other.received[0].startswith(b"GET /elsewhere HTTP/1.1\r\n")
        assert await door.connections.wait_idle(10)
        assert now() - begin == pytest.approx(19 if reads else 20, abs=JUST)
        assert other.given.is_set() is reads
        peer.close()


def silent_after(started: asyncio.Event, gone: asyncio.Event, *, filler: bytes | None) -> RoutedApplication:
    """A handler that stalls: before its response, or within it, with a ``filler``."""

    async def fall_silent(exchange: HttpExchange) -> None:
        try:
            if filler is not None:
                await exchange.start(200, filler=filler)
                await exchange.write(b"begun")
            started.set()
            await asyncio.sleep(3600)
            await exchange.respond(200, body=b"late")
        finally:
            gone.set()

    return RoutedApplication(handlers={"GET /": fall_silent})


@pytest.mark.parametrize("filler", [None, b"..."], ids=["before the answer", "within the answer"])
async def test_a_peer_that_closed_is_noticed_at_once_though_nothing_is_sent(filler: bytes | None) -> None:
    started, gone = asyncio.Event(), asyncio.Event()
    async with serving(silent_after(started, gone, filler=filler), limits=LIMITS) as door:
        async with raw_client(door.port) as client:
            await client.send(request("GET", "/"))
            await started.wait()
            if filler is not None:
                assert (await client.head())[1] == 200
                assert await client.chunk() == b"begun"
        begin = now()
        await gone.wait()
        assert now() - begin < 1


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("filler", [None, b"...", b""], ids=["before", "within", "within, nothing to say"])
async def test_a_peer_that_finished_sending_is_kept_and_asked_ever_less_often(filler: bytes | None) -> None:
    started, gone = asyncio.Event(), asyncio.Event()
    application = silent_after(started, gone, filler=filler)
    async with serving(application, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        await started.wait()
        client.finish_sending()
        begin = now()
        await asyncio.sleep(60)
        assert not gone.is_set()
        if filler is None:
            times = []
            while now() - begin < 100:
                assert (await client.head())[1] == 100
                times.append(now() - begin)
            assert len(times) == pytest.approx(23, abs=1)
        else:
            await client.head()
            assert await client.chunk() == b"begun"
            if filler:
                assert await client.chunk() == filler
        client.reset()
        await gone.wait()


async def test_lingering_has_a_bound_in_time() -> None:
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/nowhere", "Content-Length: 100"))
        assert (await client.response()).status == 404
        begin = now()
        assert await client.rest() == b""  # nothing more comes, and the client is told at once
        assert now() - begin < JUST
        assert await door.connections.wait_idle(100)
        assert now() - begin == pytest.approx(5, abs=JUST)


async def test_drain_waits_as_long_as_it_is_told() -> None:
    started = asyncio.Event()

    async def work(exchange: HttpExchange) -> None:
        started.set()
        await asyncio.sleep(29)
        await exchange.respond(200)

    app = RoutedApplication(handlers={"GET /": work})
    async with serving(app, limits=LIMITS) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        await started.wait()
        door.connections.close_idle()
        assert not await door.connections.wait_idle(28)
        assert await door.connections.wait_idle(2)
        assert (await client.response()).status == 200


async def test_no_http_timer_outlives_the_upgrade() -> None:
    async with serving(APPLICATION, limits=LIMITS, ping_interval=None) as door, raw_client(door.port) as client:
        await client.send(websocket_upgrade("/ws"))
        assert (await client.response()).status == 101
        await asyncio.sleep(1000)
        await client.send(b"\x81\x82\x00\x00\x00\x00hi")
        assert await client.reader.readexactly(4) == b"\x81\x02hi"


async def test_hours_pass_in_an_instant() -> None:
    begin = now()
    await asyncio.sleep(36_000)
    assert now() - begin >= 36_000
