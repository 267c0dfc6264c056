"""An agent of OpenAI's Agents SDK over ``/v1/realtime``, for ``benchmarks.minds.calls``; runs in `.venv-outside`.

Reads one JSON object from its standard input: ``url``, ``instructions``, ``tools``, and ``speech``, files of pcm16 at
24 kHz. Has a conversation with each file, and prints what it called and what was heard and said, a JSON line each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from agents import FunctionTool
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession

WANTED = json.load(sys.stdin)
SPEECH = [Path(file).read_bytes() for file in WANTED["speech"]]
PIECE = 4800
ANSWER_SEC = 400


def tool(told: dict[str, Any], called: list[Any]) -> FunctionTool:
    """A tool that notes its calls, and always has the same result."""

    async def call(_: Any, arguments: str) -> str:
        called.append([told["name"], json.loads(arguments)])
        return str(told["answer"])

    return FunctionTool(
        name=told["name"],
        description=told["description"],
        params_json_schema=told["parameters"],
        on_invoke_tool=call,
        strict_json_schema=False,
    )


async def converse(session: RealtimeSession, audio: bytes, seen: dict[str, Any]) -> None:
    """Speak, and listen until an answer has ended that said something and called nothing.

    An answer that ends without either was begun in a pause of the speaker, and withdrawn.
    """
    calls = False
    for start in range(0, len(audio), PIECE):
        await session.send_audio(audio[start : start + PIECE])
    async for event in session:
        if event.type == "error":
            raise RuntimeError(event.error)
        if event.type == "raw_model_event":
            match event.data.type:
                case "input_audio_transcription_completed":
                    seen["heard"] = event.data.transcript
                case "transcript_delta":
                    seen["said"] += event.data.delta
                case "function_call":
                    calls = True
                case "turn_ended" if seen["said"] and not calls:
                    return
                case "turn_ended" if calls:
                    seen["said"], calls = "", False


async def main() -> None:
    for audio in SPEECH:
        seen: dict[str, Any] = {"calls": [], "heard": "", "said": ""}
        tools: list[Any] = [tool(one, seen["calls"]) for one in WANTED["tools"]]
        agent = RealtimeAgent(name="House", instructions=WANTED["instructions"], tools=tools)
        runner = RealtimeRunner(agent)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_SEC):
                async with await runner.run(model_config={"url": WANTED["url"], "api_key": "not-needed"}) as session:
                    await converse(session, audio, seen)
        except Exception as error:
            seen["failed"] = repr(error)
        print(json.dumps({**seen, "seconds": time.perf_counter() - began}), flush=True)


asyncio.run(main())
