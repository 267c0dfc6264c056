"""Detection of peers that disconnect unnoticed, on every event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC

from omni_ws.transport.http.connections import (
    HangUp,
    Recheck,
    hang_up,
)


@contextlib.asynccontextmanager
async def unread() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A transport whose reading is paused with data waiting, and the socket of its peer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        accepted, _ = server.accept()
        accepted.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=accepted)
        transport.pause_reading()
        peer.sendall(bytes(10_000))
        yield transport, peer
        transport.abort()
        await asyncio.sleep(0)


async def found_out(transport: asyncio.Transport, what: HangUp) -> None:
    async with asyncio.timeout(PATIENCE_SEC):
        while hang_up(transport) is not what:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)


async def test_a_peer_that_is_there() -> None:
    async with unread() as (transport, _):
        assert hang_up(transport) is HangUp.UNKNOWN


@pytest.mark.parametrize("closed", [True, False])
async def test_a_peer_that_sends_nothing_any_more(closed: bool) -> None:
    """Half-closed and closed sockets look the same until something is sent."""
    async with unread() as (transport, peer):
        if closed:
            peer.close()
        else:
            peer.shutdown(socket.SHUT_WR)
        await found_out(transport, HangUp.HALF)
        transport.write(b"?")
        if closed:
            await found_out(transport, HangUp.GONE)
        else:
            assert await asyncio.to_thread(peer.recv, 10) == b"?"
            assert hang_up(transport) is HangUp.HALF


async def test_a_peer_that_resets() -> None:
    async with unread() as (transport, peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        await found_out(transport, HangUp.GONE)


async def test_a_transport_that_is_closed_already() -> None:
    async with unread() as (transport, _):
        transport.abort()
        await found_out(transport, HangUp.GONE)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="not all systems have the options")
async def test_the_kernel_asks_silent_peers() -> None:
    async with live_server() as server, native_client(server):
        accepted = server.connections[0].transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [15, 5, 3]


@pytest.mark.virtual_clock
async def test_half_close_probes_become_rarer_until_they_stop() -> None:
    loop = asyncio.get_running_loop()
    probes: list[float] = []
    probe = Recheck(lambda: probes.append(loop.time()), 1, 5)
    probe.begin()
    await asyncio.sleep(0.5)
    probe.begin()  # runs already
    await asyncio.sleep(18)
    assert probes == [pytest.approx(at) for at in (1, 3, 7, 12, 17)]
    probe.stop()
    await asyncio.sleep(100)
    assert len(probes) == 5
    probe.begin()
    await asyncio.sleep(1.5)
    assert len(probes) == 6
