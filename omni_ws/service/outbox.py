"""Outbox: what a session has to say, until its client takes it. Bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.errors import OmniError, SlowConsumer
from omni_ws.wire.frames import (
    InputAckFrame,
    PongFrame,
    ResponseStarted,
    SessionClosing,
    SessionCreated,
    SessionUpdated,
)

Message: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | ResponseStarted
    | SessionCreated
    | SessionUpdated
    | InputAckFrame
    | SessionClosing
    | PongFrame
)

#: What a message costs besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128


def _cost(message: Message) -> int:
    if isinstance(message, OutputChunk):
        return MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
    return MESSAGE_OVERHEAD_BYTES


class Outbox:
    """One reader (the transport), many writers on the same loop.

    Output waits for ``room`` first; control messages go in with ``put_nowait`` and make the outbox full without
    waiting, upon which the transport stops reading its client, who asked for them. ``on_ready`` is called when the
    first message comes in, ``on_room`` when a full outbox has room again.
    """

    def __init__(self, capacity: int, *, write_timeout: float, now: Callable[[], float]) -> None:
        self.capacity = capacity
        self.queued = 0
        self.on_ready: Callable[[], None] = _nothing
        self.on_room: Callable[[], None] = _nothing
        self._write_timeout = write_timeout
        self._now = now
        self._messages: deque[Message] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._full_since: float | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        return self._full_since is not None

    def put_nowait(self, message: Message) -> None:
        self._messages.append(message)
        self.queued += _cost(message)
        if self.queued >= self.capacity and self._full_since is None:
            self._full_since = self._now()
        if len(self._messages) == 1:
            self.on_ready()

    async def room(self) -> None:
        """Waits while the outbox is full."""
        while self.full:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            try:
                await room
            finally:
                if room in self._waiting:
                    self._waiting.remove(room)

    def take(self) -> Message | None:
        """The next message, or None."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self.queued -= _cost(message)
        if self._full_since is not None and self.queued < self.capacity:
            self._full_since = None
            while self._waiting:
                room = self._waiting.popleft()
                if not room.done():
                    room.set_result(None)
            self.on_room()
        return message

    def get_timer(self) -> float | None:
        return None if self._full_since is None else self._full_since + self._write_timeout

    def handle_timer(self, now: float) -> None:
        """Raises SlowConsumer when the outbox has been full for too long."""
        if self._full_since is not None and now >= self._full_since + self._write_timeout:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds")


def _nothing() -> None:
    pass
