"""Many misbehaving clients of the HTTP routes at once: nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.raw_http import RawClient, chunked, raw_client, request
from support.scripted_engines import ToneEngine

from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine, EchoSettings

CLIENTS = 16
REQUESTS = int(os.environ.get("OMNI_WS_TEST_CHAOS_REQUESTS", "4"))
PATHS = ("/v1/chat/completions", "/v1/audio/speech")
LINES = (
    b'{"text":"one two "}\n',
    b'{"text":"three","end_of_input":true}\n',
    b'{"text":"again","sequence_id":%d}\n',
    b'{"modality":"audio","payload":"AAAAAAAA"}\n',
    b'{"modality":"audio","payload":"AAAA","format":"mp3"}\n',
    b'{"stream":false}\n',
    b'{"stage_params":{"fake":{"fail_after_chunks":1}}}\n',
    b'{"start_policy":"on_end_only","modalities":["text","audio"]}\n',
    b"\n",
    b"{",
    b"\xff\n",
)


def ordinary_body(dice: random.Random) -> bytes:
    body = orjson.dumps(
        {
            "messages": [{"role": "user", "content": "word " * dice.randrange(40)}],
            "input": "word " * dice.randrange(40),
            "stream": dice.choice([True, False, None]),
            "stream_format": dice.choice([None, None, "sse", "audio", "nonsense"]),
            "modalities": dice.choice([["text"], ["text", "audio"], ["audio"]]),
            "n": dice.choice([1, 1, 1, 2]),
        }
    )
    return body[: dice.randrange(len(body))] if dice.random() < 0.2 else body


async def stream_a_body(client: RawClient, dice: random.Random) -> None:
    for number in range(dice.randrange(6)):
        line = dice.choice(LINES)
        piece = line % dice.choice([number, 0, 3]) if b"%d" in line else line
        cut = dice.randrange(len(piece) + 1)
        await client.send(*(chunked(part, end=False) for part in (piece[:cut], piece[cut:]) if part))
        await asyncio.sleep(dice.choice([0, 0, 0.002]))
    if dice.random() < 0.8:
        await client.send(b"0\r\n\r\n")


async def misbehave(server: LiveServer, dice: random.Random) -> None:
    async with raw_client(server.port) as client:
        path = dice.choice(PATHS)
        if dice.random() < 0.5:
            await client.send(request("POST", path, "Connection: close", body=ordinary_body(dice)))
        else:
            head = ("X-Streaming-Input: true", "Transfer-Encoding: chunked", "Connection: close")
            await client.send(request("POST", path, *head))
            await stream_a_body(client, dice)
        match dice.randrange(4):
            case 0:
                client.reset()
            case 1:
                # The server responds or reports what is missing, and closes the connection.
                with contextlib.suppress(OSError):  # the server may have closed already
                    client.finish_sending()
                async with asyncio.timeout(PATIENCE_SEC):
                    await client.rest()
            case 2:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await client.reader.read(dice.randrange(1, 400))
                client.reset()
            case _:
                # A client that still owes body bytes may wait forever.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await client.rest()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["echo", "slow echo", "tone", "broken tone"])
async def test_nothing_is_left_of_clients_that_do_what_they_like(engine: str) -> None:
    engines: dict[str, Engine] = {
        "echo": EchoEngine(),
        "slow echo": EchoEngine(EchoSettings(first_chunk_delay_ms=3, chunk_interval_ms=1)),
        "tone": ToneEngine(),
        "broken tone": ToneEngine(fail_at=3),
    }
    seed = random.randrange(2**32)

    async def client(server: LiveServer, number: int) -> None:
        dice = random.Random(seed + number)
        for _ in range(REQUESTS):
            with contextlib.suppress(ConnectionError):
                await misbehave(server, dice)

    try:
        async with live_server(engines[engine], expect_errors=engine == "broken tone") as server:
            await asyncio.gather(*(client(server, number) for number in range(CLIENTS)))
    except BaseException as error:
        error.add_note(f"the seed was {seed}")
        raise
