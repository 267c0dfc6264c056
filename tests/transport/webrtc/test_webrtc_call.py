"""Calls over WebRTC, with aiortc as the caller: real ICE, DTLS, SRTP and SCTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from aiortc.rtcsctptransport import SCTP_DATA_FIRST_FRAG, SCTP_DATA_UNORDERED, DataChunk, tsn_plus_one
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC, until
from support.scripted_engines import HearingEngine
from support.speech_clips import WORDS, at_24k, clip_bytes, silence
from support.webrtc_client import WebrtcCaller, lossy, post_offer, webrtc_call

from omni_ws.audio import speech_watch
from omni_ws.audio.pcm import pcm16_from_samples
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import AudioEncoding
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.engine.threads import Work
from omni_ws.scenarios.speech import word_errors
from omni_ws.transport.native.connection import FrameReceiver, Pause
from omni_ws.transport.webrtc.call import MAX_FRAGMENTS, MAX_MESSAGE_BYTES, MAX_UNREAD_BYTES, CallChannel
from omni_ws.transport.webrtc.endpoint import WebrtcCalls
from omni_ws.wire.server_frames import BackchannelFrame

TONE = (0.25 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
SPOKEN = (TextOutput("Once there was a king. "), AudioOutput(TONE, 24_000))
#: From when on a sample of the answers is no silence.
LOUD = 1000

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


async def _never() -> None:
    await asyncio.Event().wait()


def spoken(clip: str) -> bytes:
    """A clip, and the silence by which its end is found."""
    return at_24k(silence(0.3) + clip_bytes(clip) + silence(1.0))


def loud_ms(caller: WebrtcCaller) -> float:
    """How much of what the caller heard is no silence."""
    samples = np.concatenate([np.zeros(1, np.int16), *caller.heard])
    return float((np.abs(samples.astype(np.int32)) > LOUD).sum()) / 48


def packets(server: LiveServer, outcome: str) -> float:
    found = server.app.sessions.metrics.registry.get_sample_value("omni_ws_webrtc_packets_total", {"outcome": outcome})
    return found or 0


async def ask(caller: WebrtcCaller) -> None:
    """A written turn, which asks for an answer."""
    content = [{"type": "input_text", "text": "Tell me a story."}]
    caller.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    caller.send("response.create")


async def test_an_answer_is_heard_and_not_sent_as_events() -> None:
    async with live_server(ScriptedEngine(SPOKEN)) as server, webrtc_call(server) as caller:
        session = await caller.update(audio={"output": {"format": {"type": "audio/pcmu"}}})
        assert session["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        (warning,) = caller.seen("session.updated")[-1]["warnings"]
        assert (warning["code"], warning["param"]) == ("not_in_effect", "session.audio.output.format")
        await ask(caller)
        stopped = await caller.until("output_audio_buffer.stopped")
        (started,) = caller.seen("output_audio_buffer.started")
        (done,) = caller.seen("response.done")
        assert started["response_id"] == stopped["response_id"] == done["response"]["id"]
        assert not caller.seen("response.output_audio.delta")
        assert caller.seen("response.output_audio_transcript.delta")
    # What aiortc plays: all but the four packets that it keeps back, less a sine's quiet moments.
    assert 750 < loud_ms(caller) < 1000


async def test_a_spoken_turn_of_which_packets_are_lost() -> None:
    engine = EmbeddedEngine(voice=VoiceChoice.ESPEAK)
    async with live_server(engine) as server, webrtc_call(server) as caller:
        lossy(caller, 0.05, random.Random(7))
        await caller.update(audio={"input": {"transcription": {"model": "any"}}})
        caller.microphone.say(spoken("goforward"))
        await caller.until("input_audio_buffer.speech_stopped")
        heard = await caller.until("conversation.item.input_audio_transcription.completed")
        assert word_errors(WORDS["goforward"], heard["transcript"].strip()).wrong <= 1
        await caller.until("output_audio_buffer.stopped")
        assert packets(server, "on_time") > 100
        assert packets(server, "lost") > 0
        concealed = server.app.sessions.metrics.registry.get_sample_value("omni_ws_webrtc_concealed_seconds_total")
        assert concealed == pytest.approx(0.02 * packets(server, "lost"))
        done = (await caller.until("response.done"))["response"] if not caller.seen("response.done") else None
        times = (done or caller.seen("response.done")[0]["response"])["times"]
        # The server plays: it knows when the first packet went out.
        whole = server.app.sessions.metrics.registry.get_sample_value(
            "omni_ws_mouth_to_ear_seconds_sum", {"origin": "webrtc"}
        )
        assert whole is not None
        assert times["speech_ended"] == 0
        assert times["turn_decided"] < times["first_audio_sent"] <= whole * 1000 + 1
    assert loud_ms(caller) > 300


async def test_speech_silences_the_answer() -> None:
    endless = (*SPOKEN, *SPOKEN, *SPOKEN, *SPOKEN, lambda: _never())
    async with live_server(ScriptedEngine(endless)) as server, webrtc_call(server) as caller:
        await ask(caller)
        started = await caller.until("output_audio_buffer.started")
        caller.microphone.say(spoken("goforward"))
        cleared = await caller.until("output_audio_buffer.cleared")
        assert cleared["response_id"] == started["response_id"]
        done = await caller.until("response.done")
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        before = loud_ms(caller)
        await caller.until("input_audio_buffer.speech_stopped")
        assert not caller.seen("output_audio_buffer.stopped")
        assert loud_ms(caller) - before < 200


async def test_the_answer_is_lowered_until_it_is_known_that_nobody_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.95)
    story = (TextOutput("A story."), *[AudioOutput(TONE, 24_000)] * 6)
    engine = HearingEngine(story, heard=[TranscriptOutput("Mm-hm."), TextOutput("What?")])
    async with live_server(engine) as server, webrtc_call(server) as caller:
        await caller.update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}})
        await ask(caller)
        await caller.until("output_audio_buffer.started")
        short = clip_bytes("cards_001")[: 600 * 32]  # as long as an acknowledgement
        caller.microphone.say(at_24k(silence(0.3) + short + silence(1.0)))
        await caller.until("output_audio_buffer.stopped")
        assert not caller.seen("input_audio_buffer.speech_started")
        assert not caller.seen("output_audio_buffer.cleared")
        (done,) = caller.seen("response.done")
        assert done["response"]["status"] == "completed"
    heard = np.concatenate(caller.heard).astype(float)
    pieces = heard[: len(heard) // 960 * 960].reshape(-1, 960)  # 20 ms
    levels = 20 * np.log10(np.maximum(1.0, np.sqrt((pieces**2).mean(axis=1))) / (8192 / np.sqrt(2)))
    lowered, full = np.flatnonzero(np.abs(levels + 15) < 1.5), np.flatnonzero(np.abs(levels) < 1.5)
    assert 10 < len(lowered) < 100
    assert full[0] < lowered[0]
    assert full[-1] > lowered[-1] + 50  # a second of it


async def test_the_server_says_mm_hm_on_the_track_and_tells_no_event_of_it() -> None:
    async with live_server() as server, webrtc_call(server) as caller:
        [conversation] = server.app.sessions.conversations
        sound = pcm16_from_samples(TONE[:9600]).tobytes()
        conversation.outbox.put_nowait(
            BackchannelFrame(
                turn_id="turn_1", text="Mm-hm.", payload=sound, format=AudioEncoding.PCM16, sample_rate=24_000
            )
        )
        await until(lambda: loud_ms(caller) >= 200)
        caller.send("input_audio_buffer.clear")
        await caller.until("input_audio_buffer.cleared")
        names = {event["type"] for event in caller.received}
        assert not {name for name in names if "backchannel" in name or name.startswith("output_audio_buffer")}


async def test_the_caller_clears_what_was_not_heard() -> None:
    engine = ScriptedEngine((*SPOKEN, *SPOKEN, lambda: _never()))
    async with live_server(engine) as server, webrtc_call(server) as caller:
        await ask(caller)
        await caller.until("output_audio_buffer.started")
        caller.send("output_audio_buffer.clear")
        await caller.until("output_audio_buffer.cleared")
        done = await caller.until("response.done")
        assert done["response"]["status_details"]["reason"] == "client_cancelled"


async def test_the_caller_truncates_what_is_still_being_said() -> None:
    engine = ScriptedEngine(SPOKEN * 5)
    async with live_server(engine) as server, webrtc_call(server) as caller:
        await ask(caller)
        await caller.until("output_audio_buffer.started")
        item_id = caller.seen("response.output_item.added")[0]["item"]["id"]
        caller.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=100)
        done = await caller.until("response.done")
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
        await caller.until("output_audio_buffer.cleared")
        await ask(caller)  # the call goes on
        assert (await caller.until("response.done"))["response"]["status"] == "completed"
        heard = [message.text for message in engine.requests[-1].history if message.role == "assistant"]
        assert heard in ([], ["Once"])


async def test_a_draining_server_lets_the_answer_be_heard() -> None:
    engine = ScriptedEngine(SPOKEN * 2)
    async with live_server(engine, still_answers=False) as server, webrtc_call(server) as caller:
        await ask(caller)
        await caller.until("output_audio_buffer.started")
        draining = asyncio.create_task(server.running.drain(60))
        assert (await caller.until("error"))["error"]["code"] == "shutting_down"
        assert caller.seen("output_audio_buffer.stopped")
        await draining


async def test_hanging_up_from_either_end() -> None:
    async with live_server(ScriptedEngine((*SPOKEN, lambda: _never()))) as server:
        async with webrtc_call(server) as caller:
            await ask(caller)
            await caller.until("output_audio_buffer.started")
        await server.check_empty()
        async with (
            webrtc_call(server) as caller,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as http,
        ):
            unknown = await http.post("/v1/realtime/calls/rtc_1/hangup")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
            assert (await http.post(f"{caller.location}/hangup")).status_code == 200
            await caller.ended()
            await server.check_empty()


def clear_of(size: int) -> str:
    """An event of so many bytes."""
    return '{"type":"input_audio_buffer.clear"}'.ljust(size)


@pytest.mark.parametrize("past", [0, 1])
async def test_the_longest_message(past: int) -> None:
    async with live_server() as server, webrtc_call(server) as caller:
        assert f"a=max-message-size:{MAX_MESSAGE_BYTES}\r\n" in caller.peer.remoteDescription.sdp
        assert caller.peer.sctp is not None
        caller.peer.sctp._remote_max_message_size = 0  # a caller that does not keep to it
        caller.channel.send(clear_of(MAX_MESSAGE_BYTES + past))
        if not past:
            await caller.until("input_audio_buffer.cleared")
            return
        assert (await caller.until("error"))["error"]["code"] == "payload_too_large"
        await caller.ended()
        assert not caller.seen("input_audio_buffer.cleared")
        await server.check_empty()


async def test_messages_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCTP does not stop a sender while the session takes nothing."""
    attach = CallChannel.attach

    def attach_and_pause(self: CallChannel, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        attach(self, receiver, account)
        self.pause_reading(Pause.SESSION)

    monkeypatch.setattr(CallChannel, "attach", attach_and_pause)
    async with live_server() as server, webrtc_call(server) as caller:
        for _ in range(8):  # of which the last has no room, for what each takes besides its text
            caller.channel.send(clear_of(MAX_UNREAD_BYTES // 8))
        assert (await caller.until("error"))["error"]["code"] == "engine_overloaded"
        await caller.ended()
        assert not caller.seen("input_audio_buffer.cleared")
        await server.check_empty()


async def test_channels_with_other_labels_are_closed() -> None:
    async with live_server() as server, webrtc_call(server) as caller:
        closed = asyncio.Event()
        other = caller.peer.createDataChannel("other")
        other.on("close", closed.set)
        async with asyncio.timeout(PATIENCE_SEC):
            await closed.wait()
        caller.send("input_audio_buffer.clear")
        await caller.until("input_audio_buffer.cleared")


async def test_a_caller_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.transport.webrtc.call.SETUP_TIMEOUT_SEC", 0.1)
    async with live_server() as server:
        caller = WebrtcCaller()
        assert (await post_offer(server, await caller.offer())).status_code == 201
        await server.check_empty()
        await caller.close()


def sockets() -> int:
    return sum("socket:" in str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


def own_threads() -> int:
    """Threads, without those of the pools that all calls share."""
    pools = ("asyncio_", "uvloop_", "speech_", "listening_", *(f"{work.name.lower()}_" for work in Work))
    return sum(not thread.name.startswith(pools) for thread in threading.enumerate())


async def _disconnect(server: LiveServer, moment: int) -> None:
    caller = WebrtcCaller()
    try:
        answer = await post_offer(server, await caller.offer())
        if moment:
            await caller.accept(answer)
        if moment > 1:
            await caller.until("session.created")
        if moment > 2:
            await ask(caller)
            await caller.until("output_audio_buffer.started")
    finally:
        await caller.close()


async def test_random_disconnects_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit_setup(seconds: float) -> None:
        monkeypatch.setattr("omni_ws.transport.webrtc.call.SETUP_TIMEOUT_SEC", seconds)

    moments = random.Random(1)
    async with live_server(ScriptedEngine((*SPOKEN, *SPOKEN, lambda: _never()))) as server:
        await _disconnect(server, 3)
        await server.check_empty()
        (calls,) = (one for one in server.app.front_ends if isinstance(one, WebrtcCalls))
        await server.until(lambda: not calls._calls)
        before = (sockets(), own_threads(), len(asyncio.all_tasks()))
        for _ in range(3):
            limit_setup(10.0)  # which is all that ends the calls of those who vanish before they are connected
            early, late = [0, 0, 1, 1], [2, 2, 3, 3]
            moments.shuffle(early)
            moments.shuffle(late)
            await asyncio.gather(*(_disconnect(server, moment) for moment in early))
            limit_setup(600.0)  # on a busy machine
            await asyncio.gather(*(_disconnect(server, moment) for moment in late))
        await until(lambda: not calls._calls)
        await server.check_empty()

        def left() -> tuple[int, int, int]:
            return (sockets(), own_threads(), len(asyncio.all_tasks()))

        with contextlib.suppress(AssertionError):
            await server.until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))
        assert all(now <= then for now, then in zip(left(), before, strict=True)), (left(), before)


@pytest.mark.parametrize(
    ("stream_id", "flags", "protocol", "size"),
    [(0, 0, 51, 1150), (7, 0, 53, 1150), (5, SCTP_DATA_UNORDERED, 99, 1150), (0, 0, 51, 1), (9, 0, 50, 1150)],
    ids=["text", "binary on a stream of its own", "unordered, of an unknown kind", "tiny", "control"],
)
async def test_a_message_without_end_ends_the_call(stream_id: int, flags: int, protocol: int, size: int) -> None:
    """Fragments of any stream and payload protocol; the server holds no more of them than a whole message has."""
    async with live_server() as server, webrtc_call(server) as caller:
        sctp = caller.peer.sctp
        assert sctp is not None
        most = MAX_FRAGMENTS if size == 1 else MAX_MESSAGE_BYTES // size
        over = asyncio.create_task(caller.ended())
        for number in range(2 * most):
            chunk = DataChunk(flags=flags | (0 if number else SCTP_DATA_FIRST_FRAG))
            chunk.tsn, chunk.stream_id, chunk.protocol = sctp._local_tsn, stream_id, protocol
            chunk.stream_seq = sctp._outbound_stream_seq.get(stream_id, 0)
            chunk.user_data = b"a" * size
            sctp._local_tsn = tsn_plus_one(sctp._local_tsn)
            if over.done():
                break
            try:
                await sctp._send_chunk(chunk)
            except ConnectionError:
                break  # the call has just ended
            if number % 16 == 0:
                await asyncio.sleep(0.002)  # a socket has room for so many
        await over
        await server.until(lambda: not server.sessions)
