"""The data channel of a call: what its peer does not take is charged, and ends the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from omni_ws.core.quota import ByteBudget, SessionAccount
from omni_ws.errors import OmniError, SlowConsumer
from omni_ws.transport.webrtc.call import LABEL, MAX_UNSENT_BYTES, CallChannel

pytestmark = pytest.mark.virtual_clock
TIMEOUT_SEC = 30


class Emitter:
    """Calls what was registered for an event."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[..., None]] = {}

    def on(self, event: str, call: Callable[..., None]) -> None:
        self.calls[event] = call


class Channel(Emitter):
    """An open data channel whose peer takes what ``take`` says."""

    label, readyState, bufferedAmountLowThreshold = LABEL, "open", 0

    def __init__(self) -> None:
        super().__init__()
        self.bufferedAmount = 0

    def send(self, data: str | bytes) -> None:
        self.bufferedAmount += len(data)

    def take(self, size: int) -> None:
        self.bufferedAmount -= size
        if self.bufferedAmount <= self.bufferedAmountLowThreshold:
            self.calls["bufferedamountlow"]()


class Receiver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.refused: list[OmniError] = []

    def input_refused(self, error: OmniError) -> None:
        self.refused.append(error)

    def resume_output(self) -> None: ...

    def reading_changed(self) -> None: ...


async def opened() -> tuple[CallChannel, Channel, Receiver, SessionAccount]:
    peer, channel, receiver = Emitter(), Channel(), Receiver()
    account = SessionAccount(ByteBudget(1 << 30), 1 << 30)
    call = CallChannel(cast("Any", peer), budget=account, input_pace=None, write_timeout=TIMEOUT_SEC)
    peer.calls["datachannel"](channel)
    call.attach(cast("Any", receiver))
    return call, channel, receiver, account


async def test_events_that_are_not_taken_are_charged_and_then_the_call_is_not_read_and_ends() -> None:
    call, channel, receiver, account = await opened()
    call.write_message(b"x" * MAX_UNSENT_BYTES, is_text=True)
    assert (account.used, call.is_reading) == (MAX_UNSENT_BYTES, True)
    await asyncio.sleep(10 * TIMEOUT_SEC)
    assert receiver.refused == []
    call.write_message(b"x", is_text=True)
    assert (account.used, call.is_reading) == (MAX_UNSENT_BYTES + 1, False)
    await asyncio.sleep(TIMEOUT_SEC + 1)
    assert [type(error) for error in receiver.refused] == [SlowConsumer]
    channel.take(channel.bufferedAmount)
    assert (account.used, call.is_reading) == (0, True)


async def test_a_peer_that_takes_some_in_time_is_slow_and_stays() -> None:
    call, channel, receiver, account = await opened()
    call.write_message(b"x" * 2 * MAX_UNSENT_BYTES, is_text=True)
    for _ in range(6):
        await asyncio.sleep(TIMEOUT_SEC - 1)
        channel.take(MAX_UNSENT_BYTES // 4)
    assert receiver.refused == []
    channel.take(channel.bufferedAmount)
    await asyncio.sleep(2 * TIMEOUT_SEC)
    assert (receiver.refused, account.used) == ([], 0)
