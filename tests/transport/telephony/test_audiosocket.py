"""Telephone calls over AudioSocket, over real sockets: turns, pace, interruptions, keys, limits, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from support import inline_workers
from support.inline_workers import InlineWorkers, ScriptedJudge, inline
from support.live_server import live_server, read
from support.scripted_engines import HearingEngine
from support.telephones import CALL, SOCKET_PACKET, AsteriskCall, asterisk_call, frame

from omni_ws.audio import speech_watch
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Word
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.transport.telephony.audiosocket import MAX_AUDIO_BYTES, AudioSocketCalls

ON: dict[str, Any] = {"telephony": {"audiosocket_port": 0}}
OTHER = UUID("0b1e8e6c-3c1f-4b7c-9a55-7d3c3a5e6f01")
KEYS = (ApiKey(name="asterisk", key_sha256=digest(str(CALL)), max_sessions=1),)


loud, quiet = partial(inline_workers.loud, khz=8), partial(inline_workers.quiet, khz=8)


def talk(seconds: int) -> ScriptedEngine:
    """Ten words a second, with their audio."""
    script: list[Any] = []
    for second in range(seconds):
        starts = [1000 * second + 100 * number for number in range(10)]
        words = tuple(Word(f"word{start // 100}", start, start + 100) for start in starts)
        script += [TextOutput("".join(f"{word.text} " for word in words))]
        script += [AudioOutput(np.full(24_000, 0.25, np.float32), 24_000, words=words)]
    return ScriptedEngine(script)


async def ask(call: AsteriskCall, ms: int = 320) -> None:
    """A turn, and the silence behind it."""
    await call.speak(quiet(96) + loud(ms) + quiet(640))


# answers


@pytest.mark.virtual_clock
@pytest.mark.parametrize("cancels", [False, True])
async def test_the_operator_has_the_echo_of_answers_taken_out(cancels: bool) -> None:
    pytest.importorskip("pywebrtc_audio")
    settings = {"audiosocket_port": 0, "cancel_echo": cancels}
    async with live_server(talk(1), telephony=settings) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(400)
        [conversation] = server.app.sessions.conversations
        assert (conversation.configuration.effective.input_audio.echo == "server") is cancels
        assert (conversation.ledger.sound is not None) is cancels
        await call.send(0x00)
        await call.hung_up()


@pytest.mark.virtual_clock
async def test_a_turn_is_echoed_and_a_hang_up_ends_the_call() -> None:
    async with live_server(**ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(400)
        said = np.frombuffer(quiet(96) + loud(320), "<i2").astype(float)
        heard = np.frombuffer(call.heard, "<i2").astype(float)
        common = min(len(said), len(heard)) - 400
        assert heard[:common] == pytest.approx(said[:common], abs=700)
        await call.send(0x00)
        await call.hung_up()
        await server.check_empty()
        assert {one["origin"] for one in read(server).labels("requests_total")} == {"telephony"}


@pytest.mark.virtual_clock
async def test_an_answer_comes_in_frames_of_20_ms_in_real_time() -> None:
    async with live_server(talk(3), **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(3000)
        assert len(call.heard) == 16 * 3000
        gaps = np.diff(call.times)
        assert gaps == pytest.approx(np.full(149, 0.02), abs=0.005)


@pytest.mark.virtual_clock
async def test_speech_silences_the_answer_and_the_history_keeps_what_was_heard() -> None:
    engine = talk(20)
    async with live_server(engine, **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(1000)
        await call.speak(quiet(96) + loud(960))  # too long for an acknowledgement
        await server.until(lambda: len(engine.requests) == 2 or not server.engine.active_requests)
        await call.speak(quiet(640))
        await server.until(lambda: len(engine.requests) == 2)
        history = engine.requests[1].history
        assert [message.role for message in history] == ["user", "assistant"]
        words = history[1].text.split()
        assert words == [f"word{number}" for number in range(len(words))]
        assert 10 <= len(words) <= 12


@pytest.mark.virtual_clock
async def test_speech_silences_a_piece_that_is_longer_than_what_the_playout_holds() -> None:
    engine = ScriptedEngine([TextOutput("Once."), AudioOutput(np.full(10 * 24_000, 0.25, np.float32), 24_000)])
    async with live_server(engine, **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(1000)
        engine.script = (lambda: asyncio.Event().wait(),)
        await call.speak(quiet(96) + loud(960) + quiet(640))
        await server.until(lambda: len(engine.requests) == 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):  # before the sound of thinking
                await call.hear(1000)
        assert len(call.heard) < 16 * 1100


@pytest.mark.virtual_clock
async def test_a_call_is_greeted_and_instructed_as_configured() -> None:
    engine = talk(1)
    settings = {"audiosocket_port": 0, "audiosocket_greeting": "Hello!", "audiosocket_instructions": "Be brief."}
    async with live_server(engine, telephony=settings) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await call.hear(1000)
        await ask(call, 960)
        await call.hear(200)
        assert [request.task.value for request in engine.requests] == ["speech", "chat"]
        assert engine.requests[1].instructions == "Be brief."


# short words


def levels(call: AsteriskCall, ms: int) -> set[float]:
    """The levels of the samples of the last ``ms``, in decibels below the answer's."""
    heard = np.frombuffer(call.heard[-16 * ms :], "<i2").astype(float)
    return {round(20 * np.log10(max(1.0, level) / 8192)) for level in heard}


