"""Recorded calls over WebRTC: the sound of their tracks by a clock that jumps, and a real call with aiortc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.call_sound import RATE, NoiseEngine, Truth, noise, only_call, told, tracks
from support.live_server import live_server
from support.recordings import recordings
from support.speech_clips import as_pcm16
from support.webrtc_client import webrtc_call

from omni_ws.audio.compressed import PACKET_BYTES
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.engine.threads import Work
from omni_ws.service.recording import (
    Recorder,
    RecordingFolder,
)
from omni_ws.transport.webrtc import call as webrtc_call_module
from omni_ws.transport.webrtc.call import PACKET_SEC, TRACK, CallSpeaker

TURNS = 6


async def at_once(work: Work, call: Callable[..., Any], *arguments: Any) -> Any:
    """Does the work here: the clock that jumps sees no threads."""
    return call(*arguments)


@pytest.mark.virtual_clock
async def test_a_call_of_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of six answers are cut. A packet is heard when it comes, or when those before it were played."""
    monkeypatch.setattr(webrtc_call_module, "run_work", at_once)
    folder = RecordingFolder(tmp_path / "calls", max_bytes=1 << 30, max_age=0)
    folder.prepare()
    recorder = Recorder(folder, engine="noise", model=lambda: "noise")
    recording = recorder.begin("webrtc", key=None, name="sess_1")
    assert recording is not None
    loop, user, played = asyncio.get_running_loop(), Truth(), Truth()
    sent: list[bytes] = []

    def record(response_id: str, audio: bytes, in_sec: float) -> None:
        recording.sound(audio, TRACK, by_user=False, request_id=response_id, in_ms=in_sec * 1000)
        sent.append(audio)

    speaker = CallSpeaker(lambda _: None, lambda _: None, record)
    free = 0.0

    async def hear() -> None:
        nonlocal free
        while True:
            await speaker.recv()
            audio = sent.pop(0)
            free = max(free, loop.time())
            played.add(free, samples_from_bytes(audio, SampleLayout.S16))
            free += PACKET_SEC

    hearing = asyncio.create_task(hear())
    for turn in range(TURNS):
        spoken = noise(4000 + turn, 1.0)
        user.add(loop.time(), spoken)
        data = as_pcm16(spoken)
        for start in range(0, len(data), PACKET_BYTES):
            await asyncio.sleep(PACKET_SEC)
            recording.sound(data[start : start + PACKET_BYTES], TRACK, by_user=True)
        await asyncio.sleep(0.317)
        speaker.say(f"req_{turn}", as_pcm16(noise(turn, 5.0)))
        speaker.finish(f"req_{turn}")
        await asyncio.sleep(3.113 if turn < TURNS - 1 else 5.1)
        speaker.clear()
        for _ in range(4 if turn < TURNS - 1 else 0):
            await asyncio.sleep(24.0)
    hearing.cancel()
    speaker.stop()
    recording.end()
    await asyncio.to_thread(recorder.close)
    left, right, rate = tracks(only_call(tmp_path / "calls"))
    assert len(right) > 490 * rate
    for truth, track in ((user, left), (played, right)):
        offsets = truth.offsets_ms(track, rate)
        print(f"offsets {min(offsets):.2f} to {max(offsets):.2f} ms of {len(offsets)}")
        assert max(map(abs, offsets)) < 20
        assert truth.strays(track, rate) == []


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_real_call_has_both_sides_its_turns_and_its_events(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    async with live_server(NoiseEngine(1.0), record=folder) as server:
        async with webrtc_call(server) as caller:
            content = [{"type": "input_text", "text": "Tell me a story."}]
            caller.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            caller.send("response.create")
            await caller.until("output_audio_buffer.stopped")
            (done,) = caller.seen("response.done")
        await server.until(lambda: any(b'"event":"end"' in one.read_bytes() for one in recordings(folder)))
    call = told(folder)
    assert call["kind"] == "webrtc"
    [turn] = call["turns"]
    assert turn["request_id"] == "req_" + done["response"]["id"].removeprefix("resp_")
    assert (turn["user"]["text"], turn["answer"]["text"]) == ("Tell me a story.", "This is noise 1.")
    # The caller hangs up as it is told the end, at most 40 ms before the last packet would have been heard.
    assert turn["answer"]["end_ms"] - turn["answer"]["start_ms"] > 940
    _, right, rate = tracks(only_call(folder))
    start = int(turn["answer"]["start_ms"] * rate / 1000)
    assert not right[: start - 1].any()
    wanted = samples_from_bytes(as_pcm16(noise(1, 1.0)), SampleLayout.S16)
    heard, wanted = right[right != 0], wanted[wanted != 0]  # on a machine that has no time, there are pauses
    assert heard[: RATE - 960] == pytest.approx(wanted[: RATE - 960], abs=0.001)
    kinds = {entry.get("frame", {}).get("type") for entry in call["events"]}
    assert {"session.created", "response.create", "response.done"} <= kinds
