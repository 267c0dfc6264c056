"""Requests of every kind at once: typed and spoken, over all front ends, some interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from support.live_server import LiveServer
from support.mode_b_client import mode_b
from support.native_client import native_client
from support.raw_http import post

CHAT = "/v1/chat/completions"
QUESTION = "What is 6 times 7? Count to twenty."
FRAME_BYTES = 640
#: Clients at a time.
AT_ONCE = 4

#: Sends a request and waits for all of its answer.
Kind = Callable[[LiveServer], Awaitable[None]]


async def run_mixed(server: LiveServer, kinds: list[Kind], count: int) -> None:
    """``count`` requests, the kinds in turn. An interruption is two requests, and counts as one here."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await kinds[number % len(kinds)](server)

    await asyncio.gather(*(one(number) for number in range(count)))


def typed(**config: Any) -> Kind:
    async def kind(server: LiveServer) -> None:
        async with native_client(server) as client:
            await client.configure(**config)
            for piece in (QUESTION[:8], QUESTION[8:]):
                await client.chunk(piece)
            await client.chunk(end=True)
            answer = await client.answer()
            assert answer.reason in ("stop", "length")

    return kind


def spoken(audio: bytes, *, disorder: bool = False) -> Kind:
    """A question in pieces of 20 ms, as fast as they can be sent.

    In disorder the fourth piece comes first, and the server has looked at it before the others come.
    """

    async def kind(server: LiveServer) -> None:
        frames = [audio[start : start + FRAME_BYTES] for start in range(0, len(audio), FRAME_BYTES)]
        numbers = list(range(len(frames)))
        if disorder:
            for start in range(0, len(numbers) - 4, 4):
                numbers[start : start + 4] = reversed(numbers[start : start + 4])
        async with native_client(server) as client:
            for at in numbers:
                await client.binary(frames[at], number=at)
                if disorder and at == numbers[0]:
                    await client.barrier()
            await client.chunk(end=True, number=len(frames))
            assert (await client.answer()).reason in ("stop", "length")

    return kind


def interrupted(**config: Any) -> Kind:
    async def kind(server: LiveServer) -> None:
        async with native_client(server) as client:
            await client.configure(overlap="interrupt", **config)
            await client.say("Count to one thousand.")
            await client.until("output_chunk")
            await client.say("Stop.")
            reasons = [(await client.answer()).reason for _ in range(2)]
            assert reasons[0] == "cancelled", reasons

    return kind


def posted(target: str, body: Any, *headers: str) -> Kind:
    async def kind(server: LiveServer) -> None:
        answer = await post(server.port, target, body, *headers)
        assert answer.status == 200, answer.body

    return kind


def chat(**fields: Any) -> Kind:
    return posted(CHAT, {"messages": [{"role": "user", "content": QUESTION}], **fields})


def streamed_body(**fields: Any) -> Kind:
    lines = b"".join(orjson.dumps(one) + b"\n" for one in (fields, {"text": QUESTION}))
    return posted(CHAT, lines, "Content-Type: application/x-ndjson", "X-Streaming-Input: true")


def speech(voice: str = "alloy", text: str = QUESTION, **fields: Any) -> Kind:
    return posted("/v1/audio/speech", {"input": text, "voice": voice, "response_format": "wav", **fields})


def several_requests(**fields: Any) -> Kind:
    async def kind(server: LiveServer) -> None:
        async with mode_b(server, fields) as session:
            await session.append({"text": QUESTION, "sequence_id": 0, "end_of_input": True})
            assert (await session.result()).status == 200

    return kind
