"""The two halves of a connection, over transports that record when they are read and what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import pytest

from omni_ws.errors import SessionTimeout
from omni_ws.service.sessions.admission import Addresses
from omni_ws.transport.http.connections import (
    HttpInput,
    HttpOutput,
    PeerGone,
    RequestBody,
)
from omni_ws.transport.http.request import read_request

pytestmark = pytest.mark.virtual_clock

HIGH_WATER = 1000
TIMEOUT_SEC = 30.0
MIN_RATE = 100.0


class ReadTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self._reading = True
        self.closing = False

    def pause_reading(self) -> None:
        assert self._reading, "paused twice"
        self._reading = False

    def resume_reading(self) -> None:
        assert not self._reading, "resumed twice"
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self.closing


class Receiving:
    """An input in the middle of a request whose body is chunked."""

    def __init__(self, *, expect: str = "", min_rate: float | None = MIN_RATE) -> None:
        self.http = h11.Connection(h11.SERVER)
        self.transport = ReadTransport()
        self.continues = 0
        self.input = HttpInput(
            self.http,
            high_water_bytes=HIGH_WATER,
            body_timeout_sec=TIMEOUT_SEC,
            min_rate=min_rate,
            send_continue=self._send_continue,
            unread=lambda: None,
        )
        self.input.attach(self.transport)
        head = f"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{expect}\r\n"
        self.http.receive_data(head.encode())
        event = self.http.next_event()
        assert isinstance(event, h11.Request)
        self.input.begin_body(read_request(event, client="", secure=False, addresses=Addresses()))

    @property
    def body(self) -> RequestBody:
        return self.input.body

    def _send_continue(self) -> None:
        self.continues += 1
        self.http.send(h11.InformationalResponse(status_code=100, headers=[]))

    def feed_all(self) -> None:
        """Receive the end of the body, and the beginning of a pipelined request."""
        self.http.receive_data(b"0\r\n\r\nGET /next")
        assert isinstance(self.http.next_event(), h11.EndOfMessage)
        self.input.finish_body()


async def failure(body: RequestBody) -> tuple[float, str]:
    """Wait for a time-out; return when it occurred, and its message."""
    with pytest.raises(SessionTimeout) as raised:
        await body.take()
    return asyncio.get_running_loop().time(), str(raised.value)


async def test_body_returns_all_that_has_arrived_then_its_end() -> None:
    body = RequestBody()
    taking = asyncio.create_task(body.take())
    await asyncio.sleep(0)
    body.feed(b"ab")
    body.feed(b"c")
    assert await taking == b"abc"
    body.feed(b"d")
    body.finish()
    assert [await body.take(), await body.take(), await body.take()] == [b"d", b"", b""]
    assert (body.received, body.held, body.complete) == (4, 0, True)


async def test_body_fails_behind_what_has_arrived_and_once() -> None:
    body = RequestBody()
    body.feed(b"ab")
    body.fail(SessionTimeout("first"))
    body.fail(SessionTimeout("second"))
    assert await body.take() == b"ab"
    with pytest.raises(SessionTimeout, match="first"):
        await body.take()
    assert body.ended
    assert not body.complete


async def test_reading_pauses_at_the_high_water_mark_until_the_body_is_read() -> None:
    receiving = Receiving()
    receiving.input.feed(bytes(HIGH_WATER - 1))
    assert receiving.transport.is_reading()
    receiving.input.feed(b"x")
    assert not receiving.transport.is_reading()
    await receiving.body.take()
    receiving.input.after_read()
    assert receiving.transport.is_reading()


async def test_reading_pauses_behind_too_many_pipelined_bytes_until_the_next_request() -> None:
    receiving = Receiving()
    receiving.feed_all()
    assert receiving.input.pipelined_bytes == len("GET /next")
    receiving.input.hold_pipelined(HIGH_WATER - len("GET /next"))
    assert receiving.transport.is_reading()
    receiving.input.hold_pipelined(1)
    assert not receiving.transport.is_reading()
    receiving.input.after_read()
    assert not receiving.transport.is_reading()
    assert receiving.input.next_request() == HIGH_WATER + 1
    assert receiving.transport.is_reading()
    assert receiving.input.pipelined_bytes == 0


async def test_yielding_pauses_for_one_pass_whatever_is_read_meanwhile() -> None:
    receiving = Receiving()
    passes: list[bool] = []
    receiving.input.yield_to_loop(lambda: passes.append(receiving.transport.is_reading()))
    receiving.input.after_read()
    assert not receiving.transport.is_reading()
    await asyncio.sleep(0)
    assert passes == [True]


async def test_yielding_with_a_full_body_stays_paused() -> None:
    receiving = Receiving()
    receiving.input.feed(bytes(HIGH_WATER))
    receiving.input.yield_to_loop(lambda: None)
    await asyncio.sleep(0)
    assert not receiving.transport.is_reading()
    await receiving.body.take()
    receiving.input.after_read()
    assert receiving.transport.is_reading()


async def test_closing_transport_is_left_alone() -> None:
    receiving = Receiving()
    receiving.transport.closing = True
    receiving.input.feed(bytes(HIGH_WATER))
    receiving.input.yield_to_loop(lambda: None)
    await asyncio.sleep(0)
    assert receiving.transport.is_reading()


async def test_silence_times_out() -> None:
    receiving = Receiving()
    receiving.input.feed(b"x")
    await receiving.body.take()
    at, message = await failure(receiving.body)
    assert at == pytest.approx(30)
    assert message == "no data of the request body for 30 s"


async def test_slow_body_times_out_by_its_rate() -> None:
    receiving = Receiving()
    for _ in range(4):
        await asyncio.sleep(10)
        receiving.input.feed(bytes(500))
        assert len(await receiving.body.take()) == 500
    # 30 s, and 5 s for each 500 bytes, of which some arrive every 10 s.
    at, message = await failure(receiving.body)
    assert at == pytest.approx(50)
    assert message == "the request body arrived at less than 100 bytes per second"


async def test_live_body_may_be_slow() -> None:
    receiving = Receiving()
    receiving.input.allow_any_rate(TIMEOUT_SEC)
    for _ in range(20):
        await asyncio.sleep(TIMEOUT_SEC - 1)
        receiving.input.feed(b"x")
        assert await receiving.body.take() == b"x"


async def test_deadline_stands_still_while_the_server_does_not_read() -> None:
    receiving = Receiving()
    receiving.input.feed(bytes(HIGH_WATER))
    await asyncio.sleep(10 * TIMEOUT_SEC)
    await receiving.body.take()
    receiving.input.after_read()
    assert not receiving.body.ended
    assert (await failure(receiving.body))[0] == pytest.approx(11 * TIMEOUT_SEC)


async def test_deadline_begins_with_the_100_continue() -> None:
    receiving = Receiving(expect="Expect: 100-continue\r\n")
    await asyncio.sleep(10 * TIMEOUT_SEC)
    assert not receiving.body.ended
    receiving.input.before_read()
    receiving.input.before_read()
    assert receiving.continues == 1
    assert (await failure(receiving.body))[0] == pytest.approx(11 * TIMEOUT_SEC)


@pytest.mark.parametrize("end", ["response", "body", "detached"])
async def test_nothing_is_owed_after_the_end(end: str) -> None:
    receiving = Receiving()
    match end:
        case "response":
            receiving.input.end_request()
        case "body":
            receiving.feed_all()
        case _:
            receiving.input.detach()
    await asyncio.sleep(10 * TIMEOUT_SEC)
    assert receiving.body.ended is (end != "response")
    if end == "detached":
        with pytest.raises(PeerGone):
            await receiving.body.take()


async def test_chunk_size_has_at_most_16_digits() -> None:
    receiving = Receiving()
    receiving.http.receive_data(b"0000000000000001\r\na\r\n")
    assert isinstance(receiving.http.next_event(), h11.Data)
    receiving.http.receive_data(b"00000000000000001\r\nb\r\n")
    with pytest.raises(h11.RemoteProtocolError, match="chunk size too long"):
        receiving.http.next_event()


# The sending half


class ObedientTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


def started(on_timeout: Callable[[], None] = lambda: None) -> tuple[HttpOutput, ObedientTransport]:
    """An output in the middle of a chunked response."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    http.next_event()
    output, transport = HttpOutput(http, timeout_sec=20, on_timeout=on_timeout), ObedientTransport()
    output.attach(transport)
    output.send(h11.Response(status_code=200, headers=[]))
    return output, transport


