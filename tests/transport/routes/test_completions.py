"""POST /v1/completions on the real server over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.live_server import LiveServer, live_server, scrape
from support.raw_http import DONE, Event, RawResponse, events_of, post, raw_client, request
from support.scripted_engines import ActingEngine, CapableEngine, finished, said, token

from omni_ws.core.chunks import FinishReason, TokenLogprob
from omni_ws.engine.base import AnswerOptions, EngineCapabilities, Finished, TextOutput
from omni_ws.engine.fake import CAPABILITIES, EchoEngine, ScriptedEngine
from omni_ws.errors import EngineFailed

PATH = "/v1/completions"


async def ask(server: LiveServer, *headers: str, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"prompt": "Once upon a time", **body}, *headers)


async def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that was completed."""
    events = events_of(await ask(server, stream=True, **body))
    assert events[-1] == DONE
    assert all(event.name is None for event in events)
    return [event.json() for event in events[:-1]]


def said_by(chunks: list[dict[str, Any]]) -> list[Any]:
    return [
        (choice["index"], choice["text"], choice["finish_reason"]) for chunk in chunks for choice in chunk["choices"]
    ]


async def test_the_last_piece_of_text_brings_the_finish_reason() -> None:
    async with live_server() as server:
        chunks = await stream(server)
    assert said_by(chunks) == [(0, "Once", None), (0, " upon", None), (0, " a", None), (0, " time", "stop")]
    assert chunks[-1].pop("usage")["completion_tokens"] == 4
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert (chunk["object"], chunk["model"]) == ("text_completion", "fake")
        assert set(chunk["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
        assert chunk["choices"][0]["logprobs"] is None
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("cmpl-")


async def test_a_whole_completion_says_the_same() -> None:
    async with live_server() as server:
        completion = (await ask(server, request_id="mine")).json()
    assert (completion["id"], completion["object"]) == ("cmpl-mine", "text_completion")
    assert completion["choices"] == [
        {"index": 0, "text": "Once upon a time", "logprobs": None, "finish_reason": "stop"}
    ]
    assert completion["usage"]["total_tokens"] == 8


async def test_an_answer_without_text_still_has_its_end() -> None:
    async with live_server(CapableEngine([])) as server:
        assert said_by(await stream(server)) == [(0, "", "stop")]
        assert (await ask(server)).json()["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "last"),
        ({"stream_options": {"include_usage": False}}, None),
        ({"usage_on_final_chunk": False}, None),
        ({"stream_options": {"include_usage": True}}, "own"),
        ({"usage_on_final_chunk": True, "stream_options": {"include_usage": True}}, "last"),
    ],
)
async def test_usage(body: dict[str, Any], where: str | None) -> None:
    async with live_server() as server:
        chunks = await stream(server, **body)
    assert [index for index, chunk in enumerate(chunks) if "usage" in chunk] == (
        [] if where is None else [len(chunks) - 1]
    )
    if where is not None:
        assert chunks[-1]["usage"]["completion_tokens"] == 4
        assert bool(chunks[-1]["choices"]) is (where == "last")


async def test_sixteen_tokens_where_nothing_is_said() -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        for body in ({}, {"max_tokens": 3}, {"max_tokens": 0}, {"sampling": {"max_tokens": 5}}):
            await ask(server, **body)
    assert [one.sampling["max_tokens"] for one in engine.requests] == [16, 3, 16, 5]


async def test_stop_strings_across_the_borders_of_pieces() -> None:
    async with live_server() as server:
        assert said_by(await stream(server, stop="pon a")) == [(0, "Once", None), (0, " u", "stop")]
        assert (await ask(server, stop=["pon a"])).json()["choices"][0]["text"] == "Once u"


async def test_the_prompt_reaches_the_engine_as_it_stands() -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        await ask(server, prompt="<s> raw", priority=2, instructions="ignored", voice="nobody", tools="ignored")
    (seen,) = engine.requests
    assert seen.options == AnswerOptions(raw_prompt=True, priority=2)
    assert (seen.instructions, seen.history) == ("", ())
    assert seen.modalities == {"text"}
    assert [chunk.payload for chunk in engine.inputs[0]] == [b"<s> raw"]


#: Token ids are accepted, prompts are echoed, and logit biases have an effect.
TOKENS: Mapping[str, Any] = {"token_prompts": True, "echo": True, "sampling": CAPABILITIES.sampling | {"logit_bias"}}


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ([7, 8], [(b"[7,8]", True)]),
        ([[7, 8], [2**31 - 1]], [(b"[7,8]", True), (b"[2147483647]", True)]),
        (["a", [0]], [(b"a", False), (b"[0]", True)]),
    ],
)
async def test_token_ids_reach_the_engine(prompt: list[Any], seen: list[tuple[bytes, bool]]) -> None:
    engine = CapableEngine([said("x")], **TOKENS)
    async with live_server(engine) as server:
        response = await ask(server, prompt=prompt, logit_bias={"9": -100, "10": 2.5})
    assert len(response.json()["choices"]) == len(seen)
    inputs = [b"".join(chunk.payload for chunk in chunks) for chunks in engine.inputs]
    options = [one.options for one in engine.requests]
    assert sorted(zip(inputs, (one.token_prompt for one in options), strict=True)) == sorted(seen)
    assert all(one.raw_prompt and not one.echo for one in options)
    assert [one.sampling["logit_bias"] for one in engine.requests] == [{"9": -100, "10": 2.5}] * len(seen)


