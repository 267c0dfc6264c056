"""The vLLM engine behind the real server: the same requests get the same answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.raw_http import raw_client
from support.raw_http import request as http_request
from support.vllm_engine import plain_answer, until_idle
from websockets.asyncio.client import ClientConnection, connect

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.wire.frames import encode_input

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SAMPLING = {"temperature": 0, "max_tokens": 16}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared_server(hearing_model: VllmEngine) -> AsyncIterator[LiveServer]:
    async with live_server(hearing_model, stops_engine=False) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer, hearing_engine: VllmEngine) -> LiveServer:
    return shared_server


def vllm(server: LiveServer) -> VllmEngine:
    assert isinstance(server.engine, VllmEngine)
    return server.engine


async def until_final(socket: ClientConnection) -> tuple[str, dict[str, Any]]:
    text = ""
    async with asyncio.timeout(PATIENCE_SEC):
        async for message in socket:
            frame = json.loads(message)
            if frame["type"] == "output_chunk":
                text += frame.get("text", "")
                if frame.get("final"):
                    return text, frame
            assert frame["type"] != "error", frame
    raise AssertionError("no final came")


async def test_a_conversation_over_the_websocket(server: LiveServer) -> None:
    async with connect(server.websocket_url) as socket:
        created = json.loads(await socket.recv())
        assert created["model"] == "tiny-audio"
        assert created["capabilities"]["input_modalities"] == ["audio", "text"]
        assert created["capabilities"]["output_modalities"] == ["text"]
        await socket.send(json.dumps({"type": "session_config", "sampling": SAMPLING}))
        await socket.send(json.dumps({"type": "input_chunk", "sequence_id": 0, "text": "Hello", "end_of_input": True}))
        first, final = await until_final(socket)
        assert first == await plain_answer(vllm(server), "user: Hello\nassistant:", **SAMPLING)
        assert final["usage"]["output_tokens"] == SAMPLING["max_tokens"]
        # The previous request is context of this one.
        await socket.send(json.dumps({"type": "input_chunk", "sequence_id": 1, "text": "Again", "end_of_input": True}))
        second, _ = await until_final(socket)
        prompt = f"user: Hello\nassistant: {first}\nuser: Again\nassistant:"
        assert second == await plain_answer(vllm(server), prompt, **SAMPLING)


async def test_usage_of_a_cancelled_answer_is_in_tokens(server: LiveServer) -> None:
    async with connect(server.websocket_url) as socket:
        await socket.recv()
        sampling = {"temperature": 0, "max_tokens": 400}
        await socket.send(json.dumps({"type": "session_config", "sampling": sampling, "history": False}))
        await socket.send(json.dumps({"type": "input_chunk", "sequence_id": 0, "text": "Hello", "end_of_input": True}))
        while "text" not in json.loads(await socket.recv()):
            pass
        await socket.send(json.dumps({"type": "cancel"}))
        _, final = await until_final(socket)
        assert final["finish_reason"] == "cancelled"
        assert final["usage"]["input_tokens"] == len("user: Hello\nassistant:")  # a token is a byte
        assert 1 <= final["usage"]["output_tokens"] < 400
        assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + final["usage"]["output_tokens"]
    await until_idle(vllm(server))


async def test_spoken_input_over_the_websocket(server: LiveServer) -> None:
    samples = (np.random.default_rng(3).standard_normal(12_800) * 3000).astype("<i2")
    async with connect(server.websocket_url) as socket:
        await socket.recv()
        await socket.send(json.dumps({"type": "session_config", "sampling": SAMPLING}))
        await socket.recv()
        for number in range(40):
            piece = samples[number * 320 : (number + 1) * 320].tobytes()
            await socket.send(encode_input(InputChunk(Modality.AUDIO, piece, number)))
        await socket.send(json.dumps({"type": "finish"}))
        text, final = await until_final(socket)
    prompt = {
        "prompt": "user: Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nassistant:",
        "multi_modal_data": {"audio": (samples.astype(np.float32) / 32768, 16_000)},
    }
    assert text == await plain_answer(vllm(server), prompt, **SAMPLING)
    assert final["usage"]["input_audio_ms"] == 800


async def chat(server: LiveServer, body: dict[str, Any]) -> Any:
    payload = json.dumps(body).encode()
    async with raw_client(server.port) as client:
        head = http_request(
            "POST",
            "/v1/chat/completions",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        )
        await client.send(head + payload)
        return await client.response()


async def test_chat_completions(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    response = await chat(server, {"model": "tiny-audio", "messages": messages, **SAMPLING})
    answer = response.json()
    expected = await plain_answer(vllm(server), "system: Be brief.\nuser: Hello\nassistant:", **SAMPLING)
    assert response.status == 200
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == SAMPLING["max_tokens"]


async def test_a_prompt_over_the_context_is_400(server: LiveServer) -> None:
    response = await chat(server, {"messages": [{"role": "user", "content": "x" * 9000}]})
    assert (response.status, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_picture_for_a_model_that_does_not_see_is_refused(server: LiveServer) -> None:
    async with connect(server.websocket_url) as socket:
        await socket.recv()
        await socket.send(encode_input(InputChunk(Modality.IMAGE, b"a picture", 0, end_of_input=True)))
        async with asyncio.timeout(PATIENCE_SEC):
            frame = json.loads(await socket.recv())
    assert (frame["type"], frame["error"]["code"]) == ("error", "unsupported_modality")
    drawn = io.BytesIO()
    Image.new("RGB", (4, 4)).save(drawn, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"
    picture = [{"type": "image_url", "image_url": {"url": url}}]
    response = await chat(server, {"messages": [{"role": "user", "content": picture}]})
    assert (response.status, response.json()["error"]["code"]) == (415, "unsupported_modality")


async def test_audio_that_nobody_can_speak_is_refused(server: LiveServer) -> None:
    message = {"role": "user", "content": "Hello"}
    response = await chat(server, {"messages": [message], "modalities": ["text", "audio"], "audio": {"format": "wav"}})
    assert (response.status, response.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_client_that_goes_frees_its_place(server: LiveServer) -> None:
    socket = await connect(server.websocket_url)
    await socket.recv()
    await socket.send(json.dumps({"type": "input_chunk", "sequence_id": 0, "text": "Hello", "end_of_input": True}))
    async with asyncio.timeout(PATIENCE_SEC):
        while json.loads(await socket.recv())["type"] != "output_chunk":
            pass
    socket.transport.abort()
    await until_idle(vllm(server))
