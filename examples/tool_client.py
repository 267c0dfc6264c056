"""Lets a model use a tool of this program in a conversation: it may ask for the local time in a city.

.venv/bin/python examples/tool_client.py "What time is it in Tokyo?"
.venv/bin/python examples/tool_client.py --file question.wav --save reply.wav
.venv/bin/python examples/tool_client.py                      one question a line, until the end of the input

The server needs a model that calls tools, such as: make serve LLM=ollama:qwen3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from omni_ws.client import DEFAULT_URL, Answer, ClientSession, ConnectionFailed, ConnectionLost, connect
from omni_ws.client.audio import Pcm16, UnreadableAudio, read_ahead, read_wav, write_wav
from omni_ws.client.audio import pieces as pieces_of
from omni_ws.core.chunks import ToolCall
from omni_ws.errors import OmniError

FAILED, USAGE, NO_SERVER, INTERRUPTED = 1, 2, 4, 130
PIECE_MS = 100
#: A model that calls tools without end is stopped after so many rounds.
MAX_ROUNDS = 5
#: Names of requests, by which their answers are told apart.
QUESTION, RESULTS = "question", "results"

#: The tool as the model knows it.
LOCAL_TIME = {
    "type": "function",
    "function": {
        "name": "local_time",
        "description": "The date and time in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A large city in English, such as New York"}},
            "required": ["city"],
        },
    },
}


def local_time(city: str, now: datetime) -> str:
    """The tool: tells the time in one of the cities after which time zones are named."""
    wanted = city.partition(",")[0].strip().replace(" ", "_").lower()
    for name in sorted(available_timezones()):
        if name.rpartition("/")[2].lower() == wanted and "/" in name:
            return now.astimezone(ZoneInfo(name)).strftime(f"{name}: %A, %d %B %Y, %H:%M")
    return f"no time zone is known for {city}"


def run_tool(call: ToolCall, now: datetime) -> str:
    """Runs a call. What is wrong with it is a result, too: the model can try again or say so."""
    try:
        arguments = json.loads(call.arguments)
        city = arguments["city"]
    except (ValueError, TypeError, KeyError):
        return "the arguments must be a JSON object with a city"
    return local_time(str(city), now) if call.name == "local_time" else f"there is no tool {call.name}"


async def answer(session: ClientSession) -> Answer:
    """Waits for the answer to the question, and runs the tools that the model calls until it calls none."""
    reply = await session.answer(QUESTION)
    for _ in range(MAX_ROUNDS):
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            result = run_tool(call, datetime.now(UTC))
            print(f"  {call.name} {call.arguments} → {result}", file=sys.stderr)
            await session.send_tool_result(call.id, result, end=call is reply.tool_calls[-1], ref=RESULTS)
        reply = await session.answer(RESULTS)
    return reply


async def run(options: argparse.Namespace) -> int:
    config: dict[str, Any] = {"tools": [LOCAL_TIME], "output_audio": {"format": "pcm16"}}
    audio = read_wav(options.file) if options.file else None
    if audio is not None:
        config["input_audio"] = {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels}
    async with connect(options.url, api_key=options.api_key, config=config) as session:
        if audio is not None:
            for piece in pieces_of(audio, piece_ms=PIECE_MS):
                await session.send_audio(piece, ref=QUESTION)
            await session.finish()
            return tell(await answer(session), save=options.save)
        async with aclosing(questions(options.question)) as asked:
            async for question in asked:
                await session.send_text(question, end=True, ref=QUESTION)
                tell(await answer(session), save=options.save)
    return 0


async def questions(question: str | None) -> AsyncGenerator[str, None]:
    if question is not None:
        yield question
        return
    waiting = b""
    async with aclosing(read_ahead()) as pieces:
        async for piece in pieces:
            *lines, waiting = (waiting + piece).split(b"\n")
            for line in filter(None, map(bytes.strip, lines)):
                yield line.decode()
    if waiting.strip():
        yield waiting.decode().strip()


def tell(reply: Answer, *, save: str | None) -> int:
    print(reply.text)
    if save and reply.sample_rate is not None:
        write_wav(save, Pcm16(reply.audio, reply.sample_rate))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Talk with a model that may ask this program for the time in a city.")
    parser.add_argument("question", nargs="?", help="[lines of standard input]")
    parser.add_argument("--file", metavar="X.wav", help="ask with a WAV file instead")
    parser.add_argument("--save", metavar="REPLY.wav", help="write the spoken reply, the last one, to a WAV file")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"[{DEFAULT_URL}]")
    parser.add_argument("--api-key", default=os.environ.get("OMNI_WS_API_KEY"), help="[$OMNI_WS_API_KEY]")
    options = parser.parse_args()
    try:
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OmniError as error:
        print(f"tool_client: {error.code}: {error}", file=sys.stderr)
        return FAILED
    except (ConnectionFailed, ConnectionLost) as error:
        print(f"tool_client: {error}", file=sys.stderr)
        return NO_SERVER
    except (UnreadableAudio, OSError) as error:
        print(f"tool_client: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