@pytest.mark.parametrize(
    ("body", "only"),
    [
        ({}, False),
        ({"max_tokens": 1}, False),
        ({"max_tokens": 0}, True),
        ({"max_tokens": 0, "max_completion_tokens": 2}, False),
    ],
)
async def test_an_echo_with_and_without_an_answer(body: dict[str, Any], only: bool) -> None:
    engine = CapableEngine([], **TOKENS)
    async with live_server(engine) as server:
        assert (await ask(server, echo=True, **body)).status == 200
    (seen,) = engine.requests
    assert (seen.options.echo, seen.options.only_echo) == (True, only)


async def test_the_first_token_of_an_echo_has_no_logprob() -> None:
    first, second = TokenLogprob("On", b"On", None), token("ce", -0.5, "to")
    engine = CapableEngine(
        [TextOutput("Once", logprobs=(first, second)), TextOutput("!", logprobs=(token("!"),))], **TOKENS
    )
    async with live_server(engine) as server:
        (choice,) = (await ask(server, echo=True, logprobs=2)).json()["choices"]
        chunks = await stream(server, echo=True, logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["On", "ce", "!"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"ce": -0.5, "to": -1.5}, {"!": -0.5}],
        "text_offset": [0, 2, 4],
    }
    assert said_by(chunks) == [(0, "Once", None), (0, "!", "stop")]
    assert [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in chunks] == [[None, -0.5], [-0.5]]


@pytest.mark.parametrize(("past", "status"), [(0, 200), (1, 400)])
async def test_so_many_biases_and_no_more(past: int, status: int) -> None:
    async with live_server(CapableEngine([], **TOKENS)) as server:
        response = await ask(server, logit_bias={str(number): 1 for number in range(1024 + past)})
        assert response.status == status
        assert response.status == 200 or response.error["param"] == "logit_bias"


async def test_an_engine_that_freezes_its_input_gets_the_whole_prompt() -> None:
    async with live_server(ActingEngine("fake", extend=False), streaming_input={"max_chunk_bytes": 1024}) as server:
        prompt = "word " * 1000
        response = await ask(server, prompt=prompt, max_tokens=10_000)
    assert response.json()["choices"][0]["text"] == prompt


# --- several prompts and choices


async def test_prompts_and_choices_are_numbered_through() -> None:
    engine = CapableEngine(
        [
            said("a", choice=1),
            said("b", choice=0),
            finished(FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH),
        ]
    )
    async with live_server(engine) as server:
        completion = (await ask(server, prompt=["one", "two"], n=2)).json()
        chunks = await stream(server, prompt=["one", "two"], n=2, stream_options={"include_usage": True})
    expected = [(0, "b", "stop"), (1, "a", "length"), (2, "b", "stop"), (3, "a", "length")]
    assert said_by([completion]) == expected
    assert sorted(said_by(chunks)) == expected
    assert completion["usage"]["total_tokens"] == chunks[-1]["usage"]["total_tokens"] == 16
    assert sorted(chunk.payload for chunks in engine.inputs for chunk in chunks) == [b"one", b"one", b"two", b"two"]


