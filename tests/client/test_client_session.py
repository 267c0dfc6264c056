"""ClientSession against a scripted server."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from itertools import pairwise

import pytest
from msgspec.structs import replace
from support.scripted_server import Peer, Script, scripted_server
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from omni_ws.client import (
    AudioChunk,
    ClientLimits,
    ClientSession,
    Closing,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    Event,
    Final,
    InputAck,
    Reconnected,
    ResponseStarted,
    ServerError,
    connect,
)
from omni_ws.client.connection import Endpoint, resume_session
from omni_ws.core.chunks import FinishReason, InputChunk, Modality
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidFrame,
    InvalidValue,
    NotFound,
    PayloadTooLarge,
    ShuttingDown,
    Unauthenticated,
    UnsupportedModality,
)
from omni_ws.wire.frames import (
    CancelFrame,
    ConfigPatch,
    FinishFrame,
    PingFrame,
)
from omni_ws.wire.server_frames import (
    ErrorFields,
    ErrorFrame,
    PongFrame,
    WordTime,
)

pytestmark = pytest.mark.usefixtures("no_task_left")

AT_ONCE = ClientLimits(reconnect_delays=(0, 0, 0))


async def answer_text(peer: Peer, request_id: str, text: str, sequence_id: int = 0) -> None:
    await peer.started(request_id, sequence_id)
    await peer.output(request_id, "text", text=text)
    await peer.final(request_id)


def script(action: Script) -> Script:
    """A script that begins as every session does, and ends when the client goes."""

    async def run(peer: Peer) -> None:
        await peer.create()
        await action(peer)
        await peer.until_closed()

    return run


# --- opening


async def test_a_text_gets_its_answer() -> None:
    async def server(peer: Peer) -> None:
        (chunk,) = await peer.request()
        assert (chunk.modality, chunk.payload, chunk.sequence_id) == (Modality.TEXT, "grüße".encode(), 0)
        await peer.ack(1)
        await peer.started("req_a")
        for piece in ("one ", "two"):
            await peer.output("req_a", "text", text=piece)
        await peer.binary_audio("req_a", b"\1\2", 0)
        await peer.binary_audio("req_a", b"\3\4", 20)
        await peer.output("req_a", "transcript", text="hel", interim=True)
        await peer.output("req_a", "transcript", text="hello")
        await peer.output("req_a", "transcript", text=" you", interim=False)
        await peer.final("req_a")

    async with scripted_server(script(server)) as url, connect(url) as session:
        assert session.session_id == "sess_0"
        answer = await session.ask_text("grüße")
        assert (answer.text, answer.transcript, answer.audio) == ("one two", "hello you", b"\1\2\3\4")
        assert (answer.audio_format, answer.sample_rate) == ("pcm16", 24_000)
        assert answer.usage is not None
        assert (answer.usage.total_tokens, answer.usage.input_after_start_bytes) == (3, 6)
        assert (answer.request_id, answer.finish_reason) == ("req_a", FinishReason.STOP)
        assert session.last_output_sequence_id == 7


async def test_events_are_typed() -> None:
    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.ack(1, credit_bytes=7, buffered_chunks=2)
        await peer.started("req_a", None)
        await peer.output(
            "req_a", "audio", payload=b"ab", format="pcmu", sample_rate=8000, start_ms=40, words=[WordTime("hi", 1, 2)]
        )
        await peer.output("req_a", "smell", text="a modality of the future")
        await peer.websocket.send('{"type":"weather","sunny":true}')
        await peer.final("req_a", FinishReason.LENGTH)

    seen: list[Event] = []
    async with scripted_server(script(server)) as url, connect(url, binary=False) as session:
        await session.send_text("x", end=True)
        seen = [event async for event in session.response()]
    ack, started, audio, final = seen
    assert ack == InputAck(1, 2, 0, 7)
    assert started == ResponseStarted("req_a", "end_of_input", None, "extend", ref="request-1")
    assert isinstance(audio, AudioChunk)
    assert (audio.audio, audio.format, audio.sample_rate, audio.start_ms) == (b"ab", "pcmu", 8000, 40)
    assert [(word.text, word.start_ms, word.end_ms) for word in audio.words] == [("hi", 1, 2)]
    assert isinstance(final, Final)
    assert final.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("binary", "chosen"), [(True, "omni.v1+binary"), (False, "omni.v1+json")])
async def test_the_subprotocol_and_the_key(binary: bool, chosen: str) -> None:
    seen: list[tuple[str | None, str | None]] = []

    async def server(peer: Peer) -> None:
        request = peer.websocket.request
        assert request is not None
        seen.append((request.headers.get("Authorization"), peer.websocket.subprotocol))

    async with scripted_server(script(server)) as url, connect(url, binary=binary, api_key="secret"):
        pass
    assert seen == [("Bearer secret", chosen)]


async def test_all_that_a_chunk_can_say_arrives_in_both_forms() -> None:
    chunks = [
        InputChunk(Modality.AUDIO, b"\0\1", timestamp_ms=5),
        InputChunk(Modality.IMAGE, b"\x89PNG", format="image/png"),
        InputChunk(Modality.TEXT, "ü".encode()[:1]),
        InputChunk(Modality.TEXT, "ü".encode()[1:], timestamp_ms=2**32 + 1),
        InputChunk(Modality.AUDIO, b"", end_of_input=True),
    ]
    for binary in (True, False):
        received: list[InputChunk] = []

        async def server(peer: Peer, into: list[InputChunk] = received) -> None:
            into += await peer.request()
            await answer_text(peer, "req_a", "ok")

        async with scripted_server(script(server)) as url, connect(url, binary=binary) as session:
            for chunk in chunks:
                await session.send_chunk(chunk)
            assert (await session.answer()).text == "ok"
        names = ["request-1", None, None, None, "request-1"]
        assert received == [
            replace(chunk, sequence_id=number, ref=name)
            for number, (chunk, name) in enumerate(zip(chunks, names, strict=True))
        ]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (HTTPStatus.UNAUTHORIZED, b'{"error":{"code":"unauthenticated","message":"no such key"}}', Unauthenticated),
        (HTTPStatus.UNAUTHORIZED, b"go away", Unauthenticated),
        (HTTPStatus.NOT_FOUND, b"[]", NotFound),
        (HTTPStatus.SERVICE_UNAVAILABLE, b"", ShuttingDown),
        (HTTPStatus.BAD_GATEWAY, b"", ServerError),
    ],
)
async def test_a_refused_handshake(status: HTTPStatus, body: bytes, kind: type[Exception]) -> None:
    def refuse(connection: ServerConnection, request: Request) -> Response:
        response = connection.respond(status, "")
        response.body = body
        del response.headers["Content-Length"]
        response.headers["Content-Length"] = str(len(body))
        return response

    async with scripted_server(options={"process_request": refuse}) as url:
        with pytest.raises(kind):
            async with connect(url):
                pytest.fail("the handshake was refused")


async def test_nobody_listens() -> None:
    async with scripted_server() as url:
        pass
    with pytest.raises(ConnectionFailed, match="cannot reach"):
        async with connect(url):
            pytest.fail("nobody listens")


@pytest.mark.parametrize("answer", ["", "nonsense", "HTTP/1.1 302 Found\r\nLocation: ftp://x/?resume_token=secret"])
async def test_messages_do_not_tell_the_resume_token(answer: str) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{answer}\r\n\r\n".encode())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        if not answer:  # nobody listens
            server.close()
            await server.wait_closed()
        with pytest.raises((ConnectionFailed, InvalidValue), match=str(port)) as failure:
            await resume_session(Endpoint(url=f"ws://127.0.0.1:{port}"), "sess_1", "secret", 3, {})
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1/", "ws://127.0.0.1:65536", "ws://127.0.0.1:0", "ws://[::1", "ws://", "ws://127.0.0.1/\udcff"],
)
async def test_not_a_url(url: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(f"not a WebSocket URL: {url}")):
        async with connect(url):
            pytest.fail("no such address")


@pytest.mark.virtual_clock
async def test_a_server_that_says_nothing() -> None:
    async def server(peer: Peer) -> None:
        await peer.until_closed()

    async with scripted_server(server) as url:
        with pytest.raises(ConnectionFailed, match="within 10 seconds"):
            async with connect(url):
                pytest.fail("no session was created")


async def test_a_session_refused_with_an_error_frame() -> None:
    async def server(peer: Peer) -> None:
        await peer.error(EngineOverloaded("full house", retry_after_ms=1500))
        await peer.close(1013)

    async with scripted_server(server) as url:
        with pytest.raises(EngineOverloaded, match="full house") as refused:
            async with connect(url):
                pytest.fail("the session was refused")
    assert refused.value.retry_after_ms == 1500


async def test_a_server_that_speaks_something_else() -> None:
    async def server(peer: Peer) -> None:
        await peer.websocket.send("hello")

    async with scripted_server(server) as url:
        with pytest.raises(ConnectionFailed, match="does not speak this protocol"):
            async with connect(url):
                pytest.fail("no session was created")


# --- configuration


async def test_configuration_at_the_start_and_later() -> None:
    async def server(peer: Peer) -> None:
        assert await peer.configuration() == {"voice": "echo"}
        assert await peer.configuration() == {"output_audio": {"format": "pcmu", "sample_rate": 8000}}
        await peer.receive()
        await peer.error(InvalidValue("unknown voice", param="voice"))
        await peer.request()
        await peer.started("req_a")
        await peer.binary_audio("req_a", b"\1", 0)
        await peer.final("req_a")

    async with scripted_server(script(server)) as url, connect(url, config={"voice": "echo"}) as session:
        assert session.config is not None
        assert session.config.voice == "echo"
        await session.configure(output_audio={"format": "pcmu", "sample_rate": 8000})
        assert session.output_audio.sample_rate == 8000
        with pytest.raises(InvalidValue, match="unknown voice") as refused:
            await session.configure(voice="nobody")
        assert refused.value.param == "voice"
        answer = await session.ask_text("hi")
        assert (answer.audio_format, answer.sample_rate) == ("pcmu", 8000)


async def test_a_refused_first_configuration() -> None:
    async def server(peer: Peer) -> None:
        await peer.create()
        await peer.receive()
        await peer.error(InvalidValue("unknown voice", param="voice"))
        await peer.until_closed()

    async with scripted_server(server) as url:
        with pytest.raises(InvalidValue, match="unknown voice"):
            async with connect(url, config={"voice": "nobody"}):
                pytest.fail("the configuration was refused")


async def test_a_configuration_that_nobody_waits_for_any_more_keeps_its_place() -> None:
    asked = asyncio.Event()

    async def server(peer: Peer) -> None:
        assert await peer.receive() == ConfigPatch({"voice": "nobody"})
        asked.set()
        second = await peer.receive()
        await peer.error(InvalidValue("unknown voice"))
        assert await peer.grant(second) == {"voice": "echo"}

    async with scripted_server(script(server)) as url, connect(url) as session:
        given_up = asyncio.create_task(session.configure(voice="nobody"))
        await asked.wait()
        given_up.cancel()
        assert (await session.configure(voice="echo")).voice == "echo"
        assert given_up.cancelled()


async def test_what_is_not_json_is_refused_here() -> None:
    async with scripted_server(script(lambda peer: peer.until_closed())) as url, connect(url) as session:
        with pytest.raises(InvalidValue):
            await session.configure(voice=object())


# --- control frames


async def test_finish_cancel_and_ping() -> None:
    async def server(peer: Peer) -> None:
        assert (await peer.chunk()).end_of_input is False
        assert isinstance(await peer.receive(), FinishFrame)
        await answer_text(peer, "req_a", "first")
        assert await peer.receive() == CancelFrame("req_a")
        ping = await peer.receive()
        assert isinstance(ping, PingFrame)
        await peer.send(PongFrame(t=ping.t, server_time_ms=0))
        await peer.chunk()
        assert await peer.receive() == CancelFrame(None)
        await peer.final("req_b", FinishReason.CANCELLED)

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.finish()  # nothing is open: nothing is said
        await session.send_text("x")
        await session.finish()
        assert (await session.answer()).text == "first"
        await session.cancel("req_a")
        assert await session.ping() >= 0
        await session.send_audio(b"\0\0")
        await session.cancel()
        assert (await session.answer()).finish_reason is FinishReason.CANCELLED


async def test_numbers_go_on_over_requests() -> None:
    async def server(peer: Peer) -> None:
        for number in range(3):
            first, second = await peer.request()
            assert (first.sequence_id, second.sequence_id) == (2 * number, 2 * number + 1)
            await answer_text(peer, f"req_{number}", str(number), 2 * number)

    async with scripted_server(script(server)) as url, connect(url) as session:
        for number in range(3):
            assert await session.send_text("a") == 2 * number
            await session.send_text("b", end=True)
            assert (await session.answer()).text == str(number)


async def test_an_answer_that_is_given_up_is_cancelled_and_never_seen() -> None:
    half = asyncio.Event()

    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.started("req_a")
        await peer.output("req_a", "text", text="stale")
        half.set()
        assert await peer.receive() == CancelFrame("req_a")
        await peer.output("req_a", "text", text="stale, too")
        await peer.binary_audio("req_a", b"stale", 0)
        await peer.final("req_a", FinishReason.CANCELLED)
        await peer.request()
        await answer_text(peer, "req_b", "fresh", 1)

    async with scripted_server(script(server)) as url, connect(url) as session:
        asking = asyncio.create_task(session.ask_text("one"))
        await half.wait()
        while session.last_output_sequence_id < 0:
            await session_turns(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answer = await session.ask_text("two")
        assert (answer.text, answer.audio) == ("fresh", b"")


# --- errors


async def test_a_failed_request_leaves_the_session_open() -> None:
    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.started("req_a")
        await peer.error(EngineFailed("broken", request_id="req_a"))
        await peer.final("req_a", FinishReason.ERROR)
        await peer.request()
        await answer_text(peer, "req_b", "fine", 1)

    async with scripted_server(script(server)) as url, connect(url) as session:
        with pytest.raises(EngineFailed, match="broken"):
            await session.ask_text("one")
        assert (await session.ask_text("two")).text == "fine"


async def test_an_unknown_code() -> None:
    async def server(peer: Peer) -> None:
        await peer.send(ErrorFrame(error=ErrorFields(code="brand_new", message="?", request_id="req_x")))

    async with scripted_server(script(server)) as url, connect(url) as session:
        event = await anext(session.events())
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, ServerError)
        assert (event.error.code, event.error.request_id) == ("brand_new", "req_x")


async def test_a_request_of_which_everything_is_refused_does_not_wait_for_an_answer() -> None:
    async def server(peer: Peer) -> None:
        (chunk,) = await peer.request()
        await peer.error(UnsupportedModality("no text here", sequence_id=chunk.sequence_id))
        await peer.request()
        await answer_text(peer, "req_a", "fine", 1)

    async with scripted_server(script(server)) as url, connect(url) as session:
        with pytest.raises(UnsupportedModality):
            await session.ask_text("one")
        assert (await session.ask_text("two")).text == "fine"


async def test_a_refused_end_leaves_the_input_open() -> None:
    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.error(UnsupportedModality("not this", sequence_id=1))
        assert isinstance(await peer.receive(), FinishFrame)
        await answer_text(peer, "req_a", "ended", 0)

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_text("one")
        await session.send_image(b"?", end=True)
        with pytest.raises(UnsupportedModality):
            [event async for event in session.response()]
        await session.finish()
        assert (await session.answer()).text == "ended"


async def test_a_failing_close_raises_its_error() -> None:
    async def server(peer: Peer) -> None:
        await peer.chunk()
        await peer.error(PayloadTooLarge("too much"))
        await peer.close(1009)

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_audio(b"\0\0")
        seen: list[Event] = []
        with pytest.raises(PayloadTooLarge, match="too much"):
            await collect(session, into=seen)
        assert isinstance(seen[-1], ErrorEvent)
        for call in (session.send_text("x"), session.finish(), session.ping(), session.configure(voice="a")):
            with pytest.raises(PayloadTooLarge):
                await call


async def test_an_orderly_close_ends_the_events() -> None:
    async def server(peer: Peer) -> None:
        await peer.closing("shutting_down")
        await peer.close(1012)

    async with scripted_server(script(server)) as url, connect(url) as session:
        assert [event async for event in session.events()] == [Closing("shutting_down", True, 0)]
        with pytest.raises(ShuttingDown):
            await session.send_text("x")
        with pytest.raises(ShuttingDown):
            await session.answer()


async def test_a_lost_connection_fails_what_waits() -> None:
    async def server(peer: Peer) -> None:
        await peer.receive()
        await peer.receive()
        peer.drop()

    async with scripted_server(script(server)) as url, connect(url) as session:
        waiting = [asyncio.create_task(session.ping()), asyncio.create_task(session.configure(voice="a"))]
        with pytest.raises(ConnectionLost):
            await session.answer()
        for task in waiting:
            with pytest.raises(ConnectionLost):
                await task


async def test_a_frame_that_is_none_ends_the_session() -> None:
    async def server(peer: Peer) -> None:
        await peer.websocket.send('{"type":"output_chunk","request_id":5}')

    async with scripted_server(script(server)) as url, connect(url) as session:
        with pytest.raises(InvalidFrame):
            [event async for event in session.events()]


async def test_leaving_the_block_writes_what_waits_and_closes() -> None:
    received: list[InputChunk] = []

    async def server(peer: Peer) -> None:
        received.extend(await peer.request())

    async with scripted_server(script(server)) as url:
        async with connect(url) as session:
            for _ in range(50):
                await session.send_audio(bytes(640))
            await session.send_audio(b"", end=True)
        assert [event async for event in session.events()] == []
        with pytest.raises(ConnectionLost, match="closed"):
            await session.send_text("x")
        await session.close()
    assert len(received) == 51


async def test_an_exception_in_the_block_closes_at_once() -> None:
    async with scripted_server(script(lambda peer: peer.until_closed())) as url:
        with pytest.raises(LookupError):
            async with connect(url):
                raise LookupError


# --- back-pressure


async def test_unacknowledged_input_is_bounded() -> None:
    """At the window everything is sent; one past it waits for the acknowledgement."""

    async def server(peer: Peer) -> None:
        for _ in range(4):
            await peer.chunk()
        full.set()
        await go_on.wait()
        await peer.ack(1)
        await peer.chunk()
        fifth.set()

    full, go_on, fifth = asyncio.Event(), asyncio.Event(), asyncio.Event()
    limits = ClientLimits(window_bytes=400)
    async with scripted_server(script(server)) as url, connect(url, limits=limits) as session:
        for _ in range(4):
            await session.send_audio(bytes(100))
        await full.wait()
        waiting = asyncio.create_task(session.send_audio(bytes(100)))
        await session_turns()
        assert not waiting.done()
        go_on.set()
        assert await waiting == 4
        await fifth.wait()


async def test_a_cancelled_wait_has_sent_nothing() -> None:
    async def server(peer: Peer) -> None:
        assert (await peer.chunk()).payload == b"a" * 100
        await cancelled.wait()
        await peer.ack(1)
        chunk = await peer.chunk()
        assert (chunk.sequence_id, chunk.payload) == (1, b"c")
        done.set()

    cancelled, done = asyncio.Event(), asyncio.Event()
    limits = ClientLimits(window_bytes=100)
    async with scripted_server(script(server)) as url, connect(url, limits=limits) as session:
        await session.send_audio(b"a" * 100)
        waiting = asyncio.create_task(session.send_audio(b"b"))
        await session_turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        cancelled.set()
        assert await session.send_audio(b"c") == 1
        await done.wait()


async def test_credit_is_respected_and_asked_for() -> None:
    """Without credit, a duplicate of what was accepted asks for news; it carries no content."""

    async def server(peer: Peer) -> None:
        await peer.chunk()
        await peer.ack(1, credit_bytes=100)
        second = await peer.chunk()
        assert (second.sequence_id, len(second.payload)) == (1, 100)
        await peer.ack(2, credit_bytes=0)
        probe = await peer.chunk()
        assert (probe.sequence_id, probe.payload, probe.end_of_input) == (1, b"", False)
        await peer.ack(2, credit_bytes=101)
        third = await peer.chunk()
        assert (third.sequence_id, len(third.payload)) == (2, 101)
        done.set()

    done = asyncio.Event()
    limits = ClientLimits(credit_probe_sec=0.01, credit_patience_sec=60)
    async with scripted_server(script(server)) as url, connect(url, limits=limits) as session:
        await session.send_audio(b"x")
        assert isinstance(await anext(session.events()), InputAck)
        await session.send_audio(bytes(100))
        assert isinstance(await anext(session.events()), InputAck)
        await session.send_audio(bytes(101))
        await done.wait()


@pytest.mark.virtual_clock
async def test_credit_is_advice_in_the_end() -> None:
    async def server(peer: Peer) -> None:
        await peer.chunk()
        await peer.ack(1, credit_bytes=0)
        while (chunk := await peer.chunk()).sequence_id == 0:
            await peer.ack(1, credit_bytes=0)
        assert (chunk.sequence_id, chunk.payload) == (1, b"yy")
        done.set()

    done = asyncio.Event()
    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_audio(b"xx")
        assert isinstance(await anext(session.events()), InputAck)
        begun = asyncio.get_running_loop().time()
        await session.send_audio(b"yy")
        assert asyncio.get_running_loop().time() - begun == pytest.approx(5, abs=0.5)
        await done.wait()


async def test_a_chunk_at_the_limit_and_one_past_it() -> None:
    async def server(peer: Peer) -> None:
        await peer.create(max_chunk_bytes=10)
        assert len((await peer.chunk()).payload) == 10
        await peer.until_closed()

    async with scripted_server(server) as url, connect(url) as session:
        await session.send_image(bytes(10))
        with pytest.raises(PayloadTooLarge, match="10 bytes, this one has 11"):
            await session.send_image(bytes(11))
        with pytest.raises(PayloadTooLarge, match="10 bytes, this one has 11"):
            await session.send_tool_result("call", "r" * 11)


async def test_a_user_who_takes_no_events_stops_the_server() -> None:
    """What is queued stays near its bound while the server has megabytes to say."""

    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.started("req_a")
        for number in range(300):
            await peer.binary_audio("req_a", bytes(65536), number * 65536 // 48)
            sent.append(1)
        await peer.final("req_a")

    sent: list[int] = []
    limits = ClientLimits(event_bytes=1 << 20)
    async with scripted_server(script(server)) as url, connect(url, limits=limits) as session:
        await session.send_text("x", end=True)
        while len(sent) < 20:
            await session_turns(1)
        before = -1
        while before != len(sent):  # until the pipe is full
            before = len(sent)
            await session_turns(500)
        assert len(sent) < 300
        assert session.queued_event_bytes <= (1 << 20) + 65536 + 128
        assert len((await session.answer()).audio) == 300 * 65536


async def collect(session: ClientSession, *, into: list[Event]) -> None:
    async for event in session.events():
        into.append(event)


async def session_turns(count: int = 50) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- reconnection


async def test_an_unfinished_request_is_sent_again_whole() -> None:
    async def lost(peer: Peer) -> None:
        await peer.create()
        assert await peer.configuration() == {"voice": "echo"}
        for _ in range(3):
            await peer.chunk()
        await peer.ack(2)
        await acknowledged.wait()
        peer.drop()

    async def fresh(peer: Peer) -> None:
        await peer.create()
        assert await peer.configuration() == {"voice": "echo"}
        chunks = await peer.request()
        assert [chunk.sequence_id for chunk in chunks] == [0, 1, 2, 3]
        assert [chunk.payload for chunk in chunks] == [b"a", b"b", b"c", b"d"]
        await answer_text(peer, "req_b", "whole", 0)
        await peer.until_closed()

    acknowledged = asyncio.Event()
    async with (
        scripted_server(lost, fresh) as url,
        connect(url, config={"voice": "echo"}, reconnect=True, limits=AT_ONCE) as session,
    ):
        for letter in (b"a", b"b", b"c"):
            await session.send_audio(letter)
        assert isinstance(await anext(session.events()), InputAck)
        acknowledged.set()
        assert await anext(session.events()) == Reconnected("sess_1", 3)
        assert session.session_id == "sess_1"
        await session.send_audio(b"d", end=True)
        assert (await session.answer()).text == "whole"


async def test_a_half_answer_is_void_and_finished_requests_are_not_sent_again() -> None:
    async def lost(peer: Peer) -> None:
        await peer.request()
        await answer_text(peer, "req_a", "first", 0)
        await peer.request()
        await peer.started("req_b", 1)
        await peer.output("req_b", "text", text="half an ans")
        peer.drop()

    async def fresh(peer: Peer) -> None:
        (chunk,) = await peer.request()
        assert (chunk.sequence_id, chunk.payload) == (0, b"two")
        await answer_text(peer, "req_c", "second", 0)

    async with (
        scripted_server(script(lost), script(fresh)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        assert (await session.ask_text("one")).text == "first"
        assert (await session.ask_text("two")).text == "second"


async def test_the_end_by_finish_is_remembered() -> None:
    async def lost(peer: Peer) -> None:
        await peer.chunk()
        await peer.receive()
        peer.drop()

    async def fresh(peer: Peer) -> None:
        (chunk,) = await peer.request()
        assert chunk.payload == b"one"
        await answer_text(peer, "req_b", "done", 0)

    async with (
        scripted_server(script(lost), script(fresh)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("one")
        await session.finish()
        assert (await session.answer()).text == "done"


async def test_a_cancelled_request_is_over_when_its_connection_is() -> None:
    async def lost(peer: Peer) -> None:
        await peer.request()
        await peer.started("req_a")
        assert isinstance(await peer.receive(), CancelFrame)
        peer.drop()

    async def fresh(peer: Peer) -> None:
        (chunk,) = await peer.request()
        assert chunk.payload == b"two"
        await answer_text(peer, "req_b", "second", 0)

    async with (
        scripted_server(script(lost), script(fresh)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("one", end=True)
        assert isinstance(await anext(session.events()), ResponseStarted)
        await session.cancel()
        answer = await session.answer()
        assert (answer.finish_reason, answer.usage) == (FinishReason.CANCELLED, None)
        assert (await session.ask_text("two")).text == "second"


async def test_input_too_long_to_be_kept_is_not_sent_in_part() -> None:
    async def lost(peer: Peer) -> None:
        for _ in range(11):
            await peer.chunk()
        peer.drop()

    limits = ClientLimits(reconnect_delays=(0,), keep_bytes=1000)
    async with scripted_server(script(lost)) as url, connect(url, reconnect=True, limits=limits) as session:
        for _ in range(11):
            await session.send_audio(bytes(100))
        with pytest.raises(ConnectionLost, match="too large to be kept"):
            await session.answer()


async def test_input_at_the_bound_is_kept() -> None:
    async def lost(peer: Peer) -> None:
        await peer.request()
        peer.drop()

    async def fresh(peer: Peer) -> None:
        assert len(await peer.request()) == 10
        await answer_text(peer, "req_b", "kept", 0)

    limits = ClientLimits(reconnect_delays=(0,), keep_bytes=1000)
    async with (
        scripted_server(script(lost), script(fresh)) as url,
        connect(url, reconnect=True, limits=limits) as session,
    ):
        for number in range(10):
            await session.send_audio(bytes(100), end=number == 9)
        assert (await session.answer()).text == "kept"


async def test_a_drained_server_hands_over() -> None:
    async def draining(peer: Peer) -> None:
        await peer.request()
        await answer_text(peer, "req_a", "first", 0)
        await peer.closing("shutting_down")
        await peer.close(1012)

    async def fresh(peer: Peer) -> None:
        await peer.request()
        await answer_text(peer, "req_b", "second", 0)

    async with (
        scripted_server(script(draining), script(fresh)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        assert (await session.ask_text("one")).text == "first"
        seen = [await anext(session.events()) for _ in range(2)]
        assert seen == [Closing("shutting_down", True, 0), Reconnected("sess_1", 0)]
        assert (await session.ask_text("two")).text == "second"


async def test_a_fault_of_the_client_is_not_tried_again() -> None:
    async def server(peer: Peer) -> None:
        await peer.chunk()
        await peer.error(PayloadTooLarge("too much"))
        await peer.close(1009)

    async with scripted_server(script(server)) as url, connect(url, reconnect=True, limits=AT_ONCE) as session:
        await session.send_audio(b"x")
        with pytest.raises(PayloadTooLarge):
            await session.answer()


@pytest.mark.virtual_clock
async def test_attempts_are_counted_and_wait_as_long_as_the_server_asks() -> None:
    attempts: list[float] = []

    async def lost(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        peer.drop()

    async def refuse(peer: Peer) -> None:
        attempts.append(asyncio.get_running_loop().time())
        await peer.error(EngineOverloaded("full", retry_after_ms=60_000))
        await peer.close(1013)

    limits = ClientLimits(reconnect_delays=(0, 1, 2))
    async with (
        scripted_server(lost, refuse, refuse, refuse) as url,
        connect(url, reconnect=True, limits=limits) as session,
    ):
        with pytest.raises(ConnectionLost, match="could not be re-established: full"):
            await session.ask_text("x")
    assert len(attempts) == 3
    assert [later - earlier for earlier, later in pairwise(attempts)] == pytest.approx([60, 60], abs=0.5)


async def test_leaving_while_reconnecting_ends_at_once() -> None:
    refused = asyncio.Event()

    async def lost(peer: Peer) -> None:
        await peer.create()
        peer.drop()

    async def stall(peer: Peer) -> None:
        refused.set()
        await peer.until_closed()

    async with scripted_server(lost, stall) as url, connect(url, reconnect=True, limits=AT_ONCE) as session:
        await refused.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await session.ping()
