"""Real recognition and a real voice around an LLM of a test, over a WebSocket: spoken turns, and a voice that dies."""

from __future__ import annotations

import os
import signal

import pytest
from support.embedded_engine import ears
from support.live_server import live_server, scrape
from support.native_client import native_client
from support.scripted_engines import RetortEngine
from support.speech_clips import WORDS, clip_bytes, silence

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

SENTENCE = "This is a sentence that takes some time to be spoken."


async def test_a_voice_that_is_killed_leaves_the_text_and_speaks_the_next_turn(voice_choice: VoiceChoice) -> None:
    llm, voice = RetortEngine(" ".join([SENTENCE] * 60)), VoiceProcess(voice_choice)
    engine = ComposedEngine(llm, asr=ears(), tts=SpeechEngine(voice), think_ahead=True)
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await client.configure(max_lead_ms=200)
        await client.chunk(clip_bytes("goforward") + silence(0.5), modality="audio", end=True)
        while (await client.until("output_chunk")).get("modality") != "audio":
            pass
        pid = voice.worker_pid
        assert pid is not None
        while True:  # between two clauses, no request would miss it
            await server.until(lambda: voice.jobs > 0)
            os.kill(pid, signal.SIGSTOP)
            await client.barrier()  # what it had done is known
            if voice.jobs > 0:
                break
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        answer = await client.answer()
        texts = [frame["text"] for frame in client.seen("output_chunk") if frame.get("modality") == "text"]
        assert "".join(texts) == llm.reply
        assert (answer.reason, [error["param"] for error in answer.errors]) == ("stop", ["tts"])
        llm.reply = None
        await client.chunk(clip_bytes("goforward") + silence(0.5), modality="audio", end=True)
        following = await client.answer()
        assert following.text == f"You said {WORDS['goforward']}"
        assert following.audio
        assert (following.reason, following.errors) == ("stop", [])
        assert (await scrape(server)).value("part_failures_total", part="tts") == 1
