"""The native WebSocket and the Realtime API are two fronts of one conversation."""

from __future__ import annotations

import numpy as np
import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.native_client import native_client
from support.realtime_client import realtime_client, text_of
from support.speech_clips import at_24k, clip_bytes, silence
from support.voices import need

from omni_ws.config.model import VoiceChoice

RATE = 24_000
PIECE = RATE // 50 * 2
TURNS = {"type": "server_vad", "silence_duration_ms": 600}


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("clip", ["goforward", "cards_001"])
async def test_speech_is_heard_and_answered_alike(clip: str) -> None:
    speech = at_24k(silence(0.6) + clip_bytes(clip) + silence(1.5))
    engine = EmbeddedEngine(voice=need(VoiceChoice.ESPEAK))
    async with live_server(engine) as server:
        async with native_client(server) as client:
            audio = {"format": "pcm16", "sample_rate": RATE}
            await client.configure(input_audio=audio, output_audio=audio, turn_detection=TURNS, max_lead_ms=None)
            for start in range(0, len(speech), PIECE):
                await client.chunk(speech[start : start + PIECE], modality="audio")
            native = await client.answer()
        async with realtime_client(server) as other:
            form = {"type": "audio/pcm", "rate": RATE}
            asked = {"format": form, "turn_detection": TURNS, "transcription": {"model": "whisper-1"}}
            await other.update(audio={"input": asked, "output": {"format": form}})
            await other.append(speech, size=PIECE)
            response = await other.response()
            (heard,) = other.seen("conversation.item.input_audio_transcription.completed")
    settled = [
        chunk["text"] for chunk in native.chunks if chunk["modality"] == "transcript" and not chunk.get("interim")
    ]
    assert heard["transcript"] == "".join(settled).strip()
    assert text_of(response) == native.text
    # espeak-ng says a sentence a little differently each time.
    voices = [np.frombuffer(audio, "<i2").astype(float) for audio in (native.audio, other.heard(response["id"]))]
    assert len(voices[0]) == pytest.approx(len(voices[1]), rel=0.01)
    levels = [np.sqrt(np.mean(voice**2)) for voice in voices]
    assert levels[0] == pytest.approx(levels[1], rel=0.05)
    assert levels[0] > 500


@pytest.mark.slow
@pytest.mark.real_time
async def test_utterances_of_one_turn_are_one_transcript() -> None:
    speech = at_24k(silence(0.6) + clip_bytes("goforward") + silence(1.5) + clip_bytes("goforward") + silence(0.6))
    engine = EmbeddedEngine(voice=need(VoiceChoice.ESPEAK))
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(audio={"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}})
        await client.append(speech)
        await client.send("input_audio_buffer.commit")
        await client.respond(output_modalities=["text"])
        (heard,) = client.seen("conversation.item.input_audio_transcription.completed")
        deltas = client.seen("conversation.item.input_audio_transcription.delta")
    assert heard["transcript"] == "".join(event["delta"] for event in deltas)
    assert heard["transcript"] == "go forward ten meters go forward ten meters"
    assert len(deltas) == 2
