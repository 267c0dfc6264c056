"""The verdicts on OpenAI's Realtime API: they are complete, and true of what has no effect or is refused."""

from __future__ import annotations

import ast
import base64
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.inline_workers import inline
from support.live_server import live_server
from support.realtime_client import failed, openai_names, realtime_client, text_of
from support.scripted_engines import CapableEngine, PlayingEngine, said

from benchmarks.mutants.inert import INERT, plant
from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.transport.realtime.effects import MAX_WARNINGS
from omni_ws.wire.realtime_events import (
    ParityVerdict,
    verdict_of,
    verdicts,
)

TESTS = Path(__file__).parents[2]
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+M8AAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
IMAGE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


# The table.


def test_every_name_of_the_package_has_a_verdict() -> None:
    assert sorted(name for name in openai_names() if verdict_of(name) is None) == []


def test_no_verdict_is_on_a_name_that_is_gone() -> None:
    names = openai_names()
    assert sorted(name for name, one in verdicts().items() if name not in names and not one.extension) == []
    assert sorted(name for name, one in verdicts().items() if name in names and one.extension) == []


def unclear(table: dict[str, ParityVerdict]) -> list[str]:
    """The rows that do not have exactly one verdict."""
    return [name for name, one in table.items() if bool(one.acts) + bool(one.not_in_effect) + bool(one.refused) != 1]


def test_a_name_has_one_verdict() -> None:
    assert unclear(verdicts()) == []
    assert unclear({"a": ParityVerdict(), "b": ParityVerdict(acts="x", refused="y"), "c": ParityVerdict(acts="x")}) == [
        "a",
        "b",
    ]


def test_what_is_below_something_that_acts_needs_a_verdict_of_its_own() -> None:
    assert verdict_of("session.audio.output.loudness") is None
    assert verdict_of("session.nothing") is None
    assert verdict_of("session.tracing.nothing") is verdicts()["session.tracing"]


@cache
def functions_of(path: Path) -> frozenset[str]:
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(one.name for one in found if isinstance(one, kinds))


def test_what_acts_names_a_test() -> None:
    missing = []
    for name, verdict in verdicts().items():
        if verdict.acts:
            file, _, test = verdict.acts.partition("::")
            path = TESTS / ("" if "/" in file else "transport/realtime") / file
            if not path.is_file() or test not in functions_of(path):
                missing.append((name, verdict.acts))
    assert missing == []


