"""One spoken question to a server by each way in, and what came back: heard, written, spoken."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import orjson
from support.live_server import LiveServer
from support.raw_http import chunked, post, raw_client, request
from support.speech_clips import WORDS, clip_bytes, word_errors

from omni_ws.audio.container import wav_header
from omni_ws.caller.answers import ResponseReader
from omni_ws.client import connect

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
        assert self.heard is None or word_errors(WORDS[CLIP], self.heard) <= 1, self.heard
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
