"""Kokoro in its worker process and behind a real server, and what a start says where it cannot speak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import soxr
from support.live_server import LiveServer, live_server
from support.patience import until
from support.raw_http import post
from support.real_models import fetched
from support.scripted_engines import RetortEngine

from benchmarks.server_process import scheduled_seconds
from omni_ws.client import AudioChunk, Final, connect
from omni_ws.config import ConfigurationError, load
from omni_ws.config.loading import check_available
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Word
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts import voice_process
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.synthesiser import NoVoice
from omni_ws.engine.tts.voice_process import VoiceProcess, kokoro_folder
from omni_ws.engine_choice import create_engine, tts_of
from omni_ws.errors import EngineFailed

pytest.importorskip("hibari")
pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCE = "Go forward ten meters, please."
LONG = "Plants use sunlight to turn water and carbon dioxide into sugar, and they give off oxygen while they do it."


@pytest.fixture(scope="module")
def voice() -> VoiceProcess:
    """The voice of the server."""
    fetched("kokoro")
    fetched("kokoro-languages")
    return VoiceProcess(VoiceChoice.KOKORO, default_voice="en-gb")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(voice: VoiceProcess) -> AsyncIterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voice_process, "SLOWEST_PACE", 100.0)  # other tests run at the same time
        tts = SpeechEngine(voice)
        async with live_server(ComposedEngine(RetortEngine(SENTENCE), tts=tts)) as running:
            yield running


@pytest.mark.slow
async def test_a_client_chooses_a_voice_and_a_recogniser_understands_it(server: LiveServer) -> None:
    pytest.importorskip("ctranslate2")
    from benchmarks.asr import DEFAULT, running
    from benchmarks.speech.hearing import hear
    from omni_ws.scenarios.speech import word_errors

    fetched("whisper-tiny-en")
    body = {"input": SENTENCE, "voice": "am_michael", "response_format": "pcm"}
    said = await post(server.port, "/v1/audio/speech", body)
    assert said.status == 200
    samples = np.frombuffer(said.body, "<i2").astype(np.float32) / 32768
    async with running(DEFAULT) as ears:
        heard = await hear(ears, soxr.resample(samples, 24_000, 16_000))
    assert word_errors("Go forward ten meters please", heard.text).differences in ((), ("ten -> 10",))


@pytest.mark.slow
async def test_the_voices_are_told_and_others_refused(server: LiveServer) -> None:
    async with connect(server.websocket_url) as session:
        created = session.created
        assert created.parts.tts is not None
        assert (created.parts.tts.name, created.parts.tts.model) == ("kokoro", "bf_emma")
        voices = created.capabilities.voices
    assert (voices[0], len(voices)) == ("bf_emma", 41)
    assert {voice[0] for voice in voices} == set("abefhip")
    refused = await post(server.port, "/v1/audio/speech", {"input": "Hello.", "voice": "jf_alpha"})
    assert (refused.status, refused.error["param"]) == (400, "voice")
    assert "am_michael" in refused.error["message"]


@pytest.mark.slow
async def test_times_of_words_reach_the_client(server: LiveServer) -> None:
    # Binary frames have no place for them.
    async with connect(server.websocket_url, config={"modalities": ["text", "audio"]}, binary=False) as session:
        await session.send_text("How far?", end=True)
        words, pcm = list[Word](), b""
        async for event in session.events():
            if isinstance(event, AudioChunk):
                words += event.words
                pcm += event.audio
            elif isinstance(event, Final):
                break
    assert [word.text for word in words] == ["Go", "forward", "ten", "meters", "please"]
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(words))
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    loudness = [float(np.sqrt(np.mean(samples[word.start_ms * 24 : word.end_ms * 24] ** 2))) for word in words]
    assert min(loudness) > 0.01
    assert words[-1].end_ms <= len(samples) / 24


@pytest.mark.slow
async def test_a_voice_of_another_language_reads_it(server: LiveServer, voice: VoiceProcess) -> None:
    """By the process that reads for it, which starts when it is first needed."""
    reader = voice.reader
    assert reader is not None
    said = await post(server.port, "/v1/audio/speech", {"input": "नमस्ते।", "voice": "hi", "response_format": "pcm"})
    assert said.status == 200
    assert np.abs(np.frombuffer(said.body, "<i2")).max() > 1000
    assert reader.worker_pid not in (None, voice.worker_pid)


@pytest.mark.slow
async def test_voices_of_other_languages_need_espeak(voice: VoiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_process, "espeak_is_here", lambda: False)
    assert voice_process._more_voices() is None


@pytest.mark.slow
async def test_a_voice_that_is_interrupted_is_soon_free(server: LiveServer, voice: VoiceProcess) -> None:
    """By the CPU time of its process."""
    pid = voice.worker_pid
    assert pid is not None
    began = scheduled_seconds(pid)
    assert [spoken async for spoken in voice.say(LONG)]
    whole = scheduled_seconds(pid) - began
    began = scheduled_seconds(pid)
    interrupted = voice.say(LONG)
    first = asyncio.ensure_future(anext(interrupted))
    await until(lambda: scheduled_seconds(pid) - began > whole / 10)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await interrupted.aclose()
    assert [spoken async for spoken in voice.say("No.")]
    assert scheduled_seconds(pid) - began < whole
    assert voice.worker_pid == pid
    assert voice.healthy


@pytest.mark.slow
async def test_a_machine_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("kokoro")
    monkeypatch.setattr(voice_process, "SLOWEST_PACE", 0.0)
    process = VoiceProcess(VoiceChoice.KOKORO)
    refusal = r"no voice kokoro: it would stutter: a second .* \d\.\d s of CPU time, at best; --tts hibari"
    with pytest.raises(EngineFailed, match=refusal):
        await process.start()
    assert process.worker_pid is None
    patient = VoiceProcess(VoiceChoice.KOKORO, may_stutter=True)
    await patient.start()
    assert patient.facts is not None
    assert patient.facts.pace > 0
    await patient.stop()


async def test_a_start_without_weights_says_what_to_do(no_weights: None) -> None:
    engine = create_engine(load(["--asr", "none", "--llm", "rules", "--tts", "kokoro:bm_george"]).config)
    missing = "no voice kokoro: its weights are not on this machine: .* -m omni_ws weights fetch kokoro$"
    with pytest.raises(EngineFailed, match=missing):
        await engine.start()
    await engine.stop()


async def test_weights_that_are_no_network(tmp_path: Path) -> None:
    (tmp_path / "kokoro-v1.0.int8.onnx").write_bytes(b"no network")
    with pytest.raises(EngineFailed, match=r"kokoro-v1\.0\.int8\.onnx cannot be loaded: "):
        await VoiceProcess(VoiceChoice.KOKORO, file=tmp_path).start()


async def test_a_start_without_the_packages_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_process, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(NoVoice, match=r"packages are not installed: .*'omni-ws\[kokoro\]'$"):
        kokoro_folder()


async def test_the_voice_is_named_with_the_part() -> None:
    for argv in (("--tts", "kokoro:bm_george"), ("--tts", "kokoro", "--tts.voice", "bm_george")):
        engine = tts_of(load(argv).config)
        assert isinstance(engine, SpeechEngine)
        assert isinstance(engine.voice, VoiceProcess)
        assert (engine.voice.model, engine.voice._default_voice) == ("kokoro", "bm_george")
    with pytest.raises(ConfigurationError, match=r"--tts names the voice bm_george, and tts\.voice af_heart"):
        check_available(load(("--tts", "kokoro:bm_george", "--tts.voice", "af_heart")).config)
