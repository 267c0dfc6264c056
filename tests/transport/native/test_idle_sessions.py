"""What a session takes that is open and silent."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc

from support.live_server import live_server

SESSIONS = 50
#: Traced memory of one session, its socket's buffers excluded. The benchmark ``idle`` measures the resident memory.
MAX_SESSION_BYTES = 26 * 1024
HANDSHAKE = (
    b"GET /v1/streaming_input HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def opened(port: int) -> socket.socket:
    """A plain socket with a session, which takes almost no memory itself."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, HANDSHAKE)
    received = b""
    while b'"session_created"' not in received:
        received += await loop.sock_recv(client, 1 << 16)
    return client


async def test_an_idle_session_takes_little_memory() -> None:
    async with live_server() as server:
        clients = [await opened(server.port) for _ in range(10)]  # which bring what all sessions share
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            clients += [await opened(server.port) for _ in range(SESSIONS)]
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert server.sessions == len(clients)
        assert (after - before) / SESSIONS < MAX_SESSION_BYTES
        for client in clients:
            client.close()
        await server.check_empty()
