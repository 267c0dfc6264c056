"""An InputStream with the acknowledgements of a connection, and one beside a plain model of it: they must agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

from omni_ws.core.chunks import InputChunk, InputMode, Modality, StartTrigger
from omni_ws.core.input_stream import InputStream, StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import Diverted, InputRefused, RequestOpened, StreamEvent, TextRefused
from omni_ws.core.request_input import GenerationStarted, InputAppended, InputEnded, InputSettings, RequestInput
from omni_ws.core.start_policy import StartPolicy
from omni_ws.errors import (
    EngineOverloaded,
    InvalidValue,
    OmniError,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
    SessionTimeout,
)
from omni_ws.transport.native.endpoint import ACK_DELAY_SEC, ACK_EARLY_SEC, ACK_EVERY_CHUNKS, Acknowledgements

MIN_BYTES = 5
LIMITS = StreamLimits(reorder_window=8, reorder_timeout=10, session_timeout=30, max_chunk_bytes=12, max_held_bytes=40)
#: Room of the whole server; other sessions come and go in it.
BUDGET_BYTES = 48

#: What happened to which request, by the number of the request.
Happening: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class _Request:
    number: int
    mode: InputMode
    open: bool = True
    started: bool = False
    #: How often its input ended: by its end, a cancellation, an abandonment or an expiry.
    ends: int = 0
    total: int = 0
    after_start: int = 0
    held: int = 0
    waiting: list[bytes] = field(default_factory=list)

    def end(self) -> None:
        self.open = False
        self.ends += 1


class InputStreamModel:
    """What an InputStream should do, written for clarity: no fast path, everything counted anew."""

    def __init__(self, *, single_request: bool) -> None:
        self.single_request = single_request
        self.now: float = 0
        self.mode = InputMode.EXTEND
        self.reject = False
        self.answering = False
        self.elsewhere = 0
        self.next = 0
        self.received_bytes = 0
        self.ahead: dict[int, InputChunk | None] = {}
        self.requests: list[_Request] = []
        self.current: _Request | None = None
        self.last_activity: float = 0
        self.gap_since: float | None = None
        self.accepted = 0
        self.accepted_since: float | None = None
        self.ack_now = False
        self._numbered: bool | None = None
        self._finish_after: set[int] = set()

    @property
    def held_bytes(self) -> int:
        waiting = sum(len(chunk.payload) for chunk in self.ahead.values() if chunk is not None)
        return waiting + sum(request.held for request in self.requests)

    @property
    def over(self) -> bool:
        return self.single_request and bool(self.requests) and self.current is None

    @property
    def ack_due(self) -> bool:
        return self.ack_now or self.accepted >= ACK_EVERY_CHUNKS

    def timer(self) -> float | None:
        deadlines: list[float] = []
        if not self.answering:
            deadlines.append(self.last_activity + LIMITS.session_timeout)
        if self.gap_since is not None:
            deadlines.append(self.gap_since + LIMITS.reorder_timeout)
        return min(deadlines, default=None)

    def ack_timer(self) -> float:
        return math.inf if self.accepted_since is None else self.accepted_since + ACK_DELAY_SEC

    def frame_received(self) -> None:
        if self.now + ACK_EARLY_SEC >= self.ack_timer():
            self.ack_now = True

    def receive(self, chunk: InputChunk) -> list[Happening]:
        if self._repeats_the_end(chunk):
            self.ack_now = True
            return []
        numbered = chunk.sequence_id is not None
        if self._numbered is None:
            self._numbered = numbered
        if numbered is not self._numbered:
            raise InvalidValue("refused")
        if len(chunk.payload) > LIMITS.max_chunk_bytes:
            raise PayloadTooLarge("refused")
        return self._place(self.next if chunk.sequence_id is None else chunk.sequence_id, chunk)

    def refuse(self, sequence_id: int) -> list[Happening]:
        return self._place(sequence_id, None)

    def finish(self) -> list[Happening]:
        if self.ahead:
            self._finish_after.add(max(self.ahead))
            return []
        return self._finish()

    def cancel(self) -> None:
        self.drop_waiting()
        request, self.current = self.current, None
        if request is not None and request.open:
            request.end()

    def drop_waiting(self) -> None:
        if self.ahead:
            self.next = max(self.ahead) + 1
            self.ahead.clear()
            self.ack_now = True
        self.gap_since = None
        self._finish_after.clear()

    def _place(self, sequence_id: int, chunk: InputChunk | None) -> list[Happening]:
        size = 0 if chunk is None else len(chunk.payload)
        if sequence_id < self.next or sequence_id in self.ahead:
            self.ack_now = True
            return []
        inside = sequence_id < self.next + LIMITS.reorder_window
        if self.single_request and chunk is not None and inside and self._contradicts_the_end(sequence_id, chunk):
            raise SessionConflict("refused")
        if sequence_id > self.next:
            if not inside:
                raise ReorderWindowExceeded("refused")
            if self.reject:
                raise OutOfOrder("refused")
            self._need(size)
            self.ahead[sequence_id] = chunk
            if self.gap_since is None:
                self.gap_since = self.now
            return []
        if chunk is not None and self._keeps():
            self._need(size)
        happenings = self._pass(chunk)
        released = 0
        while self.next in self.ahead:
            happenings += self._pass(self.ahead.pop(self.next))
            released += 1
        if released:
            self.ack_now = True
            self.gap_since = self.now if self.ahead else None
        if self.over:
            self.drop_waiting()
        self.accepted += 1
        if self.accepted_since is None:
            self.accepted_since = self.now
        return happenings

    def _contradicts_the_end(self, sequence_id: int, chunk: InputChunk) -> bool:
        past_the_end = self.over or any(sequence_id > end for end in self._ends)
        behind = [one for number, one in self.ahead.items() if number > sequence_id and one is not None]
        return past_the_end or (chunk.end_of_input and not all(map(_is_bare_end, behind)))

    def _repeats_the_end(self, chunk: InputChunk) -> bool:
        if not self.single_request or not _is_bare_end(chunk):
            return False
        return self.over or any(chunk.sequence_id is None or chunk.sequence_id > end for end in self._ends)

    @property
    def _ends(self) -> list[int]:
        waiting = [number for number, one in self.ahead.items() if one is not None and one.end_of_input]
        return [*waiting, *self._finish_after]

    def _keeps(self) -> bool:
        request = self.current
        return request is None or (request.open and (not request.started or request.mode is InputMode.EXTEND))

    def _need(self, size: int) -> None:
        if not size:
            return
        if self.held_bytes + size > LIMITS.max_held_bytes:
            raise PayloadTooLarge("refused")
        if self.held_bytes + self.elsewhere + size > BUDGET_BYTES:
            raise EngineOverloaded("refused")

    def _pass(self, chunk: InputChunk | None) -> list[Happening]:
        sequence_id = self.next
        self.next += 1
        happenings = [] if chunk is None else self._deliver(chunk, sequence_id)
        if sequence_id in self._finish_after:
            self._finish_after.discard(sequence_id)
            happenings += self._finish()
        return happenings

    def _deliver(self, chunk: InputChunk, sequence_id: int) -> list[Happening]:
        happenings: list[Happening] = []
        self.received_bytes += len(chunk.payload)
        if self.current is None and self.requests and _is_bare_end(chunk):
            self.ack_now = True
            return []
        if self.current is None:
            self.current = _Request(len(self.requests), self.mode)
            self.requests.append(self.current)
            happenings.append(("opened", self.current.number))
        request = self.current
        if request.open and chunk.payload:
            happenings += self._take_in(request, chunk, sequence_id)
        if chunk.end_of_input:
            happenings += self._finish(chunk.sequence_id)
            self.ack_now = True
        return happenings

    def _take_in(self, request: _Request, chunk: InputChunk, sequence_id: int) -> list[Happening]:
        size = len(chunk.payload)
        if self._keeps():
            request.held += size
        request.total += size
        if request.started:
            request.after_start += size
            if request.mode is InputMode.EXTEND:
                return [("appended", request.number, chunk.payload)]
            return []
        request.waiting.append(chunk.payload)
        if request.total < MIN_BYTES:
            return []
        return [self._start(request, StartTrigger.MIN_LENGTH, chunk.sequence_id)]

    def _start(self, request: _Request, trigger: StartTrigger, sequence_id: int | None) -> Happening:
        request.started = True
        payloads, request.waiting = tuple(request.waiting), []
        return ("started", request.number, trigger, sequence_id, payloads)

    def _finish(self, sequence_id: int | None = None) -> list[Happening]:
        request, self.current = self.current, None
        happenings: list[Happening] = []
        if request is None:
            if not self.single_request or self.requests:
                return []
            request = _Request(0, self.mode)
            self.requests.append(request)
            happenings.append(("opened", 0))
        self.ack_now = True
        if not request.open:
            return []
        if request.total and not request.started:
            happenings.append(self._start(request, StartTrigger.END_OF_INPUT, sequence_id))
        request.end()
        happenings.append(("ended", request.number, request.total == 0))
        return happenings


def _is_bare_end(chunk: InputChunk) -> bool:
    return chunk.end_of_input and not chunk.payload


def _outcome(call: Callable[[], list[Happening]]) -> list[Happening] | type[OmniError]:
    try:
        return call()
    except OmniError as error:
        return type(error)


class CheckedInputStream:
    """The stream and its model under one set of operations. AssertionError where they differ.

    Time stands still between calls of ``advance``.
    """

    def __init__(self, *, single_request: bool = False) -> None:
        self.model = InputStreamModel(single_request=single_request)
        self.budget = ByteBudget(BUDGET_BYTES)
        self.stream = AcknowledgedStream(
            LIMITS, self._settings, budget=self.budget, now=0, single_request=single_request
        )
        self.sessions: list[RequestInput] = []
        self.closed = False

    def receive(self, sequence_id: int | None, payload: bytes, *, end_of_input: bool = False) -> None:
        chunk = InputChunk(Modality.AUDIO, payload, sequence_id, None, None, end_of_input)
        self._both(
            lambda: self.stream.receive_chunk(chunk, now=self.model.now),
            lambda: self.model.receive(chunk),
        )

    def refuse(self, sequence_id: int) -> None:
        self._both(lambda: self.stream.refuse(sequence_id, now=self.model.now), lambda: self.model.refuse(sequence_id))

    def finish(self) -> None:
        self._both(lambda: self.stream.finish(now=self.model.now), self.model.finish)

    def cancel(self) -> None:
        self.stream.cancel(now=self.model.now)
        self._told(self.model.cancel)

    def drop_waiting(self) -> None:
        self.stream.drop_waiting(now=self.model.now)
        self.stream.acks.received(self.model.now)
        self._told(self.model.drop_waiting)

    def abandon(self, number: int) -> None:
        if number < len(self.sessions):
            self.stream.abandon(self.sessions[number])
            request = self.model.requests[number]
            if request.open:
                request.end()
        self.check()

    def take(self, number: int, byte_count: int) -> None:
        """The engine takes some of what is held of a request."""
        if number < len(self.sessions):
            request = self.model.requests[number]
            self.stream.taken(self.sessions[number], byte_count)
            request.held -= min(byte_count, request.held)
        self.check()

    def forget(self, number: int) -> None:
        if number < len(self.sessions):
            self.stream.forget(self.sessions[number])
            self.model.requests[number].held = 0
            assert self.sessions[number].held_bytes == 0
        self.check()

    def other_sessions_hold(self, byte_count: int) -> None:
        """The other sessions of the server hold so much now, or as much of it as there is room for."""
        byte_count = min(byte_count, BUDGET_BYTES - self.stream.held_bytes)
        self.budget.give(self.model.elsewhere)
        self.budget.take(byte_count)
        self.model.elsewhere = byte_count
        self.check()

    def set_mode(self, mode: InputMode) -> None:
        """How the requests that open from now on treat input after their start."""
        self.model.mode = mode

    def set_reject(self, reject: bool) -> None:
        self.model.reject = self.stream.reject_out_of_order = reject

    def set_answering(self, answering: bool) -> None:
        self.model.answering = self.stream.answering = answering
        self.check()

    def touch(self) -> None:
        self.model.last_activity = self.model.now
        self.stream.touch(now=self.model.now)
        self.check()

    def unheard(self) -> None:
        self.model.last_activity = self.model.now
        if self.model.gap_since is not None:
            self.model.gap_since = self.model.now
        self.stream.unheard(now=self.model.now)
        self.check()

    def take_ack(self) -> None:
        ack = self.stream.take_ack()
        if not self.closed:
            assert ack == (self.model.next, len(self.model.ahead), self.model.received_bytes)
            self.model.accepted, self.model.accepted_since, self.model.ack_now = 0, None, False
            assert not self.stream.acks.pending
        self.check()

    def advance(self, seconds: float) -> None:
        model = self.model
        model.now += seconds
        if self.closed:
            return
        gap = model.gap_since is not None and model.now >= model.gap_since + LIMITS.reorder_timeout
        idle = not model.answering and model.now >= model.last_activity + LIMITS.session_timeout
        try:
            self.stream.handle_timer(now=model.now)
        except SequenceGap:
            assert gap
            self.close()
        except SessionTimeout:
            assert idle
            assert not gap
            if model.current is not None and model.current.open:
                model.current.end()
            self.close()
        else:
            assert not gap
            assert not idle
            if model.now >= model.ack_timer():
                model.ack_now = True
        self.check()

    def close(self) -> None:
        self.closed = True
        self.stream.close()
        self.check()

    def check(self) -> None:
        model, stream = self.model, self.stream
        assert self.budget.used == stream.held_bytes + model.elsewhere
        if self.closed:
            assert stream.held_bytes == 0
            return
        assert stream.held_bytes == model.held_bytes
        assert [session.held_bytes for session in self.sessions] == [request.held for request in model.requests]
        assert [session.input_open for session in self.sessions] == [request.open for request in model.requests]
        assert [session.bytes_after_start for session in self.sessions] == [r.after_start for r in model.requests]
        assert all(request.ends == (0 if request.open else 1) for request in model.requests)
        # At most one request takes input at a time.
        assert [request for request in model.requests if request.open] in ([], [model.current])
        assert stream.current is (None if model.current is None else self.sessions[model.current.number])
        assert stream.opened == bool(model.requests)
        assert (stream.gap_since is not None) == bool(model.ahead)
        assert stream.ack_due == model.ack_due
        assert stream.ack_due or stream.acks_at == model.ack_timer()
        assert stream.get_timer() == model.timer()

    def check_forgotten(self) -> None:
        """With every request forgotten and what waits behind a gap dropped, nothing is held."""
        self.cancel()
        for number in range(len(self.sessions)):
            self.forget(number)
        assert self.stream.held_bytes == 0
        self.close()

    def _both(self, act: Callable[[], Sequence[StreamEvent]], expect: Callable[[], list[Happening]]) -> None:
        if self.closed:
            with suppress(InvalidValue, PayloadTooLarge, OutOfOrder, ReorderWindowExceeded, SessionConflict):
                act()
        else:
            expected = _outcome(expect)
            assert _outcome(lambda: [self._happening(event) for event in act()]) == expected
        self._told(lambda: None)

    def _told(self, tell: Callable[[], None]) -> None:
        """The model is told of a frame without events, unless the stream is closed."""
        self.model.last_activity = self.model.now
        if not self.closed:
            tell()
            self.model.frame_received()
        self.check()

    def _happening(self, event: StreamEvent) -> Happening:
        match event:
            case RequestOpened(session=session):
                self.sessions.append(session)
                return ("opened", len(self.sessions) - 1)
            case GenerationStarted(trigger=trigger, sequence_id=sequence_id, chunks=chunks):
                payloads = tuple(chunk.payload for chunk in chunks)
                return ("started", len(self.sessions) - 1, trigger, sequence_id, payloads)
            case InputAppended(chunk=chunk):
                return ("appended", len(self.sessions) - 1, chunk.payload)
            case InputEnded(error=error):
                return ("ended", len(self.sessions) - 1, error is not None)
            case Diverted() | TextRefused() | InputRefused():
                raise AssertionError("nothing is diverted here, or no text, and no total is limited")

    def _settings(self) -> InputSettings:
        return InputSettings(start_policy=StartPolicy(min_bytes=MIN_BYTES), mode=self.model.mode)


Method = TypeVar("Method", bound=Callable[..., Any])


def _frame(method: Method) -> Method:
    """A method that stands for a frame, whatever it makes of that."""

    @wraps(method)
    def received(stream: AcknowledgedStream, *arguments: Any, now: float) -> Any:
        try:
            return method(stream, *arguments, now=now)
        finally:
            stream.acks.received(now)

    return cast("Method", received)


class AcknowledgedStream(InputStream):
    """Every call that stands for a frame may make an acknowledgement due, which ``take_ack`` sends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Whether one is to be sent.
        self.ack_due = False
        self.acks = Acknowledgements(self, self.wait, self._send)

    def take_ack(self) -> tuple[int, int, int]:
        self.ack_due = False
        self.acks.sent()
        self.acks.stop()
        return self.reorder.next_sequence_id, self.buffered_chunks, self.received_bytes

    @property
    def acks_at(self) -> float:
        """When one is due if no more frames arrive."""
        return self.acks.due_at

    def wait(self, when: float, waiting: Acknowledgements) -> None:
        """As the clock of the acknowledgements."""
        assert waiting.due_at == when

    def _send(self) -> None:
        self.ack_due = True

    receive_chunk = _frame(InputStream.receive_chunk)
    refuse = _frame(InputStream.refuse)
    finish = _frame(InputStream.finish)
    cancel = _frame(InputStream.cancel)

    def handle_timer(self, *, now: float) -> None:
        super().handle_timer(now=now)
        if now >= self.acks.due_at < math.inf:
            self.acks.acknowledge()
