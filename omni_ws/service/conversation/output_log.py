"""The output of a session: messages that wait for its client, and those that were sent and may be needed again.

A session sends through one Attachment at a time: the connection of its client, or a request over HTTP. While it has
none, nobody is notified of anything. OutputSequencer numbers the outputs. The types of messages, what each costs and
their saved form are at the end of this module, with the limits of a conversation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from omni_ws.core.chunks import (
    AnswerWarning,
    FinalChunk,
    FinishReason,
    OutputChunk,
    OutputModality,
    UrlCitation,
    Usage,
    WordsKnown,
)
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget, memory_of
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError, PayloadTooLarge, SlowConsumer
from omni_ws.wire.server_frames import (
    BackchannelFrame,
    HistoryItemsFrame,
    HistoryTruncatedFrame,
    InputAckFrame,
    PongFrame,
    ResponseStartedFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionKeptFrame,
    SessionUpdatedFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
    encode_frame,
)

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


class Attachment:
    """The carrier of a session, such as a connection or an HTTP request: the methods that the session calls on it.

    No method may raise. Those of this base class have no effect: a session without a carrier is attached to NOBODY.
    """

    def write_now(self, output: OutputChunk) -> bool:
        """Write an output to the socket without waiting. Returns False, having done nothing, if the output has to wait.

        Called within the engine's own call, and only while no other output waits. After False the log queues the
        output.
        """
        return False

    def output_ready(self) -> None:
        """Called when a message enters the empty queue, or the gate lets messages pass.

        The attachment may take the messages within this call.
        """

    def output_has_room(self) -> None:
        """Called when the log was full and has room again."""

    def input_may_continue(self) -> None:
        """Called when input that was held back (see ``Conversation.input_full``) may be received again."""

    def time_is_up(self, error: OmniError) -> None:
        """Called with the error of a client that was silent, left a gap open, or did not read for too long."""

    def replaced(self) -> None:
        """Called when another connection has taken over the session."""

    def deleted(self) -> None:
        """Called when the session was deleted on request, here or by another server."""
        self.replaced()

    def session_over(self, error: OmniError | None) -> None:
        """Called when the session has ended, and its last messages are in the log: send them, close, and ``detach``.

        ``error`` is the reason to close with; None if no client is connected that would read it.
        """


NOBODY: Final = Attachment()


class Gate:
    """Decides when messages may leave the log. The keepers of sessions in a store implement it.

    A message must be settled in the store before the client gets it.
    """

    def admit(self, message: ServerMessage) -> int:
        """Note a message that enters the log. Returns its ticket, a number for the later call of ``OutputLog.open``.

        Tickets never decrease. With ticket 0 the message waits only for the messages before it.
        """
        raise NotImplementedError

    def said(self, request_id: str, text: str) -> None:
        """Note text of an answer that is only spoken: no message contains it."""
        raise NotImplementedError

    def changed(self) -> None:
        """Note a change that no message shows: an answer's text is complete, or outputs were withdrawn."""
        raise NotImplementedError


