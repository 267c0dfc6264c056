"""/health, /v1/models, /openapi.json and the demo page; and what the routes have in common."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from support.live_server import LiveServer, live_server, routes_of
from support.native_client import native_client
from support.raw_http import DONE, RawResponse, events_of, post, raw_client, request
from support.scripted_engines import ToneEngine, WordEngine

from omni_ws import __version__
from omni_ws.engine.base import EngineCapabilities, EngineState, TextOutput, TranscriptOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EngineFailed
from omni_ws.server import App
from omni_ws.transport.native.endpoint import NATIVE_PATH
from omni_ws.transport.realtime.session import REALTIME_PATH

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
MODE_B = "/v1/streaming_input/sessions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def get(server: LiveServer, target: str, *headers: str, method: str = "GET") -> RawResponse:
    async with raw_client(server.port) as client:
        await client.send(request(method, target, *headers))
        return await client.response(to_head=method == "HEAD")


class HeldEngine(EchoEngine):
    """An engine that starts when the test permits."""

    def __init__(self) -> None:
        super().__init__()
        self.state = EngineState.STARTING

    async def start(self) -> None:
        """Do nothing: the test sets the state."""


# --- health


async def test_health() -> None:
    async with live_server(served_model_name=("mine",)) as server:
        response = await get(server, "/health")
    assert response.status == 200
    assert response.json() == {
        "status": "ok",
        "engine": "fake",
        "parts": {"asr": None, "llm": {"name": "fake", "model": "fake"}, "tts": None},
        "model": "mine",
        "sessions": 0,
        "stages": ["fake"],
        "request_states": {"running": 0},
        "version": __version__,
    }


class StagedEngine(EchoEngine):
    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities, stages=("thinker", "talker", "code2wav"))


async def test_health_lists_the_stages_of_an_answer() -> None:
    async with live_server(StagedEngine()) as server:
        assert (await get(server, "/health")).json()["stages"] == ["thinker", "talker", "code2wav"]


async def test_health_names_the_parts_and_their_stages() -> None:
    async with live_server(ComposedEngine(EchoEngine(), asr=WordEngine(), tts=ToneEngine())) as server:
        health = (await get(server, "/health")).json()
        assert health["stages"] == ["asr", "llm", "tts"]
        assert health["parts"] == {
            "asr": {"name": "words", "model": "words"},
            "llm": {"name": "fake", "model": "fake"},
            "tts": {"name": "tone", "model": "tone"},
        }
        async with native_client(server) as client:
            assert client.created["parts"] == health["parts"]


async def test_an_engine_that_dies_under_a_request_is_503() -> None:
    """The failure of an engine that stays healthy is a 500 without Retry-After."""
    for fatal, told in ((True, (503, "1")), (False, (500, None))):
        async with live_server(ScriptedEngine([EngineFailed("it died", fatal=fatal)])) as server:
            response = await post(server.port, CHAT, HELLO)
        assert (response.status, response.headers.get("retry-after")) == told
        assert response.error["code"] == "engine_failed"


async def test_health_counts_what_lives() -> None:
    gate = asyncio.Event()
    async with live_server(ScriptedEngine([gate.wait])) as server:
        asking = asyncio.create_task(post(server.port, CHAT, HELLO))
        await server.until(lambda: server.engine.active_requests == 1)
        health = (await get(server, "/health")).json()
        assert (health["sessions"], health["request_states"]["running"]) == (1, 1)
        gate.set()
        await asking


@pytest.mark.parametrize(
    ("state", "said", "code"),
    [
        (EngineState.STARTING, "starting", "engine_overloaded"),
        (EngineState.UNHEALTHY, "unhealthy", "engine_failed"),
    ],
)
async def test_a_server_whose_engine_does_not_work(state: EngineState, said: str, code: str) -> None:
    engine = HeldEngine()
    engine.state = state
    async with live_server(engine, still_answers=False) as server:
        response = await get(server, "/health")
        assert (response.status, response.json()["status"], response.headers["retry-after"]) == (503, said, "1")
        asked = [(CHAT, HELLO), (SPEECH, {"input": "a"}), ("/v1/completions", {"prompt": "a"}), (MODE_B, {})]
        for path, body in asked:
            for headers in ((), ("X-Streaming-Input: true",)):
                response = await post(server.port, path, body, *headers)
                assert (response.status, response.error["code"]) == (503, code)
                assert response.headers["retry-after"] == "1"
        engine.state = EngineState.OK
        assert (await post(server.port, CHAT, HELLO)).status == 200
        assert (await get(server, "/health")).status == 200


async def test_a_server_that_drains() -> None:
    """Requests in progress finish, and new ones on open connections are refused."""
    async with live_server(still_answers=False) as server, raw_client(server.port) as client:
        body = json.dumps(HELLO).encode()
        await client.send(request("POST", CHAT, f"Content-Length: {len(body)}"), body[:1])
        await server.until(lambda: server.sessions == 1)
        server.app.sessions.admission.drain()
        response = await get(server, "/health")
        assert (response.status, response.json()["status"]) == (503, "draining")
        for path, said in ((CHAT, HELLO), (SPEECH, {"input": "a"})):
            for headers in ((), ("X-Streaming-Input: true",)):
                response = await post(server.port, path, said, *headers)
                assert (response.status, response.error["code"]) == (503, "shutting_down")
                assert response.headers["retry-after"] == "1"
        await client.send(body[1:])
        assert (await client.response()).status == 200


# --- models


async def test_models() -> None:
    async with live_server(served_model_name=("mine", "vendor/other")) as server:
        listed = (await get(server, "/v1/models")).json()
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["mine", "vendor/other"]
        for one in listed["data"]:
            assert (await get(server, f"/v1/models/{one['id']}")).json() == one
        for name in ("local-model", "whisper-1"):
            assert (await get(server, f"/v1/models/{name}")).json()["id"] == name
        response = await get(server, "/v1/models/gpt-9")
        assert (response.status, response.error["code"], response.error["param"]) == (404, "model_not_found", "id")


async def test_openai_package_lists_models() -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    async with (
        live_server() as server,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("local-model")).id == "local-model"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")


# --- the demo page


async def test_the_page_for_people() -> None:
    async with live_server() as server:
        response = await get(server, "/")
    assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<html" in response.body


@pytest.mark.parametrize("path", ["/", "/health", "/openapi.json", "/v1/models", "/v1/models/fake"])
async def test_head_is_get_without_its_content(path: str) -> None:
    async with live_server() as server:
        shown, head = await get(server, path), await get(server, path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == shown.headers["content-length"] == str(len(shown.body))
        response = await get(server, path, method="POST")
        assert (response.status, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        response = await get(server, path, method="OPTIONS")
        assert (response.status, response.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    "path",
    ["/v1", "/metric", "/v1/realtime/x", "/x", "//x"],
)
async def test_what_is_not_there(path: str) -> None:
    async with live_server() as server:
        for method in ("GET", "POST"):
            response = await get(server, path, method=method)
            assert (response.status, response.error["code"]) == (404, "not_found")


async def test_the_websocket_without_an_upgrade() -> None:
    async with live_server() as server:
        response = await get(server, NATIVE_PATH)
        assert (response.status, response.error["code"]) == (426, "upgrade_required")
        assert response.headers["upgrade"] == "websocket"


# --- the OpenAPI document


@pytest.fixture
async def description() -> dict[str, Any]:
    async with live_server() as server:
        response = await get(server, "/openapi.json")
    assert response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    return document


def check(description: dict[str, Any], schema: str, value: Any) -> None:
    registry = Registry().with_resource("urn:document", DRAFT202012.create_resource(description))
    reference = {"$ref": f"urn:document#/components/schemas/{schema}"}
    jsonschema.Draft202012Validator(reference, registry=registry).validate(value)


async def test_the_description_has_every_route_and_no_other(description: dict[str, Any]) -> None:
    async with live_server() as server:
        routes = described_routes(server.app)
    described = {(method.upper(), path) for path, item in description["paths"].items() for method in item}
    # The native WebSocket is described in asyncapi.yaml, the others by OpenAI.
    live, step = "/v1/live/sessions", "/v1/live/sessions/{session_id}"
    sockets = {NATIVE_PATH, REALTIME_PATH, f"{REALTIME_PATH}/translations", live, f"{step}/attach", f"{step}/fork"}
    assert described == routes - {("GET", path) for path in sockets}


def described_routes(app: App) -> set[tuple[str, str]]:
    return {
        (method, template.replace(":path}", "}")) for template, methods in routes_of(app).items() for method in methods
    }


async def test_answers_are_as_described(description: dict[str, Any]) -> None:
    engine = ScriptedEngine([TranscriptOutput("heard", start_ms=5), TextOutput("fine")])
    async with live_server(engine) as server:
        check(description, "Health", (await get(server, "/health")).json())
        check(description, "ModelList", (await get(server, "/v1/models")).json())
        check(description, "Model", (await get(server, "/v1/models/local-model")).json())
        check(description, "ErrorBody", (await get(server, "/nothing")).json())
        check(description, "ChatCompletion", (await post(server.port, CHAT, HELLO)).json())
        answer = await post(server.port, CHAT, {**HELLO, "stream": True, "stream_options": {"include_usage": True}})
        for event in events_of(answer)[:-1]:
            check(description, "ChatCompletionChunk", event.json())
        (event,) = events_of(await post(server.port, CHAT, {**HELLO, "stream": True, "n": 2}))
        check(description, "ErrorEvent", event.json())
    async with live_server(ToneEngine()) as server:
        audio = {**HELLO, "modalities": ["text", "audio"]}
        check(description, "ChatCompletion", (await post(server.port, CHAT, audio)).json())
        for event in events_of(await post(server.port, CHAT, {**audio, "stream": True}))[:-1]:
            check(description, "ChatCompletionChunk", event.json())
        for event in events_of(await post(server.port, SPEECH, {"input": "a", "stream": True})):
            if event != DONE:
                check(description, "SpeechChunk", event.json())
        for event in events_of(await post(server.port, SPEECH, {"input": "a", "stream_format": "sse"})):
            check(description, "SpeechDelta", event.json())


async def test_described_examples_work(description: dict[str, Any]) -> None:
    async with live_server(ToneEngine()) as server:
        checked = 0
        for path in (CHAT, SPEECH):
            for kind, media in description["paths"][path]["post"]["requestBody"]["content"].items():
                if "example" not in media:
                    continue
                streaming = () if kind == "application/json" else ("X-Streaming-Input: true",)
                body = media["example"]
                sent = body.encode() if isinstance(body, str) else body
                response = await post(server.port, path, sent, f"Content-Type: {kind}", *streaming)
                assert response.status == 200, (path, kind, response.body)
                checked += 1
        assert checked >= 4
