"""POST /v1/chat/completions with ordinary bodies, on the real server over real sockets."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, Event, RawResponse, arriving_events, content, events_of, post, raw_client, request
from support.scripted_engines import ActingEngine, RetortEngine, ToneEngine

from omni_ws.audio.codec import encode_file
from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinishReason, Modality, Usage
from omni_ws.core.history import Message
from omni_ws.engine.base import AudioOutput, Finished, OutputWriter, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import ContextLengthExceeded, EngineFailed, EngineOverloaded

PATH = "/v1/chat/completions"
JSON_ACCEPTED = "Accept: application/json"
CHAT_BODY = b'{"stream":%b,"messages":[{"role":"user","content":"a"}]}'
HELLO = [{"role": "user", "content": "hello big world"}]
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
#: The beginning of a file; only a decoder notices that the rest is missing.
PNG = b"\x89PNG\r\n\x1a\n"
SILENCE = np.zeros(2400, np.float32)


async def ask(server: LiveServer, *headers: str, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"messages": HELLO, **body}, *headers)


async def stream(server: LiveServer, **body: Any) -> list[Event]:
    return events_of(await ask(server, JSON_ACCEPTED, stream=True, **body))


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def deltas(events: list[Event]) -> list[Any]:
    """The content of each event: the delta, or the finish reason with the delta, or "usage"."""
    said: list[Any] = []
    for event in events[:-1]:
        chunk = event.json()
        if not chunk["choices"]:
            said.append("usage" if "usage" in chunk else chunk["input_transcript"])
            continue
        (choice,) = chunk["choices"]
        said.append((choice["delta"], choice["finish_reason"]) if choice["finish_reason"] else choice["delta"])
    return said


# --- order and format


async def test_a_stream_is_role_then_content_then_terminal_then_done() -> None:
    async with live_server() as server:
        events = await stream(server)
    assert events[-1] == DONE
    assert all(event.name is None for event in events)
    assert deltas(events) == [
        {"role": "assistant"},
        {"content": "hello"},
        {"content": " big"},
        {"content": " world"},
        ({}, "stop"),
    ]
    chunks = [event.json() for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for field in ("id", "created", "model"):
        assert len({chunk[field] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert chunks[0]["model"] == "fake"
    assert chunks[-1].pop("usage")["total_tokens"] == 6
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "delta", "finish_reason"}
        assert choice["index"] == 0


async def test_an_answer_without_any_output_still_has_its_role_and_its_end() -> None:
    async with live_server(ScriptedEngine([])) as server:
        assert deltas(await stream(server)) == [{"role": "assistant"}, ({}, "stop")]


async def test_a_whole_completion_says_the_same() -> None:
    async with live_server() as server:
        response = await ask(server)
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    completion = response.json()
    assert completion["object"] == "chat.completion"
    assert completion["id"].startswith("chatcmpl-")
    (choice,) = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello big world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = completion["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 3, 6)


@pytest.mark.parametrize("asked", [None, False])
async def test_stream_false_and_null_mean_a_whole_answer(asked: bool | None) -> None:
    async with live_server() as server:
        assert (await ask(server, stream=asked)).json()["object"] == "chat.completion"


USAGE_PLACES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "terminal"),
    ({"stream_options": None}, "terminal"),
    ({"stream_options": {}}, "terminal"),
    ({"usage_on_final_chunk": True}, "terminal"),
    ({"usage_on_final_chunk": True, "stream_options": {"include_usage": True}}, "terminal"),
    ({"stream_options": {"include_usage": True}}, "own"),
    ({"stream_options": {"include_usage": True}, "usage_on_final_chunk": False}, "own"),
    ({"stream_options": {"include_usage": False}}, None),
    ({"stream_options": {"include_usage": False}, "usage_on_final_chunk": True}, None),
    ({"usage_on_final_chunk": False}, None),
]


async def test_where_the_usage_of_a_stream_stands() -> None:
    async with live_server() as server:
        for body, where in USAGE_PLACES:
            events = await stream(server, **body)
            chunks = [event.json() for event in events[:-1]]
            with_usage = [index for index, chunk in enumerate(chunks) if chunk.get("usage") is not None]
            assert with_usage == ([] if where is None else [len(chunks) - 1]), body
            if where == "own":
                assert chunks[-1]["choices"] == [], body
                assert chunks[-2]["choices"][0]["finish_reason"] == "stop", body
            if where == "terminal":
                assert chunks[-1]["choices"][0]["finish_reason"] == "stop", body
            if where is not None:
                assert chunks[-1]["usage"]["total_tokens"] == 6, body


async def test_options_of_streams_mean_nothing_to_a_whole_answer() -> None:
    async with live_server() as server:
        for options in ({"include_usage": True}, {"include_usage": False}):
            for stream in (False, None):
                response = await ask(server, stream=stream, stream_options=options, usage_on_final_chunk=False)
                assert (response.status, response.json()["usage"]["total_tokens"]) == (200, 6)


async def test_request_id_is_part_of_the_completion_id() -> None:
    async with live_server() as server:
        assert (await ask(server, request_id="my-own.7")).json()["id"] == "chatcmpl-my-own.7"
        response = await ask(server, request_id="x" * 129)
        assert (response.status, response.error["param"]) == (400, "request_id")


async def test_the_role_comes_with_the_first_output_and_not_before() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate.wait, TextOutput("late")])
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(request("POST", PATH, body=CHAT_BODY % b"true"))
        await server.until(lambda: server.engine.active_requests == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.readuntil(b"\r\n")
        gate.set()
        assert (await client.head())[1] == 200
        events = [event async for event in arriving_events(client)]
    assert deltas(events) == [{"role": "assistant"}, {"content": "late"}, ({}, "stop")]


# --- the request as the engine receives it


async def test_system_texts_are_instructions_and_earlier_messages_are_history() -> None:
    engine = ScriptedEngine([TextOutput("fine")])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": None},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "four"},
    ]
    async with live_server(engine) as server:
        assert (await ask(server, messages=messages, instructions="Last.")).status == 200
    (seen,) = engine.requests
    assert seen.instructions == "Be brief.\n\nBe kind.\n\nLast."
    assert seen.history == (Message("user", "one two"), Message("assistant", "three"))
    assert seen.modalities == {"text"}
    assert seen.task == "chat"


async def test_history_is_not_cut_to_the_limit_of_live_sessions() -> None:
    engine = ScriptedEngine([])
    messages = [{"role": "user", "content": "word " * 30}, {"role": "assistant", "content": "more " * 30}, *HELLO]
    async with live_server(engine, limits={"max_history_tokens": 10}) as server:
        await ask(server, messages=messages)
    assert len(engine.requests[0].history) == 2


async def test_sampling_reaches_the_engine() -> None:
    engine = ScriptedEngine([])
    async with live_server(engine) as server:
        await ask(server, temperature=0.5, top_p=0.9, seed=7, stop=["a"], max_tokens=3, sampling={"max_tokens": 9})
        await ask(server, sampling={"max_tokens": 9}, max_tokens=0, presence_penalty=0, frequency_penalty=0.0)
        await ask(server, top_k=-1, min_p=0.0, repetition_penalty=1.0, temperature=None)
    assert [dict(one.sampling) for one in engine.requests] == [
        {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["a"], "max_tokens": 3},
        {"max_tokens": 9},
        {},
    ]


@pytest.mark.parametrize(
    ("body", "said", "reason"),
    [
        ({"max_tokens": 2}, "hello big", "length"),
        ({"max_completion_tokens": 1, "max_tokens": 2}, "hello", "length"),
        ({"max_completion_tokens": 0, "max_tokens": 0}, "hello big world", "stop"),
        ({"max_completion_tokens": 0, "max_tokens": 1}, "hello", "length"),
        ({"stop": " world"}, "hello big", "stop"),
        ({"stop": ["nothing", "big"]}, "hello ", "stop"),
    ],
)
async def test_limits_of_the_answer(body: dict[str, Any], said: str, reason: str) -> None:
    async with live_server() as server:
        (choice,) = (await ask(server, **body)).json()["choices"]
        events = await stream(server, **body)
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, reason)
    assert content(events) == said
    assert events[-2].json()["choices"][0]["finish_reason"] == reason


async def test_parts_come_to_the_engine_in_their_order_and_formats() -> None:
    wav = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "look:"},
        {"type": "image_url", "image_url": {"url": f"DATA:image/PNG;base64,{encoded(PNG)}"}},
        {"type": "input_audio", "input_audio": {"data": encoded(wav)}},
        {"type": "video_url", "video_url": f"data:video/mp4;base64,{encoded(b'mp4')}"},
    ]

    class Recording(ScriptedEngine):
        async def generate(self, request: Any, out: OutputWriter) -> None:
            async for chunk in request.input:
                seen.append((chunk.modality, chunk.payload, chunk.format))
            out.write(TextOutput("ok"))
            out.write(Finished(FinishReason.STOP, Usage()))

    seen: list[tuple[Modality, bytes, str | None]] = []
    async with live_server(Recording([])) as server:
        assert (await ask(server, messages=user(*parts))).status == 200
    assert seen == [
        (Modality.TEXT, b"look:", None),
        (Modality.IMAGE, PNG, "image/png"),
        (Modality.AUDIO, wav, "wav"),
        (Modality.VIDEO, b"mp4", "video/mp4"),
    ]


async def test_a_part_larger_than_a_chunk_is_passed_on_in_pieces_and_an_image_is_too_large() -> None:
    text = "word " * 1000
    async with live_server(streaming_input={"max_chunk_bytes": 1024}) as server:
        response = await ask(server, messages=[{"role": "user", "content": text}])
        assert response.json()["choices"][0]["message"]["content"] == text
        url = f"data:image/png;base64,{encoded(PNG + bytes(1025))}"
        response = await ask(server, messages=user({"type": "image_url", "image_url": {"url": url}}))
        assert (response.status, response.error["code"]) == (413, "payload_too_large")


async def test_a_tool_result_stays_whole() -> None:
    async with live_server(ActingEngine("fake", tools=True), streaming_input={"max_chunk_bytes": 1024}) as server:
        asked = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]
        for size, status in ((1024, 200), (1025, 413)):
            result = {"role": "tool", "tool_call_id": "x", "content": "b" * size}
            assert (await ask(server, messages=[*asked, result])).status == status


async def test_nothing_of_a_complete_body_is_lost_to_an_engine_that_freezes_its_input() -> None:
    parts = [{"type": "text", "text": word} for word in ("one", " two", " three")]
    async with live_server(ActingEngine("fake", extend=False)) as server:
        for policy in ("on_first_chunk", "on_min_length", None):
            response = await ask(server, messages=user(*parts), start_policy=policy)
            assert response.json()["choices"][0]["message"]["content"] == "one two three"
    async with live_server(streaming_input={"after_start": "snapshot", "start_policy": "on_first_chunk"}) as server:
        response = await ask(server, messages=user(*parts))
        assert response.json()["choices"][0]["message"]["content"] == "one two three"


@pytest.mark.virtual_clock
async def test_answers_are_never_paced() -> None:
    """Paced with a lead of 0, ten seconds of audio would take ten seconds."""
    loop = asyncio.get_running_loop()
    engine = ScriptedEngine([AudioOutput(SILENCE, 24_000)] * 100)
    async with live_server(engine, streaming_input={"max_lead_ms": 0}) as server:
        began = loop.time()
        response = await ask(server, modalities=["text", "audio"], max_lead_ms=0)
        assert loop.time() - began < 1
        assert len(base64.b64decode(response.json()["choices"][0]["message"]["audio"]["data"])) > 400_000


# --- audio out


async def test_audio_deltas_join_to_one_stream() -> None:
    engine = ToneEngine()
    async with live_server(engine) as server:
        events = await stream(server, modalities=["text", "audio"], audio={"voice": "bell", "format": "pcm16"})
    assert engine.requests[0].voice == "bell"
    said = [delta["audio"] for delta in deltas(events) if isinstance(delta, dict) and "audio" in delta]
    assert sorted(said[0]) == ["data", "id", "transcript"]
    assert ["id" in one for one in said] == [True] + [False] * (len(said) - 1)
    assert said[0]["id"].startswith("audio_")
    assert set(said[-1]) == {"expires_at"}
    assert all("expires_at" not in one for one in said[:-1])
    pieces = [one["data"] for one in said if "data" in one]
    assert len(pieces) == 3
    assert all(not piece.endswith("=") for piece in pieces[:-1])
    pcm = base64.b64decode("".join(pieces), validate=True)
    assert len(pcm) == 3 * 480 * 2
    assert "".join(one.get("transcript", "") for one in said) == "hello big world "
    assert content(events) == "hello big world "
    assert deltas(events)[-2:] == [{"audio": said[-1]}, ({}, "stop")]


async def test_only_audio_has_its_text_as_transcript_alone() -> None:
    async with live_server(ToneEngine()) as server:
        events = await stream(server, modalities=["audio"])
        message = (await ask(server, modalities=["audio"])).json()["choices"][0]["message"]
    assert content(events) == ""
    audio = [delta["audio"] for delta in deltas(events) if isinstance(delta, dict) and "audio" in delta]
    assert "".join(one.get("transcript", "") for one in audio) == "hello big world "
    assert message["content"] is None
    assert message["audio"]["transcript"] == "hello big world "


async def test_a_streamed_wav_has_one_header() -> None:
    async with live_server(ToneEngine()) as server:
        events = await stream(server, modalities=["text", "audio"], audio={"format": "wav"})
    pieces = [d["audio"].get("data", "") for d in deltas(events) if isinstance(d, dict) and "audio" in d]
    wav = base64.b64decode("".join(pieces), validate=True)
    assert wav.startswith(b"RIFF")
    assert wav.count(b"RIFF") == 1
    assert len(wav) == 44 + 3 * 960


FILE_FORMATS: list[str | None] = ["wav", "mp3", "flac", "opus", "pcm16", "pcm", "g711_ulaw", None]


async def test_whole_audio_is_one_file() -> None:
    async with live_server(ToneEngine()) as server:
        for name in FILE_FORMATS:
            audio = {} if name is None else {"format": name}
            answer = (await ask(server, modalities=["text", "audio"], audio=audio)).json()
            message = answer["choices"][0]["message"]
            assert message["content"] == "hello big world ", name
            assert message["audio"]["id"] == "audio_" + answer["id"].removeprefix("chatcmpl-"), name
            assert message["audio"]["expires_at"] > answer["created"], name
            assert message["audio"]["transcript"] == "hello big world ", name
            data = base64.b64decode(message["audio"]["data"], validate=True)
            match name:
                case "pcm" | "pcm16":
                    assert len(data) == 2880, name
                case "g711_ulaw":
                    assert len(data) == 1440, name
                case "wav" | None:
                    assert int.from_bytes(data[4:8], "little") == len(data) - 8, name
                    assert int.from_bytes(data[40:44], "little") == len(data) - 44 == 2880, name
                case _:
                    assert 50 <= duration_ms(data) <= 200, name


async def test_the_output_rate_may_be_chosen() -> None:
    async with live_server(ToneEngine()) as server:
        body = {"modalities": ["text", "audio"], "output_audio": {"sample_rate": 8000}, "audio": {"format": "pcm"}}
        message = (await ask(server, **body)).json()["choices"][0]["message"]
        assert abs(len(base64.b64decode(message["audio"]["data"])) - 960) <= 4
        body = {"modalities": ["text", "audio"], "output_audio": {"sample_rate": 9000}, "audio": {"format": "mp3"}}
        response = await ask(server, **body)
        assert (response.status, response.error["param"]) == (415, "output_audio.sample_rate")
        assert server.engine.requests[1:] == []  # type: ignore[attr-defined]


# --- media in


@pytest.mark.parametrize("name", ["wav", "mp3", "pcm16", "flac"])
async def test_audio_in_is_decoded(name: str) -> None:
    clip = (0.3 * np.sin(np.arange(16_000) / 10)).astype(np.float32)
    data = encode_file(clip, source_rate=16_000, target=AudioFormat(AudioEncoding(name), 16_000))
    part = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": name}}
    async with live_server() as server:
        body = {"modalities": ["text", "audio"], "audio": {"format": "pcm"}, "output_audio": {"sample_rate": 16_000}}
        answer = (await ask(server, messages=user(part), **body)).json()
    heard = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
    assert 16_000 <= len(heard) // 2 <= 18_500
    assert 1000 <= answer["usage"]["input_audio_ms"] <= 1160


async def test_images_and_video_are_counted_by_the_fake_engine() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}", "detail": "low"}}
    async with live_server() as server:
        answer = (await ask(server, messages=user(image, image))).json()
    assert answer["choices"][0]["message"]["content"] == "Received 2 images."


# --- transcripts of the input


SCRIPT: list[Any] = [
    TranscriptOutput("hel", interim=True, start_ms=10),
    TranscriptOutput("hello", start_ms=10),
    TranscriptOutput("there", start_ms=400),
    TextOutput("Hi."),
]


async def test_what_was_heard_comes_between_role_and_content() -> None:
    async with live_server(ScriptedEngine(SCRIPT)) as server:
        events = await stream(server)
        assert deltas(events) == [
            {"role": "assistant"},
            {"text": "hel", "interim": True, "start_ms": 10},
            {"text": "hello", "interim": False, "start_ms": 10},
            {"text": "there", "interim": False, "start_ms": 400},
            {"content": "Hi."},
            ({}, "stop"),
        ]
        assert len({event.json()["id"] for event in events[:-1]}) == 1
        assert (await ask(server)).json()["input_transcript"] == {"text": "hello there"}


async def test_segments_of_what_was_heard_are_a_blank_apart() -> None:
    segments = [TranscriptOutput(text) for text in ("hello", "", " big", " world")]  # as recognisers write them
    async with live_server(ScriptedEngine([*segments, TextOutput("Hi.")])) as server:
        assert (await ask(server)).json()["input_transcript"] == {"text": "hello big world"}


async def test_what_was_heard_may_be_turned_off() -> None:
    async with live_server(ScriptedEngine(SCRIPT)) as server:
        events = await stream(server, input_transcript=False)
        assert deltas(events) == [{"role": "assistant"}, {"content": "Hi."}, ({}, "stop")]
        assert "input_transcript" not in (await ask(server, input_transcript=False)).json()


# --- refusals


@pytest.mark.parametrize("name", ["fake", "local-model", "whisper-1", "gpt-realtime", None])
async def test_names_of_the_model(name: str | None) -> None:
    async with live_server() as server:
        assert (await ask(server, model=name)).json()["model"] == "fake"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("priority", 1),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("service_tier", "priority"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("video_fps", 2),
        ("image_max_pixels", 1000),
        ("talker_temperature", 0.5),
        ("talker_max_tokens", 5),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("turn_detection", {"type": "server_vad"}),
        ("top_k", 5),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("stage_params.thinker.x", 1),
    ],
)
async def test_a_known_field_that_cannot_be_honoured_is_named(field: str, value: Any) -> None:
    body: Any = value
    name, *inside = field.split(".")
    for key in reversed(inside):
        body = {key: body}
    async with live_server() as server:
        response = await ask(server, **{name: body})
    assert response.status == 400
    assert (response.error["code"], response.error["param"]) == ("unsupported_parameter", field)


async def test_harmless_values_of_such_fields_and_unknown_fields_are_fine() -> None:
    harmless = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "images": [],
        "video_fps": None,
        "user": "me",
        "store": True,
        "reasoning_effort": None,
        "verbosity": "medium",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "no such field": [1, {"deep": True}],
    }
    async with live_server() as server:
        assert (await ask(server, **harmless)).status == 200


BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"top_p": 2}, "top_p", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"sampling": {"top_p": 2}}, "sampling.top_p", "invalid_value"),
    ({"sampling": [1]}, "sampling", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"reasoning_effort": 5}, "reasoning_effort", "invalid_value"),
    ({"verbosity": ""}, "verbosity", "invalid_value"),
    ({"service_tier": ["auto"]}, "service_tier", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_value"),
    ({"modalities": []}, "modalities", "invalid_value"),
    ({"modalities": ["smell"]}, "modalities", "invalid_value"),
    ({"modalities": ["text", "audio"], "output_audio": 5}, "output_audio", "invalid_value"),
    ({"modalities": ["text", "audio"], "audio": {"voice": "nobody"}}, "audio.voice", "invalid_value"),
    ({"voice": "nobody"}, "voice", "invalid_value"),
    ({"instructions": 5}, "instructions", "invalid_value"),
    (
        {"instructions": 5, "messages": [{"role": "system", "content": "a"}, *HELLO]},
        "instructions",
        "invalid_value",
    ),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": "hello"}, "messages", "invalid_value"),
    ({"messages": ["hello"]}, "messages", "invalid_value"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}, *HELLO]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_value"),
    ({"messages": user({"type": "smell"})}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text", "invalid_value"),
    ({"messages": user({"type": "input_audio"})}, "messages[0].content[0].input_audio", "invalid_value"),
]


async def test_a_bad_value_is_named() -> None:
    async with live_server() as server:
        for body, param, code in BAD_VALUES:
            response = await ask(server, **body)
            assert response.status == 400, body
            assert response.error["code"] == code, body
            assert (response.error["param"] or "").startswith(param), body


@pytest.mark.parametrize(
    ("body", "param", "status", "code"),
    [
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}, *HELLO]},
            "messages[0].tool_call_id",
            400,
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, *HELLO]},
            "messages[0].tool_calls",
            400,
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}, *HELLO]},
            "messages[0].audio.id",
            400,
            "invalid_value",
        ),
        (
            {"messages": [*user({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}), *HELLO]},
            "messages[0].content[0].image_url.url",
            415,
            "unsupported_format",
        ),
    ],
)
async def test_earlier_messages_lose_nothing_without_a_word(
    body: dict[str, Any], param: str, status: int, code: str
) -> None:
    async with live_server() as server:
        response = await ask(server, **body)
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, param)


LINKS: list[tuple[Any, int, str]] = [
    ("http://127.0.0.1/secret.png", 400, "unsupported_parameter"),
    ("https://example.org/a.png", 400, "unsupported_parameter"),
    ("file:///etc/passwd", 400, "unsupported_parameter"),
    ("/etc/passwd", 400, "unsupported_parameter"),
    ("data:image/png,abc", 415, "unsupported_format"),
    ("data:image/png;base64", 400, "invalid_value"),
    ("data:image/png;base64,a?b=", 400, "invalid_value"),
    ("data:text/html;base64,YQ==", 415, "unsupported_format"),
    ("data:image/png;base64,YQ==", 415, "unsupported_format"),
    (5, 400, "invalid_value"),
    (None, 400, "invalid_value"),
]


async def test_nothing_is_fetched() -> None:
    async with live_server() as server:
        for url, status, code in LINKS:
            response = await ask(server, messages=user({"type": "image_url", "image_url": {"url": url}}))
            assert (response.status, response.error["code"]) == (status, code), url
            assert response.error["param"] == "messages[0].content[0].image_url.url", url


@pytest.mark.parametrize(
    ("audio", "status", "param"),
    [
        ({"format": "aiff"}, 415, "audio.format"),
        ({"format": "webm"}, 415, "audio.format"),
        ({"format": "nonsense"}, 415, "audio.format"),
    ],
)
async def test_output_formats_that_are_not_served(audio: dict[str, str], status: int, param: str) -> None:
    async with live_server() as server:
        response = await ask(server, modalities=["text", "audio"], audio=audio)
    assert (response.status, response.error["code"], response.error["param"]) == (status, "unsupported_format", param)


async def test_what_an_engine_cannot_do_is_named() -> None:
    async with live_server(RetortEngine("", input_modalities=frozenset({Modality.TEXT}))) as server:
        response = await ask(server, modalities=["text", "audio"])
        assert (response.status, response.error["param"]) == (400, "modalities")
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}"}}
        response = await ask(server, messages=user(image))
        assert (response.status, response.error["code"]) == (415, "unsupported_modality")


@pytest.mark.parametrize("said", ["", []])
async def test_empty_input(said: Any) -> None:
    async with live_server() as server:
        response = await ask(server, messages=[{"role": "user", "content": said}])
    assert (response.status, response.error["code"]) == (400, "empty_input")


NO_OBJECTS: list[tuple[bytes, str]] = [
    (b"", "invalid_frame"),
    (b'{"messages": [', "invalid_frame"),
    (b"[]", "invalid_frame"),
    (b"null", "invalid_frame"),
    (b'{"messages":[{"role":"user","content":"\xff"}]}', "invalid_frame"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_frame"),
    (b'{"temperature":NaN,"messages":[]}', "invalid_frame"),
    (b'{"stage_params":' + b'{"a":' * 500 + b"1" + b"}" * 501, "invalid_value"),
    (b"[" * 100_000, "invalid_frame"),
]


async def test_bodies_that_are_no_json_object() -> None:
    async with live_server() as server:
        for body, code in NO_OBJECTS:
            filled = body
            if code == "invalid_value":
                filled = b'{"messages":[{"role":"user","content":"a"}],' + body[1:]
            response = await post(server.port, PATH, filled)
            assert (response.status, response.error["code"]) == (400, code), body


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "text/plain", "application/ld+json"])
async def test_content_types_that_may_hold_json(kind: str) -> None:
    async with live_server() as server:
        assert (await ask(server, f"Content-Type: {kind}")).status == 200


@pytest.mark.parametrize("kind", ["audio/wav", "multipart/form-data; boundary=x", "application/x-ndjson", "text/html"])
async def test_content_types_that_are_something_else(kind: str) -> None:
    async with live_server() as server:
        response = await ask(server, f"Content-Type: {kind}")
    assert (response.status, response.error["code"], response.error["param"]) == (
        415,
        "unsupported_format",
        "Content-Type",
    )


async def test_compressed_bodies_are_refused_by_name() -> None:
    async with live_server() as server:
        response = await ask(server, "Content-Encoding: gzip")
    assert (response.status, response.error["param"]) == (415, "Content-Encoding")
    assert "gzip" in response.error["message"]
    assert response.headers["accept-encoding"] == "identity"


async def test_a_body_at_its_cap_and_one_byte_over() -> None:
    body = b'{"messages":[{"role":"user","content":"a"}]}'
    async with live_server(http={"max_body_bytes": len(body)}) as server:
        assert (await post(server.port, PATH, body)).status == 200
        response = await post(server.port, PATH, body + b" ")
        assert (response.status, response.error["code"]) == (413, "payload_too_large")


async def test_a_body_over_its_cap_is_refused_before_it_is_sent() -> None:
    async with live_server(http={"max_body_bytes": 1000}) as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", PATH, "Content-Length: 1001"))
            assert (await client.response()).status == 413
        async with raw_client(server.port) as client:
            await client.send(request("POST", PATH, "Transfer-Encoding: chunked"), b"3e8\r\n" + bytes(1000) + b"\r\n")
            await server.until(lambda: server.sessions == 1)
            await client.send(b"1\r\n \r\n")
            assert (await client.response()).status == 413


async def test_a_large_body_is_read_beside_the_event_loop() -> None:
    text = "word " * 100_000
    async with live_server() as server:
        response = await ask(server, messages=[{"role": "user", "content": text}], max_tokens=2)
    assert response.json()["choices"][0]["message"]["content"] == "word word"


# --- errors before the response


async def test_a_client_that_accepts_json_gets_the_status_when_it_streams() -> None:
    async with live_server() as server:
        for accept in ("application/json", "text/event-stream, Application/JSON;q=0.5"):
            response = await ask(server, f"Accept: {accept}", stream=True, n=2)
            assert (response.status, response.error["param"]) == (400, "n")
        response = await ask(server, "Accept: text/event-stream", "Accept: application/json", stream=True, n=2)
        assert response.status == 400


@pytest.mark.parametrize("headers", [(), ("Accept: */*",), ("Accept: text/event-stream",)])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"n": 2}, "unsupported_parameter"),
        ({"messages": []}, "invalid_value"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty_input"),
    ],
)
async def test_a_reader_of_events_gets_the_error_as_its_only_event(
    headers: tuple[str, ...], body: dict[str, Any], code: str
) -> None:
    async with live_server() as server:
        (event,) = events_of(await ask(server, *headers, stream=True, **body))
    assert event.name == "error"
    fields = event.json()
    assert fields["error"] == {key: fields[key] for key in ("message", "type", "param", "code")}
    assert (fields["code"], fields["type"]) == (code, "invalid_request_error")
    assert set(fields) == {"message", "type", "param", "code", "error"}


async def test_a_request_that_does_not_stream_gets_the_status_whatever_it_accepts() -> None:
    async with live_server() as server:
        assert (await ask(server, "Accept: text/event-stream", n=2)).status == 400
        # A malformed body does not tell whether events are wanted.
        assert (await post(server.port, PATH, b'{"stream": true,', "Accept: text/event-stream")).status == 400


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineFailed("broken"), 500, "engine_failed"),
        (EngineOverloaded("no slot is free", retry_after_ms=2500), 503, "engine_overloaded"),
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
    ],
)
async def test_an_engine_that_fails_before_its_first_output(failure: Exception, status: int, code: str) -> None:
    async with live_server(ScriptedEngine([failure])) as server:
        for body in ({}, {"stream": True}):
            response = await ask(server, JSON_ACCEPTED, **body)
            assert (response.status, response.error["code"]) == (status, code)
            assert response.headers.get("retry-after") == ("3" if status == 503 else None)
        (event,) = events_of(await ask(server, stream=True))
        assert (event.name, event.json()["code"]) == ("error", code)


# --- errors after the head


async def test_an_engine_that_fails_midway_ends_the_stream_with_an_error_event() -> None:
    async with live_server(ScriptedEngine([TextOutput("half"), EngineFailed("broken")])) as server:
        for headers in ((), (JSON_ACCEPTED,)):
            events = events_of(await ask(server, *headers, stream=True))
            assert [event.name for event in events] == [None, None, "error"]
            assert content(events[:-1]) == "half"
            fields = events[-1].json()
            assert re.fullmatch("broken; error id err_[0-9a-f]+", fields["message"])
            assert fields["type"] == "server_error"
            assert fields["error"]["code"] == "engine_failed"
        response = await ask(server)
        assert (response.status, response.error["code"]) == (500, "engine_failed")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
async def test_an_engine_that_gives_up_without_a_reason(reason: FinishReason) -> None:
    """A cancelled answer is an error over HTTP."""
    async with live_server(ScriptedEngine([TextOutput("half"), Finished(reason, Usage())])) as server:
        assert (await ask(server)).status == 500
        events = events_of(await ask(server, stream=True))
        assert (events[-1].name, events[-1].json()["code"]) == ("error", "engine_failed")


async def test_the_fake_engine_fails_on_request() -> None:
    async with live_server() as server:
        events = events_of(await ask(server, stream=True, stage_params={"fake": {"fail_after_chunks": 2}}))
        assert content(events[:-1]) == "hello big"
        assert events[-1].name == "error"
        response = await ask(server, stage_params={"fake": {"fail_after_chunks": "two"}})
        assert (response.status, response.error["param"]) == (400, "stage_params.fake.fail_after_chunks")


@pytest.mark.parametrize("script", [[], [TextOutput("half")]])
@pytest.mark.parametrize("streamed", [True, False])
async def test_the_text_of_an_unknown_exception_never_leaves(
    script: list[Any], streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine([*script, RuntimeError("secret: the password is swordfish")])
    async with live_server(engine, expect_errors=True) as server:
        response = await ask(server, JSON_ACCEPTED, stream=streamed)
    assert b"secret" not in response.body
    assert b"swordfish" not in response.body
    assert b"engine_failed" in response.body
    # Without the log lines of the request itself.
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    logged = [record for record in failures if not hasattr(record, "facts")]
    assert len(logged) == 1
    assert logged[0].exc_info is not None
    error_id = next(word for word in response.body.decode().replace('"', " ").split() if word.startswith("err_"))
    assert error_id in logged[0].getMessage()


# --- the connection


@pytest.mark.virtual_clock
async def test_comments_come_while_nothing_else_does() -> None:
    async def rest() -> None:
        await asyncio.sleep(40)

    script: list[Any] = [rest, TextOutput("a"), rest, TextOutput("b")]
    async with live_server(ScriptedEngine(script)) as server:
        events = await stream(server)
        # No heartbeat before the head, which waits for the first output.
        assert [event.comment for event in events] == [False, False, True, True, False, False, False]
        assert content(events) == "ab"
    async with live_server(ScriptedEngine(script), sse_heartbeat_sec=0) as server:
        assert not any(event.comment for event in await stream(server))
    async with live_server(ScriptedEngine(script), sse_heartbeat_sec=39.0) as server:
        assert [event.comment for event in await stream(server)].count(True) == 1


@pytest.mark.virtual_clock
async def test_silence_begins_with_the_last_token() -> None:
    """Also where tokens arrive one by one."""

    async def rest() -> None:
        await asyncio.sleep(10)

    script: list[Any] = [piece for letter in "abcdef" for piece in (TextOutput(letter), rest)]
    async with live_server(ScriptedEngine(script)) as server:
        events = await stream(server)
        assert not any(event.comment for event in events)
        assert content(events) == "abcdef"
    async with live_server(ScriptedEngine([*script, rest])) as server:
        comments = [event.comment for event in await stream(server)]
        assert comments.index(True) == len(["role", *"abcdef"])
        assert comments.count(True) == 1


async def test_what_goes_wrong_behind_tokens_that_came_one_by_one() -> None:
    go_on, fail = asyncio.Event(), asyncio.Event()
    steps: list[Any] = [TextOutput("a"), go_on.wait, TextOutput("b"), fail.wait, EngineFailed("broken")]
    async with live_server(ScriptedEngine(steps)) as server, raw_client(server.port) as client:
        await client.send(request("POST", PATH, body=CHAT_BODY % b"true"))
        await client.head()
        events = arriving_events(client)
        assert (await anext(events)).json()["choices"][0]["delta"] == {"role": "assistant"}
        assert (await anext(events)).json()["choices"][0]["delta"] == {"content": "a"}
        go_on.set()
        assert (await anext(events)).json()["choices"][0]["delta"] == {"content": "b"}
        fail.set()
        failure = await anext(events)
        assert failure.name == "error"
        assert failure.json()["message"].startswith("broken; error id err_")
        assert [event async for event in events] == []


async def forever() -> None:
    await asyncio.Event().wait()


async def go_away(server: LiveServer, *, streamed: bool, begun: bool, reset: bool) -> None:
    """Send a request, wait until the engine works, and disconnect."""
    async with raw_client(server.port) as client:
        await client.send(request("POST", PATH, body=CHAT_BODY % (b"true" if streamed else b"false")))
        await server.until(lambda: server.engine.active_requests == 1)
        if streamed and begun:
            await client.reader.readuntil(b'"a"')
        if reset:
            client.reset()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_the_engine_stops_when_the_connection_breaks(streamed: bool, begun: bool) -> None:
    script: list[Any] = [*([TextOutput("a")] if begun else []), forever]
    async with live_server(ScriptedEngine(script)) as server:
        await go_away(server, streamed=streamed, begun=begun, reset=True)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_the_engine_stops_when_the_client_closes_the_connection(streamed: bool, begun: bool) -> None:
    """A closed connection looks half-closed to a server that writes nothing; a probe tells them apart."""
    script: list[Any] = [*([TextOutput("a")] if begun else []), forever]
    async with live_server(ScriptedEngine(script)) as server:
        started = asyncio.get_running_loop().time()
        await go_away(server, streamed=streamed, begun=begun, reset=False)
        while server.engine.active_requests:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.5)
        assert asyncio.get_running_loop().time() - started < 35


async def soon() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("modality", "script"),
    [
        ("audio", [AudioOutput(np.zeros(240_000, np.float32), 24_000)] * 1000),
        ("text", [TextOutput("x" * 800), soon] * 20_000),
    ],
    ids=["much at a time", "token by token"],
)
async def test_the_engine_stops_when_the_client_does_not_read(modality: str, script: list[Any]) -> None:
    engine = ScriptedEngine(script)
    body = b'{"stream":true,"modalities":["%b"],"messages":[{"role":"user","content":"a"}]}' % modality.encode()
    async with (
        live_server(engine, streaming_input={"write_timeout_sec": 0.2}) as server,
        raw_client(server.port, read_ahead=1024) as client,
    ):
        await client.send(request("POST", PATH, body=body))
        await client.reader.readuntil(b"\r\n")
        await server.until(lambda: server.engine.active_requests == 1)
        await server.until(lambda: server.engine.active_requests == 0, "the end of a client that does not read")
        await server.check_empty()


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        bodies = [
            b'{"stream":%b,"messages":[{"role":"user","content":"number %d"}]}' % (b"true" if n % 2 else b"false", n)
            for n in range(6)
        ]
        await client.send(*(request("POST", PATH, body=body) for body in bodies))
        for number in range(6):
            response = await client.response()
            if number % 2:
                assert content(events_of(response)) == f"number {number}"
            else:
                assert response.json()["choices"][0]["message"]["content"] == f"number {number}"


async def test_other_methods() -> None:
    async with live_server() as server:
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            async with raw_client(server.port) as client:
                await client.send(request(method, PATH))
                response = await client.response(to_head=method == "HEAD")
                assert (response.status, response.headers["allow"]) == (405, "OPTIONS, POST")
        async with raw_client(server.port) as client:
            await client.send(request("OPTIONS", PATH))
            response = await client.response()
            assert (response.status, response.headers["allow"]) == (204, "OPTIONS, POST")


async def test_pages_of_allowed_origins_may_stream_and_others_may_not() -> None:
    async with live_server(allow_origin=("https://good.example",)) as server:
        preflight = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type")
        async with raw_client(server.port) as client:
            await client.send(request("OPTIONS", PATH, "Origin: https://good.example", *preflight))
            response = await client.response()
            assert response.headers["access-control-allow-origin"] == "https://good.example"
            assert "POST" in response.headers["access-control-allow-methods"]
        response = await ask(server, "Origin: https://good.example", stream=True)
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        assert events_of(response)[-1] == DONE
        response = await ask(server, "Origin: https://evil.example", stream=True)
        assert (response.status, response.error["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in response.headers


async def test_whole_answers_count_against_what_the_server_may_hold() -> None:
    engine = ScriptedEngine([AudioOutput(SILENCE, 24_000)] * 100)
    async with live_server(engine, limits={"max_held_bytes": 100_000}) as server:
        response = await ask(server, modalities=["text", "audio"])
        assert (response.status, response.error["code"]) == (503, "engine_overloaded")
        # A streamed answer is not held.
        assert (await stream(server, modalities=["text", "audio"]))[-1] == DONE


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        body = b'{"stream":true,"messages":[{"role":"user","content":"hi"}]}'
        await client.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)), body)
        response = await client.response()
        assert "transfer-encoding" not in response.headers
        assert content(events_of(response)) == "hi"


# --- curl and the openai package


async def test_curl(tmp_path: Path) -> None:
    async with live_server() as server:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sSN", f"http://127.0.0.1:{server.port}{PATH}", "-d"),
            '{"stream": true, "messages": [{"role": "user", "content": "hello there"}]}',
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await curl.communicate()
    assert curl.returncode == 0
    lines = output.decode().split("\n\n")
    assert '"delta":{"role":"assistant"}' in lines[0]
    assert lines[-2:] == ["data: [DONE]", ""]


def openai_package() -> Any:
    return pytest.importorskip("openai", reason="the openai package is not installed")


async def test_openai_package_synchronous() -> None:
    openai = openai_package()

    def use(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="local-model", messages=HELLO, max_tokens=2)
            assert whole.choices[0].message.content == "hello big"
            assert whole.choices[0].finish_reason == "length"
            chunks = client.chat.completions.create(
                model="local-model", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(said) == "hello big world"
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="local-model", messages=HELLO, n=2, stream=True)
            assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
            assert client.chat.completions.create(model="gpt-4o", messages=HELLO).model == "m"
            failing = {"stage_params": {"fake": {"fail_after_chunks": 1}}}
            with pytest.raises(openai.APIError, match="fake engine failed") as broken:
                list(client.chat.completions.create(model="m", messages=HELLO, stream=True, extra_body=failing))
            assert broken.value.code == "engine_failed"

    async with live_server(served_model_name=("m",)) as server:
        await asyncio.to_thread(use, server.port)


async def test_openai_package_accumulates_text_audio_and_usage() -> None:
    openai = openai_package()
    async with (
        live_server(ToneEngine()) as server,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="local-model",
            messages=HELLO,
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "pcm16"},
            stream_options={"include_usage": True},
        ) as streaming,
    ):
        async for _ in streaming:
            pass
        final = await streaming.get_final_completion()
    message = final.choices[0].message
    assert message.role == "assistant"
    assert message.content == "hello big world "
    assert final.choices[0].finish_reason == "stop"
    assert message.audio.id == "audio_" + final.id.removeprefix("chatcmpl-")
    assert len(base64.b64decode(message.audio.data, validate=True)) == 2880
    assert message.audio.transcript == "hello big world "
    assert message.audio.expires_at > final.created
    assert final.usage.total_tokens == 6


async def test_openai_package_ignores_transcripts_of_the_input() -> None:
    openai = openai_package()
    async with (
        live_server(ScriptedEngine(SCRIPT)) as server,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="local-model", messages=HELLO) as streaming,
    ):
        final = await streaming.get_final_completion()
    assert final.choices[0].message.content == "Hi."


# --- helpers


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def duration_ms(data: bytes) -> float:
    with av.open(io.BytesIO(data), "r") as container:
        return sum(frame.samples * 1000 / frame.sample_rate for frame in container.decode(audio=0))
