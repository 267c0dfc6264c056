"""Client → WebSocket or HTTP → remote engine → a second whole server, all of them real."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.raw_http import raw_client, request
from support.scripted_upstream import ScriptedUpstream, delta, hang, says, streams
from support.speech_clips import WORDS, clip_bytes

from benchmarks.server_process import free_port
from omni_ws.client import Final, ResponseStarted, TextChunk, connect
from omni_ws.config.model import RemoteConfig, VoiceChoice
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import EngineState
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.errors import EngineFailed, InvalidValue, UnsupportedModality, UnsupportedParameter
from omni_ws.scenarios.speech import word_errors

pytestmark = pytest.mark.usefixtures("no_task_left")

EVERYTHING: dict[str, Any] = {
    "modalities": ("text", "audio"),
    "input_modalities": ("text", "audio", "image", "video"),
    "start_timeout_sec": 0,
}


@asynccontextmanager
async def front_of(*ports: int, front: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[LiveServer]:
    config = RemoteConfig(**{**EVERYTHING, "upstreams": [f"http://127.0.0.1:{port}" for port in ports], **settings})
    async with live_server(RemoteEngine(config), remote=config, **(front or {})) as server:
        yield server


@asynccontextmanager
async def chain(settings: EchoSettings | None = None, **remote: Any) -> AsyncIterator[tuple[LiveServer, LiveServer]]:
    """The front server and the one behind it, which echoes."""
    async with live_server(EchoEngine(settings)) as back, front_of(back.port, **remote) as front:
        yield front, back


# text, sound and pictures


@pytest.mark.parametrize("binary", [True, False])
async def test_text_goes_there_and_back(binary: bool) -> None:
    async with chain() as (front, _), connect(front.websocket_url, binary=binary) as session:
        for text in ("hello big world", "grüße 👋", "again"):
            answer = await session.ask_text(text)
            assert answer.text == text
            assert answer.finish_reason is FinishReason.STOP
            assert answer.usage is not None


async def test_what_a_session_is_told() -> None:
    async with chain(voices=("echo",)) as (front, _), connect(front.websocket_url) as session:
        created = session.created
        assert (created.model, created.start_policy, created.after_start) == ("fake", "on_end_only", "snapshot")
        assert not created.capabilities.extend
        assert created.capabilities.voices == ["echo"]
        assert not created.capabilities.transcripts  # the engine behind it writes nothing down
        assert "transcript" not in created.capabilities.output_modalities
        with pytest.raises(UnsupportedParameter) as caught:
            await session.configure(after_start="extend")
        assert caught.value.param == "after_start"


async def test_sound_is_the_same_as_without_a_server_between() -> None:
    sound = (np.sin(np.arange(32_000) / 7) * 20_000).astype("<i2").tobytes()
    answers = []
    async with chain() as (front, back):
        for server in (front, back):
            async with connect(server.websocket_url) as session:
                for start in range(0, len(sound), 640):
                    await session.send_audio(sound[start : start + 640])
                await session.finish()
                answers.append(await session.answer())
    through, direct = answers
    assert len(direct.audio) == 96_000
    assert through.audio == direct.audio
    assert through.sample_rate == direct.sample_rate == 24_000
    assert through.usage is not None
    assert (through.usage.input_audio_ms, through.usage.output_audio_ms) == (2000, 2000)


async def test_pictures_arrive() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "blue").save(buffer, "PNG")
    async with chain() as (front, _), connect(front.websocket_url) as session:
        await session.send_image(buffer.getvalue(), format="image/png")
        await session.send_image(buffer.getvalue(), format="image/png", end=True)
        assert (await session.answer()).text == "Received 2 images."
    async with chain(input_modalities=("text",)) as (front, _), connect(front.websocket_url) as session:
        await session.send_image(buffer.getvalue(), format="image/png", end=True)
        with pytest.raises(UnsupportedModality):
            await session.answer()


async def test_earlier_turns_and_instructions_go_along() -> None:
    async with ScriptedUpstream(chat=[says("first"), says("second")]).serve() as there, front_of(there.port) as front:
        config = {"instructions": "Be brief.", "modalities": ["text"], "sampling": {"temperature": 0.5}}
        async with connect(front.websocket_url, config=config) as session:
            await session.ask_text("one")
            assert (await session.ask_text("two")).text == "second"
    assert there.requests[1]["temperature"] == 0.5
    assert there.requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]


async def test_a_frozen_prompt_does_not_wait_for_the_end_of_the_input() -> None:
    config = {"start_policy": "on_first_chunk", "modalities": ["text"]}
    async with chain() as (front, _), connect(front.websocket_url, config=config) as session:
        await session.send_text("early")
        async for event in session.events():
            if isinstance(event, TextChunk):
                assert event.text == "early"
                break
        # The final alone waits for the end: it tells how much came that was not used.
        await session.send_text("late", end=True)
        final = [event async for event in session.response()][-1]
        assert isinstance(final, Final)
        assert final.usage is not None
        assert final.usage.input_after_start_bytes == len("late")
        assert (await session.ask_text("next")).text == "next"


# what goes wrong


async def test_cancelling_reaches_the_last_engine() -> None:
    async with (
        chain(EchoSettings(first_chunk_delay_ms=3_600_000)) as (front, back),
        connect(front.websocket_url) as session,
    ):
        await session.send_text("one", end=True)
        events = session.response()
        started = await anext(events)
        while not isinstance(started, ResponseStarted):
            started = await anext(events)
        await back.until(lambda: back.engine.active_requests == 1)
        await session.cancel(started.request_id)
        final = [event async for event in events][-1]
        assert isinstance(final, Final)
        assert final.finish_reason is FinishReason.CANCELLED
        await back.until(lambda: back.engine.active_requests == 0)


async def test_a_client_that_goes_frees_the_last_engine() -> None:
    async with chain(EchoSettings(first_chunk_delay_ms=3_600_000)) as (front, back):
        async with connect(front.websocket_url) as session:
            await session.send_text("one", end=True)
            await back.until(lambda: back.engine.active_requests == 1)
        await back.until(lambda: back.engine.active_requests == 0)


async def test_a_failing_engine_far_away() -> None:
    async with chain(stage_params=("fake.fail_after_chunks",)) as (front, _), connect(front.websocket_url) as session:
        for number in (0, 1):
            await session.configure(stage_params={"fake": {"fail_after_chunks": number}})
            with pytest.raises(EngineFailed):
                await session.ask_text("one two")
        await session.configure(stage_params={"fake": {"fail_after_chunks": -1}})
        with pytest.raises(InvalidValue) as refused:
            await session.ask_text("one two")
        assert refused.value.param == "stage_params.fake.fail_after_chunks"
        await session.configure(stage_params=None)
        assert (await session.ask_text("one two")).text == "one two"


async def test_a_refusal_keeps_the_name_of_the_field() -> None:
    async with chain() as (front, _), connect(front.websocket_url) as session:
        await session.configure(sampling={"top_k": 5})
        with pytest.raises(UnsupportedParameter) as caught:
            await session.ask_text("x")
        assert caught.value.param == "sampling.top_k"
        await session.configure(sampling=None)
        assert (await session.ask_text("x")).text == "x"
    async with chain(sampling=("temperature",)) as (front, _), connect(front.websocket_url) as session:
        with pytest.raises(UnsupportedParameter) as caught:
            await session.configure(sampling={"top_k": 5})
        assert caught.value.param == "sampling.top_k"


async def health(server: LiveServer) -> tuple[int, str]:
    async with raw_client(server.port) as client:
        await client.send(request("GET", "/health", "Connection: close"))
        answer = await client.response()
    return answer.status, answer.json()["status"]


@pytest.mark.slow
async def test_the_server_behind_goes_and_comes_back() -> None:
    behind = ScriptedUpstream(chat=[says("here")])
    port = free_port()
    serving = behind.serve(port)
    await serving.__aenter__()
    async with front_of(port) as front:
        assert await health(front) == (200, "ok")
        await serving.__aexit__(None, None, None)
        async with connect(front.websocket_url) as session:
            with pytest.raises(EngineFailed):
                await session.ask_text("x")
        assert await health(front) == (503, "unhealthy")
        async with behind.serve(port):
            await front.until(lambda: front.engine.state is EngineState.OK)
            async with connect(front.websocket_url) as session:
                assert (await session.ask_text("again")).text == "here"


async def test_two_servers_share_the_work() -> None:
    async with live_server() as one, live_server() as other, front_of(one.port, other.port) as front:
        async with connect(front.websocket_url) as first, connect(front.websocket_url) as second:
            answers = await asyncio.gather(*(session.ask_text("hello") for session in (first, second)))
        assert [answer.text for answer in answers] == ["hello", "hello"]


# the other ways in


async def post(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    async with raw_client(server.port) as client:
        await client.send(request("POST", path, "Connection: close", body=orjson.dumps(body)))
        return await client.response()


async def test_chat_over_http() -> None:
    async with chain() as (front, _):
        body = {"messages": [{"role": "user", "content": "hello world"}]}
        answer = await post(front, "/v1/chat/completions", body)
        assert answer.json()["choices"][0]["message"]["content"] == "hello world"
        streamed = await post(front, "/v1/chat/completions", {**body, "stream": True})
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert b'"content":"hello"' in streamed.body
        refused = await post(front, "/v1/chat/completions", {**body, "top_k": 3})
        assert (refused.status, refused.error["param"]) == (400, "top_k")


async def test_streaming_input_over_http() -> None:
    async with chain() as (front, _), raw_client(front.port) as client:
        lines = b'{"modality":"text","text":"hel"}\n{"modality":"text","text":"lo","end_of_input":true}\n'
        head = request("POST", "/v1/chat/completions", "X-Streaming-Input: true", "Connection: close", body=lines)
        await client.send(head)
        answer = await client.response()
        assert b'"content":"hello"' in answer.body


async def test_overload_is_told_with_a_time() -> None:
    async def busy(exchange: Any) -> None:
        await exchange.respond(503, [("Retry-After", "60")], b"{}")

    async with ScriptedUpstream(chat=[busy]).serve() as there, front_of(there.port) as front:
        answer = await post(front, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert (answer.status, answer.headers["retry-after"]) == (503, "60")
        assert answer.error["code"] == "engine_overloaded"


async def test_http_clients_that_go_free_the_upstream() -> None:
    answers = streams(delta(content="x"), hang)
    async with ScriptedUpstream(chat=[answers]).serve() as there, front_of(there.port) as front:
        async with raw_client(front.port) as client:
            body = orjson.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True})
            await client.send(request("POST", "/v1/chat/completions", body=body))
            await there.asked.wait()
            client.reset()
        async with asyncio.timeout(PATIENCE_SEC):
            await there.deserted.wait()


# the embedded engine behind


@pytest.mark.slow
async def test_a_voice_and_an_ear_far_away(voice_choice: VoiceChoice) -> None:
    """Speech in and out through the chat stream; then the same voice by /v1/audio/speech."""
    engine = EmbeddedEngine(voice=voice_choice)
    async with live_server(engine) as back:
        voice = engine.capabilities.voices[0]
        async with front_of(back.port, voices=(voice,)) as front, connect(front.websocket_url) as session:
            answer = await session.ask_text("what is three plus four")
            assert "seven" in answer.text.lower() or "7" in answer.text
            assert loud(answer.audio)
            await session.send_audio(clip_bytes("goforward"), end=True)
            heard = await session.answer()
            assert word_errors(WORDS["goforward"], heard.transcript).wrong <= 1
            assert loud(heard.audio)
            assert heard.usage is not None
            assert heard.usage.input_audio_ms > 1000
        url = f"http://127.0.0.1:{back.port}"
        speaks: dict[str, Any] = {"modalities": ("text",), "speech_upstream": url, "voices": (voice,)}
        async with front_of(back.port, **speaks) as front:
            async with connect(front.websocket_url) as session:
                answer = await session.ask_text("what is three plus four")
                assert loud(answer.audio)
                await session.configure(task="speech", modalities=["audio"])
                assert loud((await session.ask_text("Good morning. How are you?")).audio)
            spoken = await post(front, "/v1/audio/speech", {"input": "Good morning.", "response_format": "wav"})
            assert (spoken.status, spoken.body[:4]) == (200, b"RIFF")
            assert loud(spoken.body[44:])


def loud(pcm: bytes) -> bool:
    """A voice, not silence: half a second at least, and a fair level."""
    samples = np.frombuffer(pcm, "<i2").astype(float)
    return len(samples) > 12_000 and float(np.sqrt(np.mean(samples**2))) > 300


@pytest.mark.slow
async def test_from_the_command_line() -> None:
    """The process as an operator starts it, on the event loop of production."""
    async with live_server() as back:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_ws", "serve", "--engine", "remote", "--port", str(port)),
            *("--remote.upstreams", f"http://127.0.0.1:{back.port}/v1"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            lines: list[bytes] = []
            while not lines or b"serves fake" not in lines[-1]:
                lines.append(await process.stderr.readline())
                assert lines[-1], lines
            async with connect(f"ws://127.0.0.1:{port}/v1/streaming_input") as session:
                assert (await session.ask_text("hello there")).text == "hello there"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
