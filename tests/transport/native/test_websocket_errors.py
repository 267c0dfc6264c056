"""What a client may do wrong, and what goes wrong behind the server: each has its code, and what can go on goes on."""

from __future__ import annotations

import asyncio
import gzip
import math
import random
import time
from typing import Any

import numpy as np
import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NATIVE, NativeClient, frame_bytes, native_client, raw_websocket, text
from support.raw_http import raw_client, request, websocket_upgrade
from websockets.frames import Close, Opcode

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import AudioOutput, EngineState, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineOverloaded,
    OmniError,
    RateLimited,
    UnsupportedFormat,
)
from omni_ws.wire.frames import max_frame_bytes


async def still_answers(client: NativeClient) -> None:
    await client.say("still here")
    assert (await client.answer()).text == "still here"


# frames


BAD_FRAMES: list[tuple[str | bytes, str, str | None]] = [
    ("", "invalid_frame", None),
    ("{", "invalid_frame", None),
    ("[]", "invalid_frame", None),
    ('"input_chunk"', "invalid_frame", None),
    ("null", "invalid_frame", None),
    ('{"type":"ping","t":NaN}', "invalid_frame", None),
    ('{"type":"ping"} x', "invalid_frame", None),
    ("{}", "invalid_frame", "type"),
    ('{"type":5}', "invalid_frame", "type"),
    ('{"type":null}', "invalid_frame", "type"),
    ('{"type":"speak"}', "unknown_type", "type"),
    ('{"type":"output_chunk"}', "unknown_type", "type"),
    ('{"type":"input_chunk","text":"x"}', "invalid_value", "sequence_id"),
    ('{"type":"input_chunk","offset":0,"text":"x"}', "unsupported_parameter", "offset"),
    ('{"type":"cancel","request_id":7}', "invalid_value", "request_id"),
    ('{"type":"output_ack"}', "invalid_value", "sequence_id"),
    ('{"type":"output_ack","sequence_id":0,"played_ms":-1}', "invalid_value", "played_ms"),
    ('{"type":"ping","t":' + "[" * 40 + "]" * 40 + "}", "invalid_frame", None),
    ('{"type":"ping","t":' + "[" * 100_000 + "]" * 100_000 + "}", "invalid_frame", None),
    ('{"type":"session_config","stage_params":' + '{"a":' * 40 + "1" + "}" * 41, "invalid_frame", None),
    (b"", "invalid_frame", None),
    (b"\x01\x01\x02\x00\x00\x00\x00\x00\x00\x00\x00", "invalid_frame", None),
    (b"\x02\x01\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00", "invalid_frame", None),
    (b"\x01\x02\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00", "invalid_frame", None),
    (b"RIFF....WAVEfmt ", "invalid_frame", None),
]


async def test_bad_frames_leave_the_session_open() -> None:
    async with live_server() as server:
        for message, code, param in BAD_FRAMES:
            async with native_client(server) as client:
                await client.raw(message)
                error = await client.error()
                assert (error["code"], error.get("param"), error["retryable"]) == (code, param, False), message
                assert len(error["message"]) < 500, message
                await still_answers(client)


