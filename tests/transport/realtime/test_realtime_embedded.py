"""A spoken conversation over ``/v1/realtime`` with the embedded engine, at the speed of its parts."""

from __future__ import annotations

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.realtime_client import realtime_client, text_of
from support.speech_clips import at_24k, clip_bytes, silence
from support.voices import need

from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


async def test_a_spoken_question_and_a_typed_one_are_answered() -> None:
    engine = EmbeddedEngine(voice=need(VoiceChoice.ESPEAK), max_recognisers=2)
    async with live_server(engine) as server, realtime_client(server) as client:
        transcription = {"model": "whisper-1", "language": "en"}
        session = await client.update(audio={"input": {"transcription": transcription}})
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        await client.append(at_24k(silence(0.6) + clip_bytes("goforward") + silence(1.5)))
        spoken = await client.response()
        (heard,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert heard["transcript"] == "go forward ten meters"
        assert text_of(spoken)
        assert len(client.heard(spoken["id"])) > 24_000
        await client.say("What is two plus two?")
        typed = await client.respond(output_modalities=["text"])
        assert "four" in text_of(typed).lower() or "4" in text_of(typed)
        assert not client.heard(typed["id"])
