"""Earlier messages of a chat that are not text alone: pictures, speech, and spoken answers by their ids."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest
from msgspec import Struct
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post
from support.scripted_engines import CapableEngine, HearingEngine

from omni_ws.audio.container import wav_header
from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.routes.openai import KNOWN_SEC, MAX_ANSWERS, MAX_CHARACTERS, SpokenAnswers

CHAT = "/v1/chat/completions"
GIF = b"GIF89a" + bytes(20)
WAV = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/gif;base64," + base64.b64encode(GIF).decode()}}
SPEECH = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


async def ask(server: LiveServer, *messages: dict[str, Any], headers: tuple[str, ...] = (), **body: Any) -> RawResponse:
    return await post(server.port, CHAT, {"messages": messages, **body}, *headers)


async def test_pictures_and_speech_stay_in_their_places() -> None:
    engine = CapableEngine([TextOutput("Green.")])
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    async with live_server(engine) as server:
        response = await ask(
            server,
            user(text("Is "), text("this"), IMAGE, text("like this?"), IMAGE, SPEECH),
            {"role": "assistant", "content": [text("Yes."), IMAGE]},
            user(IMAGE),
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": [text("seen"), IMAGE]},
            {"role": "assistant", "content": "It is."},
            user(text("And this?"), IMAGE),
        )
    assert response.status == 200, response.body
    picture = InputChunk(Modality.IMAGE, GIF, format="image/gif")
    first, second, third, fourth, fifth, last = engine.requests[0].history
    assert [(part.text, part.picture, part.speech is not None) for part in first.parts] == [
        ("Is this", picture, False),
        ("like this?", picture, False),
        ("", None, True),
    ]
    assert first.parts[2].speech is not None
    assert [(one.payload, one.format) for one in first.parts[2].speech.chunks] == [(WAV, "wav")]
    assert second == Message("assistant", "Yes.", picture=picture)
    assert third == Message("user", "", picture=picture)
    assert fourth.tool_calls
    assert fifth == Message("tool", "seen", tool_call_id="c", picture=picture)
    assert last == Message("assistant", "It is.")
    assert [chunk.modality for chunk in engine.inputs[0]] == [Modality.TEXT, Modality.IMAGE]


async def test_earlier_speech_is_charged_and_given_back() -> None:
    async with live_server(CapableEngine([TextOutput("Green.")])) as server:
        response = await ask(server, user(SPEECH), {"role": "assistant", "content": "No."}, user(text("Why?")))
        assert response.status == 200, response.body
        await server.until(lambda: server.sessions == 0)
        assert server.held_bytes == 0


async def test_a_picture_in_a_result_that_is_the_input() -> None:
    engine = CapableEngine([TextOutput("Green.")])
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    async with live_server(engine) as server:
        response = await ask(
            server,
            user(text("Look")),
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": [text("seen"), IMAGE]},
        )
    assert response.status == 200, response.body
    assert [(chunk.modality, chunk.tool_call_id) for chunk in engine.inputs[0]] == [
        (Modality.TEXT, "c"),
        (Modality.IMAGE, None),
    ]


async def test_what_the_engine_cannot_use_is_named() -> None:
    async with live_server(CapableEngine(pictures_in_history=frozenset(), speech_in_history=False)) as server:
        response = await ask(server, user(text("a")), user(IMAGE), user(text("b")))
        assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
        assert response.error["param"] == "messages[1]"
    async with live_server(CapableEngine()) as server:
        response = await ask(server, {"role": "system", "content": [IMAGE]}, user(text("b")))
    assert (response.status, response.error["param"]) == (400, "messages[0].content[0]")


async def test_earlier_speech_is_written_down_where_the_model_does_not_hear() -> None:
    engine = HearingEngine(
        [TextOutput("Because.")],
        heard=[TranscriptOutput("go forward"), TextOutput("go forward")],
        speech_in_history=False,
    )
    async with live_server(engine) as server:
        response = await ask(
            server, user(text("So:"), SPEECH, text("now")), {"role": "assistant", "content": "No."}, user(text("Why?"))
        )
    assert response.status == 200, response.body
    assert [request.task for request in engine.requests] == ["transcribe", "chat"]
    assert [one.text for one in engine.requests[1].history] == ["So:go forwardnow", "No."]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_by_its_id_stands_for_what_was_said(streams: bool) -> None:
    engine = CapableEngine([TextOutput("I cannot "), TextOutput("move.")])
    async with live_server(engine) as server:
        await ask(
            server, user(text("Go")), stream=streams, request_id="abc", **{**SPOKEN, "audio": {"format": "pcm16"}}
        )
        spoken = {"role": "assistant", "audio": {"id": "audio_abc"}}
        assert (await ask(server, user(text("Go")), spoken, user(text("Why?")))).status == 200
        both = {**spoken, "content": "Never."}
        assert (await ask(server, user(text("Go")), both, user(text("Why?")))).status == 200
        for wrong, place in (({"id": "audio_x"}, ".id"), ({"id": 5}, ".id"), ({"id": "a" * 5000}, ".id"), ("x", "")):
            message = {"role": "assistant", "content": None, "audio": wrong}
            refusal = await ask(server, user(text("Go")), message, user(text("Why?")))
            assert (refusal.status, refusal.error["code"]) == (400, "invalid_value")
            assert refusal.error["param"] == f"messages[1].audio{place}"
    assert [one.text for one in engine.requests[1].history] == ["Go", "I cannot move."]
    assert [one.text for one in engine.requests[2].history] == ["Go", "Never."]


async def test_a_refusal_that_is_sent_back_is_what_was_said() -> None:
    """OpenAI's packages send a message back as they got it, with all of its fields."""
    engine = CapableEngine([TextOutput("I must not.", refusal=True)])
    async with live_server(engine) as server:
        refused = (await ask(server, user(text("Go")))).json()["choices"][0]["message"]
        assert (refused["content"], refused["refusal"]) == (None, "I must not.")
        assert (await ask(server, user(text("Go")), refused, user(text("Why?")))).status == 200
        wrong = await ask(server, user(text("Go")), {**refused, "refusal": 5}, user(text("Why?")))
        assert (wrong.status, wrong.error["param"]) == (400, "messages[1].refusal")
    assert [one.text for one in engine.requests[1].history] == ["Go", "I must not."]


