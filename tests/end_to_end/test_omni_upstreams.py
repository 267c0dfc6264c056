"""Servers of omni models, which hear and speak by themselves, behind the Realtime API and its client of OpenAI.

The servers are scripts, written from the published sources of vLLM-Omni and SGLang-Omni: what they stream, and how they
refuse.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from support.live_server import live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC
from support.scripted_upstream import Answer, delta, finish, hang, refuses, streams, upstream, usage
from support.speech_clips import at_24k, clip_bytes, silence
from support.tcp_relay import Cut, Direction, tcp_relay

from omni_ws import client
from omni_ws.config.model import RemoteConfig
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.errors import ShuttingDown

RATE = 24_000
TONE = (np.sin(np.arange(RATE) / 9) * 20_000).astype("<i2")
WORDS = "Ten meters it is."
TURNS = {"type": "server_vad", "silence_duration_ms": 500}

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


def wav(samples: np.ndarray[Any, Any]) -> str:
    """A file in base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_omni(*rest: Any) -> Answer:
    """Audio stands where text does otherwise, and the kind of content beside the choices."""
    text = [{**delta(content=word), "modality": "text"} for word in (WORDS[:4], WORDS[4:])]
    audio = [{**delta(content=wav(piece)), "modality": "audio"} for piece in np.split(TONE, 4)]
    return streams(delta(role="assistant", content=""), *text, *audio, *(rest or (finish(), usage(40, 12))))


def sglang_omni(*rest: Any) -> Answer:
    """Each piece of audio is a file."""
    audio = [delta(audio={"id": "audio-1", "data": wav(piece)}) for piece in np.split(TONE, 4)]
    return streams(delta(role="assistant"), delta(content=WORDS), *audio, *(rest or (finish(), usage(40, 12))))


async def speak(connection: AsyncRealtimeConnection) -> None:
    """A question, and silence until the turn has ended."""
    speech = at_24k(silence(0.5) + clip_bytes("goforward") + silence(1.5))
    for start in range(0, len(speech), 4800):
        await connection.input_audio_buffer.append(audio=base64.b64encode(speech[start : start + 4800]).decode())


async def response(connection: AsyncRealtimeConnection) -> tuple[Any, str, bytes]:
    """The next response when it is done, its words, and its sound."""
    words, audio = "", b""
    async with asyncio.timeout(PATIENCE_SEC):
        while True:
            event = await connection.recv()
            match event.type:
                case "response.output_audio.delta":
                    audio += base64.b64decode(event.delta)
                case "response.output_audio_transcript.delta":
                    words += event.delta
                case "response.done":
                    return event.response, words, audio


@pytest.mark.parametrize("dialect", [vllm_omni, sglang_omni])
async def test_spoken_turns_by_the_realtime_client(dialect: Callable[..., Answer]) -> None:
    failing = refuses(
        500, {"error": {"message": "CUDA error: an illegal memory access", "type": "InternalServerError"}}
    )
    async with upstream(dialect(), dialect(hang), dialect(), failing, dialect()) as model:
        config = RemoteConfig(
            upstreams=(model.url,),
            start_timeout_sec=0,
            retries=0,
            input_modalities=("text", "audio"),
            modalities=("text", "audio"),
            voices=("ethan", "chelsie"),
            audio_format="wav",
        )
        async with (
            live_server(RemoteEngine(config)) as server,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1",
                websocket_base_url=f"ws://127.0.0.1:{server.port}/v1",
                api_key="not-needed",
            ) as theirs,
            theirs.realtime.connect(model="gpt-realtime") as connection,
        ):
            audio: Any = {"input": {"turn_detection": TURNS}, "output": {"voice": "chelsie"}}
            await connection.session.update(session={"type": "realtime", "audio": audio})
            await speak(connection)
            done, words, heard = await response(connection)
            assert (done.status, words.strip()) == ("completed", WORDS)
            samples = np.frombuffer(heard, "<i2").astype(int)
            assert len(samples) == pytest.approx(RATE, rel=0.02)
            assert np.abs(samples).max() == pytest.approx(20_000, rel=0.1)
            asked = model.requests[0]
            assert asked["audio"] == {"voice": "chelsie", "format": "wav"}
            (part,) = [part for part in asked["messages"][-1]["content"] if part["type"] != "text"]
            assert part["type"] in ("input_audio", "audio_url")

            # A person speaks while it speaks: the server behind has nothing more to do.
            await speak(connection)
            while (await connection.recv()).type != "response.output_audio.delta":
                pass
            await speak(connection)
            done, _, _ = await response(connection)
            assert (done.status, done.status_details.reason) == ("cancelled", "turn_detected")
            await model.deserted.wait()
            done, words, _ = await response(connection)
            assert (done.status, words.strip()) == ("completed", WORDS)

            # A failure ends one response, tells nothing of the inside, and the session goes on.
            await speak(connection)
            done, _, _ = await response(connection)
            assert done.status == "failed"
            assert "CUDA" not in str(done)
            await speak(connection)
            done, words, _ = await response(connection)
            assert (done.status, words.strip()) == ("completed", WORDS)


@pytest.mark.parametrize("dialect", [vllm_omni, sglang_omni])
async def test_broken_connections_lose_nothing(dialect: Callable[..., Answer]) -> None:
    speech = clip_bytes("goforward")

    async def ask(port: int) -> client.Answer:
        url = f"ws://127.0.0.1:{port}/v1/streaming_input"
        async with client.connect(url, reconnect=True) as session:
            for start in range(0, len(speech), 3200):
                await session.send_audio(speech[start : start + 3200])
            await session.finish()
            return await session.answer()

    async with upstream(dialect()) as model:
        config = RemoteConfig(
            upstreams=(model.url,),
            start_timeout_sec=0,
            input_modalities=("text", "audio"),
            modalities=("text", "audio"),
        )
        async with (
            live_server(RemoteEngine(config), streaming_input={"resume_grace_sec": 30}) as server,
            tcp_relay(server.port) as proxy,
        ):
            whole = await ask(proxy.port)
            carried = proxy.carried
            assert (whole.text.strip(), len(whole.audio) > 16_000) == (WORDS, True)
            for direction, share in itertools.product(Direction, (0.5, 0.9)):
                proxy.cuts.append(Cut(direction, int(carried[direction] * share), reset=True))
                answer = await ask(proxy.port)
                assert (answer.text, answer.audio) == (whole.text, whole.audio), (direction, share)
            assert proxy.made == 4
            server.native.end_all(ShuttingDown("the test is over"))


async def test_parameters_of_stages_reach_the_server() -> None:
    async with upstream(vllm_omni()) as model:
        config = RemoteConfig(
            upstreams=(model.url,), start_timeout_sec=0, modalities=("text", "audio"),
            stage_sampling=("talker.temperature",),
        )  # fmt: skip
        async with live_server(RemoteEngine(config)) as server, native_client(server) as other:
            await other.configure(stage_sampling={"talker": {"temperature": 0.5}})
            await other.say("hello")
            answer = await other.answer()
            assert (answer.text.strip(), answer.reason) == (WORDS, "stop")
            await other.send("session_config", stage_sampling={"talker": {"top_k": 5}})
            assert (await other.error())["param"] == "stage_sampling.talker.top_k"
    assert model.requests[0]["stage_sampling"] == {"talker": {"temperature": 0.5}}