@pytest.mark.virtual_clock
@pytest.mark.parametrize("way", ["acknowledgement", "words", "key"])
async def test_an_answer_is_lowered_until_it_is_known_whether_the_caller_interrupts(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.95)
    second, other = (AudioOutput(np.full(24_000, level, np.float32), 24_000) for level in (0.25, 0.5))
    engine = HearingEngine([TextOutput("One."), other])
    said = "Mm-hm." if way == "acknowledgement" else "Go forward ten metres."
    engine.heard = (TranscriptOutput("Talk."), TextOutput("A story."), *[second] * 8)
    async with live_server(engine, **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(1000)
        assert levels(call, 500) == {0}
        engine.heard = (TranscriptOutput(said), TextOutput("I go."), other)
        await call.speak(quiet(96) + loud(320))
        await call.hear(200)
        assert levels(call, 100) == {-15}
        match way:
            case "acknowledgement":
                await call.speak(quiet(640))
                await call.hear(200)
                assert levels(call, 100) == {0}
                await call.hear(8000 - len(call.heard) // 16)  # all of the answer
                assert levels(call, 6000) == {0}
            case "words":
                await call.speak(loud(640) + quiet(640))
                await call.hear(500)
                assert levels(call, 300) == {6}
            case "key":
                await call.press("1#")
                await call.hear(400)
                assert levels(call, 200) == {6}


class Speaking(ScriptedEngine):
    """Reads aloud half a second at 0.25, and counts how often."""

    def __init__(self) -> None:
        super().__init__([AudioOutput(np.full(12_000, 0.25, np.float32), 24_000)])


@pytest.mark.virtual_clock
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_server_says_mm_hm_to_a_caller_who_speaks_for_long(wanted: bool) -> None:
    settings = {"audiosocket_port": 0, "backchannel": wanted}
    async with live_server(Speaking(), telephony=settings) as server:
        workers = InlineWorkers()
        workers.judge = ScriptedJudge([0.1] * 4)
        server.app.sessions.speech_workers = workers
        async with asterisk_call(server) as call:
            await call.identify()
            await call.speak(quiet(96) + loud(4200) + quiet(352))
            await asyncio.sleep(1)
            [conversation] = server.app.sessions.conversations
            turns = conversation.configuration.effective.turn_detection
            assert turns is not None
            assert (turns.type, turns.backchannel) == (("semantic_vad", True) if wanted else ("server_vad", False))
            if wanted:
                await call.hear(500)
                assert levels(call, 400) == {-12}
            else:
                assert not call.heard


# keys


@pytest.mark.virtual_clock
async def test_keys_are_a_turn_and_the_first_one_silences_the_answer() -> None:
    engine = talk(20)
    async with live_server(engine, **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(1000)
        await call.press("1")
        await server.until(lambda: server.engine.active_requests == 0)
        assert len(engine.requests) == 1
        await call.press("2#")
        await server.until(lambda: len(engine.requests) == 2)
        assert engine.requests[1].history[-1].role == "assistant"


@pytest.mark.virtual_clock
async def test_keys_join_what_the_caller_says_meanwhile() -> None:
    engine = talk(1)
    async with live_server(engine, **ON) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await call.speak(quiet(96) + loud(640))
        await call.press("42#")
        await call.speak(loud(320) + quiet(640))
        await call.hear(900)
        assert len(engine.requests) == 1


# who may call


@pytest.mark.virtual_clock
async def test_with_keys_the_uuid_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_ws")
    async with live_server(keys=KEYS, **ON) as server:
        async with asterisk_call(inline(server)) as call:
            await call.identify(OTHER)
            await call.hung_up()
        assert "this key is not known here" in caplog.text
        assert str(OTHER) not in caplog.text
        async with asterisk_call(server) as call:
            await call.identify()
            await server.until(lambda: server.sessions == 1)
            async with asterisk_call(server) as second:  # beyond ``max_sessions``
                await second.identify()
                await second.hung_up()
            await ask(call)
            await call.hear(200)


async def test_as_many_connections_as_the_server_takes() -> None:
    async with live_server(**ON, limits={"max_connections": 1}) as server, asterisk_call(server) as call:
        await call.identify()
        await server.until(lambda: server.sessions == 1)
        async with asterisk_call(server) as second:
            assert await second.receive() is None
        await call.send(0x00)
        await call.hung_up()


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"AudioSocket cannot listen on 127.0.0.1, port {port}"):
            async with live_server(telephony={"audiosocket_port": port}):
                pass


async def test_it_is_off_by_default() -> None:
    async with live_server() as server:
        assert server.front_end(AudioSocketCalls).port is None


# wrong input


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "the first frame must hold the UUID of the call"),
        (frame(0x10, bytes(SOCKET_PACKET)), "the first frame must hold the UUID of the call"),
        (frame(0x01, bytes(15)), "a frame of kind 0x01 must have 16 bytes, not 15"),
    ],
)
async def test_a_call_begins_with_its_uuid(sent: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omni_ws")
    async with live_server(**ON) as server, asterisk_call(server) as call:
        await call.write(sent)
        await call.hung_up()
        assert reason in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"\x10" + (MAX_AUDIO_BYTES + 2).to_bytes(2, "big"),
        frame(0x10, bytes(SOCKET_PACKET + 1)),
        frame(0x12, bytes(2 * SOCKET_PACKET)),
        frame(0x03, b"12"),
    ],
    ids=["a frame beyond the limit", "half a sample", "another rate", "two keys"],
)
async def test_wrong_frames_end_the_call(sent: bytes) -> None:
    async with live_server(**ON) as server, asterisk_call(server) as call:
        await call.identify()
        await server.until(lambda: server.sessions == 1)
        await call.write(sent)
        await call.hung_up()


