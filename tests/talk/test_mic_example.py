"""The example of a voice client, examples/mic_client.py, with a recording as its microphone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.scripted_engines import HearingEngine, long_answer
from support.sound_card import SOUND_LIBRARY
from support.speech_clips import clip_bytes, silence

from omni_ws.client.audio import read_wav
from omni_ws.engine.base import TextOutput, TranscriptOutput

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "mic_client.py"


@pytest.mark.slow
@pytest.mark.real_time
async def test_who_speaks_interrupts_the_answer(tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text(SOUND_LIBRARY)
    recording = tmp_path / "recording.raw"
    recording.write_bytes(silence(0.5) + clip_bytes("cards_001") + silence(3) + clip_bytes("goforward") + silence(60))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    engine = HearingEngine()
    engine.heard_in_turn = iter(
        [(TranscriptOutput("ten of clubs"), *long_answer()), (TranscriptOutput("go"), TextOutput("Yes?"))]
    )
    async with live_server(engine) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), "--url", server.websocket_url),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "RECORDING": str(recording)},
        )
        assert process.stdout is not None
        printed = b""
        async with asyncio.timeout(PATIENCE_SEC):
            while b"Yes?" not in printed:
                piece = await process.stdout.read(4096)
                assert piece, printed
                printed += piece
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
    assert b"you: ten of clubs" in printed
    (said,) = (message.text for message in engine.requests[1].history if message.role == "assistant")
    assert 1 <= len(said.split()) <= 60


async def test_a_file_is_asked_and_its_answer_saved(tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    engine = HearingEngine(heard=[TranscriptOutput("ten of clubs"), *long_answer()[:11]])
    async with live_server(engine) as server:
        asked = ("--url", server.websocket_url, "--file", str(ROOT / "tests" / "data" / "cards_001.wav"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), *asked, "--save", str(reply)), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SEC)
    assert (process.returncode, output.startswith(b"you: ten of clubs\nword0 word1")) == (0, True)
    assert read_wav(reply).duration_ms == 1000
