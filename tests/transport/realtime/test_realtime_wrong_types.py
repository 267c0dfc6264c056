"""Events with something else in any place: an error or nothing, never the end of the session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from openai.types.realtime import RealtimeClientEvent
from pydantic import TypeAdapter
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.realtime_client import realtime_client

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.virtual_clock]

TOOL = {"type": "function", "name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
VAD = {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200, "create_response": True}
SESSION: dict[str, Any] = {
    "type": "realtime",
    "instructions": "Be brief.",
    "output_modalities": ["text"],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_output_tokens": 100,
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 1000}},
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": {"model": "whisper-1", "language": "en"},
            "noise_reduction": None,
            "turn_detection": VAD,
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "tone", "speed": 1.0},
    },
}
RESPONSE = {
    "instructions": "Shorter.",
    "output_modalities": ["text"],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "clock"},
    "metadata": {"a": "b"},
    "conversation": "none",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
}
CONTENTS: list[dict[str, Any]] = [
    {"type": "input_text", "text": "hi"},
    {"type": "input_audio", "audio": "AAAA", "transcript": "hi"},
    {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
]
ITEMS: list[dict[str, Any]] = [
    {"id": "item_1", "type": "message", "role": "user", "content": CONTENTS},
    {"id": "item_2", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    {"id": "item_3", "type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
    {"id": "item_4", "type": "function_call_output", "call_id": "call_1", "output": "noon"},
]
EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "session": SESSION},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    *({"type": "conversation.item.create", "previous_item_id": "root", "item": item} for item in ITEMS),
    {"type": "conversation.item.truncate", "item_id": "item_2", "content_index": 0, "audio_end_ms": 10},
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "response.create", "response": RESPONSE},
    {"type": "response.cancel", "response_id": "resp_1"},
    {"type": "output_audio_buffer.clear"},
]
#: In place of a value: there is none.
LEFT_OUT = object()
WRONG: tuple[Any, ...] = (
    LEFT_OUT,
    None,
    True,
    -1,
    1e300,
    "",
    "\0",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    {"type": {}},
    {"type": []},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something else may stand."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(event: dict[str, Any], path: tuple[Any, ...], wrong: Any) -> dict[str, Any]:
    event = deepcopy(event)
    holder: Any = event
    for key in path[:-1]:
        holder = holder[key]
    if wrong is LEFT_OUT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = wrong
    return event


def test_the_events_are_all_that_the_package_knows() -> None:
    known: TypeAdapter[Any] = TypeAdapter(RealtimeClientEvent)
    types = {known.validate_python(event).type for event in EVENTS}
    choices = {one["properties"]["type"]["const"] for one in known.json_schema()["$defs"].values() if _is_event(one)}
    assert types == choices


def _is_event(schema: dict[str, Any]) -> bool:
    return "event_id" in schema.get("properties", {})


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: f"{event['type']} {event.get('item', {}).get('type', '')}")
async def test_something_else_in_any_place(event: dict[str, Any]) -> None:
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with realtime_client(server) as client:
            for path in places(event):
                for wrong in WRONG:
                    await client.connection.send(json.dumps(changed(event, path, wrong)))
            await client.send(
                "session.update", event_id="last", session={"type": "realtime", "instructions": "Be calm."}
            )
            while (await client.until("session.updated"))["session"]["instructions"] != "Be calm.":
                pass