BAD_CHUNKS: list[tuple[dict[str, Any], str, str]] = [
    ({"payload": "?"}, "invalid_frame", "payload"),
    ({"payload": "AAA"}, "invalid_frame", "payload"),
    ({"payload": "A-_A"}, "invalid_frame", "payload"),
    ({"payload": 5}, "invalid_frame", "payload"),
    ({"text": ["x"]}, "invalid_frame", "text"),
    ({"text": "x", "payload": "AAAA"}, "invalid_value", "text"),
    ({"text": "x", "modality": "image"}, "invalid_value", "modality"),
    ({"text": "x", "modality": "smell"}, "invalid_value", "modality"),
    ({"text": "x", "end_of_input": "yes"}, "invalid_value", "end_of_input"),
    ({"text": "x", "timestamp_ms": -1}, "invalid_value", "timestamp_ms"),
    ({"text": "x", "timestamp_ms": 2**53}, "invalid_value", "timestamp_ms"),
    ({"text": "x", "format": 3}, "invalid_value", "format"),
    ({"text": "x", "format": "text/plain"}, "invalid_value", "format"),
    ({"text": "x", "role": "tool"}, "invalid_value", "tool_call_id"),
    ({"text": "x", "role": "tool", "tool_call_id": "call_1"}, "unsupported_parameter", "role"),
    ({"text": "x", "offset": 3}, "unsupported_parameter", "offset"),
    ({"payload": "AAAA", "format": "pcm24"}, "unsupported_format", "format"),
    ({"payload": "AAAA", "format": "audio/pcm;rate=1"}, "invalid_value", "format"),
    ({"payload": "AAAA", "modality": "image", "format": "text/html"}, "unsupported_format", "format"),
    ({"payload": "AAAA", "modality": "video", "format": "audio/wav"}, "unsupported_format", "format"),
]


async def test_bad_chunks_are_named_and_their_numbers_used_up() -> None:
    async with live_server() as server:
        for fields, code, param in BAD_CHUNKS:
            async with native_client(server) as client:
                await client.send("input_chunk", sequence_id=0, **fields)
                error = await client.error()
                assert (error["code"], error["param"], error["sequence_id"]) == (code, param, 0), fields
                await client.send("input_chunk", sequence_id=0, text="a duplicate now")
                await client.send("input_chunk", sequence_id=1, text="good", end_of_input=True)
                assert (await client.answer()).text == "good", fields


@pytest.mark.parametrize("header", [b"\x01\x01\x09\x00", b"\x01\x01\x02\x04", b"\x01\x01\x00\x00"])
async def test_bad_binary_modality_or_flags_use_the_number_up(header: bytes) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.raw(header + bytes(8) + b"payload")
        error = await client.error()
        assert (error["code"], error["sequence_id"]) == ("invalid_frame", 0)
        client.next_sequence_id = 1
        await still_answers(client)


async def test_garbage_of_many_kinds() -> None:
    chance = random.Random(7)
    async with live_server() as server, native_client(server) as client:
        for _ in range(300):
            await client.raw(chance.randbytes(chance.randrange(1, 40)))
            await client.raw("".join(chance.choices('{}[]",:type0chunk\\ué', k=chance.randrange(30))))
        await client.barrier()
        codes = {frame["error"]["code"] for frame in client.seen("error")}
        assert codes == {"invalid_frame"}
        await still_answers(client)


async def test_text_that_is_not_utf8_closes_with_1007() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(frame_bytes(Opcode.TEXT, b'{"type":"ping","t":"\xff"}'))
        assert await peer.close_code() == 1007


CHARACTERS = "grün 👋".encode()


async def send_text(client: NativeClient, payload: bytes, *, binary: bool, end: bool = False) -> None:
    if binary:
        await client.binary(payload, Modality.TEXT, end=end)
    else:
        await client.chunk(payload, modality="text", end=end)


