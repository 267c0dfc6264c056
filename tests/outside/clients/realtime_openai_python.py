"""The openai package of Python over ``/v1/realtime``, as its users use it.

The arguments are the base URLs of two servers, files of speech (pcm16, 24 kHz) for two turns, and a folder for what is
heard. The first server answers by itself. The second one's language model never finishes its first answer, calls a tool
in its second, and says what the tool returned. Prints what happened, as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import openai

ANSWERING, CALLING, *FILES = sys.argv[1:]
FIRST, SECOND = (Path(file).read_bytes() for file in FILES[:2])
FOLDER = Path(FILES[2])
PIECE = 4800
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SESSION: Any = {
    "type": "realtime",
    "instructions": "Be brief.",
    "output_modalities": ["audio"],
    "audio": {
        "input": {"transcription": {"model": "gpt-4o-mini-transcribe"}, "turn_detection": {"type": "server_vad"}},
        "output": {"voice": "marin"},
    },
}


def client_of(url: str, key: str = "not-needed") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, websocket_base_url=url.replace("http", "ws", 1), api_key=key, max_retries=0)


async def speak(connection: Any, audio: bytes) -> None:
    for start in range(0, len(audio), PIECE):
        piece = base64.b64encode(audio[start : start + PIECE]).decode()
        await connection.input_audio_buffer.append(audio=piece)


async def turn() -> dict[str, Any]:
    """A turn with a client secret instead of the key, and the settings that are bound to it."""
    async with client_of(ANSWERING) as client:
        secret = await client.realtime.client_secrets.create(
            session=SESSION, expires_after={"anchor": "created_at", "seconds": 60}
        )
    assert secret.value.startswith("ek_")
    heard = said = None
    audio = bytearray()
    done = False
    async with (
        client_of(ANSWERING, secret.value) as client,
        client.realtime.connect(model="gpt-realtime") as connection,
    ):
        created = await connection.recv()
        assert created.type == "session.created", created
        assert created.session.instructions == "Be brief.", created
        await speak(connection, FIRST)
        while heard is None or not done:
            event = await connection.recv()
            match event.type:
                case "error":
                    raise AssertionError(event)
                case "conversation.item.input_audio_transcription.completed":
                    heard = event.transcript
                case "response.output_audio.delta":
                    audio += base64.b64decode(event.delta)
                case "response.output_audio_transcript.done":
                    said = event.transcript
                case "response.done":
                    assert event.response.status == "completed", event
                    assert event.response.usage.output_tokens > 0
                    done = True
    (FOLDER / "turn.pcm").write_bytes(audio)
    return {"heard": heard, "said": said}


async def call() -> dict[str, Any]:
    """An answer that speech interrupts, then a function call and its result."""
    statuses: list[str] = []
    truncated = asked = told = None
    audio = bytearray()
    interrupting = False
    async with client_of(CALLING) as client, client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(session={**SESSION, "tools": [WEATHER]})
        await speak(connection, FIRST)
        async for event in connection:
            match event.type:
                case "error":
                    raise AssertionError(event)
                case "response.output_audio.delta" if not interrupting:
                    interrupting = True
                    playing = event.item_id
                    await speak(connection, SECOND)
                case "response.output_audio.delta" if asked:
                    audio += base64.b64decode(event.delta)
                case "input_audio_buffer.speech_started" if interrupting and truncated is None:
                    await connection.conversation.item.truncate(item_id=playing, content_index=0, audio_end_ms=200)
                case "conversation.item.truncated":
                    truncated = event.audio_end_ms
                case "response.function_call_arguments.done":
                    asked = json.loads(event.arguments)
                    answer: Any = {"type": "function_call_output", "call_id": event.call_id, "output": "sunny"}
                case "response.output_audio_transcript.done" if asked:
                    told = event.transcript
                case "response.done":
                    statuses.append(event.response.status)
                    if len(statuses) == 2:
                        await connection.conversation.item.create(item=answer)
                        await connection.response.create()
                    elif len(statuses) == 3:
                        break
    (FOLDER / "told.pcm").write_bytes(audio)
    return {"statuses": statuses, "truncated": truncated, "asked": asked, "told": told}


async def main() -> None:
    print(json.dumps({**await turn(), **await call()}))


asyncio.run(main())
