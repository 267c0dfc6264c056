"""Parts of an engine that die in the middle of an answer, as the HTTP routes show it."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import mode_b, text
from support.raw_http import DONE, RawResponse, content, events_of, post
from support.scripted_engines import RetortEngine, ToneEngine, WordEngine

from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import EngineFailed

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "tone", "format": "pcm16"},
}


def voiceless() -> ComposedEngine:
    return ComposedEngine(RetortEngine("one two three"), asr=WordEngine(), tts=ToneEngine(fail_at=1))


def check_warnings(found: Any) -> None:
    (warning,) = found
    assert (warning["code"], warning["param"]) == ("engine_failed", "tts")
    assert "secret" not in warning["message"]


async def ask(server: LiveServer, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {**HELLO, **body}, "Accept: application/json")


async def test_a_stream_completes_its_text_and_the_last_frame_says_what_failed() -> None:
    async with live_server(voiceless(), expect_errors=True) as server:
        events = events_of(await ask(server, stream=True))
    assert events[-1] == DONE
    assert content(events) == "one two three"
    last = events[-2].json()
    assert last["choices"][0]["finish_reason"] == "stop"
    check_warnings(last["warnings"])
    assert not any("warnings" in event.json() for event in events[:-2])


async def test_a_whole_answer_says_what_failed() -> None:
    async with live_server(voiceless(), expect_errors=True) as server:
        completion = (await ask(server)).json()
    assert completion["choices"][0]["message"]["content"] == "one two three"
    assert completion["choices"][0]["message"]["audio"]["data"]
    check_warnings(completion["warnings"])


async def test_an_answer_without_failures_has_no_warnings() -> None:
    engine = ComposedEngine(RetortEngine("one two three"), tts=ToneEngine())
    async with live_server(engine) as server:
        assert "warnings" not in (await ask(server)).json()


async def test_a_session_over_several_requests_keeps_what_failed() -> None:
    async with (
        live_server(voiceless(), expect_errors=True) as server,
        mode_b(server, {"modalities": ["text", "audio"]}) as session,
    ):
        await session.append(text("hello"))
        await session.finish()
        completion = await session.completion()
        check_warnings(completion["warnings"])
        assert completion["choices"][0]["message"]["content"] == "one two three"
        check_warnings((await session.events())[-2].json()["warnings"])
        answer, code = await session.attached()
        assert (answer.text, answer.reason, code) == ("one two three", "stop", 1000)
        assert [error["param"] for error in answer.errors] == ["tts"]
        assert (await session.status())["error"] is None


@pytest.mark.parametrize("stream", [True, False])
async def test_an_llm_that_dies_is_named(stream: bool) -> None:
    llm = RetortEngine("one two")
    llm.failure = EngineFailed("gone")
    async with live_server(ComposedEngine(llm, tts=ToneEngine()), expect_errors=True) as server:
        answer = await ask(server, stream=stream)
    error = events_of(answer)[-1].json()["error"] if stream else answer.json()["error"]
    assert (error["code"], error["param"]) == ("engine_failed", "llm")


async def test_reading_aloud_without_a_voice_fails() -> None:
    async with live_server(voiceless(), expect_errors=True) as server:
        spoken = {"input": "one two", "voice": "tone", "response_format": "wav"}
        answer = await post(server.port, "/v1/audio/speech", spoken, "Accept: application/json")
    assert answer.status == 500
    assert answer.json()["error"]["param"] == "tts"
