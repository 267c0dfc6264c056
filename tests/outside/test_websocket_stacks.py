"""RFC 6455 by implementations that share no code with the server's: wsproto, aiohttp, and Node's ws.

Each opens connections in its own ways, sends messages in fragments, pings, closes with codes, and breaks the rules.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server
from support.outside import run_in_node, run_outside, tool

from omni_ws.wire.frames import max_frame_bytes

CLIENTS = Path(__file__).parent / "clients"
LIMIT = max_frame_bytes(1000)

pytestmark = pytest.mark.slow


@pytest.fixture
async def server() -> AsyncIterator[LiveServer]:
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as running:
        yield running


async def test_wsproto(server: LiveServer) -> None:
    address = ("127.0.0.1", str(server.port), "/v1/streaming_input", str(LIMIT))
    output = await run_outside(tool("OUTSIDE_PYTHON"), str(CLIENTS / "websocket_wsproto.py"), *address)
    assert output == "59 passed\n"


async def test_aiohttp(server: LiveServer) -> None:
    arguments = (server.websocket_url, str(LIMIT))
    output = await run_outside(tool("OUTSIDE_PYTHON"), str(CLIENTS / "websocket_aiohttp.py"), *arguments)
    assert output == "9 passed\n"


async def test_ws_of_node(server: LiveServer, tmp_path: Path) -> None:
    output = await run_in_node(CLIENTS / "websocket_ws.mjs", tmp_path, server.websocket_url, str(LIMIT))
    assert output == "9 passed\n"
