"""Scripts that are no recordings: played to a server, and their answers read with their times."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import orjson
import pytest
from support.live_server import LiveServer, live_server

from omni_ws.caller.answers import NativeReader, RealtimeReader, ResponseReader, SessionReader
from omni_ws.caller.script import (
    AT_ONCE,
    HttpCall,
    Target,
    WebSocketCall,
    beside,
    speech_of,
    spoken,
)
from omni_ws.client.audio import Pcm16
from omni_ws.wire.recording import InputEndedLine, ReceivedLine, RecordedLine, RequestedLine

RATE = 24_000
NATIVE = "/v1/streaming_input"
REALTIME = "/v1/realtime?model=any"
CONFIG = {
    NATIVE: {"type": "session_config", "input_audio": {"format": "pcm16", "sample_rate": RATE}},
    REALTIME: {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}},
}
#: What ends the input.
END = {NATIVE: [{"type": "finish"}], REALTIME: [{"type": "input_audio_buffer.commit"}, {"type": "response.create"}]}
READERS: dict[str, type[SessionReader]] = {NATIVE: NativeReader, REALTIME: RealtimeReader}


def target_of(server: LiveServer) -> Target:
    return Target.parse(f"http://127.0.0.1:{server.port}")


def tone(ms: int) -> Pcm16:
    samples = 8000 * np.sin(np.arange(ms * RATE // 1000) * 2 * np.pi * 440 / RATE)
    return Pcm16(samples.astype("<i2").tobytes(), RATE)


@pytest.mark.parametrize("path", READERS, ids=("native", "realtime"))
async def test_an_open_microphone_is_answered_with_times(path: str) -> None:
    *script, close = spoken(tone(100), orjson.dumps(CONFIG[path]).decode(), target=path)
    script += [ReceivedLine(at=100, connection=0, text=orjson.dumps(frame).decode()) for frame in END[path]]
    async with live_server() as server:
        call = WebSocketCall(script, target_of(server), READERS[path], speed=AT_ONCE)
        found = await call.run(until=lambda now: any(answer.final_at is not None for answer in now.answers))
    (answer,) = found.answers
    assert (found.errors, found.ends) == ([], ["client"])
    assert answer.finish_reason == {NATIVE: "stop", REALTIME: "completed"}[path]
    assert len(call.sent) == len(script) - 1
    assert call.sent == sorted(call.sent)
    times = [call.sent[0], answer.asked_at, answer.first_audio_at, answer.final_at]
    assert times == sorted(time for time in times if time is not None)
    assert close.at == 100


async def test_a_script_ends_early_where_it_is_told_to() -> None:
    script = spoken(tone(100), orjson.dumps(CONFIG[NATIVE]).decode(), target=NATIVE)
    async with live_server() as server:
        call = WebSocketCall(script, target_of(server), NativeReader, speed=AT_ONCE)
        found = await call.run(until=lambda now: True)
    assert (call.sent, found.answers) == ([], [])


async def test_a_request_is_a_script() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": "one two"}], "stream": True}).decode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    script: list[RecordedLine] = [
        RequestedLine(at=0, connection=0, method="POST", target="/v1/chat/completions", headers=headers),
        ReceivedLine(at=0, connection=0, text=body[:10]),
        ReceivedLine(at=1, connection=0, text=body[10:]),
        InputEndedLine(at=1, connection=0),
    ]
    async with live_server() as server:
        found = await HttpCall(script, target_of(server)).run()
    (answer,) = found.answers
    assert (answer.text, answer.finish_reason) == ("one two", "stop")
    assert answer.latency(answer.first_text_at) is not None


@pytest.mark.parametrize("data", ["a", "ä", 7, None])
def test_audio_that_is_no_base64_is_no_audio(data: object) -> None:
    """In a recording as in a replay, whatever the server sends."""
    reader = ResponseReader()
    reader.begin(200, "text/event-stream")
    for delta in ({"audio": {"data": data}}, {"content": "one"}, {"audio": {"data": base64.b64encode(b"ab").decode()}}):
        reader.feed(1.0, b"data: " + orjson.dumps({"choices": [{"delta": delta}]}) + b"\n\n")
    reader.finish(2.0)
    assert (reader.answer.text, reader.answer.sound, reader.answer.final_at) == ("one", b"ab", 2.0)


def test_speech_lies_between_what_is_26_db_softer() -> None:
    loud, soft = tone(60).samples, bytes(RATE // 50 * 2)
    assert speech_of(Pcm16(soft + loud + soft, RATE)) == (1, 4)
    with pytest.raises(ValueError, match="no sound"):
        speech_of(Pcm16(soft, RATE))


async def test_what_goes_wrong_beside_a_block_is_raised_behind_it() -> None:
    async def fails() -> None:
        raise RuntimeError("no")

    went_on = False

    async def goes_on() -> None:
        nonlocal went_on
        async with beside(fails()) as (task,):
            await asyncio.wait([task])
            went_on = True

    with pytest.raises(RuntimeError, match="no"):
        await goes_on()
    assert went_on
