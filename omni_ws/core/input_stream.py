"""InputStream: the ordered chunks of one session, cut into requests.

One reorder buffer for the whole session, one StreamingInputSession for each request in it, and three clocks: the gap
that is not filled, the silence that lasts too long, the acknowledgement that is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from omni_ws.core.acknowledgements import Acknowledgements
from omni_ws.core.chunks import InputChunk, StartTrigger
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import Arrival, ReorderBuffer
from omni_ws.core.session import InputSettings, StreamingInputSession
from omni_ws.core.stream_events import Diverted, InputAck, RequestOpened, StreamEvent
from omni_ws.errors import (
    InvalidValue,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
    SessionTimeout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """``max_held_bytes`` caps what the engine has not taken over yet, ``max_total_bytes`` all that ever comes, where it
    is not None. Times in seconds."""

    reorder_window: int = 256
    reorder_timeout: float = 10
    session_timeout: float = 300
    max_chunk_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    max_total_bytes: int | None = None


class _Consumed:
    """Stands in the reorder buffer for a chunk that was refused: its number is used up."""


_CONSUMED: Final = _Consumed()


class InputStream:
    """``settings`` gives the input settings of a request that opens now.

    ``budget`` is shared by all streams of the server. ``now`` is any monotonic clock in seconds. A chunk that is
    refused with an exception leaves everything as it was; whether the stream is over then is the caller's decision.
    """

    def __init__(
        self,
        limits: StreamLimits,
        settings: Callable[[], InputSettings],
        *,
        budget: ByteBudget,
        now: float,
        single_request: bool = False,
    ) -> None:
        self.limits = limits
        #: Whether a chunk after the end of the first request is a conflict instead of a second request.
        self.single_request = single_request
        self.reject_out_of_order = False
        #: Whether input, once in order, becomes Diverted events: somebody else finds out which request it belongs to.
        self.diverting = False
        #: While an answer runs nothing is idle; whoever runs answers keeps this current, and calls ``touch`` at the
        #: end of an answer, so that the silence is counted from there.
        self.answering = False
        #: Bytes accepted or buffered that no engine has taken over.
        self.held_bytes = 0
        self.received_bytes = 0
        #: Of ``held_bytes`` those that wait behind a gap.
        self._waiting_bytes = 0
        self.duplicates = 0
        #: The request whose input is open, or whose rest is being swallowed because it failed.
        self.current: StreamingInputSession | None = None
        self._settings = settings
        self._budget = budget
        #: For others to look at.
        self.reorder: ReorderBuffer[InputChunk | _Consumed] = ReorderBuffer(limits.reorder_window)
        #: Whether chunks have numbers; None before there is any.
        self.numbered: bool | None = None
        #: Numbers after which an end of input takes effect that came while a gap was open.
        self._finish_after: set[int] = set()
        #: The last number of a single request, where it is known and there may still be a gap before it.
        self._ends_at: int | None = None
        #: Whether any chunk has come, and whether one has opened a request.
        self.opened = False
        self._had_request = False
        self._closed = False
        self._last_activity = now
        #: Since when a chunk is missing before others that have come.
        self.gap_since: float | None = None
        self.acks = Acknowledgements()

    # input

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> Sequence[StreamEvent]:
        """One chunk as it arrived.

        Raises PayloadTooLarge and ReorderWindowExceeded, which end the session; OutOfOrder and EngineOverloaded,
        after which the same number may come again; InvalidValue when chunks with and without numbers are mixed;
        SessionConflict after the end of a single request.
        """
        self._last_activity = now
        reorder = self.reorder
        sequence_id = chunk.sequence_id
        if chunk.end_of_input and self._repeats_end(chunk):
            self.acks.due = True
            return []
        if sequence_id is None or not self.numbered:
            sequence_id = self._number(chunk)
        size = len(chunk.payload)
        if size > self.limits.max_chunk_bytes:
            raise PayloadTooLarge(
                f"a chunk may hold {self.limits.max_chunk_bytes} bytes, this one has {size}",
                param="payload",
                sequence_id=chunk.sequence_id,
            )
        if sequence_id == reorder.next_sequence_id and self.gap_since is None:
            # The path of nearly every frame of nearly every stream.
            events = self._deliver(chunk)
            reorder.next_sequence_id = sequence_id + 1
            self.acks.accepted(now)
            return events
        return self._place(sequence_id, chunk, size, now)

    def refuse(self, sequence_id: int, *, now: float) -> Sequence[StreamEvent]:
        """A chunk was refused whose number could be read: the number is used up and leaves no gap.

        Raises ReorderWindowExceeded and OutOfOrder, as ``receive_chunk`` does.
        """
        self._last_activity = now
        return self._place(sequence_id, _CONSUMED, 0, now)

    def finish(self, *, now: float) -> Sequence[StreamEvent]:
        """The end of input, once everything that is buffered now has been released. Idempotent."""
        self._last_activity = now
        highest = self.reorder.highest
        if highest is not None:
            self._finish_after.add(highest)
            self._ends_at = highest if self._ends_at is None else self._ends_at  # the first end counts
            return []
        return self._finish()

    def admit(self, chunk: InputChunk, *, by_speech: bool = False) -> Sequence[StreamEvent]:
        """A chunk whose bytes are held already joins the open request, or opens the next one."""
        if self.current is not None and not self.current.keeps_input:
            self._release(len(chunk.payload))
        return self._assign(chunk, by_speech=by_speech)

    def end_input(self, trigger: StartTrigger, sequence_id: int | None) -> Sequence[StreamEvent]:
        """The input of the open request ends here, whatever is diverted; nothing happens where none is open."""
        session, self.current = self.current, None
        return [] if session is None else [*session.finish(sequence_id, trigger=trigger)]

    def reweigh(self, difference: int) -> None:
        """What is held without belonging to a request has become this much more, or less where it is negative."""
        self._release(-difference)

    def cancel(self, *, now: float) -> None:
        """Close the input that is open, or is being swallowed: the next chunk opens a new request."""
        self.drop_waiting(now=now)
        session, self.current = self.current, None
        if session is not None:
            session.cancel()

    def drop_waiting(self, *, now: float) -> None:
        """Give up on what waits behind a gap; numbering goes on after the highest number that waited."""
        self._last_activity = now
        for item in self.reorder.discard():
            self.acks.due = True
            if isinstance(item, InputChunk):
                self._release(len(item.payload))
        self._waiting_bytes = 0
        self.gap_since = None
        self._finish_after.clear()
        self._ends_at = None

    def abandon(self, session: StreamingInputSession) -> None:
        """The request is over before its input is: what still comes of it is swallowed, up to its end."""
        session.fail()

    def touch(self, *, now: float) -> None:
        """Any sign of life of the client."""
        self._last_activity = now

    def unheard(self, *, now: float) -> None:
        """Until now the client was not read, or not there: neither its silence nor its gap counts."""
        self._last_activity = now
        if self.gap_since is not None:
            self.gap_since = now

    def taken(self, session: StreamingInputSession, byte_count: int) -> None:
        """The engine took over this much of what is held of a request; what was forgotten is not taken once more."""
        byte_count = min(byte_count, session.held_bytes)
        session.held_bytes -= byte_count
        self._release(byte_count)

    def forget(self, session: StreamingInputSession) -> None:
        """The request is over: nothing of it is held any more."""
        self.taken(session, session.held_bytes)

    def close(self) -> None:
        """The session is over: nothing is held any more, and nothing that still comes is counted."""
        self._release(self.held_bytes)
        self._closed = True

    # acknowledgements

    def take_ack(self) -> InputAck:
        self.acks.sent()
        return InputAck(self.reorder.next_sequence_id, len(self.reorder), self.received_bytes)

    # time

    def get_timer(self) -> float | None:
        """When ``handle_timer`` has something to do at the earliest."""
        when = math.inf if self.answering else self._last_activity + self.limits.session_timeout
        if self.gap_since is not None:
            when = min(when, self.gap_since + self.limits.reorder_timeout)
        if (ack := self.acks.get_timer()) is not None:
            when = min(when, ack)
        return None if when == math.inf else when

    def handle_timer(self, *, now: float) -> None:
        """Raises SequenceGap or SessionTimeout when their time has come; otherwise an acknowledgement may be due."""
        if self.gap_since is not None and now >= self.gap_since + self.limits.reorder_timeout:
            raise self.gap_error()
        if not self.answering and now >= self._last_activity + self.limits.session_timeout:
            if self.current is not None and self.current.input_open:
                self.current.expire()
            raise SessionTimeout(f"nothing came for {self.limits.session_timeout:g} seconds")
        self.acks.handle_timer(now=now)

    def gap_error(self) -> SequenceGap:
        missing = self.reorder.missing
        assert missing is not None
        numbers = str(missing.start) if len(missing) == 1 else f"{missing.start} to {missing.stop - 1}"
        return SequenceGap(f"chunk {numbers} did not arrive", param="sequence_id", sequence_id=missing.start)

    # inside

    def _number(self, chunk: InputChunk) -> int:
        numbered = chunk.sequence_id is not None
        if self.numbered is None:
            self.numbered = numbered
        elif self.numbered is not numbered:
            raise InvalidValue(
                "either every chunk has a sequence_id or none has", param="sequence_id", sequence_id=chunk.sequence_id
            )
        return self.reorder.next_sequence_id if chunk.sequence_id is None else chunk.sequence_id

    def _place(self, sequence_id: int, item: InputChunk | _Consumed, size: int, now: float) -> Sequence[StreamEvent]:
        arrival = self.reorder.classify(sequence_id)
        if self.single_request and arrival in (Arrival.NEXT, Arrival.AHEAD) and isinstance(item, InputChunk):
            self._check_end(sequence_id, item)
        match arrival:
            case Arrival.NEXT:
                return self._fill(item, now)
            case Arrival.DUPLICATE:
                self.duplicates += 1
                self.acks.due = True
            case Arrival.AHEAD if self.reject_out_of_order:
                raise OutOfOrder(
                    f"expected chunk {self.reorder.next_sequence_id}", param="sequence_id", sequence_id=sequence_id
                )
            case Arrival.AHEAD:
                self._check_total(size)
                self._hold(size)
                self._waiting_bytes += size
                self.reorder.hold(sequence_id, item, now=now)
                if isinstance(item, InputChunk) and item.end_of_input:
                    self._ends_at = sequence_id  # nothing but bare ends stands behind it
                if self.gap_since is None:
                    self.gap_since = now
            case Arrival.BEYOND_WINDOW:  # pragma: no branch
                raise ReorderWindowExceeded(
                    f"chunk {self.reorder.next_sequence_id} is missing and chunk {sequence_id} is "
                    f"{self.limits.reorder_window} or more ahead of it",
                    param="sequence_id",
                    sequence_id=sequence_id,
                )
        return []

    def _check_end(self, sequence_id: int, chunk: InputChunk) -> None:
        """Nothing stands behind the end of a single request, whichever of the two arrives first."""
        if chunk.end_of_input:
            for behind, item in self.reorder.behind(sequence_id):
                if isinstance(item, InputChunk) and not item.is_bare_end:
                    raise SessionConflict(
                        f"chunk {behind} is behind the end of the input", param="sequence_id", sequence_id=sequence_id
                    )
        if self._over or (self._ends_at is not None and sequence_id > self._ends_at):
            raise _ended(sequence_id)

    def _fill(self, item: InputChunk | _Consumed, now: float) -> Sequence[StreamEvent]:
        """The item is the next one: pass it on with whatever it releases."""
        # Delivered before it is released: where there is no room for it, its number may come again.
        events: list[StreamEvent] = [*self._deliver(item)] if isinstance(item, InputChunk) else []
        following = self.reorder.next_sequence_id + 1
        waiting = self.reorder.release(item, now=now)[1:]
        if waiting:
            self.acks.due = True
            # A gap that is left is another gap, with a clock of its own.
            self.gap_since = now if self.reorder else None
        for sequence_id, released in enumerate(waiting, following):
            if isinstance(released, InputChunk):
                self._release(len(released.payload))  # counted again, or not, where it goes now
                self._waiting_bytes -= len(released.payload)
                events += self._deliver(released)
            if sequence_id in self._finish_after:
                self._finish_after.discard(sequence_id)
                events += self._finish()
        if self.reorder and self._over:
            self.drop_waiting(now=now)  # more ends, for which nothing has to come any more
        self.acks.accepted(now)
        return events

    def _deliver(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        session, size = self.current, len(chunk.payload)
        if session is None and self._over:
            if chunk.is_bare_end:
                return []
            raise _ended(chunk.sequence_id)
        self._check_total(size)
        if size and (session is None or session.keeps_input or self.diverting):
            self._hold(size)
        self.received_bytes += size
        self.opened = True
        if chunk.end_of_input:
            self.acks.due = True
        return [Diverted(chunk)] if self.diverting else self._assign(chunk)

    def _assign(self, chunk: InputChunk, *, by_speech: bool = False) -> Sequence[StreamEvent]:
        session = self.current
        if session is None:
            if self._had_request and chunk.is_bare_end:
                return []
            self._had_request = True
            session = self.current = StreamingInputSession(self._settings())
            return [RequestOpened(session, by_speech), *self._assign(chunk)]
        if chunk.end_of_input:
            self.current = None
        if not session.input_open:
            return []
        if session.keeps_input:
            session.held_bytes += len(chunk.payload)
        return session.receive_chunk(chunk)

    def _repeats_end(self, chunk: InputChunk) -> bool:
        """Whether this is another end of a single request, which changes nothing, whatever its number."""
        if not self.single_request or chunk.has_content:
            return False
        number, ends_at = chunk.sequence_id, self._ends_at
        return self._over or (ends_at is not None and (number is None or number > ends_at))

    @property
    def _over(self) -> bool:
        return self.single_request and self.opened and self.current is None

    def _finish(self) -> Sequence[StreamEvent]:
        if self.diverting:
            self.acks.due = True
            return [Diverted(None)]
        if self.single_request and not self.opened:  # and what has an end and no input says so by itself
            return self._deliver(InputChunk.end())
        session, self.current = self.current, None
        if session is None:
            return []
        self.acks.due = True
        return [*session.finish()]

    def _check_total(self, size: int) -> None:
        most = self.limits.max_total_bytes
        if most is not None and self.received_bytes + self._waiting_bytes + size > most:
            raise PayloadTooLarge(f"the input has more than {most} bytes in all", param="payload")

    def _hold(self, size: int) -> None:
        if self._closed:
            return
        if self.held_bytes + size > self.limits.max_held_bytes:
            raise PayloadTooLarge(
                f"more than {self.limits.max_held_bytes} bytes are waiting that the engine has not taken over"
            )
        self._budget.take(size)
        self.held_bytes += size

    def _release(self, size: int) -> None:
        if self._closed:
            return
        self._budget.give(size)
        self.held_bytes -= size


def _ended(sequence_id: int | None) -> SessionConflict:
    return SessionConflict("the input has ended already", param="sequence_id", sequence_id=sequence_id)
