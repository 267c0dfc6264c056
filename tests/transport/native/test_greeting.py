"""The greeting over real sockets: one answer without a question, at the beginning of a session."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.inline_workers import InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import Answer, NativeClient, native_client
from support.raw_http import raw_client, request

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, OutputModality, Task, Usage, Word
from omni_ws.core.history import Message
from omni_ws.engine.base import (
    AudioOutput,
    EngineCapabilities,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
)
from omni_ws.engine.fake import CAPABILITIES, EchoEngine
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.wire.session_config import MAX_GREETING_CHARACTERS

HELLO = "Hello! What can I do for you?"
RATE = 24_000
KEEPS: dict[str, Any] = {"resume_grace_sec": 30}


class Reader(EchoEngine):
    """Reads a text aloud, 100 ms a word with the times of the words; echoes everything else."""

    def __init__(self, *, pause: asyncio.Event | None = None, fails: Exception | None = None, **changes: Any) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []
        self.texts: list[str] = []
        self.pause = pause
        self.fails = fails
        self._changes = changes

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, **self._changes)

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.requests.append(request)
        if request.task is not Task.SPEECH:
            await super().generate(request, out)
            return
        self.active_requests += 1
        try:
            if self.fails is not None:
                raise self.fails
            text = b"".join([chunk.payload async for chunk in request.input]).decode()
            self.texts.append(text)
            out.write(TextOutput("not this"))
            for number, word in enumerate(text.split()):
                samples = np.full(RATE // 10, 0.1, dtype=np.float32)
                out.write(AudioOutput(samples, RATE, (Word(word, number * 100, number * 100 + 100),)))
                await out.drain()
                if number == 1 and self.pause is not None:
                    await self.pause.wait()
            out.write(Finished(FinishReason.STOP, Usage(input_tokens=7)))
        finally:
            self.active_requests -= 1


WRITES_ONLY: dict[str, Any] = {"tasks": frozenset({Task.CHAT})}
MUTE: dict[str, Any] = {**WRITES_ONLY, "output_modalities": frozenset({OutputModality.TEXT}), "voices": ()}


async def greeted(client: NativeClient, **fields: Any) -> Answer:
    """The greeting, with nothing else asked."""
    await client.configure(**{"greeting": HELLO} | fields)
    answer = await client.answer()
    assert_greeting(answer)
    return answer


def assert_greeting(answer: Answer) -> None:
    assert answer.started is not None
    started = {name: answer.started[name] for name in ("trigger", "sequence_id", "input_mode")}
    assert started == {"trigger": "greeting", "sequence_id": None, "input_mode": "snapshot"}
    assert answer.started["request_id"] == answer.final["request_id"]


async def prompt(client: NativeClient, engine: Reader) -> tuple[Message, ...]:
    """What a request sees that is asked now."""
    await client.say("next")
    answer = await client.answer()
    assert answer.text == "next"
    return engine.requests[-1].history


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


# what is said


@pytest.mark.parametrize("subprotocol", ["omni.v1+json", "omni.v1+binary"])
async def test_it_is_written_and_spoken_before_anything_is_asked(subprotocol: str) -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server, subprotocols=[subprotocol]) as client:
        answer = await greeted(client)
        assert (answer.text, answer.reason) == (HELLO, "stop")
        assert len(answer.audio) == len(HELLO.split()) * RATE // 10 * 2
        assert answer.final["usage"]["input_tokens"] == 7
        assert answer.final["usage"]["output_audio_ms"] == 700
        assert engine.texts == [HELLO]
        assert client.frames[1]["type"] == "session_updated"
        assert client.frames[1]["greeting"] == HELLO
        assert client.frames[2]["type"] == "response_started"
        assert await prompt(client, engine) == said(HELLO)


async def test_it_is_spoken_in_the_configured_voice_and_format_and_never_cut() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await greeted(
            client, output_audio={"sample_rate": 8000}, voice="echo", sampling={"max_tokens": 1, "stop": "!"}
        )
        assert answer.reason == "stop"
        assert abs(len(answer.audio) - 7 * 800 * 2) <= 64
        (wanted,) = engine.requests
        assert (wanted.voice, dict(wanted.sampling)) == ("echo", {})
        assert (wanted.task, wanted.modalities) == (Task.SPEECH, frozenset({OutputModality.AUDIO}))
        assert wanted.history == ()


async def test_text_alone_asks_no_engine() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await greeted(client, modalities=["text"])
        assert (answer.text, answer.audio, answer.reason) == (HELLO, b"", "stop")
        assert answer.final["usage"]["output_tokens"] == 7
        assert engine.requests == []
        assert await prompt(client, engine) == said(HELLO)


async def test_audio_alone_is_in_the_history_all_the_same() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        answer = await greeted(client, modalities=["audio"])
        assert (answer.text, len(answer.audio)) == ("", 7 * 2400 * 2)
        await client.configure(modalities=None)
        assert await prompt(client, engine) == said(HELLO)


@pytest.mark.parametrize("lacks", [WRITES_ONLY, MUTE])
async def test_an_engine_that_cannot_read_aloud_writes_it(lacks: dict[str, Any]) -> None:
    engine = Reader(**lacks)
    async with live_server(engine) as server, native_client(server) as client:
        answer = await greeted(client)
        assert (answer.text, answer.audio, answer.reason) == (HELLO, b"", "stop")
        assert engine.requests == []


async def test_audio_alone_is_refused_where_nobody_reads_aloud() -> None:
    engine = Reader(**WRITES_ONLY)
    async with live_server(engine) as server, native_client(server) as client:
        await client.send("session_config", greeting=HELLO, modalities=["audio"])
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "greeting")
        await greeted(client)


async def test_without_a_history_it_is_not_seen() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        await greeted(client, history=False)
        assert await prompt(client, engine) == ()


# limits


@pytest.mark.parametrize("past", [False, True])
async def test_longest_greeting(past: bool) -> None:
    async with live_server() as server, native_client(server) as client:
        text = "é" * (MAX_GREETING_CHARACTERS + past)
        await client.send("session_config", greeting=text, modalities=["text"])
        if past:
            error = await client.error()
            assert (error["code"], error["param"]) == ("invalid_value", "greeting")
            assert len(error["message"]) < 200
        else:
            assert (await client.answer()).text == text


@pytest.mark.parametrize("greeting", [7, ["Hello"], {"text": "Hello"}, True])
async def test_it_is_a_text(greeting: object) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.send("session_config", greeting=greeting)
        error = await client.error()
        assert (error["code"], error["param"]) == ("invalid_value", "greeting")
        await greeted(client, modalities=["text"])


@pytest.mark.parametrize("greeting", ["", " \n\t", None])
async def test_nothing_is_no_greeting(greeting: str | None) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(greeting=greeting)
        await client.say("one")
        answer = await client.answer()
        assert (answer.text, answer.started and answer.started["trigger"]) == ("one", "min_length")


async def test_a_refused_configuration_greets_nobody() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.send("session_config", greeting=HELLO, task="sing")
        await client.error()
        await client.barrier()
        assert client.seen("response_started") == []
        await greeted(client, modalities=["text"])


# once, at the beginning


async def test_later_greetings_change_nothing() -> None:
    async with live_server() as server, native_client(server) as client:
        await greeted(client, modalities=["text"])
        for later in ("Good morning.", HELLO, None, HELLO):
            updated = await client.configure(greeting=later)
            assert updated["greeting"] == (later or "")
        await client.say("one")
        assert (await client.answer()).text == "one"
        assert len(client.seen("response_started")) == 2


async def test_a_greeting_that_is_changed_while_it_is_said_stays_as_it_was() -> None:
    pause = asyncio.Event()
    engine = Reader(pause=pause)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(greeting=HELLO)
        await client.until("output_chunk")
        await client.configure(greeting="Something else.")
        pause.set()
        assert (await client.answer()).reason == "stop"
        assert await prompt(client, engine) == said(HELLO)


async def test_behind_the_first_request_it_comes_too_late() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("one ")
        await client.configure(greeting=HELLO)
        await client.chunk("two", end=True)
        assert (await client.answer()).text == "one two"
        await client.configure(greeting=HELLO)
        await client.barrier()
        assert len(client.seen("response_started")) == 1


async def test_chunks_that_wait_behind_a_gap_have_opened_nothing() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("two", end=True, number=1)
        await greeted(client, modalities=["text"])
        await client.chunk("one ", number=0)
        assert (await client.answer()).text == "one two"


# interrupted


async def test_the_first_request_waits_for_it() -> None:
    pause = asyncio.Event()
    engine = Reader(pause=pause)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(greeting=HELLO)
        await client.say("one")
        await client.barrier()
        pause.set()
        greeting = await client.answer()
        assert greeting.reason == "stop"
        assert (await client.answer()).text == "one"
        first, second = client.seen("response_started")
        assert (first["trigger"], first["request_id"]) == ("greeting", greeting.final["request_id"])
        assert second["trigger"] == "min_length"
        assert engine.requests[-1].history == said(HELLO)


@pytest.mark.parametrize("ended_by", ["request", "cancel", "cancel by name"])
async def test_it_can_be_interrupted(ended_by: str) -> None:
    engine = Reader(pause=asyncio.Event())
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(greeting=HELLO, overlap="interrupt" if ended_by == "request" else "wait")
        started = await client.until("response_started")
        while (chunk := await client.until("output_chunk"))["modality"] != "audio" or chunk["start_ms"] != 100:
            pass
        await client.send("output_ack", sequence_id=chunk["sequence_id"], played_ms=150)
        if ended_by == "request":
            await client.say("one")
        else:
            fields = {"request_id": started["request_id"]} if "name" in ended_by else {}
            await client.send("cancel", **fields)
        assert (await client.answer()).reason == "cancelled"
        if ended_by == "request":
            assert (await client.answer()).text == "one"
            assert engine.requests[-1].history == said("Hello! What")
        assert (await prompt(client, engine))[0] == said("Hello! What")[0]


@pytest.mark.slow
@pytest.mark.parametrize("may", [True, False])
async def test_detected_speech_interrupts_it_where_it_may(may: bool) -> None:
    pause = asyncio.Event()
    engine = Reader(pause=pause)
    async with live_server(engine) as server:
        server.app.sessions.speech_workers = InlineWorkers()  # listening without threads and without a model
        async with native_client(server) as client:
            turns = {"type": "server_vad", "interrupt_response": may}
            await client.configure(greeting=HELLO, turn_detection=turns, max_lead_ms=None)
            greeting = await client.until("response_started")
            while (await client.until("output_chunk"))["modality"] != "audio":
                pass
            speech = loud(1000) + quiet(1500)
            for start in range(0, len(speech), 640):
                await client.binary(speech[start : start + 640])
            await client.until("speech_started")
            if not may:
                await client.until("speech_stopped")
                pause.set()
            answer = await client.answer()
            assert answer.final["request_id"] == greeting["request_id"]
            assert answer.reason == ("stop" if not may else "cancelled")
            spoken = await client.answer()
            assert spoken.reason == "stop"
            assert spoken.final["request_id"] != greeting["request_id"]
            assert [message.role for message in engine.requests[-1].history] == ["assistant"]


async def test_one_that_is_interrupted_before_it_began_is_announced_and_ended() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        config = '{"type":"session_config","greeting":"Hello","overlap":"interrupt"}'
        chunk = '{"type":"input_chunk","sequence_id":0,"text":"one","end_of_input":true}'
        # Both in one packet, so that no answer begins in between.
        protocol = client.connection.protocol
        protocol.send_text(config.encode())
        protocol.send_text(chunk.encode())
        client.connection.send_data()
        greeting = await client.answer()
        assert_greeting(greeting)
        assert greeting.reason == "cancelled"
        assert (await client.answer()).text == "one"


async def test_its_end_is_heard_after_its_final() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        greeting = await greeted(client, overlap="interrupt")
        await client.send("output_ack", sequence_id=greeting.final["sequence_id"], played_ms=250)
        assert await prompt(client, engine) == said("Hello! What can")


async def test_it_can_be_truncated() -> None:
    engine = Reader()
    async with live_server(engine) as server, native_client(server) as client:
        greeting = await greeted(client)
        await client.say("one")
        await client.answer()
        await client.send("history_truncate", request_id=greeting.final["request_id"])
        assert (await client.until("history_truncated"))["dropped_requests"] == 2
        assert await prompt(client, engine) == ()


async def test_no_truncation_while_it_is_said() -> None:
    pause = asyncio.Event()
    async with live_server(Reader(pause=pause)) as server, native_client(server) as client:
        await client.configure(greeting=HELLO)
        started = await client.until("response_started")
        await client.send("history_truncate", request_id=started["request_id"])
        assert (await client.error())["code"] == "session_conflict"
        pause.set()
        await client.answer()


# what goes wrong


async def test_an_engine_that_fails_leaves_the_session_open() -> None:
    engine = Reader(fails=EngineFailed("the voice is gone"))
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        greeting = await greeted(client)
        assert greeting.reason == "error"
        (error,) = greeting.errors
        assert (error["code"], error["request_id"]) == ("engine_failed", greeting.final["request_id"])
        assert await prompt(client, engine) == ()


async def test_an_error_about_its_text_names_the_field_of_the_configuration() -> None:
    engine = Reader(fails=InvalidValue("Latin letters only", param="text"))
    async with live_server(engine) as server, native_client(server) as client:
        greeting = await greeted(client)
        (error,) = greeting.errors
        assert (error["code"], error["param"]) == ("invalid_value", "greeting")


async def test_it_counts_in_the_rate_of_a_key() -> None:
    key = ApiKey(name="alice", key_sha256=digest("alice"), requests_per_sec=0.001, burst=1)
    engine = Reader()
    headers: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer alice"}}
    async with live_server(engine, keys=(key,), still_answers=False) as server:
        async with native_client(server, **headers) as client:
            await greeted(client, modalities=["text"])
        async with native_client(server, **headers) as client:
            greeting = await greeted(client)
            assert greeting.reason == "error"
            assert [error["code"] for error in greeting.errors] == ["rate_limited"]
            await client.barrier()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech", "/v1/streaming_input/sessions"])
async def test_http_refuses_it_by_name(path: str) -> None:
    lines = '{"greeting": "Hello"}\n{"text": "one", "end_of_input": true}\n'
    streamed = path != "/v1/streaming_input/sessions"
    body = lines if streamed else '{"greeting": "Hello"}'
    kind = "application/x-ndjson" if streamed else "application/json"
    async with live_server() as server, raw_client(server.port) as client:
        headers = [f"Content-Type: {kind}", f"Content-Length: {len(body)}", *["X-Streaming-Input: true"] * streamed]
        await client.send(request("POST", path, *headers) + body.encode())
        answer = await client.response()
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            400,
            "unsupported_parameter",
            "greeting",
        )


# sessions that go on, and what is known of them


@pytest.mark.parametrize("heard", [0, 1])
async def test_it_comes_again_with_a_resume(heard: int) -> None:
    pause = asyncio.Event()
    engine = Reader(pause=pause)
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.configure(greeting=HELLO)
        await client.until("output_chunk")
        client.gone()
        await server.until(lambda: not server.connections, "a session without its connection")
        pause.set()
        await server.until(lambda: engine.active_requests == 0, "the end of the greeting")
        created = client.created
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={heard - 1}"
        async with native_client(server, query=query, greeted=False) as again:
            again.created = await again.receive()
            assert again.created["type"] == "session_resumed"
            again.guarantees.next_output = heard
            again.guarantees._running = None if heard == 0 else client.guarantees._running
            answer = await again.answer()
            assert answer.text == ("" if heard else HELLO)
            assert (answer.reason, len(answer.audio)) == ("stop", 7 * 2400 * 2)
            await again.configure(greeting=HELLO)
            assert await prompt(again, engine) == said(HELLO)


async def settled_log(server: LiveServer, caplog: pytest.LogCaptureFixture) -> list[Any]:
    await server.check_empty()
    return [record for record in caplog.records if record.name == "omni_ws.session"]


@pytest.mark.parametrize("content", [False, True])
async def test_the_log_has_it_as_a_request_without_its_text(content: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with live_server(Reader(), log_content=content) as server:
        async with native_client(server) as client:
            greeting = await greeted(client)
        records = await settled_log(server, caplog)
        facts = [record.facts for record in records if "finish_reason" in record.facts]
        (line,) = facts
        assert line["request_id"] == greeting.final["request_id"]
        assert (line["task"], line["finish_reason"], line["chunks"]) == ("speech", "stop", 0)
        assert (HELLO in str(line)) is content
    if not content:
        assert HELLO not in caplog.text