class StoredBytes:
    """A budget of bytes for all stored answers together: at most ``capacity``, and charged to ``server`` as well.

    When the capacity does not suffice, ``evict`` is called with the number of bytes that are needed. It may discard
    answers.
    """

    def __init__(self, server: ByteBudget, capacity: int, evict: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.used = 0
        self._server = server
        self._evict = evict

    def take(self, size: int) -> None:
        """Charge ``size`` bytes; ``evict`` may be called first.

        Raises EngineOverloaded, charging nothing, if they exceed a budget.
        """
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
        """Refund ``size`` charged bytes."""
        self._server.give(size)
        self.used -= size


#: Bytes that each session may queue, and keep, even while the server as a whole holds too much.
FAIR_SHARE_BYTES: Final = 64 * 1024
#: Bytes of the messages that were taken, and that a record of the session in a store has: some seconds of sound.
SAVED_BYTES: Final = 512 * 1024
#: Outputs that follow another this soon are written together, with fewer system calls. At the pace of a model or a
#: microphone, each output is written immediately.
COALESCE_SEC: Final = 0.001


def _unnoticed(seconds: float = 0) -> None:
    pass


class KeptMessage(NamedTuple):
    """A message that was taken from the log and is kept, and its cost in bytes."""

    message: ServerMessage
    cost: int
    #: The number of the output; for any other message, that of the output that follows it. A client that has received
    #: exactly the outputs below this number lacks this message.
    number: int


_NONE_KEPT: Final[deque[KeptMessage]] = deque(maxlen=0)


class SavedOutput(msgspec.Struct, kw_only=True):
    """An OutputLog in a form that can be written to bytes.

    ``kept`` has the kept messages with their numbers (see KeptMessage), perhaps only the newest (see
    ``OutputLog.saved``); ``forgotten`` is the highest number of those that are gone. ``waiting`` has the messages that
    wait. ``next_output`` is the number of the next output, and ``first`` the position of the first stored message.
    """

    kept: list[tuple[SavedMessage, int]]
    waiting: list[SavedMessage]
    next_output: int
    forgotten: int
    first: int


class OutputLog:
    """The log of a session's messages, bounded in bytes: several writers, and one reader at a time on the same loop.

    *Waiting.* A writer of output awaits ``room``, then calls ``put_nowait``. If no message waits, the output goes
    straight to the reader, unless it follows another within COALESCE_SEC: then it is queued, and so are those after it.
    For control messages ``put_nowait`` alone is called, which never fails: they may make the log full, and the
    transport then stops reading the client that provokes them. The log is full with ``capacity`` bytes, or with
    FAIR_SHARE_BYTES while all sessions of the server together hold more than half of ``budget``; the other half is for
    input. A client that leaves the log full for ``write_timeout`` seconds is a SlowConsumer.

    *Kept.* With a ``kept_capacity``, messages that were taken are kept, up to that many bytes more, until the client
    acknowledges them. The oldest are dropped when there is no room, as are all beyond FAIR_SHARE_BYTES while the server
    holds more than half of its budget. ``rewind`` queues kept messages again, for a client that did not receive them.

    *Stored.* With ``stored``, messages that were taken are charged to this budget, and kept for any number of readers,
    each at a position of its own. Old ones are not dropped for new ones: ``take`` raises if there are too many.

    *Gated.* With a ``gate``, each message gets a number (ticket) from ``Gate.admit``, and can be taken only once
    ``open`` was called with this number or a higher one.
    """

    # Here, since most logs have none. An empty deque takes 760 bytes, of which thousands of idle sessions have no use.
    gate: Gate | None = None
    _kept: deque[KeptMessage] = _NONE_KEPT
    #: The ticket of the newest message that may be taken.
    _opened = 0

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
        #: Where messages go; changed by ``attach``.
        self.reader: Attachment = NOBODY
        self._when_full: Callable[[], None] = _unnoticed
        self._when_room: Callable[[float], None] = _unnoticed
        #: When an output last went to the reader immediately.
        self.written_at = -math.inf
        self._write_timeout = write_timeout
        self._now = now
        self.budget = budget
        #: Each message with its cost, and its ticket (see Gate).
        self._messages: deque[tuple[ServerMessage, int, int]] = deque()
        self._waiting: list[asyncio.Future[bool]] = []
        #: Since when the log is full; None while it has room.
        self.full_since: float | None = None
        self._kept_capacity = kept_capacity
        #: The number of the next output to be taken.
        self._next_output = 0
        #: The number of the newest message that was dropped: a client that has received less cannot resume.
        self._forgotten = -1
        self._stored = stored
        #: The position of the first message that is stored.
        self._first = 0
        self._ended = False
        #: Set when the next message is stored; None while nobody waits for that.
        self._changed: asyncio.Event | None = None

    def attach(self, reader: Attachment) -> None:
        """Write to ``reader`` and notify it from now on, instead of the previous reader."""
        self.reader = reader

    def watch_room(self, full: Callable[[], None], room: Callable[[float], None]) -> None:
        """Call ``full`` each time the log becomes full, and ``room``, with the seconds it was full, once it is not."""
        self._when_full, self._when_room = full, room

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._messages)

    @property
    def full(self) -> bool:
        """Whether output has to wait."""
        return self.full_since is not None

    def put_nowait(self, message: ServerMessage) -> None:
        """Queue a message, even if the log is full. The reader may take it before this returns."""
        messages = self._messages
        ticket = 0 if self.gate is None else self.gate.admit(message)
        if type(message) is OutputChunk and not messages and ticket <= self._opened:
            now = self._now()
            if now - self.written_at >= COALESCE_SEC and self.reader.write_now(message):
                self.written_at = now
                if self._kept_capacity:
                    cost = message_cost(message)
                    if self.budget is not None:
                        self.budget.charge(cost)
                    self._keep(message, cost)
                return
        if isinstance(message, OmniError):  # whose traceback may hold the refused payload
            message = message.without_traceback()
        elif isinstance(message, RequestWarning):
            message = RequestWarning(message.error.without_traceback())
        cost = message_cost(message)
        messages.append((message, cost, ticket))
        self.queued += cost
        if self.budget is not None:
            self.budget.charge(cost)
        if self.full_since is None and self._over_limit:
            self.full_since = self._now()
            self._when_full()
        if len(messages) == 1 and ticket <= self._opened:
            self.reader.output_ready()

    def open(self, ticket: int) -> None:
        """Let messages be taken whose tickets are ``ticket`` or lower. See Gate."""
        if ticket > self._opened:
            self._opened = ticket
            if self.ready:
                self.reader.output_ready()

    @property
    def ready(self) -> bool:
        """Whether a message can be taken now."""
        return bool(self._messages) and self._messages[0][2] <= self._opened

    def _keep(self, message: ServerMessage, cost: int) -> None:
        """Keep a taken message, whose cost is charged already; drop the oldest messages beyond the capacity."""
        self._keep_also(KeptMessage(message, cost, self._next_output))
        if type(message) in OUTPUTS:
            self._next_output += 1
        self.held += cost
        while self.held > self._kept_capacity or (self.held > FAIR_SHARE_BYTES and self._is_scarce):
            self._forget_oldest()

    def _keep_also(self, kept: KeptMessage) -> None:
        if self._kept is _NONE_KEPT:
            self._kept = deque()
        self._kept.append(kept)

    async def room(self) -> None:
        """Wait until the log is not full, or ``wake_writers`` is called."""
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
        """Wake all writers that wait for room, so that they check whether they still need it."""
        self._wake_all(looks=True)

    def _wake_all(self, *, looks: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(looks)

    @property
    def next(self) -> ServerMessage | None:
        """The message that ``take`` would return now."""
        return self._messages[0][0] if self.ready else None

    def take(self) -> ServerMessage | None:
        """Remove and return the next message that waits; None if none may be taken. A log that keeps messages keeps it.

        A log that stores messages raises PayloadTooLarge beyond its capacity and EngineOverloaded beyond a budget, and
        drops the message. It does so only for output: other messages are small, and begin or end an answer.
        """
        if not self._messages or self._messages[0][2] > self._opened:
            return None
        message, cost, _ = self._messages.popleft()
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
        """Remove a request's queued outputs and return them, oldest first; outputs behind them are renumbered.

        Transcripts stay: they are right however the answer ends.
        """
        withdrawn: list[OutputChunk] = []
        waiting, self._messages = self._messages, deque()
        freed = 0
        for message, cost, ticket in waiting:
            if (
                isinstance(message, OutputChunk)
                and message.request_id == request_id
                and message.modality is not OutputModality.TRANSCRIPT
            ):
                withdrawn.append(message)
                freed += cost
                continue
            self._messages.append((_renumbered(message, len(withdrawn)), cost, ticket))
        self._give_back(freed)
        if withdrawn and self.gate is not None:
            self.gate.changed()
        return withdrawn

    def clear(self) -> None:
        """Drop all messages, those that wait and those that are kept. A log that stores messages stores no more."""
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
        """Drop the kept messages up to the output ``last_output``, which the client has received."""
        last_output = min(last_output, self._next_output - 1)
        while self._kept and self._kept[0].number <= last_output:
            self._forget_oldest()

    def can_rewind(self, last_output: int) -> bool:
        """Return whether the output ``last_output`` was taken, and the log still has every message after it."""
        return bool(self._kept_capacity) and self._forgotten <= last_output < self._next_output

    def rewind(self, last_output: int) -> int:
        """Queue all kept messages after the output ``last_output`` again, except those OF_THE_MOMENT.

        Requires ``can_rewind``. Returns the number of outputs that wait now. The write time-out starts over.
        """
        self.drop_of_the_moment()
        self.acknowledge(last_output)
        self._messages.extendleft((one.message, one.cost, 0) for one in reversed(self._kept))
        self.queued, self.held = self.queued + self.held, 0
        self._kept.clear()
        self._next_output = last_output + 1
        if self.full_since is not None or self._over_limit:
            self.full_since = self._now()
        return sum(type(one[0]) in OUTPUTS for one in self._messages)

    def drop_of_the_moment(self) -> None:
        """Drop the queued messages OF_THE_MOMENT: they concerned a connection that is gone."""
        kept = [one for one in self._messages if type(one[0]) not in OF_THE_MOMENT]
        dropped = self.queued - sum(cost for _, cost, _ in kept)
        self._messages = deque(kept)
        self._give_back(dropped)

    def close(self) -> None:
        """Close the log, and drop all messages unless they are stored. Messages that come later are not charged."""
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
        """The position that the next stored message will have."""
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
        """Store the end of an answer whose messages were discarded. No bytes are charged for it."""
        self._append(message, 0)

    def discard(self) -> None:
        """Discard the stored messages, and store none from now on. Positions continue. Idempotent."""
        self._first = self.end
        self._kept.clear()
        if self._messages and not self.ready:  # they would not be stored, and the gate may never open
            self._messages.clear()
            self._give_back(self.queued)
        if self._stored is not None:
            self._stored.give(self.held)
        self.held = self._kept_capacity = 0

    def finish(self) -> None:
        """Mark the end of the stored messages: tasks that wait in ``get`` wake, and nobody is notified. Idempotent."""
        self._ended = True
        self.reader, self._when_full, self._when_room = NOBODY, _unnoticed, _unnoticed
        self._wake_readers()

    async def get(self, position: int) -> tuple[int, ServerMessage] | None:
        """Wait for the first stored message at or after ``position``; return the position after it, and the message.

        Messages may be discarded before they are read. Returns None if no more messages will come.
        """
        while (found := self.find(position)) is None and not self._ended:
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()
        return found

    def find(self, position: int) -> tuple[int, ServerMessage] | None:
        """Return what ``get`` returns, but None instead of waiting."""
        index = max(0, position - self._first)
        return (self._first + index + 1, self._kept[index].message) if index < len(self._kept) else None

    def _append(self, message: ServerMessage, cost: int) -> None:
        self._keep_also(KeptMessage(message, cost, self.end))
        self._wake_readers()

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    # saved

    def saved(self) -> SavedOutput:
        """Return the waiting and the kept messages, both without those OF_THE_MOMENT, and the counters.

        A log with a ``gate`` is saved often: of its kept messages only the newest SAVED_BYTES are returned, unless the
        log is stored for readers.
        """
        forgotten, first = self._forgotten, 0
        held = self.held
        while self.gate is not None and self._stored is None and held > SAVED_BYTES:
            held -= self._kept[first].cost
            forgotten = max(forgotten, self._kept[first].number)
            first += 1
        kept = self._kept if not first else islice(self._kept, first, None)
        return SavedOutput(
            kept=[(SavedMessage.of(one.message), one.number) for one in kept],
            waiting=[SavedMessage.of(one) for one, *_ in self._messages if type(one) not in OF_THE_MOMENT],
            next_output=self._next_output,
            forgotten=forgotten,
            first=self._first,
        )

    def restore(self, saved: SavedOutput) -> None:
        """Take over the state of a saved log. Raises what ``SavedMessage.restored`` and ``StoredBytes.take`` raise."""
        kept = [(told.restored(), number) for told, number in saved.kept]
        costs = [message_cost(message) for message, _ in kept]
        waiting = [(one, message_cost(one), 0) for one in (told.restored() for told in saved.waiting)]
        if self._stored is not None:
            self._stored.take(sum(costs))
        elif self.budget is not None:
            self.budget.charge(sum(costs))
        for (message, number), cost in zip(kept, costs, strict=True):
            self._keep_also(KeptMessage(message, cost, number))
        self._messages.extend(waiting)
        self.held, self.queued = sum(costs), sum(cost for _, cost, _ in waiting)
        if self.budget is not None:
            self.budget.charge(self.queued)
        self._next_output, self._forgotten, self._first = saved.next_output, saved.forgotten, saved.first

    def receive(self, last_output: int, unsent: Sequence[OutputChunk]) -> None:
        """Bring a restored log up to date: after it was saved, the client received outputs up to ``last_output``.

        ``unsent`` are outputs that were made after the log was saved and that the client lacks.
        """
        while self._messages and self._next_output <= last_output:
            message, cost, _ = self._messages.popleft()
            self.queued -= cost
            self._keep(message, cost)
        self._next_output = max(self._next_output, last_output + 1)
        for chunk in unsent:
            self.put_nowait(chunk)

    # limits

    def get_timer(self) -> float | None:
        """Return when ``handle_timer`` is due; None while the log has room."""
        return None if self.full_since is None else self.full_since + self._write_timeout

    def handle_timer(self, now: float) -> None:
        """Raise SlowConsumer if the log has been full for ``write_timeout`` seconds."""
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
        """Whether the queued bytes have reached the limit, which depends on the load of the server."""
        if self.queued >= self.capacity:
            return True
        return self.queued > FAIR_SHARE_BYTES and self._is_scarce

    @property
    def _is_scarce(self) -> bool:
        """Whether all sessions together hold more than half of the server's budget."""
        return self.budget is not None and self.budget.over_half()


def _renumbered(message: ServerMessage, by: int) -> ServerMessage:
    if by and isinstance(message, OutputChunk):
        return msgspec.structs.replace(message, sequence_id=message.sequence_id - by)
    if by and isinstance(message, FinalChunk):
        return dataclasses.replace(message, sequence_id=message.sequence_id - by)
    return message


# The numbers of outputs.


class OutputSequencer:
    """Numbers the outputs of a session, across its requests, from ``next_sequence_id`` on.

    Each request is opened, its outputs are numbered, and its final closes it. To number an output of a request that is
    not open is a bug of the caller and raises RuntimeError.
    """

    __slots__ = ("_late", "_open", "next_sequence_id")

    def __init__(self, next_sequence_id: int = 0, *, late: Iterable[str] = ()) -> None:
        self.next_sequence_id = next_sequence_id
        self._open: dict[str, None] = {}  # smaller than a set, while it is empty
        #: Requests whose final has been numbered, perhaps by another sequencer, and whose late transcript has not.
        self._late: dict[str, None] = dict.fromkeys(late)

    def open(self, request_id: str) -> None:
        """Allow output of ``request_id``."""
        self._open[request_id] = None

    def withdraw(self, request_id: str) -> None:
        """Forget an open request that had no output, and will have none."""
        del self._open[request_id]

    def take_number(self, request_id: str) -> int:
        """Return the next number, for an output of ``request_id``."""
        if request_id not in self._open:
            raise RuntimeError(f"{request_id} is not open for output")
        return self._next()

    def take_late_number(self, request_id: str) -> int:
        """Return the next number, for the late transcript of a request. It is the last output of the request."""
        if request_id not in self._late:
            raise RuntimeError(f"{request_id} has no late transcript")
        del self._late[request_id]
        return self._next()

    def _next(self) -> int:
        number = self.next_sequence_id
        self.next_sequence_id += 1
        return number

    def number_from(self, next_sequence_id: int) -> None:
        """Set the next number: another server has numbered the outputs so far."""
        self.next_sequence_id = next_sequence_id

    def take_back(self, count: int) -> None:
        """Take back the latest ``count`` numbers, whose outputs were not sent, to use them again."""
        self.next_sequence_id -= count

    def take_last_number(self, request_id: str, *, late: bool = False) -> int:
        """Return the next number, for the final of a request. With ``late``, a late transcript may follow the final."""
        number = self.take_number(request_id)
        del self._open[request_id]
        if late:
            self._late[request_id] = None
        return number


# The messages that a session sends, their cost in bytes, their saved form, and the limits of a conversation.


#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes does
#: not count the overhead of a chunk, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18
#: Tool results that one request may have. Their ids are kept until it ends, so that even empty results take memory.
MAX_TOOL_RESULTS: Final = 1 << 10
#: Seconds that speech recognition of a turn may take after the answer to the turn was cut off.
ASR_TIMEOUT_SEC: Final = 30.0


class SumsUp:
    """Summarises the older part of long conversations in the background.

    This base class does nothing; see Summaries.
    """

    def disturb(self, conversation: Conversation) -> None:
        """Interrupt the work for this conversation: somebody speaks, or an answer is due."""

    def note_quiet(self, conversation: Conversation) -> None:
        """Note that nobody speaks in this conversation, and no answer is due."""

    def forget(self, conversation: Conversation) -> None:
        """Stop all work for a conversation, which ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one conversation; those of its input stream are in ``stream``."""

    stream: StreamLimits
    #: Whether the session is one request over HTTP.
    single_request: bool = False
    #: Requests that may wait behind the one that is being answered.
    max_pending_requests: int = 4
    #: Tokens, by ``estimate_tokens`` and a rate of speech, of the history that the engine gets; 0 for none.
    max_history_tokens: int = 4096
    #: See ASR_TIMEOUT_SEC.
    asr_timeout_sec: float = ASR_TIMEOUT_SEC
    #: Whether requests keep their input to their end, so that the session can be saved at any time.
    keeps_input: bool = False
    #: What sums up long talks; otherwise the oldest turns are dropped.
    summaries: SumsUp = field(default_factory=SumsUp)


# Messages, and what each costs while it is held.


class RequestWarning(Struct, frozen=True):
    """An error that does not end its request: a part of the engine failed, and the answer goes on without it."""

    error: OmniError


class InputHeard(Struct, frozen=True):
    """A message: all input before a mark was judged, and its events were sent; see ``TurnListener.mark``."""


ServerMessage: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | RequestWarning
    | InputHeard
    | ResponseStartedFrame
    | SessionCreatedFrame
    | SessionUpdatedFrame
    | InputAckFrame
    | HistoryTruncatedFrame
    | HistoryItemsFrame
    | SpeechStartedFrame
    | SpeechConfirmedFrame
    | SpeechDismissedFrame
    | SpeechStoppedFrame
    | BackchannelFrame
    | SessionClosingFrame
    | PongFrame
)

