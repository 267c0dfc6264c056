"""Files in the input of a session, and where a cancel cuts it, through a socket."""

from __future__ import annotations

import asyncio

import numpy as np
from support.live_server import live_server
from support.native_client import native_client

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine


def wav(length_ms: int) -> bytes:
    pcm = (np.arange(length_ms * 16) % 999).astype("<i2").tobytes()
    return wav_header(sample_rate=16_000, channels=1, data_bytes=len(pcm)) + pcm


async def test_each_half_second_is_a_file_of_its_own() -> None:
    async with live_server() as server, native_client(server) as client:
        for number in range(6):
            await client.chunk(wav(500), modality="audio", format="audio/wav", end=number == 5)
        answer = await client.answer()
        assert answer.errors == []
        assert answer.final["usage"]["input_audio_ms"] == 3_000


async def test_other_bytes_behind_a_file_are_told_once_and_the_request_goes_on() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk(wav(500), modality="audio", format="audio/wav")
        for _ in range(2):
            await client.chunk(b"\x01 no audio", modality="audio", format="audio/wav")
        await client.chunk(wav(500), modality="audio", format="audio/wav", end=True)
        answer = await client.answer()
        (error,) = answer.errors
        assert (error["code"], error["sequence_id"], error["param"]) == ("unsupported_format", 1, "payload")
        assert answer.final["finish_reason"] == "stop"
        assert answer.final["usage"]["input_audio_ms"] == 1_000


async def test_the_first_of_two_inputs_is_whole() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(input_audio={"format": "wav"}, start_policy="on_end_only")
        for _ in range(2):
            await client.binary(wav(700), end=True)
            assert (await client.answer()).final["usage"]["input_audio_ms"] == 700


async def test_a_bare_cancel_stops_the_answer_and_the_open_input_and_leaves_what_waits() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([TextOutput("a"), gate.wait, TextOutput("done")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.say("first")
        await client.until("response_started")
        await client.say("second")
        await client.chunk("third, op")
        await client.send("cancel")
        await client.send("ping", t="after")
        gate.set()
        finals: list[str] = []
        while len(finals) < 3:
            frame = await client.receive()
            if frame.get("final"):
                finals.append(frame["finish_reason"])
            if frame["type"] == "pong":
                assert finals == ["cancelled", "cancelled"]
        assert finals[2] == "stop"


async def test_a_cancel_that_names_another_request_leaves_the_input_alone() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([TextOutput("a"), gate.wait, TextOutput("done")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.say("first")
        started = await client.until("response_started")
        await client.chunk("sec")
        await client.chunk("d", number=3)  # behind a gap
        await client.until("output_chunk")
        await client.send("cancel", request_id=started["request_id"])
        assert (await client.answer()).final["finish_reason"] == "cancelled"
        gate.set()
        await client.chunk("on", number=2)
        await client.chunk(end=True, number=4)
        answer = await client.answer()
        assert answer.final["finish_reason"] == "stop"
        assert client.seen("error") == []
        await client.say("third")
        await client.answer()
        heard = [message.text for message in engine.requests[-1].history if message.role == "user"]
        assert heard == ["first", "second"]


async def test_half_a_sample_before_a_cancel_is_dropped() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(output_audio={"sample_rate": 16_000}, start_policy="on_first_chunk")
        await client.binary(bytes(641))
        await client.send("cancel")
        await client.answer()
        tone = np.arange(-800, 800, dtype="<i2").tobytes()
        await client.binary(tone, Modality.AUDIO, end=True)
        assert (await client.answer()).audio == tone
