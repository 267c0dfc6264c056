"""Errors name fields as the client wrote them: on each route, for each field, by each engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post
from support.scripted_upstream import refuses, says, upstream

from omni_ws.config.model import RemoteConfig, VoiceChoice
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.wire.openai_fields import MEDIA_FIELDS, NEVER_AVAILABLE, MediaLimitFields
from omni_ws.wire.openai_requests import ChatBody, CompletionBody, SpeechBody, TranscriptionBody
from omni_ws.wire.session_config import FIELDS, SamplingConfig

WAV = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"

BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
    SPEECH: {"input": "hello", "response_format": "wav"},
    TRANSCRIPTIONS: {},
}
_SAMPLING = set(SamplingConfig.__struct_fields__)
_SHARED = {*_SAMPLING, *(f"sampling.{name}" for name in _SAMPLING), "stage_sampling", "stage_params", "model"}
_MEDIA_LIMITS = {*MediaLimitFields.__struct_fields__, "video_min_frames", "video_max_frames", "video_total_pixels"}
_CHAT_FIELDS = {*ChatBody.__struct_fields__, *FIELDS, *_SHARED, *NEVER_AVAILABLE, *MEDIA_FIELDS, *_MEDIA_LIMITS}
KNOWN: Mapping[str, set[str]] = {
    CHAT: _CHAT_FIELDS
    | {"talker_temperature", "talker_seed", "audio.voice", "audio.format", "stream_options.include_usage"},
    COMPLETIONS: {*CompletionBody.__struct_fields__, *_SHARED, *NEVER_AVAILABLE, "suffix"},
    SPEECH: {*SpeechBody.__struct_fields__, *FIELDS, *_SHARED, *NEVER_AVAILABLE, *MEDIA_FIELDS, *_MEDIA_LIMITS, "n"},
    TRANSCRIPTIONS: {*TranscriptionBody.__struct_fields__, "prompt", "include", "chunking_strategy"},
}
#: Fields that a route, or an ordinary body, ignores.
IGNORED: Mapping[str, set[str]] = {
    CHAT: {"max_lead_ms"},
    COMPLETIONS: set(),
    SPEECH: {"max_lead_ms", "modalities", "task", "stream_options", "usage_on_final_chunk"},
    # Any text may name a model, and all fields of a form are texts.
    TRANSCRIPTIONS: {"model"},
}
#: No field accepts all of them; those that accept any object or list refuse a number.
WRONG: tuple[Any, ...] = ({"wrong": []}, -7.5, [{"wrong": 1}], "wrong", 1 << 63)
#: Valid values, of which each engine supports some.
RIGHT: Mapping[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("top_k", "seed", "n", "logprobs", "priority", "max_tokens", "max_completion_tokens"), 2),
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "voice": "nobody",
    "model": "another",
    "modalities": ["text", "audio"],
    "audio": {"voice": "nobody", "format": "wav"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "turn_detection": {"type": "server_vad"},
    "after_start": "extend",
    "task": "transcribe",
    "images": [PIXEL],
    "stage_sampling": {"talker": {"temperature": 0.5}},
    "stage_params": {"fake": {"fail_after_chunks": -1}},
    "talker_temperature": 0.5,
    "image_max_pixels": 5000,
    "video_fps": 2,
    "echo": True,
    "language": "xx",
    "timestamp_granularities": ["word"],
}


@asynccontextmanager
async def _remote() -> AsyncIterator[LiveServer]:
    async with upstream(says("hi")) as scripted:
        config = RemoteConfig(upstreams=(scripted.url,), start_timeout_sec=0)
        async with live_server(RemoteEngine(config), remote=config) as server:
            yield server


def _embedded() -> Any:
    return live_server(EmbeddedEngine(voice=VoiceChoice.NONE, max_recognisers=1))


SERVERS: Mapping[str, Any] = {"fake": lambda: live_server(EchoEngine()), "remote": _remote, "embedded": _embedded}
ENGINES = ["fake", "remote", pytest.param("embedded", marks=pytest.mark.slow)]


async def send(server: LiveServer, route: str, fields: Mapping[str, Any]) -> RawResponse:
    """``fields`` and those that the route requires; a dot in a name leads into an object."""
    body = dict(BODIES[route])
    for name, value in fields.items():
        outer, _, inner = name.partition(".")
        body[outer] = {inner: value} if inner else value
    if route != TRANSCRIPTIONS:
        return await post(server.port, route, body, "Accept: application/json")
    parts = [('name="file"; filename="a.wav"', WAV)]
    parts += [(f'name="{name}"', str(value).encode()) for name, value in body.items()]
    form = b"".join(
        b"--x\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return await post(server.port, route, form + b"--x--\r\n", "Content-Type: multipart/form-data; boundary=x")


def names(param: str | None, field: str) -> bool:
    """Whether ``param`` names the field, or a part of it."""
    return param is not None and (param == field or param.startswith((f"{field}.", f"{field}[")))


@pytest.mark.parametrize(
    ("engine", "route"),
    [*(("fake", route) for route in KNOWN), ("remote", CHAT), pytest.param("embedded", CHAT, marks=pytest.mark.slow)],
)
async def test_a_bad_value_is_refused_by_the_field_that_has_it(engine: str, route: str) -> None:
    async with SERVERS[engine]() as server:
        for field in sorted(KNOWN[route] - IGNORED[route]):
            refusals = [error async for error in _refusals(server, route, field)]
            assert refusals, f"{field} takes anything"
            for value, status, error in refusals:
                # An engine that lacks the whole route names the field that the route requires.
                assert status < 500, (field, value, error)
                lacks = error["code"] == "unsupported_parameter" and error["param"] in BODIES[route]
                assert lacks or names(error["param"], field) or error["param"] is None, (field, value, error)
                if error["code"] == "invalid_value":
                    assert names(error["param"], field), (field, value, error)


async def _refusals(server: LiveServer, route: str, field: str) -> AsyncIterator[tuple[Any, int, dict[str, Any]]]:
    for value in WRONG:
        response = await send(server, route, {field: value})
        if response.status != 200:
            yield value, response.status, response.error


def _cases() -> Iterator[Any]:
    for route, known in KNOWN.items():
        for field in sorted(RIGHT.keys() & (known | {f"sampling.{name}" for name in _SAMPLING})):
            yield route, field
            if field in _SAMPLING and route != TRANSCRIPTIONS:
                yield route, f"sampling.{field}"


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_an_engine_lacks_is_refused_by_the_field_that_asks_for_it(engine: str) -> None:
    refused = set()
    async with SERVERS[engine]() as server:
        for route, field in _cases():
            response = await send(server, route, {field: RIGHT[field.removeprefix("sampling.")]})
            if response.status == 200:
                continue
            assert response.status in (400, 404, 415), (route, field, response.error)
            # An unsupported feature is named by the field that asks for it, or by none, never by one of the server's.
            known = {field, *BODIES[route], None}
            param = response.error["param"]
            assert param in known or names(param, field), (route, field, response.error)
            if names(param, field):
                refused.add(field)
    assert {"sampling.logit_bias", "logit_bias", "images" if engine == "remote" else "echo"} <= refused


@pytest.mark.parametrize(
    ("theirs", "sent", "param"),
    [
        ("temperature", {"temperature": 0.5}, "temperature"),
        ("temperature", {"sampling": {"temperature": 0.5}}, "sampling.temperature"),
        ("max_completion_tokens", {"max_tokens": 5}, "max_tokens"),
        ("max_tokens", {"max_completion_tokens": 5}, "max_completion_tokens"),
        ("stop[1]", {"stop": ["a", "b"]}, "stop[1]"),
        ("temperature", {}, None),  # it was not sent
        ("stream_options.include_usage", {}, None),
        ("messages[0].content", {}, None),  # a field of the upstream's request
    ],
)
async def test_an_upstreams_refusal_names_the_clients_field(
    theirs: str, sent: dict[str, Any], param: str | None
) -> None:
    said = {"error": {"message": "this will not do", "param": theirs, "code": "invalid_value"}}
    async with upstream(refuses(400, said)) as scripted:
        config = RemoteConfig(upstreams=(scripted.url,), start_timeout_sec=0)
        async with live_server(RemoteEngine(config), remote=config) as server:
            response = await send(server, CHAT, sent)
    assert (response.status, response.error["message"], response.error["param"]) == (400, "this will not do", param)


async def test_input_that_an_engine_cannot_take_is_named_by_its_field() -> None:
    async with _remote() as server:
        parts = [{"type": "image_url", "image_url": {"url": PIXEL}}]
        for field, value in {"messages": [{"role": "user", "content": parts}], "images": [PIXEL]}.items():
            response = await post(server.port, CHAT, {**BODIES[CHAT], field: value})
            assert (response.status, response.error["code"], response.error["param"]) == (
                415,
                "unsupported_modality",
                field,
            )
