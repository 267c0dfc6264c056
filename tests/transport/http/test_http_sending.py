"""The sending half of a connection, over a transport that records what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import pytest

from omni_ws.transport.http.hang_up import PeerGone
from omni_ws.transport.http.receiving import HttpOutput

pytestmark = pytest.mark.virtual_clock


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