async def test_each_prompt_has_its_own_answer() -> None:
    async with live_server() as server:
        completion = (await ask(server, prompt=["a b", "c", "d e f"])).json()
    assert [choice["text"] for choice in completion["choices"]] == ["a b", "c", "d e f"]
    assert completion["usage"]["prompt_tokens"] == 6


async def test_prompts_are_worked_on_at_the_same_time() -> None:
    gate = asyncio.Event()
    engine = CapableEngine([gate.wait, said("done")])
    async with live_server(engine) as server:
        asking = asyncio.create_task(ask(server, prompt=["one", "two", "three"]))
        await server.until(lambda: engine.active_requests == 3)
        gate.set()
        assert len((await asking).json()["choices"]) == 3


async def test_one_prompt_that_fails_fails_all() -> None:
    class OneFails(CapableEngine):
        def steps(self, request: Any, taken: Any) -> Any:
            return [EngineFailed("broken")] if request is self.requests[0] else [said("fine "), said("so far")]

    async with live_server(OneFails()) as server:
        response = await ask(server, prompt=["one", "two"])
        assert (response.status, response.error["code"]) == (500, "engine_failed")


async def test_one_prompt_that_is_too_long_ends_every_session() -> None:
    limits = {"max_payload_per_session": 1000, "max_chunk_bytes": 600}
    async with live_server(streaming_input=limits) as server:
        response = await ask(server, prompt=["a" * 2000, "two", "three"])
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        metrics = await scrape(server)
    origin = {"origin": "http"}
    assert (
        metrics.value("session_duration_seconds_count", **origin)
        == metrics.value("sessions_opened_total", **origin)
        == 3
    )


async def test_a_client_that_leaves_ends_every_prompt() -> None:
    gate = asyncio.Event()
    engine = CapableEngine([said("a"), said("b"), gate.wait])
    async with live_server(engine) as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", PATH, body=b'{"prompt":["one","two"],"stream":true}'))
            await server.until(lambda: engine.active_requests == 2)
            await client.head()
        await server.until(lambda: engine.active_requests == 0)


# --- log-probabilities


@pytest.mark.parametrize(("wanted", "asked"), [(True, 1), (False, None), (0, 0), (5, 5), (None, None)])
async def test_how_many_logprobs(wanted: Any, asked: int | None) -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        assert (await ask(server, logprobs=wanted)).status == 200
    assert engine.requests[0].options.logprobs == asked


@pytest.mark.parametrize("wanted", [-1, 6, "1", 1.5])
async def test_logprobs_out_of_range(wanted: Any) -> None:
    async with live_server(CapableEngine([])) as server:
        response = await ask(server, logprobs=wanted)
        assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", "logprobs")


LOGPROBS = [
    TextOutput("Hi", logprobs=(token("Hi", -0.5, "Ho"),)),
    # A character of two tokens: the text arrives with the second.
    TextOutput("", logprobs=(TokenLogprob("\\xc3", b"\xc3", -1.0),)),
    TextOutput("é!", logprobs=(TokenLogprob("\\xa9", b"\xa9", -2.0), TokenLogprob("!", b"!", float("-inf")))),
]


async def test_logprobs_name_the_places_of_tokens() -> None:
    async with live_server(CapableEngine(LOGPROBS)) as server:
        (choice,) = (await ask(server, logprobs=2)).json()["choices"]
        chunks = await stream(server, logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["Hi", "\\xc3", "\\xa9", "!"],
        "token_logprobs": [-0.5, -1.0, -2.0, -9999.0],
        "top_logprobs": [{"Hi": -0.5, "Ho": -1.5}, {"\\xc3": -1.0}, {"\\xa9": -2.0}, {"!": -9999.0}],
        "text_offset": [0, 2, 2, 3],
    }
    assert said_by(chunks) == [(0, "Hi", None), (0, "é!", "stop")]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 2], [2, 3]]


