"""Outbox: what a session has to say, until its client takes it. Bounded in bytes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from omni_ws.core.chunks import OutputModality
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import OmniError, SlowConsumer
from omni_ws.service.conversation.journal import Journal
from omni_ws.service.conversation.messages import OF_THE_MOMENT, OUTPUTS, ServerMessage, message_cost
from omni_ws.service.conversation.owner import NOBODY, OutboxReader, OutboxWriter

#: What a session may hold even when the server as a whole holds too much.
FAIR_SHARE_BYTES: Final = 64 * 1024


class Outbox:
    """One reader (the transport), many writers on the same loop.

    Output waits for ``room`` first; control messages go in with ``put_nowait`` and make the outbox full without
    waiting, upon which the transport stops reading its client, who asked for them.

    It is full at its own ``capacity``, or, with more than its fair share, while all sessions of the server together
    hold more than half of ``budget``: the other half is for input.

    With a ``journal_capacity`` above 0 what was taken is kept, up to that many bytes more, to be sent again (see
    ``rewind``) where it did not arrive.
    """

    def __init__(
        self,
        capacity: int,
        *,
        write_timeout: float,
        now: Callable[[], float],
        budget: ByteBudget | None = None,
        journal_capacity: int = 0,
    ) -> None:
        self.capacity = capacity
        self.queued = 0
        #: Set by ``Conversation.attach``.
        self.reader: OutboxReader = NOBODY
        self.writer: OutboxWriter = NOBODY
        self._write_timeout = write_timeout
        self._now = now
        self._budget = budget
        #: Each with its cost.
        self._messages: deque[tuple[ServerMessage, int]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: Since when there is no more room.
        self.full_since: float | None = None
        self._journal = (
            Journal(journal_capacity, budget=budget, fair_share=FAIR_SHARE_BYTES) if journal_capacity else None
        )

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        return self.full_since is not None

    def put_nowait(self, message: ServerMessage) -> None:
        if isinstance(message, OmniError):
            # A traceback holds on to all that was at hand where the error arose: the message that was refused, too.
            message.__traceback__ = message.__context__ = message.__cause__ = None
        cost = message_cost(message)
        self._messages.append((message, cost))
        self.queued += cost
        if self._budget is not None:
            self._budget.used += cost
        if self.full_since is None and self._over_limit:
            self.full_since = self._now()
            self.writer.output_full()
        if len(self._messages) == 1:
            self.reader.output_ready()

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

    def take(self) -> ServerMessage | None:
        """The next message, or None."""
        if not self._messages:
            return None
        message, cost = self._messages.popleft()
        if self._journal is None or type(message) in OF_THE_MOMENT:
            self._give_back(cost)
            return message
        self.queued -= cost
        self._journal.record(message, cost)
        if self.full_since is not None:
            self._make_room()
        return message

    def _give_back(self, cost: int) -> None:
        self.queued -= cost
        if self._budget is not None:
            self._budget.used -= cost
        if self.full_since is not None:
            self._make_room()

    def withdraw(self, request_id: str) -> list[OutputChunk]:
        """Take back what waits of a request's answer, oldest first; what is numbered behind it moves up.

        What was heard of the input stays: it is true however the answer ended.
        """
        withdrawn: list[OutputChunk] = []
        waiting, self._messages = self._messages, deque()
        freed = 0
        for message, cost in waiting:
            if (
                isinstance(message, OutputChunk)
                and message.request_id == request_id
                and message.modality is not OutputModality.TRANSCRIPT
            ):
                withdrawn.append(message)
                freed += cost
                continue
            self._messages.append((_renumbered(message, len(withdrawn)), cost))
        self._give_back(freed)
        return withdrawn

    def clear(self) -> None:
        """What nobody took is dropped, and so is what was taken: nobody comes to hear it again."""
        while self.take() is not None:
            pass
        if self._journal is not None:
            self._journal.clear()

    # what did not arrive

    @property
    def journaled(self) -> int:
        """Bytes that were taken and are kept."""
        return 0 if self._journal is None else self._journal.held

    def acknowledge(self, last_output: int) -> None:
        """The client has everything up to the output of this number."""
        if self._journal is not None:
            self._journal.acknowledge(last_output)

    def can_rewind(self, last_output: int) -> bool:
        return self._journal is not None and self._journal.reaches(last_output)

    def rewind(self, last_output: int) -> int:
        """What comes after this output is to be taken (again), but for what was meant for that moment only.

        Returns how many outputs that are. The client's time to read begins anew.
        """
        assert self._journal is not None
        self.drop_of_the_moment()
        again = self._journal.take_after(last_output)
        self._messages.extendleft((entry.message, entry.cost) for entry in reversed(again))
        self.queued += sum(entry.cost for entry in again)
        if self.full_since is not None or self._over_limit:
            self.full_since = self._now()
        return sum(type(message) in OUTPUTS for message, _ in self._messages)

    def drop_of_the_moment(self) -> None:
        """Nobody is there to hear what means nothing later."""
        kept = [(message, cost) for message, cost in self._messages if type(message) not in OF_THE_MOMENT]
        dropped = self.queued - sum(cost for _, cost in kept)
        self._messages = deque(kept)
        self._give_back(dropped)

    def close(self) -> None:
        """Nobody takes anything any more: what is here is dropped, and what a late writer leaves counts for nothing."""
        self.clear()
        self._budget = None

    def get_timer(self) -> float | None:
        return None if self.full_since is None else self.full_since + self._write_timeout

    def handle_timer(self, now: float) -> None:
        """Raises SlowConsumer when the outbox has been full for too long."""
        if self.full_since is not None and now >= self.full_since + self._write_timeout:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds")

    def _make_room(self) -> None:
        if self.full_since is None or self._over_limit:
            return
        self.writer.output_stalled(self._now() - self.full_since)
        self.full_since = None
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)
        self.reader.output_has_room()

    @property
    def _over_limit(self) -> bool:
        if self.queued >= self.capacity:
            return True
        budget = self._budget
        return budget is not None and self.queued > FAIR_SHARE_BYTES and budget.held > budget.capacity // 2


def _renumbered(message: ServerMessage, by: int) -> ServerMessage:
    if by and isinstance(message, OutputChunk):
        return msgspec.structs.replace(message, sequence_id=message.sequence_id - by)
    if by and isinstance(message, FinalChunk):
        return dataclasses.replace(message, sequence_id=message.sequence_id - by)
    return message