@pytest.mark.parametrize("name", ["", "session.instructions", "response.tools.description", "server.response.status"])
async def test_a_name_may_be_made_inert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown, and does nothing: what ``python -m benchmarks.mutants.inert`` runs the tests of the table with."""
    plant(monkeypatch.setattr)
    INERT.begin(name)
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        assert (await client.update(instructions="Be brief."))["instructions"] == "Be brief."
        await client.say("Is it so?")
        response = await client.respond(tools=[{"type": "function", "name": "find", "description": "Finds."}])
    (request,) = engine.requests
    assert bool(request.instructions) is (name != "session.instructions")
    assert ("description" in request.tools[0]["function"]) is (name != "response.tools.description")
    assert (response["status"] == "completed") is (name != "server.response.status")


# What has no effect.

#: By name, a value of a field that is not in effect.
NOT_IN_EFFECT: dict[str, Any] = {
    "session.include": ["item.input_audio_transcription.logprobs"],
    "session.tracing": {"workflow_name": "w", "group_id": "g", "metadata": {"a": "b"}},
    "session.prompt": {"id": "pmpt_1", "version": "2", "variables": {"city": "Bonn"}},
    "session.audio.input.transcription.delay": "low",
    "session.audio.input.noise_reduction.strength": 0.5,
    "response.prompt": {"id": "pmpt_1"},
    "item.message.content.detail": "low",
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    fields: dict[str, Any] = value
    return fields


def found(shown: Any, path: str) -> Any:
    for name in path.split("."):
        shown = shown[name]
    return shown


def test_everything_that_is_not_in_effect_is_tried() -> None:
    of_client = {name for name, one in verdicts().items() if one.not_in_effect and not name.startswith("server.")}
    assert of_client == NOT_IN_EFFECT.keys()


def warned(event: dict[str, Any], code: str = "not_in_effect") -> list[str]:
    """The fields that an event warns of. All of its warnings have this code."""
    warnings = event.get("warnings", ())
    assert {one["code"] for one in warnings} <= {code}, warnings
    assert all(one["param"] in one["message"] for one in warnings)
    return [one["param"] for one in warnings]


async def test_what_is_not_in_effect_is_shown_and_named() -> None:
    pytest.importorskip("pywebrtc_audio")
    async with live_server() as server, realtime_client(inline(server)) as client:
        for name, value in NOT_IN_EFFECT.items():
            place, _, path = name.partition(".")
            if place != "session":
                continue
            fields = nested(path, value)
            if path.endswith(".strength"):
                fields["audio"]["input"]["noise_reduction"]["type"] = "near_field"
            session = await client.update(**fields)
            assert warned(client.received[-1]) == [name]
            assert client.received[-1]["warnings"][0]["message"].endswith(verdicts()[name].reason)
            assert found(session, path) == value
            session = await client.update(**nested(path.rpartition(".")[0] or path, None))
            assert "warnings" not in client.received[-1]


async def test_a_response_and_an_item_name_what_is_not_in_effect() -> None:
    async with live_server() as server, realtime_client(server) as client:
        content = [
            {"type": "input_text", "text": "hello"},
            {"type": "input_image", "image_url": IMAGE, "detail": "low"},
        ]
        item = {"type": "message", "role": "user", "content": content}
        await client.send("conversation.item.create", item=item)
        assert warned(await client.until("conversation.item.added")) == ["item.content[1].detail"]
        await client.send("response.create", response={"prompt": {"id": "pmpt_1"}, "input": [item]})
        created = await client.until("response.created")
        assert warned(created) == ["response.prompt", "response.input[0].content[1].detail"]
        assert (await client.response())["status"] == "completed"


#: An engine that can do nothing but write.
LESS: dict[str, Any] = {
    "input_modalities": frozenset({Modality.TEXT}),
    "output_modalities": frozenset({OutputModality.TEXT}),
    "sampling": frozenset(),
    "sampling_no_ops": frozenset(),
}
#: By name, a value that is not in effect with such an engine.
LACKING: dict[str, Any] = {
    "model": "gpt-realtime-2",
    "output_modalities": ["audio"],
    "max_output_tokens": 7,
    "parallel_tool_calls": False,
    "reasoning.effort": "low",
    "truncation.token_limits.post_instructions": 1 << 20,
    "audio.input.noise_reduction": {"type": "near_field"},
    "audio.input.transcription.language": "fr",
    "audio.input.transcription.prompt": "Ng",
    "audio.input.transcription.keywords": ["Ng"],
    "audio.input.transcription.languages": ["de", "en"],
    "audio.input.transcription.model": "whisper-1",
    "audio.input.turn_detection": {"type": "server_vad"},
    "audio.output.voice": "marin",
    "temperature": 0.5,
}
#: Names that stand for others, and those that have tests of their own.
ELSEWHERE = {
    "session.audio.input.noise_reduction.type": "session.audio.input.noise_reduction",
    "session.audio.output.voice.id": "session.audio.output.voice",
    "session.audio.output.speed": "test_how_a_session_speaks",
    "session.audio.input.turn_detection.type": "test_detection_without_a_model_is_told",
    "session.audio.input.turn_detection.eagerness": "test_detection_without_a_model_is_told",
    "session.audio.input.turn_detection.backchannel": "test_mm_hm_without_semantic_vad_is_named_as_without_effect",
}


def test_everything_that_an_engine_may_lack_is_tried() -> None:
    places = [name for name, one in verdicts().items() if one.otherwise and name.startswith("session.")]
    assert {f"session.{name}" for name in LACKING} | ELSEWHERE.keys() == {
        one
        for one in places
        if ".format" not in one  # calls decide about it: test_webrtc_call.py
    }


@pytest.mark.parametrize("name", LACKING)
async def test_what_the_engine_lacks_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.service.listening.has_library", lambda: False)
    engine = PlayingEngine([said("yes")], **LESS)
    fields = nested(name, LACKING[name])
    if name.startswith("truncation"):
        fields["truncation"] |= {"type": "retention_ratio", "retention_ratio": 0.5}
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(**fields)
        assert warned(client.received[-1]) == [f"session.{name}"]
        await client.say("is it so?")
        assert text_of(await client.respond()) == "yes"


async def test_an_engine_that_can_everything_has_nothing_to_name() -> None:
    engine = CapableEngine([said("yes")], upstream=frozenset({"reasoning_effort"}), voices=("marin",))
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        for name, value in LACKING.items():
            if name.endswith("model") or "noise" in name or "truncation" in name:
                continue
            value = "de" if name.endswith("language") else value
            await client.update(**nested(name, value))
            assert warned(client.received[-1]) == [], name
        await client.update(model=client.received[0]["session"]["model"])
        assert warned(client.received[-1]) == []


async def test_detection_without_a_model_is_told() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        for detection, name in (
            ({"type": "semantic_vad", "eagerness": "low"}, "type"),
            ({"type": "server_vad", "eagerness": "low"}, "eagerness"),
        ):
            await client.update(audio={"input": {"turn_detection": detection}})
            assert warned(client.received[-1]) == [f"session.audio.input.turn_detection.{name}"]


# What OpenAI does not have.


async def test_unknown_fields_are_named_and_left_out() -> None:
    async with live_server() as server, realtime_client(server) as client:
        session = await client.update(colour="red", audio={"output": {"volume": 3}}, instructions="Be brief.")
        assert warned(client.received[-1], "unknown_parameter") == ["session.colour", "session.audio.output.volume"]
        assert ("colour" in session, session["instructions"]) == (False, "Be brief.")
        await client.send("session.update", session={"type": "realtime"}, reason="so")
        assert warned(await client.until("session.updated"), "unknown_parameter") == ["reason"]
        content = [{"type": "input_text", "text": "hello", "size": 3}]
        item = {"type": "message", "role": "user", "content": content}
        await client.send("conversation.item.create", item=item, after="x")
        added = await client.until("conversation.item.added")
        assert warned(added, "unknown_parameter") == ["after", "item.content[0].size"]
        await client.send("response.create", response={"colour": "red"})
        assert warned(await client.until("response.created"), "unknown_parameter") == ["response.colour"]
        assert text_of(await client.response()) == "hello"


async def test_fields_of_the_beta_version_are_known() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        await client.update(modalities=["text"], voice="echo", turn_detection=None, input_audio_format="pcm16")
        assert warned(client.received[-1]) == []


@pytest.mark.parametrize("count", [MAX_WARNINGS, MAX_WARNINGS + 1])
async def test_the_most_warnings(count: int) -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.update(**{f"field_{number}": number for number in range(count)})
        assert len(warned(client.received[-1], "unknown_parameter")) == MAX_WARNINGS
        await client.update(**{"x" * 100_000: 1})
        assert len(warned(client.received[-1], "unknown_parameter")[0]) == 128


# What is refused.

#: By name, an event that has it, and the field that the error names.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {}
_OF_SESSION = ("allowed_callers", "defer_loading", "connector_id", "tunnel_id")
_OF_RESPONSE = ("server_url", "allowed_tools", "authorization", "headers", "require_approval", "server_description")
for _scope, _kind, _names in (
    ("session", "session.update", _OF_SESSION),
    ("response", "response.create", _OF_SESSION + _OF_RESPONSE),
):
    _named = {_scope: {"tool_choice": {"type": "mcp", "server_label": "one"}}}
    REFUSED[f"{_scope}.tool_choice.server_label"] = _kind, _named, f"{_scope}.tool_choice.type"
    for _name in _names:
        _tool = {"type": "mcp", "server_label": "one", _name: ["direct"] if _name == "allowed_callers" else "x"}
        _place = f"tools[0].{_name}" if _scope == "session" else "tools[0]"
        REFUSED[f"{_scope}.tools.{_name}"] = _kind, {_scope: {"tools": [_tool]}}, f"{_scope}.{_place}"


def test_everything_that_is_refused_is_tried() -> None:
    assert {name for name, one in verdicts().items() if one.refused} == REFUSED.keys()


async def test_what_is_refused_is_named() -> None:
    allowed = {"mcp_servers": ("example.org",)}
    async with live_server(CapableEngine(), realtime=allowed) as server, realtime_client(server) as client:
        await client.say("hello")
        for kind, fields, param in REFUSED.values():
            assert (await failed(client, kind, **fields))["param"] == param