@pytest.mark.parametrize("binary", [False, True])
async def test_text_that_is_not_utf8_is_refused_with_its_chunk(binary: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await send_text(client, b"one ", binary=binary)
        await send_text(client, b"\xff\xff", binary=binary, end=True)  # and its end is none
        error = await client.error()
        assert (error["code"], error["param"], error["sequence_id"]) == ("invalid_value", "payload", 1)
        await send_text(client, b"two", binary=binary, end=True)
        answer = await client.answer()
        assert (answer.text, answer.reason, answer.errors) == ("one two", "stop", [])
        await still_answers(client)


@pytest.mark.parametrize("binary", [False, True])
async def test_characters_may_be_split_between_chunks(binary: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        for position in range(len(CHARACTERS)):
            await send_text(client, CHARACTERS[position : position + 1], binary=binary)
        await client.send("finish")
        answer = await client.answer()
        assert (answer.text, answer.errors) == ("grün 👋", [])


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("follows", ["end", "finish", "text", "image", "audio"])
async def test_a_character_that_breaks_off_is_told_with_the_chunk_that_it_began_in(follows: str, binary: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await send_text(client, b"one ", binary=binary)
        await send_text(client, b"two " + CHARACTERS[-4:-2], binary=binary)
        await send_text(client, CHARACTERS[-2:-1], binary=binary, end=follows == "end")
        match follows:
            case "text":
                await send_text(client, b"three", binary=binary, end=True)
            case "image":
                await client.binary(b"image", Modality.IMAGE)
            case "audio":
                await client.binary(bytes(640))
        await client.send("finish")
        answer = await client.answer()
        (error,) = answer.errors
        assert (error["code"], error["param"], error["sequence_id"]) == ("invalid_value", "payload", 1)
        assert "ends inside a character" in error["message"]
        rest = {"text": "three", "image": "Received 1 image."}.get(follows, "")
        assert (answer.text, answer.reason) == (f"one two {rest}", "stop")


# sizes


async def test_largest_message_and_one_byte_more() -> None:
    limit = max_frame_bytes(1000)
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as server, native_client(server) as client:
        ping = orjson.dumps({"type": "ping", "t": ""}).decode()
        await client.raw(ping.replace('""', '"' + "x" * (limit - len(ping)) + '"'))
        assert len((await client.until("pong"))["t"]) == limit - len(ping)
        await client.raw(ping.replace('""', '"' + "x" * (limit - len(ping) + 1) + '"'))
        assert await client.closed() == 1009
        assert client.seen("error") == []


@pytest.mark.parametrize("fragmented", [False, True])
async def test_too_big_a_message_is_refused_by_its_header(fragmented: bool) -> None:
    limit = max_frame_bytes(1000)
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        if fragmented:
            await peer.send(frame_bytes(Opcode.TEXT, b" " * (limit - 10), fin=False))
            await peer.send(frame_bytes(Opcode.CONT, b" " * 11, fin=True))
        else:
            await peer.send(frame_bytes(Opcode.BINARY, bytes(limit + 1))[:14])
        assert await peer.close_code() == 1009


@pytest.mark.parametrize("binary", [False, True])
async def test_largest_chunk_and_one_byte_more(binary: bool) -> None:
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as server, native_client(server) as client:
        send = client.binary if binary else client.chunk
        await send(bytes(1000))
        await client.barrier()
        assert client.seen("error") == []
        await send(bytes(1001))
        error = await client.error()
        assert (error["code"], error["sequence_id"], error["param"]) == ("payload_too_large", 1, "payload")
        assert (await client.answer()).reason == "error"
        assert await client.closed() == 1009


async def test_most_held_bytes_and_one_more() -> None:
    limits = {"max_payload_per_session": 1000}
    async with live_server(streaming_input=limits) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.binary(bytes(600))
        await client.binary(bytes(400))
        await client.barrier()
        assert (client.seen("error"), server.held_bytes >= 1000) == ([], True)
        await client.binary(b"\0")
        assert (await client.error())["code"] == "payload_too_large"
        assert (await client.answer()).reason == "error"
        assert await client.closed() == 1009


async def test_what_waits_behind_a_gap_counts() -> None:
    limits = {"max_payload_per_session": 1000}
    async with live_server(streaming_input=limits) as server, native_client(server) as client:
        await client.binary(bytes(999), number=5)
        await client.binary(b"x", number=3)
        await client.barrier()
        assert client.seen("error") == []
        await client.binary(b"x", number=4)
        assert (await client.error())["code"] == "payload_too_large"
        assert await client.closed() == 1009


async def test_what_the_engine_took_does_not_count() -> None:
    limits = {"max_payload_per_session": 1000}
    async with live_server(streaming_input=limits) as server, native_client(server) as client:
        await client.configure(modalities=["text"], start_policy="on_first_chunk", history=False)
        for _ in range(50):
            await client.binary(bytes(600))
            await client.barrier()
            await server.until(lambda: not server.held_bytes, "the engine's taking it over")
        await client.chunk(end=True)
        assert (await client.answer()).final["usage"]["input_audio_ms"] == round(50 * 600 / 32)


async def test_bytes_held_by_the_whole_server() -> None:
    async with (
        live_server(limits={"max_held_bytes": 1_000_000}) as server,
        native_client(server) as first,
        native_client(server) as second,
    ):
        for client in (first, second):
            await client.configure(start_policy="on_end_only")
        await first.binary(bytes(990_000))
        await first.barrier()
        await second.binary(bytes(20_000))
        error = await second.error()
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("engine_overloaded", True, 1000)
        assert await second.closed() == 1013
        assert second.guarantees.finished == []  # it was refused before it opened a request
        await first.send("finish")
        assert (await first.answer()).reason == "stop"


# admission


async def test_most_sessions_and_one_more() -> None:
    async with live_server(limits={"max_sessions": 2}) as server, native_client(server) as first:
        await still_answers(first)  # sessions without content would give their places up
        async with native_client(server) as second:
            await still_answers(second)
            async with native_client(server, greeted=False) as third:
                error = await third.error()
                assert (error["code"], error["retryable"]) == ("engine_overloaded", True)
                assert await third.closed() == 1013
        await server.until(lambda: server.sessions == 1)
        async with native_client(server) as client:
            await still_answers(client)


async def test_most_sessions_of_a_key() -> None:
    keys = tuple(
        ApiKey(name=name, key_sha256=digest(name), max_sessions=limit) for name, limit in (("one", 1), ("two", None))
    )
    one: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer one"}}
    two: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer two"}}
    async with live_server(keys=keys) as server:
        async with (
            native_client(server, **one),
            native_client(server, **two),
            native_client(server, **two),
            native_client(server, greeted=False, **one) as client,
        ):
            error = await client.error()
            assert (error["code"], error["retryable"]) == ("rate_limited", True)
            assert await client.closed() == 4429
        await server.until(lambda: server.sessions == 0)
        async with native_client(server, **one) as client:
            await still_answers(client)


# the handshake

KEYS = (ApiKey(name="one", key_sha256=digest("secret")),)


async def refused(server: LiveServer, *headers: str, target: str = NATIVE) -> tuple[int, str]:
    async with raw_client(server.port) as client:
        await client.send(websocket_upgrade(target, *headers))
        answer = await client.response()
        return answer.status, answer.error["code"]


UNAUTHENTICATED: list[list[str]] = [
    [],
    ["Authorization: Bearer wrong"],
    ["Authorization: Bearer"],
    ["Authorization: Basic c2VjcmV0"],
    ["Authorization: secret"],
    ["Sec-WebSocket-Protocol: omni-api-key.wrong, omni.v1+json"],
    ["Sec-WebSocket-Protocol: omni-api-key."],
    ["Sec-WebSocket-Protocol: secret"],
    ["Authorization: Bearer wrong", "Sec-WebSocket-Protocol: omni-api-key.secret"],
    ["Authorization: Bearer s\xe9cret"],
]


async def test_unauthenticated() -> None:
    async with live_server(keys=KEYS) as server:
        for headers in UNAUTHENTICATED:
            assert await refused(server, *headers) == (401, "unauthenticated"), headers


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer secret",
        "Authorization: bearer  secret ",
        "Sec-WebSocket-Protocol: omni-api-key.secret",
        "Sec-WebSocket-Protocol: omni.v1+json, openai-insecure-api-key.secret",
    ],
)
async def test_authenticated(header: str) -> None:
    async with live_server(keys=KEYS) as server, raw_websocket(server, header) as peer:
        await peer.until("session_created")


async def test_key_that_is_not_ascii() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("sésame")),)
    header = "Authorization: Bearer " + "sésame".encode().decode("latin-1")
    async with live_server(keys=keys) as server, raw_websocket(server, header) as peer:
        await peer.until("session_created")
        assert await refused(server, "Authorization: Bearer s\xe9same") == (401, "unauthenticated")


