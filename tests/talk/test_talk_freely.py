"""`omni-ws talk` hands-free, with a recording as its microphone and long answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from support.inline_workers import InlineWorkers, ScriptedModel, loud, quiet
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.scripted_engines import HearingEngine, long_answer
from support.sound_card import SOUND_LIBRARY
from support.speech_clips import as_pcm16, clip_bytes, clip_samples, silence

from omni_ws.client import AudioChunk, Final, SpeechStarted, SpeechStopped, TextChunk, connect
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.service.listening import TurnJudge

ROOT = Path(__file__).parents[2]


def second_turn_ended(seen: list[dict[str, Any]]) -> bool:
    return [entry["type"] for entry in seen].count("speech_stopped") == 2


async def talked(
    engine: ScriptedEngine | HearingEngine,
    recording: bytes,
    tmp_path: Path,
    *,
    echo: float = 0.0,
    over: Callable[[list[dict[str, Any]]], bool] = second_turn_ended,
) -> list[dict[str, Any]]:
    """What the client tells while the recording is spoken, up to the end of its second turn."""
    (tmp_path / "sounddevice.py").write_text(SOUND_LIBRARY)
    (tmp_path / "recording.raw").write_bytes(recording)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "RECORDING": str(tmp_path / "recording.raw"),
        "ECHO": str(echo),
    }
    async with live_server(engine) as server:
        server.app.sessions.advise = lambda: "There is a better one."
        # The client has turns judged by the voice where the server can.
        model = ScriptedModel()
        server.app.sessions.speech_workers.judge = TurnJudge(model)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "omni_ws", "talk", "--url", server.websocket_url, "--json"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        seen: list[dict[str, Any]] = []
        async with asyncio.timeout(PATIENCE_SEC):
            while not over(seen):
                seen.append(json.loads(await process.stdout.readline()))
            await server.until(lambda: len(engine.requests) == 2)
            await process.communicate(b"q\n")
        assert process.returncode == 0
        assert model.turns
    return seen


@pytest.mark.slow
@pytest.mark.real_time
async def test_who_speaks_interrupts_and_the_server_knows_what_was_heard(tmp_path: Path) -> None:
    engine = ScriptedEngine(long_answer())
    recording = silence(0.5) + clip_bytes("cards_001") + silence(3) + clip_bytes("goforward")
    seen = await talked(engine, recording, tmp_path)
    assert seen[0]["parts"]["llm"] == {"name": engine.name, "model": engine.model}
    notes = [entry["message"] for entry in seen[1:3]]
    assert notes == ["heard and answered and spoken by scripted", "There is a better one."]
    kinds = [entry["type"] for entry in seen if entry["type"] in ("speech_started", "speech_stopped", "final")]
    assert kinds == ["speech_started", "speech_stopped", "speech_started", "final", "speech_stopped"]
    (final,) = (entry for entry in seen if entry["type"] == "final")
    assert final["finish_reason"] == "cancelled"
    (said,) = (message.text for message in engine.requests[1].history if message.role == "assistant")
    # It talked for three seconds less what the machine was late, a tenth of a second a word, and was paced.
    assert 1 <= len(said.split()) <= 45
    assert final["usage"]["output_audio_ms"] <= len(said.split()) * 100 + 1000


@pytest.mark.slow
@pytest.mark.real_time
async def test_an_answer_goes_on_after_a_voice_without_words(tmp_path: Path) -> None:
    engine = HearingEngine()
    engine.heard_in_turn = iter([(TranscriptOutput("ten of clubs"), *long_answer()), ()])
    recording = silence(0.5) + clip_bytes("cards_001") + silence(2) + clip_bytes("goforward")

    def goes_on(seen: list[dict[str, Any]]) -> bool:
        return second_turn_ended(seen) and seen[-1]["type"] == "audio"

    seen = await talked(engine, recording, tmp_path, over=goes_on)
    assert not [entry for entry in seen if entry["type"] == "final"]
    noted = [entry.get("message") for entry in seen].index("there were no words in that; the answer goes on")
    before = [entry["start_ms"] for entry in seen[:noted] if entry["type"] == "audio"]
    # It had played about all of it by then, less what the server was ahead.
    assert before[-1] - 1000 <= seen[-1]["start_ms"] <= before[-1]


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_person_interrupts_a_loudspeaker_that_does_not_interrupt_itself(tmp_path: Path) -> None:
    pytest.importorskip("pywebrtc_audio")
    speech = soxr.resample(np.resize(clip_samples("librivox_ss_0870"), 12 * 16_000), 16_000, 24_000)
    engine = ScriptedEngine([TextOutput("Chapter one."), AudioOutput(speech, 24_000)])
    # The recordings differ by 11 dB. So soft a voice drowns in the louder words of the answer, and how far the answer
    # is when somebody interrupts it depends on the machine: a person is as loud as before.
    turn, words = clip_samples("cards_001"), clip_samples("goforward")
    interruption = as_pcm16(np.asarray(words * np.sqrt(np.mean(turn**2) / np.mean(words**2)), np.float32))
    before = silence(0.5) + clip_bytes("cards_001") + silence(4)
    seen = await talked(engine, before + interruption, tmp_path, echo=0.7)
    _, place_ms = (entry["audio_ms"] for entry in seen if entry["type"] == "speech_started")
    # On a busy machine echo and loudspeaker are matched later, and what is said is heard from its middle.
    assert -100 <= place_ms - len(before) / 32 <= len(interruption) / 32


async def test_the_library_with_an_open_microphone() -> None:
    """Audio opens no request of the client's, and typed requests keep their own answers."""
    async with live_server() as server:
        config = {"turn_detection": {"type": "server_vad", "interrupt_response": False}, "max_lead_ms": 60_000}
        async with connect(server.websocket_url, config=config) as session:
            audio = silence(0.5) + clip_bytes("cards_001") + silence(1)
            for start in range(0, len(audio), 640):
                await session.send_audio(audio[start : start + 640])
            events = []
            async for event in session.events():
                events.append(event)
                if isinstance(event, Final):
                    break
            assert [type(event) for event in events if isinstance(event, SpeechStarted | SpeechStopped)] == [
                SpeechStarted,
                SpeechStopped,
            ]
            assert (await session.ask_text("hello")).text == "hello"
            for start in range(0, len(audio), 640):
                await session.send_audio(audio[start : start + 640])
            await session.send_text("typed")
            await session.finish()
            finals, texts = [], ""
            async for event in session.events():
                if isinstance(event, TextChunk):
                    texts += event.text
                if isinstance(event, Final):
                    finals.append(event.finish_reason)
                if len(finals) == 2:
                    break
            assert (finals, texts) == ([FinishReason.STOP] * 2, "typed")
            assert not session._link.outgoing.requests


