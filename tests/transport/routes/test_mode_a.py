"""Mode A: the four formats of a streamed body, its order, and refusals."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, RawResponse, arriving_events, chunked, content, events_of, post, raw_client, request
from support.scripted_engines import ActingEngine, RetortEngine

from omni_ws.audio.codec import encode_file
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.core.chunks import AudioEncoding, AudioFormat, Modality
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
STREAMING = "X-Streaming-Input: true"
MULTIPART = "Content-Type: application/x-multipart-streaming"
NDJSON = "Content-Type: application/x-ndjson"


def lines(*objects: dict[str, Any]) -> bytes:
    return b"".join(orjson.dumps(one) + b"\n" for one in objects)


def frames(*parts: bytes, size: int) -> bytes:
    return b"".join(len(part).to_bytes(size, "big") + part for part in parts)


def binary(payload: bytes, sequence_id: int, *, modality: int = 1, flags: int = 0, version: int = 1) -> bytes:
    return struct.pack(">BBBBII", version, 1, modality, flags, sequence_id, 0) + payload


async def say(server: LiveServer, *objects: dict[str, Any]) -> RawResponse:
    return await post(server.port, CHAT, lines(*objects), NDJSON, STREAMING)


def text(word: str, number: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"text": word, **({} if number is None else {"sequence_id": number}), **fields}


# --- how clients select it


async def test_the_documented_curl_line() -> None:
    async with live_server() as server:
        shell = await asyncio.create_subprocess_shell(
            """printf '%s\\n' '{"modality":"text","text":"hello","end_of_input":true}' | """
            "curl -N --data-binary @- -H 'Transfer-Encoding: chunked' -H 'X-Streaming-Input: true' "
            f"http://127.0.0.1:{server.port}/v1/chat/completions",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await shell.communicate()
    assert shell.returncode == 0
    events = output.decode().split("\n\n")
    assert '"delta":{"role":"assistant"}' in events[0]
    assert '"delta":{"content":"hello"}' in events[1]
    assert '"finish_reason":"stop"' in events[2]
    assert events[3:] == ["data: [DONE]", ""]


WAYS: list[tuple[str, ...]] = [
    (STREAMING, NDJSON),
    (STREAMING, "Content-Type: application/json"),
    (STREAMING, "Content-Type: application/x-www-form-urlencoded"),
    ("x-streaming-input: TRUE", "Content-Type: application/x-ndjson; charset=utf-8"),
    ("X-Streaming-Input: 1", NDJSON),
    (MULTIPART,),
    ("Content-Type: Application/X-Multipart-Streaming; framing=ndjson",),
    ("Content-Type: application/x-multipart-streaming", "X-Streaming-Input: false"),
]


async def test_ways_to_ask_for_it() -> None:
    async with live_server() as server:
        for headers in WAYS:
            for framing in ((), ("Transfer-Encoding: chunked",)):
                body = lines(text("hello"))
                sent = chunked(body) if framing else body
                async with raw_client(server.port) as client:
                    await client.send(request("POST", CHAT, *headers, *framing, body=sent))
                    assert content(events_of(await client.response())) == "hello", headers


async def test_a_body_without_any_content_type() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, body=lines(text("hello"))))
        assert content(events_of(await client.response())) == "hello"


NO_BODIES: list[tuple[tuple[str, ...], int, str, str]] = [
    ((STREAMING, "Content-Type: audio/alac"), 415, "unsupported_format", "Content-Type"),
    ((STREAMING, "Content-Type: audio/l16;rate=16000"), 415, "unsupported_format", "Content-Type"),
    ((STREAMING, "Content-Type: audio/pcm;rate=fast"), 400, "invalid_value", "Content-Type"),
    ((STREAMING, "Content-Type: audio/pcm;rate=1"), 400, "invalid_value", "Content-Type"),
    ((f"{MULTIPART}; framing=length16",), 400, "invalid_value", "framing"),
    ((f'{MULTIPART}; framing=""',), 400, "invalid_value", "framing"),
    ((STREAMING, NDJSON, "Content-Encoding: gzip"), 415, "unsupported_format", "Content-Encoding"),
]


async def test_bodies_that_are_none() -> None:
    async with live_server() as server:
        for headers, status, code, param in NO_BODIES:
            response = await post(server.port, CHAT, lines(text("hello")), *headers, "Accept: text/event-stream")
            assert (response.status, response.error["code"], response.error["param"]) == (status, code, param), headers


async def test_when_it_is_turned_off_the_ordinary_routes_stay() -> None:
    async with live_server(streaming_input={"enabled": False}) as server:
        for path in (CHAT, SPEECH):
            response = await post(server.port, path, lines(text("hello")), STREAMING)
            assert (response.status, response.error["code"]) == (404, "not_found")
        response = await post(server.port, CHAT, {"messages": [{"role": "user", "content": "hello"}]})
        assert response.status == 200


# --- parameters


async def test_the_first_line_may_hold_the_parameters() -> None:
    engine = ScriptedEngine([TextOutput("fine")])
    async with live_server(engine) as server:
        parameters = {
            "model": "local-model",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ],
            "max_tokens": 5,
            "stream_options": {"include_usage": True},
            "request_id": "mine",
            "start_policy": "on_end_only",
        }
        events = events_of(await say(server, parameters, text("four")))
    (seen,) = engine.requests
    assert seen.instructions == "Be brief."
    assert [one.text for one in seen.history] == ["one", "two", "three"]
    assert dict(seen.sampling) == {"max_tokens": 5}
    assert events[0].json()["id"] == "chatcmpl-mine"
    assert events[-2].json()["usage"]["total_tokens"] == 0


async def test_a_first_line_of_type_session_config_is_parameters_too() -> None:
    async with live_server() as server:
        answer = await say(server, {"type": "session_config", "sampling": {"max_tokens": 1}}, text("one two"))
        assert content(events_of(answer)) == "one"


@pytest.mark.parametrize("mark", [{"sequence_id": 0}, {"type": "input_chunk"}, {"end_of_input": False}])
async def test_an_empty_chunk_may_be_the_first(mark: dict[str, Any]) -> None:
    number = 1 if "sequence_id" in mark else None
    async with live_server() as server:
        assert content(events_of(await say(server, mark, text("hello", number)))) == "hello"


async def test_one_json_body_at_the_end_where_no_stream_is_wanted() -> None:
    async with live_server() as server:
        response = await say(server, {"stream": False}, text("hello"), text(" there"))
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"][0]["message"]["content"] == "hello there"


@pytest.mark.parametrize(
    ("parameters", "status", "code", "param"),
    [
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"start_policy": "soon"}, 400, "invalid_value", "start_policy"),
        ({"start_policy": {"type": "on_modality"}}, 400, "invalid_value", "start_policy.modality"),
        ({"input_audio": {"sample_rate": 1}}, 400, "invalid_value", "input_audio.sample_rate"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages[0].tool_call_id"),
        ({"turn_detection": {"type": "server_vad"}}, 400, "unsupported_parameter", "turn_detection"),
    ],
)
async def test_bad_parameters_are_a_status_whatever_is_accepted(
    parameters: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with live_server() as server:
        body = lines({"stream": True, **parameters}, text("a"))
        response = await post(server.port, CHAT, body, STREAMING, NDJSON, "Accept: text/event-stream")
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, param)


# --- lines and frames


async def test_blank_lines_and_a_last_line_without_its_end() -> None:
    body = b'\n\r\n {"text":"a"} \r\n\n\t\n{"text":" b"}'
    async with live_server() as server:
        assert content(events_of(await post(server.port, CHAT, body, STREAMING, NDJSON))) == "a b"


@pytest.mark.parametrize("size", [4, 8])
async def test_frames_behind_a_length(size: int) -> None:
    header = f"{MULTIPART}; framing=length{size * 8}"
    body = frames(
        b'{"voice":"echo"}',
        b"",
        binary(b"one ", 0),
        b'{"text":"two ","sequence_id":1}',
        binary(b"three", 2, flags=1),
        size=size,
    )
    async with live_server() as server:
        assert content(events_of(await post(server.port, CHAT, body, header))) == "one two three"
        # Without parameters, the first frame is a chunk, whether it is binary or not.
        body = frames(binary(b"one", 0), size=size)
        assert content(events_of(await post(server.port, CHAT, body, header))) == "one"


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        (binary(b"x", 1, version=2), "invalid_frame", "frame 2"),
        (binary(b"x", 1, modality=9), "invalid_frame", "frame 2"),
        (binary(b"x", 1, flags=128), "invalid_frame", "frame 2"),
        (b"short", "invalid_frame", "frame 2"),
        (b"{", "invalid_frame", "frame 2"),
        (b'{"payload":"?"}', "invalid_frame", "frame 2"),
        (b'{"sequence_id":-1}', "invalid_value", "frame 2"),
    ],
)
async def test_a_bad_frame_is_named(size: int, broken: bytes, code: str, said: str) -> None:
    header = f"{MULTIPART}; framing=length{size * 8}"
    async with live_server() as server:
        response = await post(server.port, CHAT, frames(binary(b"a", 0), broken, size=size), header)
    assert (response.status, response.error["code"]) == (400, code)
    assert response.error["message"].startswith(said)


@pytest.mark.parametrize("size", [4, 8])
async def test_a_body_that_ends_inside_a_frame(size: int) -> None:
    header = f"{MULTIPART}; framing=length{size * 8}"
    whole = frames(binary(b"a", 0), binary(b"b", 1), size=size)
    async with live_server() as server:
        for cut in (1, size, size + 5):
            response = await post(server.port, CHAT, whole[: len(whole) // 2 + cut], header)
            assert (response.status, response.error["code"]) == (400, "invalid_frame")
            assert "inside frame 2" in response.error["message"]


BAD_LINES: list[tuple[bytes, str, str | None]] = [
    (b'{"text": "a"', "invalid_frame", None),
    (b"[1]", "invalid_frame", None),
    (b'"a"', "invalid_frame", None),
    (b'{"text":"\xff"}', "invalid_frame", None),
    (b'{"text":"a","x":"\xff"}', "invalid_frame", None),
    (b'{"text":5}', "invalid_frame", "text"),
    (b'{"payload":"a b"}', "invalid_frame", "payload"),
    (b'{"text":"a","payload":"YQ=="}', "invalid_value", "text"),
    (b'{"text":"a","modality":"audio"}', "invalid_value", "modality"),
    (b'{"modality":"smell"}', "invalid_value", "modality"),
    (b'{"text":"a","format":"audio/wav"}', "invalid_value", "format"),
    (b'{"text":"a","end_of_input":"yes"}', "invalid_value", "end_of_input"),
    (b'{"text":"a","sequence_id":1.5}', "invalid_value", "sequence_id"),
    (b'{"text":"a","timestamp_ms":-1}', "invalid_value", "timestamp_ms"),
    (b'{"text":"a","offset":-1}', "invalid_value", "offset"),
    (b'{"text":"a","role":"tool"}', "invalid_value", "tool_call_id"),
    (b'{"text":"a","role":"tool","tool_call_id":"x"}', "unsupported_parameter", "role"),
    (b'{"type":"finish"}', "unknown_type", "type"),
    (b'{"type":5,"text":"a"}', "invalid_frame", "type"),
    (b"[" * 5000, "invalid_frame", None),
]


async def test_a_bad_line_is_named() -> None:
    async with live_server() as server:
        for line, code, param in BAD_LINES:
            body = b'{"voice":null}\n\n' + line + b'\n{"text":"more"}\n'
            response = await post(server.port, CHAT, body, STREAMING, NDJSON)
            assert (response.status, response.error["code"], response.error["param"]) == (400, code, param), line
            assert response.error["message"].startswith("line 3"), line


async def test_what_an_engine_does_not_take_is_named_with_its_line() -> None:
    async with live_server(RetortEngine("", input_modalities=frozenset({Modality.TEXT}))) as server:
        response = await say(server, text("a"), {"payload": "AAAA"})
        assert (response.status, response.error["code"]) == (415, "unsupported_modality")
        assert response.error["message"].startswith("line 2")
    async with live_server() as server:
        response = await say(server, text("a"), {"payload": "AAAA", "format": "audio/alac"})
        assert (response.status, response.error["code"], response.error["param"]) == (
            415,
            "unsupported_format",
            "format",
        )
        assert response.error["message"].startswith("line 2")


async def test_text_that_is_not_utf_8_in_a_payload() -> None:
    async with live_server() as server:
        # A cut within a character is valid.
        word = "grün".encode()
        parts = [{"modality": "text", "payload": encoded(part)} for part in (word[:3], word[3:])]
        assert content(events_of(await say(server, *parts))) == "grün"
        for payload, line in ((b"\xff", "line 3"), (word[:3], "the text")):
            parts = [{"modality": "text", "payload": encoded(part)} for part in (b"a", payload)]
            response = await say(server, {"stream": False}, *parts)
            assert (response.status, response.error["code"], response.error["param"]) == (
                400,
                "invalid_value",
                "payload",
            )
            assert response.error["message"].startswith(line)


# --- the end of the input


async def test_the_end_of_the_body_or_of_the_input_ends_it() -> None:
    async with live_server() as server:
        for ended in (text("a", end_of_input=True), text("a"), text("a", end_of_input=False)):
            assert content(events_of(await say(server, ended))) == "a"
        assert content(events_of(await say(server, text("a"), {"end_of_input": True}))) == "a"


@pytest.mark.parametrize("parameters", [[], [{}], [{"stream": False}]])
@pytest.mark.parametrize("chunks", [[], [{"end_of_input": True}], [{"text": ""}]])
async def test_nothing_is_empty_input(parameters: list[dict[str, Any]], chunks: list[dict[str, Any]]) -> None:
    async with live_server() as server:
        response = await say(server, *parameters, *chunks)
    assert (response.status, response.error["code"]) == (400, "empty_input")


@pytest.mark.parametrize("numbered", [False, True])
async def test_a_chunk_after_the_end_is_a_conflict(numbered: bool) -> None:
    numbers: Sequence[int | None] = (0, 1) if numbered else (None, None)
    async with live_server() as server:
        response = await say(server, text("a", numbers[0], end_of_input=True), text("b", numbers[1]))
    assert (response.status, response.error["code"]) == (409, "session_conflict")
    assert response.error["message"].startswith("line 2")


@pytest.mark.parametrize("numbers", [(0, 1, 0, 9), (None, None, None, None)])
async def test_ends_may_be_repeated(numbers: Sequence[int | None]) -> None:
    first, *ends = numbers
    repeated = [{"end_of_input": True} | ({} if number is None else {"sequence_id": number}) for number in ends]
    async with live_server() as server:
        response = await say(server, text("a", first, end_of_input=True), *repeated)
        assert (response.status, content(events_of(response))) == (200, "a")
        response = await say(server, text("a", first, end_of_input=True), *repeated, text("b", ends[0] and 2))
        assert response.status == 409


# --- order


WORDS = ["one ", "two ", "three ", "four ", "five"]


@given(
    order=st.permutations(range(len(WORDS))),
    again=st.lists(st.integers(0, len(WORDS) - 1), max_size=4),
    cuts=st.lists(st.integers(1, 200), max_size=6),
    framing=st.sampled_from(["ndjson", "length32", "length64"]),
)
@settings(max_examples=25, deadline=None)
def test_order_duplicates_and_the_cutting_of_the_body_change_nothing(
    order: list[int], again: list[int], cuts: list[int], framing: str
) -> None:
    """Input behind the announced end would be lost; the end of the input is therefore that of the body."""
    numbers = [*order[:3], *again, *order[3:]]
    objects = [orjson.dumps(text(WORDS[number], number)) for number in numbers]
    size = {"length32": 4, "length64": 8}.get(framing)
    body = b"\n".join(objects) if size is None else frames(*objects, size=size)
    pieces = [body[start:end] for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(body)], strict=True)]

    async def check() -> None:
        async with live_server() as server, raw_client(server.port) as client:
            header = f"{MULTIPART}; framing={framing}"
            await client.send(request("POST", CHAT, header, "Transfer-Encoding: chunked"))
            for piece in filter(None, pieces):
                await client.send(chunked(piece, end=False))
            await client.send(b"0\r\n\r\n")
            assert content(events_of(await client.response())) == "one two three four five"

    asyncio.run(check())


@pytest.mark.parametrize("end_first", [False, True])
async def test_a_number_behind_the_end_is_a_conflict_though_there_is_a_gap(end_first: bool) -> None:
    end, behind = text("b", 1, end_of_input=True), text("c", 2)
    lines = [end, behind] if end_first else [behind, end]
    async with live_server() as server:
        response = await say(server, *lines, text("a", 0))
    assert (response.status, response.error["code"], response.error["param"]) == (
        409,
        "session_conflict",
        "sequence_id",
    )
    assert response.error["message"].startswith("line 2")


async def test_unnumbered_chunks_come_as_they_came() -> None:
    async with live_server() as server:
        assert content(events_of(await say(server, *map(text, WORDS)))) == "one two three four five"


@pytest.mark.parametrize("numbers", [(0, None), (None, 0)])
async def test_numbered_and_unnumbered_chunks_do_not_mix(numbers: tuple[int | None, int | None]) -> None:
    async with live_server() as server:
        response = await say(server, *(text("a", number) for number in numbers))
    assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", "sequence_id")
    assert response.error["message"].startswith("line 2")


async def test_a_gap_at_the_end_of_the_body() -> None:
    async with live_server() as server:
        response = await say(server, text("a", 1), text("b", 3))
    assert (response.status, response.error["code"], response.error["param"]) == (408, "sequence_gap", "sequence_id")
    assert "chunk 0" in response.error["message"]


async def test_a_chunk_beyond_the_window() -> None:
    async with live_server(streaming_input={"reorder_window_chunks": 4}) as server:
        assert content(events_of(await say(server, text("b", 3), *(text("a", n) for n in range(3))))) == "aaab"
        response = await say(server, text("a", 4))
    assert (response.status, response.error["code"]) == (422, "reorder_window_exceeded")


async def test_chunks_ahead_of_their_turn_may_be_refused() -> None:
    async with live_server() as server:
        response = await say(server, {"out_of_order": "reject"}, text("a", 0), text("b", 2))
    assert (response.status, response.error["code"]) == (409, "out_of_order")


# --- sizes


async def test_a_chunk_at_its_cap_and_one_byte_over() -> None:
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as server:
        for word, status in (("a" * 1000, 200), ("a" * 1001, 413)):
            assert (await say(server, text(word))).status == status
            payload = {"modality": "text", "payload": encoded(word.encode())}
            assert (await say(server, payload)).status == status
            body = frames(binary(word.encode(), 0), size=4)
            response = await post(server.port, CHAT, body, f"{MULTIPART}; framing=length32")
            assert response.status == status
        assert response.error["code"] == "payload_too_large"
        assert response.error["message"].startswith("frame 1")


async def test_a_line_or_frame_that_never_ends_is_refused_early() -> None:
    async with live_server(streaming_input={"max_chunk_bytes": 1000}) as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", CHAT, STREAMING, "Transfer-Encoding: chunked"))
            await client.send(chunked(b'{"text":"' + b"a" * 70_000, end=False))
            response = await client.response()
            assert (response.status, response.error["code"]) == (413, "payload_too_large")
            assert "line 1" in response.error["message"]
        async with raw_client(server.port) as client:
            header = f"{MULTIPART}; framing=length64"
            await client.send(request("POST", CHAT, header, "Transfer-Encoding: chunked"))
            await client.send(chunked(b"\xff" * 8, end=False))
            response = await client.response()
            assert (response.status, response.error["code"]) == (413, "payload_too_large")


async def test_the_cap_of_a_session_for_an_engine_that_does_not_extend() -> None:
    limits = {"max_payload_per_session": 1000, "max_chunk_bytes": 600}
    async with live_server(ActingEngine("fake", extend=False), streaming_input=limits) as server:
        assert (await say(server, text("a" * 600), text("b" * 400))).status == 200
        response = await say(server, text("a" * 600), text("b" * 401))
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        assert response.error["message"].startswith("line 2")


async def test_what_an_engine_takes_over_does_not_count() -> None:
    limits = {"max_payload_per_session": 1000, "max_chunk_bytes": 600}
    async with live_server(streaming_input=limits) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, NDJSON, "Transfer-Encoding: chunked"))
        await client.send(chunked(lines(text("0" * 600)), end=False))
        assert (await client.head())[1] == 200
        said, number = "", 0
        async for event in arriving_events(client):
            said += content([event])
            if len(said) == 600 * (number + 1) and number < 4:
                number += 1
                await client.send(chunked(lines(text(str(number) * 600)), end=number == 4))
    assert said == "".join(str(number) * 600 for number in range(5))


# --- raw audio


PCM = (np.sin(np.arange(16_000) / 10) * 8000).astype("<i2").tobytes()
AUDIO_OUT = "modalities=text,audio&output_audio.sample_rate=16000&audio.format=pcm"


def audio_of(answer: RawResponse) -> bytes:
    events = events_of(answer)
    assert events[-1] == DONE
    deltas = [choice["delta"] for event in events[:-1] for choice in event.json()["choices"]]
    return base64.b64decode("".join(delta.get("audio", {}).get("data", "") for delta in deltas), validate=True)


@pytest.mark.parametrize(
    ("kind", "body", "seconds"),
    [
        ("audio/pcm", PCM, 1.0),
        ("audio/pcm;rate=16000", PCM, 1.0),
        ("audio/pcm;rate=8000;channels=2", PCM, 1.0),
        ("audio/pcm; rate=48000", PCM, 1 / 3),
        ("audio/pcmu", bytes(8000), 1.0),
    ],
)
async def test_bare_samples(kind: str, body: bytes, seconds: float) -> None:
    async with live_server() as server:
        target = f"{CHAT}?{AUDIO_OUT}&stream_options.include_usage=true"
        answer = await post(server.port, target, body, STREAMING, f"Content-Type: {kind}")
    assert abs(len(audio_of(answer)) - seconds * 32_000) <= 64
    usage = events_of(answer)[-2].json()["usage"]
    assert abs(usage["input_audio_ms"] - seconds * 1000) <= 1


@pytest.mark.parametrize(("kind", "name"), [("audio/wav", "wav"), ("audio/mpeg", "mp3"), ("audio/flac", "flac")])
async def test_containers(kind: str, name: str) -> None:
    samples = samples_from_bytes(PCM, SampleLayout.S16)
    body = encode_file(samples, source_rate=16_000, target=AudioFormat(AudioEncoding(name), 16_000))
    async with live_server() as server:
        answer = await post(server.port, f"{CHAT}?{AUDIO_OUT}", body, STREAMING, f"Content-Type: {kind}")
        audio = audio_of(answer)
        assert 32_000 - 64 <= len(audio) <= 37_000
        answer = await post(
            server.port, f"{CHAT}?{AUDIO_OUT}", b"not audio at all", STREAMING, "Content-Type: audio/wav"
        )
        assert events_of(answer)[-1].name == "error"


async def test_parameters_of_raw_audio_come_from_the_query() -> None:
    engine = ScriptedEngine([TranscriptOutput("heard"), TextOutput("fine")])
    query = "voice=alloy&sampling.max_tokens=40&max_tokens=7&instructions=5&stage_params.fake.fail_after_chunks=9"
    async with live_server(engine) as server:
        target = f"{CHAT}?{query}&input_audio.sample_rate=8000&stream=false&messages=%5B%5D"
        response = await post(server.port, target, PCM, STREAMING, "Content-Type: audio/pcm")
    assert response.json()["input_transcript"] == {"text": "heard"}
    (seen,) = engine.requests
    assert (seen.voice, seen.instructions) == ("echo", "5")
    assert dict(seen.sampling) == {"max_tokens": 7}
    assert seen.stage_params == {"fake": {"fail_after_chunks": 9}}
    assert seen.input_audio == AudioFormat(AudioEncoding.PCM16, 8000, 1)


BAD_QUERIES: list[tuple[str, str | None]] = [
    ("voice=nobody", "voice"),
    ("sampling=5&sampling.top_p=1", "sampling"),
    ("input_audio=5", "input_audio"),
    ("input_audio.sample_rate=loud", "input_audio.sample_rate"),
    ("input_audio.language=xx", "input_audio.language"),
    ("input_audio.keywords=5", "input_audio.keywords"),
    ("modalities=smell", "modalities"),
    ("stream=perhaps", "stream"),
    (".".join(["stage_params"] + ["a"] * 100) + "=1", None),
]


async def test_bad_parameters_in_the_query() -> None:
    async with live_server() as server:
        for query, param in BAD_QUERIES:
            response = await post(server.port, f"{CHAT}?{query}", PCM, STREAMING, "Content-Type: audio/pcm")
            assert response.status == 400, query
            assert (response.error["param"] or "").startswith(param or ""), query


async def test_audio_that_is_cut_anywhere_is_the_same() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(
            request("POST", f"{CHAT}?{AUDIO_OUT}", STREAMING, "Content-Type: audio/pcm", "Transfer-Encoding: chunked")
        )
        for start in range(0, len(PCM), 1001):
            await client.send(chunked(PCM[start : start + 1001], end=False))
        await client.send(b"0\r\n\r\n")
        assert audio_of(await client.response()) == PCM


# --- helpers


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_bytes_behind_a_file_are_a_warning() -> None:
    """What was decoded stays, files behind them are heard, and the last event says what was dropped."""
    audio = np.linspace(-0.5, 0.5, 16_000, dtype=np.float32)
    file = encode_file(audio, source_rate=16_000, target=AudioFormat(AudioEncoding.WAV))
    async with live_server() as server:
        response = await post(server.port, CHAT, file + file + b"\x01 no audio", "Content-Type: audio/wav", STREAMING)
    events = events_of(response)
    assert events[-1] == DONE
    (warning,) = events[-2].json()["warnings"]
    assert (warning["code"], warning["param"]) == ("unsupported_format", "payload")
    assert events[-2].json()["choices"][0]["finish_reason"] == "stop"
