"""HTTP/1.1 and WebSocket on one port, and on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from support.exhausted import no_more_files
from support.http_server import RoutedApplication, serving, tls_contexts
from support.patience import PATIENCE_SEC
from support.raw_http import chunked, raw_client, request, websocket_upgrade
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection

from omni_ws.errors import OriginNotAllowed, Unauthenticated
from omni_ws.transport.http.application import UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest

pytestmark = pytest.mark.usefixtures("no_task_left")

MASKED_HI = b"\x81\x82\x00\x00\x00\x00hi"
ECHOED_HI = b"\x81\x02hi"


async def health(exchange: HttpExchange) -> None:
    await exchange.respond(200, [("Content-Type", "text/plain")], b"ok\n")


async def count_parts(exchange: HttpExchange) -> None:
    """Writes each part of the body back before it reads the next one."""
    await exchange.start(200, [("Content-Type", "application/x-ndjson")])
    async for part in exchange.body():
        await exchange.write(b"%d\n" % len(part))


def application(**upgrades: UpgradeDecision) -> RoutedApplication:
    decisions = {"/ws": UpgradeDecision()} | {f"/{name}": decision for name, decision in upgrades.items()}

    def accept(handshake: HttpRequest) -> UpgradeDecision:
        return decisions[handshake.path]

    handlers = {"GET /health": health, "POST /parts": count_parts}
    return RoutedApplication(handlers=handlers, upgrades=dict.fromkeys(decisions, accept))


async def test_http_and_websocket_share_one_port() -> None:
    async with serving(application()) as door, connect(f"ws://127.0.0.1:{door.port}/ws") as socket:
        await socket.send("hello")
        async with raw_client(door.port) as client:
            await client.send(request("GET", "/health"))
            assert (await client.response()).body == b"ok\n"
        assert await socket.recv() == "hello"
        await socket.send(b"\0" * 500_000)
        assert len(await socket.recv()) == 500_000
        assert await (await socket.ping()) >= 0


async def test_kept_alive_connection_can_be_upgraded() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        for _ in range(2):
            await client.send(request("GET", "/health"))
            assert (await client.response()).status == 200
        assert len(door.connections) == 1
        await client.send(websocket_upgrade("/ws"))
        assert (await client.response()).status == 101
        assert len(door.connections) == 0
        await client.send(MASKED_HI)
        assert await client.reader.readexactly(4) == ECHOED_HI


async def test_requests_and_upgrade_pipelined_in_one_packet() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/health") * 2 + websocket_upgrade("/ws") + MASKED_HI)
        assert [(await client.response()).status for _ in range(3)] == [200, 200, 101]
        assert await client.reader.readexactly(4) == ECHOED_HI


async def test_first_frame_in_the_packet_of_the_handshake() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(websocket_upgrade("/ws") + MASKED_HI + MASKED_HI[:5])
        assert (await client.response()).headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert await client.reader.readexactly(4) == ECHOED_HI
        await client.send(MASKED_HI[5:])
        assert await client.reader.readexactly(4) == ECHOED_HI


async def test_handshake_byte_by_byte() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        for byte in websocket_upgrade("/ws") + MASKED_HI:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.response()).status == 101
        assert await client.reader.readexactly(4) == ECHOED_HI


async def test_full_duplex_upload() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/parts", "Transfer-Encoding: chunked"))
        _, status, _ = await client.head()
        assert status == 200
        for size in (5, 70_000, 1):
            await client.send(chunked(b"a" * size, end=False))
            counted = 0
            while counted < size:
                counted += int(await client.chunk())
        await client.send(b"0\r\n\r\n")
        assert await client.chunk() == b""
        await client.send(request("GET", "/health"))
        assert (await client.response()).status == 200


async def test_each_path_chooses_its_subprotocol() -> None:
    chosen = application(native=UpgradeDecision(subprotocol="omni.v1+binary"))
    async with serving(chosen) as door:
        offered = ["omni.v1+json", "omni.v1+binary"]
        async with connect(f"ws://127.0.0.1:{door.port}/native", subprotocols=offered) as socket:  # type: ignore[arg-type]
            assert socket.subprotocol == "omni.v1+binary"
        async with connect(f"ws://127.0.0.1:{door.port}/ws", subprotocols=offered) as socket:  # type: ignore[arg-type]
            assert socket.subprotocol is None
        async with connect(f"ws://127.0.0.1:{door.port}/ws") as socket:
            assert socket.subprotocol is None


async def test_path_brings_its_own_connection_and_message_limit() -> None:
    class Marked(ServerConnection):
        label = "mine"

    seen: list[ServerConnection] = []

    async def remember(connection: ServerConnection) -> None:
        seen.append(connection)
        await connection.wait_closed()

    decided = application(small=UpgradeDecision(connection=Marked, max_size=10))
    async with serving(decided, on_websocket=remember, max_size=1000, ping_interval=7, close_timeout=3) as door:
        async with connect(f"ws://127.0.0.1:{door.port}/small") as small:
            await small.send(b"x" * 11)
            await small.wait_closed()
            assert small.close_code == 1009
        async with connect(f"ws://127.0.0.1:{door.port}/ws"):
            pass
    assert [type(connection) for connection in seen] == [Marked, ServerConnection]
    assert seen[1].protocol.max_message_size == 1000
    assert (seen[1].ping_interval, seen[1].close_timeout) == (7, 3)


async def test_application_refuses_an_upgrade_over_http() -> None:
    def refuse(handshake: HttpRequest) -> UpgradeDecision:
        assert handshake.offered_subprotocols == ("a", "b")
        raise Unauthenticated("no such key")

    refusing = RoutedApplication(upgrades={"/ws": refuse})
    async with serving(refusing) as door:
        async with raw_client(door.port) as client:
            await client.send(websocket_upgrade("/ws", "Sec-WebSocket-Protocol: a, b"), MASKED_HI)
            response = await client.response()
            assert (response.status, response.error["code"]) == (401, "unauthenticated")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["connection"] == "close"
            assert await client.rest() == b""
        async with raw_client(door.port) as client:
            await client.send(websocket_upgrade("/elsewhere"))
            assert (await client.response()).status == 404


async def test_failing_application_refuses_an_upgrade_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def fail(handshake: HttpRequest) -> UpgradeDecision:
        raise ValueError("a secret")

    async with serving(RoutedApplication(upgrades={"/ws": fail})) as door, raw_client(door.port) as client:
        await client.send(websocket_upgrade("/ws"))
        response = await client.response()
        assert (response.status, response.error["code"]) == (500, "engine_failed")
        assert b"secret" not in response.body
        assert "a secret" in caplog.text


async def test_upgrade_of_a_foreign_origin_is_refused() -> None:
    app = RoutedApplication(upgrades={"/ws": lambda _: UpgradeDecision()}, origins=frozenset({"https://good.example"}))
    async with serving(app) as door:
        async with raw_client(door.port) as client:
            await client.send(websocket_upgrade("/ws", "Origin: https://evil.example"))
            response = await client.response()
            assert (response.status, response.error["code"]) == (403, OriginNotAllowed.wire.code)
        async with raw_client(door.port) as client:
            await client.send(websocket_upgrade("/ws", "Origin: https://good.example"))
            assert (await client.response()).status == 101


BAD_HANDSHAKES: list[tuple[tuple[str, str], int, str]] = [
    (("Sec-WebSocket-Version: 13", "Sec-WebSocket-Version: 12"), 426, "upgrade_required"),
    (("Sec-WebSocket-Version: 13\r\n", ""), 426, "upgrade_required"),
    (("dGhlIHNhbXBsZSBub25jZQ==", "c2hvcnQ="), 400, "invalid_frame"),
    (("dGhlIHNhbXBsZSBub25jZQ==", "?"), 400, "invalid_frame"),
    (("Host: localhost", "Host: test\r\nX-Odd: a\x01b"), 400, "invalid_frame"),
    (("Host: localhost", "Host: test\r\nX-Long: " + "a" * 8190), 431, "header_too_large"),
    (("Host: localhost", "Host: test" + "\r\nX: y" * 129), 431, "header_too_large"),
]


async def test_bad_handshake_is_refused_as_json() -> None:
    async with serving(application()) as door:
        for bad, status, code in BAD_HANDSHAKES:
            async with raw_client(door.port) as client:
                await client.send(websocket_upgrade("/ws").decode().replace(*bad))
                response = await client.response()
                assert (response.status, response.error["code"]) == (status, code), bad
                if status == 426:
                    assert response.headers["sec-websocket-version"] == "13", bad


@pytest.mark.parametrize(
    "head",
    [
        request("GET", "/health", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAA"),
        request("GET", "/health", "Upgrade: websocket, h2c", "Connection: Upgrade"),
        request("GET", "/health", "Upgrade: websocket"),
        request("GET", "/health", "Upgrade: websocket", "Connection: Upgrade", body=b"ab"),
        request("GET", "/health", "Upgrade: websocket", "Connection: Upgrade").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["h2c", "two protocols", "no Connection", "with a body", "HTTP/1.0"],
)
async def test_other_upgrades_are_plain_http(head: bytes) -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(head)
        response = await client.response()
        assert (response.status, response.body) == (200, b"ok\n")


@pytest.mark.parametrize("upgrade", ["h2c, websocket", "websocket, h2c", "WebSocket", "h2c\r\nUpgrade: websocket"])
async def test_websocket_may_be_one_of_several_protocols(upgrade: str) -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(websocket_upgrade("/ws").replace(b"Upgrade: websocket", b"Upgrade: " + upgrade.encode(), 1))
        response = await client.response()
        assert (response.status, response.headers["upgrade"]) == (101, "websocket")


async def test_connection_goes_on_after_an_ignored_upgrade() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/health", "Upgrade: h2c", "Connection: Upgrade"), request("GET", "/health"))
        assert [(await client.response()).status for _ in range(2)] == [200, 200]


async def test_wss_and_https_on_one_port(tmp_path: Path) -> None:
    server_side, client_side = tls_contexts(tmp_path)
    async with serving(application(), ssl=server_side) as door:
        async with connect(f"wss://127.0.0.1:{door.port}/ws", ssl=client_side) as socket:
            await socket.send("over TLS")
            assert await socket.recv() == "over TLS"
        async with raw_client(door.port, tls=client_side) as client:
            await client.send(request("GET", "/health"))
            assert (await client.response()).status == 200
            await client.send(request("GET", "/health", "Connection: close"))
            assert (await client.response()).headers["connection"] == "close"
            assert await client.rest() == b""
        async with raw_client(door.port, tls=client_side) as client:
            await client.send(request("GET", "/health"))
            assert (await client.response()).status == 200
            await client.send(websocket_upgrade("/ws") + MASKED_HI)
            assert (await client.response()).status == 101
            assert await client.reader.readexactly(4) == ECHOED_HI


async def test_request_says_whether_it_came_over_tls(tmp_path: Path) -> None:
    async def tell(exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"secure": exchange.request.secure, "client": exchange.request.client})

    server_side, client_side = tls_contexts(tmp_path)
    app = RoutedApplication(handlers={"GET /": tell})
    async with serving(app, ssl=server_side) as door, raw_client(door.port, tls=client_side) as client:
        await client.send(request("GET", "/"))
        assert (await client.response()).json() == {"secure": True, "client": "127.0.0.1"}
    async with serving(app) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert (await client.response()).json() == {"secure": False, "client": "127.0.0.1"}


async def test_closing_the_server_closes_websockets_with_1001() -> None:
    async with serving(application()) as door:
        socket = await connect(f"ws://127.0.0.1:{door.port}/ws")
        door.server.close()
        await door.server.wait_closed()
        await socket.wait_closed()
        assert socket.close_code == 1001


async def test_upgrade_by_a_peer_that_will_send_nothing_more_is_refused() -> None:
    async with serving(application()) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/health") + websocket_upgrade("/ws"))
        client.finish_sending()
        assert (await client.response()).status == 200
        assert (await client.response()).status == 400


async def test_tls_peer_that_goes_ends_its_handler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    started, gone = asyncio.Event(), asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    server_side, client_side = tls_contexts(tmp_path)
    async with serving(RoutedApplication(handlers={"GET /": wait}), ssl=server_side) as door:
        async with raw_client(door.port, tls=client_side) as client:
            await client.send(request("GET", "/"))
            await started.wait()
        async with asyncio.timeout(PATIENCE_SEC):
            await gone.wait()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


class Neighbour:
    """Another process, which serves requests for ``/parts``."""

    connections_elsewhere = 0

    def __init__(self) -> None:
        self.given: list[tuple[int, bytes]] = []

    def destination(self, target: bytes) -> int | None:
        return 7 if target == b"/parts" else None

    def pass_on(self, serial: int, connection: int, received: bytes) -> None:
        os.close(connection)
        self.given.append((serial, received))


@pytest.mark.parametrize("full", [False, True])
async def test_a_connection_for_another_process_is_given_away_or_closed(full: bool) -> None:
    neighbour = Neighbour()
    async with serving(application(), elsewhere=neighbour) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/health"))
        assert (await client.response()).status == 200
        with no_more_files() if full else contextlib.nullcontext():
            await client.send(b"POST /parts HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            with contextlib.suppress(ConnectionResetError):
                assert await client.reader.read() == b""
        assert await door.connections.wait_idle(PATIENCE_SEC)
    expected = (7, b"POST /parts HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
    assert neighbour.given == ([] if full else [expected])
