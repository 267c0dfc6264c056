"""A server whose three parts are another server: it hears, answers and speaks by HTTP alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.raw_http import post, raw_client, request
from support.speech_clips import WORDS, silence
from support.ways_in import SPOKEN, WAV, WAYS, is_loud

from omni_ws.client import connect
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.remote.engine import RemoteLlmEngine, RemoteRecogniser, RemoteVoice
from omni_ws.engine.remote.settings import RemoteAsrSettings, RemoteLlmSettings, RemoteTtsSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.scenarios.speech import word_errors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_task_left")]


@asynccontextmanager
async def in_front() -> AsyncIterator[LiveServer]:
    async with live_server(EmbeddedEngine()) as back:
        urls = (f"http://127.0.0.1:{back.port}",)
        engine = ComposedEngine(
            RemoteLlmEngine(RemoteLlmSettings(urls=urls, start_timeout=0)),
            asr=RecogniserEngine(RemoteRecogniser(RemoteAsrSettings(urls=urls, start_timeout=0, languages=("en",)))),
            tts=SpeechEngine(RemoteVoice(RemoteTtsSettings(urls=urls, start_timeout=0))),
        )
        async with live_server(engine) as front:
            yield front
        await back.until(lambda: back.engine.active_requests == 0)


async def test_a_spoken_conversation_by_websocket() -> None:
    async with in_front() as front, connect(front.websocket_url) as session:
        assert session.created.capabilities.transcripts
        for text in ("what is three plus four", "what is five plus four"):
            answer = await session.ask_text(text)
            assert is_loud(answer.audio)
        assert "nine" in answer.text.lower() or "9" in answer.text
        await session.configure(input_audio={"language": "en-US"})
        await session.send_audio(SPOKEN, end=True)
        heard = await session.answer()
        assert word_errors(WORDS["goforward"], heard.transcript).wrong <= 1
        assert heard.text
        assert is_loud(heard.audio)
        assert heard.usage is not None
        assert heard.usage.input_audio_ms == len(SPOKEN) // 32
        # Silence reaches nobody.
        await session.send_audio(silence(2), end=True)
        assert (await session.answer()).transcript == ""


async def test_open_microphone_by_websocket() -> None:
    config: dict[str, Any] = {"turn_detection": {"type": "server_vad"}, "max_lead_ms": None}
    async with in_front() as front, connect(front.websocket_url, config=config) as session:
        speech = silence(0.5) + SPOKEN + silence(1.5)
        for place in range(0, len(speech), 3200):
            await session.send_audio(speech[place : place + 3200])
        answer = await session.answer()
        assert word_errors(WORDS["goforward"], answer.transcript).wrong <= 1
        assert is_loud(answer.audio)


@pytest.mark.parametrize("way", WAYS)
async def test_a_spoken_question(way: str) -> None:
    async with in_front() as front:
        (await WAYS[way](front)).check()


async def test_requests_to_one_part() -> None:
    async with in_front() as front:
        spoken = await post(front.port, "/v1/audio/speech", {"input": "Good morning.", "response_format": "pcm"})
        assert is_loud(spoken.body)
        form = (
            b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + WAV + b"\r\n--x--\r\n"
        )
        async with raw_client(front.port) as client:
            kind = "Content-Type: multipart/form-data; boundary=x"
            await client.send(request("POST", "/v1/audio/transcriptions", kind, "Connection: close", body=form))
            written = (await client.response()).json()
        assert word_errors(WORDS["goforward"], written["text"]).wrong <= 1
