"""Telephone calls over real sockets: turns, answers, interruptions, ends."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from support import inline_workers
from support.inline_workers import inline
from support.live_server import live_server, read
from support.native_client import RawWebSocket, frame_bytes, native_client
from support.raw_http import raw_client, request, websocket_upgrade
from support.recordings import events, lines, recordings, replay
from support.telephones import FORMAT, PATH, PhoneGateway, mu_law, phone_gateway, start_fields
from websockets.exceptions import InvalidStatus
from websockets.frames import Opcode

from omni_ws.audio.pcm import decode_mu_law
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, Task, Usage, Word
from omni_ws.engine.base import AudioOutput, EngineOutput, Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.service.conversation.request import INPUT_QUEUE_BYTES
from omni_ws.service.listening import SpeechWorkers
from omni_ws.transport.telephony.media_stream import MAX_MESSAGE_BYTES, TelephonyStreams

ON: dict[str, Any] = {"telephony": {"enabled": True}}
KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open"), max_sessions=1))


def loud(ms: int) -> bytes:
    return mu_law(inline_workers.loud(ms, khz=8), rate=8000)


def quiet(ms: int) -> bytes:
    return mu_law(inline_workers.quiet(ms, khz=8), rate=8000)


def talk(seconds: int) -> Iterator[EngineOutput]:
    """Ten words a second, with their audio."""
    for second in range(seconds):
        words = tuple(
            Word(f"word{10 * second + number}", 1000 * second + 100 * number, 1000 * second + 100 * number + 100)
            for number in range(10)
        )
        yield TextOutput("".join(f"{word.text} " for word in words))
        yield AudioOutput(np.full(24_000, 0.25, np.float32), 24_000, words=words)


async def ask(gateway: PhoneGateway, ms: int = 320) -> None:
    """A turn, and the silence behind it."""
    await gateway.speak(quiet(96) + loud(ms) + quiet(640))


# answers


@pytest.mark.virtual_clock
async def test_a_turn_is_echoed() -> None:
    async with live_server(**ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start()
        await ask(gateway)
        await gateway.end_of_answer()
        said = decode_mu_law(quiet(96) + loud(320) + quiet(416))
        assert len(gateway.heard) == len(gateway.heard_samples)
        assert gateway.heard_samples[: len(said) - 100] == pytest.approx(said[: len(gateway.heard)][:-100], abs=0.02)
        names = [message["mark"]["name"].rpartition(":")[2] for message in gateway.seen("mark")]
        assert (names[0], names[-1]) == ("0", "end")
        await ask(gateway)
        await gateway.end_of_answer()
        assert not gateway.seen("clear")
        await gateway.stop()
        assert await gateway.closed() == (1000, "")


@pytest.mark.virtual_clock
async def test_audio_is_paced_by_what_was_played() -> None:
    """400 ms ahead of the telephone; a piece of the engine's goes out whole."""
    script = [AudioOutput(np.full(2400, 0.25, np.float32), 24_000) for _ in range(30)]
    async with (
        live_server(ScriptedEngine(script), **ON) as server,
        phone_gateway(inline(server), returns_marks=False) as gateway,
    ):
        await gateway.start()
        await ask(gateway)
        await gateway.until("mark")
        begin = asyncio.get_running_loop().time()
        await gateway.play(0)
        while len(gateway.heard) < 8 * 2900:
            await gateway.until("media")
        assert asyncio.get_running_loop().time() - begin == pytest.approx(2.5, abs=0.25)


@pytest.mark.virtual_clock
async def test_speech_clears_the_answer_and_nothing_unheard_follows() -> None:
    engine = ScriptedEngine(talk(20))
    async with live_server(engine, **ON) as server, phone_gateway(inline(server), returns_marks=False) as gateway:
        await gateway.start()
        await ask(gateway)
        await gateway.until("mark")  # before the first audio: the telephone is silent
        await gateway.play(0)
        await gateway.until("mark")
        while len(gateway.heard) < 8 * 1000:
            await gateway.until("media")
        await gateway.play(600)
        await gateway.speak(quiet(96) + loud(320))
        await gateway.until("clear")
        heard = len(gateway.seen("media"))
        await gateway.speak(quiet(640))
        await gateway.until("mark")  # the next answer
        assert len(gateway.seen("media")) == heard
        assert len(gateway.seen("clear")) == 1
        # Six words were played; the marks that came back for the clear do not count.
        history = engine.requests[1].history
        assert [message.role for message in history] == ["user", "assistant"]
        assert history[1].text.split() == [f"word{number}" for number in range(6)]


