"""Requests to a server by each way in: one spoken question, and requests of every kind at once, some interrupted."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
from support.live_server import LiveServer
from support.mode_b_client import mode_b
from support.native_client import native_client
from support.raw_http import chunked, post, raw_client, request
from support.speech_clips import WORDS, clip_bytes

from omni_ws.audio.container import wav_header
from omni_ws.caller.answers import ResponseReader
from omni_ws.client import connect
from omni_ws.scenarios.speech import word_errors

CLIP: Final = "goforward"
SPOKEN: Final = clip_bytes(CLIP)
WAV: Final = wav_header(sample_rate=16_000, channels=1, data_bytes=len(SPOKEN)) + SPOKEN
#: Greedy: a sampled answer may be five emojis, which no voice speaks.
SAMPLING: Final = {"max_tokens": 16, "temperature": 0}
_CHUNKED: Final = ("Transfer-Encoding: chunked", "Content-Type: application/x-ndjson", "Connection: close")


@dataclass(frozen=True)
class SpokenAnswer:
    """``heard`` is None where the way in does not tell. ``audio`` is pcm16."""

    heard: str | None
    text: str
    audio: bytes

    def check(self) -> None:
        """Words that were understood, and an answer that is written and can be heard."""
        assert self.heard is None or word_errors(WORDS[CLIP], self.heard).wrong <= 1, self.heard
        assert self.text
        assert is_loud(self.audio)


def is_loud(pcm: bytes) -> bool:
    """A voice, not silence: half a second at least, and a fair level."""
    samples = np.frombuffer(pcm, "<i2").astype(float)
    return len(samples) > 12_000 and float(np.sqrt(np.mean(samples**2))) > 300


async def by_websocket(server: LiveServer) -> SpokenAnswer:
    async with connect(server.websocket_url, config={"sampling": SAMPLING}) as session:
        await session.send_audio(SPOKEN, end=True)
        answer = await session.answer()
    return SpokenAnswer(answer.transcript, answer.text, answer.audio)


async def by_mode_a(server: LiveServer) -> SpokenAnswer:
    async with raw_client(server.port) as client:
        head = request("POST", "/v1/chat/completions", "X-Streaming-Input: true", *_CHUNKED)
        config = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}, "stream": True}
        lines = [orjson.dumps({**config, **SAMPLING})]
        for place in range(0, len(SPOKEN), 6400):
            payload = base64.b64encode(SPOKEN[place : place + 6400]).decode()
            lines.append(orjson.dumps({"modality": "audio", "payload": payload}))
        await client.send(head, chunked(*(line + b"\n" for line in lines)))
        response, reader = await client.response(), ResponseReader()
    reader.begin(response.status, response.headers["content-type"])
    reader.feed(0, response.body)
    return SpokenAnswer(reader.answer.heard, reader.answer.text, reader.answer.sound)


async def by_http(server: LiveServer) -> SpokenAnswer:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        **SAMPLING,
    }
    message = (await post(server.port, "/v1/chat/completions", body)).json()["choices"][0]["message"]
    return SpokenAnswer(None, message["audio"]["transcript"], base64.b64decode(message["audio"]["data"]))


#: Each takes a live server.
WAYS: Final[dict[str, Callable[[LiveServer], Awaitable[SpokenAnswer]]]] = {
    "WebSocket": by_websocket,
    "Mode A": by_mode_a,
    "HTTP": by_http,
}


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