async def test_what_is_presented_is_ignored_without_keys() -> None:
    async with live_server() as server, raw_websocket(server, "Authorization: Bearer anything") as peer:
        await peer.until("session_created")


async def test_origins() -> None:
    async with live_server(allow_origin=("https://app.example",)) as server:
        for origin in ("https://evil.example", "null", "https://app.example.evil", "http://app.example"):
            assert await refused(server, f"Origin: {origin}") == (403, "origin_not_allowed")
        for origin in ("https://app.example", "http://localhost"):
            async with raw_websocket(server, f"Origin: {origin}") as peer:
                await peer.until("session_created")


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/realtime/x", "/health", "/v1/streaming_input/x", "/"])
async def test_other_paths_are_no_websockets(path: str) -> None:
    async with live_server() as server:
        assert await refused(server, target=path) == (404, "not_found")


async def test_plain_get() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("GET", NATIVE))
        answer = await client.response()
        assert (answer.status, answer.error["code"]) == (426, "upgrade_required")
        assert answer.headers["upgrade"].lower() == "websocket"
        await client.send(request("POST", NATIVE))
        answer = await client.response()
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


async def test_turned_off() -> None:
    async with live_server(streaming_input={"enabled": False}) as server:
        assert await refused(server) == (404, "not_found")
        async with raw_client(server.port) as client:
            await client.send(request("GET", NATIVE))
            assert (await client.response()).status == 404


