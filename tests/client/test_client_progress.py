"""The client gets on or says so: what is cut, what an attempt waits for, and when silence is a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from support.live_server import live_server
from support.scripted_server import Peer, scripted_server

from omni_ws.client import (
    ClientLimits,
    ClientSession,
    ConnectionLost,
    Reconnected,
    Reconnecting,
    TextChunk,
    connect,
)
from omni_ws.client.connection import error_from_response
from omni_ws.client.halves import (
    PIECE_BYTES,
    OutgoingInput,
    pieces_of,
)
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EngineOverloaded, OriginNotAllowed, PayloadTooLarge
from omni_ws.wire.session_config import OutputAudioConfig

DELAYS = (0, 1, 2, 4)
#: The server itself does not look whether the client is there.
NO_PINGS: dict[str, Any] = {"ping_interval": None}


def now() -> float:
    return asyncio.get_running_loop().time()


# what is cut


@pytest.mark.parametrize(
    ("chunk", "sizes"),
    [
        (InputChunk(Modality.AUDIO, bytes(100)), [100]),
        (InputChunk(Modality.AUDIO, bytes(101)), [100, 1]),
        (InputChunk(Modality.TEXT, bytes(250)), [100, 100, 50]),
        (InputChunk(Modality.TEXT, bytes(250), tool_call_id="call"), [250]),
        (InputChunk(Modality.IMAGE, bytes(250)), [250]),
        (InputChunk(Modality.VIDEO, bytes(101)), [100, 1]),
        (InputChunk(Modality.VIDEO, b"\xff\xd8\xff" + bytes(98)), [101]),
    ],
)
def test_streams_are_cut_at_the_limit_and_single_things_are_not(chunk: InputChunk, sizes: list[int]) -> None:
    pieces = list(pieces_of(chunk, 100))
    assert [len(piece.payload) for piece in pieces] == sizes
    assert b"".join(piece.payload for piece in pieces) == chunk.payload


def test_the_last_piece_ends_the_input_and_samples_stay_whole() -> None:
    chunk = InputChunk(Modality.AUDIO, bytes(8), timestamp_ms=7, end_of_input=True)
    pieces = list(pieces_of(chunk, 3))
    assert [len(piece.payload) for piece in pieces] == [2, 2, 2, 2]
    assert [piece.end_of_input for piece in pieces] == [False, False, False, True]
    assert {piece.timestamp_ms for piece in pieces} == {7}
    assert len(list(pieces_of(chunk, 1))) == 8


async def test_more_than_a_server_takes_at_once_is_answered() -> None:
    async with live_server(EchoEngine(), streaming_input={"max_chunk_bytes": 1000}) as server:  # noqa: SIM117
        async with connect(server.websocket_url) as session:
            assert await session.send_text("word " * 600, end=True) == 2
            assert (await session.answer()).text == "word " * 600
            audio = bytes(range(256)) * 8
            await session.configure(output_audio={"sample_rate": 16_000})
            await session.send_audio(audio, end=True)
            assert (await session.answer()).audio == audio
            with pytest.raises(PayloadTooLarge):
                await session.send_image(bytes(1001))


@pytest.mark.parametrize("binary", [True, False])
async def test_text_is_whole_where_a_character_is_cut(binary: bool) -> None:
    async with live_server(EchoEngine(), streaming_input={"max_chunk_bytes": 4}) as server:  # noqa: SIM117
        async with connect(server.websocket_url, binary=binary) as session:
            assert (await session.ask_text("aäöü€😀")).text == "aäöü€😀"


async def test_large_input_goes_in_pieces_that_are_acknowledged_one_by_one() -> None:
    async def server(peer: Peer) -> None:
        await peer.create()
        sizes.extend([len(chunk.payload) for chunk in await peer.request()])

    sizes: list[int] = []
    async with scripted_server(server) as url, connect(url) as session:
        await session.send_audio(bytes(PIECE_BYTES), end=False)
        await session.send_audio(bytes(PIECE_BYTES + 1), end=True)
        with pytest.raises(ConnectionLost):
            await session.answer()
    assert sizes == [PIECE_BYTES, PIECE_BYTES, 1]


async def test_kept_input_is_cut_for_a_fresh_session_that_takes_less() -> None:
    async def lost(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        peer.drop()

    async def smaller(peer: Peer) -> None:
        await peer.create(max_chunk_bytes=400)
        chunks = await peer.request()
        sizes.extend([len(chunk.payload) for chunk in chunks])
        numbers.extend([chunk.sequence_id for chunk in chunks])
        await answer(peer, "kept")

    sizes: list[int] = []
    numbers: list[Any] = []
    async with scripted_server(lost, smaller) as url, connect(url, reconnect=True) as session:
        await session.send_audio(bytes(1000), end=True)
        assert (await session.answer()).text == "kept"
    assert (sizes, numbers) == ([400, 400, 200], [0, 1, 2])


async def answer(peer: Peer, text: str) -> None:
    await peer.started("req")
    await peer.output("req", "text", text=text)
    await peer.final("req")


# what starts the delays over


async def attempts_of(
    serve: Callable[[Peer], Awaitable[None]], use: Callable[[ClientSession], Awaitable[None]], *, limit: int = 12
) -> list[float]:
    """The times of the connections to a server that does the same with each, until the client gives up."""
    times: list[float] = []

    async def each(peer: Peer) -> None:
        times.append(now())
        await serve(peer)
        peer.drop()

    limits = ClientLimits(reconnect_delays=DELAYS)
    async with scripted_server(*[each] * limit) as url, connect(url, reconnect=True, limits=limits) as session:
        await use(session)
        with pytest.raises(ConnectionLost):
            async for _ in session.events():
                pass
    return times


async def nothing(_: ClientSession) -> None:
    pass


@pytest.mark.virtual_clock
async def test_a_connection_that_only_opens_starts_nothing_over() -> None:
    times = await attempts_of(Peer.create, nothing)
    assert len(times) == 1 + len(DELAYS)
    for (earlier, later), delay in zip(pairwise(times), DELAYS, strict=True):
        assert delay / 2 <= later - earlier <= delay + 0.5


@pytest.mark.virtual_clock
async def test_nor_does_one_that_takes_the_same_input_again() -> None:
    """A chunk that ends each session is sent a few times, and then it is said."""

    async def poisoned(peer: Peer) -> None:
        await peer.create()
        await peer.chunk()
        await peer.ack(1)
        await peer.chunk()

    async def ask(session: ClientSession) -> None:
        await session.send_text("harmless, ")
        await session.send_text("deadly", end=True)

    times = await attempts_of(poisoned, ask)
    assert len(times) == 1 + len(DELAYS)


@pytest.mark.virtual_clock
async def test_new_input_that_is_taken_starts_them_over() -> None:
    async def takes_one(peer: Peer) -> None:
        await peer.create()
        if (await peer.chunk()).sequence_id is not None:
            await peer.ack(1)

    async def ask(session: ClientSession) -> None:
        await session.send_text("one", end=True)
        count = 0
        async for event in session.events():
            count += isinstance(event, Reconnected)
            if isinstance(event, Reconnected) and count <= 3:
                await session.cancel()  # the one before is not asked again
                await session.send_text("another", end=True)
            if count == 6:
                return

    times = await attempts_of(takes_one, ask)
    assert len(times) > 1 + len(DELAYS)


def test_an_acknowledgement_counts_once_for_each_chunk() -> None:
    outgoing = OutgoingInput(window_bytes=1000, keep_bytes=1000)
    for _ in range(2):
        outgoing.add(InputChunk(Modality.AUDIO, bytes(10)), output_audio=OutputAudioConfig())
    outgoing.acknowledge(1, 100)
    outgoing.acknowledge(1, 100)
    assert outgoing.advances == 1
    for _ in range(2):
        outgoing.restart(max_chunk_bytes=6)  # the first chunk is two pieces now
        outgoing.acknowledge(2, 100)
        assert outgoing.advances == 1
    outgoing.acknowledge(3, 100)
    assert outgoing.advances == 2


@pytest.mark.virtual_clock
async def test_output_of_a_resumed_session_starts_them_over() -> None:
    """Each connection brings a word more, and there are more connections than delays."""
    steps = [(TextOutput(f"{number} "), lambda: asyncio.sleep(5)) for number in range(12)]
    engine = ScriptedEngine([step for pair in steps for step in pair])
    async with live_server(engine, streaming_input={"resume_grace_sec": 30}) as server:
        limits = ClientLimits(reconnect_delays=(0, 0.1))
        async with connect(server.websocket_url, reconnect=True, limits=limits) as session:
            await session.send_text("x", end=True)
            words = []
            async for event in session.response():
                if isinstance(event, TextChunk):
                    words.append(event.text)
                    session._link.websocket.transport.abort()
            assert words == [f"{number} " for number in range(12)]


@pytest.mark.virtual_clock
async def test_a_longer_wait_is_told_with_its_reason() -> None:
    async def lost(peer: Peer) -> None:
        await peer.create()
        peer.drop()

    def refuse(milliseconds: int) -> Callable[[Peer], Awaitable[None]]:
        async def script(peer: Peer) -> None:
            await peer.error(EngineOverloaded("full", retry_after_ms=milliseconds))
            await peer.close(1013)

        return script

    async def fresh(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        await answer(peer, "there")

    limits = ClientLimits(reconnect_delays=(0,) * 4)
    scripts = (lost, refuse(999), refuse(1000), refuse(60_000), fresh)
    async with scripted_server(*scripts) as url, connect(url, reconnect=True, limits=limits) as session:
        waits = []
        async for event in session.events():
            if isinstance(event, Reconnected):
                break
            assert isinstance(event, Reconnecting)
            waits.append((event.seconds, str(event.error)))
        assert waits == [(1.0, "full"), (60.0, "full")]
        assert (await session.ask_text("x")).text == "there"


# silence


@pytest.mark.virtual_clock
@pytest.mark.parametrize("last_sign", [0, 1, 19])
async def test_silence_behind_a_ping_is_a_lost_connection(last_sign: int) -> None:
    async def silent(peer: Peer) -> None:
        await peer.create()
        await asyncio.sleep(last_sign)
        await peer.ack(0)
        peer.websocket.transport.pause_reading()  # pings are not answered
        await peer.until_closed()

    async with scripted_server(silent, options=NO_PINGS) as url, connect(url) as session:
        begun = now()
        with pytest.raises(ConnectionLost, match="does not answer"):
            async for _ in session.events():
                pass
        assert now() - begun == pytest.approx(last_sign + 40, abs=0.5)
        session._link.websocket.transport.abort()


@pytest.mark.virtual_clock
async def test_a_chunk_that_is_sent_up_is_given_its_time() -> None:
    async def silent(peer: Peer) -> None:
        await peer.create()
        peer.websocket.transport.pause_reading()
        await peer.until_closed()

    async with scripted_server(silent, options=NO_PINGS) as url, connect(url) as session:
        begun = now()
        await session.send_image(bytes(1_600_000))
        with pytest.raises(ConnectionLost, match="does not answer"):
            async for _ in session.events():
                pass
        assert now() - begun == pytest.approx(40 + 100, abs=0.5)


@pytest.mark.virtual_clock
async def test_an_acknowledgement_now_and_then_keeps_a_slow_upload() -> None:
    """The pong is not there for minutes, and the connection has not died."""

    async def slow(peer: Peer) -> None:
        await peer.create()
        peer.websocket.transport.pause_reading()
        for number in range(1, 11):
            await asyncio.sleep(35)
            await peer.ack(number)
        peer.websocket.transport.resume_reading()
        assert len(await peer.request()) == 10
        await answer(peer, "all of it")
        await peer.until_closed()

    async with scripted_server(slow, options=NO_PINGS) as url, connect(url) as session:
        begun = now()
        await session.send_audio(bytes(10 * PIECE_BYTES), end=True)
        assert (await session.answer()).text == "all of it"
        assert now() - begun >= 350


@pytest.mark.virtual_clock
async def test_a_server_that_answers_pings_is_kept_for_hours() -> None:
    async def quiet(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        await answer(peer, "still here")
        await peer.until_closed()

    async with scripted_server(quiet) as url, connect(url) as session:
        await asyncio.sleep(7200)
        assert (await session.ask_text("x")).text == "still here"


@pytest.mark.virtual_clock
async def test_a_consumer_who_takes_nothing_hears_no_silence() -> None:
    """The socket is not read meanwhile, so the pongs are not heard either."""

    async def talkative(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        await peer.started("req")
        for _ in range(100):
            await peer.output("req", "text", text="x" * 10_000)
        await peer.final("req")
        await peer.until_closed()

    limits = ClientLimits(event_bytes=10_000)
    async with scripted_server(talkative) as url, connect(url, limits=limits) as session:
        await session.send_text("x", end=True)
        await asyncio.sleep(3600)
        assert len((await session.answer()).text) == 1_000_000


# refusals


def test_a_refused_origin_has_its_reason_and_the_origin() -> None:
    body = b'{"error":{"code":"origin_not_allowed","message":"pages of https://a.example are not allowed"}}'
    error = error_from_response(403, body)
    assert isinstance(error, OriginNotAllowed)
    assert "https://a.example" in str(error)