#: Messages with a ``sequence_id``, by which a client acknowledges what it has received.
OUTPUTS: Final = frozenset({OutputChunk, FinalChunk})
#: Messages that concern one connection only, and are not sent again over the next.
OF_THE_MOMENT: Final = frozenset(
    {InputHeard, InputAckFrame, PongFrame, BackchannelFrame, SessionClosingFrame, SessionCreatedFrame, SessionKeptFrame}
)

#: Messages that are never kept in a store: those of the moment, except the one that tells a client its first token.
UNKEPT: Final = OF_THE_MOMENT - {SessionCreatedFrame}

#: Bytes of a message besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: Bytes of a token with its log-probability.
LOGPROB_BYTES: Final = 128
#: Bytes of a moment in a final's times.
MOMENT_BYTES: Final = 64
#: Bytes of an exception besides its message.
ERROR_OVERHEAD_BYTES: Final = 512


def message_cost(message: ServerMessage) -> int:
    """Return the bytes that a message is charged with while it is held: an estimate that is quick to compute."""
    if type(message) is OutputChunk:
        size = MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
        if message.logprobs:
            size += LOGPROB_BYTES * sum(1 + len(one.top) for one in message.logprobs)
        return size
    if isinstance(message, FinalChunk):
        size = MESSAGE_OVERHEAD_BYTES + MOMENT_BYTES * len(message.times)
        return size + sum(4 * (len(one.title) + len(one.url)) for one in message.citations)
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return ERROR_OVERHEAD_BYTES + len(message.message)
    if isinstance(message, SessionUpdatedFrame | HistoryItemsFrame):
        return MESSAGE_OVERHEAD_BYTES + memory_of(message)
    if isinstance(message, BackchannelFrame):
        return MESSAGE_OVERHEAD_BYTES + len(message.payload)
    if isinstance(message, PongFrame):
        # It repeats what the client sent, which may be long; it is rare enough to be encoded for this.
        return MESSAGE_OVERHEAD_BYTES + len(encode_frame(message))
    return MESSAGE_OVERHEAD_BYTES


