"""A voice without words, as the real detector hears it while an answer is spoken."""

from __future__ import annotations

import numpy as np
import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import HearingEngine
from support.speech_clips import as_pcm16, clip_samples, silence

from omni_ws.engine.base import AudioOutput

#: Nobody understands it, and the detector takes it for speech.
BACKWARDS = as_pcm16(clip_samples("goforward")[::-1])


@pytest.mark.slow
@pytest.mark.real_time
async def test_an_answer_goes_on_after_a_voice_without_words() -> None:
    pieces = [AudioOutput(np.full(2400, number / 50, np.float32), 24_000) for number in range(40)]
    async with live_server(HearingEngine(pieces)) as server, native_client(server) as client:
        await client.configure(turn_detection={"type": "server_vad", "interrupt_resume": True})
        await client.say("Talk to me.")
        request_id = (await client.until("response_started"))["request_id"]
        while (frame := await client.until("output_chunk"))["start_ms"] < 500:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=350)
        sound = silence(0.2) + BACKWARDS + silence(1)
        for start in range(0, len(sound), 640):
            await client.binary(sound[start : start + 640])
        await client.until("speech_started")
        turn = await client.answer()
        assert (turn.reason, turn.chunks, turn.started) == ("stop", [], None)
        rest = await client.answer()
        assert (rest.final["request_id"], rest.reason) == (request_id, "stop")
        assert rest.chunks[0]["start_ms"] == 350
        assert len(rest.audio) == (4000 - 350) * 48
