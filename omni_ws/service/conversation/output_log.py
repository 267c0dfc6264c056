"""The output of a session: what its client has yet to take, and what was taken and may be wanted again.

A session speaks through one Attachment at a time: the connection of its client, or a request over HTTP. In between
nobody is notified of anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from omni_ws.core.chunks import FinalChunk, OutputChunk, OutputModality
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge, SlowConsumer
from omni_ws.service.conversation.messages import (
    OF_THE_MOMENT,
    OUTPUTS,
    RequestWarning,
    SavedMessage,
    ServerMessage,
    message_cost,
)


class Attachment:
    """Feeds a session with input and time, and takes its output. All that a session knows of what carries it.

    No method may raise. As it stands here, it does nothing: a session has this one while it has no other.
    """

    def write_now(self, output: OutputChunk) -> bool:
        """Write an output before which none waits. Returns False, and the log queues it, where that must wait.

        It is called inside the call of the engine, and spares the queue: nothing is done twice for a piece that can go
        straight to the socket.
        """
        return False

    def output_ready(self) -> None:
        """No output waited, and now one does, which may be taken at once."""

    def output_has_room(self) -> None:
        """The log was full and has room again."""

    def input_may_continue(self) -> None:
        """Input that was held back (see ``Conversation.input_full``) may be received again."""

    def time_is_up(self, error: OmniError) -> None:
        """The client was silent for too long, has left a gap open, or has not read: that is ``error``."""

    def saved(self) -> bytes:
        """What it alone knows of the session, with which another attachment of its kind goes on. It may be asked often.

        Empty where that is nothing, or where the session cannot be moved.
        """
        return b""

    def replaced(self) -> None:
        """Another connection has taken over the session."""

    def session_over(self, error: OmniError | None) -> None:
        """The last messages are in the log: send them, close, and ``detach``.

        ``error`` is the reason to close with; None where no client is there to read it.
        """


NOBODY: Final = Attachment()


class StoredBytes:
    """The bytes that all stored answers together may hold: at most ``capacity``, and charged to ``server`` as well.

    When the capacity does not suffice, ``evict`` is called with the number of bytes wanted. It may discard answers.
    """

    def __init__(self, server: ByteBudget, capacity: int, evict: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.used = 0
        self._server = server
        self._evict = evict

    def take(self, size: int) -> None:
        """Charge ``size`` bytes. Raises EngineOverloaded, charging nothing, where they exceed a budget."""
        if self.used + size > self.capacity:
            self._evict(size)
        if self.used + size > self.capacity:
            raise EngineOverloaded("the server's memory for stored answers is full", retry_after_ms=1000)
        self._server.take(size)
        self.used += size

    def take_anyway(self, size: int) -> None:
        """Charge ``size`` bytes, whatever the budgets, for a small message that must not be lost."""
        self._server.charge(size)
        self.used += size

    def give(self, size: int) -> None:
        """Return ``size`` charged bytes."""
        self._server.give(size)
        self.used -= size


#: Bytes that each session may queue, and keep, even while the server as a whole holds too much.
FAIR_SHARE_BYTES: Final = 64 * 1024
#: Outputs that follow another this soon are written together. A server that is paced by a model or a microphone writes
#: each at once; one that has much to say at once makes fewer system calls.
COALESCE_SEC: Final = 0.001


def _unnoticed(seconds: float = 0) -> None:
    pass


class KeptMessage(NamedTuple):
    """A message that was taken, and the bytes that it is charged with."""

    message: ServerMessage
    cost: int
    #: The number of the output; for any other message, that of the output that follows it. A client that has received
    #: exactly the outputs below this number lacks this message.
    number: int


class SavedOutput(msgspec.Struct, kw_only=True):
    """An OutputLog in a form that can be written to bytes.

    What is kept has its numbers, see KeptMessage; ``first`` is the position of what is stored.
    """

    kept: list[tuple[SavedMessage, int]]
    waiting: list[SavedMessage]
    next_output: int
    forgotten: int
    first: int


class OutputLog:
    """Messages in order, bounded in bytes, from several writers to a reader on the same event loop, and to later ones.

    *Waiting.* Output waits for ``room``, then uses ``put_nowait``. Where no other waits, it goes to the reader at once,
    unless it follows another within COALESCE_SEC: then it is queued, with those that come behind it. Control messages
    use ``put_nowait`` alone, which never fails: they may make the log full, and the transport then stops reading the
    client that provokes them. The log is full with ``capacity`` bytes, or with FAIR_SHARE_BYTES while all sessions of
    the server together hold more than half of ``budget``; the other half is for input. A client that leaves it full for
    ``write_timeout`` seconds is a SlowConsumer.

    *Kept.* With a ``kept_capacity``, messages that were taken are kept, up to that many bytes more, until the client
    acknowledges them; the oldest make room, and all but FAIR_SHARE_BYTES do while the server holds more than half of
    its budget. ``rewind`` has them wait again, for a client that did not receive them.

    *Stored.* With ``stored``, which is charged for them, they are kept for any number of readers, each at a position of
    its own. None makes room: ``take`` refuses what is too much.
    """

    def __init__(
        self,
        capacity: int,
        *,
        write_timeout: float,
        now: Callable[[], float],
        budget: ByteBudget | None = None,
        kept_capacity: int = 0,
        stored: StoredBytes | None = None,
    ) -> None:
        self.capacity = capacity
        #: Bytes of the messages that wait, and of those that are kept.
        self.queued = 0
        self.held = 0
        #: Changed by ``attach``.
        self.reader: Attachment = NOBODY
        self._when_full: Callable[[], None] = _unnoticed
        self._when_room: Callable[[float], None] = _unnoticed
        #: When an output last went to the reader at once.
        self.written_at = -math.inf
        self._write_timeout = write_timeout
        self._now = now
        self.budget = budget
        #: Each message with its cost.
        self._messages: deque[tuple[ServerMessage, int]] = deque()
        self._waiting: list[asyncio.Future[bool]] = []
        #: Since when the log is full; None while it has room.
        self.full_since: float | None = None
        self._kept_capacity = kept_capacity
        self._kept: deque[KeptMessage] = deque()
        #: The number of the next output to be taken.
        self._next_output = 0
        #: The number of the newest message that was dropped: a client that has received less cannot resume.
        self._forgotten = -1
        self._stored = stored
        #: The position of the first message that is stored.
        self._first = 0
        self._ended = False
        #: Wakes those who wait now for what is stored next.
        self._changed: asyncio.Event | None = None

    def attach(self, reader: Attachment) -> None:
        """Notify ``reader`` from now on, in place of the one before."""
        self.reader = reader

    def watch_room(self, full: Callable[[], None], room: Callable[[float], None]) -> None:
        """Call ``full`` each time the log becomes full, and ``room`` as it has room again, with the seconds between."""
        self._when_full, self._when_room = full, room

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._messages)

    @property
    def full(self) -> bool:
        """Whether output has to wait."""
        return self.full_since is not None

    def put_nowait(self, message: ServerMessage) -> None:
        """Queue a message, whether the log is full or not. The reader may take it before this returns."""
        messages = self._messages
        if type(message) is OutputChunk and not messages:
            now = self._now()
            if now - self.written_at >= COALESCE_SEC and self.reader.write_now(message):
                self.written_at = now
                if self._kept_capacity:
                    self._keep_written(message)
                return
        if isinstance(message, OmniError):  # whose traceback may hold the refused payload
            message = message.without_traceback()
        elif isinstance(message, RequestWarning):
            message = RequestWarning(message.error.without_traceback())
        cost = message_cost(message)
        messages.append((message, cost))
        self.queued += cost
        if self.budget is not None:
            self.budget.charge(cost)
        if self.full_since is None and self._over_limit:
            self.full_since = self._now()
            self._when_full()
        if len(messages) == 1:
            self.reader.output_ready()

    def _keep_written(self, output: OutputChunk) -> None:
        """Keep an output that never waited."""
        cost = message_cost(output)
        if self.budget is not None:
            self.budget.charge(cost)
        self._keep(output, cost)

    def _keep(self, message: ServerMessage, cost: int) -> None:
        """Keep a message that was taken and is charged already, and drop the oldest beyond the capacity."""
        self._kept.append(KeptMessage(message, cost, self._next_output))
        if type(message) in OUTPUTS:
            self._next_output += 1
        self.held += cost
        while self.held > self._kept_capacity or (self.held > FAIR_SHARE_BYTES and self._is_scarce):
            self._forget_oldest()

    async def room(self) -> None:
        """Wait until the log is not full, or ``wake_writers``."""
        looks = False
        while self.full and not looks:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            try:
                looks = await room
            finally:
                if room in self._waiting:
                    self._waiting.remove(room)

    def wake_writers(self) -> None:
        """Have all who wait for room look whether they still want it."""
        self._wake_all(looks=True)

    def _wake_all(self, *, looks: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(looks)

    def take(self) -> ServerMessage | None:
        """Remove and return the next message that waits; None if there is none. It is kept where messages are.

        Raises, where messages are stored, PayloadTooLarge beyond the capacity and EngineOverloaded beyond a budget.
        Only output can be refused: other messages are small and end or begin an answer.
        """
        if not self._messages:
            return None
        message, cost = self._messages.popleft()
        if not self._kept_capacity or type(message) in OF_THE_MOMENT:
            self._give_back(cost)
            return message
        if self._stored is not None:
            self._give_back(cost)
            self._store(message, cost, self._stored)
            return message
        self.queued -= cost
        self._keep(message, cost)
        if self.full_since is not None:
            self._make_room()
        return message

    def _give_back(self, cost: int) -> None:
        self.queued -= cost
        if self.budget is not None:
            self.budget.give(cost)
        if self.full_since is not None:
            self._make_room()

    def withdraw(self, request_id: str) -> list[OutputChunk]:
        """Remove the queued outputs of a request and return them, the oldest first; later outputs are renumbered.

        Transcripts stay: what the user said is true however the answer ends.
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
        """Drop all messages, those that wait and those that are kept."""
        self._messages.clear()
        self._give_back(self.queued)
        if self._stored is not None:
            self.discard()
        while self._kept:
            self._forget_oldest()

    # resume

    @property
    def journaled(self) -> int:
        """Bytes of the messages that are kept for resume."""
        return self.held if self._stored is None else 0

    def acknowledge(self, last_output: int) -> None:
        """Drop everything up to this output, which the client has received; at most up to the last that was taken."""
        last_output = min(last_output, self._next_output - 1)
        while self._kept and self._kept[0].number <= last_output:
            self._forget_oldest()

    def can_rewind(self, last_output: int) -> bool:
        """Whether this output was taken, and everything behind it is still here."""
        return bool(self._kept_capacity) and self._forgotten <= last_output < self._next_output

    def rewind(self, last_output: int) -> int:
        """Queue again everything after this output, except messages of the moment. Requires ``can_rewind``.

        Returns the number of outputs that wait now. The write time-out begins anew.
        """
        self.drop_of_the_moment()
        self.acknowledge(last_output)
        self._messages.extendleft((one.message, one.cost) for one in reversed(self._kept))
        self.queued, self.held = self.queued + self.held, 0
        self._kept.clear()
        self._next_output = last_output + 1
        if self.full_since is not None or self._over_limit:
            self.full_since = self._now()
        return sum(type(message) in OUTPUTS for message, _ in self._messages)

    def drop_of_the_moment(self) -> None:
        """Drop the messages that concern a connection that is gone."""
        kept = [(message, cost) for message, cost in self._messages if type(message) not in OF_THE_MOMENT]
        dropped = self.queued - sum(cost for _, cost in kept)
        self._messages = deque(kept)
        self._give_back(dropped)

    def close(self) -> None:
        """Drop everything but what is stored, for good. What a late writer queues is not charged to the budget."""
        if self._stored is not None:
            self.finish()
            return
        self.clear()
        self.budget = None

    def _forget_oldest(self) -> None:
        oldest = self._kept.popleft()
        self._forgotten = max(self._forgotten, oldest.number)
        self.held -= oldest.cost
        if self.budget is not None:
            self.budget.give(oldest.cost)

    # stored answers

    @property
    def end(self) -> int:
        """The position of the next message to be stored."""
        return self._first + len(self._kept)

    @property
    def messages(self) -> tuple[ServerMessage, ...]:
        """The messages that are stored."""
        return tuple(one.message for one in self._kept)

    def _store(self, message: ServerMessage, cost: int, stored: StoredBytes) -> None:
        if type(message) is OutputChunk:
            if self.held + cost > self._kept_capacity:
                raise PayloadTooLarge(f"the answer exceeds the {self._kept_capacity} bytes that the server stores")
            stored.take(cost)
        else:
            stored.take_anyway(cost)
        self.held += cost
        self._append(message, cost)

    def store_end(self, message: FinalChunk | OmniError) -> None:
        """Store how an answer ended that was discarded. Not charged, like the record of the session itself."""
        self._append(message, 0)

    def discard(self) -> None:
        """Discard what is stored, and store nothing of what is taken from now on. Positions continue. Idempotent."""
        self._first = self.end
        self._kept.clear()
        if self._stored is not None:
            self._stored.give(self.held)
        self.held = self._kept_capacity = 0

    def finish(self) -> None:
        """Nothing more will be stored, and nobody is notified of anything. Idempotent."""
        self._ended = True
        self.reader, self._when_full, self._when_room = NOBODY, _unnoticed, _unnoticed
        self._wake_readers()

    async def get(self, position: int) -> tuple[int, ServerMessage] | None:
        """Wait for the first message at or after ``position``; return the position behind it, and the message.

        Messages may be discarded before they are read. Returns None if nothing more comes.
        """
        while (found := self.find(position)) is None and not self._ended:
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()
        return found

    def find(self, position: int) -> tuple[int, ServerMessage] | None:
        """Return what ``get`` would return without waiting; None where it would wait."""
        index = max(0, position - self._first)
        return (self._first + index + 1, self._kept[index].message) if index < len(self._kept) else None

    def _append(self, message: ServerMessage, cost: int) -> None:
        self._kept.append(KeptMessage(message, cost, self.end))
        self._wake_readers()

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    # saved

    def saved(self) -> SavedOutput:
        """What is kept and what waits, less what concerns one connection only."""
        return SavedOutput(
            kept=[(SavedMessage.of(one.message), one.number) for one in self._kept],
            waiting=[SavedMessage.of(one) for one, _ in self._messages if type(one) not in OF_THE_MOMENT],
            next_output=self._next_output,
            forgotten=self._forgotten,
            first=self._first,
        )

    def restore(self, saved: SavedOutput) -> None:
        """Go on behind what another log has sent. Raises as ``SavedMessage.restored``, and as ``StoredBytes.take``."""
        kept = [(told.restored(), number) for told, number in saved.kept]
        costs = [message_cost(message) for message, _ in kept]
        waiting = [(one, message_cost(one)) for one in (told.restored() for told in saved.waiting)]
        if self._stored is not None:
            self._stored.take(sum(costs))
        elif self.budget is not None:
            self.budget.charge(sum(costs))
        for (message, number), cost in zip(kept, costs, strict=True):
            self._kept.append(KeptMessage(message, cost, number))
        self._messages.extend(waiting)
        self.held, self.queued = sum(costs), sum(cost for _, cost in waiting)
        if self.budget is not None:
            self.budget.charge(self.queued)
        self._next_output, self._forgotten, self._first = saved.next_output, saved.forgotten, saved.first

    # limits

    def get_timer(self) -> float | None:
        """When ``handle_timer`` is due; None while the log has room."""
        return None if self.full_since is None else self.full_since + self._write_timeout

    def handle_timer(self, now: float) -> None:
        """Raise SlowConsumer if the log has been full for ``write_timeout``."""
        if self.full_since is not None and now >= self.full_since + self._write_timeout:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds")

    def _make_room(self) -> None:
        if self.full_since is None or self._over_limit:
            return
        self._when_room(self._now() - self.full_since)
        self.full_since = None
        self._wake_all(looks=False)
        self.reader.output_has_room()

    @property
    def _over_limit(self) -> bool:
        """Whether the limit, which depends on the load of the server, is reached."""
        if self.queued >= self.capacity:
            return True
        return self.queued > FAIR_SHARE_BYTES and self._is_scarce

    @property
    def _is_scarce(self) -> bool:
        """Whether all sessions together hold more than half of what they may."""
        return self.budget is not None and self.budget.over_half()


def _renumbered(message: ServerMessage, by: int) -> ServerMessage:
    if by and isinstance(message, OutputChunk):
        return msgspec.structs.replace(message, sequence_id=message.sequence_id - by)
    if by and isinstance(message, FinalChunk):
        return dataclasses.replace(message, sequence_id=message.sequence_id - by)
    return message
