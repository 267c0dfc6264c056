"""Parts of an engine that die in the middle of an answer, as a WebSocket shows it."""

from __future__ import annotations

from support.live_server import live_server, scrape
from support.native_client import native_client
from support.scripted_engines import RetortEngine, ToneEngine, WordEngine

from omni_ws.client import connect
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import EngineFailed

SPOKEN = {"modalities": ["text", "audio"], "output_audio": {"format": "pcm16", "sample_rate": 24_000}}


async def test_a_tts_that_dies_leaves_the_text() -> None:
    tts = ToneEngine(fail_at=2)
    engine = ComposedEngine(RetortEngine("one two three four"), tts=tts)
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await client.configure(**SPOKEN)
        await client.say("hello")
        answer = await client.answer()
        assert (answer.text, answer.reason) == ("one two three four", "stop")
        assert answer.audio
        (error,) = answer.errors
        assert (error["code"], error["param"], error["retryable"]) == ("engine_failed", "tts", True)
        assert error["request_id"] == answer.final["request_id"]
        assert "error id err_" in error["message"]
        assert "secret" not in error["message"]
        tts.fail_at = None
        await client.say("hello")
        following = await client.answer()
        assert (following.text, following.errors) == ("one two three four", [])
        assert len(following.audio) == 2 * len(answer.audio)
        assert (await scrape(server)).value("part_failures_total", part="tts") == 1


async def test_the_client_library_hands_over_the_text_of_an_answer_without_a_voice() -> None:
    engine = ComposedEngine(RetortEngine("one two"), tts=ToneEngine(fail_at=0))
    async with (
        live_server(engine, expect_errors=True) as server,
        connect(server.websocket_url, config=SPOKEN) as session,
    ):
        answer = await session.ask_text("hello")
        assert (answer.text, answer.finish_reason) == ("one two", FinishReason.STOP)


async def test_an_asr_that_dies_fails_speech_and_not_text() -> None:
    asr = WordEngine()
    asr.failure = EngineFailed("gone", fatal=True)
    engine = ComposedEngine(RetortEngine(), asr=asr)
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await client.chunk(b"go", modality="audio", end=True)
        answer = await client.answer()
        assert answer.reason == "error"
        assert [(error["code"], error["param"]) for error in answer.errors] == [("engine_failed", "asr")]
        await client.say("hello")
        assert (await client.answer()).text == "You said hello"
        asr.failure = None
        await client.chunk(b"go", modality="audio", end=True)
        assert (await client.answer()).text == "You said go"
        assert (await scrape(server)).value("part_failures_total", part="asr") == 1


async def test_an_llm_that_dies_ends_the_answer_and_not_the_session() -> None:
    llm = RetortEngine("one two three")
    llm.failure = EngineFailed("gone")
    engine = ComposedEngine(llm, asr=WordEngine(), tts=ToneEngine())
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await client.configure(**SPOKEN)
        await client.say("hello")
        answer = await client.answer()
        assert (answer.text, answer.reason) == ("one", "error")
        assert [error["param"] for error in answer.errors] == ["llm"]
        llm.failure = None
        await client.say("hello")
        assert (await client.answer()).text == "one two three"


async def test_words_that_only_the_llm_heard_are_no_silence_in_the_history() -> None:
    asr = WordEngine()
    asr.failure = EngineFailed("gone")
    llm = RetortEngine("Yes.", input_modalities=frozenset({"audio", "text"}))
    async with (
        live_server(ComposedEngine(llm, asr=asr), expect_errors=True) as server,
        native_client(server) as client,
    ):
        await client.chunk(b"go", modality="audio", end=True)
        assert (await client.answer()).reason == "stop"
        await client.say("and now")
        await client.answer()
    spoken, answered = llm.requests[1].history
    assert spoken.speech is not None
    assert b"".join(chunk.payload for chunk in spoken.speech.chunks) == b"go"
    assert answered.text == "Yes."
