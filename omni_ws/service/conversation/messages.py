"""What a session sends, and its limits: messages, the outbox they wait in, and the journal of those that were sent.

A conversation has one owner at a time: the connection of a live session, a Mode B session, or an HTTP request. It is
set by ``Conversation.attach`` and cleared by ``Conversation.detach``; in between nobody is notified of anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from omni_ws.core.chunks import FinalChunk, OutputChunk, OutputModality
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget, memory_of
from omni_ws.errors import OmniError, SlowConsumer
from omni_ws.wire.server_frames import (
    HistoryTruncatedFrame,
    InputAckFrame,
    PongFrame,
    ResponseStartedFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionUpdatedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
    encode_frame,
)

#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes
#: leaves out the overhead of a chunk, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18
#: Results of tools in one request, which are kept by their ids until it ends, also where they are empty.
MAX_TOOL_RESULTS: Final = 1 << 10
#: How long a turn whose answer was cut off may be written down.
ASR_TIMEOUT_SEC: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one conversation; those of its input stream are in ``stream``."""

    stream: StreamLimits
    #: Requests that may wait behind the one that is being answered.
    max_pending_requests: int = 4
    #: Tokens, by ``estimate_tokens`` and a rate of speech, of the history that the engine gets; 0 for none.
    max_history_tokens: int = 4096
    #: Seconds that recognition of a turn may take whose answer was cut off.
    asr_timeout_sec: float = ASR_TIMEOUT_SEC


# Messages, and what each costs while it is held.


class RequestWarning(Struct, frozen=True):
    """An error that does not end its request: a part of the engine failed, and the answer goes on without it."""

    error: OmniError


ServerMessage: TypeAlias = (
    OutputChunk
    | FinalChunk
    | OmniError
    | RequestWarning
    | ResponseStartedFrame
    | SessionCreatedFrame
    | SessionUpdatedFrame
    | InputAckFrame
    | HistoryTruncatedFrame
    | SpeechStartedFrame
    | SpeechStoppedFrame
    | SessionClosingFrame
    | PongFrame
)

#: Messages with a ``sequence_id``, by which a client acknowledges what it has received.
OUTPUTS: Final = frozenset({OutputChunk, FinalChunk})
#: Messages that concern one connection only, and are not sent again over the next.
OF_THE_MOMENT: Final = frozenset({InputAckFrame, PongFrame, SessionClosingFrame, SessionCreatedFrame})

#: Bytes of a message besides its content: the frame around it.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: Bytes of a token with its log-probability.
LOGPROB_BYTES: Final = 128
#: Bytes of an exception besides its message.
ERROR_OVERHEAD_BYTES: Final = 512


def message_cost(message: ServerMessage) -> int:
    """The bytes that a message is charged with while it is held; an estimate, cheap to make."""
    if type(message) is OutputChunk:
        size = MESSAGE_OVERHEAD_BYTES + len(message.payload) + 4 * len(message.text)
        if message.logprobs:
            size += LOGPROB_BYTES * sum(1 + len(one.top) for one in message.logprobs)
        return size
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return ERROR_OVERHEAD_BYTES + len(message.message)
    if isinstance(message, SessionUpdatedFrame):
        return MESSAGE_OVERHEAD_BYTES + memory_of(message)
    if isinstance(message, PongFrame):
        # It repeats what the client sent, which may be long; it is rare enough to be encoded for this.
        return MESSAGE_OVERHEAD_BYTES + len(encode_frame(message))
    return MESSAGE_OVERHEAD_BYTES


# How a conversation and its outbox notify those that use them. No method may raise.


class OutboxReader(Protocol):
    """Takes the messages of an outbox."""

    def write_now(self, output: OutputChunk) -> bool:
        """Write an output that found the outbox empty. Returns False, and the outbox queues it, where that must wait.

        It is called inside the call of the engine, and spares the queue: nothing is done twice for a piece that can go
        straight to the socket.
        """

    def output_ready(self) -> None:
        """The outbox was empty and has a message, which may be taken at once."""

    def output_has_room(self) -> None:
        """The outbox was full and has room again."""


class OutboxWriter(Protocol):
    """Fills an outbox."""

    def output_full(self) -> None:
        """The outbox has become full, and its ``get_timer`` earlier."""

    def output_stalled(self, seconds: float) -> None:
        """The outbox has room again after it was full for ``seconds``."""