async def test_zero_logprobs_name_the_sampled_token_alone() -> None:
    async with live_server(CapableEngine([TextOutput("a", logprobs=(token("a"),))])) as server:
        (choice,) = (await ask(server, logprobs=0)).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}]


# --- unsupported requests


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"prompt": None}, 400, "invalid_value", "prompt"),
    ({"prompt": []}, 400, "invalid_value", "prompt"),
    ({"prompt": 5}, 400, "invalid_value", "prompt"),
    ({"prompt": ""}, 400, "empty_input", "prompt"),
    ({"prompt": ["a", ""]}, 400, "empty_input", "prompt[1]"),
    ({"prompt": [True]}, 400, "invalid_value", "prompt[0]"),
    ({"prompt": [1, "a"]}, 400, "invalid_value", "prompt[1]"),
    ({"prompt": [1, True]}, 400, "invalid_value", "prompt[1]"),
    ({"prompt": [1, -1]}, 400, "invalid_value", "prompt[1]"),
    ({"prompt": [1, 2**31]}, 400, "invalid_value", "prompt[1]"),
    ({"prompt": ["a", [1, 2.5]]}, 400, "invalid_value", "prompt[1][1]"),
    ({"prompt": [[1], 2]}, 400, "invalid_value", "prompt[1]"),
    ({"prompt": [[1], []]}, 400, "empty_input", "prompt[1]"),
    ({"prompt": [1, 2]}, 400, "unsupported_parameter", "prompt"),
    ({"prompt": ["a", [1, 2]]}, 400, "unsupported_parameter", "prompt[1]"),
    ({"prompt": ["a"] * 129}, 400, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "invalid_value", "prompt"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"echo": True}, 400, "unsupported_parameter", "echo"),
    ({"suffix": "b"}, 400, "unsupported_parameter", "suffix"),
    ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
    ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
    ({"logit_bias": {"five": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": [5]}, 400, "invalid_value", "logit_bias"),
    ({"top_p": 2}, 400, "invalid_value", "top_p"),
]


async def test_refusals_are_the_same_in_every_form() -> None:
    async with live_server(CapableEngine([])) as server:
        for body, status, code, param in REFUSED:
            whole = await ask(server, **body)
            assert (whole.status, whole.error["code"], whole.error["param"]) == (status, code, param), body
            streamed = await ask(server, "Accept: application/json", stream=True, **body)
            assert (streamed.status, streamed.error) == (status, whole.error), body
            (event,) = events_of(await ask(server, stream=True, **body))
            assert (event.name, event.json()["error"]) == ("error", whole.error), body


async def test_harmless_values_and_unknown_fields_are_fine() -> None:
    harmless = {"echo": False, "suffix": "", "best_of": 1, "logit_bias": {}, "user": "me", "ignore_eos": True}
    async with live_server() as server:
        assert (await ask(server, **harmless)).status == 200
        assert (await ask(server, prompt=["a"] * 64, n=1)).status == 200


async def test_engines_that_only_chat_say_so() -> None:
    class Chats(EchoEngine):
        @property
        def capabilities(self) -> EngineCapabilities:
            return replace(super().capabilities, raw_prompts=False)

    async with live_server(Chats()) as server:
        response = await ask(server)
        assert (response.status, response.error["code"], response.error["param"]) == (
            400,
            "unsupported_parameter",
            "prompt",
        )
    async with live_server() as server:
        for field, value in (("n", 2), ("logprobs", True), ("priority", 1)):
            response = await ask(server, **{field: value})
            assert (response.status, response.error["param"]) == (400, field)


async def test_an_engine_that_fails_midway_ends_the_stream_with_an_error() -> None:
    engine = ScriptedEngine([TextOutput("a"), TextOutput("b"), EngineFailed("broken")])
    async with live_server(engine) as server:
        events: list[Event] = events_of(await ask(server, stream=True))
    assert [event.name for event in events] == [None, "error"]
    assert events[-1].json()["message"].startswith("broken; error id err_")


async def test_a_cut_answer_is_an_error() -> None:
    engine = ScriptedEngine([TextOutput("a"), Finished(FinishReason.CANCELLED, finished().usage)])
    async with live_server(engine) as server:
        for prompt in ("one", ["one", "two"]):
            assert (await ask(server, prompt=prompt)).status == 500