async def test_compression_is_not_offered_unless_turned_on() -> None:
    async with live_server() as server, native_client(server, compression="deflate") as client:
        assert client.connection.protocol.extensions == []
        await still_answers(client)


async def test_compression_is_bounded_by_what_comes_out() -> None:
    fields = {"permessage_deflate": True, "max_chunk_bytes": 1000}
    async with live_server(streaming_input=fields) as server, native_client(server, compression="deflate") as client:
        assert len(client.connection.protocol.extensions) == 1
        await still_answers(client)
        bomb = " " * (max_frame_bytes(1000) + 1)
        assert len(gzip.compress(bomb.encode())) < 1000
        await client.raw(bomb)
        assert await client.closed() == 1009


# the engine


async def test_engine_that_starts_or_is_gone() -> None:
    engine = EchoEngine()
    async with live_server(engine, still_answers=False) as server:
        for state, code, close in (
            (EngineState.STARTING, "engine_overloaded", 1013),
            (EngineState.UNHEALTHY, "engine_failed", 1011),
        ):
            engine.state = state
            async with native_client(server, greeted=False) as client:
                assert (await client.error())["code"] == code
                assert await client.closed() == close


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_engine_fails_and_the_next_request_works(after: int) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(stage_params={"fake": {"fail_after_chunks": after}})
        await client.say("one two three")
        answer = await client.answer()
        assert len(answer.chunks) == after
        (error,) = answer.errors
        assert (error["code"], error["request_id"], error["retryable"]) == (
            "engine_failed",
            answer.final["request_id"],
            True,
        )
        assert answer.reason == "error"
        await client.configure(stage_params=None)
        await still_answers(client)


async def test_engine_refuses_a_value() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(stage_params={"fake": {"fail_after_chunks": "two"}})
        await client.say("hello")
        answer = await client.answer()
        assert answer.errors[0]["param"] == "stage_params.fake.fail_after_chunks"
        assert answer.reason == "error"


