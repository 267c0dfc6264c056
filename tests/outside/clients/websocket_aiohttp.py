"""RFC 6455 by aiohttp: ``websocket_aiohttp.py URL LIMIT``, where ``LIMIT`` is the most bytes of a message."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp

URL, LIMIT = sys.argv[1], int(sys.argv[2])
CHUNK = {"type": "input_chunk", "sequence_id": 0, "text": "hello", "end_of_input": True}


async def answer(socket: aiohttp.ClientWebSocketResponse) -> str:
    text = ""
    async for message in socket:
        assert message.type is aiohttp.WSMsgType.TEXT, message
        frame = json.loads(message.data)
        assert frame["type"] != "error", frame
        text += frame.get("text") or ""
        if frame.get("final"):
            return text
    raise AssertionError(f"closed with {socket.close_code}")


async def main() -> None:
    passed = 0
    async with aiohttp.ClientSession() as session:
        for options in ({}, {"compress": 15}, {"protocols": ("omni.v1+json",)}):
            async with session.ws_connect(URL, **options) as socket:
                assert not socket.compress
                assert socket.protocol == (options.get("protocols") or (None,))[0]
                await socket.ping(b"x" * 125)
                await socket.send_json(CHUNK)
                assert await answer(socket) == "hello"
            assert socket.close_code == 1000
            passed += 1
        async with session.ws_connect(URL, autoping=False) as socket:
            await socket.ping(b"x" * 125)
            while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
            assert (message.type, bytes(message.data)) == (aiohttp.WSMsgType.PONG, b"x" * 125)
            passed += 1
        for code in (1000, 3000, 4999):
            socket = await session.ws_connect(URL)
            assert await socket.close(code=code, message=b"done")
            assert socket.close_code == code
            passed += 1
        async with session.ws_connect(URL) as socket:
            await socket.send_bytes(bytes(LIMIT + 1))
            while not (message := await socket.receive()).type & aiohttp.WSMsgType.CLOSE:
                pass
            assert socket.close_code == 1009, message
            passed += 1
        status = 0
        try:
            await session.ws_connect(URL, headers={"Origin": "http://elsewhere.example"})
        except aiohttp.WSServerHandshakeError as error:
            status = error.status
        assert status == 403
        passed += 1
    print(f"{passed} passed")


asyncio.run(main())