async def test_drain_waits_while_the_transport_is_full() -> None:
    output, transport = started()
    output.pause()
    draining = asyncio.create_task(output.drain())
    await asyncio.sleep(1)
    assert not draining.done()
    output.resume()
    await draining
    assert transport.written.startswith(b"HTTP/1.1 200")


async def test_there_is_room_where_drain_would_not_wait() -> None:
    output, transport = started()
    room = [output.has_room]
    output.pause()
    room.append(output.has_room)
    output.resume()
    room.append(output.has_room)
    transport.closing = True
    room.append(output.has_room)
    assert room == [True, False, True, True]
    with pytest.raises(PeerGone):
        output.send_chunk(b"late")
    with pytest.raises(PeerGone):
        await output.drain()


async def test_there_is_no_room_beyond_a_fair_share() -> None:
    output, transport = started()
    output.send_chunk(b"x" * (64 * 1024 - len(transport.written) - len(b"ffff\r\n\r\n")))
    assert len(transport.written) == 64 * 1024
    room = [output.has_room]
    output.send_chunk(b"x")
    room.append(output.has_room)
    await output.drain()
    room.append(output.has_room)
    assert room == [True, False, True]


async def test_full_output_is_stuck_after_its_time_unless_it_drains() -> None:
    stuck: list[float] = []
    loop = asyncio.get_running_loop()
    output, _ = started(lambda: stuck.append(loop.time()))
    output.pause()
    await asyncio.sleep(19)
    output.resume()
    await asyncio.sleep(100)
    assert stuck == []
    output.pause()
    begin = loop.time()
    await asyncio.sleep(100)
    assert stuck == [pytest.approx(begin + 20)]


async def test_closing_output_is_stuck_even_when_it_drains_a_little() -> None:
    stuck: list[float] = []
    loop = asyncio.get_running_loop()
    output, transport = started(lambda: stuck.append(loop.time()))
    output.pause()
    await asyncio.sleep(10)
    output.close()
    assert transport.closing
    output.resume()
    await asyncio.sleep(100)
    assert stuck == [pytest.approx(30)]


async def test_lost_output_lets_its_writers_go() -> None:
    stuck: list[float] = []
    output, transport = started(lambda: stuck.append(0))
    output.pause()
    draining = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    transport.closing = True
    output.detach()
    with pytest.raises(PeerGone):
        await draining
    with pytest.raises(PeerGone):
        output.send(h11.Data(data=b"x"))
    await asyncio.sleep(100)
    assert stuck == []


@pytest.mark.counts_passes
async def test_writer_yields_after_its_fair_share() -> None:
    output, _ = started()
    others = 0

    async def other() -> None:
        nonlocal others
        others += 1

    for size, turns in ((60_000, 0), (10_000, 1)):
        task = asyncio.create_task(other())
        output.send(h11.Data(data=b"x" * size))
        await output.drain()
        assert others == turns
        await task
        others = 0
