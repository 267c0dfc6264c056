"""OpenAI's Agents SDK for Python over ``/v1/realtime``. Arguments and output are those of realtime_openai_python.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession

ANSWERING, CALLING, *FILES = sys.argv[1:]
FIRST, SECOND = (Path(file).read_bytes() for file in FILES[:2])
FOLDER = Path(FILES[2])
PIECE = 4800
ASKED: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    ASKED.append(city)
    return "sunny"


async def session_at(url: str, tools: list[Any]) -> RealtimeSession:
    agent = RealtimeAgent(name="Assistant", instructions="Be brief.", tools=tools)
    url = url.replace("http", "ws", 1) + "/realtime?model=gpt-realtime"
    return await RealtimeRunner(agent).run(model_config={"url": url, "api_key": "not-needed"})


async def speak(session: RealtimeSession, audio: bytes) -> None:
    for start in range(0, len(audio), PIECE):
        await session.send_audio(audio[start : start + PIECE])


def said_last(history: list[Any]) -> str | None:
    """The transcript of the newest answer."""
    spoken = [part.transcript for item in history if getattr(item, "role", "") == "assistant" for part in item.content]
    return spoken[-1] if spoken else None


async def turn() -> dict[str, Any]:
    heard = said = None
    audio = bytearray()
    done = False
    async with await session_at(ANSWERING, []) as session:
        await speak(session, FIRST)
        async for event in session:
            match event.type:
                case "error":
                    raise AssertionError(event)
                case "audio":
                    audio += event.audio.data
                case "history_updated" | "history_added":
                    said = said_last(getattr(event, "history", [])) or said
                case "raw_model_event" if event.data.type == "input_audio_transcription_completed":
                    heard = event.data.transcript
                case "raw_model_event" if event.data.type == "turn_ended":
                    done = True
            if heard is not None and done:
                break
    (FOLDER / "turn.pcm").write_bytes(audio)
    return {"heard": heard, "said": said}


async def call() -> dict[str, Any]:
    told = None
    audio = bytearray()
    interrupting = interrupted = called = False
    async with await session_at(CALLING, [get_weather]) as session:
        await speak(session, FIRST)
        async for event in session:
            match event.type:
                case "error":
                    raise AssertionError(event)
                case "audio" if not interrupting:
                    interrupting = True
                    await speak(session, SECOND)
                case "tool_end":
                    called = True
                case "audio" if called:
                    audio += event.audio.data
                case "audio_interrupted":
                    interrupted = True
                case "history_updated" if called:
                    told = said_last(event.history) or told
                case "raw_model_event" if event.data.type == "turn_ended" and audio:
                    break
    (FOLDER / "told.pcm").write_bytes(audio)
    return {"interrupted": interrupted, "asked": {"city": ASKED[0]}, "told": told}


async def main() -> None:
    print(json.dumps({**await turn(), **await call()}))


asyncio.run(main())
