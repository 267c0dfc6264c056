"""What ``/v1/realtime`` says of a field with a wrong value: clients show these texts."""

from __future__ import annotations

from typing import Any

from support.live_server import live_server
from support.realtime_client import failed, realtime_client
from support.scripted_engines import CapableEngine

MESSAGE = {"type": "message", "role": "user", "content": []}
CREATE = "conversation.item.create"
RESPOND = "response.create"
UPDATE = "session.update"
NUMBER = "must be a number, 0 or more"
METADATA = "metadata must be an object of at most 16 strings of at most 512 characters under names of 64"
TOOLS = "tools must be a list of objects"
MODALITIES = "output_modalities must be a list of text or audio"


def content(*parts: Any) -> dict[str, Any]:
    return {"item": {**MESSAGE, "content": list(parts)}}


def audio(**fields: Any) -> dict[str, Any]:
    return {"session": {"audio": fields}}


#: The type of an event, its fields, the message, and the field that it is about.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("input_audio_buffer.append", {}, "audio must be a string", "audio"),
    ("input_audio_buffer.append", {"audio": 5}, "audio must be a string", "audio"),
    ("input_audio_buffer.append", {"audio": "?"}, "audio is not base64", "audio"),
    (UPDATE, {"session": []}, "session must be an object", "session"),
    (UPDATE, {"session": {"tools": [{}, 5]}}, TOOLS, "session.tools"),
    (UPDATE, {"session": {"modalities": ["video"]}}, MODALITIES, "session.output_modalities"),
    (UPDATE, {"session": {"output_modalities": "text"}}, MODALITIES, "session.output_modalities"),
    (UPDATE, {"session": {"audio": 5}}, "session.audio must be an object", "session.audio"),
    (UPDATE, audio(output=[]), "session.audio.output must be an object", "session.audio.output"),
    (
        UPDATE,
        audio(output={"format": 5}),
        "session.audio.output.format must be an object",
        "session.audio.output.format",
    ),
    (
        UPDATE,
        audio(input={"transcription": "on"}),
        "session.audio.input.transcription must be an object",
        "session.audio.input.transcription",
    ),
    (
        UPDATE,
        audio(input={"turn_detection": {"type": "semantic_vad", "eagerness": []}, "format": {"type": None}}),
        "session.audio.input.format.type must be one of audio/pcm, audio/pcmu, audio/pcma",
        "session.audio.input.format.type",
    ),
    (
        UPDATE,
        audio(input={"turn_detection": {"type": "semantic_vad", "eagerness": [["low"]]}}),
        "session.audio.input.turn_detection.eagerness must be low, medium, high or auto",
        "session.audio.input.turn_detection.eagerness",
    ),
    (CREATE, {"item": "hi"}, "item must be an object", "item"),
    (CREATE, {"item": {}}, "item.type must be a string", "item.type"),
    (CREATE, {"item": {"type": "mcp_call"}}, "items of type 'mcp_call' are not supported here", "item.type"),
    (CREATE, {"item": {**MESSAGE, "id": 5}}, "item.id must be a string", "item.id"),
    (CREATE, {"item": {**MESSAGE, "id": "x" * 513}}, "item.id is too long: at most 512 characters", "item.id"),
    (CREATE, {"item": {**MESSAGE, "role": []}}, "item.role must be system, user or assistant", "item.role"),
    (CREATE, {"item": {**MESSAGE, "role": "tool"}}, "item.role must be system, user or assistant", "item.role"),
    (CREATE, {"item": {**MESSAGE, "content": "hi"}}, "item.content must be a list", "item.content"),
    (CREATE, content({"type": "input_text", "text": "hi"}, 5), "item.content[1] must be an object", "item.content[1]"),
    (CREATE, content({"type": "input_text"}), "item.content[0].text must be a string", "item.content[0].text"),
    (
        CREATE,
        content({"type": "input_audio", "audio": "?"}),
        "item.content[0].audio is not base64",
        "item.content[0].audio",
    ),
    (
        CREATE,
        content({"type": "output_audio"}),
        "item.content[0].type 'output_audio' does not fit the role user",
        "item.content[0].type",
    ),
    (CREATE, {"item": {"type": "function_call", "call_id": "c"}}, "item.name must be a string", "item.name"),
    (
        CREATE,
        {"item": {"type": "function_call", "call_id": "c", "name": "n", "arguments": {}}},
        "item.arguments must be a string",
        "item.arguments",
    ),
    ("conversation.item.delete", {"item_id": None}, "item_id must be a string", "item_id"),
    ("conversation.item.truncate", {"item_id": "one"}, f"audio_end_ms {NUMBER}", "audio_end_ms"),
    ("conversation.item.truncate", {"item_id": "one", "audio_end_ms": True}, f"audio_end_ms {NUMBER}", "audio_end_ms"),
    (
        "conversation.item.truncate",
        {"item_id": "one", "audio_end_ms": 1 << 53},
        f"audio_end_ms {NUMBER}",
        "audio_end_ms",
    ),
    (
        "conversation.item.truncate",
        {"item_id": "one", "audio_end_ms": 0, "content_index": -1},
        f"content_index {NUMBER}",
        "content_index",
    ),
    (RESPOND, {"response": 5}, "response must be an object", "response"),
    (RESPOND, {"event_id": 5}, "event_id must be a string", "event_id"),
    (RESPOND, {"response": {"audio": 5}}, "audio must be an object", "response.audio"),
    (RESPOND, {"response": {"audio": {"output": 5}}}, "audio.output must be an object", "response.audio.output"),
    (RESPOND, {"response": {"tools": 5}}, TOOLS, "response.tools"),
    (RESPOND, {"response": {"input": [5]}}, "response.input must be a list of items", "response.input"),
    (
        RESPOND,
        {"response": {"input": [{"type": "item_reference"}]}},
        "response.input[0].id must be a string",
        "response.input[0].id",
    ),
    (RESPOND, {"response": {"metadata": {"a": 5}}}, METADATA, "response.metadata"),
    (RESPOND, {"response": {"metadata": {"a" * 65: ""}}}, METADATA, "response.metadata"),
    ("response.cancel", {"response_id": ["resp_1"]}, "response_id must be a string", "response_id"),
]


async def test_what_is_said_of_a_wrong_value() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.say("hello", id="one")
        for kind, fields, message, param in REFUSED:
            error = await failed(client, kind, **fields)
            assert (error["message"], error["param"]) == (message, param), (kind, fields)


async def test_what_is_empty_is_no_id() -> None:
    async with live_server() as server, realtime_client(server) as client:
        nothing: tuple[Any, ...] = (None, "", 0, False, [], {})
        for empty in nothing:
            assert (await client.say("hello", id=empty))["id"].startswith("item_")
            late = await failed(client, "response.cancel", response_id=empty)
            assert late["code"] == "response_cancel_not_active"


async def test_an_output_that_is_no_text_is_taken_as_its_json() -> None:
    async with live_server(CapableEngine()) as server, realtime_client(server) as client:
        for output, shown in (({"hot": [True, "é"]}, '{"hot":[true,"é"]}'), (None, "null"), ("hot", "hot")):
            await client.send(
                "conversation.item.create", item={"type": "function_call_output", "call_id": "c", "output": output}
            )
            assert (await client.until("conversation.item.done"))["item"]["output"] == shown