async def test_engine_fails_while_the_input_is_open() -> None:
    async with live_server(EchoEngine(EchoSettings(fail_after_chunks=1))) as server, native_client(server) as client:
        await client.chunk("one")
        await client.until("output_chunk")
        await client.chunk("two")
        answer = await client.answer()
        assert answer.reason == "error"
        await client.chunk("swallowed")
        await client.chunk("swallowed", end=True)
        await client.configure(stage_params={"fake": {"fail_after_chunks": 5}})
        await still_answers(client)


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("secret text"), KeyError("secret text"), asyncio.CancelledError("secret text"), TimeoutError()],
    ids=lambda failure: type(failure).__name__,
)
async def test_text_of_an_unforeseen_failure_is_never_sent(failure: Exception) -> None:
    def fail() -> None:
        raise failure

    engine = ScriptedEngine([TextOutput("begun"), fail])
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await client.say("hello")
        answer = await client.answer()
        (error,) = answer.errors
        assert (error["code"], error["request_id"]) == ("engine_failed", answer.final["request_id"])
        assert "secret" not in error["message"]
        assert "err_" in error["message"]
        assert (answer.text, answer.reason) == ("begun", "error")
        await client.say("hello")
        assert (await client.answer()).reason == "error"


async def test_engine_that_dies_takes_the_session_with_it() -> None:
    engine = ScriptedEngine([])

    def die() -> None:
        engine.state = EngineState.UNHEALTHY
        raise EngineFailed("the worker is gone")

    engine.script = (TextOutput("begun"), die)
    async with live_server(engine, still_answers=False) as server, native_client(server) as client:
        await client.say("hello")
        await client.say("waiting")
        answer = await client.answer()
        assert (answer.errors[0]["code"], answer.reason) == ("engine_failed", "error")
        assert (await client.answer()).reason in ("cancelled", "error")
        assert await client.closed() == 1011


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthExceeded("too long"),
        UnsupportedFormat("no such codec"),
        EngineOverloaded("no slot is free", retry_after_ms=700),
        RateLimited("enough for today", retry_after_ms=700),
    ],
    ids=lambda value: value.code,
)
async def test_errors_that_engines_raise_end_the_request_alone(error: OmniError) -> None:
    engine = ScriptedEngine([error])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("hello")
        answer = await client.answer()
        assert (answer.errors[0]["code"], answer.errors[0]["retry_after_ms"]) == (error.code, error.retry_after_ms)
        assert answer.errors[0]["request_id"] == answer.final["request_id"]
        assert answer.reason == "error"
        engine.script = (TextOutput("now there is"),)
        await client.say("again")
        assert (await client.answer()).text == "now there is"


async def test_engine_that_breaks_its_word() -> None:
    """An answer has one sample rate."""
    script = [AudioOutput(np.zeros(8000, np.float32), rate) for rate in (8000, 16_000)]
    async with live_server(ScriptedEngine(script), expect_errors=True) as server, native_client(server) as client:
        await client.say("hello")
        answer = await client.answer()
        assert (len(answer.chunks), answer.errors[0]["code"], answer.reason) == (1, "engine_failed", "error")


async def test_ping_gives_back_any_json() -> None:
    async with live_server() as server, native_client(server) as client:
        values: list[Any] = [
            None,
            0,
            -1,
            2**63,
            1e300,
            math.pi,
            "\u2028 é \U0001f600 \x00",
            [],
            {},
            {"a": [1, {"b": None}]},
        ]
        for t in values:
            await client.send("ping", t=t)
            pong = await client.until("pong")
            assert pong["t"] == t
            assert abs(pong["server_time_ms"] / 1000 - time.time()) < 60


async def test_output_ack_changes_nothing() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.send("output_ack", sequence_id=12345)
        await client.send("output_ack", sequence_id=0, played_ms=12.5)
        await still_answers(client)


async def test_frames_after_a_fatal_error_are_not_looked_at() -> None:
    async with live_server(streaming_input={"max_chunk_bytes": 10}) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(
            text("input_chunk", sequence_id=0, text="x" * 11) + text("ping", t=1) + text("speak") + text("ping", t=2)
        )
        assert (await peer.until("error"))["error"]["code"] == "payload_too_large"
        opcode, data = await peer.frame()
        assert (opcode, Close.parse(data).code) == (Opcode.CLOSE, 1009)