# Messages in a form that can be written to bytes.


class SavedError(Struct):
    """An error in a form that can be written to bytes: its code, and the attributes of the exception."""

    code: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: OmniError) -> SavedError:
        """Return the saved form of ``error``, without its cause and without the details that only the operator sees."""
        fields = vars(error).copy()
        if isinstance(error, EngineFailed):
            fields |= {"private": "", "logged": None}
        return cls(error.code, fields)

    def restored(self) -> OmniError:
        """Return the error. Raises KeyError for a code that this server does not know."""
        kind = _KINDS_OF_ERRORS[self.code]
        error = kind.__new__(kind, self.fields["message"])
        vars(error).update(self.fields)
        return error


class _SavedFinal(Struct, kw_only=True, omit_defaults=True):
    request_id: str
    sequence_id: int
    finish_reason: FinishReason
    usage: Usage
    finish_reasons: tuple[FinishReason, ...]
    foreign_reasons: tuple[str | None, ...]
    citations: tuple[UrlCitation, ...] = ()
    words: WordsKnown
    ref: str | None
    turn_id: str | None
    times: dict[str, int] = {}


class SavedMessage(Struct, omit_defaults=True):
    """A message of the server in a form that can be written to bytes.

    ``kind`` is the name of its class, ``content`` has its fields in MessagePack. If the message is an error, or a
    RequestWarning, ``errors`` has that error. For a final it has one entry for each warning, in order: an error, or
    None for an AnswerWarning, which is the next in ``warnings``.
    """

    kind: str
    content: bytes = b""
    errors: list[SavedError | None] = []
    warnings: list[AnswerWarning] = []

    @classmethod
    def of(cls, message: ServerMessage) -> SavedMessage:
        """Return the saved form of ``message``."""
        kind = type(message).__name__
        match message:
            case OmniError():
                return cls("OmniError", errors=[SavedError.of(message)])
            case RequestWarning(error=error):
                return cls(kind, errors=[SavedError.of(error)])
            case FinalChunk():
                fields = {name: getattr(message, name) for name in _SavedFinal.__struct_fields__}
                content = msgspec.msgpack.encode(_SavedFinal(**fields))
                errors = [SavedError.of(one) if isinstance(one, OmniError) else None for one in message.warnings]
                return cls(kind, content, errors, [one for one in message.warnings if isinstance(one, AnswerWarning)])
        return cls(kind, msgspec.msgpack.encode(message))

    def restored(self) -> ServerMessage:
        """Return the message. Raises LookupError, ValueError or msgspec.DecodeError if it did not come from ``of``."""
        if self.kind == "OmniError":
            (error,) = self._errors()
            return error
        if self.kind == "RequestWarning":
            (error,) = self._errors()
            return RequestWarning(error)
        if self.kind == "FinalChunk":
            final = msgspec.msgpack.decode(self.content, type=_SavedFinal)
            warnings = [*self.warnings]
            told = tuple(warnings.pop(0) if one is None else one.restored() for one in self.errors)
            return FinalChunk(**msgspec.structs.asdict(final), warnings=told)
        message: ServerMessage = msgspec.msgpack.decode(self.content, type=_KINDS[self.kind])
        return message

    def _errors(self) -> Iterator[OmniError]:
        return (one.restored() for one in self.errors if one is not None)


_KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        OutputChunk,
        ResponseStartedFrame,
        SessionUpdatedFrame,
        HistoryTruncatedFrame,
        HistoryItemsFrame,
        SpeechStartedFrame,
        SpeechConfirmedFrame,
        SpeechDismissedFrame,
        SpeechStoppedFrame,
    )
}


def _leaves(kind: type[OmniError]) -> Iterator[type[OmniError]]:
    for below in kind.__subclasses__():
        yield from _leaves(below)
        if "wire" in vars(below):
            yield below


_KINDS_OF_ERRORS: Final = {kind.wire.code: kind for kind in _leaves(OmniError)}
