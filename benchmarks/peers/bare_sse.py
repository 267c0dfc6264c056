"""Lower bound of an event stream: a task that sleeps, and writes one constant event per token.

No server can be cheaper without writing the tokens of several streams, or several tokens of one, together. It reads as
much of a request as it needs, and answers nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Final, cast

import uvloop

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    """Encodes a chunk of an HTTP body."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    fields = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "peer",
        "choices": [choice],
    }
    line = f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


ROLE: Final = event({"role": "assistant"})
TOKEN: Final = event({"content": "token "})
STOP: Final = event({}, "stop")


class EventStream(asyncio.Protocol):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._received = b""
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = head.rpartition(b"Content-Length: ")[2].partition(b"\r\n")[0]
        if length.isdigit() and len(body) == int(length):
            self._received = b""
            words = len(json.loads(body)["messages"][-1]["content"].split())
            self._answering = asyncio.create_task(self._answer(words))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    async def _answer(self, words: int) -> None:
        await asyncio.sleep(self._options.first_ms / 1000)
        self._transport.write(_HEAD + ROLE + TOKEN)
        for _ in range(words - 1):
            await asyncio.sleep(self._options.interval_ms / 1000)
            self._transport.write(TOKEN)
        self._transport.write(STOP + _END)


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: EventStream(options), "127.0.0.1", options.port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    parser.add_argument("--first-ms", type=int, required=True)
    uvloop.run(serve(parser.parse_args()))
