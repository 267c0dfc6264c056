"""Clients that others made for OpenAI's transcription sessions: each hears what ``/v1/audio/transcriptions`` hears.

``make test-outside`` installs them; without it these tests are skipped. Nothing of a client is changed but its URL.
"""

from __future__ import annotations

import json
import wave
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.live_server import live_server
from support.outside import run_outside, tool
from support.real_models import fetched
from support.scripted_engines import RetortEngine
from support.speech_clips import WORDS, at_24k, clip_bytes, silence

from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.scenarios.speech import word_errors

CLIENTS = Path(__file__).parent / "clients"
CLIPS = (*WORDS, "short_sounds/set_a_timer")
#: For who speaks in real time.
FEW = ("goforward", "cards_005")

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Heard:
    """A server with Whisper: its URL, recordings in silence, and what it hears in them over HTTP."""

    url: str
    files: list[str]
    texts: list[str]
    #: The LLM, which is asked nothing.
    llm: RetortEngine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def heard(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Heard]:
    tool("OUTSIDE_PYTHON")
    fetched("whisper-tiny-en")
    folder, llm = tmp_path_factory.mktemp("speech"), RetortEngine()
    engine = ComposedEngine(llm, asr=RecogniserEngine(WhisperRecogniser()))
    async with live_server(engine) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        files, texts = [], []
        async with AsyncOpenAI(base_url=url, api_key="not-needed") as client:
            for clip in CLIPS:
                audio = at_24k(silence(1) + clip_bytes(clip) + silence(2))
                file = folder / f"{Path(clip).name}.wav"
                with wave.open(str(file), "wb") as written:
                    written.setparams((1, 2, 24_000, 0, "NONE", ""))
                    written.writeframes(audio)
                texts.append((await client.audio.transcriptions.create(model="whisper-1", file=file)).text)
                file.with_suffix(".pcm").write_bytes(audio)
                files.append(str(file.with_suffix(".pcm")))
        yield Heard(url, files, texts, llm)


@pytest.mark.parametrize(
    ("client", "turns"),
    [
        *((client, turns) for client in ("livekit", "pipecat", "agents") for turns in ("server", "client")),
        ("speech_to_speech", "client"),  # it always detects turns itself
    ],
)
async def test_a_client_hears_what_is_heard_over_http(client: str, turns: str, heard: Heard) -> None:
    """``turns``: who detects them."""
    script = CLIENTS / f"stt_{client}.py"
    in_real_time = (client, turns) == ("livekit", "client")
    clips = FEW if in_real_time else CLIPS
    files = [heard.files[CLIPS.index(clip)] for clip in clips]
    output = await run_outside(tool("OUTSIDE_PYTHON"), str(script), heard.url, turns, *files)
    seen = json.loads(output.strip().splitlines()[-1])
    for clip, text in zip(clips, seen["texts"], strict=True):
        wanted = heard.texts[CLIPS.index(clip)]
        assert word_errors(wanted, text).wrong <= 1, (clip, text, wanted)  # the same number may be a word or digits
    assert not heard.llm.requests, "something was answered"
    if in_real_time:
        assert sum(seen["interims"]) > 0