class ConversationOwner(OutboxReader, Protocol):
    """Feeds a conversation with input and time, and takes its output."""

    def input_may_continue(self) -> None:
        """Input that was held back (see ``Conversation.input_full``) may be received again."""

    def timer_changed(self) -> None:
        """``Conversation.get_timer`` has become earlier, outside of a method that takes input."""


class Nobody:
    """Stands in for any of these where there is none."""

    def write_now(self, output: OutputChunk) -> bool:
        return False

    def output_ready(self) -> None:
        pass

    def output_has_room(self) -> None:
        pass

    def output_full(self) -> None:
        pass

    def output_stalled(self, seconds: float) -> None:
        pass

    def input_may_continue(self) -> None:
        pass

    def timer_changed(self) -> None:
        pass


NOBODY: Final = Nobody()


# The outbox.

#: Bytes that each session may queue even while the server as a whole holds too much.
FAIR_SHARE_BYTES: Final = 64 * 1024
#: Outputs that follow another this soon are written together. A server that is paced by a model or a microphone writes
#: each at once; one that has much to say at once makes fewer system calls.
COALESCE_SEC: Final = 0.001


class Outbox:
    """Messages in order, bounded in bytes, from several writers to one reader on the same event loop.

    Output waits for ``room``, then uses ``put_nowait``. Where it finds the outbox empty it goes to the reader at once,
    unless it follows another within COALESCE_SEC: then it is queued, with those that come behind it.

    Control messages use ``put_nowait`` alone, which never fails: they may make the outbox full, and the transport then
    stops reading the client that provokes them.

    The outbox is full with ``capacity`` bytes, or with FAIR_SHARE_BYTES while all sessions of the server together hold
    more than half of ``budget``; the other half is for input. A client that leaves it full for ``write_timeout``
    seconds is a SlowConsumer.

    With a ``journal_capacity``, messages that were taken are kept, up to that many bytes more, and ``rewind`` puts them
    back for a client that did not receive them.
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
        #: Bytes of the messages that were not taken.
        self.queued = 0
        #: Set by ``Conversation.attach``.
        self.reader: OutboxReader = NOBODY
        self.writer: OutboxWriter = NOBODY
        #: When an output last went to the reader at once.
        self.written_at = -math.inf
        self._write_timeout = write_timeout
        self._now = now
        self.budget = budget
        #: Each message with its cost.
        self._messages: deque[tuple[ServerMessage, int]] = deque()
        self._waiting: list[asyncio.Future[bool]] = []
        #: Since when the outbox is full; None while it has room.
        self.full_since: float | None = None
        self._journal = (
            Journal(journal_capacity, budget=budget, fair_share=FAIR_SHARE_BYTES) if journal_capacity else None
        )

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        """Whether output has to wait."""
        return self.full_since is not None

    def put_nowait(self, message: ServerMessage) -> None:
        """Queue a message, whether the outbox is full or not. The reader may take it before this returns."""
        messages = self._messages
        if type(message) is OutputChunk and not messages:
            now = self._now()
            if now - self.written_at >= COALESCE_SEC and self.reader.write_now(message):
                self.written_at = now
                if self._journal is not None:
                    self._keep(self._journal, message)
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
            self.writer.output_full()
        if len(messages) == 1:
            self.reader.output_ready()

    def _keep(self, journal: Journal, output: OutputChunk) -> None:
        """Record an output that was never queued."""
        cost = message_cost(output)
        if self.budget is not None:
            self.budget.charge(cost)
        journal.record(output, cost)

    async def room(self) -> None:
        """Wait until the outbox is not full, or ``wake_writers``."""
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
        """Remove and return the next message; None if there is none. The journal keeps it where there is one."""
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
        """Drop all queued and all journaled messages."""
        while self.take() is not None:
            pass
        if self._journal is not None:
            self._journal.clear()

    # resume

    @property
    def journaled(self) -> int:
        """Bytes in the journal."""
        return 0 if self._journal is None else self._journal.held

    def acknowledge(self, last_output: int) -> None:
        """The client has received every output up to this one: the journal drops them."""
        if self._journal is not None:
            self._journal.acknowledge(last_output)

    def can_rewind(self, last_output: int) -> bool:
        """Whether everything after this output is still here."""
        return self._journal is not None and self._journal.reaches(last_output)

    def rewind(self, last_output: int) -> int:
        """Queue again everything after this output, except messages of the moment. Requires ``can_rewind``.

        Returns the number of outputs that are queued now. The write time-out begins anew.
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
        """Drop the messages that concern a connection that is gone."""
        kept = [(message, cost) for message, cost in self._messages if type(message) not in OF_THE_MOMENT]
        dropped = self.queued - sum(cost for _, cost in kept)
        self._messages = deque(kept)
        self._give_back(dropped)

    def close(self) -> None:
        """Drop everything, for good. What a late writer queues is not charged to the budget."""
        self.clear()
        self.budget = None

    def get_timer(self) -> float | None:
        """When ``handle_timer`` is due; None while the outbox has room."""
        return None if self.full_since is None else self.full_since + self._write_timeout

    def handle_timer(self, now: float) -> None:
        """Raise SlowConsumer if the outbox has been full for ``write_timeout``."""
        if self.full_since is not None and now >= self.full_since + self._write_timeout:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds")

    def _make_room(self) -> None:
        if self.full_since is None or self._over_limit:
            return
        self.writer.output_stalled(self._now() - self.full_since)
        self.full_since = None
        self._wake_all(looks=False)
        self.reader.output_has_room()

    @property
    def _over_limit(self) -> bool:
        """Whether the limit, which depends on the load of the server, is reached."""
        if self.queued >= self.capacity:
            return True
        budget = self.budget
        return self.queued > FAIR_SHARE_BYTES and budget is not None and budget.over_half()


