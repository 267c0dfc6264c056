"""The remote engine with a real ``vllm serve`` and an audio model: a Qwen2-Audio of random weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("httpx", reason="the remote engine's client is not installed")

from support.live_server import live_server
from support.scripted_upstream import answer, final, text
from support.vllm_serve import VllmServe, VllmServers, configuration, in_front_of

from omni_ws.client import connect
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.remote.engine import RemoteEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
HEARS = ("text", "audio")


@pytest.fixture(scope="module")
def serve(vllm_servers: VllmServers) -> Iterator[VllmServe]:
    yield vllm_servers.audio
    vllm_servers.audio.kill()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(serve: VllmServe) -> AsyncIterator[RemoteEngine]:
    async with in_front_of(serve, input_modalities=HEARS) as engine:
        yield engine


def tone(seconds: float, rate: int = 16_000) -> bytes:
    return (np.sin(np.arange(int(seconds * rate)) / 9) * 20_000).astype("<i2").tobytes()


async def tokens(engine: RemoteEngine, *chunks: InputChunk, **fields: Any) -> int:
    return final(await answer(engine, text("what is this"), *chunks, sampling=GREEDY, **fields)).usage.input_tokens


async def test_the_model_hears_as_much_as_was_said(engine: RemoteEngine) -> None:
    """Its encoder makes 25 tokens per second."""
    silent = await tokens(engine)
    one, two = [await tokens(engine, InputChunk(Modality.AUDIO, tone(seconds))) for seconds in (1, 2)]
    assert one > silent + 20
    assert 22 <= two - one <= 28


async def test_other_rates_are_heard_alike(engine: RemoteEngine) -> None:
    plain = await tokens(engine, InputChunk(Modality.AUDIO, tone(1)))
    wide = await tokens(
        engine,
        InputChunk(Modality.AUDIO, tone(1, 48_000)),
        input_audio=AudioFormat(AudioEncoding.PCM16, 48_000),
    )
    assert wide == plain


async def test_a_microphone_in_front_of_it(serve: VllmServe, engine: RemoteEngine) -> None:
    config = configuration(serve, input_modalities=HEARS)
    session_config = {"sampling": GREEDY, "modalities": ["text"]}
    async with (
        live_server(RemoteEngine(config), remote=config) as front,
        connect(front.websocket_url, config=session_config) as session,
    ):
        sound = tone(1)
        for start in range(0, len(sound), 640):
            await session.send_audio(sound[start : start + 640])
        await session.finish()
        heard = await session.answer()
        assert heard.usage is not None
        assert heard.usage.input_audio_ms == 1000
        assert heard.usage.output_tokens == 8
        assert heard.text
