"""Uncertain onsets as the real detector, and the network of short sounds, hear them."""

from __future__ import annotations

import numpy as np
import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import HearingEngine
from support.speech_clips import as_pcm16, clip_samples, silence

from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput

#: "Go forward ten meters", and how it is recognised.
WORDS = as_pcm16(clip_samples("goforward"))
#: A click, too short to be clear.
CLICK = as_pcm16(np.concatenate((0.8 * np.hanning(400), np.zeros(400))).astype(np.float32))
SOUNDS = {
    "clicks": 5 * (CLICK + silence(0.2)),
    **{name: as_pcm16(clip_samples(f"short_sounds/{name}")) for name in ("mm", "um_hum", "cough")},
}


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("sound", ["words", *SOUNDS])
async def test_words_interrupt_and_other_sounds_do_not(sound: str) -> None:
    pieces = [AudioOutput(np.full(2400, number / 50, np.float32), 24_000) for number in range(60)]
    heard = [TranscriptOutput("Go forward ten meters."), TextOutput("I go.")]
    async with live_server(HearingEngine(pieces, heard=heard)) as server, native_client(server) as client:
        await client.configure(turn_detection={"type": "server_vad", "duck": True})
        await client.say("Talk to me.")
        request_id = (await client.until("response_started"))["request_id"]
        while (await client.until("output_chunk"))["start_ms"] < 500:
            pass
        audio = silence(0.2) + SOUNDS.get(sound, WORDS) + silence(1)
        for start in range(0, len(audio), 640):
            await client.binary(audio[start : start + 640])
        answer = await client.answer()
        told = [frame["type"] for frame in client.frames if frame["type"].startswith("speech_")]
        assert answer.final["request_id"] == request_id
        if sound == "words":
            assert answer.reason == "cancelled"
            assert told[:2] == ["speech_started", "speech_confirmed"]
            assert (await client.answer()).text == "I go."
        else:
            assert answer.reason == "stop"
            assert told == ["speech_started", "speech_dismissed"] * (len(told) // 2)