async def test_an_answer_is_known_by_its_id_when_its_end_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has read ``[DONE]`` may ask on at once, or close the connection, which ends the handler."""
    goes_on, end = asyncio.Event(), HttpExchange.end

    async def end_and_wait(exchange: HttpExchange, parts: Sequence[bytes] = ()) -> None:
        await end(exchange, parts)
        await goes_on.wait()

    monkeypatch.setattr(HttpExchange, "end", end_and_wait)
    engine = CapableEngine([TextOutput("I cannot "), TextOutput("move.")])
    async with live_server(engine) as server:
        spoken = {**SPOKEN, "audio": {"format": "pcm16"}, "stream": True, "request_id": "abc"}
        await ask(server, user(text("Go")), **spoken)
        answer = {"role": "assistant", "audio": {"id": "audio_abc"}}
        response = await ask(server, user(text("Go")), answer, user(text("Why?")))
        goes_on.set()
    assert response.status == 200, response.body
    assert [one.text for one in engine.requests[1].history] == ["Go", "I cannot move."]


async def test_an_answer_to_another_key_is_unknown() -> None:
    keys = tuple(ApiKey(name=name, key_sha256=sha256(name.encode()).digest()) for name in ("one", "two"))
    engine = CapableEngine([TextOutput("Secret.")])
    async with live_server(engine, keys=keys) as server:
        own, other = ("Authorization: Bearer one",), ("Authorization: Bearer two",)
        await ask(server, user(text("Go")), headers=own, request_id="abc", **SPOKEN)
        spoken = {"role": "assistant", "audio": {"id": "audio_abc"}}
        assert (await ask(server, spoken, user(text("Why?")), headers=other)).status == 400
        assert (await ask(server, spoken, user(text("Why?")), headers=own)).status == 200


class Clock(Struct):
    now: float = 0.0


async def test_answers_are_known_for_an_hour_and_in_bounded_memory() -> None:
    clock = Clock()
    answers = SpokenAnswers(None, lambda: clock.now)
    answers.keep("first", "hello", key=None)
    clock.now = KNOWN_SEC - 1
    assert await answers.find(["first", "x"], key=None) == {"first": "hello"}
    assert await answers.find(["first"], key="other") == {}
    clock.now = KNOWN_SEC
    assert await answers.find(["first"], key=None) == {}
    for number in range(MAX_ANSWERS + 1):
        answers.keep(str(number), "a", key=None)
    assert await answers.find(["0", "1"], key=None) == {"1": "a"}
    answers.keep("long", "b" * (MAX_CHARACTERS - 1), key=None)
    assert await answers.find([str(MAX_ANSWERS - 1), str(MAX_ANSWERS), "long"], key=None) == {
        str(MAX_ANSWERS): "a",
        "long": "b" * (MAX_CHARACTERS - 1),
    }