async def test_the_library_names_the_answer_that_goes_on() -> None:
    """Binary audio names no request, and the turn without words has had its final just before."""
    spoken = asyncio.Event()
    first, rest = long_answer()[:6], long_answer()[6:10]
    async with live_server(HearingEngine([*first, spoken.wait, *rest])) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        config = {"turn_detection": {"type": "server_vad", "interrupt_resume": True}, "max_lead_ms": 60_000}
        async with connect(server.websocket_url, config=config) as session:
            await session.send_text("talk to me")
            await session.finish()
            events: list[Any] = []
            async for event in session.events():
                events.append(event)
                if isinstance(event, AudioChunk) and event.start_ms == 400:
                    await session.acknowledge_output(played_ms=250)
                    await session.send_audio(quiet(96) + loud(320) + quiet(1000))
                elif isinstance(event, SpeechStarted):
                    spoken.set()
                elif isinstance(event, Final) and len([one for one in events if isinstance(one, Final)]) == 2:
                    break
            turn, answer = (event for event in events if isinstance(event, Final))
            assert (turn.finish_reason, answer.finish_reason) == (FinishReason.STOP, FinishReason.STOP)
            audio = [event for event in events if isinstance(event, AudioChunk)]
            assert {event.request_id for event in audio} == {answer.request_id}
            assert [event.start_ms for event in audio] == [0, 100, 200, 300, 400, 250, 300, 400, 500, 600, 700, 800]
            assert not session._link.outgoing.requests