@pytest.mark.virtual_clock
async def test_speech_after_the_last_word_was_played_clears_nothing() -> None:
    async with live_server(**ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start()
        for _ in range(2):
            await ask(gateway)
            await gateway.end_of_answer()
        assert not gateway.seen("clear")


@pytest.mark.virtual_clock
async def test_parameters_of_the_call_configure_the_session() -> None:
    engine = ScriptedEngine(talk(1))
    async with live_server(engine, **ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start(customParameters={"instructions": "Be brief.", "voice": "alloy", "department": "sales"})
        await ask(gateway)
        await gateway.end_of_answer()
        (asked,) = engine.requests
        assert (asked.instructions, asked.input_audio.sample_rate) == ("Be brief.", 8000)


@pytest.mark.virtual_clock
async def test_a_call_may_begin_with_a_greeting() -> None:
    async with live_server(_ReadingEngine(), **ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start(customParameters={"greeting": "Good morning!"})
        await gateway.end_of_answer()
        assert len(gateway.heard) == 8 * 1000
        await ask(gateway)
        await gateway.end_of_answer()


class _ReadingEngine(EchoEngine):
    """A second of sound for every text that is read aloud."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is not Task.SPEECH:
            await super().generate(request, out)
            return
        out.write(AudioOutput(np.full(8000, 0.25, np.float32), 8000))
        out.write(Finished(FinishReason.STOP, Usage()))


@pytest.mark.virtual_clock
async def test_other_tracks_and_marks_are_ignored() -> None:
    async with live_server(**ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start(tracks=["inbound", "outbound"])
        await gateway.mark("nobody's")
        await gateway.media(b"")
        await gateway.media(loud(2000), track="outbound")
        await ask(gateway)
        await gateway.end_of_answer()
        assert len(gateway.heard) < 8 * 1000


async def press(gateway: PhoneGateway, keys: str) -> None:
    for key in keys:
        await gateway.send("dtmf", dtmf={"track": "inbound_track", "digit": key})


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("pressed", "entered"),
    [("12#", ["1 2"]), ("12", ["1 2"]), ("#1x*#", ["1 *"]), ("7" * 33, ["7 " * 31 + "7", "7"])],
)
async def test_keys_are_a_turn(pressed: str, entered: list[str]) -> None:
    engine = ScriptedEngine(talk(1))
    async with live_server(engine, **ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start()
        await press(gateway, pressed)
        while len(engine.requests) < len(entered) or engine.active_requests:
            await gateway.end_of_answer()
        await press(gateway, "9#")
        await gateway.end_of_answer()
        said = [message.text for message in engine.requests[-1].history if message.role == "user"]
        assert said == [f"(On the telephone's keys: {keys})" for keys in entered]


@pytest.mark.virtual_clock
async def test_who_presses_keys_is_not_asked_whether_anybody_is_there() -> None:
    engine, idle = ScriptedEngine(talk(1)), {"idle_prompt_sec": 10, "idle_close_sec": 5}
    async with (
        live_server(engine, streaming_input=idle, **ON) as server,
        phone_gateway(inline(server)) as gateway,
    ):
        await gateway.start()
        for key in "1234567890123456":
            await press(gateway, key)
            await asyncio.sleep(1.5)
        await press(gateway, "#")
        await gateway.end_of_answer()
        assert [request.task for request in engine.requests] == [Task.CHAT]


@pytest.mark.virtual_clock
async def test_keys_interrupt_the_answer_and_a_call_that_ends_forgets_them() -> None:
    engine = ScriptedEngine(talk(20))
    async with live_server(engine, **ON) as server, phone_gateway(inline(server), returns_marks=False) as gateway:
        await gateway.start()
        await ask(gateway)
        while len(gateway.heard) < 8 * 400:
            await gateway.receive()
        await gateway.play(200)
        await press(gateway, "5#")
        await gateway.until("clear")
        await gateway.until("mark")
        history = engine.requests[1].history
        assert [message.role for message in history] == ["user", "assistant"]
        assert history[1].text.split() == ["word0", "word1"]
        await press(gateway, "6")
        await gateway.stop()
        await gateway.closed()
    assert len(engine.requests) == 2


@pytest.mark.virtual_clock
async def test_numbers_may_be_numbers_or_missing() -> None:
    async with live_server(**ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start(mediaFormat={**FORMAT, "sampleRate": "8000"}, accountSid="x", unknown={})
        await gateway.media(quiet(96), chunk=1, timestamp=0)
        payload = base64.b64encode(loud(320) + quiet(640)).decode()
        await gateway.connection.send(f'{{"event":"media","media":{{"payload":"{payload}"}}}}')
        await gateway.end_of_answer()


@pytest.mark.virtual_clock
async def test_a_compressed_connection_loses_nothing_behind_its_start() -> None:
    fields = {**ON, "streaming_input": {"permessage_deflate": True}}
    async with live_server(**fields) as server, phone_gateway(inline(server), compression="deflate") as gateway:
        await gateway.start()
        await ask(gateway)
        await gateway.end_of_answer()
        assert gateway.connection.protocol.extensions


async def test_what_is_behind_a_start_belongs_to_the_call() -> None:
    """Both in one packet, and compressed, which the library takes apart without a break."""
    async with (
        live_server(**ON, streaming_input={"permessage_deflate": True}) as server,
        phone_gateway(server, compression="deflate") as gateway,
    ):
        start = orjson.dumps({"event": "start", "start": start_fields()})
        for message in (start, start):
            gateway.connection.protocol.send_text(message)
        gateway.connection.send_data()
        assert await gateway.closed() == (1008, "the stream has already started")


# what is refused


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"mediaFormat": {**FORMAT, "encoding": "audio/x-alaw"}}, 1003, "audio/x-mulaw"),
        ({"mediaFormat": {**FORMAT, "sampleRate": 16000}}, 1003, "8000 Hz"),
        ({"mediaFormat": {**FORMAT, "channels": 2}}, 1003, "one channel"),
        ({"mediaFormat": None}, 1008, "mediaFormat"),
        ({"streamSid": 5}, 1008, "streamSid"),
        ({"tracks": ["outbound"]}, 1008, "inbound"),
        ({"customParameters": {"voice": "nobody"}}, 1008, "voice"),
    ],
)
async def test_streams_that_cannot_start(fields: dict[str, Any], code: int, reason: str) -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start(**fields)
        closed = await gateway.closed()
        assert closed[0] == code
        assert reason in closed[1]
        assert asyncio.get_running_loop().time() < 1


WRONG_MESSAGES: list[tuple[str | bytes, int]] = [
    ("hello", 1007),
    ("[]", 1008),
    ("{}", 1008),
    ('{"event":"hello"}', 1008),
    ('{"event":"media"}', 1008),
    ('{"event":"mark","mark":{}}', 1008),
    ('{"event":"start"}', 1008),
    ('{"event":"media","media":{"payload":"?"}}', 1008),
    ('{"event":"media","media":{"payload":"AAA"}}', 1008),
    (b"{}", 1003),
]


@pytest.mark.parametrize("started", [False, True])
async def test_messages_that_are_wrong(started: bool) -> None:
    async with live_server(**ON) as server:
        for message, code in WRONG_MESSAGES:
            async with phone_gateway(server) as gateway:
                await (gateway.start() if started else gateway.connected())
                await gateway.connection.send(message)
                assert (await gateway.closed())[0] == code, message


async def test_text_that_is_not_utf_8() -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start()
        await gateway.connection.send(b'{"event":"\xff"}', text=True)
        assert (await gateway.closed())[0] == 1007


@pytest.mark.parametrize("event", ["media", "mark", "dtmf", "stop", "connected"])
async def test_nothing_but_connected_comes_before_start(event: str) -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.connected()
        await gateway.send(event, media={"payload": ""}, mark={"name": "x"})
        assert await gateway.closed() == (1008, "the first messages must be connected and start")


async def test_start_alone_is_enough() -> None:
    async with live_server(**ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.connection.send(
            '{"event":"start","start":{"streamSid":"MZ0000000000000000000000000000test","mediaFormat":'
            '{"encoding":"audio/x-mulaw","sampleRate":8000}}}'
        )
        await ask(gateway)
        await gateway.end_of_answer()


@pytest.mark.parametrize("event", ["start", "connected"])
async def test_a_stream_starts_once(event: str) -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start()
        if event == "start":
            await gateway.send("start", start={"streamSid": "other", "mediaFormat": FORMAT})
        else:
            await gateway.connected()
        assert await gateway.closed() == (1008, "the stream has already started")


@pytest.mark.parametrize("chunk", ["4", "5"])
async def test_chunks_count_up(chunk: str) -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start()
        await gateway.media(quiet(20), chunk="5")
        await gateway.media(quiet(20), chunk=chunk)
        assert await gateway.closed() == (1008, "media.chunk must increase")


async def test_the_largest_message_and_one_more() -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start()
        message = '{"event":"dtmf","x":"'
        message += "x" * (MAX_MESSAGE_BYTES - len(message) - 2) + '"}'
        await gateway.connection.send(message)
        pong = await gateway.connection.ping()
        await pong
        await gateway.connection.send(message + " ")
        assert (await gateway.closed())[0] == 1009


@pytest.mark.virtual_clock
async def test_a_stream_that_does_not_start() -> None:
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.connected()
        assert await gateway.closed() == (4408, "no start message within 10 seconds")
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.5)


@pytest.mark.virtual_clock
async def test_a_call_without_media_times_out() -> None:
    async with (
        live_server(**ON, streaming_input={"ping_interval_sec": 0}) as server,
        phone_gateway(server) as gateway,
    ):
        await gateway.start()
        assert (await gateway.closed())[0] == 4408
        assert asyncio.get_running_loop().time() == pytest.approx(300, abs=1)


@pytest.mark.virtual_clock
async def test_without_the_detector_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechWorkers, "available", False)
    async with live_server(**ON) as server, phone_gateway(server) as gateway:
        await gateway.start()
        assert await gateway.closed() == (1008, "turn detection is not supported here")


# who may call


async def test_it_is_not_there_unless_it_is_turned_on() -> None:
    async with live_server() as server:
        with pytest.raises(InvalidStatus) as refused:
            async with phone_gateway(server):
                pass
        assert refused.value.response.status_code == 404
        async with raw_client(server.port) as client:
            await client.send(request("GET", PATH))
            assert (await client.response()).status == 404


async def test_the_path_without_an_upgrade() -> None:
    async with live_server(**ON) as server, raw_client(server.port) as client:
        await client.send(request("GET", PATH))
        assert (await client.response()).status == 426


async def test_a_key_in_the_handshake_or_in_the_parameters() -> None:
    async with (
        live_server(keys=KEYS, **ON) as server,
        phone_gateway(server, additional_headers={"Authorization": "Bearer sesame"}) as gateway,
    ):
        await gateway.start(customParameters={"api_key": "ignored"})
        await server.until(lambda: server.sessions == 1)
        async with phone_gateway(server) as gateway:
            await gateway.start(customParameters={"api_key": "open"})
            await server.until(lambda: server.sessions == 1)
            async with phone_gateway(server) as second:  # one more than the key may have
                await second.start(customParameters={"api_key": "open"})
                assert (await second.closed())[0] == 4429


@pytest.mark.parametrize("parameters", [{}, {"api_key": ""}, {"api_key": "wrong"}, {"api_key": "ключ"}])
async def test_a_stream_without_a_key_is_refused_at_its_start(parameters: dict[str, str]) -> None:
    async with live_server(keys=KEYS, **ON) as server, phone_gateway(server) as gateway:
        await gateway.start(customParameters=parameters)
        assert (await gateway.closed())[0] == 1008
        assert server.sessions == 0


@pytest.mark.parametrize(
    "options",
    [{"additional_headers": {"Authorization": "Bearer wrong"}}, {"subprotocols": ["omni-api-key.wrong"]}],
)
async def test_a_wrong_key_is_refused_in_the_handshake(options: dict[str, Any]) -> None:
    async with live_server(keys=KEYS, **ON) as server:
        with pytest.raises(InvalidStatus) as refused:
            async with phone_gateway(server, **options):
                pass
        assert refused.value.response.status_code == 401


async def test_foreign_pages_are_refused() -> None:
    async with live_server(**ON) as server:
        for name in ("Origin", "Host"):
            with pytest.raises(InvalidStatus) as refused:
                async with phone_gateway(
                    server, additional_headers={name: "http://evil.example"[7 * (name == "Host") :]}
                ):
                    pass
            assert refused.value.response.status_code in (400, 403)


@pytest.mark.virtual_clock
async def test_input_is_held_to_the_pace_of_its_key() -> None:
    keys = (ApiKey(name="slow", key_sha256=digest("slow"), input_bytes_per_sec=20_000),)
    async with live_server(keys=keys, **ON) as server, phone_gateway(inline(server)) as gateway:
        await gateway.start(customParameters={"api_key": "slow"})
        await server.until(lambda: server.sessions == 1, "a call, whose key is known")
        for _ in range(6):
            await gateway.speak(quiet(960))
        await ask(gateway)
        await gateway.end_of_answer()
        assert asyncio.get_running_loop().time() > 1


# ends


async def test_a_caller_who_hangs_up_leaves_nothing() -> None:
    async with (
        live_server(EchoEngine(), **ON) as server,
        phone_gateway(inline(server)) as gateway,
    ):
        await gateway.start()
        await gateway.speak(quiet(96) + loud(640))
        await server.until(lambda: server.engine.active_requests == 1)
        gateway.connection.transport.abort()
        await server.until(lambda: server.sessions == 0)
        async with phone_gateway(server) as gateway:
            gateway.connection.transport.abort()
        (front_end,) = (one for one in server.app.front_ends if isinstance(one, TelephonyStreams))
        await server.until(lambda: not front_end._openings)


@pytest.mark.virtual_clock
async def test_draining_lets_the_answer_be_heard() -> None:
    engine = ScriptedEngine(talk(3))
    async with (
        live_server(engine, still_answers=False, **ON) as server,
        phone_gateway(inline(server)) as gateway,
        phone_gateway(server) as waiting,
    ):
        await gateway.start()
        await ask(gateway)
        await gateway.until("media")
        draining = asyncio.create_task(server.running.drain(60))
        await gateway.end_of_answer()
        assert len(gateway.heard) == 8 * 3000
        assert (await gateway.closed())[0] == 1012
        assert (await waiting.closed())[0] == 1012
        await draining


@pytest.mark.virtual_clock
async def test_draining_waits_for_the_last_mark_but_not_for_ever() -> None:
    engine = ScriptedEngine(talk(1))
    async with (
        live_server(engine, still_answers=False, **ON) as server,
        phone_gateway(inline(server), returns_marks=False) as gateway,
    ):
        await gateway.start()
        await ask(gateway)
        await gateway.until("media")
        draining = asyncio.create_task(server.running.drain(60))
        await gateway.end_of_answer()
        answered = asyncio.get_running_loop().time()
        assert (await gateway.closed())[0] == 1012
        assert asyncio.get_running_loop().time() - answered == pytest.approx(1.4, abs=0.2)
        await draining


@pytest.mark.virtual_clock
async def test_a_server_that_ends_silences_its_answers() -> None:
    async with (
        live_server(ScriptedEngine(talk(20)), still_answers=False, **ON) as server,
        phone_gateway(inline(server), returns_marks=False) as gateway,
    ):
        await gateway.start()
        await ask(gateway)
        await gateway.until("media")
        server.app.end_all(ShuttingDown("the server is shutting down"))
        await gateway.until("clear")
        assert (await gateway.closed())[0] == 1012


# pressure


class _PatientEngine(EchoEngine):
    """Takes no input before ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        await self.gate.wait()
        await super().generate(request, out)


@pytest.mark.slow
@pytest.mark.virtual_clock
@pytest.mark.parametrize("drained", [False, True])
async def test_input_waits_for_the_engine(drained: bool) -> None:
    engine = _PatientEngine()
    async with (
        live_server(engine, still_answers=not drained, streaming_input={"max_lead_ms": 10_000_000}, **ON) as server,
        phone_gateway(inline(server)) as gateway,
    ):
        await gateway.start()
        talking = asyncio.create_task(gateway.speak(quiet(96) + loud(800_000) + quiet(640), size=8000))
        await server.until(lambda: server.held_bytes >= INPUT_QUEUE_BYTES and not server.connections[0].is_reading)
        assert server.held_bytes < 3 * INPUT_QUEUE_BYTES  # with what the history keeps
        if drained:
            server.app.end_all(ShuttingDown("the server is shutting down"))
            begin = asyncio.get_running_loop().time()
            assert (await gateway.closed())[0] == 1012
            assert asyncio.get_running_loop().time() - begin < 1
            await asyncio.gather(talking, return_exceptions=True)
            return
        engine.gate.set()
        await talking
        await gateway.end_of_answer()
        assert len(gateway.heard) > 8 * 800_000


@pytest.mark.virtual_clock
async def test_a_gateway_that_does_not_read_is_closed() -> None:
    audio = AudioOutput(np.full(8000, 0.25, np.float32), 8000)
    limits = {"max_lead_ms": 10_000_000, "max_output_bytes": 100_000, "write_timeout_sec": 5}
    async with (
        live_server(ScriptedEngine([audio] * 1500), streaming_input=limits, **ON) as server,
        phone_gateway(inline(server), returns_marks=False) as gateway,
    ):
        await gateway.start()
        await ask(gateway)
        await server.until(lambda: server.sessions == 1)
        (conversation,), (connection,) = server.app.sessions.conversations, server.connections
        await server.until(lambda: conversation.outbox.full)
        begin = asyncio.get_running_loop().time()
        await connection.wait_closed()
        assert asyncio.get_running_loop().time() - begin == pytest.approx(10, abs=1)  # with the closing handshake's 5


@pytest.mark.virtual_clock
async def test_a_gateway_that_vanished_is_noticed() -> None:
    async with live_server(**ON) as server, raw_client(server.port) as client:
        await client.send(websocket_upgrade(PATH))
        await client.head()
        start = {"event": "start", "start": start_fields()}
        await client.send(frame_bytes(Opcode.TEXT, orjson.dumps(start)))
        assert await RawWebSocket(client).close_code() == 1011
        assert asyncio.get_running_loop().time() == pytest.approx(40, abs=1)


# accounts


@pytest.mark.virtual_clock
async def test_calls_have_an_origin_of_their_own() -> None:
    async with (
        live_server(**ON) as server,
        phone_gateway(inline(server)) as gateway,
    ):
        await gateway.start()
        await gateway.speak(quiet(96))
        await server.until(lambda: read(server).value("input_chunks_total") == 5)  # counted before any request
        await ask(gateway)
        await gateway.end_of_answer()
        await gateway.stop()
        await gateway.closed()
        await server.until(lambda: server.sessions == 0)
        found = read(server)
        assert {"origin": "telephony"} in found.labels("sessions_opened_total")
        assert {"origin": "telephony"} in found.labels("session_duration_seconds_count")


async def test_calls_are_recorded_without_their_key(tmp_path: Any) -> None:
    folder = tmp_path / "recordings"
    async with (
        live_server(keys=KEYS, record=folder, **ON) as server,
        phone_gateway(inline(server)) as gateway,
    ):
        await gateway.start(customParameters={"api_key": "sesame"})
        await ask(gateway)
        await gateway.end_of_answer()
        await gateway.stop()
        await gateway.closed()
        async with native_client(server, additional_headers={"Authorization": "Bearer sesame"}):
            pass
    (file,) = (one for one in recordings(folder) if lines(one)[0]["kind"] == "telephony")
    assert lines(file)[0]["key"] == "one"
    assert [line["target"] for line in events(file, "open")] == [PATH]
    assert "sesame" not in file.read_text()
    assert len(events(file, "in")) > 20
    assert len(events(file, "out")) > 3
    ended = await replay(file)
    assert ended.status != 0
    assert "a telephone call" in ended.errors
