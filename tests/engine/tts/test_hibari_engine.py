"""hibari in its worker process and behind a real server, and what a start says where it cannot speak."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.live_server import LiveServer, live_server
from support.raw_http import post
from support.real_models import fetched
from support.scripted_engines import RetortEngine

from omni_ws.client import AudioChunk, Final, connect
from omni_ws.config import load
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Word
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts import voice_process
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.synthesiser import NoVoice
from omni_ws.engine.tts.voice_process import VoiceProcess, hibari_file
from omni_ws.engine_choice import create_engine
from omni_ws.errors import EngineFailed, InvalidValue

pytest.importorskip("hibari")

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCE = "Go forward ten meters, please."
REPLY = "It costs **$20** today."


@pytest.fixture(scope="module")
def tts() -> SpeechEngine:
    fetched("hibari")
    return SpeechEngine(VoiceProcess(VoiceChoice.HIBARI))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tts: SpeechEngine) -> AsyncIterator[LiveServer]:
    async with live_server(ComposedEngine(RetortEngine(REPLY), tts=tts)) as running:
        yield running


@pytest.fixture
def voice(tts: SpeechEngine, server: LiveServer) -> VoiceProcess:
    """The voice of the server."""
    assert isinstance(tts.voice, VoiceProcess)
    return tts.voice


async def pcm_of(voice: VoiceProcess) -> bytes:
    return b"".join([piece.samples.tobytes() async for piece in voice.say(SENTENCE)])


@pytest.mark.slow
async def test_the_same_process_says_the_same(voice: VoiceProcess) -> None:
    assert voice.describe()[0] == "voice: hibari 0.2.1 heart (hibari.onnx, Apache-2.0)"
    assert await pcm_of(voice) == await pcm_of(voice)
    for name in ("emma", "rms", "nobody"):
        with pytest.raises(InvalidValue, match="there are heart"):
            voice.check(name)
    assert [voice.check(name) for name in ("heart", "en-us", "en")] == ["heart"] * 3


@pytest.mark.slow
async def test_speech_on_request(server: LiveServer) -> None:
    lengths = []
    for speed in (1.0, 2.0):
        body = {"input": "Read 3 words aloud.", "voice": "heart", "response_format": "pcm", "speed": speed}
        said = await post(server.port, "/v1/audio/speech", body)
        assert said.status == 200
        samples = np.frombuffer(said.body, "<i2").astype(np.float32) / 32768
        assert np.sqrt(np.mean(samples**2)) > 0.02
        lengths.append(len(samples))
    assert lengths[0] / lengths[1] == pytest.approx(2, rel=0.05)
    refused = await post(server.port, "/v1/audio/speech", {"input": "Hello.", "voice": "emma"})
    assert (refused.status, refused.error["param"]) == (400, "voice")
    assert "heart" in refused.error["message"]
    unreadable = await post(server.port, "/v1/audio/speech", {"input": "你好", "voice": "heart"})
    assert unreadable.error["code"] == "invalid_value"


@pytest.mark.slow
async def test_times_of_words_reach_the_client(server: LiveServer) -> None:
    config = {"modalities": ["text", "audio"], "voice": "heart"}
    # Binary frames have no place for them.
    async with connect(server.websocket_url, config=config, binary=False) as session:
        assert session.created.parts.tts is not None
        assert (session.created.parts.tts.name, session.created.parts.tts.model) == ("hibari", "heart")
        await session.send_text("What does it cost?", end=True)
        words, length_ms = list[Word](), 0.0
        async for event in session.events():
            if isinstance(event, AudioChunk):
                words += event.words
                length_ms += len(event.audio) / 2 * 1000 / event.sample_rate
            elif isinstance(event, Final):
                break
    assert [word.text for word in words] == ["It", "costs", "$20", "today"]
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(words))
    assert words[-1].end_ms <= length_ms


async def test_a_start_without_weights_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoVoice, match="-m omni_ws weights fetch hibari"):
        hibari_file()
    with pytest.raises(EngineFailed, match=r"no voice hibari: its weights are not on this machine: .* fetch hibari$"):
        await VoiceProcess(VoiceChoice.HIBARI).start()
    with pytest.raises(EngineFailed, match=r"no voice hibari: there is no file .*mine\.onnx"):
        await VoiceProcess(VoiceChoice.HIBARI, file=tmp_path / "mine.onnx").start()
    (tmp_path / "mine.onnx").write_bytes(b"mine")
    assert hibari_file(tmp_path / "mine.onnx") == tmp_path / "mine.onnx"
    assert os.listdir(tmp_path) == ["mine.onnx"]


async def test_a_start_without_the_packages_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(voice_process, "find_spec", lambda name: None)
        with pytest.raises(EngineFailed, match=r"packages are not installed: .*pip install omni-ws$"):
            await VoiceProcess(VoiceChoice.HIBARI).start()
    monkeypatch.setattr(voice_process, "version", lambda name: "0.3.0")
    with pytest.raises(EngineFailed, match=r"it needs hibari-tts 0\.2\.1, and 0\.3\.0 is installed: "):
        await VoiceProcess(VoiceChoice.HIBARI).start()


async def test_a_server_that_was_told_to_use_it_does_not_start_without_its_weights(no_weights: None) -> None:
    engine = create_engine(load(["--asr", "none", "--llm", "rules", "--tts", "hibari"]).config)
    with pytest.raises(EngineFailed, match="no voice hibari: its weights are not on this machine: "):
        await engine.start()
    await engine.stop()
