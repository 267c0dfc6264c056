"""LiveKit's plug-in for OpenAI over ``/v1/realtime``. Arguments and output are those of realtime_openai_python.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

ANSWERING, CALLING, *FILES = sys.argv[1:]
FIRST, SECOND = (Path(file).read_bytes() for file in FILES[:2])
FOLDER = Path(FILES[2])
RATE = 24_000
PIECE = 4800


@llm.function_tool
async def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


class Conversation:
    """A session, and its events as they come."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.generations: asyncio.Queue[llm.GenerationCreatedEvent] = asyncio.Queue()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.speaks = asyncio.Event()
        self.failures: list[Any] = []
        session.on("generation_created", self.generations.put_nowait)
        session.on("input_audio_transcription_completed", self._transcript)
        session.on("input_speech_started", lambda _: self.speaks.set())
        session.on("error", self.failures.append)

    def _transcript(self, event: llm.InputTranscriptionCompleted) -> None:
        if event.is_final:
            self.heard.put_nowait(event.transcript)

    def speak(self, audio: bytes) -> None:
        for start in range(0, len(audio), PIECE):
            piece = audio[start : start + PIECE]
            self.session.push_audio(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))


async def answer(generation: llm.GenerationCreatedEvent) -> tuple[str, bytes, list[llm.FunctionCall]]:
    text, audio, calls = "", bytearray(), []
    async for message in generation.message_stream:
        async for frame in message.audio_stream:
            audio += bytes(frame.data)
        async for piece in message.text_stream:
            text += piece
    async for one in generation.function_stream:
        calls.append(one)
    return text, bytes(audio), calls


async def turn(http: aiohttp.ClientSession) -> dict[str, Any]:
    model = RealtimeModel(base_url=ANSWERING, api_key="not-needed", http_session=http)
    conversation = Conversation(model.session())
    conversation.speak(FIRST)
    said, audio, _ = await answer(await conversation.generations.get())
    heard = await conversation.heard.get()
    await conversation.session.aclose()
    assert not conversation.failures, conversation.failures
    (FOLDER / "turn.pcm").write_bytes(audio)
    return {"heard": heard, "said": said}


async def call(http: aiohttp.ClientSession) -> dict[str, Any]:
    model = RealtimeModel(base_url=CALLING, api_key="not-needed", http_session=http)
    session = model.session()
    conversation = Conversation(session)
    await session.update_instructions("Be brief.")
    await session.update_tools([get_weather])
    conversation.speak(FIRST)
    first = await conversation.generations.get()
    message = await anext(aiter(first.message_stream))
    await anext(aiter(message.audio_stream))
    conversation.speaks.clear()
    conversation.speak(SECOND)
    await conversation.speaks.wait()
    session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=200)
    _, _, calls = await answer(await conversation.generations.get())
    (asked,) = calls
    context = session.chat_ctx.copy()
    context.items.append(llm.FunctionCallOutput(call_id=asked.call_id, name=asked.name, output="sunny", is_error=False))
    await session.update_chat_ctx(context)
    told, audio, _ = await answer(await session.generate_reply())
    await session.aclose()
    assert not conversation.failures, conversation.failures
    (FOLDER / "told.pcm").write_bytes(audio)
    return {"interrupted": True, "asked": json.loads(asked.arguments), "told": told}


async def main() -> None:
    async with aiohttp.ClientSession() as http:
        print(json.dumps({**await turn(http), **await call(http)}))


asyncio.run(main())
