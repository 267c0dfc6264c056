"""InputStream: the input of one session, its chunks put into order and divided into requests.

An InputStream has one buffer of reorder.py for the whole session, one RequestInput for each request, and two deadlines:
one for the chunks that fill a gap, one for a client that sends nothing.
"""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality, StartTrigger
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import (
    Arrival,
    Diverted,
    InputRefused,
    OffsetBuffer,
    ReorderBuffer,
    ReorderStatistics,
    RequestOpened,
    SavedOffsets,
    StreamEvent,
    TextRefused,
)
from omni_ws.core.request_input import InputSettings, RequestInput
from omni_ws.errors import (
    InvalidValue,
    OmniError,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
    SessionTimeout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The most that an InputStream accepts, in chunks and bytes, and how long it waits, in seconds."""

    #: The most numbers by which a chunk may be ahead of a missing one.
    reorder_window: int = 256
    #: The time for which a chunk may be missing while later ones have arrived.
    reorder_timeout: float = 10
    #: The time for which the client may be silent.
    session_timeout: float = 300
    max_chunk_bytes: int = 4 << 20
    #: The most bytes that the engine has not taken over yet.
    max_held_bytes: int = 64 << 20
    #: The most bytes of the whole input, in a session of one request; otherwise of each request. None for no limit.
    max_total_bytes: int | None = None


#: The least time that stopped time-outs for silence and gaps have left when they continue.
READ_SEC: Final = 0.1

_TEXT: Final = Modality.TEXT  # a global is found faster than a member of an enum


class SavedInput(Struct, kw_only=True):
    """The state of an InputStream for serialisation: its numbers, and the chunks that wait for a missing one."""

    next_sequence_id: int
    numbered: bool | None
    #: By number; None stands for a chunk that was refused.
    waiting: list[tuple[int, InputChunk | None]]
    #: None if chunks have no offsets.
    offsets: SavedOffsets | None
    statistics: ReorderStatistics
    finish_after: list[int]
    ends_at: int | None
    received_bytes: int
    duplicates: int
    notable_events: int
    opened: bool
    had_request: bool
    next_ref: str | None
    #: The leading bytes of a character that the next chunk completes.
    text: InputChunk | None


class InputStream:
    """Receives the chunks of a session in any order, and returns the resulting StreamEvents, in order.

    Chunks are ordered by their numbers or by their offsets. Each belongs to the open request, or opens the next one;
    the end of an input closes its request. While a chunk is missing, later ones wait. The bytes received in total and
    the bytes held are checked against the limits.

    ``single_request``: content after the end of the first request is a conflict, not a second request. ``settings`` is
    called for the input settings of each request that opens. ``budget`` is shared by all streams of the
    server. ``now`` is the time of any monotonic clock, in seconds. A chunk that is refused with an exception changes
    nothing. ``completes`` is called with each tool result of an input, and must return whether this input now has all
    results that it waits for: the input then ends.
    """

    def __init__(
        self,
        limits: StreamLimits,
        settings: Callable[[], InputSettings],
        *,
        budget: ByteBudget,
        now: float,
        single_request: bool = False,
        completes: Callable[[InputChunk, RequestInput], bool] = lambda result, request_input: False,
    ) -> None:
        # 29 attributes: with more, CPython 3.11 gives each object keys of its own, and each frame costs a tenth more.
        self.limits = limits
        #: Whether a chunk after the end of the first request is a conflict instead of a second request.
        self.single_request = single_request
        #: The bytes that were accepted or buffered, and that no engine has taken over.
        self.held_bytes = 0
        #: Of these, the bytes of chunks that wait for a missing one.
        self.waiting_bytes = 0
        #: The bytes that were accepted in order.
        self.received_bytes = 0
        self._budget = budget
        self._closed = False
        #: Whether a chunk that has to wait for an earlier one is refused.
        self.reject_out_of_order = False
        #: Whether input, once in order, becomes Diverted events. Set by ``divert``.
        self.diverting = False
        #: Whether an answer runs: the session is not idle then. Set by ``note_answering``.
        self.answering = False
        #: While this is set, silence does not end the session, but still counts, and may end it afterwards.
        self._suspended = False
        self.duplicates = 0
        #: The request whose input is open, or the rest of whose input is discarded because it failed.
        self.current: RequestInput | None = None
        self._settings = settings
        self._completes = completes
        #: None stands for a refused chunk, whose number is used up.
        self.reorder: ReorderBuffer[InputChunk | None] = ReorderBuffer(limits.reorder_window)
        #: Whether chunks have numbers; None before the first chunk.
        self.numbered: bool | None = None
        #: Used in place of ``reorder`` if chunks have offsets.
        self.offsets: OffsetBuffer | None = None
        self._text = WholeCharacters()
        #: The numbers after which an end of input takes effect that arrived while an earlier chunk was missing.
        self._finish_after: set[int] = set()
        #: The last number of a single request, if it is known; chunks before it may still be missing.
        self._ends_at: int | None = None
        #: Whether any chunk was accepted.
        self.opened = False
        #: Whether any chunk has opened a request.
        self.had_request = False
        self._last_activity = now
        self._gap_timeout = limits.reorder_timeout
        #: The client's name for the request that opens next.
        self._next_ref: str | None = None
        #: Since when a chunk has been missing that later ones wait for; None if none is.
        self.gap_since: float | None = None
        #: Since when the clocks have been stopped.
        self._held_since: float | None = None
        #: The number of duplicates, filled gaps, ends of input and discarded chunks; each is acknowledged immediately.
        self.notable_events = 0

    # input

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> Sequence[StreamEvent]:
        """Receive one chunk, in the order of arrival, and return the events that it causes.

        Raises PayloadTooLarge and ReorderWindowExceeded, after which the caller has to end the session; OutOfOrder and
        EngineOverloaded, after which the same chunk may be sent again; InvalidValue if chunks with numbers, with
        offsets and with neither are mixed, or offsets of several modalities or units; SessionConflict for content after
        the end of a single request.
        """
        self._last_activity = now
        reorder = self.reorder
        sequence_id = chunk.sequence_id
        if chunk.end_of_input and self._repeats_end(chunk):
            self.notable_events += 1
            return []
        if sequence_id is None or not self.numbered:
            if chunk.offset is not None or self.offsets is not None:
                return self._receive_by_offset(chunk, now)
            sequence_id = self._number(chunk)
        size = len(chunk.payload)
        if size > self.limits.max_chunk_bytes:
            raise self._too_large(chunk)
        if sequence_id == reorder.next_sequence_id and self.gap_since is None:
            # The path of nearly every frame of nearly every stream.
            events = self._deliver(chunk)
            reorder.pass_over()
            return events
        return self._place(sequence_id, chunk, size, now)

    def refuse(self, sequence_id: int, *, now: float) -> Sequence[StreamEvent]:
        """Skip the number of a chunk that was refused; return the events of the chunks that waited for it.

        Does nothing if chunks have offsets. Raises ReorderWindowExceeded and OutOfOrder, as ``receive_chunk`` does.
        """
        self._last_activity = now
        return [] if self.offsets is not None else self._place(sequence_id, None, 0, now)

    def finish(self, *, now: float) -> Sequence[StreamEvent]:
        """End the input after everything that has arrived; return the events. Idempotent.

        If chunks wait for a missing one, the end takes effect once they are in order.
        """
        self._last_activity = now
        if self.offsets is not None:
            before = self.offsets.missing
            self.offsets.end_at(self.offsets.highest)
            self._watch_gap(self.offsets, before, now)
            return self._finish() if self.offsets.complete else []
        highest = self.reorder.highest
        if highest is not None:
            self._finish_after.add(highest)
            self._ends_at = highest if self._ends_at is None else self._ends_at  # the first end counts
            return []
        return self._finish()

    def admit(self, chunk: InputChunk, *, by_speech: bool = False) -> Sequence[StreamEvent]:
        """Assign a diverted chunk, whose bytes are counted already, to the open request or to a new one.

        ``by_speech``: it is audio in which speech was detected; a RequestOpened event says so.
        """
        if chunk.only_names:
            return self._name(chunk)
        if self.current is not None and not self.current.keeps_input:
            self._release(len(chunk.payload))
        return self._assign(chunk, by_speech=by_speech)

    def end_input(self, trigger: StartTrigger, sequence_id: int | None) -> Sequence[StreamEvent]:
        """End the input of the open request, if there is one, even while input is diverted; return the events.

        If the request has not started, it starts now: for the reason ``trigger``, at the chunk ``sequence_id``.
        """
        request_input, self.current = self.current, None
        return [] if request_input is None else [*self._text.end(), *request_input.finish(sequence_id, trigger=trigger)]

    def reserve(self, size: int) -> None:
        """Add ``size`` to the held bytes that belong to no request, before their memory is allocated.

        Raises PayloadTooLarge or EngineOverloaded if there is no room.
        """
        self._hold(size)

    def reweigh(self, difference: int) -> None:
        """Add ``difference``, which may be negative, to the held bytes that belong to no request."""
        self._release(-difference)

    def cancel(self, *, now: float) -> None:
        """Close the input that is open or being discarded, and drop waiting chunks: the next opens a new request."""
        self.drop_waiting(now=now)
        self._next_ref = None
        self._text.end()
        request_input, self.current = self.current, None
        if request_input is not None:
            request_input.cancel()

    def drop_waiting(self, *, now: float) -> None:
        """Discard the chunks that wait for a missing one. Numbering continues after the highest of their numbers."""
        self._last_activity = now
        if self.reorder.discard():
            self.notable_events += 1
        if self.offsets is not None:
            self.offsets.discard()
        self.release_waiting(self.waiting_bytes)
        self.gap_since = None
        self._finish_after.clear()
        self._ends_at = None

    def withdraw(self, request_input: RequestInput) -> None:
        """Undo the opening of a request. The next request gets the name that the client gave this one."""
        if self.current is request_input:
            self.current = None
            self._text.end()
        self._next_ref = self._next_ref or request_input.ref
        request_input.cancel()

    def abandon(self, request_input: RequestInput) -> None:
        """Discard the rest of the input of a request that ended before its input did."""
        request_input.fail()

    def touch(self, *, now: float) -> None:
        """Restart the time-out for a silent client, which has just sent something."""
        self._last_activity = now

    def divert(self, diverting: bool = True) -> None:
        """Set whether turn detection assigns input to requests: each chunk then becomes a Diverted event."""
        self.diverting = diverting

    def note_answering(self, answering: bool, *, now: float) -> bool:
        """Set whether an answer runs. If one has just ended, restart the time-out for silence and return True."""
        ends = self.answering and not answering
        self.answering = answering
        if ends:
            self.touch(now=now)
        return ends

    def suspend(self, suspended: bool) -> None:
        """Suspend the time-out for a silent client, or resume it: then silence during the suspension counts, too."""
        self._suspended = suspended

    def hold_clocks(self, *, now: float) -> None:
        """Stop the time-outs for silence and gaps while the client's messages are not read. Idempotent."""
        if self._held_since is None:
            self._held_since = now

    def release_clocks(self, *, now: float) -> None:
        """Continue the time-outs that ``hold_clocks`` stopped: the client's messages are read again. Idempotent.

        Each has at least ``READ_SEC`` left, to read the messages that the client has sent meanwhile.
        """
        held, self._held_since = self._held_since, None
        if held is None:
            return
        self._last_activity += now - max(held, self._last_activity)
        self._last_activity = max(self._last_activity, now + READ_SEC - self.limits.session_timeout)
        if self.gap_since is not None:
            self.gap_since += now - max(held, self.gap_since)
            self.gap_since = max(self.gap_since, now + READ_SEC - self._gap_timeout)

    def unheard(self, *, now: float) -> None:
        """Restart the time-outs for silence and gaps from 0: the client was not connected until now."""
        self._held_since = None
        self._last_activity = now
        if self.gap_since is not None:
            self.gap_since = now

    def taken(self, request_input: RequestInput, byte_count: int) -> None:
        """Release ``byte_count`` held bytes of a request, which the engine has taken over; after ``forget``, none."""
        self._release(request_input.release(byte_count))

    def forget(self, request_input: RequestInput) -> None:
        """Release all bytes that are held for a request, which has ended."""
        self.taken(request_input, request_input.held_bytes)

    def saved(self) -> SavedInput:
        """Return the state of the stream without the request whose input is open."""
        return SavedInput(
            next_sequence_id=self.reorder.next_sequence_id,
            numbered=self.numbered,
            waiting=self.reorder.behind(-1),
            offsets=None if self.offsets is None else self.offsets.saved(),
            statistics=self.reorder.statistics,
            finish_after=sorted(self._finish_after),
            ends_at=self._ends_at,
            received_bytes=self.received_bytes,
            duplicates=self.duplicates,
            notable_events=self.notable_events,
            opened=self.opened,
            had_request=self.had_request,
            next_ref=self._next_ref,
            text=self._text.partial,
        )

    def restore(self, saved: SavedInput, *, now: float) -> None:
        """Continue from the state of another stream. The time-outs for silence and gaps start now.

        Raises InvalidValue if the saved chunks with offsets overlap or are out of order.
        """
        self.reorder.restore(saved.next_sequence_id, saved.statistics)
        for number, chunk in saved.waiting:
            size = 0 if chunk is None else len(chunk.payload)
            self.release_waiting(-size)  # counted even if there is no room
            self.reorder.hold(number, chunk, now=now)
        if saved.offsets is not None:
            self.offsets = OffsetBuffer(self.limits.reorder_window)
            self.release_waiting(-self.offsets.restore(saved.offsets))
        self.numbered, self._ends_at, self._next_ref = saved.numbered, saved.ends_at, saved.next_ref
        self._finish_after = set(saved.finish_after)
        self.received_bytes, self.duplicates = saved.received_bytes, saved.duplicates
        self.notable_events, self.opened, self.had_request = saved.notable_events, saved.opened, saved.had_request
        self._text.restore(saved.text)
        self._last_activity = now
        gap = saved.waiting or (self.offsets is not None and self.offsets.missing is not None)
        self.gap_since = now if gap else None
        if self._ends_at is not None or (self.offsets is not None and self.offsets.end is not None):
            self.time_gaps(now=now)

    def was_at_rest(self, seconds: float) -> None:
        """Note, after ``restore``, that the stream was at rest for so long: its time-outs went on meanwhile."""
        self._last_activity -= seconds
        if self.gap_since is not None:
            self.gap_since -= seconds

    def go_on_with(self, request_input: RequestInput) -> None:
        """Set, after ``restore``, the request to which further chunks belong: its input is open, or being discarded."""
        self.current = request_input

    def hold_again(self, request_input: RequestInput | None, size: int) -> None:
        """Add ``size`` to the held bytes of a restored request, even beyond the limits. None: bytes of no request."""
        self._release(-size)
        if request_input is not None:
            request_input.hold(size)

    @property
    def buffered_chunks(self) -> int:
        """The number of chunks, or pieces of chunks, that wait for a missing one."""
        return len(self.reorder) if self.offsets is None else len(self.offsets)

    # time

    def leave_gaps(self) -> None:
        """Suspend the time-out for gaps until ``time_gaps`` is called."""
        self._gap_timeout = math.inf

    def time_gaps(self, *, now: float) -> None:
        """Start the time-out for gaps, since the end of the input is known. Idempotent."""
        if self.gap_since is not None and self._gap_timeout == math.inf:
            self._gap_timeout = self.limits.reorder_timeout
            self.gap_since = now if self._held_since is None else self._held_since

    def get_timer(self) -> float | None:
        """Return the earliest time at which ``handle_timer`` may raise; None if nothing can time out."""
        if self._held_since is not None:
            return None
        when = math.inf if self.answering or self._suspended else self._last_activity + self.limits.session_timeout
        if self.gap_since is not None:
            when = min(when, self.gap_since + self._gap_timeout)
        return None if when == math.inf else when

    def handle_timer(self, *, now: float) -> None:
        """Raise SequenceGap or SessionTimeout if one is due. Before SessionTimeout, the open input expires."""
        if self._held_since is not None:
            return
        if self.gap_since is not None and now >= self.gap_since + self._gap_timeout:
            raise self.gap_error()
        if not (self.answering or self._suspended) and now >= self._last_activity + self.limits.session_timeout:
            if self.current is not None and self.current.input_open:
                self.current.expire()
            raise SessionTimeout(f"no input for {self.limits.session_timeout:g} seconds")

    def gap_error(self) -> SequenceGap:
        if self.offsets is not None:
            return self.offsets.gap_error()
        missing = self.reorder.missing
        assert missing is not None
        last = "" if len(missing) == 1 else f" to {missing.stop - 1}"
        return SequenceGap(
            f"chunk {missing.start}{last} did not arrive", param="sequence_id", sequence_id=missing.start
        )

    # bytes

    def close(self) -> None:
        """Release all bytes. Later input is not counted."""
        self._release(self.held_bytes)
        self._closed = True

    def hold_waiting(self, size: int) -> None:
        """Count ``size`` more bytes of chunks that wait for a missing one.

        Raises PayloadTooLarge or EngineOverloaded if there is no room.
        """
        self._check_total(size)
        self._hold(size)
        self.waiting_bytes += size

    def release_waiting(self, size: int) -> None:
        self._release(size)
        self.waiting_bytes -= size

    def excess(self, total: int, sequence_id: int | None = None) -> PayloadTooLarge | None:
        """Return the error for an input of ``total`` bytes if they exceed the limit; otherwise None."""
        most = self.limits.max_total_bytes
        if most is None or total <= most:
            return None
        message = f"the input exceeds {most} bytes in total"
        return PayloadTooLarge(message, param="payload", sequence_id=sequence_id, of_request=not self.single_request)

    def _check_total(self, size: int) -> None:
        if self.single_request and (excess := self.excess(self.received_bytes + self.waiting_bytes + size)):
            raise excess

    def _hold(self, size: int) -> None:
        """Count ``size`` more bytes. Raises PayloadTooLarge or EngineOverloaded if there is no room for them."""
        if self._closed:
            return
        if self.held_bytes + size > self.limits.max_held_bytes:
            raise PayloadTooLarge(
                f"more than {self.limits.max_held_bytes} bytes of input are waiting for the engine; send more slowly"
            )
        self._budget.take(size)
        self.held_bytes += size

    def _release(self, size: int) -> None:
        if not self._closed:
            self._budget.give(size)
            self.held_bytes -= size

    # inside

    def _too_large(self, chunk: InputChunk) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"a chunk may hold {self.limits.max_chunk_bytes} bytes, this one has {len(chunk.payload)}",
            param="payload",
            sequence_id=chunk.sequence_id,
        )

    def _number(self, chunk: InputChunk) -> int:
        numbered = chunk.sequence_id is not None
        if self.numbered is None:
            self.numbered = numbered
        elif self.numbered is not numbered:
            raise InvalidValue(
                "either all chunks must have a sequence_id, or none", param="sequence_id", sequence_id=chunk.sequence_id
            )
        return self.reorder.next_sequence_id if chunk.sequence_id is None else chunk.sequence_id

    def _receive_by_offset(self, chunk: InputChunk, now: float) -> Sequence[StreamEvent]:
        bare_end = chunk.sequence_id is None and chunk.end_of_input and not chunk.has_content
        if (self.offsets is None and self.numbered is not None) or (chunk.offset is None and not bare_end):
            raise InvalidValue(
                "either all chunks must have an offset, or none", param="offset", sequence_id=chunk.sequence_id
            )
        if len(chunk.payload) > self.limits.max_chunk_bytes:
            raise self._too_large(chunk)
        if self.offsets is None:
            self.offsets = OffsetBuffer(self.limits.reorder_window)
        if chunk.offset is None:
            return self.finish(now=now)
        before = self.offsets.missing
        try:
            events = self._receive_piece(self.offsets, chunk)
        except OmniError:
            if not self.opened and not self.offsets and self.offsets.end is None:
                self.offsets = None  # nothing was accepted: the next chunk may have a number, an offset, or neither
            raise
        finally:
            if self.offsets is not None:
                self._watch_gap(self.offsets, before, now)
        return [*events, *self._finish()] if self.offsets.complete else events

    def _receive_piece(self, offsets: OffsetBuffer, chunk: InputChunk) -> list[StreamEvent]:
        self.duplicates += offsets.receive(chunk, in_order=self.reject_out_of_order, hold=self.hold_waiting)
        events: list[StreamEvent] = []
        for one in offsets.pass_on():
            self.release_waiting(len(one.payload))  # it is counted anew
            events += self._deliver_counted(one)
            self.reorder.pass_over()
        return events

    def _watch_gap(self, offsets: OffsetBuffer, before: range | None, now: float) -> None:
        gap = offsets.missing
        if gap is None:
            self.gap_since = None
        elif before is None or gap.stop > before.stop:  # a second gap, which has its own deadline
            self.gap_since = now

    def _place(self, sequence_id: int, item: InputChunk | None, size: int, now: float) -> Sequence[StreamEvent]:
        arrival = self.reorder.classify(sequence_id)
        if self.single_request and arrival in (Arrival.NEXT, Arrival.AHEAD) and item is not None:
            self._check_end(sequence_id, item)
        match arrival:
            case Arrival.NEXT:
                return self._fill(item, now)
            case Arrival.DUPLICATE:
                self.duplicates += 1
                self.notable_events += 1
            case Arrival.AHEAD if self.reject_out_of_order:
                raise OutOfOrder(
                    f"expected chunk {self.reorder.next_sequence_id}", param="sequence_id", sequence_id=sequence_id
                )
            case Arrival.AHEAD:
                self.hold_waiting(size)
                self.reorder.hold(sequence_id, item, now=now)
                if item is not None and item.end_of_input:
                    self._ends_at = sequence_id  # nothing but bare ends follows it
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
        """Raise SessionConflict for content after the end of a single request, even if the content arrived first."""
        for behind, item in self.reorder.behind(sequence_id) if chunk.end_of_input else ():
            if item is not None and not item.is_bare_end:
                raise SessionConflict(
                    f"chunk {behind} is after the end of the input", param="sequence_id", sequence_id=sequence_id
                )
        if self._over or (self._ends_at is not None and sequence_id > self._ends_at):
            raise _ended(sequence_id)

    def _fill(self, item: InputChunk | None, now: float) -> Sequence[StreamEvent]:
        """Accept the next item in order (None: a refused chunk), and the items that waited for it."""
        # Deliver before releasing: if there is no room for the item, its number may be sent again.
        events: list[StreamEvent] = [] if item is None else [*self._deliver(item)]
        following = self.reorder.next_sequence_id + 1
        waiting = self.reorder.release(item, now=now)[1:]
        if waiting:
            self.notable_events += 1
            # Another gap may remain, which has its own deadline.
            self.gap_since = now if self.reorder else None
        for sequence_id, released in enumerate(waiting, following):
            if released is not None:
                self.release_waiting(len(released.payload))  # counted again, or not, by ``_deliver_counted``
                events += self._deliver_counted(released)
            if sequence_id in self._finish_after:
                self._finish_after.discard(sequence_id)
                events += self._finish()
        if self.reorder and self._over:
            self.drop_waiting(now=now)  # repeated ends
        return events

    def _deliver(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        if chunk.ref is not None and chunk.only_names:
            return self._name_in_order(chunk)
        if chunk.modality is _TEXT or self._text.pending:
            return self._text.deliver(chunk, self._take_in)
        return self._take_in(chunk)

    def _deliver_counted(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        """Deliver a chunk that has waited since its arrival, when its bytes were counted.

        No limit refuses it any more, even if a character that it completes makes it up to three bytes longer.
        """
        if chunk.only_names:
            return self._name_in_order(chunk)
        return self._text.deliver(chunk, partial(self._take_in, counted=True))

    def _name_in_order(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        """Handle a chunk, now in order, that only names a request: divert it, or apply the name."""
        return [Diverted(replace(chunk, modality=_TEXT))] if self.diverting else self._name(chunk)

    def _name(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        """Name the request whose input is open, or else the one that opens next. Only the first name counts."""
        if self.current is not None and self.current.input_open:
            self.current.name(chunk)
        else:
            self._next_ref = self._next_ref or chunk.ref
        return []

    def _take_in(self, chunk: InputChunk, *, counted: bool = False) -> Sequence[StreamEvent]:
        request_input, size = self.current, len(chunk.payload)
        if request_input is None and self._over:
            if chunk.is_bare_end:
                return []
            raise _ended(chunk.sequence_id)
        if self.single_request and not counted:
            self._check_total(size)
        if size and (request_input is None or request_input.keeps_input or self.diverting):
            if counted:
                self._release(-size)
            else:
                self._hold(size)
        self.received_bytes += size
        self.opened = True
        if chunk.end_of_input:
            self.notable_events += 1
        return [Diverted(chunk)] if self.diverting else self._assign(chunk)

    def _assign(self, chunk: InputChunk, *, by_speech: bool = False) -> Sequence[StreamEvent]:
        request_input = self.current
        if request_input is None:
            if self.had_request and chunk.is_bare_end:
                return []
            self.had_request = True
            request_input = self.current = RequestInput(self._settings(), ref=self._next_ref)
            self._next_ref = None
            return [RequestOpened(request_input, by_speech), *self._assign(chunk)]
        if chunk.ref is not None:
            request_input.name(chunk)
        if chunk.end_of_input:
            self.current = None
        refused: Sequence[StreamEvent] = ()
        if self.limits.max_total_bytes is not None and not self.single_request and request_input.input_open:
            size = len(chunk.payload)
            excess = self.excess(request_input.received.bytes + size, chunk.sequence_id)
            if excess is not None:
                refused = [InputRefused(excess)]
                self._release(size if request_input.keeps_input else 0)
                request_input.fail()
        if not request_input.input_open:
            if chunk.tool_call_id is not None:
                self._completes(chunk, request_input)  # discarded with the input; the result may be sent again
            return refused
        events = request_input.receive_chunk(chunk)
        if chunk.tool_call_id is not None and self._completes(chunk, request_input):
            return [*events, *self.end_input(StartTrigger.END_OF_INPUT, chunk.sequence_id)]
        return events

    def _repeats_end(self, chunk: InputChunk) -> bool:
        """Return whether a chunk repeats the end of a single request, which changes nothing, whatever its number."""
        if not self.single_request or chunk.has_content:
            return False
        number, ends_at = chunk.sequence_id, self._ends_at
        return self._over or (ends_at is not None and (number is None or number > ends_at))

    @property
    def _over(self) -> bool:
        return self.single_request and self.opened and self.current is None

    def _finish(self) -> Sequence[StreamEvent]:
        if self.diverting:
            self.notable_events += 1
            return [Diverted(None)]
        if self.single_request and not self.opened:  # a request without input, which fails
            return self._deliver(InputChunk.end())
        request_input, self.current = self.current, None
        if request_input is None:
            return []
        self.notable_events += 1
        return [*self._text.end(), *request_input.finish()]


def _ended(sequence_id: int | None) -> SessionConflict:
    return SessionConflict("the input has already ended", param="sequence_id", sequence_id=sequence_id)


class WholeCharacters:
    """Checks the UTF-8 of chunks in order, and moves chunk boundaries to character boundaries.

    A character may be spread over consecutive chunks of the same text; the chunks passed on hold whole characters.
    Anything else that is not UTF-8 becomes a TextRefused event: an invalid chunk is discarded whole, a text that ends
    within a character loses only this character.
    """

    def __init__(self) -> None:
        #: The leading bytes of a character that the next chunk completes, as part of the chunk in which it begins.
        self._partial: InputChunk | None = None
        #: Whether the text so far ends within a character. Read for each chunk.
        self.pending = False

    @property
    def partial(self) -> InputChunk | None:
        """The leading bytes of a character that the next chunk completes."""
        return self._partial

    def restore(self, partial: InputChunk | None) -> None:
        """Restore the leading bytes of a character that the next chunk completes."""
        self._partial, self.pending = partial, partial is not None

    def deliver(
        self, chunk: InputChunk, take_in: Callable[[InputChunk], Sequence[StreamEvent]]
    ) -> Sequence[StreamEvent]:
        """Pass the chunk, cut to whole characters, to ``take_in``; return events for invalid text and those it returns.

        If ``take_in`` raises, the state is unchanged, and the client may send the chunk again.
        """
        try:
            chunk, partial, problem = self._check(chunk)
        except InvalidValue as error:
            return [TextRefused(error)]
        events = take_in(chunk)
        self._partial, self.pending = partial, partial is not None
        problems = [] if problem is None else [TextRefused(problem)]
        return [*problems, *(self.end() if chunk.end_of_input else ()), *events]

    def end(self) -> list[TextRefused]:
        """End the text; return a TextRefused if it ends within a character."""
        problem = _broken(self._partial)
        self._partial, self.pending = None, False
        return [] if problem is None else [TextRefused(problem)]

    def _check(self, chunk: InputChunk) -> tuple[InputChunk, InputChunk | None, InvalidValue | None]:
        """Return the chunk with whole characters only, the bytes left over, and an error.

        The error is set if the text before the chunk ends within a character. Raises InvalidValue if the chunk's own
        bytes are not UTF-8; the chunk is discarded then.
        """
        before = self._partial
        if not chunk.has_content:
            return chunk, before, None
        if chunk.modality is not Modality.TEXT:
            return chunk, None, _broken(before)
        if before is None and chunk.payload.isascii():
            return chunk, None, None
        problem = None
        if before is not None and before.tool_call_id != chunk.tool_call_id:  # results of different tools
            before, problem = None, _broken(before)
        data = chunk.payload if before is None else before.payload + chunk.payload
        try:
            _, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            data, problem = chunk.payload, _broken(before)
            try:
                _, used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                raise _not_text(chunk.sequence_id, chunk.ref, error.reason) from None
        left = None
        if used < len(data):
            begun = chunk if before is None or len(data) - used <= len(chunk.payload) else before
            left = replace(begun, payload=data[used:])
        return replace(chunk, payload=data[:used]), left, problem


def _broken(partial: InputChunk | None) -> InvalidValue | None:
    if partial is None:
        return None
    return _not_text(partial.sequence_id, partial.ref, "it ends inside a character, which was dropped")


def _not_text(sequence_id: int | None, ref: str | None, reason: str) -> InvalidValue:
    whose = "" if sequence_id is None else f" of chunk {sequence_id}"
    message = f"the text{whose} is not valid UTF-8: {reason}"
    return InvalidValue(message, param="payload", sequence_id=sequence_id, ref=ref)
