"""Home Assistant's sequence of events against the embedded engine: recorded speech, an answer, and its voice.

The sequences are those of its classes for speech to text, conversation and text to speech, which each open a
connection: components/wyoming/stt.py, conversation.py and tts.py of Home Assistant 2026.2.
"""

from __future__ import annotations

import asyncio

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.speech_clips import clip_bytes, silence
from support.wyoming_peer import ON, AudioChunk, AudioStart, AudioStop, peer
from wyoming.asr import Transcribe
from wyoming.handle import Handled
from wyoming.info import Describe, Info
from wyoming.pipeline import PipelineStage, RunPipeline
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop

from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow, pytest.mark.real_time]
MIC = (16_000, 2, 1)


async def test_a_turn_by_home_assistant_and_one_by_a_satellite(voice_choice: VoiceChoice) -> None:
    async with live_server(EmbeddedEngine(voice=voice_choice), **ON) as server:
        async with peer(server) as hub:
            await hub.send(Describe())
            info = Info.from_event(await hub.until("info"))
            language = info.asr[0].models[0].languages[0]
        async with peer(server) as hub:
            await hub.send(Transcribe(language=language), AudioStart(*MIC))
            await hub.speak(clip_bytes("goforward"))
            await hub.send(AudioStop())
            words = (await hub.until("transcript")).data["text"]
            assert words == "go forward ten meters"
        async with peer(server) as hub:
            await hub.say("transcript", {"text": words, "context": {"conversation_id": "01K"}})
            answer = Handled.from_event(await hub.until("handled"))
            assert answer.text
        async with peer(server) as hub:
            await hub.send(SynthesizeStart(), *map(SynthesizeChunk, answer.text.split(" ")))
            await hub.send(Synthesize(answer.text), SynthesizeStop())
            await hub.until("synthesize-stopped")
            assert hub.types == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
            assert len(hub.heard()) > 24_000
        async with peer(server) as satellite:
            await satellite.send(RunPipeline(PipelineStage.ASR, PipelineStage.TTS))
            speech = silence(0.5) + clip_bytes("goforward") + silence(3)
            for start in range(0, len(speech), 640):
                await satellite.send(AudioChunk(*MIC, speech[start : start + 640]))
                await asyncio.sleep(0.02)
            await satellite.until("audio-stop")
            listened = ["transcribe", "voice-started", "voice-stopped", "transcript"]
            assert satellite.types == [*listened, "audio-start", "audio-chunk", "synthesize", "audio-stop"]
            assert satellite.seen[3].data["text"] == words
            assert len(satellite.heard()) > 24_000
