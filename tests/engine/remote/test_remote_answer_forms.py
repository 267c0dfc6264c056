"""Answers in the forms that other people's servers give them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from support.engine_answers import answer
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, events_of, post
from support.scripted_upstream import Answer, delta, finish, refuses, remote, remote_llm, says, streams, upstream

from omni_ws.client import connect
from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import FinishReason, UrlCitation
from omni_ws.engine.base import EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput
from omni_ws.engine.remote.answer_stream import ChatAnswer, ThoughtFilter
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.engine.remote.event_stream import EventReader, ServerSentEvent
from omni_ws.engine.remote.settings import opens_thoughts_in_props
from omni_ws.errors import EngineFailed, EngineOverloaded, UpstreamInvalid


def read(*events: Any) -> list[EngineOutput]:
    reader = ChatAnswer(sample_rate=24_000)
    outputs = [output for event in events for output in reader.read(ServerSentEvent("message", orjson.dumps(event)))]
    outputs += reader.read(ServerSentEvent("message", b"[DONE]"))
    return [*outputs, reader.finished(input_words=0, input_audio_ms=0)]


def text(outputs: list[EngineOutput]) -> str:
    return "".join(one.text for one in outputs if isinstance(one, TextOutput))


def content(*values: Any) -> list[dict[str, Any]]:
    return [*(delta(content=value) for value in values), finish()]


# content

PARTS = [
    content([{"type": "text", "text": "Hel"}], "lo"),
    content(["Hel", "lo"]),
    content({"type": "output_text", "text": "Hello"}),
    content([{"type": "text", "text": {"value": "Hello"}}, {"type": "reference", "reference_ids": [1]}]),
    [{"choices": [{"delta": {"content": "Hel"}}]}, {"choices": [{"index": None, "delta": {"content": "lo"}}]}],
    [{"choices": [{"text": "Hel"}]}, {"choices": [{"text": "lo", "finish_reason": "stop"}]}],
    [{"choices": [{"message": {"content": [{"text": "Hello"}]}, "finish_reason": "stop"}]}],
    # pieces of a message, and a message that repeats the deltas
    [{"choices": [{"message": {"content": "Hel"}}]}, {"choices": [{"message": {"content": "lo"}}]}],
    [delta(content="Hel"), {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}],
    [delta(content="Hello"), {"choices": [{"delta": {}, "message": {"content": "Hello "}, "finish_reason": "stop"}]}],
    [{"choices": [{"delta": {"content": "Hello"}, "message": {"content": "Hello"}}]}],
]


@pytest.mark.parametrize("events", PARTS)
def test_content_is_read_in_any_form(events: list[Any]) -> None:
    assert text(read(*events)).rstrip() == "Hello"


@pytest.mark.parametrize("thought", [[{"type": "text", "text": "hm"}], "hm", {"text": "hm"}])
def test_thoughts_among_the_parts(thought: object) -> None:
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Yes."}]
    *outputs, _ = read(*content(parts))
    assert outputs == [ThoughtOutput("hm"), TextOutput("Yes.")]


@pytest.mark.parametrize(
    "refused",
    [
        [delta(refusal="I can"), delta(refusal="not."), finish()],
        content([{"type": "refusal", "refusal": "I cannot."}]),
        [{"choices": [{"message": {"content": None, "refusal": "I cannot."}, "finish_reason": "stop"}]}],
    ],
)
def test_refusals_are_text_that_is_marked(refused: list[Any]) -> None:
    outputs = read(*refused)
    assert text(outputs) == "I cannot."
    assert all(one.refusal for one in outputs if isinstance(one, TextOutput))


# answers that say nothing

SILENT = [
    [],
    [delta(role="assistant", content="")],
    [delta(content=None), finish("insufficient_system_resource")],
    [delta(content=42), finish()],
    [delta(content=[{"type": "image_url", "image_url": {}}]), finish()],
    [delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]), finish("tool_calls")],
    [{"choices": [{"index": 7, "delta": {"content": "for another"}}]}, finish()],
    [{"choices": ["text"]}, finish()],
]


@pytest.mark.parametrize("events", SILENT)
def test_an_answer_in_which_nothing_is_understood_is_no_success(events: list[Any]) -> None:
    with pytest.raises(UpstreamInvalid):
        read(*events)


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_an_empty_answer_with_a_reason_is_one(reason: str) -> None:
    (end,) = read(delta(content=""), finish(reason))
    assert isinstance(end, Finished)


def test_what_is_not_understood_beside_text_is_told() -> None:
    *_, end = read(*content("See:", [{"type": "image_url", "image_url": {}}]))
    assert isinstance(end, Finished)
    assert [warning.code for warning in end.warnings] == ["upstream_invalid"]


async def test_what_is_neither_a_stream_nor_json_is_told() -> None:
    async def page(exchange: Any) -> None:
        await exchange.respond(200, [("Content-Type", "text/html")], b"<html>\n\n<p>Hello\n\n")

    async with upstream(page) as there, remote(there) as engine:
        with pytest.raises(UpstreamInvalid):
            await answer(engine)


@pytest.mark.parametrize(
    "whole",
    [
        refuses(200, {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}),
        refuses(200, b'\xef\xbb\xbf \n{"choices": [{"message": {"content": "Hello"}}]}'),
        streams(delta(content="Hello"), finish(), headers=(("Content-Type", "application/json"),)),
        streams(delta(content="Hello"), finish(), headers=(("Content-Type", "text/plain"),)),
        streams(delta(content="Hello"), finish(), headers=()),
    ],
)
async def test_whole_answers_and_streams_of_any_type(whole: Answer) -> None:
    async with upstream(whole) as there, remote(there) as engine:
        assert text(await answer(engine)) == "Hello"


async def test_errors_in_place_of_answers() -> None:
    async with upstream(refuses(200, {"error": {"message": "hush", "code": 500}})) as there, remote(there) as engine:
        with pytest.raises(EngineFailed):
            await answer(engine)


def test_a_body_is_whole_wherever_it_is_cut() -> None:
    body = b' {"choices": [\n\n]}'
    for place in range(len(body)):
        reader = EventReader()
        events = [*reader.feed(body[:place]), *reader.feed(body[place:]), *reader.finish()]
        assert [orjson.loads(event.data) for event in events] == [{"choices": []}]


# calls


def call(index: int | None = None, id: str | None = None, name: str | None = None, arguments: Any = None) -> Any:
    fields = {"name": name, "arguments": arguments}
    piece = {"index": index, "id": id, "function": {key: value for key, value in fields.items() if value is not None}}
    return delta(tool_calls=[{key: value for key, value in piece.items() if value is not None}])


CALLS = [
    ([call(0, "a", "now", "")], [("now", "{}")]),
    ([call(0, "a", "now", " "), call(0, None, None, "null")], [("now", "{}")]),
    ([call(0, "a", "now"), call(1, "b", "then", {})], [("now", "{}"), ("then", "{}")]),
    ([call(0, "a", "f", {"a": {"b": [1]}})], [("f", '{"a":{"b":[1]}}')]),
    ([call(0, None, "f", "{}"), call(0, None, "f", "{}")], [("f", "{}"), ("f", "{}")]),
    ([call(0, None, "f", '{"a":"}'), call(0, None, "f", '"}')], [("f", '{"a":"}"}')]),
    ([call(0, "a", "f", '{"a":'), call(0, "other", None, "1}")], [("f", '{"a":1}')]),
    ([call(0, "a", "f", "{}"), call(1, "a", "g", "{}")], [("f", "{}"), ("g", "{}")]),
    ([call(0, "a"), call(0, None, "get_"), call(0, None, "it"), call(0, None, None, "{}")], [("get_it", "{}")]),
    ([call(0, None, "f"), call(0, "a", "f", "{}")], [("f", "{}")]),
    ([delta(tool_calls={"id": "a", "function": {"name": "f", "arguments": "{}"}})], [("f", "{}")]),
    ([delta(function_call={"name": "f", "arguments": None})], [("f", "{}")]),
    (
        [delta(function_call={"name": "f", "arguments": "{"}), delta(function_call={"name": "f", "arguments": "}"})],
        [("f", "{}")],
    ),
    (
        [{"choices": [{"message": {"function_call": {"name": "f", "arguments": {"a": 1}}}, "finish_reason": "stop"}]}],
        [("f", '{"a":1}')],
    ),
    (
        [
            call(0, "a", "f", "{}"),
            {"choices": [{"message": call(0, "a", "f", "{}")["choices"][0]["delta"], "finish_reason": "stop"}]},
        ],
        [("f", "{}")],
    ),
]


@pytest.mark.parametrize(("events", "expected"), CALLS)
def test_calls_are_told_apart_and_have_arguments(events: list[Any], expected: list[tuple[str, str]]) -> None:
    *outputs, end = read(*events, finish("stop"))
    told: dict[int, tuple[str, str, str]] = {}
    for output in outputs:
        assert isinstance(output, ToolCallOutput)
        one = output.call
        id, name, arguments = told.get(one.index, ("", "", ""))
        assert (one.id is None) == (one.index in told)
        told[one.index] = (id + (one.id or ""), name + (one.name or ""), arguments + one.arguments)
    assert [(name, arguments) for _, name, arguments in told.values()] == expected
    assert len({id for id, _, _ in told.values()}) == len(expected)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.TOOL_CALLS


def test_a_character_that_is_cut_in_two_in_arguments() -> None:
    reader = ChatAnswer(sample_rate=24_000)
    pieces = [rb'"{\"a\":\"\ud83d"', rb'"\ude00\"}"']
    events = [
        b'{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":%b}}]}}]}' % piece
        for piece in pieces
    ]
    outputs = [output for event in [*events, b"[DONE]"] for output in reader.read(ServerSentEvent("message", event))]
    told = "".join(one.call.arguments for one in outputs if isinstance(one, ToolCallOutput))
    assert orjson.loads(told) == {"a": "😀"}


def test_calls_without_end_end_the_answer() -> None:
    with pytest.raises(EngineFailed):
        read(*(call(0, f"call_{number}", "f", "{}") for number in range(2000)))


# thoughts without an opening tag


def filtered(*pieces: str, **how: bool) -> tuple[str, str, bool]:
    thoughts = ThoughtFilter(**how)
    parts = [*map(thoughts.feed, pieces), thoughts.finish()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts), thoughts.unopened


HELD = [
    ("I greet.\n</think>\n\nHello.", "I greet.\n", "Hello.", True),
    ("</think>Hello.", "", "Hello.", True),
    ("<think>hm</think>Hello.", "hm", "Hello.", False),
    ("Hello. </thin", "", "Hello. </thin", False),
    ("Tags are <think> and </think>.", "", "Tags are <think> and </think>.", False),
]


@pytest.mark.parametrize(("whole", "thought", "answer", "unopened"), HELD)
def test_a_thought_that_was_not_opened_is_cut_out(whole: str, thought: str, answer: str, unopened: bool) -> None:
    for size in (1, 3, 8, len(whole)):
        pieces = (whole[place : place + size] for place in range(0, len(whole), size))
        assert filtered(*pieces, holds=True, watches=True) == (thought, answer, unopened)


@pytest.mark.parametrize(
    ("whole", "answer", "unopened"),
    [
        ("I greet.\n</think>\n\nHello.", "I greet.\nHello.", True),
        ("I greet.\n </think> Hello.", "I greet.\n Hello.", True),
        ("The tag </think> ends it.", "The tag </think> ends it.", False),
        ("Write\n<think>\nhm\n</think>", "Write\n<think>\nhm\n</think>", False),
        ("a <\n</b>\n</thi", "a <\n</b>\n</thi", False),
    ],
)
def test_a_stream_that_was_not_held_back_loses_the_tag_alone(whole: str, answer: str, unopened: bool) -> None:
    for size in (1, 3, 8, len(whole)):
        pieces = (whole[place : place + size] for place in range(0, len(whole), size))
        assert filtered(*pieces, watches=True) == ("", answer, unopened)


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        ("{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}", True),
        ("{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}", False),
        ("<think>{% if add_generation_prompt %}assistant{% endif %}", False),
        ("", False),
        (None, False),
    ],
)
def test_templates_that_open_thoughts(template: object, opens: bool) -> None:
    assert opens_thoughts_in_props({"chat_template": template}) is opens


@pytest.mark.parametrize(
    ("settings", "asked"), [({"opens_thoughts": True}, "hi"), ({}, "hi")], ids=["named", "seen once"]
)
async def test_streams_are_held_back_where_thoughts_are_known(settings: dict[str, Any], asked: str) -> None:
    thinks = streams(*(delta(content=piece) for piece in ("I greet.", "\n</think>\n\n", "Hello.")), finish())
    async with upstream(thinks) as there, remote_llm(there, **settings) as engine:
        first, second = text(await answer(engine, asked)), text(await answer(engine, asked))
    assert first == ("Hello." if settings else "I greet.\nHello.")
    assert second == "Hello."


async def test_answers_without_thoughts_are_not_held_back_for_ever() -> None:
    thinks = streams(delta(content="I greet.\n</think>Hello."), finish())
    async with upstream(thinks, says("One. ", "Two.")) as there, remote_llm(there) as engine:
        await answer(engine, "hi")
        pieces = []
        for _ in range(4):
            outputs = await answer(engine, "hi")
            pieces.append([one.text for one in outputs if isinstance(one, TextOutput) and one.text])
        # A prompt that speaks of the tag teaches nothing.
        there.chat[:] = [thinks]
        assert "</think>" in text(await answer(engine, "Say </think>"))
        assert not engine.upstreams[0].opens_thoughts
    assert pieces == [["One. Two."]] * 3 + [["One. ", "Two."]]


# as clients get them


@asynccontextmanager
async def served(*answers: Answer) -> AsyncIterator[LiveServer]:
    async with upstream(*answers) as there:
        config = RemoteConfig(upstreams=(there.url,), start_timeout_sec=0)
        async with live_server(RemoteEngine(config), remote=config) as server:
            yield server


async def chat(server: LiveServer, **fields: Any) -> RawResponse:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return await post(server.port, "/v1/chat/completions", body)


async def test_a_reason_of_the_upstreams_own() -> None:
    cut = streams(delta(content="Hel"), finish("content_filter"))
    async with served(cut) as server:
        (whole,) = (await chat(server)).json()["choices"]
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Hel", "content_filter")
        last = events_of(await chat(server, stream=True))[-2].json()
        assert last["choices"][0]["finish_reason"] == "content_filter"
        assert "warnings" not in last
        async with connect(server.websocket_url) as session:
            answered = await session.ask_text("hi")
        assert (answered.text, answered.finish_reason) == ("Hel", FinishReason.STOP)
        assert [(one.code, "content_filter" in one.message) for one in answered.warnings] == [("finish_reason", True)]


async def test_a_refusal() -> None:
    async with served(streams(delta(refusal="I can"), delta(refusal="not."), finish())) as server:
        message = (await chat(server)).json()["choices"][0]["message"]
        assert (message["content"], message["refusal"]) == (None, "I cannot.")
        deltas = [event.json()["choices"][0]["delta"] for event in events_of(await chat(server, stream=True))[:-1]]
        assert deltas == [{"role": "assistant"}, {"refusal": "I can"}, {"refusal": "not."}, {}]
        async with connect(server.websocket_url) as session:
            assert (await session.ask_text("hi")).text == "I cannot."


async def test_an_answer_that_says_nothing() -> None:
    answers = streams(delta(content=42), finish()), streams(delta(content="Hi."), finish())
    async with served(*answers) as server, connect(server.websocket_url) as session:
        with pytest.raises(UpstreamInvalid):
            await session.ask_text("hi")
        assert (await session.ask_text("hi")).text == "Hi."
    async with served(streams(delta(content=42), finish())) as server:
        response = await chat(server)
        assert (response.status, response.json()["error"]["code"]) == (502, "upstream_invalid")


async def test_a_whole_answer_has_no_thought_that_was_not_opened() -> None:
    async with served(streams(delta(content="I greet."), delta(content="\n</think>\n\nHello."), finish())) as server:
        message = (await chat(server)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hello.", "I greet.\n")
        deltas = [event.json()["choices"][0]["delta"] for event in events_of(await chat(server, stream=True))[:-1]]
        assert deltas[1:] == [{"reasoning_content": "I greet.\n"}, {"content": "Hello."}, {}]


# refusals


async def test_a_refused_request_leaves_the_session_and_its_history() -> None:
    full = refuses(429, {"error": {"message": "Rate limit reached for key sk-1234567890.", "type": "tokens"}})
    async with upstream(says("One."), full, says("Three.")) as there:
        config = RemoteConfig(upstreams=(there.url,), start_timeout_sec=0)
        async with live_server(RemoteEngine(config), remote=config) as server, connect(server.websocket_url) as session:
            await session.ask_text("first")
            with pytest.raises(EngineOverloaded, match=r"^Rate limit reached for key \*\*\*\.$"):
                await session.ask_text("second")
            assert (await session.ask_text("third")).text == "Three."
        contents = [message["content"] for message in there.requests[-1]["messages"]]
        assert contents[:2] == ["first", "One."]
        assert "third" in contents[-1]


@pytest.mark.parametrize("status", [401, 403])
async def test_what_is_said_of_the_key_is_for_this_machine(status: int) -> None:
    async with served(refuses(status, {"error": {"message": "Your plan has ended."}})) as server:
        near = (await chat(server)).json()["error"]["message"]
        assert (
            "the upstream does not accept the key of this server: Your plan has ended. (set OMNI_WS_REMOTE__API_KEY);"
            in near
        )
        body = {"messages": [{"role": "user", "content": "hi"}]}
        far = await post(server.port, "/v1/chat/completions", body, "X-Forwarded-For: 192.0.2.7")
        assert "the upstream does not accept the key of this server; error id" in far.json()["error"]["message"]
        async with connect(server.websocket_url) as session:
            with pytest.raises(EngineFailed, match="Your plan has ended"):
                await session.ask_text("hi")


@pytest.mark.parametrize("status", [400, 402, 429, 500])
async def test_the_log_has_what_an_upstream_says_only_where_it_may(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = refuses(status, {"error": {"message": "You said hush.", "code": "its_code"}})
    in_stream = streams({"error": {"message": "You said hush.", "code": "its_code"}})
    for log_content in (False, True):
        for answers in (said, in_stream):
            caplog.clear()
            async with upstream(answers) as there:
                config = RemoteConfig(upstreams=(there.url,), start_timeout_sec=0)
                engine = RemoteEngine(config, log_content=log_content)
                with caplog.at_level(logging.DEBUG, "omni_ws"):
                    async with live_server(engine, remote=config) as server:
                        await chat(server)
            assert "its_code" in caplog.text or log_content
            assert ("hush" in caplog.text) is log_content


def cites(url: object, **more: object) -> dict[str, Any]:
    return {"type": "url_citation", "url_citation": {"url": url, **more}}


PAGES = [
    cites("https://example.com/a", title="A", start_index=0, end_index=3, license="CC0-1.0"),
    cites("https://example.com/b", title="", start_index=-1, end_index="x"),
    cites("https://example.com/" + "c" * 2028, title="t" * 256),
]
FOUND = (
    UrlCitation("A", "https://example.com/a", 0, 3, "CC0-1.0"),
    UrlCitation("https://example.com/b", "https://example.com/b", 0, 0),
    UrlCitation("t" * 256, "https://example.com/" + "c" * 2028, 0, 0),
)


@pytest.mark.parametrize(
    "events",
    [
        [delta(content="Yes.", annotations=PAGES), finish()],
        [delta(content="Yes."), *(delta(annotations=[page]) for page in PAGES), finish()],
        [{"choices": [{"message": {"content": "Yes.", "annotations": PAGES}, "finish_reason": "stop"}]}],
        # Told again with the whole message.
        [
            delta(content="Yes.", annotations=PAGES),
            {"choices": [{"message": {"content": "Yes.", "annotations": PAGES}, "finish_reason": "stop"}]},
        ],
    ],
)
def test_web_pages_that_an_answer_names_are_passed_on(events: list[Any]) -> None:
    *said, end = read(*events)
    assert isinstance(end, Finished)
    assert "".join(output.text for output in said if isinstance(output, TextOutput)) == "Yes."
    assert (end.citations, end.warnings) == (FOUND, ())


@pytest.mark.parametrize(
    "annotations",
    [
        None,
        "x",
        {"url": "https://example.com/"},
        [None, 5, "https://example.com/", {}, {"type": "url_citation"}],
        [{"type": "file_citation", "file_citation": {"url": "https://example.com/"}}],
        [cites(5), cites(None), cites("")],
        [cites("javascript:alert(1)", title="A"), cites("file:///etc/passwd"), cites("//example.com")],
        [cites("https://example.com/" + "c" * 2029)],
    ],
)
def test_what_names_no_web_page_is_left_out(annotations: Any) -> None:
    *_, end = read(delta(content="Yes.", annotations=annotations), finish())
    assert isinstance(end, Finished)
    assert (end.citations, end.warnings) == ((), ())


def test_no_more_web_pages_are_passed_on_than_anybody_reads() -> None:
    pages = [cites(f"https://example.com/{number}") for number in range(33)]
    *_, end = read(delta(content="Yes.", annotations=pages), finish())
    assert isinstance(end, Finished)
    assert [page.url for page in end.citations] == [f"https://example.com/{number}" for number in range(32)]


def test_half_a_character_in_a_title_is_replaced() -> None:
    page = cites("https://example.com/\ud83d", title="\ud83dA", license="\ud83d")
    answer = ChatAnswer(sample_rate=24_000)
    for event in (delta(content="Yes.", annotations=[page]), finish()):
        answer.read(ServerSentEvent("message", json.dumps(event).encode()))
    (cited,) = answer.finished(input_words=1, input_audio_ms=0).citations
    assert f"{cited.title}{cited.url}{cited.license}".encode()


async def test_annotations_of_an_upstream_reach_a_client() -> None:
    page = cites("https://example.com/a", title="A", start_index=0, end_index=3)
    async with served(streams(delta(content="Yes."), delta(annotations=[page]), finish())) as server:
        (whole,) = (await chat(server)).json()["choices"]
        assert whole["message"]["annotations"] == [page]
