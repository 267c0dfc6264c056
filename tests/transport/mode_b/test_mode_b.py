"""Mode B: input over several requests, states, and whole results."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from support.live_server import live_server
from support.mode_b_client import EVENTS, JSON, SESSIONS, ModeBSession, create, mode_b, numbered_events, text
from support.raw_http import call, raw_client, request
from support.scripted_engines import ActingEngine, CapableEngine, CountingEngine, ToneEngine, finished, said

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, ToolCall, Usage
from omni_ws.engine.base import (
    Finished,
    GenerationRequest,
    OutputWriter,
    StructuredOutput,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import InvalidValue
from omni_ws.service.observing.observer import Observation, SessionEnded, SessionIdentity, SessionOpened
from omni_ws.transport.http.connections import PeerGone
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.mode_b import routes as mode_b_routes
from omni_ws.transport.mode_b.routes import MAX_WAIT_SEC


class Recorder:
    """Observer of sessions that began and ended."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.ended: list[str] = []

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        match observation:
            case SessionOpened():
                self.opened.append(session.session_id)
            case SessionEnded():
                self.ended.append(session.session_id)


class Hasty(EchoEngine):
    """Takes one chunk of its input and no more."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            async for _ in request.input:
                break
            out.write(TextOutput("enough"))
            out.write(Finished(FinishReason.STOP, Usage()))
        finally:
            self.active_requests -= 1


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "7"}]

KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open"), max_sessions=1))
ONE, TWO = "Authorization: Bearer sesame", "Authorization: Bearer open"


async def test_chunks_in_any_order_are_answered_alike_however_the_answer_is_read() -> None:
    async with live_server() as server, mode_b(server) as session:
        created = session.created
        assert created["session_id"].startswith("sess_")
        assert (created["expires_in"], created["state"], created["started"], created["next_sequence_id"]) == (
            *(300, "open", False, 0),
        )
        early = asyncio.gather(session.result(), session.events(), session.attached())
        assert (await session.append(text("the ", 2)))["buffered_chunks"] == 1
        # The same chunk over two connections at once.
        repeated = await asyncio.gather(session.append(text("this ", 0)), session.append(text("this ", 0)))
        assert max(status["duplicates"] for status in repeated) == 1
        status = await session.append(text("the ", 2), text("is ", 1), text("answer", 3))
        assert (status["next_sequence_id"], status["buffered_chunks"], status["duplicates"]) == (4, 0, 2)
        assert (status["state"], status["started"], status["input_ended"]) == ("started", True, False)
        assert (await session.finish())["input_ended"]
        completion, events, (answer, code) = await asyncio.gather(
            session.completion(), session.events(), session.attached()
        )
        finished = await session.finish()
        assert (finished["state"], finished["input_ended"]) == ("finished", True)
        assert completion["choices"][0]["message"]["content"] == "this is the answer"
        assert "".join(e.json()["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "this is the answer"
        assert (answer.text, answer.reason, code) == ("this is the answer", "stop", 1000)
        assert completion["id"] == events[0].json()["id"]
        assert answer.final["usage"]["total_tokens"] == completion["usage"]["total_tokens"] == 8
        polled = await session.result(wait=None)
        assert polled.json() == completion
        whole, streamed, (watched, _) = await early
        assert whole.json() == completion
        assert streamed == events
        assert watched == answer


@pytest.mark.parametrize(("method", "below"), [("POST", "/chunks"), ("POST", "/append"), ("PATCH", "")])
async def test_three_ways_to_append(method: str, below: str) -> None:
    async with live_server() as server, mode_b(server) as session:
        assert (await session.call(method, below, text("one ", 0))).status == 202
        response = await session.call(method, below, {"chunks": [text("two", 1), {"sequence_id": 2}]})
        assert (response.status, response.json()["next_sequence_id"]) == (202, 3)
        status = await session.append({"type": "input_chunk", "sequence_id": 3, "end_of_input": True})
        assert status["input_ended"]
        assert await session.content() == "one two"


@pytest.mark.parametrize(
    "body",
    [
        {"chunk": text("all of it", 0, end_of_input=True)},
        {"chunks": [text("all ", 0), text("of it", 1, end_of_input=True)]},
        {"chunks": [text("all "), text("of "), text("it", end_of_input=True)], "chunk": None},
    ],
)
async def test_the_first_chunks_may_come_along(body: dict[str, Any]) -> None:
    async with live_server() as server, mode_b(server, body) as session:
        assert session.created["started"]
        assert session.created["input_ended"]
        assert await session.content() == "all of it"


@pytest.mark.parametrize("ref", ["a", 5])
async def test_a_name_for_the_request_is_ignored_whatever_it_is(ref: Any) -> None:
    async with live_server() as server, mode_b(server) as session:
        await session.append({"sequence_id": 0, "ref": ref}, text("hello", 1, ref=ref))
        await session.finish()
        answer, _ = await session.attached()
        assert answer.text == "hello"
        assert answer.started is not None
        assert "ref" not in answer.started | answer.final


async def test_a_session_is_opened_without_a_body_however_that_is_said() -> None:
    async with live_server() as server:
        for header, body in (
            *(("Content-Length: 0", b""), ("Transfer-Encoding: chunked", b"0\r\n\r\n")),
            *(("Content-Type: text/html", b""), ("Content-Type: application/json", b"{}")),
        ):
            response = await call(server.port, "POST", SESSIONS, body, header)
            assert response.status == 201
            assert await ModeBSession(server, response.json()).delete() == 204


async def test_parameters_are_those_of_a_streamed_body() -> None:
    engine = ToneEngine()
    parameters = {
        "model": "local-model",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "earlier"}],
        "audio": {"voice": "bell", "format": "wav"},
        "modalities": ["text", "audio"],
        "start_policy": "on_end_only",
        "request_id": "mine",
        "stream_options": {"include_usage": True},
    }
    async with live_server(engine) as server, mode_b(server, parameters) as session:
        assert not (await session.append(text("la la ", 0)))["started"]
        await session.finish()
        completion = await session.completion()
        events = await session.events()
    (seen,) = engine.requests
    assert (seen.voice, seen.instructions, [m.text for m in seen.history]) == ("bell", "Be short.", ["earlier"])
    assert completion["id"] == "chatcmpl-mine"
    assert events[-2].json()["usage"] == completion["usage"]
    audio = completion["choices"][0]["message"]["audio"]
    assert audio["transcript"] == "la la "
    wav = base64.b64decode(audio["data"])
    streamed = base64.b64decode(
        "".join(choice["delta"].get("audio", {}).get("data", "") for e in events[:-1] for choice in e.json()["choices"])
    )
    # Only the length in the header differs between the file and the stream.
    assert int.from_bytes(wav[40:44], "little") == len(wav) - 44
    assert int.from_bytes(streamed[40:44], "little") == 0xFFFFFFFF
    assert wav[44:] == streamed[44:]
    assert np.abs(np.frombuffer(wav[44:], "<i2")).max() > 10_000


async def test_what_is_asked_of_the_answer_and_the_calls_before_it_reach_the_engine() -> None:
    script = [said("a", logprobs=True), said("b", choice=1, logprobs=True), finished()]
    engine = CapableEngine(script)
    parameters = {"n": 2, "logprobs": True, "response_format": {"type": "json_object"}, "priority": 3}
    body = {**parameters, "messages": CALLED, "chunk": text("go on", end_of_input=True)}
    async with live_server(engine) as server, mode_b(server, body) as session:
        choices = (await session.completion())["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["a", "b"]
    assert [choice["logprobs"]["content"][0]["token"] for choice in choices] == ["a", "b"]
    (seen,) = engine.requests
    options = seen.options
    assert (options.choices, options.logprobs, options.structure, options.priority) == (2, 0, StructuredOutput(), 3)
    assistant, tool = seen.history
    assert (assistant.tool_calls, tool.tool_call_id) == ((ToolCall("call_1", "f", "{}"),), "call_1")


async def test_a_session_that_is_refused_is_over_for_those_who_look_on() -> None:
    engine = CapableEngine()
    seen = Recorder()
    async with live_server(engine) as server:
        server.app.sessions.observers.add(seen)
        wrong = {"messages": [{"role": "user", "content": "hi"}], "voice": "nobody"}
        for path, body in (
            (SESSIONS, {"voice": "nobody"}),
            ("/v1/chat/completions", wrong),
            ("/v1/audio/speech", {"input": "hi", "voice": "nobody"}),
            ("/v1/completions", {"prompt": "hi", "temperature": 9}),
            (
                "/v1/completions",
                {"prompt": ["hi", "you", [1, 2]]},
            ),  # each prompt has a session, and the third is refused
        ):
            assert (await call(server.port, "POST", path, body)).status == 400
    assert sorted(seen.opened) == sorted(seen.ended)
    assert len(seen.opened) == 7


async def test_spoken_answers_are_pcm_unless_named_and_the_same_for_every_reader() -> None:
    {"modalities": ["audio"], "chunk": text("do re mi", 0, end_of_input=True)}
    async with (
        live_server(ToneEngine()) as server,
        mode_b(server, {"modalities": ["audio"], "chunk": text("do re mi", 0, end_of_input=True)}) as session,
    ):
        completion = await session.completion()
        answer, code = await session.attached()
        assert code == 1000
        message = completion["choices"][0]["message"]
        assert message["content"] is None
        assert base64.b64decode(message["audio"]["data"]) == answer.audio
        assert len(answer.audio) == 3 * 24_000 * 2 * 20 // 1000


async def test_transcripts_belong_to_the_answer() -> None:
    engine = ScriptedEngine([TranscriptOutput("hi there"), TextOutput("hello")])
    async with live_server(engine) as server, mode_b(server, {"chunk": text("x", 0, end_of_input=True)}) as session:
        assert (await session.completion())["input_transcript"] == {"text": "hi there"}
        answer, _ = await session.attached()
        assert [chunk["modality"] for chunk in answer.chunks] == ["transcript", "text"]


async def test_what_accept_leaves_open_the_session_was_opened_with() -> None:
    async with live_server() as server:
        for stream, accept, events in (
            *((True, None, True), (False, None, False), (None, None, False)),
            *((True, JSON, False), (False, EVENTS, True), (True, f"{JSON}, text/event-stream", True)),
            (True, "Accept: */*", True),
        ):
            async with mode_b(server, {"stream": stream, "chunk": text("x", 0, end_of_input=True)}) as session:
                await session.until("finished")
                response = await session.call("GET", "/result", None, *([accept] if accept else []))
                if events:
                    assert numbered_events(response)[-1].data == "[DONE]"
                else:
                    assert response.json()["object"] == "chat.completion"


async def test_a_result_that_is_not_there_yet() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("half", 0)}) as session:
        for wait in (None, 0, 0.01):
            response = await session.result(wait=wait)
            assert (response.status, response.headers["retry-after"]) == (202, "1")
            assert response.json()["state"] == "started"
        for bad in ("soon", "-1", "nan", "inf", ""):
            response = await session.call("GET", f"/result?wait={bad}", None, JSON)
            assert (response.status, response.error["param"]) == (400, "wait")


@pytest.mark.virtual_clock
async def test_the_longest_wait() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("half", 0)}) as session:
        begin = asyncio.get_running_loop().time()
        assert (await session.result(wait=100)).status == 202
        assert asyncio.get_running_loop().time() - begin == pytest.approx(MAX_WAIT_SEC, abs=0.2)


# refusals


NOT_OPENED: list[tuple[Any, int, str, str | None]] = [
    (b"{", 400, "invalid_frame", None),
    (b"\xff", 400, "invalid_frame", None),
    ([1], 400, "invalid_frame", None),
    ({"stream": "yes"}, 400, "invalid_value", "stream"),
    ({"logit_bias": {"1": 1}}, 400, "unsupported_parameter", "logit_bias"),
    ({"audio": {"voice": "nobody"}}, 400, "invalid_value", "audio.voice"),
    ({"start_policy": "whenever"}, 400, "invalid_value", "start_policy"),
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"video_fps": 1}, 400, "unsupported_parameter", "video_fps"),
    ({"messages": CALLED}, 400, "unsupported_parameter", "messages[0].tool_calls"),
    ({"text": "hello"}, 400, "invalid_value", "text"),
    ({"chunk": 1}, 400, "invalid_frame", "chunk"),
    ({"chunk": {"sequence_id": -1}}, 400, "invalid_value", "chunk.sequence_id"),
    ({"chunk": {"payload": "!"}}, 400, "invalid_frame", "chunk.payload"),
    ({"chunk": {"offset": 1.5}}, 400, "invalid_value", "chunk.offset"),
    ({"chunk": {"type": "finish"}}, 400, "unknown_type", "chunk.type"),
    ({"chunk": {}, "chunks": []}, 400, "invalid_value", "chunk"),
    ({"chunks": {}}, 400, "invalid_value", "chunks"),
    ({"chunks": [{"text": "a"}, {"text": 1}]}, 400, "invalid_frame", "chunks[1].text"),
    ({"chunks": [{"text": "a"}, {"text": "b", "sequence_id": 0}]}, 400, "invalid_value", "chunks[1].sequence_id"),
    ({"chunk": {"payload": "AAAA", "format": "audio/alac"}}, 415, "unsupported_format", "chunk.format"),
]


async def test_what_cannot_be_opened() -> None:
    async with live_server() as server:
        for body, status, code, param in NOT_OPENED:
            response = await call(server.port, "POST", SESSIONS, body)
            assert (response.status, response.error["code"], response.error["param"]) == (status, code, param), (
                response.body
            )
            await server.until(lambda: server.sessions == 0)
            assert len(server.app.registry) == 0, body


NOT_APPENDED: list[tuple[Any, int, str, str | None]] = [
    (b"{", 400, "invalid_frame", None),
    (b"", 400, "invalid_frame", None),
    ({}, 400, "invalid_frame", "chunks"),
    ({"text": "a", "chunks": []}, 400, "invalid_value", "text"),
    ({"chunks": "a"}, 400, "invalid_value", "chunks"),
    ({"chunks": [{}] * 65_537}, 400, "invalid_value", "chunks"),
    ({"chunks": [1]}, 400, "invalid_frame", "chunks[0]"),
    ({"sequence_id": "0", "text": "a"}, 400, "invalid_value", "sequence_id"),
    ({"sequence_id": 2**32, "text": "a"}, 400, "invalid_value", "sequence_id"),
    ({"text": "a", "payload": "AAAA"}, 400, "invalid_value", "text"),
    ({"text": "a", "modality": "smell"}, 400, "invalid_value", "modality"),
    ({"text": "a", "timestamp_ms": -1}, 400, "invalid_value", "timestamp_ms"),
    ({"text": "a", "end_of_input": 1}, 400, "invalid_value", "end_of_input"),
    ({"offset": 2**53, "text": "a"}, 400, "invalid_value", "offset"),
]


async def test_what_cannot_be_appended_leaves_the_session_as_it_was() -> None:
    async with live_server() as server:
        for body, status, code, param in NOT_APPENDED:
            async with mode_b(server, {"start_policy": "on_end_only"}) as session:
                before = await session.status()
                response = await session.call("POST", "/chunks", body)
                assert (response.status, response.error["code"], response.error["param"]) == (status, code, param), (
                    response.body
                )
                assert {**await session.status(), "expires_in": before["expires_in"]} == before, body


@pytest.mark.parametrize(("chunks", "on_the_loop"), [(256, True), (257, False)])
async def test_a_body_of_many_small_chunks_is_read_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, chunks: int, on_the_loop: bool
) -> None:
    """Each is an object to be made and checked, however few bytes it has."""
    threads: list[threading.Thread] = []

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread())
            return read(*arguments, **named)

        return reading

    for name in ("read_append", "read_create", "read_chat"):
        monkeypatch.setattr(mode_b_routes, name, watched(getattr(mode_b_routes, name)))
    async with live_server() as server, mode_b(server, {"chunks": [{}] * chunks}) as session:
        assert (await session.append(*([{}] * chunks)))["state"] == "open"
    assert [thread is threading.current_thread() for thread in threads] == [on_the_loop] * 3


async def test_a_body_of_another_kind() -> None:
    async with live_server() as server, mode_b(server) as session:
        for target in (SESSIONS, session.path + "/chunks"):
            response = await call(server.port, "POST", target, b"hello", "Content-Type: audio/wav")
            assert (response.status, response.error["param"]) == (415, "Content-Type")


async def test_a_refused_chunk_uses_its_number_up_and_the_others_of_its_body_are_taken() -> None:
    async with live_server() as server, mode_b(server) as session:
        chunks = [text("one ", 0), {"sequence_id": 1, "text": 1}, text("two ", 2)]
        response = await session.call("POST", "/chunks", {"chunks": chunks})
        assert (response.status, response.error["param"]) == (400, "chunks[1].text")
        refused = await session.call("POST", "/chunks", {"sequence_id": 3, "payload": "AA==", "format": "audio/alac"})
        assert refused.status == 415
        # Its number is used up: another chunk with it is a duplicate.
        assert (await session.append(text("three", 1)))["duplicates"] == 1
        assert (await session.append(text("four", 4, end_of_input=True)))["next_sequence_id"] == 5
        assert await session.content() == "one two four"


async def test_a_chunk_without_a_number_that_is_refused_leaves_no_gap() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("one ")}) as session:
        refused = await session.call("POST", "/chunks", {"sequence_id": 7, "text": 1})
        assert refused.status == 400
        await session.append(text("two", end_of_input=True))
        assert await session.content() == "one two"


async def test_out_of_order_where_that_is_not_wanted() -> None:
    async with live_server() as server, mode_b(server, {"out_of_order": "reject"}) as session:
        response = await session.call("POST", "/chunks", text("b", 1))
        assert (response.status, response.error["code"], response.error["param"]) == (
            409,
            "out_of_order",
            "sequence_id",
        )
        await session.append(text("a", 0), text("b", 1, end_of_input=True))
        assert await session.content() == "ab"


async def test_after_the_end_a_retry_is_harmless_and_more_is_a_conflict() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("a", 0)}) as session:
        last = text("b", 1, end_of_input=True)
        assert (await session.append(last))["duplicates"] == 0
        for _ in range(2):
            response = await session.call("POST", "/chunks", text("c", 2))
            assert (response.status, response.error["code"], response.error["param"]) == (
                *(409, "session_conflict", "sequence_id"),
            )
            assert (await session.append(last))["state"] in ("started", "finished")
            await session.until("finished")
        assert (await session.status())["duplicates"] == 2
        assert await session.content() == "ab"


@pytest.mark.parametrize("state", ["started", "finished", "cancelled", "failed"])
@pytest.mark.parametrize("number", [0, 1, 7, None])
async def test_ends_may_be_repeated(state: str, number: int | None) -> None:
    hangs = asyncio.Event()
    scripts: dict[str, Any] = {"started": hangs.wait, "failed": InvalidValue("no")}
    engine = ScriptedEngine([scripts[state]]) if state in scripts else None
    async with live_server(engine) as server, mode_b(server, {"chunk": text("a", 0, end_of_input=True)}) as session:
        if state == "cancelled":
            await session.call("DELETE")
        status = await session.until(state)
        bare = {"end_of_input": True} | ({} if number is None else {"sequence_id": number})
        again = await session.append(bare)
        assert again["state"] == state
        names = ("next_sequence_id", "buffered_chunks", "received_bytes", "input_ended")
        assert {name: again[name] for name in names} == {name: status[name] for name in names}
        hangs.set()


async def test_text_that_is_not_utf_8_is_refused_with_its_chunk() -> None:
    def piece(number: int, payload: bytes, **fields: Any) -> dict[str, Any]:
        return {"sequence_id": number, "modality": "text", "payload": base64.b64encode(payload).decode(), **fields}

    async with live_server() as server, mode_b(server) as session:
        await session.append(piece(0, b"gr\xc3"))
        response = await session.call("POST", "/chunks", {"chunks": [piece(1, b"\xff"), piece(2, b"\xbcn \xf0\x9f")]})
        assert (response.status, response.error["code"], response.error["param"]) == (
            *(400, "invalid_value", "chunks[0].payload"),
        )
        assert response.error["message"].startswith("the text of chunk 1 is not valid UTF-8")
        response = await session.call("POST", "/finish")
        assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", "payload")
        assert response.error["message"].startswith("the text of chunk 2 is not valid UTF-8")
        assert (await session.finish())["next_sequence_id"] == 3
        assert await session.content() == "grün "


async def test_a_number_behind_the_end_is_a_conflict_though_a_gap_is_open() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("c", 2)}) as session:
        assert not (await session.finish())["input_ended"]
        response = await session.call("POST", "/chunks", text("d", 3))
        assert (response.status, response.error["code"]) == (409, "session_conflict")
        await session.append(text("a", 0), text("b", 1))
        assert await session.content() == "abc"


async def test_the_rest_of_an_input_that_needs_no_more_is_counted() -> None:
    async with live_server(Hasty()) as server, mode_b(server, {"chunk": text("a b c", 0)}) as session:
        status = await session.until("finished")
        assert not status["input_ended"]
        status = await session.append(text("d", 1), text("d", 1))
        assert (status["next_sequence_id"], status["duplicates"], status["received_bytes"]) == (2, 1, 6)
        refused = await session.call("POST", "/chunks", {"sequence_id": 2, "text": 1})
        assert (refused.status, (await session.status())["next_sequence_id"]) == (400, 3)
        assert (await session.append(text("e", 3, end_of_input=True)))["input_ended"]
        response = await session.call("POST", "/chunks", text("f", 4))
        assert (response.status, response.error["code"]) == (409, "session_conflict")
        assert await session.content() == "enough"


async def test_the_rest_of_an_input_that_is_too_much_in_all_leaves_the_answer_as_it_is() -> None:
    limit = {"max_total_payload_per_session": 6}
    chunk = {"chunk": text("a b c", 0)}
    async with live_server(Hasty(), streaming_input=limit) as server, mode_b(server, chunk) as session:
        await session.until("finished")
        assert (await session.append(text("d", 1)))["received_bytes"] == 6
        response = await session.call("POST", "/chunks", text("e", 2))
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        assert (await session.status())["state"] == "finished"
        assert await session.content() == "enough"


async def test_finish_ends_an_input_whose_answer_is_complete() -> None:
    async with live_server(Hasty()) as server, mode_b(server, {"chunk": text("a b c", 0)}) as session:
        await session.until("finished")
        assert (await session.finish())["input_ended"]
        assert (await session.call("POST", "/chunks", text("f", 1))).status == 409


async def test_an_engine_that_cannot_extend_answers_the_whole() -> None:
    async with (
        live_server(ActingEngine("fake", extend=False)) as server,
        mode_b(server, {"chunk": text("a ", 0)}) as session,
    ):
        assert not (await session.append(text("b", 1)))["started"]
        await session.finish()
        assert await session.content() == "a b"


# failures


@pytest.mark.parametrize("end", ["finish", "chunk", "first chunk"])
async def test_an_empty_input(end: str) -> None:
    nothing = {"end_of_input": True}
    async with live_server() as server, mode_b(server, {"chunk": nothing} if end == "first chunk" else None) as session:
        match end:
            case "finish":
                status = await session.finish()
            case "chunk":
                status = await session.append(nothing)
            case _:
                status = session.created
        assert (status["state"], status["error"]["code"], status["input_ended"]) == ("failed", "empty_input", True)
        assert status["next_sequence_id"] == (0 if end == "finish" else 1)
        response = await session.result()
        assert (response.status, response.error["code"]) == (400, "empty_input")
        status = await session.finish()
        assert (status["state"], status["error"]["code"], status["started"]) == ("failed", "empty_input", False)
        streamed = await session.call("GET", "/result", None, EVENTS)
        assert (streamed.status, streamed.error["code"]) == (400, "empty_input")


async def test_an_engine_that_breaks() -> None:
    engine = ScriptedEngine([TextOutput("so far"), RuntimeError("secret")])
    async with (
        live_server(engine, expect_errors=True) as server,
        mode_b(server, {"chunk": text("x", 0, end_of_input=True)}) as session,
    ):
        response = await session.result()
        assert (response.status, response.error["code"]) == (500, "engine_failed")
        assert b"secret" not in response.body
        status = await session.status()
        assert (status["state"], status["error"]["code"]) == ("failed", "engine_failed")
        events = await session.events()
        assert events[1].json()["choices"][0]["delta"]["content"] == "so far"
        assert events[-1].name == "error"
        assert events[-1].json()["code"] == "engine_failed"
        # A reader cut off before the error gets it again; behind the error there are no more events.
        assert await session.events(last=events[-2].id) == events[-1:]
        gone = await session.call("GET", "/result", None, EVENTS, f"Last-Event-ID: {events[-1].id}")
        assert gone.status == 204
        watched, code = await session.attached()
        assert (watched.text, watched.reason, watched.errors[0]["code"], code) == (
            *("so far", "error", "engine_failed", 1000),
        )
        late = await session.call("POST", "/chunks", text("y", 1))
        assert (late.status, late.error["code"]) == (500, "engine_failed")


# limits


async def test_a_chunk_of_the_largest_size_and_one_byte_more() -> None:
    async with (
        live_server(streaming_input={"max_chunk_bytes": 1000}) as server,
        mode_b(server, {"start_policy": "on_end_only"}) as session,
    ):
        assert (await session.append(text("x" * 1000, 0)))["received_bytes"] == 1000
        assert server.held_bytes == 1000
        response = await session.call("POST", "/chunks", {"chunks": [text("x", 1), text("y" * 1001, 2)]})
        assert (response.status, response.error["code"], response.error["param"]) == (
            *(413, "payload_too_large", "chunks[1].payload"),
        )
        await server.until(lambda: server.held_bytes == 0 and server.sessions == 0)
        status = await session.status()
        assert (status["state"], status["error"]["code"]) == ("failed", "payload_too_large")
        for refused in (
            await session.call("POST", "/chunks", text("z", 3)),
            await session.result(),
            await session.call("GET", "/result", None, EVENTS),
        ):
            assert (refused.status, refused.error["code"]) == (413, "payload_too_large")
        assert (await session.finish())["state"] == "failed"
        assert await session.delete() == 204


async def test_a_payload_of_the_largest_size_and_one_byte_more() -> None:
    engine = CountingEngine(gate=asyncio.Event())
    async with (
        live_server(engine, streaming_input={"max_payload_per_session": 1000}) as server,
        mode_b(server, {"start_policy": "on_end_only"}) as session,
    ):
        await session.append(text("x" * 400, 1), text("y" * 600, 0))
        assert (await session.call("POST", "/chunks", text("z", 2))).status == 413
        await server.until(lambda: server.held_bytes == 0)


async def test_a_body_over_the_limit_closes_the_session() -> None:
    async with live_server(http={"max_body_bytes": 1000}) as server, mode_b(server) as session:
        assert (await session.call("POST", "/chunks", b" " * 968 + b'{"text":"a","sequence_id":0     }')).status == 413
        assert (await session.status())["error"]["code"] == "payload_too_large"
        response = await call(server.port, "POST", SESSIONS, b" " * 1001)
        assert response.status == 413


async def test_a_chunk_inside_the_window_and_one_beyond() -> None:
    async with live_server(streaming_input={"reorder_window_chunks": 4}) as server, mode_b(server) as session:
        assert (await session.append(text("d", 3)))["buffered_chunks"] == 1
        response = await session.call("PATCH", "", text("e", 4))
        assert (response.status, response.error["code"]) == (422, "reorder_window_exceeded")
        status = await session.status()
        assert (status["state"], status["buffered_chunks"]) == ("failed", 0)


async def test_an_answer_that_is_too_long_to_keep() -> None:
    script = [TextOutput("x" * 100), TextOutput("y" * 100)]
    for limit, status in ((2 * (128 + 400) + 128, 200), (2 * (128 + 400) + 127, 413)):
        async with (
            live_server(ScriptedEngine(script), streaming_input={"max_payload_per_session": limit}) as server,
            mode_b(server, {"chunk": text("x", 0, end_of_input=True)}) as session,
        ):
            assert (await session.result()).status == status


async def test_a_server_that_holds_enough() -> None:
    async with (
        live_server(CountingEngine(), limits={"max_held_bytes": 9000}) as server,
        mode_b(server, {"start_policy": "on_end_only"}) as session,
    ):
        await session.append(text("x" * 4000, 0))  # the body is charged beside its chunk
        await server.until(lambda: server.held_bytes == 4000, "the end of the request")
        busy = await session.call("POST", "/chunks", text("y" * 4000, 1))
        assert (busy.status, busy.error["code"]) == (503, "engine_overloaded")
        # It was not taken, and may be sent again.
        assert (await session.status())["next_sequence_id"] == 1
        await server.until(lambda: server.held_bytes == 4000, "the end of the request")
        await session.finish()
        assert await session.content() == "4000"


async def test_sessions_count_until_their_answer_is_complete() -> None:
    async with live_server(keys=KEYS, limits={"max_sessions": 2}) as server:
        first = await create(server, {"chunk": text("one", 0)}, ONE)
        second = await create(server, {"chunk": text("two", 0)}, TWO)
        for key, status, code in ((ONE, 503, "engine_overloaded"),):
            response = await call(server.port, "POST", SESSIONS, None, key)
            assert (response.status, response.error["code"]) == (status, code)
            assert "retry-after" in response.headers
        assert await first.delete() == 204
        limited = await call(server.port, "POST", SESSIONS, None, TWO)
        assert (limited.status, limited.error["code"]) == (429, "rate_limited")
        await second.append(text("x", 1, end_of_input=True))
        await second.until("finished")
        async with mode_b(server, None, TWO):
            assert server.sessions == 1
        assert await second.delete() == 204


async def test_a_session_is_seen_by_its_own_key_alone() -> None:
    async with live_server(keys=KEYS) as server, mode_b(server, None, ONE) as session:
        for method, below in (
            *(("GET", ""), ("GET", "/result"), ("POST", "/finish"), ("DELETE", "")),
            *(("POST", "/chunks"), ("POST", "/append"), ("PATCH", "")),
        ):
            target = session.path + below
            wrong = await call(server.port, method, target, None, TWO)
            assert (wrong.status, wrong.error["code"]) == (404, "session_not_found")
            unknown = await call(server.port, method, f"{SESSIONS}/sess_0{below}", None, ONE)
            assert unknown.body == wrong.body
            assert (await call(server.port, method, target)).status == 401
        assert (await call(server.port, "POST", SESSIONS)).status == 401


async def test_turned_off() -> None:
    async with live_server(streaming_input={"enabled": False}) as server:
        for method, target in (("POST", SESSIONS), ("GET", f"{SESSIONS}/sess_1"), ("DELETE", f"{SESSIONS}/sess_1")):
            response = await call(server.port, method, target)
            assert (response.status, response.error["code"]) == (404, "not_found")


async def test_other_methods() -> None:
    async with live_server() as server:
        for method, target, allow in (
            ("GET", SESSIONS, "POST"),
            ("POST", f"{SESSIONS}/x", "DELETE, GET, HEAD, PATCH"),
            ("GET", f"{SESSIONS}/x/chunks", "POST"),
            ("POST", f"{SESSIONS}/x/result", "GET, HEAD"),
        ):
            response = await call(server.port, method, target)
            assert response.status == 405
            assert {*response.headers["allow"].split(", ")} >= {*allow.split(", ")} - {"HEAD"}


async def test_an_id_begins_with_the_replica() -> None:
    async with live_server(replica_id="west-2") as server, mode_b(server) as session:
        assert session.id.startswith("west-2_sess_")


# sessions do not depend on their readers


async def test_delete_in_the_middle_frees_the_engine() -> None:
    engine = EchoEngine(EchoSettings(chunk_interval_ms=60_000))
    async with live_server(engine, limits={"max_sessions": 1}) as server:
        session = await create(server, {"chunk": text("a b c", 0)})
        await server.until(lambda: engine.active_requests == 1)
        waiting = asyncio.create_task(session.result())
        for _ in range(2):
            assert await session.delete() == 204
            assert (engine.active_requests, server.sessions, server.held_bytes) == (0, 0, 0)
        status = await session.status()
        assert (status["state"], status["error"]) == ("cancelled", None)
        for response in (await session.result(), await waiting):
            assert (response.status, response.error["code"]) == (409, "session_conflict")
        assert (await session.call("POST", "/chunks", text("d", 1))).status == 409
        assert (await session.append(text("a b c", 0)))["duplicates"] == 1
        assert (await session.finish())["state"] == "cancelled"


async def test_a_slow_engine_slows_the_input_down_and_nothing_is_lost() -> None:
    gate = asyncio.Event()
    engine = CountingEngine(gate=gate)
    async with (
        live_server(engine, streaming_input={"max_payload_per_session": 4 << 20}) as server,
        mode_b(server, {"chunk": text("x", 0)}) as session,
    ):
        chunks = [text("y" * (1 << 20), number) for number in range(1, 9)]
        feeding = asyncio.create_task(session.append(*chunks))
        await server.until(lambda: server.held_bytes > 1 << 20)
        assert not feeding.done()
        gate.set()
        assert (await feeding)["next_sequence_id"] == 9
        await session.finish()
        assert await session.content() == str(1 + 8 * (1 << 20))


async def test_a_session_that_is_deleted_lets_go_of_those_who_feed_it() -> None:
    engine = CountingEngine(gate=asyncio.Event())
    async with live_server(engine) as server:
        session = await create(server, {"chunk": text("x", 0)})
        chunks = [text("y" * (1 << 20), number) for number in range(1, 4)]
        feeding = asyncio.create_task(session.call("POST", "/chunks", {"chunks": chunks}))
        await server.until(lambda: server.held_bytes > 1 << 20)
        assert await session.delete() == 204
        assert (await feeding).status in (202, 409)


async def test_a_client_that_leaves_while_it_opens_a_session_leaves_none() -> None:
    engine = CountingEngine(gate=asyncio.Event())
    async with live_server(engine) as server:
        chunks = [text("y" * (1 << 17), number) for number in range(40)]
        body = orjson.dumps({"chunks": chunks})
        async with raw_client(server.port) as client:
            await client.send(request("POST", SESSIONS, "Content-Type: application/json", body=body))
            await server.until(lambda: server.held_bytes > 1 << 20)
            client.reset()
        await server.until(lambda: len(server.app.registry) == 0 and server.held_bytes == 0)


async def test_a_client_that_leaves_before_it_is_told_of_its_session_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def gone(exchange: HttpExchange, *arguments: Any) -> None:
        raise PeerGone("the client closed the connection")

    async with live_server() as server:
        with monkeypatch.context() as patched:
            patched.setattr(HttpExchange, "respond_json", gone)
            with pytest.raises(EOFError):
                await create(server, {"chunk": {"text": "hello"}})
        assert len(server.app.registry) == 0


async def test_an_answer_that_is_being_written_may_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("hello", end_of_input=True)}) as session:
        before = await session.completion()

        async def deleted_meanwhile(size: int, work: Callable[[], Any]) -> Any:
            assert await session.delete() == 204
            return work()

        monkeypatch.setattr(mode_b_routes, "to_thread_if_large", deleted_meanwhile)
        assert await session.completion() == before


async def test_an_input_of_which_nothing_is_left_ends_behind_its_gap() -> None:
    async with live_server() as server, mode_b(server) as session:
        refused = {"sequence_id": 1, "payload": "!"}
        assert (await session.call("POST", "/chunks", refused)).status == 400
        assert (await session.finish())["state"] == "open"
        assert (await session.call("POST", "/chunks", {**refused, "sequence_id": 0})).status == 400
        status = await session.status()
        assert (status["state"], status["error"]["code"], status["next_sequence_id"]) == ("failed", "empty_input", 2)