def _renumbered(message: ServerMessage, by: int) -> ServerMessage:
    if by and isinstance(message, OutputChunk):
        return msgspec.structs.replace(message, sequence_id=message.sequence_id - by)
    if by and isinstance(message, FinalChunk):
        return dataclasses.replace(message, sequence_id=message.sequence_id - by)
    return message


# The journal.


class JournalEntry(NamedTuple):
    """A message that was sent, and the bytes that it is charged with."""

    message: ServerMessage
    cost: int
    #: The number of the output; for any other message, that of the output that follows it. A client that has received
    #: exactly the outputs below this number lacks this message.
    number: int


class Journal:
    """Keeps the newest messages that were sent and not acknowledged, for resume, up to ``capacity`` bytes.

    While more than half of ``budget`` is used, it keeps ``fair_share`` bytes only.
    """

    def __init__(self, capacity: int, *, budget: ByteBudget | None = None, fair_share: int = 0) -> None:
        self.capacity = capacity
        self.held = 0
        self._budget = budget
        #: What is kept whatever the load of the server.
        self._least_limit = min(capacity, fair_share)
        self._entries: deque[JournalEntry] = deque()
        #: The number of the next output.
        self._next_output = 0
        #: The number of the newest message that was dropped: a client that has received less cannot resume.
        self._forgotten = -1

    def record(self, message: ServerMessage, cost: int) -> None:
        """Keep a message that was sent, and drop the oldest beyond the capacity. Its cost is in the budget already."""
        self._entries.append(JournalEntry(message, cost, self._next_output))
        if type(message) in OUTPUTS:
            self._next_output += 1
        self.held += cost
        while self.held > self._least_limit and self.held > self._limit:
            self._forget_oldest()

    def acknowledge(self, last_output: int) -> None:
        """Drop everything up to this output, which the client has received; at most up to the last that was sent."""
        last_output = min(last_output, self._next_output - 1)
        while self._entries and self._entries[0].number <= last_output:
            self._forget_oldest()

    def reaches(self, last_output: int) -> bool:
        """Whether this output was sent, and everything after it is kept."""
        return self._forgotten <= last_output < self._next_output

    def take_after(self, last_output: int) -> list[JournalEntry]:
        """Remove and return what was sent after this output, to be sent again. Requires ``reaches``."""
        self.acknowledge(last_output)
        again = list(self._entries)
        self._entries.clear()
        self.held = 0
        self._next_output = last_output + 1
        return again

    def clear(self) -> None:
        """Drop everything."""
        while self._entries:
            self._forget_oldest()

    @property
    def _limit(self) -> int:
        budget = self._budget
        if budget is not None and budget.over_half():
            return self._least_limit
        return self.capacity

    def _forget_oldest(self) -> None:
        entry = self._entries.popleft()
        self._forgotten = max(self._forgotten, entry.number)
        self.held -= entry.cost
        if self._budget is not None:
            self._budget.give(entry.cost)
