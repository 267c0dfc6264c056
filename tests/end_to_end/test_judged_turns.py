"""Turns that the real model judges: real speech, the real detector, the whole server."""

from __future__ import annotations

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.real_models import fetched
from support.speech_clips import SAMPLE_RATE, clip_bytes, silence

from omni_ws.audio.smart_turn import SmartTurn
from omni_ws.service.listening import TurnJudge

pytestmark = [pytest.mark.slow]

#: The sentence with a pause of 1.2 s in its middle, where the speaker does not sound finished.
CUT_SEC = 4.3
PAUSE_SEC = 1.2


def paused_sentence() -> bytes:
    clip, cut = clip_bytes("librivox_ss_0870"), 2 * int(CUT_SEC * SAMPLE_RATE)
    return silence(0.5) + clip[:cut] + silence(PAUSE_SEC) + clip[cut:] + silence(2)


async def speech_of(client: NativeClient, turns: dict[str, object]) -> list[tuple[str, int]]:
    """When speech started and stopped, up to the end of the audio, which comes faster than it was spoken."""
    await client.configure(turn_detection=turns)
    audio = paused_sentence()
    for start in range(0, len(audio), 3200):
        await client.binary(audio[start : start + 3200])
    await client.barrier()
    while len(client.seen("speech_started")) != len(stopped := client.seen("speech_stopped")) or not stopped:
        await client.until("speech_stopped")
    frames = [*client.seen("speech_started"), *client.seen("speech_stopped")]
    return sorted((frame["type"], frame["audio_ms"]) for frame in frames)


@pytest.mark.parametrize(
    ("turns", "within_pause"),
    [
        ({"type": "server_vad"}, True),
        ({"type": "semantic_vad"}, False),
        ({"type": "semantic_vad", "eagerness": "low"}, False),
        ({"type": "semantic_vad", "eagerness": "high"}, True),
    ],
)
async def test_a_pause_in_a_sentence_is_no_end_for_who_waits(turns: dict[str, object], within_pause: bool) -> None:
    model = SmartTurn(fetched("smart-turn") / "smart-turn-v3.2-cpu.onnx")
    async with live_server() as server:
        server.app.sessions.speech_workers.judge = TurnJudge(model)
        async with native_client(server) as client:
            speech = await speech_of(client, turns)
    begins = 500 + CUT_SEC * 1000
    stops = [audio_ms for kind, audio_ms in speech if kind == "speech_stopped"]
    assert any(begins - 200 < audio_ms < begins + 100 for audio_ms in stops) is within_pause