@pytest.mark.virtual_clock
async def test_the_longest_frame_unknown_kinds_and_single_bytes() -> None:
    async with live_server(**ON) as server, asterisk_call(inline(server)) as call:
        await call.write(
            b"".join([frame(0x01, CALL.bytes), frame(0x7E, b"x" * 65_535), frame(0x7F), frame(0x01, CALL.bytes)])
        )
        await call.send(0x10, bytes(MAX_AUDIO_BYTES))
        for byte in frame(0x10, quiet(96)) + frame(0x03, b"x"):
            await call.write(bytes([byte]))
        await call.write(frame(0x7F) * 1000)
        await ask(call)
        await call.hear(400)


@pytest.mark.virtual_clock
async def test_a_connection_that_says_nothing_is_hung_up() -> None:
    async with live_server(**ON) as server, asterisk_call(server) as call:
        await call.write(b"\x01\x00\x10")
        await call.hung_up()
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.5)


@pytest.mark.virtual_clock
async def test_a_caller_who_never_reads_ends_alone() -> None:
    """What waits for it is bounded: the engine waits, and then the call ends."""
    unpaced = {"max_lead_ms": 1_000_000, "max_output_bytes": 65_536}
    async with live_server(talk(600), **ON, streaming_input=unpaced) as server:
        (listening,) = server.front_end(AudioSocketCalls)._port._server.sockets  # type: ignore[union-attr]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # which connections inherit
        async with asterisk_call(inline(server)) as call:
            call.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            call.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await call.identify()
            await ask(call)
            await asyncio.wait(server.front_end(AudioSocketCalls)._calls)
            assert 30 <= asyncio.get_running_loop().time() < 200


# the end


async def test_a_caller_who_disconnects() -> None:
    async with live_server(**ON) as server:
        async with asterisk_call(server) as call:
            await call.identify()
            await server.until(lambda: server.sessions == 1)
        await server.until(lambda: server.sessions == 0)


@pytest.mark.virtual_clock
async def test_a_draining_server_lets_an_answer_be_heard() -> None:
    async with live_server(talk(2), **ON, still_answers=False) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await ask(call)
        await call.hear(100)
        draining = asyncio.create_task(server.running.drain(30))
        async with asterisk_call(server) as late:
            await late.identify()
            await late.hung_up()
        await call.hung_up()
        assert len(call.heard) == 16 * 2000
        await draining


async def test_the_end_of_the_server_hangs_up() -> None:
    async with live_server(**ON, still_answers=False) as server, asterisk_call(server) as call:
        await call.identify()
        await server.until(lambda: server.sessions == 1)
        async with asterisk_call(server) as silent:
            await server.until(lambda: len(server.front_end(AudioSocketCalls)._calls) == 2)
            server.app.end_all(ShuttingDown("the server is shutting down"))
            await call.hung_up()
            await silent.hung_up()
